"""What EncapNet does to its maps between convolutions, forward and backward, in as few passes as there can be.

Batch norm, ReLU and squash: once the statistics are known, one kernel forward; backward one for the sums over the
batch and one for the gradient, and nothing is kept but the input. The gate of master and aide: one kernel each way.
Maps lie in memory with their channels last, so a capsule is a row and the rows of a pixel follow each other.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchcaps.fused.norm_triton import statistics, trains
from torchcaps.fused.rows_triton import (
    NUMBERS,
    PROGRAMS,
    cut_rows,
    factors,
    laid_out_as,
    load_rows,
    relu,
    rows_at,
    takes,
)


@triton.jit
def _places(pixels, block, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr):
    """Where the numbers of a block of pixels lie, and which are there. Shapes: [P, CAPS, DP], [P, 1, DP]"""
    pixel = block.to(tl.int64) * P + tl.arange(0, P)
    capsule, entry = tl.arange(0, CAPS), tl.arange(0, DP)
    at = (pixel[:, None, None] * CAPS + capsule[None, :, None]) * D + entry[None, None, :]
    return at, (pixel < pixels)[:, None, None] & (entry < D)[None, None, :]


@triton.jit
def _of_channels(vector, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Shapes: [1, CAPS, DP]"""
    entry = tl.arange(0, DP)[None, :]
    channel = tl.arange(0, CAPS)[:, None] * D + entry
    return tl.load(vector + channel, mask=entry < D, other=0.0).to(tl.float32)[None, :, :]


