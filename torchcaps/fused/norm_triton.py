"""Bias, ReLU, batch norm and squash of a training step between two convolutions: two kernels forward, two backward.

Maps lie in memory with their channels last. The first kernel of each way leaves partial sums of a few channels over a
share of the pixels, and every program of the second adds up those of its own channels. Nothing is kept but the
convolution's output, mean and scale; the gradient to the convolution's bias needs no pass of its own, for two more sums
over the pixels where ReLU is open give it. Replicas under vmap are more channels. The numbers of a capsule are
neighbours among the channels: most are summed by one thread, the largest by a few of a warp.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchcaps.fused.launch_triton import launched
from torchcaps.fused.rows_triton import LONGEST, factors, in_capsules, laid_out_as, load_rows, relu, times
from torchcaps.fused.switch import stands_for

NUMBERS = 4096  # in a block of pixels, 16 for each thread
REGISTERS = 64  # of a thread that takes moments: it waits for memory, so many threads are worth more
PROGRAMS = 528  # that share a map at most, four for each multiprocessor of an H200
PARTS = 128  # of the pixels at most: each program of a second kernel reads them all
SMALLEST = tl.constexpr(2.0**-126)  # normal number in float32


@triton.jit
def _block(number, pixels, channels, P: tl.constexpr, C: tl.constexpr):
    """Where the numbers of a block of pixels lie, which are there, and which pixels. Shapes: [P, C], [P, C], [P, 1]"""
    pixel = number.to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = (pixel < pixels)[:, None]
    return pixel[:, None] * channels + channel[None, :], inside & (channel < channels)[None, :], inside


@triton.jit
def _vector(vector, channels, C: tl.constexpr):
    """What a vector over the channels has for those of this program. Shapes: [1, C]"""
    channel = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    return tl.load(vector + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _store(vector, value, channels, C: tl.constexpr):
    channel = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    tl.store(vector + channel, value.to(vector.dtype.element_ty), mask=channel < channels)


@triton.jit
def _sum(x):
    """Shapes: [k, C] -> [1, C]"""
    return tl.sum(x, 0)[None, :]


@triton.jit
def _offset(bias, channels, C: tl.constexpr):
    """A bias that is None is 0. Shapes: [1, C]"""
    return tl.zeros((1, C), tl.float32) if bias is None else _vector(bias, channels, C)


@triton.jit
def _taken(x, offset, at, there, RELU_FIRST: tl.constexpr):
    """What the norm takes; a bias that it would take out again is left out. Shapes: [P, C]"""
    value = load_rows(x, at, there)
    if RELU_FIRST:
        value = relu(value + offset)
    return value


@triton.jit
def _merged(mean, spread, count, total):
    """Mean and sum of squares around it, from those of parts (Chan et al. 1979). Shapes: [k, C], [k, 1] -> [1, C]

    What the division leaves out is put back: against a small variance the last digit of a large mean counts.
    """
    about = _sum(mean * count) / total
    away = mean - about
    rest = _sum(away * count) / total
    return about + rest, _sum(spread + count * away * away) - total * rest * rest


@triton.jit
def _parts(parts, which, channels, count, C: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr):
    """One of the `EACH` sums that every part has. Shapes: [K, C]"""
    part, channel = tl.arange(0, K)[:, None], tl.program_id(1) * C + tl.arange(0, C)[None, :]
    there = (part < count) & (channel < channels)
    return tl.load(parts + (part * EACH + which) * channels + channel, mask=there, other=0.0)


@launched
@triton.jit
def norm_moments(
    x, bias, parts, pixels, channels, per_program, P: tl.constexpr, C: tl.constexpr, RELU_FIRST: tl.constexpr
):
    """Mean and sum of squares around it of each program's share, by Welford's rule. Shapes: parts [k, 2, channels]"""
    offset = _offset(bias, channels, C)
    mean, spread = tl.zeros((P, C), tl.float32), tl.zeros((P, C), tl.float32)
    seen = tl.zeros((P, 1), tl.float32)
    for k in range(per_program):
        at, there, inside = _block(tl.program_id(0) * per_program + k, pixels, channels, P, C)
        value = _taken(x, offset, at, there, RELU_FIRST)
        seen += inside.to(tl.float32)
        away = tl.where(there, value - mean, 0.0)
        mean += away * (1 / tl.maximum(seen, 1.0))
        spread += away * (value - mean)
    own, around = _merged(mean, spread, seen, _sum(seen))
    place = parts + tl.program_id(0) * 2 * channels
    _store(place, own, channels, C)
    _store(place + channels, around, channels, C)


@triton.jit
def _statistics(parts, pixels, channels, per_program, count, P: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Mean and sum of squares around it, of all pixels. Shapes: parts [k, 2, channels] -> [1, C]"""
    means, spreads = _parts(parts, 0, channels, count, C, K, 2), _parts(parts, 1, channels, count, C, K, 2)
    left = pixels - tl.arange(0, K) * (per_program * P)
    share = tl.minimum(tl.maximum(left, 0), per_program * P).to(tl.float32)
    return _merged(means, spreads, share[:, None], pixels)


