"""Attention routing in Triton: the votes are read once forward, and once backward, where their gradient is written.

A program takes some sites and one parent. Logits, softmax and mixture are in float32, whatever the votes are in. The
gradient of the kernel is summed over the sites of a program, then over the programs in a fixed order.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

SITES = 64  # that a program takes
MOST_CHILDREN, LONGEST = 16, 64


@triton.jit
def _vote(votes, site, m, j, N, C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Where the votes of child m for parent j are, and which. Shapes: [S, DP]"""
    d = tl.arange(0, DP)
    at = ((site.to(tl.int64) * C + m) * J + j)[:, None] * D + d[None, :]
    return votes + at, (site < N)[:, None] & (d < D)[None, :]


@triton.jit
def _form(kernel, m, j, C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr):
    """Where it says how the vote of child m speaks for each child, and which. Shapes: [CP, DP]"""
    i, d = tl.arange(0, CP), tl.arange(0, DP)
    return kernel + ((m * C + i) * J + j)[:, None] * D + d[None, :], (i < C)[:, None] & (d < D)[None, :]


@triton.jit
def _load(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _coupling(
    votes, kernel, site, j, N,
    C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Shapes: [S, CP], 0 beyond the last child"""
    logits = tl.zeros((S, CP), tl.float32)
    for m in range(C):
        at, there = _vote(votes, site, m, j, N, C, J, D, DP)
        places, inside = _form(kernel, m, j, C, J, D, CP, DP)
        logits = tl.dot(_load(at, there), tl.trans(_load(places, inside)), logits, input_precision="ieee")
    logits = tl.where((tl.arange(0, CP) < C)[None, :], logits, -float("inf"))
    shares = tl.exp(logits - tl.max(logits, 1)[:, None])
    return shares / tl.sum(shares, 1)[:, None]


@triton.jit
def _forward(
    votes, kernel, poses, coupling, N,
    C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1)
    site = tl.program_id(0) * S + tl.arange(0, S)
    i = tl.arange(0, CP)
    shares = _coupling(votes, kernel, site, j, N, C, J, D, CP, DP, S)
    pairs = (site.to(tl.int64)[:, None] * C + i[None, :]) * J + j
    tl.store(coupling + pairs, shares.to(coupling.dtype.element_ty), mask=(site < N)[:, None] & (i < C)[None, :])
    mixture = tl.zeros((S, DP), tl.float32)
    for m in range(C):
        at, there = _vote(votes, site, m, j, N, C, J, D, DP)
        share = tl.sum(tl.where((i == m)[None, :], shares, 0.0), 1)
        mixture += share[:, None] * _load(at, there)
    places, inside = _vote(poses, site, 0, j, N, 1, J, D, DP)
    tl.store(places, mixture.to(poses.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    votes, kernel, d_poses, d_votes, d_kernel, N,
    C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Shapes: d_kernel [programs, m, i, j, d]"""
    j = tl.program_id(1)
    site = tl.program_id(0) * S + tl.arange(0, S)
    i = tl.arange(0, CP)
    shares = _coupling(votes, kernel, site, j, N, C, J, D, CP, DP, S)
    places, inside = _vote(d_poses, site, 0, j, N, 1, J, D, DP)
    above = _load(places, inside)
    d_shares = tl.zeros((S, CP), tl.float32)
    for m in range(C):
        at, there = _vote(votes, site, m, j, N, C, J, D, DP)
        along = tl.sum(above * _load(at, there), 1)
        d_shares += tl.where((i == m)[None, :], along[:, None], 0.0)
    d_logits = shares * (d_shares - tl.sum(shares * d_shares, 1)[:, None])
    own = d_kernel + tl.program_id(0).to(tl.int64) * (C * C * J * D)
    for n in range(C):
        vote, known = _vote(votes, site, n, j, N, C, J, D, DP)
        form, of_form = _form(kernel, n, j, C, J, D, CP, DP)
        share = tl.sum(tl.where((i == n)[None, :], shares, 0.0), 1)
        grad = tl.dot(d_logits, _load(form, of_form), share[:, None] * above, input_precision="ieee")
        to_vote, _ = _vote(d_votes, site, n, j, N, C, J, D, DP)
        tl.store(to_vote, grad.to(d_votes.dtype.element_ty), mask=known)
        to_form, _ = _form(own, n, j, C, J, D, CP, DP)
        tl.store(to_form, tl.dot(tl.trans(d_logits), _load(vote, known), input_precision="ieee"), mask=of_form)


def takes(votes: Tensor, kernel: Tensor) -> bool:
    """Whether the kernels know the type, and there are few enough children to be seen at once."""
    return (
        votes.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and kernel.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and votes.shape[-3] <= MOST_CHILDREN
        and votes.shape[-1] <= LONGEST
        and votes.numel() > 0
        and (votes.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
    )


def attention(votes: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes: votes [..., i, j, d], kernel [m, i, j, d] -> poses [..., j, d], coupling [..., i, j]"""
    poses, coupling = _Attention.apply(votes.reshape(-1, *votes.shape[-3:]), kernel)
    return poses.unflatten(0, votes.shape[:-3]), coupling.unflatten(0, votes.shape[:-3])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, votes: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        votes, kernel = votes.contiguous(), kernel.contiguous()
        ctx.save_for_backward(votes, kernel)
        n, i, j, d = votes.shape
        poses, coupling = votes.new_empty(n, j, d), votes.new_empty(n, i, j)
        ctx.mark_non_differentiable(coupling)
        _forward[(triton.cdiv(n, SITES), j)](votes, kernel, poses, coupling, n, **_sizes(votes))
        return poses, coupling

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_poses: Tensor, _: Tensor) -> Any:
        votes, kernel = ctx.saved_tensors
        programs, parents = triton.cdiv(len(votes), SITES), votes.shape[2]
        d_votes = torch.empty_like(votes)
        d_kernel = torch.empty(programs, *kernel.shape, dtype=torch.float32, device=kernel.device)
        inputs = votes, kernel, d_poses.contiguous(), d_votes, d_kernel
        _backward[(programs, parents)](*inputs, len(votes), **_sizes(votes))
        return d_votes, d_kernel.sum(0).to(kernel.dtype)


def _sizes(votes: Tensor) -> dict[str, int]:
    _, i, j, d = votes.shape
    return {
        "C": i,
        "J": j,
        "D": d,
        "CP": max(16, triton.next_power_of_2(i)),
        "DP": max(16, triton.next_power_of_2(d)),
        "S": SITES,
        "num_warps": 8,
    }
