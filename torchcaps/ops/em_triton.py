"""EM's steps in kernels, forward and backward, with nothing in memory that has a number for each child and parent.

A step is three sums over the children: of their shares in a parent, of the votes so weighted, and of the squares of the
votes, both counted from a centre near the mean, so that the variance they give does not drown in rounding. The shares
come from the Gaussians of the step before: a first pass takes, for each child, the log of the sum of its densities, a
small one adds up the windows that compete for it, and the main pass makes the densities again.
"""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.ahead_triton import launched, rehearsed
from torchcaps.ops.em_fit_triton import fitted
from torchcaps.ops.votes import Votes
from torchcaps.ops.votes_triton import (
    PARTIAL_BYTES,
    Plan,
    Tile,
    alone,
    cast_votes,
    children_of,
    few_pairs,
    first_votes,
    fold_windows,
    hand_down,
    interpreted,
    load_children,
    load_rows,
    load_weight,
    no_rows,
    no_weight_gradient,
    or_,
    over_entries,
    over_parents,
    pack_weight,
    parents_at,
    plan,
    precision_of,
    store_rows,
    store_weight_gradient,
    sum_over_windows,
    summed,
    to_entries,
    to_parents,
)
from torchcaps.ops.windows import Window

# Where a child's shares come from: the same for every parent [n, i], one for each [n, i, j], or the Gaussians'.
EVEN, GIVEN, FITTED = (tl.constexpr(x) for x in range(3))

NARROW = 168  # registers of a thread with which a multiprocessor has room for three programs of four warps, not two


@triton.jit
def pairs_of(n, i, j, S, T: tl.constexpr):
    """Where [n, i, j] lies, and whether it is there. Shapes: [JB, BN, C, JL]"""
    child = (i + tl.arange(0, T.C))[None, None, :, None]
    parent = (j + tl.arange(0, T.JB)[:, None] * T.JL + tl.arange(0, T.JL)[None, :])[:, None, None, :]
    row = n[None, :, None, None]
    return (row.to(tl.int64) * S.I + child) * S.J + parent, (row < S.N) & (child < S.I) & (parent < S.J)


@triton.jit
def load_parents(x, n, j, other, S, T: tl.constexpr):
    """Shapes: x [n, j] -> [JB, BN, 1, JL]"""
    at, there = parents_at(n, j, S, T)
    return tl.load(x + at, mask=there, other=other)[:, :, None, :]


@triton.jit
def times(rows, factor, T: tl.constexpr):
    new = ()
    for m in tl.static_range(T.M):
        new = new + (rows[m] * factor,)
    return new


@triton.jit
def load_centre(x, n, j, S, T: tl.constexpr):
    """The negative of what is there, to which votes are added. Shapes: as `load_rows`"""
    return times(load_rows(x, n, j, S, T), -1.0, T)


@triton.jit
def load_gates(x, n, i, other, S, T: tl.constexpr):
    """Shapes: x [n, i] -> [1, BN, C, 1]"""
    at, there = children_of(n, i, S, T)
    return to_parents(tl.load(x + at, mask=there, other=other))


@triton.jit
def from_centre(children, weight, centre, offset, nothing, i, j, m, S, T: tl.constexpr):
    """Row m of the votes, less the centre's, whose negative is given: a product can begin with it, at some loss.

    Args:
        nothing: 0 as `first_votes` wants it where votes are made again, None for the first time.

    Shapes: [JB, BN, C, EH, JL, EL]
    """
    if T.PRECISION != "tf32":
        start = alone(0.0) if nothing is None else nothing
        votes = cast_votes(children[m], weight, first_votes(offset, start, i, j, m, S, T), T) + centre[m]
    else:
        start = centre[m] if nothing is None else centre[m] + nothing
        votes = cast_votes(children[m], weight, first_votes(offset, start, i, j, m, S, T), T)
    return votes


@triton.jit
def no_entries(T: tl.constexpr):
    return tl.zeros((T.JB, T.BN, T.C, T.EH, T.JL, T.EL), dtype=tl.float32)


