"""The agreement step in one kernel, forward and backward; see `agreement_step` for what it means."""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.launch_triton import launched
from torchcaps.ops.plan_triton import (
    Plan,
    few_pairs,
    interpreted,
    or_,
    pack_weight,
    plan,
    pose_sum,
    summed,
    weight_sum,
)
from torchcaps.ops.votes import Votes
from torchcaps.ops.votes_backward_triton import add_up, hand_down, no_weight_gradient, store_weight_gradient
from torchcaps.ops.votes_triton import (
    alone,
    cast_votes,
    children_of,
    first_votes,
    load_children,
    load_rows,
    load_weight,
    no_rows,
    over_entries,
    over_parents,
    pairs_at,
    store_rows,
    to_entries,
    to_parents,
)
from torchcaps.ops.windows import Window
from torchcaps.ops.windows_triton import fold_windows

# Where there are more parents than a program holds, a first pass gathers over blocks of them what a child needs to
# know of all: the largest of its logits and the sum of their exponentials, and in the backward pass its mean gradient.
WHOLE, GATHER, GIVEN = (tl.constexpr(x) for x in range(3))
LARGE = 2**10  # weights of a child and a parent, which are not rounded and laid out anew for every 16 windows
PACKED_BYTES = 2**28  # of them, as products take them; more are read as they are


@triton.jit
def logits_of(agreement, logits, scale, i, j, S, T: tl.constexpr, LOGITS: tl.constexpr):
    at, there, parent = pairs_at(i, j, S, T)
    agreement *= scale
    if LOGITS:
        agreement += tl.load(logits + at, mask=there, other=0.0)
    return tl.where(parent, agreement, float("-inf"))


@triton.jit
def coupling_of(agreement, tops, sums, n, i, S, T: tl.constexpr):
    """What the sum of all exponentials is known to leave to each. Shapes: [JB, BN, C, JL]"""
    at, there = children_of(n, i, S, T)
    top, total = tl.load(tops + at, mask=there, other=0.0), tl.load(sums + at, mask=there, other=1.0)
    return tl.exp(agreement - to_parents(top)) * to_parents(1 / total)


