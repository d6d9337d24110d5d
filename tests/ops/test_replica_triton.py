"""Convolutions of several networks in one kernel, against PyTorch's in float64; opt-in as `tests/fused` are."""

import pytest
import torch
import torch.nn.functional as F

from tests.fused.conftest import unwritten_is_nan  # noqa: F401
from tests.fused.kernels import DEVICE, OPT_IN

pytestmark = OPT_IN


@pytest.mark.parametrize(
    ("sizes", "stride", "padding"),
    [
        ((2, 3, 1, 9, 8, 5, 5, 5), 1, 0),
        ((2, 2, 4, 7, 7, 8, 3, 3), 1, 0),
        ((3, 2, 8, 8, 9, 20, 3, 3), 2, 0),
        ((1, 2, 3, 6, 6, 4, 3, 2), 2, 1),
    ],
)
def test_convolution(sizes, stride, padding, monkeypatch):
    from torchcaps.ops.replica_conv import ReplicaConv

    b, r, c, h, w, o, tall, wide = sizes
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact = [torch.randn(s, dtype=torch.float64) for s in ((b, r, c, h, w), (r, o, c, tall, wide), (r, o))]
    single = [x.float().to(DEVICE).requires_grad_() for x in exact]
    exact = [x.detach().double().cpu().requires_grad_() for x in single]
    images, weight, bias = exact
    maps = F.conv2d(images.flatten(1, 2), weight.flatten(0, 1), bias.flatten(), stride, padding, groups=r)
    expected = maps.unflatten(1, (r, -1))
    found = ReplicaConv.apply(*single, stride, padding)
    assert found.flatten(1, 2).is_contiguous(memory_format=torch.channels_last)
    tops = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, single, tops.float().to(DEVICE))
    for ours, theirs in zip((found, *gradients), (expected, *torch.autograd.grad(expected, exact, tops)), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=1e-5, atol=2e-5)
