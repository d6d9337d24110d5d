"""The quicker convolutions of a CPU against torch's own."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_as_accurate, assert_equal_with_gradients
from torchcaps.layers import PrimaryCaps
from torchcaps.models import create_model
from torchcaps.ops import backend, conv_cpu

LAST = torch.channels_last
SIZES = {  # batch, channels, height, width, out, kernel, stride
    "one image": (1, 3, 9, 9, 4, (3, 3), 2),
    "an odd number of images": (5, 4, 11, 8, 3, (3, 2), 2),
    "columns that no window sees": (2, 3, 10, 12, 5, (3, 3), 3),
    "a kernel as large as the image": (3, 2, 4, 5, 6, (4, 5), 2),
    "windows that do not overlap": (3, 2, 6, 6, 4, (2, 2), 2),
}


def drawn(*shape):
    return torch.randn(*shape).to(memory_format=LAST) if len(shape) == 4 else torch.randn(*shape)


@pytest.mark.parametrize("piece", [1, 2**24], ids=["image by image", "all at once"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_large_strided_kernels(size, bias, piece, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(conv_cpu, "PIECE", piece)
    batch, channels, height, width, out, kernel, stride = size
    inputs = [drawn(batch, channels, height, width), drawn(out, channels, *kernel)] + [drawn(out)] * bias

    def ours(images, weight, bias=None):
        return conv_cpu.convolve(images.contiguous(memory_format=LAST), weight, bias, stride)

    def definition(images, weight, bias=None):
        return F.conv2d(images, weight, bias, stride)

    assert_equal_with_gradients(ours, definition, inputs)
    assert_as_accurate(ours, definition, inputs, torch.float32)


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("batch", [1, 3])
def test_kernels_as_large_as_the_map(batch, bias, layout):
    torch.manual_seed(0)
    inputs = [torch.randn(batch, 6, 4, 5).to(memory_format=layout), torch.randn(6, 1, 4, 5)] + [torch.randn(6)] * bias

    def definition(images, weight, bias=None):
        return F.conv2d(images, weight, bias, groups=6)

    def ours(images, weight, bias=None):
        return conv_cpu.weigh(images, weight, bias)

    assert_equal_with_gradients(ours, definition, inputs)
    assert_as_accurate(ours, definition, inputs, torch.float32)


def test_second_derivatives():
    torch.manual_seed(0)
    images, weight = drawn(2, 2, 5, 5).double().requires_grad_(), drawn(3, 2, 3, 3).double().requires_grad_()
    maps, kernels = drawn(2, 3, 4, 4).double().requires_grad_(), drawn(3, 1, 4, 4).double().requires_grad_()
    bias = torch.randn(3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *x: conv_cpu.convolve(*x, 2), (images, weight, bias))
    assert torch.autograd.gradgradcheck(conv_cpu.weigh, (maps, kernels, bias))


@pytest.mark.parametrize("needed", range(3))
def test_only_the_gradients_asked_for(needed):
    for run in (lambda x, w, b: conv_cpu.convolve(x, w.transpose(0, 1), b[:1], 2), conv_cpu.weigh):
        inputs = [drawn(2, 4, 3, 3), drawn(4, 1, 3, 3), drawn(4)]
        inputs[needed].requires_grad_()
        run(*inputs).sum().backward()
        assert [x.grad is not None for x in inputs] == [n == needed for n in range(3)]


def test_gradients_lie_as_the_weights_do():
    layer = PrimaryCaps(128, 4, 8, 9, stride=2).to(memory_format=LAST)
    features = drawn(2, 128, 13, 13).requires_grad_()
    assert conv_cpu.suits(features, layer.conv.weight, 2)
    poses = layer(features).poses
    assert poses.flatten(1, 2).is_contiguous(memory_format=LAST)
    poses.sum().backward()
    assert layer.conv.weight.grad.stride() == layer.conv.weight.stride()
    assert features.grad.stride() == features.stride()


def test_what_runs_here():
    images, weight = drawn(2, 128, 20, 20), drawn(32, 128, 9, 9)
    assert conv_cpu.suits(images, weight, 2)
    assert not conv_cpu.suits(images, weight, 1)
    assert not conv_cpu.suits(images.contiguous(), weight, 2)
    assert not conv_cpu.suits(images, weight.contiguous(), 2)
    assert not conv_cpu.suits(images.bfloat16(), weight.bfloat16(), 2)
    assert not conv_cpu.suits(images.to("meta"), weight.to("meta"), 2)
    assert not conv_cpu.suits(drawn(2, 128, 8, 8), weight, 2)  # for which torch has an error
    with torch.autocast("cpu"):
        assert not conv_cpu.suits(images, weight, 2)
    with backend("torch"):
        assert not conv_cpu.suits(images, weight, 2)
    assert not torch.func.vmap(lambda x: torch.tensor(conv_cpu.suits(x, weight, 2)))(images[None]).any()
    assert conv_cpu.covers(drawn(2, 4, 3, 3), drawn(4, 1, 3, 3))
    assert not conv_cpu.covers(drawn(2, 4, 4, 3), drawn(4, 1, 3, 3))


@pytest.mark.parametrize("preset", ["capsnet_mnist", "efficient_capsnet_mnist"])
def test_networks_of_grey_images_are_channels_last_from_the_start(preset):
    torch.manual_seed(0)
    network, images = create_model(preset).double().eval(), torch.rand(3, 1, 28, 28).double()
    with backend("torch"), torch.no_grad():
        expected = network(images)
    network = network.to(memory_format=LAST)
    seen = []
    network.stem[0].register_forward_hook(lambda module, given, out: seen.append(out.is_contiguous()))
    for batch in (1, 3):
        with torch.no_grad():
            ours = network(images[:batch])
        torch.testing.assert_close(ours.scores, expected.scores[:batch], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ours.reconstruction, expected.reconstruction[:batch], rtol=1e-10, atol=1e-12)
    assert seen == [False, False]


class Scores(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images).scores


def test_traces_and_derivatives_of_another_kind_take_torchs_own(tmp_path):
    network = create_model("efficient_capsnet_mnist", decoder=False).eval().to(memory_format=LAST)
    images = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        expected = network(images).scores
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.trace(Scores(network), images, check_trace=False)
        torch.jit.save(traced, tmp_path / "traced.pt")
    torch.testing.assert_close(traced(images), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(images, torch.ones_like(images))
        change = torch.autograd.forward_ad.unpack_dual(network(dual).scores).tangent
    images.requires_grad_()
    (rows,) = torch.autograd.grad(network(images).scores[0], images, torch.eye(10), is_grads_batched=True)
    torch.testing.assert_close(rows.sum((1, 2, 3, 4)), change[0], rtol=1e-3, atol=1e-5)


def test_many_gradients_at_once():
    images, weight = drawn(2, 3, 7, 7).requires_grad_(), drawn(4, 3, 3, 3).requires_grad_()
    above = torch.randn(5, 2, 4, 3, 3)
    found, expected = (
        torch.autograd.grad(out, (images, weight), above, is_grads_batched=True)
        for out in (conv_cpu.convolve(images, weight, None, 2), F.conv2d(images, weight, None, 2))
    )
    torch.testing.assert_close(found, expected)


def test_groups_of_several_channels_are_not_depthwise():
    assert conv_cpu.covers(drawn(1, 8, 3, 3), drawn(8, 1, 3, 3))
    assert not conv_cpu.covers(drawn(1, 8, 3, 3), drawn(8, 4, 3, 3))
