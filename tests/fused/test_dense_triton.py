"""Linear layers with their nonlinearity against plain PyTorch in float64: outputs and every gradient, on odd sizes."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.functional import dense
from torchcaps.fused import dense_triton
from torchcaps.layers import Decoder
from torchcaps.ops import backend

pytestmark = OPT_IN
SIZES = {"few": (3, 5, 7), "one row": (1, 16, 40), "odd": (37, 33, 65), "many rows": (131, 8, 32)}
NONLINEARITIES = {"none": None, "relu": nn.ReLU(), "sigmoid": nn.Sigmoid()}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


class Layer(nn.Module):
    def __init__(self, inputs, outputs, kind):
        super().__init__()
        self.linear, self.nonlinearity = nn.Linear(inputs, outputs).to(DEVICE), NONLINEARITIES[kind]

    def forward(self, x):
        return dense(x, self.linear, self.nonlinearity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", NONLINEARITIES)
def test_a_layer(kind, size, dtype, monkeypatch):
    rows, inputs, outputs = SIZES[size]
    layer = Layer(inputs, outputs, kind)

    def run(x, weight, bias):
        return functional_call(layer, {"linear.weight": weight, "linear.bias": bias}, x)

    calls = []
    fused = dense_triton.dense
    monkeypatch.setattr(dense_triton, "dense", lambda *args: (calls.append(1), fused(*args))[1])
    inputs = [drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs)]
    assert_as_accurate(on("triton", run), on("torch", run), inputs, dtype)
    assert calls


def test_a_gradient_in_another_order():
    """The gradient of a sum has no strides at all, that of a transposed product others."""
    layer, x = Layer(6, 5, "relu"), drawn(4, 6)
    for further in (torch.sum, lambda y: (y.t() @ drawn(4, 3)).square().sum()):
        found = []
        for name in ("torch", "triton"):
            with backend(name):
                found.append(torch.autograd.grad(further(layer(x)), list(layer.parameters())))
        torch.testing.assert_close(found[1], found[0])


def test_a_decoder_is_its_layers():
    decoder = Decoder(20, (16, 12), image=(1, 4, 5)).to(DEVICE)
    poses = drawn(3, 4, 5).requires_grad_()
    expected = decoder.layers(poses.flatten(1)).unflatten(1, (1, 4, 5))
    wanted = torch.autograd.grad(expected.square().sum(), [poses, *decoder.parameters()])
    with backend("triton"):
        found = decoder(poses)
        gradients = torch.autograd.grad(found.square().sum(), [poses, *decoder.parameters()])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


def test_other_layers_stay_as_they_are():
    for linear, nonlinearity in ((nn.Linear(4, 3, bias=False), None), (nn.Linear(4, 3), nn.Tanh())):
        x = drawn(2, 4)
        linear = linear.to(DEVICE)
        with backend("triton"):
            found = dense(x, linear, nonlinearity)
        assert torch.equal(found, linear(x) if nonlinearity is None else nonlinearity(linear(x)))
