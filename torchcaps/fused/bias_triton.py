"""The bias and the nonlinearity after a matrix product in a training step, one kernel each way.

Backward, one program has all rows of its columns, so that the gradient to the bias is a sum it has at hand. Replicas
under vmap are one more axis of the grid.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.rows_triton import load_rows, relu

ROWS = 512  # at most: backward, a program goes through all of them


@triton.jit
def _tile(number, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Where a block of rows of this program's columns and replica lies, and what of it is there. Shapes: [R, C]"""
    row, column = number * R + tl.arange(0, R), tl.program_id(0) * C + tl.arange(0, C)
    at = (tl.program_id(1).to(tl.int64) * rows + row[:, None]) * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def activated(x, KIND: tl.constexpr):
    return relu(x) if KIND == "relu" else tl.sigmoid(x)


@triton.jit
def handed_back(y, d_y, KIND: tl.constexpr):
    """The gradient before the nonlinearity, from what came out of it and the gradient there."""
    value, above = y.to(tl.float32), d_y.to(tl.float32)
    return tl.where(value > 0, above, 0.0) if KIND == "relu" else above * value * (1 - value)


@triton.jit
def bias_forward(x, bias, y, rows, columns, blocks, R: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    column = tl.program_id(0) * C + tl.arange(0, C)
    offset = tl.load(bias + tl.program_id(1) * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    for k in range(blocks):
        at, there = _tile(k, rows, columns, R, C)
        value = activated(load_rows(x, at, there) + offset[None, :], KIND)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def bias_backward(y, d_y, d_x, d_bias, rows, columns, blocks, R: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    total = tl.zeros((R, C), tl.float32)
    for k in range(blocks):
        at, there = _tile(k, rows, columns, R, C)
        grad = handed_back(load_rows(y, at, there), load_rows(d_y, at, there), KIND)
        total += grad
        tl.store(d_x + at, grad.to(d_x.dtype.element_ty), mask=there)
    column = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(d_bias + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


def takes(x: Tensor, bias: Tensor) -> bool:
    """Whether there is a kernel for x [n, d] and bias [d], for one network or, under vmap, its replicas."""
    replicas = [torch._C._functorch.is_batchedtensor(t) for t in (x, bias)]
    return (
        x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and bias.dtype == torch.float32
        and 0 < len(x) <= ROWS
        and x.shape[1] > 0
        and (x.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
        and all(replicas) == any(replicas)
    )


def biased(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """max(x + bias, 0) for "relu", or "sigmoid" of it. Shapes: x [n, d], bias [d] -> [n, d]"""
    y: Tensor = _Biased.apply(x, bias, kind)
    return y


class _Biased(torch.autograd.Function):
    """Shapes: x [n, d] or [r, n, d], bias [d] or [r, d]"""

    @staticmethod
    def forward(x: Tensor, bias: Tensor, kind: str) -> Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        y = torch.empty_like(x)
        grid, sizes, block = _cut(x)
        bias_forward[grid](x, bias, y, *sizes, **block, KIND=kind, num_warps=2)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.kind = inputs[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        d_x = torch.empty_like(y)
        d_bias = torch.empty(*y.shape[:-2], y.shape[-1], dtype=torch.float32, device=y.device)
        grid, sizes, block = _cut(y)
        bias_backward[grid](y, d_y.contiguous(), d_x, d_bias, *sizes, **block, KIND=ctx.kind, num_warps=2)
        return d_x, d_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Tensor, kind: str) -> Any:
        return _Biased.apply(x.movedim(in_dims[0], 0), bias.movedim(in_dims[1], 0), kind), 0


def _cut(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """The grid over columns and replicas; rows, columns and blocks of rows; and the size of a block."""
    rows, columns = x.shape[-2:]
    high, wide = min(32, triton.next_power_of_2(rows)), 16
    grid = triton.cdiv(columns, wide), x.shape[:-2].numel()
    return grid, (rows, columns, triton.cdiv(rows, high)), {"R": high, "C": wide}
