"""Kernels over short rows against plain PyTorch in float64: outputs and every gradient, on odd sizes and layouts."""

import pytest
import torch
from torch import nn

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, fused, on
from tests.helpers import assert_as_accurate
from torchcaps import functional
from torchcaps.functional import layer_norm, length, squash, squash_exp
from torchcaps.ops import backend
from torchcaps.train.stacked import Stack

pytestmark = OPT_IN
SHAPES = {
    "few": (3, 8),
    "one number": (5, 1),
    "36": (2, 3, 5, 36),
    "odd": (7, 11, 13),
    "many rows": (3, 700, 16),
    "long": (4, 128),
}
FUNCTIONS = {"squash": squash, "squash_exp": squash_exp, "length": length}


def drawn(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def channels_last(shape):
    """Shapes: [b, c, h, w, d] that lies in memory as [b, h, w, c, d]"""
    b, c, h, w, d = shape
    return drawn((b, h, w, c, d)).permute(0, 3, 1, 2, 4)


def normed(x, weight, bias):
    return layer_norm(x, weight, bias, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape, dtype, monkeypatch):
    if shape == "one number":
        pytest.skip("nothing is left of one number")
    x = drawn(SHAPES[shape]) + 3
    inputs = [x, *drawn((2, x.shape[-1]))]
    assert_as_accurate(fused(normed, functional, monkeypatch), on("torch", normed), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_squashes(name, shape, dtype, monkeypatch):
    function = FUNCTIONS[name]
    assert_as_accurate(fused(function, functional, monkeypatch), on("torch", function), [drawn(SHAPES[shape])], dtype)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 0.1, 0.999, 1.001, 3.0, 30.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_length(name, size, monkeypatch):
    function = FUNCTIONS[name]
    x = drawn((9, 8))
    x = size * x / x.norm(dim=-1, keepdim=True)
    assert_as_accurate(fused(function, functional, monkeypatch), on("torch", function), [x], torch.float32)


def test_layer_norm_of_float32_in_bfloat16(monkeypatch):
    """As an autocast routing wants it: rounded once, gradients in float32."""
    x, weight = drawn((6, 5, 16)), [drawn(16), drawn(16) - 1]

    def narrow(x, *weight):
        return layer_norm(x, *weight, dtype=torch.bfloat16).to(x.dtype)

    def exact(x, *weight):
        return layer_norm(x, *weight)

    inputs = [x.requires_grad_(), *(w.requires_grad_() for w in weight)]
    with backend("triton"):
        y = narrow(*inputs)
    expected = exact(*inputs)
    assert (y - expected).abs().max() < 0.008 * expected.abs().max()
    ones = torch.ones_like(y)
    ours, theirs = torch.autograd.grad(y, inputs, ones), torch.autograd.grad(expected, inputs, ones)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts_stay(name, monkeypatch):
    x = channels_last((2, 3, 4, 5, 8))
    with backend("triton"):
        y = FUNCTIONS[name](x)
    expected = FUNCTIONS[name](x.contiguous())
    torch.testing.assert_close(y, expected)
    if name != "length":
        assert y.stride() == x.stride()
    x.requires_grad_()
    projection = drawn(y.shape)
    with backend("triton"):
        (grad,) = torch.autograd.grad(FUNCTIONS[name](x), x, projection)
    (wanted,) = torch.autograd.grad(FUNCTIONS[name](x), x, projection)
    torch.testing.assert_close(grad, wanted)


def test_layer_norm_in_channels_last(monkeypatch):
    x = channels_last((2, 3, 4, 5, 16)).requires_grad_()
    inputs = [x, drawn(16).requires_grad_(), drawn(16).requires_grad_()]
    projection = drawn(x.shape)
    ours = torch.autograd.grad(fused(normed, functional, monkeypatch)(*inputs), inputs, projection)
    theirs = torch.autograd.grad(on("torch", normed)(*inputs), inputs, projection)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert ours[0].stride() == x.stride()


def test_rows_across_memory_run_on_pytorch():
    from torchcaps.fused.rows_triton import takes

    assert takes(drawn((3, 8)))
    assert not takes(drawn((8, 3)).mT)
    assert not takes(drawn((6, 8))[::2])
    assert not takes(drawn((3, 8)).expand(2, 3, 8))
    assert not takes(drawn((3, 129)))
    assert not takes(drawn((0, 8)))
    assert not takes(drawn((3, 8)).double())
    with backend("triton"):
        torch.testing.assert_close(squash(drawn((8, 3)), dim=0), squash(drawn((8, 3)).mT.contiguous()).mT)


def test_many_programs_share_the_rows(monkeypatch):
    from torchcaps.fused import rows_triton

    monkeypatch.setattr(rows_triton, "PROGRAMS", 3)
    inputs = [drawn((700, 16)), *drawn((2, 16))]
    assert_as_accurate(fused(normed, functional, monkeypatch), on("torch", normed), inputs, torch.float32)


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_replicas_run_on_the_kernels_too(name, dim, monkeypatch):
    """Within vmap, where a kernel could not run by itself."""
    function, x = FUNCTIONS[name], drawn((3, 2, 5, 8))
    x = (x if dim < 0 else x.transpose(2, 3)).requires_grad_()
    stack = Stack([nn.Linear(1, 1).to(DEVICE) for _ in range(2)])
    expected = torch.stack([function(x[:, k], dim) for k in range(2)])
    found = fused(lambda x: stack(lambda network, x: function(x, dim), x), functional, monkeypatch)(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), x) for y in (found, expected)]
    torch.testing.assert_close(*grads)
