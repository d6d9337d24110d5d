"""A linear layer of few rows with its nonlinearity in a training step, one kernel each way.

Such a layer is as quick as its weights are read, so that the rows stay in one block. Backward, some programs have a
block of the weights' gradient, for which they need no sum over programs, and the others some columns of that of the
rows. Products are in the rows' dtype, sums in float32. Replicas under vmap are one more axis of the grid.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.bias_triton import activated, handed_back
from torchcaps.fused.switch import fronted

ROWS = 32  # at most
DEEP = 128  # numbers of a row that are multiplied at a time
OUTS = 16  # columns of a program forward
INS = 32  # columns of the rows' gradient of a program
SIDE = 64  # of a block of the weights' gradient


@triton.jit
def _block(x, row, column, rows, columns):
    """Shapes: row [R, 1] and column [1, C], or one of each transposed"""
    return tl.load(x + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)


@triton.jit
def _gradient(y, d_y, row, out, rows, outs, KIND: tl.constexpr):
    """That before the nonlinearity. Shapes: row [R, 1], out [C] -> [R, C]"""
    return handed_back(_block(y, row, out[None, :], rows, outs), _block(d_y, row, out[None, :], rows, outs), KIND)


@triton.jit
def linear_forward(
    x, weight, bias, y, rows, ins, outs,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shapes: x [r, rows, ins], weight [r, outs, ins], bias [r, outs] -> y [r, rows, outs]"""
    replica = tl.program_id(1).to(tl.int64)
    row, out = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)[None, :]
    x += replica * rows * ins
    weight += replica * outs * ins
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, ins, K):
        k = start + tl.arange(0, K)
        factor = _block(weight, out, k[:, None], outs, ins)  # [K, C]
        total = tl.dot(_block(x, row, k[None, :], rows, ins), factor, total, input_precision=PRECISION)
    total += tl.load(bias + replica * outs + out, mask=out < outs, other=0.0)
    value = activated(total, KIND).to(y.dtype.element_ty)
    tl.store(y + (replica * rows + row) * outs + out, value, mask=(row < rows) & (out < outs))


@triton.jit
def _to_rows(
    block, weight, y, d_y, d_x, rows, ins, outs,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C columns of d_x."""
    row, column = tl.arange(0, R)[:, None], block * C + tl.arange(0, C)[None, :]
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, outs, K):
        out = start + tl.arange(0, K)
        grad = _gradient(y, d_y, row, out, rows, outs, KIND)
        factor = _block(weight, out[:, None], column, outs, ins)
        total = tl.dot(grad.to(factor.dtype), factor, total, input_precision=PRECISION)
    tl.store(d_x + row * ins + column, total.to(d_x.dtype.element_ty), mask=(row < rows) & (column < ins))


@triton.jit
def _to_weight(
    block, x, y, d_y, d_weight, d_bias, rows, ins, outs,
    R: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S x S of d_weight, and where they are the first of their rows, those of d_bias."""
    across = tl.cdiv(ins, S)
    row, out = tl.arange(0, R)[:, None], block // across * S + tl.arange(0, S)
    column = block % across * S + tl.arange(0, S)[None, :]
    grad = _gradient(y, d_y, row, out, rows, outs, KIND)
    known = _block(x, row, column, rows, ins)
    found = tl.dot(tl.trans(grad.to(known.dtype)), known, input_precision=PRECISION)
    places = d_weight + out[:, None] * ins + column
    tl.store(places, found.to(d_weight.dtype.element_ty), mask=(out < outs)[:, None] & (column < ins))
    tl.store(d_bias + out, tl.sum(grad, 0), mask=out < tl.where(block % across == 0, outs, 0))


@triton.jit
def linear_backward(
    x, weight, y, d_y, d_x, d_weight, d_bias, rows, ins, outs,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Shapes: as forward"""
    replica = tl.program_id(1).to(tl.int64)
    ins_at, outs_at, weights_at = replica * rows * ins, replica * rows * outs, replica * outs * ins
    block = tl.program_id(0)
    columns = tl.cdiv(ins, C)
    y += outs_at
    d_y += outs_at
    if block < columns:
        _to_rows(block, weight + weights_at, y, d_y, d_x + ins_at, rows, ins, outs, R, K, C, KIND, PRECISION)
    else:
        _to_weight(
            block - columns, x + ins_at, y, d_y, d_weight + weights_at, d_bias + replica * outs, rows, ins, outs,
            R, S, KIND, PRECISION,
        )  # fmt: skip


def takes(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether there is a kernel for x [n, p], weight [d, p], bias [d], for one network or, under vmap, its replicas."""
    replicas = [torch._C._functorch.is_batchedtensor(t) for t in (x, weight, bias)]
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and bias.dtype == torch.float32
        and (x.shape[1], len(bias)) == (weight.shape[1], len(weight))
        and 0 < len(x) <= ROWS
        and 0 < weight.numel() < 2**31
        and (x.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
        and all(replicas) == any(replicas)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    """max(x W + bias, 0) for "relu", or "sigmoid" of it. Shapes: x [n, p], weight [d, p], bias [d] -> [n, d]"""
    y: Tensor = _Linear.apply(x, weight, bias, kind)
    return y


class _Linear(torch.autograd.Function):
    """Shapes: as `linear`, or all with an axis over the replicas in front"""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
        replicas, sizes, options = _cut(x, weight, kind)
        outs = sizes[2]
        y = torch.empty(*x.shape[:-1], outs, dtype=x.dtype, device=x.device)
        linear_forward[(triton.cdiv(outs, OUTS), replicas)](
            x.contiguous(), weight.contiguous(), bias.contiguous(), y, *sizes, C=OUTS, **options
        )
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.kind = inputs[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        replicas, sizes, options = _cut(x, weight, ctx.kind)
        _, ins, outs = sizes
        d_x, d_weight = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weight))
        d_bias = torch.empty(weight.shape[:-1], dtype=torch.float32, device=x.device)
        blocks = triton.cdiv(outs, SIDE) * triton.cdiv(ins, SIDE)
        linear_backward[(triton.cdiv(ins, INS) + blocks, replicas)](
            x.contiguous(), weight.contiguous(), y, d_y.contiguous(), d_x, d_weight, d_bias, *sizes,
            C=INS, S=SIDE, **options,
        )  # fmt: skip
        return d_x, d_weight, d_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Any:
        return _Linear.apply(*fronted(info, in_dims, (x, weight, bias)), kind), 0


def _cut(x: Tensor, weight: Tensor, kind: str) -> tuple[int, tuple[int, int, int], dict[str, Any]]:
    """How many replicas; rows, numbers in and numbers out; and what both kernels are told."""
    outs, ins = weight.shape[-2:]
    rows = x.shape[-2]
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    high, deep = max(16, triton.next_power_of_2(rows)), DEEP if x.element_size() == 2 else DEEP // 2
    options = {"R": high, "K": deep, "KIND": kind, "PRECISION": precision, "num_stages": 4}
    return x.shape[:-2].numel(), (rows, ins, outs), options
