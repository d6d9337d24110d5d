"""EM's parents from the sums over their votes, forward and backward, one kernel each.

A program takes many parents, one row of d numbers each: mean and variance, what the votes cost, how sure it is that the
parent is there, and what the next step asks of it.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.launch_triton import launched
from torchcaps.fused.rows_triton import FEW, NUMBERS, cut_rows, rows_at


@triton.jit
def sums_of(mass, first, second, at, there, row, rows, splits, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Adds up the splits. Shapes: [splits, rows], [splits, rows, D], [splits, rows, D] -> [R, 1], [R, DP], [R, DP]"""
    zeroth = tl.zeros((R, 1), dtype=tl.float32)
    once, twice = tl.zeros((R, DP), dtype=tl.float32), tl.zeros((R, DP), dtype=tl.float32)
    for _ in range(splits):
        zeroth += tl.load(mass + row, mask=row < rows, other=0.0)[:, None]
        once += tl.load(first + at, mask=there, other=0.0)
        twice += tl.load(second + at, mask=there, other=0.0)
        mass += rows
        first += tl.cast(rows, tl.int64) * D
        second += tl.cast(rows, tl.int64) * D
    return zeroth, once, twice


@triton.jit
def fit(zeroth, once, twice, centre, floor, there):
    """What forward and backward share.

    Returns: the mass that sums are divided by and what part of it is there, [R, 1]; first and second moment, how far
        the mean is from the centre, the variance as it comes out, and at least 0 with the floor added, [R, DP]
    """
    least = tl.maximum(zeroth, 1e-7)
    whole = zeroth / least  # 1, but for parents that next to nobody votes for
    first, second = once / least, twice / least
    moved = first + (whole - 1) * centre
    spread = second + moved * (whole * moved - 2 * first)
    return least, whole, first, second, moved, spread, tl.where(there, tl.maximum(spread, 0.0) + floor, 1.0)


