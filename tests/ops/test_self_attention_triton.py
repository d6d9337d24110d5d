"""Self-attention routing in one kernel against plain PyTorch: outputs and every gradient.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_self_attention_triton.py` on a CPU, or as it is where there is a GPU.
"""

from functools import partial

import pytest
import torch
from torch.func import vmap

from tests.fused.conftest import unwritten_is_nan  # noqa: F401
from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.ops import Votes, backend
from torchcaps.ops.self_attention_triton import takes
from torchcaps.routing import self_attention as routing
from torchcaps.routing.self_attention import self_attention_routing

pytestmark = OPT_IN
SIZES = {  # images, i, p, j, d
    "small": (2, 7, 5, 3, 6),
    "efficient": (3, 16, 8, 10, 16),
    "many images": (19, 3, 2, 4, 3),
    "alone": (1, 1, 1, 1, 1),
    "wide": (2, 5, 16, 2, 40),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def fused(function, monkeypatch):
    def run(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(routing, "_by_formula", None)
            return function(*inputs)

    return run


def routed(poses, weight, prior=None, **options):
    """What comes out is looked at in the dtype of the poses, as kernels have it."""
    found = self_attention_routing(Votes(poses, weight), prior, **options)
    return found.poses.to(poses.dtype), found.activations.to(poses.dtype)


def in_halves(poses, weight, prior=None):
    """Weights stay in float32 in a training step."""
    wide = weight.double() if poses.dtype == torch.float64 else weight.float()
    return routed(poses, wide, None if prior is None else prior.to(wide.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients(size, with_prior, dtype, monkeypatch):
    n, i, p, j, d = SIZES[size]
    inputs = [drawn(n, i, p), drawn(i, p, j, d) / p, *([drawn(i, j)] if with_prior else [])]
    assert_as_accurate(fused(in_halves, monkeypatch), on("torch", in_halves), inputs, dtype)


@pytest.mark.parametrize("axis", [0, 1])
def test_replicas(axis, monkeypatch):
    """Poses with the replicas' axis first or second, as convolutions leave them; a prior that all share."""

    def function(poses, weight, prior):
        return vmap(routed, in_dims=(axis, 0, None))(poses, weight, prior)

    poses = drawn(5, 7, 4).expand(2, 5, 7, 4) + torch.arange(2.0, device=DEVICE)[:, None, None, None]
    inputs = [poses.transpose(0, axis).contiguous(), drawn(2, 7, 4, 3, 6) / 4, drawn(7, 3)]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("which", [0, 1])
def test_either_output_alone(which, monkeypatch):
    def function(*inputs):
        return routed(*inputs)[which]

    inputs = [drawn(3, 7, 4), drawn(7, 4, 3, 6), drawn(7, 3)]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("layout", ["part of the children", "every second image", "one image for all"])
def test_poses_that_lie_apart(layout, monkeypatch):
    def function(poses, weight):
        some = {"part of the children": poses[:, :7], "every second image": poses[::2, :7]}
        return routed(some.get(layout, poses[:1, :7].expand(3, 7, 4)), weight)

    inputs = [drawn(5, 9, 4), drawn(7, 4, 3, 6)]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def test_layout_scale_and_nothing():
    poses, weight = drawn(3, 4, 7).mT, drawn(7, 4, 3, 6)
    ours, theirs = (on(name, partial(routed, scale=0.3))(poses, weight) for name in ("triton", "torch"))
    torch.testing.assert_close(ours, theirs)
    nothing = torch.zeros(2, 7, 4, device=DEVICE, requires_grad=True)
    with backend("triton"):
        for out in routed(nothing, weight):
            assert not out.any()
            assert not torch.autograd.grad(out.sum(), nothing, retain_graph=True)[0].isnan().any()


def test_what_does_not_fit_runs_in_pieces():
    assert takes(Votes(drawn(2, 16, 16), drawn(16, 16, 10, 16)))
    assert not takes(Votes(drawn(2, 17, 16), drawn(17, 16, 10, 16)))
    assert not takes(Votes(drawn(2, 16, 17), drawn(16, 17, 10, 16)))
    assert not takes(Votes(drawn(2, 16, 4), drawn(8, 4, 10, 8)))
    assert not takes(Votes(drawn(2, 16, 4), drawn(16, 2, 10, 8)))
    assert not takes(Votes(drawn(600, 16, 4), drawn(16, 4, 16, 16)))
