"""The gate of master and aide in EncapNet, one kernel each way.

Maps lie in memory with their channels last, so a capsule is a row and the rows of a pixel follow each other.
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
from torchcaps.fused.rows_triton import cut_rows, laid_out_as, load_rows, rows_at, takes


@launched
@triton.jit
def gate_forward(master, aide, m1, m2, y, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    first = tl.load(m1 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    second = tl.load(m2 + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    mixed = first * load_rows(master, at, there) + second * load_rows(aide, at, there)
    tl.store(y + at, mixed.to(y.dtype.element_ty), mask=there)


@launched
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
