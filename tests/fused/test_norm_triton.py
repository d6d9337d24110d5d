"""Bias, ReLU and batch norm in kernels against plain PyTorch: outputs, every gradient and the running statistics."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.layers import chain
from torchcaps.layers.chain import Chain
from torchcaps.models.efficient_capsnet import efficient_stem
from torchcaps.ops import backend
from torchcaps.train.stacked import Stack

pytestmark = OPT_IN
SIZES = {
    "one image": (1, 8, 7, 5),
    "two numbers": (2, 4, 1, 1),
    "three channels": (5, 3, 7, 5),
    "seventeen": (3, 17, 5, 7),
    "many channels": (2, 130, 3, 3),
    "blocks": (4, 16, 9, 9),
    "wide": (2, 260, 3, 2),
}


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def channels_last(b, c, h, w):
    return drawn(b, h, w, c).permute(0, 3, 1, 2)


@pytest.fixture
def small_blocks(monkeypatch):
    """So that small maps have several parts, of several blocks."""
    from torchcaps.fused import norm_triton

    monkeypatch.setattr(norm_triton, "NUMBERS", 256)
    monkeypatch.setattr(norm_triton, "PARTS", 5)


def norm_of(channels, relu_first, momentum=0.1, eps=1e-3):
    """A function of maps, bias, and the norm's weight and bias, which also gives its buffers after the step."""
    norm = nn.BatchNorm2d(channels, eps=eps, momentum=momentum).to(DEVICE)

    def run(x, bias, weight, shift):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        own = copy.deepcopy(norm).to(wide)
        x = x.contiguous(memory_format=torch.channels_last)
        weights = {"norm.weight": weight.to(wide), "norm.bias": shift.to(wide)}
        y = functional_call(Wrapped(own, relu_first), weights, (x, None if bias is None else bias.to(wide)))
        assert own.num_batches_tracked == 1
        return y, own.running_mean.detach(), own.running_var.detach()

    return run


class Wrapped(nn.Module):
    def __init__(self, norm, relu_first):
        super().__init__()
        self.norm, self.relu_first = norm, relu_first

    def forward(self, x, bias):
        if chain._fuse(x, self):
            from torchcaps.fused import norm_triton

            assert norm_triton.takes(x, bias, self.norm)
            return norm_triton.norm_with_relu(x, bias, self.norm, self.relu_first)
        x = x if bias is None else x + bias.to(x.dtype)[:, None, None]
        return self.norm(x.relu()) if self.relu_first else self.norm(x).relu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu_first", [True, False], ids=["relu first", "norm first"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_statistics_and_gradients(size, relu_first, dtype, small_blocks):
    b, c, h, w = SIZES[size]
    inputs = [2 * channels_last(b, c, h, w) + 0.5, drawn(c, seed=2) / 2, drawn(c, seed=3), drawn(c, seed=4) / 2]
    eps = 10.0 if b * h * w == 2 else 1e-3  # next to a small one two numbers become -1 and 1, with gradients near 0
    run = norm_of(c, relu_first, eps=eps)
    assert_as_accurate(on("triton", run), on("torch", run), inputs, dtype)


@pytest.mark.parametrize("relu_first", [True, False], ids=["relu first", "norm first"])
def test_without_a_bias(relu_first, small_blocks):
    run = norm_of(17, relu_first)
    inputs = [channels_last(3, 17, 6, 5), drawn(17, seed=3), drawn(17, seed=4)]
    ours, plain = (on(name, lambda x, weight, shift: run(x, None, weight, shift)) for name in ("triton", "torch"))
    assert_as_accurate(ours, plain, inputs, torch.float32)


def test_a_large_mean_against_a_small_variance(small_blocks):
    """Squares less the square of the mean would leave nothing here."""
    x = 1000 + channels_last(4, 5, 9, 7) / 100
    inputs = [x, drawn(5, seed=2), drawn(5, seed=3), drawn(5, seed=4)]
    run = norm_of(5, relu_first=True, momentum=1.0, eps=1e-8)
    assert_as_accurate(on("triton", run), on("torch", run), inputs, torch.float32)


@pytest.mark.parametrize("level", [-100.0, 100.0], ids=["closed", "open"])
def test_a_bias_that_moves_nothing_has_gradient_0(level, small_blocks):
    """Rounding would be enough for Adam to take whole steps."""
    inputs = [t.requires_grad_() for t in (channels_last(3, 5, 5, 7), drawn(5) + level, drawn(5), drawn(5))]
    y, *_ = on("triton", norm_of(5, relu_first=True))(*inputs)
    assert torch.equal(torch.autograd.grad(y, inputs[1], drawn(*y.shape))[0], torch.zeros(5, device=DEVICE))


def test_maps_of_zeros_stay_finite():
    run, x = norm_of(4, relu_first=True), torch.zeros(2, 4, 3, 3, device=DEVICE, requires_grad=True)
    bias, weight, shift = (torch.zeros(4, device=DEVICE, requires_grad=True) for _ in range(3))
    y, _, var = on("triton", run)(x, bias, weight, shift)
    gradients = torch.autograd.grad(y.sum(), [x, bias, weight, shift])
    assert all(t.isfinite().all() for t in (y, var, *gradients))
    assert torch.equal(gradients[3], torch.full((4,), 18.0, device=DEVICE))


