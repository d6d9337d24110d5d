"""Several networks of one make as one program: each parameter and buffer has an axis over the replicas in front.

A network's own forward runs once for all of them under vmap. Where vmap's rule is slow, knows no mixed precision or
cannot exist, ours stands in: a convolution becomes one grouped convolution, a linear layer one batched product, a batch
norm one over all channels of all replicas, and random numbers are drawn for each replica from the state it would have
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from torchcaps.functional import length, squash, squash_exp
from torchcaps.fused import autocasted
from torchcaps.fused.switch import fronted


class Stack:
    """Networks that differ in their weights alone.

    `all` is a network whose parameters and buffers are those of every replica, under the usual names: optimisers,
    averages and checkpoints take it as they take any other, but only `__call__` can run it.

    Args:
        networks: one or more of a make, on one device; they are left as they are.
        conv: "grouped", one of torch's convolutions with the replicas as groups, or "triton", kernels of our own for
            CUDA; "auto" takes what is faster there.

    Shapes: parameters and buffers [r, ...]
    """

    def __init__(self, networks: Sequence[nn.Module], conv: str = "auto"):
        if conv not in ("auto", "grouped", "triton"):
            raise ValueError(f"conv must be auto, grouped or triton, got {conv!r}")
        self.size = len(networks)
        self.one = copy.deepcopy(networks[0])  # lends its forward
        self.all = copy.deepcopy(networks[0])
        for name, parameter in self.all.named_parameters():
            parameter.data = _stacked([network.get_parameter(name).data for network in networks])
        for name, buffer in self.all.named_buffers():
            buffer.data = _stacked([network.get_buffer(name) for network in networks])
        self.index = torch.arange(self.size, device=next(self.all.parameters()).device)
        fast = self.index.is_cuda and find_spec("triton") is not None
        self.conv = ("triton" if fast else "grouped") if conv == "auto" else conv
        self.states: list[Any] = list(range(self.size))  # of each replica's random numbers
        self.drew = False  # whether any were asked for

    def __call__(self, work: Callable[..., Any], *inputs: Tensor, axis: int | None = 1) -> Any:
        """`work(network, *inputs)` of each replica, what it returns stacked in front.

        Args:
            axis: of the inputs, over the replicas; None for inputs that they share.
        """

        def one(index: Tensor, parameters: Any, buffers: Any, inputs: Any) -> Any:
            def network(*arguments: Any) -> Any:
                return functional_call(self.one, (parameters, buffers), arguments)

            with _Rules(self, index):
                return work(network, *inputs)

        parameters, buffers = dict(self.all.named_parameters()), dict(self.all.named_buffers())
        places = (0, 0, 0, axis)
        return vmap(one, in_dims=places, randomness="error")(self.index, parameters, buffers, inputs)

    def train(self, mode: bool = True) -> None:
        self.one.train(mode)

    def seed(self, seeds: Sequence[int]) -> None:
        """Where the random numbers of each replica go on, as `torch.manual_seed` would have it alone."""
        self.states = list(seeds)

    def draw(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives each replica. Shapes: -> [r, ...]"""
        device = self.index.device
        self.drew = True
        made = []
        for k in range(self.size):
            with _random_state(device, self.states[k]) as after:
                made.append(make())
            self.states[k] = after[0]
        return torch.stack(made)

    def weights(self, k: int, source: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """A copy of one replica's state dict, on the CPU; of the averages, where they are given."""
        source = self.all.state_dict() if source is None else source
        return {name: value[k].detach().cpu().clone() for name, value in source.items()}


def _stacked(tensors: list[Tensor]) -> Tensor:
    """In front of each other, and each as it lay in memory. Shapes: [...] -> [r, ...]"""
    one = tensors[0]
    room = torch.empty_strided(
        (len(tensors), *one.shape), (one.numel(), *one.stride()), dtype=one.dtype, device=one.device
    )
    return torch.stack(tensors, out=room)


@contextmanager
def _random_state(device: torch.device, state: Any) -> Iterator[list[Any]]:
    """Draws go on from `state`, a seed or what an earlier block gave; at the end the list has the next one."""
    own: Any = torch.cuda if device.type == "cuda" else torch.mps if device.type == "mps" else torch
    before = own.get_rng_state()
    after: list[Any] = []
    own.manual_seed(state) if isinstance(state, int) else own.set_rng_state(state)
    try:
        yield after
        after.append(own.get_rng_state())
    finally:
        own.set_rng_state(before)


class _Rules(TorchFunctionMode):
    """Sends the calls for which we have rules of our own to them, within one vmap."""

    def __init__(self, stack: Stack, index: Tensor):
        super().__init__()
        self.stack, self.index = stack, index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, *args, **(kwargs or {}))


