"""EncapNet's kernels against plain PyTorch: outputs, every gradient and the running statistics."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps import functional
from torchcaps.functional import gated, norm_relu_squash
from torchcaps.layers.encap import CapConv
from torchcaps.ops import backend
from torchcaps.routing.master_aide import MasterAide

pytestmark = OPT_IN
POWERS = ["one number", "two", "sixteen"]  # of two, which is all the kernels for batch norm and coefficients take
SIZES = {"one number": (5, 4, 1, 3, 4), "two": (3, 32, 2, 7, 5), "odd": (2, 8, 3, 3, 3), "sixteen": (9, 32, 16, 3, 2)}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def channels_last(b, c, d, h, w):
    """Shapes: [b, (c d), h, w]"""
    return drawn(b, h, w, c * d).permute(0, 3, 1, 2)


def activation(caps, channels):
    norm = nn.BatchNorm2d(channels).to(DEVICE)

    def run(x, weight, bias):
        own = copy.deepcopy(norm).to(x.dtype if x.dtype == torch.float64 else torch.float32)
        x = x.contiguous(memory_format=torch.channels_last)
        y = functional_call(Wrapped(own, caps), {"norm.weight": weight, "norm.bias": bias}, x)
        return y, own.running_mean.detach(), own.running_var.detach()

    return run


class Wrapped(nn.Module):
    def __init__(self, norm, caps):
        super().__init__()
        self.norm, self.caps = norm, caps

    def forward(self, x):
        return norm_relu_squash(x, self.norm, self.caps)


@pytest.mark.parametrize("size", POWERS)
def test_activation(size, monkeypatch):
    b, c, d, h, w = SIZES[size]
    inputs = [2 * channels_last(b, c, d, h, w) + 0.5, drawn(c * d), drawn(c * d) / 2]
    run = activation(c, c * d)

    def without_formula(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(functional, "squash", None)
            return run(*inputs)

    assert_as_accurate(without_formula, on("torch", run), inputs, torch.float32)


def test_activation_with_a_bias_not_yet_added(monkeypatch):
    norm = nn.BatchNorm2d(16).to(DEVICE)

    def run(x, bias, fused=False):
        own = copy.deepcopy(norm).to(x.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        y = norm_relu_squash(x, own, 8, bias) if fused else norm_relu_squash(x + bias[:, None, None], own, 8)
        return y, own.running_mean.detach(), own.running_var.detach(), own.num_batches_tracked.to(x.dtype)

    def without_formula(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(functional, "squash", None)
            return run(*inputs, fused=True)

    inputs = [2 * channels_last(5, 8, 2, 3, 7), 3 * drawn(16)]
    assert_as_accurate(without_formula, on("torch", run), inputs, torch.float32)
    assert_as_accurate(lambda *inputs: run(*inputs, fused=True), run, inputs, torch.float32)


def test_activation_in_many_programs(monkeypatch):
    from torchcaps.fused import norm_triton

    monkeypatch.setattr(norm_triton, "PROGRAMS", 8)
    monkeypatch.setattr(norm_triton, "NUMBERS", 512)
    inputs = [channels_last(13, 9, 8, 5, 7), drawn(72), drawn(72)]  # 9 capsules end within a block of channels
    run = activation(9, 72)
    assert_as_accurate(on("triton", run), on("torch", run), inputs, torch.float32)


def test_activation_of_half_precision():
    """Rounded once, at the end: closer to float32 than the formula, which rounds after each step."""
    x, norm = channels_last(4, 32, 4, 5, 5), nn.BatchNorm2d(128).to(DEVICE)
    exact = on("torch", norm_relu_squash)(x.half().float(), copy.deepcopy(norm), 32)
    ours = on("triton", norm_relu_squash)(x.half(), copy.deepcopy(norm), 32)
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.float(), exact, rtol=2e-3, atol=1e-4)


def test_other_norms_and_layouts_run_on_pytorch():
    from torchcaps.fused.norm_triton import takes_capsules

    x, norm = channels_last(4, 8, 2, 3, 3), nn.BatchNorm2d(16).to(DEVICE)
    assert takes_capsules(x, None, norm, 2)
    assert not takes_capsules(x.contiguous(), None, norm, 2)
    assert not takes_capsules(x.double(), None, norm, 2)
    assert not takes_capsules(x, None, norm, 3)
    assert not takes_capsules(channels_last(4, 8, 3, 3, 3), None, nn.BatchNorm2d(24).to(DEVICE), 3)
    assert not takes_capsules(x[:1, :, :1, :1], None, norm, 2)
    assert not takes_capsules(x, None, nn.SyncBatchNorm(16), 2)
    assert not takes_capsules(x, None, nn.BatchNorm2d(16, momentum=None), 2)
    assert not takes_capsules(x, None, nn.BatchNorm2d(16, track_running_stats=False), 2)
    assert not takes_capsules(x, None, nn.BatchNorm2d(16).eval(), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gate(size, dtype, monkeypatch):
    b, c, d, h, w = SIZES[size]

    def run(first, second, m1, m2):
        votes = (x.contiguous(memory_format=torch.channels_last).unflatten(1, (c, d)) for x in (first, second))
        return gated(*votes, *(m.contiguous(memory_format=torch.channels_last) for m in (m1, m2)))

    inputs = [channels_last(b, c, d, h, w), channels_last(b, c, d, h, w) + 1, drawn(b, c, h, w), drawn(b, c, h, w) - 1]
    assert_as_accurate(on("triton", run), on("torch", run), inputs, dtype)


def test_the_gate_takes_channels_last_votes_only():
    from torchcaps.fused.gate_triton import takes_gate

    votes = channels_last(2, 4, 3, 5, 6).unflatten(1, (4, 3)).movedim(2, -1)
    m = channels_last(2, 4, 1, 5, 6)
    assert takes_gate(votes, votes, m, m)
    assert not takes_gate(votes.contiguous(), votes, m, m)
    assert not takes_gate(votes, votes, m.contiguous(), m)
    assert not takes_gate(votes, votes, m.half(), m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", ["v3", "v4"])
@pytest.mark.parametrize("size", POWERS)
def test_the_gate_with_its_coefficients(size, version, dtype, monkeypatch):
    from torchcaps.fused import mixture_triton

    monkeypatch.setattr(mixture_triton, "PROGRAMS", 4)  # of several blocks, the last of them not full
    b, c, d, h, w = SIZES[size]
    routing = MasterAide(c, d, d, version=version).to(DEVICE, memory_format=torch.channels_last)
    names = [name for name, _ in routing.named_parameters()]

    def run(first, second, *parameters):
        votes = [x.contiguous(memory_format=torch.channels_last).unflatten(1, (c, d)) for x in (first, second)]
        mixed = functional_call(routing, dict(zip(names, parameters, strict=True)), (*votes, votes[0]))
        return mixed.poses, mixed.coupling

    def without_formula(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(sys.modules[MasterAide.__module__], "gated", None)
            return run(*inputs)

    votes = [channels_last(b, c, d, h, w), channels_last(b, c, d, h, w) + 1]
    inputs = votes + [drawn(*parameter.shape) for parameter in routing.parameters()]
    assert_as_accurate(without_formula, on("torch", run), inputs, dtype)


def test_the_coefficients_alone_have_gradients(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    routing = MasterAide(4, 2, 2).to(DEVICE)
    votes = [channels_last(2, 4, 2, 5, 7).unflatten(1, (4, 2)).requires_grad_() for _ in range(2)]
    found = []
    for name in ("triton", "torch"):
        with backend(name):
            coupling = routing(*votes, votes[0]).coupling
        found.append(torch.autograd.grad(coupling, [*votes, *routing.parameters()], drawn(*coupling.shape)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_coefficients_kernels_take_their_own_convolutions_only():
    from torchcaps.fused.mixture_triton import takes_mixture

    votes = channels_last(2, 4, 2, 5, 6).unflatten(1, (4, 2)).movedim(2, -1)
    conv = nn.Conv2d(8, 4, 3, padding=1, groups=4)
    assert takes_mixture(votes, votes, conv, conv)
    assert not takes_mixture(votes.contiguous(), votes, conv, conv)
    assert not takes_mixture(votes, votes.half(), conv, conv)
    assert not takes_mixture(votes, votes, conv, copy.deepcopy(conv).to(memory_format=torch.channels_last))
    gaps = copy.deepcopy(conv)
    gaps.weight = nn.Parameter(drawn(4, 4, 3, 3)[:, ::2])
    for other in (
        gaps,
        nn.Conv2d(8, 4, 3, padding=1),
        nn.Conv2d(8, 4, 3, padding=0, groups=4),
        nn.Conv2d(8, 4, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(8, 4, 3, padding=1, groups=4, stride=2),
        nn.Conv2d(8, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Identity(),
    ):
        assert not takes_mixture(votes, votes, other, other)
    votes = channels_last(2, 4, 3, 5, 6).unflatten(1, (4, 3)).movedim(2, -1)
    conv = nn.Conv2d(12, 4, 3, padding=1, groups=4)
    assert not takes_mixture(votes, votes, conv, conv)


@pytest.mark.parametrize("aide", ["full", "complement"])
@pytest.mark.parametrize("routing", [None, MasterAide])
@pytest.mark.parametrize("caps", [5, 8])
def test_a_whole_layer_in_training(caps, routing, aide, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(1)
    layer = CapConv(caps, 2, 4, 3, 1, routing, aide, skip=True).to(DEVICE, memory_format=torch.channels_last)
    u = channels_last(3, caps, 2, 6, 5).unflatten(1, (caps, 2)).requires_grad_()
    found = []
    for name in ("triton", "torch"):
        own = copy.deepcopy(layer)
        with backend(name):
            poses = own(u).poses
        gradients = torch.autograd.grad(poses, [u, *own.parameters()], drawn(*poses.shape))
        found.append([poses, *gradients, *own.buffers()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("routing", [None, MasterAide])
def test_biases_that_move_nothing_have_gradient_0(routing):
    """None would keep weight decay from them, and rounding is enough for Adam to take whole steps."""
    layer = CapConv(8, 2, 4, 3, 1, routing, skip=True).to(DEVICE, memory_format=torch.channels_last)
    poses = channels_last(3, 8, 2, 6, 5).unflatten(1, (8, 2))
    with backend("triton"):
        layer(poses).poses.square().sum().backward()
    convs = [layer.skip] + ([layer.master] if routing is None else [layer.master[0], layer.aide[0]])
    for conv in convs:
        assert torch.equal(conv.bias.grad, torch.zeros_like(conv.bias))


class Doubled(nn.Conv2d):
    def forward(self, features):
        return 2 * super().forward(features)


def test_a_convolution_with_its_own_forward_keeps_it():
    layer = CapConv(8, 2, 4, 3, skip=True).to(DEVICE)
    layer.skip = Doubled(16, 32, 3, padding=1).to(DEVICE)
    layer.to(memory_format=torch.channels_last)
    poses = channels_last(3, 8, 2, 6, 5).unflatten(1, (8, 2))
    ours, plain = (on(name, copy.deepcopy(layer))(poses).poses for name in ("triton", "torch"))
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


def test_what_is_not_a_number_stays_so():
    features = channels_last(2, 8, 2, 3, 3)
    features[0, 5, 1, 1] = torch.nan
    norm = nn.BatchNorm2d(16).to(DEVICE)
    with backend("triton"):
        assert norm_relu_squash(features, norm, 8).isnan().any()


@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-15])
def test_capsules_of_next_to_no_length_have_gradients(length):
    """The square of 1e-20 is no normal number, and a GPU takes its inverse root for infinite."""
    features, norm = channels_last(2, 8, 2, 3, 3).requires_grad_(), nn.BatchNorm2d(16).to(DEVICE)
    nn.init.constant_(norm.weight, length)
    with backend("triton"):
        poses = norm_relu_squash(features, norm, 8)
    for gradient in torch.autograd.grad(poses.sum(), [features, *norm.parameters()]):
        assert gradient.isfinite().all()


def test_hooks_hear_of_the_norm():
    heard, norm = [], nn.BatchNorm2d(16).to(DEVICE)
    norm.register_forward_hook(lambda module, args, output: heard.append(output))
    with backend("triton"):
        norm_relu_squash(channels_last(2, 8, 2, 3, 3), norm, 8)
    assert heard