@launched
@triton.jit
def even_shares(x, out, blocks, S, KS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Divides what belongs to children, summed over blocks, by the parents in all windows that compete for them.

    Shapes: x [blocks, n, (c k k)] -> out [n, (c k k)]
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.cast(S.N, tl.int64) * S.I
    child, site = (at % S.I).to(tl.int32), (at // S.I % (S.Y * S.X)).to(tl.int32)
    down, right = site // S.X * STRIDE + child // KS % KS, site % S.X * STRIDE + child % KS
    rows = tl.minimum(down // STRIDE, S.Y - 1) - tl.maximum(down - KS + STRIDE, 0) // STRIDE + 1
    columns = tl.minimum(right // STRIDE, S.X - 1) - tl.maximum(right - KS + STRIDE, 0) // STRIDE + 1
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        total += tl.load(x + at, mask=at < size, other=0.0)
        x += size
    tl.store(out + at, total / (rows * columns * S.J).to(tl.float32), mask=at < size)


@launched
@triton.jit
def em_gather(
    poses, weight, offset, centre, precision, score, gathered, per_split, S, T: tl.constexpr,
):  # fmt: skip
    """For each child, the log of the sum over a block of parents of score x density. Shapes: gathered [blocks, n, i]"""
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    gathered += tl.program_id(2).to(tl.int64) * S.N * S.I
    middle, sharp = load_centre(centre, n, j, S, T), load_rows(precision, n, j, S, T)
    known = load_parents(score, n, j, float("-inf"), S, T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        squares = no_entries(T)
        for m in tl.static_range(T.M):
            x = from_centre(children, w, middle, offset, None, i, j, m, S, T)
            squares += x * x * sharp[m]
        logits = known - 0.5 * over_entries(squares)
        top = tl.max(tl.max(logits, 3), 0)
        at, there = children_of(n, i, S, T)
        top = tl.where(there, top, 0.0)
        total = tl.where(there, over_parents(tl.exp(logits - to_parents(top))), 1.0)
        tl.store(gathered + at, top + tl.log(total), mask=there)


@launched
@triton.jit
def em_forward(
    poses, weight, offset, gates, centre, precision, score, log_total, mass, first, second, nothing, per_split, S,
    T: tl.constexpr, KIND: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    middle = load_centre(centre, n, j, S, T)
    if KIND == FITTED:
        sharp = load_rows(precision, n, j, S, T)
        known = load_parents(score, n, j, float("-inf"), S, T)
    zeroth = tl.zeros((T.JB, T.BN, T.JL), dtype=tl.float32)
    once, twice = no_rows(T), no_rows(T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        again = nothing * zeroth[:, :, None, None, :, None] if KIND == FITTED else None
        if KIND == GIVEN:
            at, there = pairs_of(n, i, j, S, T)
            share = tl.load(gates + at, mask=there, other=0.0)
        else:
            share = load_gates(gates, n, i, 0.0, S, T)
        share = tl.broadcast_to(share, (T.JB, T.BN, T.C, T.JL))
        if KIND == FITTED:
            squares = no_entries(T)
            for m in tl.static_range(T.M):
                x = from_centre(children, w, middle, offset, None, i, j, m, S, T)
                squares += x * x * sharp[m]
            share *= tl.exp(known - 0.5 * over_entries(squares) - load_gates(log_total, n, i, float("inf"), S, T))
        new_once, new_twice = (), ()
        for m in tl.static_range(T.M):
            x = from_centre(children, w, middle, offset, again, i, j, m, S, T)
            weighted = to_entries(share) * x
            new_once = new_once + (once[m] + tl.sum(weighted, 2),)
            if SQUARES:
                new_twice = new_twice + (twice[m] + tl.sum(weighted * x, 2),)
        once = new_once
        if SQUARES:
            twice = new_twice
            zeroth += tl.sum(share, 2)
    store_rows(first, once, split, n, j, S, T)
    if SQUARES:
        store_rows(second, twice, split, n, j, S, T)
        at, there = parents_at(n, j, S, T)
        tl.store(mass + split.to(tl.int64) * S.N * S.J + at, zeroth, mask=there)


@launched
@triton.jit
def em_backward_gather(
    poses, weight, offset, centre, precision, score, log_total, d_mass, d_first, d_second, d_gates, per_split, S,
    T: tl.constexpr,
):  # fmt: skip
    """For each child, the gradient of its gate from a block of parents. Shapes: d_gates [blocks, n, i]"""
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    d_gates += tl.program_id(2).to(tl.int64) * S.N * S.I
    middle, sharp = load_centre(centre, n, j, S, T), load_rows(precision, n, j, S, T)
    d_once, d_twice = load_rows(d_first, n, j, S, T), load_rows(d_second, n, j, S, T)
    known, d_zeroth = load_parents(score, n, j, float("-inf"), S, T), load_parents(d_mass, n, j, 0.0, S, T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        squares, slopes = no_entries(T), no_entries(T)
        for m in tl.static_range(T.M):
            x = from_centre(children, w, middle, offset, None, i, j, m, S, T)
            squares += x * x * sharp[m]
            slopes += x * (d_once[m] + x * d_twice[m])
        d_share = over_entries(slopes) + d_zeroth
        coupling = tl.exp(known - 0.5 * over_entries(squares) - load_gates(log_total, n, i, float("inf"), S, T))
        at, there = children_of(n, i, S, T)
        tl.store(d_gates + at, over_parents(coupling * d_share), mask=there)


@launched
@triton.jit
def em_backward(
    poses, weight, offset, gates, centre, precision, score, log_total, total, d_mass, d_first, d_second, d_poses,
    d_weight, d_offset, d_gates, d_mean, d_precision, d_score, nothing, per_split, S, T: tl.constexpr,
    KIND: tl.constexpr, SQUARES: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Makes the votes again. A log density's gradient weights votes and squares, summed in d_mean and d_precision."""
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    block = tl.program_id(2).to(tl.int64)
    d_poses += block * S.N * S.I * (T.M * T.A)
    if not ATOMIC:
        pairs = tl.program_id(0).to(tl.int64) * S.I * S.J
        d_weight += pairs * (T.A * T.E)
        d_offset += pairs * (T.M * T.E)
    middle, d_once = load_centre(centre, n, j, S, T), load_rows(d_first, n, j, S, T)
    if SQUARES:
        d_twice = load_rows(d_second, n, j, S, T)
        d_zeroth = load_parents(d_mass, n, j, 0.0, S, T)
    if KIND == FITTED:
        sharp = load_rows(precision, n, j, S, T)
        known = load_parents(score, n, j, float("-inf"), S, T)
        d_twice = times(d_twice, 2.0, T)
    once, twice = no_rows(T), no_rows(T)
    zeroth = tl.zeros((T.JB, T.BN, T.JL), dtype=tl.float32)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        again = nothing * zeroth[:, :, None, None, :, None] if KIND == FITTED else None
        if KIND == GIVEN:
            pair, paired = pairs_of(n, i, j, S, T)
            share = tl.load(gates + pair, mask=paired, other=0.0)
        else:
            share = load_gates(gates, n, i, 0.0, S, T)
        share = tl.broadcast_to(share, (T.JB, T.BN, T.C, T.JL))
        slopes = no_entries(T)
        if KIND == FITTED:
            squares, bends = no_entries(T), no_entries(T)
            for m in tl.static_range(T.M):
                x = from_centre(children, w, middle, offset, None, i, j, m, S, T)
                square = x * x
                squares += square * sharp[m]
                bends += square * d_twice[m]
                slopes += x * d_once[m]
            d_share = over_entries(slopes + 0.5 * bends) + d_zeroth
            coupling = tl.exp(known - 0.5 * over_entries(squares) - load_gates(log_total, n, i, float("inf"), S, T))
            d_logit = coupling * (share * d_share - load_gates(total, n, i, 0.0, S, T))
            share *= coupling
            zeroth += tl.sum(d_logit, 2)
        d_w = no_weight_gradient(T)
        new_once, new_twice = (), ()
        for top in tl.static_range(0, T.M, T.G):
            grads = ()
            for m in tl.static_range(top, top + T.G):
                x = from_centre(children, w, middle, offset, again, i, j, m, S, T)
                if KIND == FITTED:
                    grad = to_entries(share) * (d_once[m] + x * d_twice[m])
                elif SQUARES:
                    slope = d_once[m] + x * d_twice[m]
                    grad = to_entries(share) * (slope + x * d_twice[m])
                else:
                    slope = tl.broadcast_to(d_once[m], x.shape)
                    grad = to_entries(share) * slope
                if KIND == FITTED:
                    weighted = to_entries(d_logit) * x
                    new_once = new_once + (once[m] + tl.sum(weighted, 2),)
                    new_twice = new_twice + (twice[m] + tl.sum(weighted * x, 2),)
                    grad -= weighted * sharp[m]
                else:
                    slopes += x * slope
                grads = grads + (grad,)
            d_w = hand_down(grads, poses, w, d_w, d_poses, d_offset, n, i, j, top, S, T, ATOMIC)
        store_weight_gradient(d_weight, d_w, i, j, S, T, ATOMIC)
        if KIND == FITTED:
            once, twice = new_once, new_twice
        else:
            d_share = over_entries(slopes)
            if SQUARES:
                d_share += d_zeroth
            if KIND == GIVEN:
                tl.store(d_gates + pair, d_share, mask=paired)
            else:
                warp = (block * T.JB + tl.arange(0, T.JB))[:, None, None] * S.N * S.I
                at, there = children_of(n, i, S, T)
                tl.store(d_gates + warp + at[None], tl.sum(d_share, 3), mask=there[None])
    if KIND == FITTED:
        moved = ()
        for m in tl.static_range(T.M):
            moved = moved + (once[m] * tl.reshape(sharp[m], once[m].shape),)
        store_rows(d_mean, moved, split, n, j, S, T)
        store_rows(d_precision, times(twice, -0.5, T), split, n, j, S, T)
        at, there = parents_at(n, j, S, T)
        tl.store(d_score + split.to(tl.int64) * S.N * S.J + at, zeroth, mask=there)


def fused_fit(votes: Votes, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `gaussian_fit`. Shapes: weights [..., i, j] -> [..., j], [..., j, d], [..., j, d]"""
    centre = _near_the_mean(votes)
    return _fit(votes, _moments(votes, weights, centre, 1), centre)


def fused_mixture(votes: Votes, coupling: Tensor) -> Tensor:
    """As `Votes.mixture`. Shapes: coupling [..., i, j] -> [..., j, d]"""
    centre = torch.zeros(*votes.lead, votes.parents, votes.dim, device=votes.device)
    return summed(_moments(votes, coupling, centre, 1, squares=False)[1]).unflatten(0, votes.lead)


def fused_em_step(
    votes: Votes, activations: Tensor | None, parents: tuple[Tensor, Tensor, Tensor] | None, competing: Window | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `em_step`.

    Args:
        competing: the window, if parents of all windows a child stands in compete for it.
    """
    if parents is not None:
        mean, variance, log_prior = parents
        parents = (mean, variance.reciprocal(), log_prior - 0.5 * variance.log().sum(-1))
    return _fit(votes, *_step(votes, activations, parents, competing))


@rehearsed
def fused_em(
    votes: Votes,
    activations: Tensor | None,
    beta_u: Tensor,
    beta_a: Tensor,
    temperatures: list[float],
    competing: Window | None,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """As `em_routing`. Shapes: -> poses [..., j, d], activations [..., j]"""
    betas = (beta_u.expand(votes.parents), beta_a.expand(votes.parents))
    parents = None
    for temperature in temperatures[:-1]:
        parents = fitted(*_step(votes, activations, parents, competing), *betas, temperature, floor)
    moments, centre = _step(votes, activations, parents, competing)
    return fitted(moments, centre, *betas, temperatures[-1], floor, last=True)


def _step(
    votes: Votes, activations: Tensor | None, parents: tuple[Tensor, Tensor, Tensor] | None, competing: Window | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The moments of each parent's votes, and the centre that they are counted from.

    Args:
        parents: mean, precision and score of the step before, where score x density is the share before it is made
            to add up to 1; none means that all are equally responsible.
    """
    if activations is None:
        activations = torch.ones(*votes.lead, votes.in_caps, device=votes.device)
    if parents is None or (votes.parents == 1 and competing is None):  # a lone parent is responsible for every vote
        centre = _near_the_mean(votes)
        return _moments(votes, activations, centre, 0, competing=competing), centre
    mean, precision, score = parents
    return _moments(votes, activations, mean, 2, precision, score, competing), mean.detach()


def _near_the_mean(votes: Votes) -> Tensor:
    with torch.no_grad():
        return votes.total() / votes.in_caps


def _fit(votes: Votes, moments: tuple[Tensor, Tensor, Tensor], centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass, mean and variance from sums around a centre, on which they do not depend."""
    mass, first, second = (summed(x).unflatten(0, votes.lead) for x in moments)
    least = mass.clamp(min=1e-7)[..., None]
    whole = mass[..., None] / least  # 1, but for parents that next to nobody votes for
    first = first / least
    moved = first + (whole - 1) * centre
    variance = second / least + moved * (whole * moved - 2 * first)
    return mass, centre + moved, variance.clamp(min=0)


def _moments(
    votes: Votes,
    gates: Tensor,
    centre: Tensor,
    kind: int,
    precision: Tensor | None = None,
    score: Tensor | None = None,
    competing: Window | None = None,
    squares: bool = True,
) -> Any:
    """Shapes: -> mass [s, n, j], first and second [s, n, j, d]; without squares, mass and second are None"""
    offset = votes.offset
    if offset is not None:
        groups, _, parents, _ = votes.weight.shape
        offset = offset.expand(groups, votes.sharing, parents, votes.dim)
    own = (votes.window, votes.products)
    return _Moments.apply(
        votes.poses, votes.weight, offset, gates, centre, precision, score, *own, competing, kind, squares
    )


class _Moments(torch.autograd.Function):
    """Sums of shares, votes and squares around a centre that counts as a constant in them.

    The centre's gradient is that of the Gaussians' means only. Each sum comes in parts, one for each split of the
    children, for whoever takes them to add up; so all parts have the same gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        poses: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        gates: Tensor,
        centre: Tensor,
        precision: Tensor | None,
        score: Tensor | None,
        window: Window | None,
        products: torch.dtype,
        competing: Window | None,
        kind: int,
        squares: bool,
    ) -> Any:
        given = (poses, weight, offset, gates, centre, precision, score)
        ctx.inputs = [None if x is None else (x.dtype, x.shape) for x in given]
        ctx.window, ctx.products, ctx.competing, ctx.kind, ctx.squares = window, products, competing, kind, squares
        weight = weight.to(poses.dtype).contiguous()
        if precision_of(products)[0] == tl.bfloat16:
            poses = poses.to(torch.bfloat16)
        offset, gates, centre, precision, score = (
            None if x is None else x.float().contiguous() for x in (offset, gates, centre, precision, score)
        )
        votes = Votes(poses, weight, window, offset, products)
        if kind == 1:
            gates = gates.expand(*votes.lead, -1, -1).contiguous()
        cut = _plan(votes)
        packed = pack_weight(weight, cut) if cut.tile.PACKED else weight
        n, i, j = cut.space[-3:]
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        splits, blocks = cut.grid[1:]
        log_total = None
        if kind == 0:
            gates = _even(gates.view(1, n, i), cut, competing)
        if kind == 2:
            gathered = new(blocks, n, i)
            em_gather[cut.grid](
                poses, packed, or_(offset, gates), centre, precision, score, gathered, cut.per_split, cut.space,
                cut.tile, **cut.options,
            )  # fmt: skip
            log_total = sum_over_windows(gathered, cut, competing)
        first = new(splits, n, j, votes.dim)
        mass, second = (new(splits, n, j), new(splits, n, j, votes.dim)) if squares else (first, first)
        em_forward[cut.grid](
            poses, packed, or_(offset, gates), gates, centre, or_(precision, gates), or_(score, gates),
            or_(log_total, gates), mass, first, second, 0.0, cut.per_split, cut.space, _strict(votes, cut.tile), kind,
            squares, **(_narrow(votes, cut) if kind == 2 else cut.options),
        )  # fmt: skip
        ctx.save_for_backward(poses, weight, packed, offset, gates, centre, precision, score, log_total)
        return (mass, first, second) if squares else (None, first, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mass: Tensor | None, d_first: Tensor, d_second: Tensor | None) -> Any:
        poses, weight, packed, offset, gates, centre, precision, score, log_total = ctx.saved_tensors
        votes = Votes(poses, weight, ctx.window, offset, ctx.products)
        cut = _plan(votes)
        n, i, j = cut.space[-3:]
        splits, blocks = cut.grid[1:]
        d_first = d_first[0].contiguous()
        d_mass, d_second = (d_first if x is None else x[0].contiguous() for x in (d_mass, d_second))
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        atomic = votes.sharing > 1 or cut.grid[0] * weight.numel() * 4 > PARTIAL_BYTES
        copies = 1 if atomic else cut.grid[0]
        new_sum = partial(torch.zeros if atomic else torch.empty, dtype=torch.float32, device=poses.device)
        wide = blocks > 1 or few_pairs(votes) or interpreted()  # which does not round to bfloat16, it cuts off
        d_poses = new(blocks, n, i, poses.shape[2], dtype=torch.float32 if wide else ctx.inputs[0][0])
        d_weight = new_sum(copies, *weight.shape)
        d_offset = None if offset is None else new_sum(copies, *offset.shape)
        total, d_mean, d_precision, d_score = gates, gates, gates, gates
        if ctx.kind == 2:
            d_gates = new(blocks, n, i)
            em_backward_gather[cut.grid](
                poses, packed, or_(offset, gates), centre, precision, score, log_total, d_mass, d_first, d_second,
                d_gates, cut.per_split, cut.space, cut.tile, **cut.options,
            )  # fmt: skip
            total = sum_over_windows(d_gates, cut, ctx.competing, factor=gates)
            d_mean, d_precision = new(splits, n, j, votes.dim), new(splits, n, j, votes.dim)
            d_score = new(splits, n, j)
        else:
            warps = cut.options["num_warps"]  # each has parents of its own, and none waits for the others
            d_gates = new(n, i, j) if ctx.kind == 1 else new(blocks * warps, n, i)
        em_backward[cut.grid](
            poses, packed, or_(offset, gates), gates, centre, or_(precision, gates), or_(score, gates),
            or_(log_total, gates), total, d_mass, d_first, d_second, d_poses, d_weight, or_(d_offset, gates), d_gates,
            d_mean, d_precision, d_score, 0.0, cut.per_split, cut.space, cut.tile, ctx.kind, ctx.squares, atomic,
            **cut.options,
        )  # fmt: skip
        if ctx.kind != 1:
            d_gates = _even(d_gates, cut, ctx.competing) if ctx.kind == 0 else summed(d_gates)
        grads: list[Tensor | None] = [
            fold_windows(d_poses, poses, cut, ctx.window),
            summed(d_weight),
            None if d_offset is None else summed(d_offset),
            d_gates.unflatten(0, votes.lead),
            None,
            None,
            None,
        ]
        if ctx.kind == 2:
            grads[4:] = [summed(d_mean), summed(d_precision), summed(d_score)]
        pairs = zip(grads, ctx.inputs, strict=True)
        shaped = (None if x is None else x.to(like[0]).reshape(like[1]) for x, like in pairs)
        return *shaped, None, None, None, None, None


def _plan(votes: Votes) -> Plan:
    """Few parents in a program, for each needs up to six rows of numbers at hand."""
    large = votes.rows * triton.next_power_of_2(votes.weight.shape[3]) > 32
    packed = votes.in_caps * votes.weight[0].numel() * 16 <= PARTIAL_BYTES  # up to 4 children a tile, in float32
    stages = 3 if votes.products == torch.bfloat16 else 2
    return plan(votes, low=1 if large else 2, block=8, packed=packed, stages=stages)


def _strict(votes: Votes, tile: Tile) -> Tile:
    """A variance of votes that agree is what two sums nearly equal leave, and three products in TF32 are too coarse."""
    exact = votes.products == torch.float32 and precision_of(votes.products)[1] == "tf32x3"
    return tile._replace(PRECISION=tl.constexpr("ieee")) if exact and not interpreted() else tile


def _narrow(votes: Votes, plan: Plan) -> dict[str, int | bool]:
    """Options for a kernel that takes more registers than they are worth, if poses are small."""
    fits = votes.dim <= 16 and plan.options["num_warps"] <= 4
    return plan.options | ({"maxnreg": NARROW} if fits else {})


def _even(x: Tensor, plan: Plan, competing: Window | None) -> Tensor:
    """Shapes: x [blocks, n, i] -> [n, i]"""
    window = competing or Window(1)
    out = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device)
    block = 512
    grid = (triton.cdiv(out.numel(), block),)
    even_shares[grid](x, out, len(x), plan.space, window.kernel_size, window.stride, block)
    return out
