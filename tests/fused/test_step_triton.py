"""The loss terms of a whole network and every gradient of them, in kernels against plain PyTorch in float64."""

import pytest
import torch
from torch.func import functional_call

from tests.fused.kernels import DEVICE, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps import create_model
from torchcaps.data import Batch
from torchcaps.recipes import Recipe
from torchcaps.train.stacked import Stack
from torchcaps.train.step import loss_terms

pytestmark = OPT_IN
RECIPE = Recipe("efficient_capsnet", "digits", reconstruction=0.392, reconstruction_reduction="mean")


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def network():
    made = create_model("efficient_capsnet", image=(1, 10, 10), classes=3, first_kernel=3, strides=(1, 1, 1, 2))
    return made.to(DEVICE, memory_format=torch.channels_last)


def terms(run, images, labels):
    return torch.stack(list(loss_terms(RECIPE, run(images, labels), Batch(images, labels)).values()))


def named(module, values):
    """A network's own buffers change as it runs: each run has its copies, in the dtype of the weights."""
    buffers = {name: b.to(values[0].dtype) if b.is_floating_point() else b for name, b in module.named_buffers()}
    weights = dict(zip((name for name, _ in module.named_parameters()), values, strict=True))
    return weights, {name: buffer.clone() for name, buffer in buffers.items()}


def test_one_network():
    torch.manual_seed(1)
    module = network()
    images, labels = torch.rand(4, 1, 10, 10, device=DEVICE), torch.tensor([2, 0, 1, 1], device=DEVICE)

    def run(*values):
        given = images.to(values[0].dtype)
        weights, buffers = named(module, values)
        return terms(lambda *arguments: functional_call(module, (weights, buffers), arguments), given, labels)

    assert_as_accurate(on("triton", run), on("torch", run), list(module.parameters()), torch.float32)


def test_replicas(monkeypatch):
    torch.manual_seed(1)
    stack = Stack([network() for _ in range(2)], "triton")
    images = torch.rand(4, 2, 1, 10, 10, device=DEVICE)
    labels = torch.tensor([[2, 0], [0, 1], [1, 1], [1, 2]], device=DEVICE)

    def run(*values):
        weights, buffers = named(stack.all, values)
        with monkeypatch.context() as patch:
            patch.setattr(stack.all, "named_parameters", weights.items)
            patch.setattr(stack.all, "named_buffers", buffers.items)
            return stack(terms, images.to(values[0].dtype), labels)

    assert_as_accurate(on("triton", run), on("torch", run), list(stack.all.parameters()), torch.float32)