@launched
@triton.jit
def agreement_forward(
    poses, weight, offset, parents, logits, prior, tops, sums, mixture, scale, nothing, per_split, S, T: tl.constexpr,
    LOGITS: tl.constexpr, PRIOR: tl.constexpr, LEAK: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    if PASS == GATHER:
        tops += tl.program_id(2).to(tl.int64) * S.N * S.I
        sums += tl.program_id(2).to(tl.int64) * S.N * S.I
    above = load_rows(parents, n, j, S, T)
    mixed = no_rows(T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        agreement = tl.zeros((T.JB, T.BN, T.C, T.JL), dtype=tl.float32)
        for m in tl.static_range(T.M):
            votes = cast_votes(children[m], w, first_votes(offset, alone(0.0), i, j, m, S, T), T)
            agreement += over_entries(votes * above[m])
        agreement = logits_of(agreement, logits, scale, i, j, S, T, LOGITS)
        at, there = children_of(n, i, S, T)
        if PASS == GIVEN:
            coupling = coupling_of(agreement, tops, sums, n, i, S, T)
        else:
            top = tl.max(tl.max(agreement, 3), 0)
            if LEAK:
                top = tl.maximum(top, 0.0)
            coupling = tl.exp(agreement - to_parents(top))
            total = over_parents(coupling)
            if LEAK:
                total += tl.exp(-top)
            coupling *= to_parents(1 / total)
            tl.store(tops + at, top, mask=there)
            tl.store(sums + at, total, mask=there)
        if PASS != GATHER:
            if PRIOR:
                pair, there, _ = pairs_at(i, j, S, T)
                coupling += tl.load(prior + pair, mask=there, other=0.0)
            new = ()
            for m in tl.static_range(T.M):
                votes = cast_votes(children[m], w, first_votes(offset, alone(nothing), i, j, m, S, T), T)
                new = new + (mixed[m] + tl.sum(to_entries(coupling) * votes, 2),)
            mixed = new
    if PASS != GATHER:
        store_rows(mixture, mixed, split, n, j, S, T)


@launched
@triton.jit
def agreement_backward(
    poses, weight, offset, parents, logits, prior, tops, sums, delta, d_mixture, d_poses, d_weight, d_offset,
    d_parents, d_logits, d_prior, scale, nothing, per_split, S, T: tl.constexpr, LOGITS: tl.constexpr,
    PRIOR: tl.constexpr, CONSTANT: tl.constexpr, PASS: tl.constexpr, ATOMIC: tl.constexpr, ATOMIC_POSES: tl.constexpr,
):  # fmt: skip
    """Makes the votes again. With CONSTANT, agreements pass no gradient on to votes and parents."""
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    if not ATOMIC_POSES:
        block = tl.program_id(2).to(tl.int64)
        d_poses += block * S.N * S.I * (T.M * T.A)
        if PASS == GATHER:
            delta += block * S.N * S.I
    if not ATOMIC:
        slot = tl.program_id(0).to(tl.int64)
        pairs = slot * S.I * S.J
        d_weight += pairs * (T.A * T.E)
        d_offset += pairs * (T.M * T.E)
        d_logits += pairs
        d_prior += pairs
    above = load_rows(parents, n, j, S, T)
    d_mixed = load_rows(d_mixture, n, j, S, T)
    d_above = no_rows(T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        agreement = tl.zeros((T.JB, T.BN, T.C, T.JL), dtype=tl.float32)
        d_coupling = tl.zeros((T.JB, T.BN, T.C, T.JL), dtype=tl.float32)
        for m in tl.static_range(T.M):
            votes = cast_votes(children[m], w, first_votes(offset, alone(0.0), i, j, m, S, T), T)
            agreement += over_entries(votes * above[m])
            d_coupling += over_entries(votes * d_mixed[m])
        agreement = logits_of(agreement, logits, scale, i, j, S, T, LOGITS)
        coupling = coupling_of(agreement, tops, sums, n, i, S, T)
        at, there = children_of(n, i, S, T)
        if PASS == GIVEN:
            mean = tl.load(delta + at, mask=there, other=0.0)
        else:
            mean = over_parents(coupling * d_coupling)
            if PASS == GATHER:
                add_up(delta + at, mean, there, ATOMIC_POSES)
        if PASS != GATHER:
            d_agreement = coupling * (d_coupling - to_parents(mean))
            pair, there, _ = pairs_at(i, j, S, T)
            if LOGITS:
                add_up(d_logits + pair, tl.sum(d_agreement, 1)[:, None], there, ATOMIC)
            if PRIOR:
                add_up(d_prior + pair, tl.sum(d_coupling, 1)[:, None], there, ATOMIC)
                coupling += tl.load(prior + pair, mask=there, other=0.0)
            d_agreement *= scale
            d_w = no_weight_gradient(T)
            new = ()
            for first in tl.static_range(0, T.M, T.G):
                grads = ()
                for m in tl.static_range(first, first + T.G):
                    grad = to_entries(coupling) * d_mixed[m]
                    if not CONSTANT:
                        votes = cast_votes(children[m], w, first_votes(offset, alone(nothing), i, j, m, S, T), T)
                        new = new + (d_above[m] + tl.sum(to_entries(d_agreement) * votes, 2),)
                        grad += to_entries(d_agreement) * above[m]
                    grads = grads + (grad,)
                d_w = hand_down(grads, poses, w, d_w, d_poses, d_offset, n, i, j, first, S, T, ATOMIC, ATOMIC_POSES)
            store_weight_gradient(d_weight, d_w, i, j, S, T, ATOMIC)
            if not CONSTANT:
                d_above = new
    if PASS != GATHER:
        store_rows(d_parents, d_above, split, n, j, S, T)


class Options(NamedTuple):
    scale: float
    leak: bool
    constant: bool


def fused_agreement_step(
    votes: Votes, parents: Tensor, logits: Tensor | None, prior: Tensor | None, options: Options
) -> Tensor:
    """Shapes: parents [..., j, d], logits and prior [i, j] -> mixture [..., j, d]"""
    offset = votes.offset
    if offset is not None:
        groups, _, parent_caps, _ = votes.weight.shape
        offset = offset.expand(groups, votes.sharing, parent_caps, votes.dim)
    mixture: Tensor = _Agreement.apply(
        votes.poses, votes.weight, offset, parents, logits, prior, votes.window, votes.products, options
    )
    return mixture


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        poses: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        parents: Tensor,
        logits: Tensor | None,
        prior: Tensor | None,
        window: Window | None,
        products: torch.dtype,
        options: Options,
    ) -> Tensor:
        ctx.inputs = [None if x is None else x.dtype for x in (poses, weight, offset, parents, logits, prior)]
        ctx.window, ctx.products, ctx.options = window, products, options
        poses, weight, offset, parents, logits, prior = _prepared(poses, weight, offset, parents, logits, prior)
        votes = Votes(poses, weight, window, offset, products)
        cut, packed = _cut(votes)
        n, i, j = cut.space[-3:]
        blocks = cut.grid[2]
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        tops, sums, mixture = new(n, i), new(n, i), new(cut.grid[1], n, j, votes.dim)

        def run(tops: Tensor, sums: Tensor, which: int) -> None:
            agreement_forward[cut.grid](
                poses, packed, or_(offset, sums), parents, or_(logits, sums), or_(prior, sums), tops, sums, mixture,
                options.scale, 0.0, cut.per_split, cut.space, cut.tile,
                logits is not None, prior is not None, options.leak and blocks == 1, which, **cut.options,
            )  # fmt: skip

        if blocks > 1:
            block_tops, block_sums = new(blocks + options.leak, n, i), new(blocks + options.leak, n, i)
            block_tops[blocks:], block_sums[blocks:] = 0, 1
            run(block_tops, block_sums, GATHER.value)
            tops = block_tops.amax(0)
            sums = (block_sums * (block_tops - tops).exp()).sum(0)
        run(tops, sums, (GIVEN if blocks > 1 else WHOLE).value)
        ctx.save_for_backward(poses, weight, offset, parents, logits, prior, tops, sums)
        return summed(mixture).unflatten(0, votes.lead)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixture: Tensor) -> Any:
        poses, weight, offset, parents, logits, prior, tops, sums = ctx.saved_tensors
        votes = Votes(poses, weight, ctx.window, offset, ctx.products)
        cut, packed = _cut(votes)
        n, i, j = cut.space[-3:]
        d_mixture = d_mixture.reshape(n, j, votes.dim).contiguous()
        blocks = cut.grid[2]
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        over_parents, over_windows = pose_sum(blocks, poses.device), weight_sum(votes, cut)
        wide = blocks > 1 or few_pairs(votes) or interpreted()  # which does not round to bfloat16, it cuts off
        d_poses = over_parents.new(n, i, poses.shape[2], dtype=torch.float32 if wide else poses.dtype)
        d_weight = over_windows.new(*weight.shape)
        d_offset = None if offset is None else over_windows.new(*offset.shape)
        d_logits = None if logits is None else over_windows.new(i, j)
        d_prior = None if prior is None else over_windows.new(i, j)
        d_parents = new(cut.grid[1], n, j, votes.dim)

        def run(delta: Tensor, which: int) -> None:
            agreement_backward[cut.grid](
                poses, packed, or_(offset, sums), parents, or_(logits, sums), or_(prior, sums), tops, sums, delta,
                d_mixture, d_poses, d_weight, or_(d_offset, sums), d_parents, or_(d_logits, sums), or_(d_prior, sums),
                ctx.options.scale, 0.0, cut.per_split, cut.space, cut.tile,
                logits is not None, prior is not None, ctx.options.constant, which,
                over_windows.atomic, over_parents.atomic, **cut.options,
            )  # fmt: skip

        delta = sums
        if blocks > 1:
            delta = over_parents.new(n, i)
            run(delta, GATHER.value)
            delta = summed(delta)
        run(delta, (GIVEN if blocks > 1 else WHOLE).value)
        d_above = None if ctx.options.constant else summed(d_parents).unflatten(0, votes.lead)
        d_children = fold_windows(d_poses, poses, cut, ctx.window)
        grads = (
            d_children,
            summed(d_weight),
            None if d_offset is None else summed(d_offset),
            d_above,
            *(None if x is None else summed(x) for x in (d_logits, d_prior)),
        )
        return (
            *(None if x is None else x.to(dtype) for x, dtype in zip(grads, ctx.inputs, strict=True)),
            None,
            None,
            None,
        )


def _cut(votes: Votes) -> tuple[Plan, Tensor]:
    """And the weights as kernels read them."""
    size, columns = votes.weight.shape[1], votes.weight.shape[3]
    few = votes.in_caps * votes.weight[0].numel() * 16 <= PACKED_BYTES  # numbers and parents rounded up, in float32
    cut = plan(votes, packed=size * columns >= LARGE and few)
    return cut, pack_weight(votes.weight, cut) if cut.tile.PACKED else votes.weight


def _prepared(poses: Tensor, weight: Tensor, offset: Tensor | None, parents: Tensor, *pairs: Tensor | None) -> Any:
    """Weights follow the poses' dtype; what is added up stays in float32."""
    weight = weight.to(poses.dtype).contiguous()
    offset = None if offset is None else offset.float().contiguous()
    parents = parents.reshape(-1, *parents.shape[-2:]).contiguous()
    return poses, weight, offset, parents, *(None if x is None else x.float().contiguous() for x in pairs)