@triton.jit
def _activated(x, mean, scale, weight, bias, at, there, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The input with mean 0 and variance 1, and what batch norm and ReLU make of it. Shapes: [P, CAPS, DP]"""
    unit = (load_rows(x, at, there) - _of_channels(mean, CAPS, D, DP)) * _of_channels(scale, CAPS, D, DP)
    active = unit * _of_channels(weight, CAPS, D, DP) + _of_channels(bias, CAPS, D, DP)
    return unit, tl.where(there, relu(active), 0.0)


@triton.jit
def _before_relu(active, above):
    """The gradient through squash and ReLU. Shapes: [P, CAPS, DP] -> [P, CAPS, DP]"""
    norm = tl.sqrt(tl.sum(active * active, 2))
    factor, slope = factors(norm, "squash")
    inverse = tl.where(norm > 0, 1 / tl.where(norm > 0, norm, 1.0), 0.0)
    along = tl.sum(above * active, 2) * slope * inverse
    return tl.where(active > 0, above * factor[:, :, None] + active * along[:, :, None], 0.0)


@triton.jit
def activation_forward(
    x, mean, scale, weight, bias, y, pixels, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr
):
    at, there = _places(pixels, tl.program_id(0), CAPS, D, DP, P)
    _, active = _activated(x, mean, scale, weight, bias, at, there, CAPS, D, DP)
    factor, _ = factors(tl.sqrt(tl.sum(active * active, 2)), "squash")
    tl.store(y + at, (active * factor[:, :, None]).to(y.dtype.element_ty), mask=there)


@triton.jit
def activation_sums(
    x, mean, scale, weight, bias, d_y, sums, pixels, per_program,
    CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Each program leaves its own sums, of the gradients to weight and bias, and 0 for a bias that the norm takes out.

    Shapes: sums [programs, 3, CAPS, D]
    """
    to_weight, to_bias = tl.zeros((CAPS, DP), tl.float32), tl.zeros((CAPS, DP), tl.float32)
    for k in range(per_program):
        at, there = _places(pixels, tl.program_id(0) * per_program + k, CAPS, D, DP, P)
        unit, active = _activated(x, mean, scale, weight, bias, at, there, CAPS, D, DP)
        grad = _before_relu(active, load_rows(d_y, at, there))
        to_weight += tl.sum(grad * unit, 0)
        to_bias += tl.sum(grad, 0)
    entry = tl.arange(0, DP)[None, :]
    own = tl.program_id(0) * 3 * CAPS * D + tl.arange(0, CAPS)[:, None] * D + entry
    tl.store(sums + own, to_weight, mask=entry < D)
    tl.store(sums + own + CAPS * D, to_bias, mask=entry < D)
    tl.store(sums + own + 2 * CAPS * D, tl.zeros((CAPS, DP), tl.float32), mask=entry < D)


@triton.jit
def activation_backward(
    x, mean, scale, weight, bias, d_y, sums, d_x, pixels,
    CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    at, there = _places(pixels, tl.program_id(0), CAPS, D, DP, P)
    unit, active = _activated(x, mean, scale, weight, bias, at, there, CAPS, D, DP)
    grad = _before_relu(active, load_rows(d_y, at, there))
    along = _of_channels(sums, CAPS, D, DP) / pixels
    level = _of_channels(sums + CAPS * D, CAPS, D, DP) / pixels
    gain = _of_channels(weight, CAPS, D, DP) * _of_channels(scale, CAPS, D, DP)
    tl.store(d_x + at, ((grad - level - unit * along) * gain).to(d_x.dtype.element_ty), mask=there)


@triton.jit
def gate_forward(master, aide, m1, m2, y, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.load(m1 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    second = tl.load(m2 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    mixed = first * load_rows(master, at, there) + second * load_rows(aide, at, there)
    tl.store(y + at, mixed.to(y.dtype.element_ty), mask=there)


@triton.jit
def gate_backward(
    master, aide, m1, m2, d_y, d_master, d_aide, d_m1, d_m2, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr
):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.load(m1 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    second = tl.load(m2 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    above = load_rows(d_y, at, there)
    to_first = tl.sum(above * load_rows(master, at, there), 1)
    to_second = tl.sum(above * load_rows(aide, at, there), 1)
    tl.store(d_master + at, (above * first).to(d_master.dtype.element_ty), mask=there)
    tl.store(d_aide + at, (above * second).to(d_aide.dtype.element_ty), mask=there)
    tl.store(d_m1 + row, to_first.to(d_m1.dtype.element_ty), mask=row < rows)
    tl.store(d_m2 + row, to_second.to(d_m2.dtype.element_ty), mask=row < rows)


def takes_activation(features: Tensor, norm: nn.Module, caps: int, bias: Tensor | None = None) -> bool:
    """Whether this is the batch norm of a training step as torch has it, over maps whose rows are capsules."""
    return (
        trains(norm)
        and features.shape[1] % caps == 0
        and caps & (caps - 1) == 0
        and caps * triton.next_power_of_2(features.shape[1] // caps) <= NUMBERS
        and features.numel() > features.shape[1]
        and features.is_contiguous(memory_format=torch.channels_last)
        and all(t.dtype == torch.float32 for t in (bias, *norm.parameters()) if t is not None)
        and takes(features.unflatten(1, (caps, -1)).movedim(2, -1))
    )


def activation(features: Tensor, norm: nn.BatchNorm2d, caps: int, bias: Tensor | None = None) -> Tensor:
    """Shapes: [b, (c d), h, w], bias [(c d)] -> [b, (c d), h, w]"""
    moments = statistics(features.detach(), bias, norm)
    y: Tensor = _Activation.apply(features, bias, norm.weight, norm.bias, *moments, caps)
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _: Tensor | None, weight: Tensor, shift: Tensor, mean: Tensor, scale: Tensor, caps: int
    ) -> Tensor:
        ctx.save_for_backward(x, mean, scale, weight, shift)
        ctx.caps = caps
        y = torch.empty_like(x)
        pixels, block = _pixels(x, caps)
        activation_forward[(triton.cdiv(pixels, block["P"]),)](x, mean, scale, weight, shift, y, pixels, **block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        inputs = ctx.saved_tensors
        x, weight = inputs[0], inputs[3]
        d_y, d_x = laid_out_as(x, d_y), torch.empty_like(x)
        pixels, block = _pixels(x, ctx.caps)
        blocks = triton.cdiv(pixels, block["P"])
        per_program = triton.cdiv(blocks, PROGRAMS)
        programs = triton.cdiv(blocks, per_program)
        parts = torch.empty(programs, 3, len(weight), dtype=torch.float32, device=x.device)
        activation_sums[(programs,)](*inputs, d_y, parts, pixels, per_program, **block)
        sums = parts.sum(0)
        activation_backward[(blocks,)](*inputs, d_y, sums, d_x, pixels, **block)
        return d_x, sums[2] if ctx.needs_input_grad[1] else None, sums[0], sums[1], None, None, None


def _pixels(x: Tensor, caps: int) -> tuple[int, dict[str, int]]:
    """How many pixels there are, and how many a program takes: fewer where there are few, to fill the device."""
    pixels, dim = x.numel() // x.shape[1], x.shape[1] // caps
    padded = triton.next_power_of_2(dim)
    few = triton.next_power_of_2(triton.cdiv(pixels, 256))
    return pixels, {"CAPS": caps, "D": dim, "DP": padded, "P": min(NUMBERS // (caps * padded), max(4, few))}


def takes_gate(master: Tensor, aide: Tensor, m1: Tensor, m2: Tensor) -> bool:
    """Whether votes [b, c, h, w, d] are rows, and the coefficients [b, c, h, w] lie in memory as these rows do."""
    return (
        takes(master)
        and master.shape == aide.shape
        and master.stride() == aide.stride()
        and m1.shape == m2.shape == master.shape[:-1]
        and m1.stride() == m2.stride() == torch.empty_like(master[..., 0], device="meta").stride()
        and master.dtype == aide.dtype == m1.dtype == m2.dtype
    )


def gate(master: Tensor, aide: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """Shapes: master and aide [b, c, h, w, d], m1 and m2 [b, c, h, w] -> [b, c, h, w, d]"""
    y: Tensor = _Gate.apply(master, aide, m1, m2)
    return y


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, aide: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
        ctx.save_for_backward(master, aide, m1, m2)
        y = torch.empty_like(master)
        rows, block = cut_rows(master)
        gate_forward[(triton.cdiv(rows, block["R"]),)](master, aide, m1, m2, y, rows, **block, num_warps=8)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        inputs = ctx.saved_tensors
        master = inputs[0]
        d_y = laid_out_as(master, d_y)
        gradients = [torch.empty_like(x) for x in inputs]
        rows, block = cut_rows(master)
        gate_backward[(triton.cdiv(rows, block["R"]),)](*inputs, d_y, *gradients, rows, **block, num_warps=8)
        return tuple(gradients)
