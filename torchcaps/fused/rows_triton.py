"""Norms over short rows, forward and backward, one kernel each: layer norm, the squashes, the length.

torch gives a row a block of threads, and a pose has 8 to 36 numbers. Here a program takes many rows, as they lie: poses
whose numbers are neighbours in memory are rows one after the other, whatever the order of their other axes.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.launch_triton import launched
from torchcaps.fused.switch import stands_for

LONGEST = 128  # of the rows
NUMBERS = 2048  # in a block of rows
FEW = 128  # in a block where there are few rows
PROGRAMS = 1024  # that share the rows where each leaves a sum of its own


@triton.jit
def rows_at(block, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    """Where the rows of a block lie, and what of them is there. Shapes: [R, DP]"""
    row = block.to(tl.int64) * R + tl.arange(0, R)
    entry = tl.arange(0, DP)
    return row[:, None] * D + entry[None, :], (row < rows)[:, None] & (entry < D)[None, :]


@triton.jit
def load_rows(x, at, there):
    return tl.load(x + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def relu(x):
    """As torch has it: what is not a number stays so."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def in_capsules(x, D: tl.constexpr):
    """The sum over each capsule. Shapes: [P, C] -> [P, C / D]"""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // D, D)), 2)


@triton.jit
def times(x, factor, D: tl.constexpr):
    """Every capsule times a factor of its own. Shapes: [P, C], [P, C / D] -> [P, C]"""
    capsules = tl.reshape(x, (x.shape[0], x.shape[1] // D, D))
    return tl.reshape(capsules * factor[:, :, None], x.shape)


@triton.jit
def normalised(x, there, eps, D: tl.constexpr):
    """The row with mean 0 and variance 1, and by what it was divided. Shapes: [R, DP] -> [R, DP], [R]"""
    centred = tl.where(there, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / D + eps)
    return centred * scale[:, None], scale


@launched
@triton.jit
def layer_norm_forward(x, weight, bias, y, eps, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    entry = tl.arange(0, DP)
    gain = tl.load(weight + entry, mask=entry < D, other=0.0).to(tl.float32)
    shift = tl.load(bias + entry, mask=entry < D, other=0.0).to(tl.float32)
    unit, _ = normalised(load_rows(x, at, there), there, eps, D)
    tl.store(y + at, (unit * gain[None, :] + shift[None, :]).to(y.dtype.element_ty), mask=there)


@launched
@triton.jit
def layer_norm_backward(
    x, weight, d_y, d_x, d_weight, d_bias, eps, rows, per_program, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr
):
    """Each program goes through `per_program` blocks and leaves its own sums. Shapes: d_weight, d_bias [programs, D]"""
    entry = tl.arange(0, DP)
    gain = tl.load(weight + entry, mask=entry < D, other=0.0).to(tl.float32)[None, :]
    d_gain, d_shift = tl.zeros((R, DP), dtype=tl.float32), tl.zeros((R, DP), dtype=tl.float32)
    for k in range(per_program):
        at, there = rows_at(tl.program_id(0) * per_program + k, rows, D, DP, R)
        unit, scale = normalised(load_rows(x, at, there), there, eps, D)
        grad = load_rows(d_y, at, there)
        d_gain += grad * unit
        d_shift += grad
        grad *= gain
        mean = (tl.sum(grad, 1) / D)[:, None]
        along = (tl.sum(grad * unit, 1) / D)[:, None]
        tl.store(d_x + at, ((grad - mean - unit * along) * scale[:, None]).to(d_x.dtype.element_ty), mask=there)
    own = tl.program_id(0) * D + entry
    tl.store(d_weight + own, tl.sum(d_gain, 0), mask=entry < D)
    tl.store(d_bias + own, tl.sum(d_shift, 0), mask=entry < D)


@triton.jit
def near_zero(n):
    """(1 - exp(-n)) / n and its derivative for n up to 1, as series: of the differences little but rounding is left."""
    value, slope = tl.full(n.shape, 0.0, tl.float32), tl.full(n.shape, 0.0, tl.float32)
    for k in tl.static_range(11):
        slope = -(value + n * slope) * (1.0 / (12 - k))
        value = 1 - n * value * (1.0 / (12 - k))
    return value, slope


@triton.jit
def factors(norm, KIND: tl.constexpr):
    """What a squash multiplies a row of that norm with, and its derivative by the norm."""
    if KIND == "squash":
        inverse = 1 / (1 + norm * norm)
        factor, slope = norm * inverse, (1 - norm * norm) * inverse * inverse
    else:
        small = norm < 1
        safe = tl.where(small, 1.0, norm)
        rest = tl.exp(-safe)
        factor, slope = (1 - rest) / safe, (rest * (1 + safe) - 1) / (safe * safe)
        value, change = near_zero(tl.where(small, norm, 0.0))
        factor, slope = tl.where(small, value, factor), tl.where(small, change, slope)
    return factor, slope


@launched
@triton.jit
def squash_forward(x, y, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = load_rows(x, at, there)
    norm = tl.sqrt(tl.sum(row * row, 1))
    if KIND == "length":
        number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        tl.store(y + number, norm.to(y.dtype.element_ty), mask=number < rows)
    else:
        factor, _ = factors(norm, KIND)
        tl.store(y + at, (row * factor[:, None]).to(y.dtype.element_ty), mask=there)


@launched
@triton.jit
def squash_backward(x, d_y, d_x, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = load_rows(x, at, there)
    norm = tl.sqrt(tl.sum(row * row, 1))
    direction = row * tl.where(norm > 0, 1 / tl.where(norm > 0, norm, 1.0), 0.0)[:, None]
    if KIND == "length":
        number = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        grad = tl.load(d_y + number, mask=number < rows, other=0.0).to(tl.float32)[:, None] * direction
    else:
        factor, slope = factors(norm, KIND)
        above = load_rows(d_y, at, there)
        along = tl.sum(above * row, 1) * slope
        grad = above * factor[:, None] + direction * along[:, None]
    tl.store(d_x + at, grad.to(d_x.dtype.element_ty), mask=there)


def takes(x: Tensor) -> bool:
    """Whether x [..., d] is short rows one after the other in memory, in a dtype that kernels have."""
    return (
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.dim() > 1
        and 0 < x.shape[-1] <= LONGEST
        and 0 < x.numel() < 2**40
        and (stands_for(x.device).type == "cuda" or bool(triton.knobs.runtime.interpret))
        and _dense(x)
    )


def _dense(x: Tensor) -> bool:
    """Whether the numbers of a row are neighbours and the rows, in some order, leave no gaps."""
    if x.is_contiguous():
        return True
    size = 1
    for stride, length in sorted((s, n) for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
        if stride != size * x.shape[-1]:
            return False
        size *= length
    return x.stride(-1) == 1 or x.shape[-1] == 1


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, dtype)
    return y


def squashed(x: Tensor, kind: str) -> Tensor:
    y: Tensor = _Squash.apply(x, kind)
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x, dtype=dtype)
        rows, block = cut_rows(x)
        layer_norm_forward[(triton.cdiv(rows, block["R"]),)](x, weight, bias, y, eps, rows, **block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        d_y, d_x = laid_out_as(x, d_y), torch.empty_like(x)
        rows, block = cut_rows(x)
        blocks = triton.cdiv(rows, block["R"])
        per_program = triton.cdiv(blocks, PROGRAMS)
        programs = triton.cdiv(blocks, per_program)
        sums = torch.empty(2, programs, x.shape[-1], dtype=torch.float32, device=x.device)
        layer_norm_backward[(programs,)](x, weight, d_y, d_x, sums[0], sums[1], ctx.eps, rows, per_program, **block)
        d_weight, d_bias = sums.sum(1).to(weight.dtype)
        return d_x, d_weight, d_bias, None, None


class _Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        y = torch.empty_like(x[..., 0] if kind == "length" else x)
        rows, block = cut_rows(x)
        squash_forward[(triton.cdiv(rows, block["R"]),)](x, y, rows, **block, KIND=kind)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_y, d_x = laid_out_as(x[..., 0] if ctx.kind == "length" else x, d_y), torch.empty_like(x)
        rows, block = cut_rows(x)
        squash_backward[(triton.cdiv(rows, block["R"]),)](x, d_y, d_x, rows, **block, KIND=ctx.kind)
        return d_x, None


def cut_rows(x: Tensor) -> tuple[int, dict[str, int]]:
    """How many rows there are, and how many a program takes: fewer where there are few, to fill the device."""
    d = x.shape[-1]
    rows, padded = x.numel() // d, triton.next_power_of_2(d)
    most = max(1, NUMBERS // padded)
    few = triton.next_power_of_2(triton.cdiv(rows, 256))
    return rows, {"D": d, "DP": padded, "R": min(most, max(few, min(most, FEW // padded), 1))}


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """Strides of dimensions of size 1 mean nothing."""
    like = torch.empty_like(x, dtype=y.dtype)
    places = zip(y.shape, y.stride(), like.stride(), strict=True)
    return y if all(size == 1 or own == wanted for size, own, wanted in places) else like.copy_(y)