@triton.jit
def _track(
    mean, spread, running_mean, running_var, tracked, momentum, pixels, channels, norms,
    C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    before = _vector(running_mean, channels, C)
    _store(running_mean, before + momentum * (mean - before), channels, C)
    before = _vector(running_var, channels, C)
    _store(running_var, before + momentum * (spread / (pixels - 1) - before), channels, C)
    norm = tl.program_id(1) * N + tl.arange(0, N)
    tl.store(tracked + norm, tl.load(tracked + norm, mask=norm < norms) + 1, mask=norm < norms)


@launched
@triton.jit
def norm_forward(
    x, bias, weight, shift, parts, y, moments, running_mean, running_var, tracked, eps, momentum,
    pixels, channels, per_program, count, norms,
    P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, RELU_FIRST: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Finishes the statistics, normalises and, with a `D`, squashes.

    Shapes: moments [2, channels], of mean and scale; tracked [norms]
    """
    mean, spread = _statistics(parts, pixels, channels, per_program, count, P, C, K)
    scale = 1 / tl.sqrt(spread / pixels + eps)
    if tl.program_id(0) == 0:
        _store(moments, mean, channels, C)
        _store(moments + channels, scale, channels, C)
        seen = mean if RELU_FIRST else mean + _offset(bias, channels, C)
        _track(seen, spread, running_mean, running_var, tracked, momentum, pixels, channels, norms, C, N)
    offset, level = _offset(bias, channels, C), _vector(shift, channels, C)
    gain = _vector(weight, channels, C) * scale
    for k in range(per_program):
        at, there, _ = _block(tl.program_id(0) * per_program + k, pixels, channels, P, C)
        value = (_taken(x, offset, at, there, RELU_FIRST) - mean) * gain + level
        if not RELU_FIRST:
            value = relu(value)
        if D:
            factor, _ = factors(tl.sqrt(in_capsules(value * value, D)), "squash")
            value = times(value, factor, D)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def _vectors(bias, weight, shift, moments, channels, C: tl.constexpr):
    """Bias, mean, scale, weight and shift. Shapes: [1, C]"""
    mean, scale = _vector(moments, channels, C), _vector(moments + channels, channels, C)
    gain, level = _vector(weight, channels, C), _vector(shift, channels, C)
    return _offset(bias, channels, C), mean, scale, gain, level


@triton.jit
def _through_squash(active, above, D: tl.constexpr):
    """Below the smallest normal number a GPU takes the inverse root for infinite. Shapes: [P, C]"""
    square = in_capsules(active * active, D)
    normal = square >= SMALLEST
    inverse = tl.where(normal, tl.rsqrt(tl.where(normal, square, 1.0)), 0.0)
    factor, slope = factors(square * inverse, "squash")
    along = in_capsules(above * active, D) * slope * inverse
    return times(above, factor, D) + times(active, along, D)


@triton.jit
def _back(x, d_y, at, there, offset, mean, scale, gain, level, RELU_FIRST: tl.constexpr, D: tl.constexpr):
    """The normalised input, the gradient that reaches it, and where it goes on from there. Shapes: [P, C]"""
    value, above = _taken(x, offset, at, there, RELU_FIRST), load_rows(d_y, at, there)
    goes_on = there
    if RELU_FIRST:
        goes_on = there & (value > 0)
    unit = (value - mean) * scale
    if not RELU_FIRST:
        active = unit * gain + level
        if D:
            above = _through_squash(relu(active), above, D)
        above = tl.where(active > 0, above, 0.0)
    return unit, above, goes_on


@launched
@triton.jit
def norm_sums(
    x, bias, weight, shift, moments, d_y, parts, pixels, channels, per_program,
    P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, RELU_FIRST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Of each program's share: the gradient's sums for shift and weight; where ReLU is open, its sum and how often.

    Shapes: parts [k, EACH, channels], the last two only where they are needed, for a bias before ReLU
    """
    offset, mean, scale, gain, level = _vectors(bias, weight, shift, moments, channels, C)
    to_shift, to_weight = tl.zeros((P, C), tl.float32), tl.zeros((P, C), tl.float32)
    passed, opened = tl.zeros((P, C), tl.float32), tl.zeros((P, C), tl.float32)
    for k in range(per_program):
        at, there, _ = _block(tl.program_id(0) * per_program + k, pixels, channels, P, C)
        unit, above, goes_on = _back(x, d_y, at, there, offset, mean, scale, gain, level, RELU_FIRST, D)
        to_shift += above
        to_weight += above * unit
        if EACH == 4:
            passed += tl.where(goes_on, above, 0.0)
            opened += goes_on.to(tl.float32)
    place = parts + tl.program_id(0) * EACH * channels
    _store(place, _sum(to_shift), channels, C)
    _store(place + channels, _sum(to_weight), channels, C)
    if EACH == 4:
        _store(place + 2 * channels, _sum(passed), channels, C)
        _store(place + 3 * channels, _sum(opened), channels, C)


@triton.jit
def _to_bias(passed, opened, to_shift, level, along, zero, pixels):
    """The sum over the open pixels of what reaches them, before the gain; `zero` is the normalised 0 of the others.

    Over all pixels that would be 0, so it is taken from the open or from the closed ones, whichever are fewer: exactly
    0 where all are one or the other.
    """
    closed = pixels - opened
    from_open = passed - level * opened + along * zero * closed
    from_closed = (level + along * zero) * closed - (to_shift - passed)
    return tl.where(opened < closed, from_open, from_closed)


@launched
@triton.jit
def norm_backward(
    x, bias, weight, shift, moments, d_y, parts, d_x, d_vectors, pixels, channels, per_program, count,
    P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, RELU_FIRST: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Shapes: d_vectors [3, channels], to weight, shift and bias, or the first two where there is no bias"""
    offset, mean, scale, gain, level = _vectors(bias, weight, shift, moments, channels, C)
    to_shift = _sum(_parts(parts, 0, channels, count, C, K, EACH))
    to_weight = _sum(_parts(parts, 1, channels, count, C, K, EACH))
    even, along = to_shift / pixels, to_weight / pixels
    if tl.program_id(0) == 0:
        _store(d_vectors, to_weight, channels, C)
        _store(d_vectors + channels, to_shift, channels, C)
        if EACH == 4:
            passed = _sum(_parts(parts, 2, channels, count, C, K, EACH))
            opened = _sum(_parts(parts, 3, channels, count, C, K, EACH))
            reaching = _to_bias(passed, opened, to_shift, even, along, -mean * scale, pixels)
            _store(d_vectors + 2 * channels, reaching * gain * scale, channels, C)
        elif bias is not None:  # the norm takes out whatever the bias adds
            _store(d_vectors + 2 * channels, tl.zeros((1, C), tl.float32), channels, C)
    for k in range(per_program):
        at, there, _ = _block(tl.program_id(0) * per_program + k, pixels, channels, P, C)
        unit, above, goes_on = _back(x, d_y, at, there, offset, mean, scale, gain, level, RELU_FIRST, D)
        grad = (above - even - unit * along) * (gain * scale)
        if RELU_FIRST:
            grad = tl.where(goes_on, grad, 0.0)
        tl.store(d_x + at, grad.to(d_x.dtype.element_ty), mask=there)


def trains(norm: nn.Module) -> bool:
    """Whether this is the batch norm of a training step as torch has it by default."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.running_mean is not None
        and norm.momentum is not None
        and norm.affine
    )


def takes(maps: Tensor, bias: Tensor | None, norm: nn.Module) -> bool:
    """Whether there are kernels for the norm of maps [b, c, h, w], for one network or, under vmap, its replicas."""
    if (
        not trains(norm)
        or maps.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or not maps.shape[1] < maps.numel() < 2**40
        or any(t.dtype != torch.float32 for t in (bias, *_state(norm)[:4]) if t is not None)
        or not (stands_for(maps.device).type == "cuda" or bool(triton.knobs.runtime.interpret))
    ):
        return False
    replicas = [torch._C._functorch.is_batchedtensor(t) for t in (maps, bias, *_state(norm)) if t is not None]
    if any(replicas):
        return all(replicas)
    return maps.is_contiguous(memory_format=torch.channels_last)


def _state(norm: nn.Module) -> tuple[Any, ...]:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked


def takes_capsules(maps: Tensor, bias: Tensor | None, norm: nn.Module, dim: int) -> bool:
    """As `takes`, for capsules of so many channels."""
    return takes(maps, bias, norm) and maps.shape[1] % dim == 0 and dim <= LONGEST and dim & (dim - 1) == 0


def norm_with_relu(
    maps: Tensor, bias: Tensor | None, norm: nn.BatchNorm2d, relu_first: bool, squashed: int = 0
) -> Tensor:
    """Batch norm of max(maps + bias, 0), or max(., 0) of the batch norm of maps + bias, and its running statistics.

    Args:
        squashed: how many channels are a capsule; where it is 0 nothing is squashed after ReLU.

    Shapes: maps [b, c, h, w], bias [c] -> [b, c, h, w]
    """
    y, _ = _Norm.apply(maps, bias, *_state(norm), norm.momentum, norm.eps, relu_first, squashed)
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, weight: Tensor, shift: Tensor,
        running_mean: Tensor, running_var: Tensor, tracked: Tensor,
        momentum: float, eps: float, relu_first: bool, squashed: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y = torch.empty_like(x)
        grid, sizes, block = _cut(x, squashed)
        parts = torch.empty(grid[0], 2, len(weight), dtype=torch.float32, device=x.device)
        moments = torch.empty(2, len(weight), dtype=torch.float32, device=x.device)
        block["RELU_FIRST"] = relu_first
        norm_moments[grid](x, bias, parts, *sizes, **block, maxnreg=REGISTERS)
        norm_forward[grid](
            x, bias, weight, shift, parts, y, moments, running_mean, running_var, tracked, eps, momentum,
            *sizes, grid[0], tracked.numel(), **block, D=squashed,
            K=triton.next_power_of_2(grid[0]), N=triton.next_power_of_2(triton.cdiv(tracked.numel(), grid[1])),
        )  # fmt: skip
        return y, moments

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, weight, shift, *_, relu_first, squashed = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, bias, weight, shift, output[1])
        ctx.relu_first, ctx.squashed = relu_first, squashed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, _: Any) -> Any:
        inputs = ctx.saved_tensors
        x, bias, weight = inputs[:3]
        d_y, d_x = laid_out_as(x, d_y), torch.empty_like(x)
        grid, sizes, block = _cut(x, ctx.squashed)
        each = 4 if ctx.relu_first and bias is not None else 2
        parts = torch.empty(grid[0], each, len(weight), dtype=torch.float32, device=x.device)
        vectors = torch.empty(2 if bias is None else 3, len(weight), dtype=torch.float32, device=x.device)
        block |= {"RELU_FIRST": ctx.relu_first, "EACH": each, "D": ctx.squashed}
        norm_sums[grid](*inputs, d_y, parts, *sizes, **block)
        padded = triton.next_power_of_2(grid[0])
        norm_backward[grid](*inputs, d_y, parts, d_x, vectors, *sizes, grid[0], **block, K=padded)
        return d_x, None if bias is None else vectors[2], vectors[0], vectors[1], *[None] * 7

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
        """The replicas' channels side by side. Shapes: x [r, b, c, h, w], the vectors [r, c] -> [b, r, c, h, w]"""
        flat = x.movedim(in_dims[0], 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        vectors = [
            None if vector is None else vector.movedim(dim, 0).view(-1)
            for vector, dim in zip(rest[:6], in_dims[1:7], strict=True)
        ]
        y, moments = _Norm.apply(flat, *vectors, *rest[6:])
        return (y.unflatten(1, (info.batch_size, -1)), moments.unflatten(1, (info.batch_size, -1))), (1, 1)


def _cut(x: Tensor, squashed: int) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """The grid over pixels and channels; pixels, channels and blocks for each program; and a block and its warps."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    wide = max(squashed, min(triton.next_power_of_2(channels), 16 if channels < 256 else 32))
    columns = triton.cdiv(channels, wide)
    numbers = NUMBERS if x.numel() > NUMBERS * PROGRAMS // 4 else NUMBERS // 2  # fewer, to fill the device
    high = numbers // wide
    blocks = triton.cdiv(pixels, high)
    per_program = triton.cdiv(blocks, max(1, min(PARTS, PROGRAMS // columns)))
    block = {"P": high, "C": wide, "num_warps": max(1, numbers // 512)}
    return (triton.cdiv(blocks, per_program), columns), (pixels, channels, per_program), block
