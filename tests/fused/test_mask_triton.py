"""Masked capsules in kernels against plain PyTorch."""

import pytest
import torch
from torch.func import vmap

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps import functional
from torchcaps.functional import mask_capsules

pytestmark = OPT_IN
TARGETS = [[0, 2], [3, -1], [-1, -1], [5, 5], [6, 0]]


def fused(function, monkeypatch):
    """The function on Triton, which must not fall back to the formula."""

    def run(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(functional.torch, "arange", None)
            return on("triton", function)(*inputs)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("objects", [1, 2])
def test_outputs_and_gradients(objects, dtype, monkeypatch):
    targets = torch.tensor(TARGETS, device=DEVICE)[:, :objects]
    poses = torch.randn(7, 5, 40, device=DEVICE).transpose(0, 1)

    def function(poses):
        return mask_capsules(poses, targets)

    assert_as_accurate(fused(function, monkeypatch), on("torch", function), [poses], dtype)


def test_replicas(monkeypatch):
    targets = torch.tensor(TARGETS, device=DEVICE)
    targets = torch.stack([targets, targets.flip(0), targets.roll(1, 0)], 1)

    def function(poses):
        return vmap(mask_capsules, in_dims=(0, 1))(poses, targets)

    poses = torch.randn(3, 5, 7, 4, device=DEVICE)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), [poses], torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4,)])
def test_targets_of_another_shape_are_left_to_torch(shape):
    poses, targets = torch.rand(4, 3, 5, device=DEVICE), torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    from torchcaps.fused.mask_triton import takes

    assert not takes(poses, targets)
    assert takes(poses, torch.zeros(4, 2, dtype=torch.int64, device=DEVICE))