@launched
@triton.jit
def em_fit_forward(
    mass, first, second, centre, beta_u, beta_a, mean, precision, score, above, temperature, floor, splits, rows, J,
    LAST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The mean; then for the next step precision and score, or the activation if this is the last."""
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    zeroth, once, twice = sums_of(mass, first, second, at, there, row, rows, splits, R, D, DP)
    middle = tl.load(centre + at, mask=there, other=0.0)
    _, _, _, _, moved, _, variance = fit(zeroth, once, twice, middle, floor, there)
    tl.store(mean + at, middle + moved, mask=there)
    logs = 0.5 * tl.sum(tl.log(variance), 1)
    cost = (tl.load(beta_u + row % J) * D + logs) * tl.sum(zeroth, 1)
    logit = temperature * (tl.load(beta_a + row % J) - cost)
    small = tl.exp(-tl.abs(logit))
    if LAST:
        tl.store(above + row, tl.where(logit < 0, small, 1.0) / (1 + small), mask=row < rows)
    else:
        tl.store(precision + at, 1 / variance, mask=there)
        tl.store(score + row, tl.minimum(logit, 0.0) - tl.log(1 + small) - logs, mask=row < rows)


@launched
@triton.jit
def em_fit_backward(
    mass, first, second, centre, beta_u, beta_a, d_mean, d_precision, d_score, d_above, d_mass, d_first, d_second,
    d_betas, temperature, floor, splits, rows, J,
    LAST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Shapes: d_betas [2, rows], for each window its own"""
    at, there = rows_at(tl.program_id(0), rows, D, DP, R)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    zeroth, once, twice = sums_of(mass, first, second, at, there, row, rows, splits, R, D, DP)
    middle = tl.load(centre + at, mask=there, other=0.0)
    least, whole, once, twice, moved, spread, variance = fit(zeroth, once, twice, middle, floor, there)
    votes = tl.sum(zeroth, 1)
    cost = tl.load(beta_u + row % J) * D + 0.5 * tl.sum(tl.log(variance), 1)
    logit = temperature * (tl.load(beta_a + row % J) - cost * votes)
    small = tl.exp(-tl.abs(logit))
    if LAST:
        d_logit = tl.load(d_above + row, mask=row < rows, other=0.0) * small / ((1 + small) * (1 + small))
        d_logs = tl.zeros((R,), dtype=tl.float32)
    else:
        d_logs = tl.load(d_score + row, mask=row < rows, other=0.0)
        d_logit = d_logs * tl.where(logit < 0, 1.0, small) / (1 + small)
    d_cost = -temperature * d_logit
    tl.store(d_betas + row, d_cost * votes * D, mask=row < rows)
    tl.store(d_betas + rows + row, -d_cost, mask=row < rows)
    slope = 0.5 * (d_cost * votes - d_logs)[:, None] / variance
    if not LAST:
        slope -= tl.load(d_precision + at, mask=there, other=0.0) / (variance * variance)
    slope = tl.where(there & (spread >= 0), slope, 0.0)
    pull = tl.load(d_mean + at, mask=there, other=0.0)
    d_once = pull - 2 * slope * (once + (1 - whole) * moved)
    d_whole = slope * moved * moved + (pull + 2 * slope * (whole * moved - once)) * middle
    d_zeroth = tl.sum(tl.where(zeroth >= 1e-7, -(slope * twice + d_once * once), d_whole) / least, 1)
    tl.store(d_mass + row, d_zeroth + d_cost * cost, mask=row < rows)
    tl.store(d_first + at, d_once / least, mask=there)
    tl.store(d_second + at, slope / least, mask=there)


def fitted(
    moments: tuple[Tensor, Tensor, Tensor],
    centre: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    temperature: float,
    floor: float,
    last: bool = False,
) -> Any:
    """Each parent's mean, then its precision and score for the next step, or its activation after the last one.

    Args:
        moments: mass [s, n, j], first and second [s, n, j, d] around the centre, in s parts.
        centre: [..., j, d], on which nothing here depends.
        floor: added to the variances.

    Shapes: -> [..., j, d], [..., j, d], [..., j]; or [..., j, d], [..., j]
    """
    return _Fit.apply(*moments, centre, beta_u, beta_a, temperature, floor, last)


class _Fit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mass: Tensor,
        first: Tensor,
        second: Tensor,
        centre: Tensor,
        beta_u: Tensor,
        beta_a: Tensor,
        temperature: float,
        floor: float,
        last: bool,
    ) -> Any:
        ctx.dtypes = beta_u.dtype, beta_a.dtype
        beta_u, beta_a, centre = (x.float().contiguous() for x in (beta_u, beta_a, centre))
        ctx.save_for_backward(mass, first, second, centre, beta_u, beta_a)
        ctx.options = temperature, floor, last
        new = partial(torch.empty, dtype=torch.float32, device=centre.device)
        mean, score = new(centre.shape), new(centre.shape[:-1])
        precision = mean if last else new(centre.shape)
        rows, block = _cut(centre)
        em_fit_forward[(triton.cdiv(rows, block["R"]),)](
            mass, first, second, centre, beta_u, beta_a, mean, precision, score, score, temperature, floor, len(mass),
            rows, len(beta_u), last, **block,
        )  # fmt: skip
        return (mean, score) if last else (mean, precision, score)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, *others: Tensor) -> Any:
        mass, first, second, centre, beta_u, beta_a = ctx.saved_tensors
        temperature, floor, last = ctx.options
        d_mean, *others = (x.contiguous() for x in (d_mean, *others))
        d_precision, d_score = (d_mean, others[0]) if last else others
        new = partial(torch.empty, dtype=torch.float32, device=centre.device)
        d_mass, d_first, d_second = new(mass.shape[1:]), new(first.shape[1:]), new(second.shape[1:])
        d_betas = new(2, *mass.shape[1:])
        rows, block = _cut(centre)
        em_fit_backward[(triton.cdiv(rows, block["R"]),)](
            mass, first, second, centre, beta_u, beta_a, d_mean, d_precision, d_score, d_score, d_mass, d_first,
            d_second, d_betas, temperature, floor, len(mass), rows, len(beta_u), last, **block,
        )  # fmt: skip
        parts = (x.expand(len(mass), *x.shape) for x in (d_mass, d_first, d_second))
        d_beta_u, d_beta_a = d_betas.sum(1)
        return *parts, None, d_beta_u.to(ctx.dtypes[0]), d_beta_a.to(ctx.dtypes[1]), None, None, None


def _cut(centre: Tensor) -> tuple[int, dict[str, int]]:
    """As `cut_rows`, but with the most rows in a program or few, for each number between is compiled anew."""
    rows, block = cut_rows(centre)
    most, few = NUMBERS // block["DP"], max(1, FEW // block["DP"])
    return rows, block | {"R": most if 2 * block["R"] >= most else few}