def test_what_is_not_a_number_stays_so():
    """A run that diverges has to hear of it."""
    x = channels_last(3, 4, 5, 5)
    x[1, 2, 3, 4] = torch.nan
    ours, plain = (on(name, norm_of(4, relu_first=True))(x, *(drawn(4),) * 3) for name in ("triton", "torch"))
    torch.testing.assert_close(ours, plain, equal_nan=True)
    assert plain[0].isnan().any()


def test_the_same_twice(small_blocks):
    run = on("triton", norm_of(16, relu_first=True))
    inputs = [t.requires_grad_() for t in (channels_last(3, 16, 5, 9), drawn(16), drawn(16), drawn(16))]
    first, second = (torch.autograd.grad(run(*inputs)[0].square().sum(), inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


def steps(make, name, x, steps=2):
    """Outputs, gradients and state after some steps. Shapes: x [b, c, h, w]"""
    layers, x = make(), x.clone().requires_grad_()
    found = []
    for _ in range(steps):
        with backend(name):
            y = layers(x)
        found += [y, *torch.autograd.grad(y, [x, *layers.parameters()], drawn(*y.shape))]
    return [*found, *layers.state_dict().values()]


def stem():
    torch.manual_seed(1)
    layers = efficient_stem(1, (1, 1, 1, 2), 3).to(DEVICE, memory_format=torch.channels_last)
    for n in (0, 3, 6, 9):
        nn.init.normal_(layers[n].bias)
    return layers


def test_the_stem_of_efficient_capsnet(monkeypatch):
    layers = stem()
    names = [name for name, _ in layers.named_parameters()]

    def run(x, *weights):
        own = copy.deepcopy(layers).to(x.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        y = functional_call(own, dict(zip(names, weights, strict=True)), x)
        return y, *(buffer.detach() for buffer in own.buffers())

    def without_modules(*inputs):
        with monkeypatch.context() as patch:
            patch.setattr(nn.BatchNorm2d, "forward", None)
            return on("triton", run)(*inputs)

    inputs = [drawn(2, 1, 13, 12), *layers.parameters()]
    assert_as_accurate(without_modules, on("torch", run), inputs, torch.float32)


def test_names_of_weights_are_those_of_a_sequence_of_modules():
    assert list(stem().state_dict()) == list(nn.Sequential(*stem()).state_dict())
    assert list(stem().state_dict())[:2] == ["0.weight", "0.bias"]


def normed(norm=None, relu=None, **options):
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 5, 3, **options), relu or nn.ReLU(), norm or nn.BatchNorm2d(5)]
    return Chain(*layers).to(DEVICE, memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make",
    [
        lambda: normed().eval(),
        lambda: normed(norm=nn.BatchNorm2d(5, momentum=None)),
        lambda: normed(norm=nn.BatchNorm2d(5, track_running_stats=False)),
        lambda: normed(norm=nn.BatchNorm2d(5, affine=False)),
        lambda: normed(norm=nn.InstanceNorm2d(5)),
        lambda: normed(relu=nn.LeakyReLU()),
        lambda: normed(padding=1, padding_mode="circular"),
        lambda: normed().to(memory_format=torch.contiguous_format),
    ],
    ids=["eval", "average", "no statistics", "not affine", "instance", "leaky", "circular", "channels first"],
)
def test_other_modules_and_layouts_run_on_pytorch(make, monkeypatch):
    from torchcaps.fused import norm_triton

    monkeypatch.setattr(norm_triton, "norm_with_relu", None)
    x = drawn(2, 3, 6, 6)
    torch.testing.assert_close(steps(make, "triton", x), steps(make, "torch", x), rtol=1e-4, atol=1e-5)


def test_hooks_hear_of_every_module():
    layers, heard = normed(), []
    layers[1].register_forward_hook(lambda module, args, output: heard.append(output))
    with backend("triton"):
        layers(channels_last(2, 3, 6, 6))
    assert len(heard) == 1
    layers, heard = normed(), []
    layers[2].register_full_backward_pre_hook(lambda module, grads: heard.append(grads))
    with backend("triton"):
        layers(channels_last(2, 3, 6, 6)).sum().backward()
    assert len(heard) == 1
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: heard.append(module))
    with backend("triton"):
        layers = normed()
        layers(channels_last(2, 3, 6, 6))
    handle.remove()
    assert all(module in heard for module in layers)


def test_one_number_for_each_channel_is_refused_as_by_torch():
    with backend("triton"), pytest.raises(ValueError, match="more than 1 value per channel"):
        normed()(channels_last(1, 3, 3, 3))


def test_replicas_under_vmap_are_more_channels(monkeypatch):
    makes = [normed(), normed()]
    nn.init.normal_(makes[1][0].weight)
    nn.init.normal_(makes[1][0].bias)
    x = drawn(4, 2, 3, 6, 5)
    found = []
    for name in ("torch", "triton"):
        stack = Stack(makes, conv="grouped")
        stack.train()
        for _ in range(2):
            with backend(name):
                y = stack(lambda network, images: network(images), x)
        gradients = torch.autograd.grad(y, list(stack.all.parameters()), drawn(*y.shape))
        found.append([y, *gradients, *stack.all.buffers()])
        monkeypatch.setattr(nn.BatchNorm2d, "forward", None)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert found[1][-1].tolist() == [2, 2]


def test_weights_that_replicas_share_run_on_pytorch():
    from torchcaps.fused import norm_triton

    layers, asked = normed(), []

    def one(x):
        asked.append(norm_triton.takes(x, layers[0].bias, layers[2]))
        return x

    torch.func.vmap(one)(drawn(2, 3, 5, 4, 4))
    assert asked == [False]
