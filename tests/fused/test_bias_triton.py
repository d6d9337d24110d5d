"""Bias and nonlinearity after a matrix product, in kernels, against plain PyTorch."""

import pytest
import torch
from torch import nn

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.layers.chain import Chain
from torchcaps.layers.decoder import Decoder
from torchcaps.ops import backend
from torchcaps.train.stacked import Stack

pytestmark = OPT_IN
SIZES = {"one": (1, 1), "odd": (3, 17), "sixteen": (16, 48), "many rows": (77, 5)}


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["relu", "sigmoid"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients(size, kind, dtype):
    from torchcaps.fused.bias_triton import biased, takes

    def ours(x, bias):
        assert takes(x, bias.float())
        return biased(x, bias.float(), kind)

    def plain(x, bias):
        return getattr(torch, kind)(x + bias)

    n, d = SIZES[size]
    assert_as_accurate(ours, plain, [drawn(n, d), drawn(d, seed=2)], dtype)


@pytest.mark.parametrize("kind", ["relu", "sigmoid"])
def test_what_is_not_a_number_stays_so(kind):
    from torchcaps.fused.bias_triton import biased

    x = drawn(3, 5)
    x[1, 2] = torch.nan
    assert torch.equal(biased(x, drawn(5), kind).isnan(), x.isnan())


@pytest.mark.parametrize("rows", [3, 33])
def test_a_decoder(rows, monkeypatch):
    """Few rows are multiplied in a kernel too, more in torch's product."""
    torch.manual_seed(1)
    decoder = Decoder(6, (5, 7), image=(1, 3, 4)).to(DEVICE)
    inputs = [drawn(rows, 6), *decoder.parameters()]
    names = [name for name, _ in decoder.named_parameters()]
    assert names[:2] == ["layers.0.weight", "layers.0.bias"]

    def run(x, *weights):
        return torch.func.functional_call(decoder, dict(zip(names, weights, strict=True)), x)

    def fused(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(nn.ReLU, "forward", None)
            patch.setattr(nn.Sigmoid, "forward", None)
            return on("triton", run)(*inputs)

    assert_as_accurate(fused, on("torch", run), inputs, torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(nn.Linear(6, 5), nn.ReLU()).eval(),
        lambda: Chain(nn.Linear(6, 5, bias=False), nn.ReLU()),
        lambda: Chain(nn.Linear(6, 5), nn.Tanh()),
        lambda: Chain(nn.Linear(6, 5).double(), nn.ReLU()),
    ],
    ids=["eval", "no bias", "tanh", "double"],
)
def test_other_layers_run_on_pytorch(make, monkeypatch):
    from torchcaps.fused import bias_triton, linear_triton

    monkeypatch.setattr(bias_triton, "biased", None)
    monkeypatch.setattr(linear_triton, "linear", None)
    torch.manual_seed(1)
    layers = make().to(DEVICE)
    x = drawn(3, 6).to(layers[0].weight.dtype)
    torch.testing.assert_close(on("triton", layers)(x), on("torch", layers)(x))


@pytest.mark.parametrize("rows", [4, 33])
def test_replicas_under_vmap(rows, monkeypatch):
    torch.manual_seed(1)
    networks = [Decoder(6, (5, 7), image=(1, 3, 4)).to(DEVICE) for _ in range(3)]
    x = drawn(rows, 3, 6)
    found = []
    for name in ("torch", "triton"):
        stack = Stack(networks)
        with backend(name):
            y = stack(lambda network, poses: network(poses), x)
        found.append([y, *torch.autograd.grad(y, list(stack.all.parameters()), drawn(*y.shape))])
        monkeypatch.setattr(nn.ReLU, "forward", None)
    torch.testing.assert_close(*found)
