"""A linear layer with its nonlinearity. The gradient before it, and the bias's, which is its sum, take one kernel."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST = 1024  # rows, which one program goes through
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def before_nonlinearity(
    y, d_y, d_x, d_bias, rows, columns, stride, KIND: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Some columns. Shapes: y, d_x [rows, columns], d_y [rows, columns] with its stride, d_bias [columns]"""
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, rows, R):
        r = start + tl.arange(0, R)
        there = (r < rows)[:, None] & (c < columns)[None, :]
        at = r[:, None] * columns + c[None, :]
        grad = tl.load(d_y + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32)
        out = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
        if KIND == "ReLU":
            grad = tl.where(out <= 0, 0.0, grad)
        if KIND == "Sigmoid":
            grad = grad * (1 - out) * out
        rounded = grad.to(d_x.dtype.element_ty)
        tl.store(d_x + at, rounded, mask=there)
        total += tl.sum(rounded.to(tl.float32), 0)
    tl.store(d_bias + c, total.to(d_bias.dtype.element_ty), mask=c < columns)


def takes(x: Tensor, linear: nn.Linear, nonlinearity: nn.Module | None) -> bool:
    return (
        x.dtype in DTYPES
        and x.dim() == 2
        and 0 < len(x) <= MOST
        and linear.bias is not None
        and (nonlinearity is None or type(nonlinearity) in (nn.ReLU, nn.Sigmoid))
        and (x.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
    )


def dense(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Args: kind: the name of the nonlinearity's type, ReLU, Sigmoid or NoneType."""
    y: Tensor = _Dense.apply(x, weight, bias, kind)
    return y


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
        if kind == "ReLU":
            y = torch._addmm_activation(bias, x, weight.t())
        else:
            y = torch.addmm(bias, x, weight.t())
            y = y.sigmoid_() if kind == "Sigmoid" else y
        ctx.save_for_backward(x, weight, y)
        ctx.kind = kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        (rows, columns), d_y = y.shape, d_y if d_y.stride(1) == 1 else d_y.contiguous()
        d_z, d_bias = torch.empty_like(y), torch.empty(columns, dtype=y.dtype, device=y.device)
        few = min(16, triton.next_power_of_2(rows))
        before_nonlinearity[(triton.cdiv(columns, 32),)](
            y, d_y, d_z, d_bias, rows, columns, d_y.stride(0), KIND=ctx.kind, R=few, C=32
        )
        needs = ctx.needs_input_grad
        return d_z @ weight if needs[0] else None, d_z.t() @ x if needs[1] else None, d_bias, None
