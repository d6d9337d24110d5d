"""Primary capsules over the whole map against plain PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, vmap

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.functional import squash, squash_exp
from torchcaps.layers import PrimaryCaps
from torchcaps.ops import backend

pytestmark = OPT_IN
SIZES = {  # images, types, dim, height, width
    "small": (3, 3, 4, 5, 7),
    "many images": (19, 5, 8, 3, 3),
    "large window": (2, 1, 2, 13, 12),
    "long capsules": (2, 3, 32, 2, 3),
    "one pixel": (1, 2, 1, 1, 1),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def fused(function, monkeypatch):
    """The function on Triton, which must not fall back to a convolution."""

    def run(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(F, "conv2d", None)
            return function(*inputs)

    return run


def capsules(layer):
    """Of features that lie with their channels last. Kernels take a bias in float32, a convolution in its dtype."""

    def run(features, weight, *bias):
        features = features.contiguous(memory_format=torch.channels_last)
        bias = [b.float() if F.conv2d is None else b for b in bias]
        given = dict(zip(("conv.weight", "conv.bias"), (weight, *bias), strict=False))
        return functional_call(layer, given, (features,)).poses

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "bias"), [(squash_exp, True), (squash, False)])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients(size, kind, bias, dtype, monkeypatch):
    n, types, dim, *window = SIZES[size]
    features = types * dim
    function = capsules(PrimaryCaps(features, types, dim, tuple(window), nonlinearity=kind, bias=bias, depthwise=True))
    inputs = [drawn(n, features, *window), drawn(features, 1, *window), *([drawn(features)] if bias else [])]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, dtype)


def test_replicas(monkeypatch):
    """As norms leave them: all replicas' channels last, side by side."""
    layer = PrimaryCaps(12, 3, 4, (5, 7), nonlinearity=squash_exp, depthwise=True)

    def one(features, weight, bias):
        return functional_call(layer, {"conv.weight": weight, "conv.bias": bias}, (features,)).poses

    def function(features, weight, bias):
        flat = features.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        return vmap(one, in_dims=(1, 0, 0))(flat.unflatten(1, (2, -1)), weight, bias)

    inputs = [drawn(3, 2, 12, 5, 7), drawn(2, 12, 1, 5, 7), drawn(2, 12)]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def test_nothing_has_a_gradient_that_is_a_number():
    layer = PrimaryCaps(8, 2, 4, (3, 3), nonlinearity=squash_exp, bias=False, depthwise=True).to(DEVICE)
    features = torch.zeros(2, 8, 3, 3, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    with backend("triton"):
        poses = layer(features).poses
    assert poses.shape == (2, 2, 4, 1, 1)
    assert not poses.any()
    assert torch.autograd.grad(poses.sum(), features)[0].isfinite().all()
