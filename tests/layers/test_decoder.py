"""Decoders, and the initialisers by Keras's rules that they start from."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchcaps.layers.decoder import ConvDecoder, Decoder
from torchcaps.layers.init import (
    glorot_normal_,
    glorot_uniform_,
    he_normal_,
    keras_conv_,
    keras_linear_,
    mazzia_decoder,
    sabour_official,
    truncated_normal_,
)


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("image", "expected"), [((1, 28, 28), 1_411_344), ((1, 36, 36), 1_936_144)])
def test_decoder_count(image, expected):
    with torch.device("meta"):
        assert count(Decoder(160, image=image)) == expected


@pytest.mark.parametrize("output", ["sigmoid", "linear"])
def test_decoder_equals_loops(output):
    decoder = Decoder(6, hidden=(5, 7), image=(2, 3, 4), output=output).double()
    poses = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    pictures = decoder(poses)
    assert pictures.shape == (4, 2, 3, 4)
    linears = [m for m in decoder.modules() if isinstance(m, nn.Linear)]
    for n in range(4):
        x = [poses[n, j, d] for j in range(3) for d in range(2)]
        for linear in linears:
            rows = zip(linear.weight, linear.bias, strict=True)
            x = [sum(w * e for w, e in zip(row, x, strict=True)) + b for row, b in rows]
            if linear is not linears[-1]:
                x = [e if e > 0 else 0 * e for e in x]
        x = [1 / (1 + (-e).exp()) if output == "sigmoid" else e for e in x]
        for k in range(24):
            assert torch.isclose(pictures[n, k // 12, k // 4 % 3, k % 4], x[k], rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(decoder, (poses,))


def test_decoder_takes_flat_capsules_and_no_hidden_layer():
    decoder = Decoder(6, hidden=(), image=(1, 3, 5))
    poses = torch.randn(2, 3, 2)
    assert torch.equal(decoder(poses), decoder(poses.flatten(1)))
    assert decoder(poses).shape == (2, 1, 3, 5)


@pytest.mark.parametrize("make", [Decoder, ConvDecoder])
def test_output_range_and_bad_output(make):
    poses = 50 * torch.randn(8, 5, 4)
    bounded = make(20, image=(2, 9, 11))(poses)
    assert bounded.min() >= 0
    assert bounded.max() <= 1
    assert make(20, image=(2, 9, 11), output="linear")(poses).min() < 0
    with pytest.raises(ValueError, match="sigmoid or linear, got 'tanh'"):
        make(20, image=(2, 9, 11), output="tanh")


def test_conv_decoder_stages_as_released():
    decoder = ConvDecoder(80, image=(2, 48, 48))
    assert count(decoder) == 229_570
    sizes, channels = [], []

    def watch(module, _, out):
        sizes.append(out.shape[-1])
        channels.append(out.shape[1])

    for module in decoder.modules():
        if isinstance(module, nn.Conv2d | nn.Upsample):
            module.register_forward_hook(watch)
    assert decoder(torch.randn(2, 5, 16)).shape == (2, 2, 48, 48)
    assert decoder.grid == (8, 8)
    assert sizes == [16, 14, 28, 26, 52, 50, 48]
    assert channels == [1, 64, 64, 128, 128, 128, 2]


def doubling(n):
    """Bilinear doubling with pixel centres at halves and clamped edges, as a matrix [2 n, n]."""
    matrix = torch.zeros(2 * n, n, dtype=torch.float64)
    for i in range(2 * n):
        centre = min(max((i + 0.5) / 2 - 0.5, 0), n - 1)
        low = math.floor(centre)
        matrix[i, low] += 1 - (centre - low)
        matrix[i, min(low + 1, n - 1)] += centre - low
    return matrix


@pytest.mark.parametrize("image", [(1, 8, 8), (2, 9, 19)])
def test_conv_decoder_equals_matrices(image):
    decoder = ConvDecoder(6, channels=(3, 4, 5), image=image).double()
    poses = torch.randn(2, 3, 2, dtype=torch.float64)
    x = (poses.flatten(1) @ decoder.dense.weight.T + decoder.dense.bias).reshape(2, 1, *decoder.grid)
    convs = [m for m in decoder.layers if isinstance(m, nn.Conv2d)]
    for conv in convs[:3]:
        up = torch.einsum("yh,bchw,xw->bcyx", doubling(x.shape[2]), x, doubling(x.shape[3]))
        x = F.conv2d(up, conv.weight, conv.bias)
        x = torch.where(x > 0, x, 0.2 * x)
    x = F.conv2d(x, convs[3].weight, convs[3].bias).sigmoid()
    top, left = (x.shape[2] - image[1]) // 2, (x.shape[3] - image[2]) // 2
    assert x.shape[2] - image[1] < 8
    assert x.shape[3] - image[2] < 8
    assert torch.allclose(decoder(poses), x[:, :, top : top + image[1], left : left + image[2]], rtol=1e-12)


@pytest.mark.parametrize("image", [(1, 1, 1), (3, 32, 32), (1, 28, 40), (4, 49, 47)])
def test_conv_decoder_fits_any_image(image):
    decoder = ConvDecoder(6, channels=(2, 2, 2), image=image)
    assert decoder(torch.randn(2, 6)).shape == (2, *image)


@pytest.mark.parametrize("make", [Decoder, ConvDecoder])
def test_decoder_compiles_and_trains(make):
    decoder = make(6, image=(1, 8, 9))
    poses = torch.randn(3, 3, 2)
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")
    assert torch.equal(compiled(poses), decoder(poses))
    decoder(poses).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder(poses).isfinite().all()


@pytest.mark.parametrize(
    ("fill", "std", "limit"),
    [
        (lambda t: truncated_normal_(t, 0.1), 0.1 * 0.87962566, 0.2),
        (lambda t: he_normal_(t, 50), math.sqrt(2 / 50), 2 * math.sqrt(2 / 50) / 0.87962566),
        (lambda t: glorot_normal_(t, 50, 30), math.sqrt(2 / 80), 2 * math.sqrt(2 / 80) / 0.87962566),
        (lambda t: glorot_uniform_(t, 50, 30), math.sqrt(2 / 80), math.sqrt(6 / 80)),
    ],
    ids=["truncated", "he_normal", "glorot_normal", "glorot_uniform"],
)
def test_initialisers(fill, std, limit):
    x = torch.full((500, 400), torch.nan)
    assert fill(x) is x
    assert abs(x.std() / std - 1) < 0.02
    assert abs(x.mean()) < 0.02 * std
    assert 0.98 * limit < x.abs().max() <= limit * (1 + 1e-6)
    assert fill(torch.empty(3, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("conv", "ins", "outs"),
    [
        (nn.Conv2d(40, 60, 3), 9 * 40, 9 * 60),
        (nn.Conv2d(40, 60, (3, 5), groups=4), 15 * 10, 15 * 60),
        (nn.Conv2d(512, 512, 9, groups=512), 81 * 512, 81),
    ],
    ids=["plain", "grouped", "depthwise"],
)
def test_keras_fans_of_convolutions(conv, ins, outs):
    for kind, variance in [
        ("glorot_uniform", 2 / (ins + outs)),
        ("glorot_normal", 2 / (ins + outs)),
        ("he_normal", 2 / ins),
    ]:
        assert keras_conv_(conv, kind) is conv
        assert abs(conv.weight.std() / math.sqrt(variance) - 1) < 0.02
        assert conv.bias.abs().max() == 0
    with pytest.raises(ValueError, match="got 'orthogonal'"):
        keras_conv_(conv, "orthogonal")


def test_keras_linear_without_bias():
    linear = keras_linear_(nn.Linear(300, 500, bias=False))
    assert abs(linear.weight.std() / math.sqrt(2 / 800) - 1) < 0.02


def test_decoder_starts():
    first, _, last, _ = Decoder(300, hidden=(600,), image=(1, 20, 20), init=mazzia_decoder).layers
    assert abs(first.weight.std() / math.sqrt(2 / 300) - 1) < 0.02
    assert abs(last.weight.std() / math.sqrt(2 / 1000) - 1) < 0.02
    assert last.bias.abs().max() == 0
    first, _, last, _ = Decoder(300, hidden=(600,), image=(1, 20, 20), init=sabour_official).layers
    for linear in (first, last):
        assert abs(linear.weight.std() / 0.087962566 - 1) < 0.02
        assert torch.equal(linear.bias, torch.full_like(linear.bias, 0.1))