class _Rule(torch.autograd.Function):
    """A function that knows how to work on all replicas at once; alone it is never called."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise RuntimeError("this runs under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


class _Conv(_Rule):
    """Shapes: x [r, b, c, h, w], weight [r, c', c / groups, k, k], bias [r, c'] -> [b, r, c', h', w']"""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
        size, (stride, padding, dilation, groups, form) = info.batch_size, options
        stacked, kernels, offsets = fronted(info, in_dims, (x, weight, bias))
        assert stacked is not None
        assert kernels is not None
        plain = (padding, dilation) in ((0, 1), ((0, 0), (1, 1)), (0, (1, 1)), ((0, 0), 1))
        if plain and groups == stacked.shape[2] == kernels.shape[1] and stacked.shape[3:] == kernels.shape[3:]:
            return _whole_window(stacked.transpose(0, 1), kernels, offsets), 1
        if form == "triton" and groups == 1 and (found := _even(stride, padding, dilation)) is not None:
            from torchcaps.ops.replica_conv import ReplicaConv, suits

            cast = autocasted(stacked.transpose(0, 1), kernels, offsets)
            if suits(*cast[:2]):
                return ReplicaConv.apply(*cast, *found), 1
        if in_dims[0] is None and groups == 1:  # the images are the same: one convolution with more channels
            images = x
        else:
            images, groups = stacked.transpose(0, 1).flatten(1, 2), groups * size
        layout = torch.contiguous_format
        if torch.channels_last in (suggest_memory_format(stacked[0]), suggest_memory_format(kernels[0])):
            layout = torch.channels_last  # as it would be alone
        images, flat = images.contiguous(memory_format=layout), None if offsets is None else offsets.flatten()
        maps = F.conv2d(images, kernels.flatten(0, 1), flat, stride, padding, dilation, groups)
        return maps.contiguous(memory_format=layout).unflatten(1, (size, -1)), 1


def _whole_window(images: Tensor, kernels: Tensor, offsets: Tensor | None) -> Tensor:
    """A depthwise convolution whose window is the whole map is a weighted sum over it.

    Shapes: images [b, r, c, h, w], kernels [r, c, 1, h, w], offsets [r, c] -> [b, r, c, 1, 1]
    """
    images, kernels, offsets = autocasted(images, kernels, offsets)
    sums = (images * kernels.squeeze(2)).sum((3, 4), keepdim=True)
    return sums if offsets is None else sums + offsets[:, :, None, None]


def _even(stride: Any, padding: Any, dilation: Any) -> tuple[int, int] | None:
    """Stride and padding, where they are the same on both axes and nothing is dilated."""
    pairs = [(x, x) if isinstance(x, int) else tuple(x) for x in (stride, padding, dilation) if not isinstance(x, str)]
    if len(pairs) < 3 or pairs[2] != (1, 1) or any(first != second for first, second in pairs):
        return None
    return pairs[0][0], pairs[1][0]


class _Linear(_Rule):
    """One batched product with the bias in it, where vmap adds the bias in float32.

    Shapes: x [r, ..., i], weight [r, o, i], bias [r, o] -> [r, ..., o]
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        stacked, kernels, offsets = autocasted(*fronted(info, in_dims, (x, weight, bias)))
        rows = stacked.flatten(1, -2) if stacked.dim() > 2 else stacked[:, None]
        out = rows @ kernels.mT if offsets is None else _Products.apply(rows, kernels, offsets)
        return out.reshape(*stacked.shape[:-1], -1), 0


class _Products(torch.autograd.Function):
    """As baddbmm, but the gradient of the weights lies as they do, and need not be copied.

    Shapes: x [r, n, i], weight [r, o, i], bias [r, o] -> [r, n, o]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x, grad.sum(1)


class _BatchNorm(_Rule):
    """One norm over all channels of all replicas, which also keeps each replica's statistics.

    Shapes: x [r, b, c, ...], mean, variance, weight and bias [r, c] -> [b, r, c, ...]
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        size = info.batch_size
        stacked, *vectors = fronted(info, in_dims, (x, *rest[:4]))
        assert stacked is not None
        flat: Any = [None if vector is None else vector.flatten() for vector in vectors]
        return F.batch_norm(stacked.transpose(0, 1).flatten(1, 2), *flat, *rest[4:]).unflatten(1, (size, -1)), 1


class _Rows(_Rule):
    """A function of each pose, for which there may be a kernel that knows no vmap. Shapes: poses [r, ..., d]"""

    @staticmethod
    def vmap(info: Any, in_dims: Any, poses: Tensor, function: Callable[..., Tensor], dim: int) -> Any:
        (stacked,) = fronted(info, in_dims, (poses,))
        return function(stacked, dim=dim if dim < 0 else dim + 1), 0


class _Draw(_Rule):
    """Random numbers, for each replica its own."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, index: Tensor, stack: Stack, make: Callable[[], Tensor]) -> Any:
        return stack.draw(make), 0


def _conv(
    mode: _Rules,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return _Conv.apply(input, weight, bias, stride, padding, dilation, groups, mode.stack.conv)


def _linear(mode: _Rules, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _Linear.apply(input, weight, bias)


def _batch_norm(
    mode: _Rules,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _BatchNorm.apply(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _dropout(mode: _Rules, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return input
    shape, dtype, device = input.shape, input.dtype, input.device
    strides: Any = input.stride()  # a mask is drawn as its input lies in memory
    order = sorted(range(input.dim()), key=lambda dim: -strides[dim])

    def make() -> Tensor:
        return F.dropout(torch.empty_permuted(shape, order, dtype=dtype, device=device).fill_(1), p)

    return input * _Draw.apply(mode.index, mode.stack, make)


def _rows(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(mode: _Rules, poses: Tensor, dim: int = -1) -> Any:
        return _Rows.apply(poses, function, dim)

    return rule


def _creation(create: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(mode: _Rules, *args: Any, **options: Any) -> Any:
        return _Draw.apply(mode.index, mode.stack, lambda: create(*args, **options))

    return rule


RULES: dict[Any, Callable[..., Any]] = {
    F.conv2d: _conv,
    F.linear: _linear,
    F.batch_norm: _batch_norm,
    F.dropout: _dropout,
    length: _rows(length),
    squash: _rows(squash),
    squash_exp: _rows(squash_exp),
    torch.rand: _creation(torch.rand),
    torch.randn: _creation(torch.randn),
}
