"""EM's step forward: the logits of a tile of votes, and the sums over them that `em_triton` describes."""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from torchcaps.fused.launch_triton import launched
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
    parents_at,
    store_rows,
    to_entries,
    to_parents,
    unknown,
)

# Where a child's shares come from: the same for every parent [n, i], one for each [n, i, j], the Gaussians' densities,
# or agreement with the parents, which stand in the place of precisions and have no score.
EVEN, GIVEN, FITTED, AGREED = (tl.constexpr(x) for x in range(4))


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
def load_score(x, n, j, S, T: tl.constexpr, KIND: tl.constexpr):
    """Parents that are not there have no share in anything. Shapes: x [n, j] -> [JB, BN, 1, JL]"""
    at, there = parents_at(n, j, S, T)
    nobody = float("-inf")
    score = tl.where(there, 0.0, nobody) if KIND == AGREED else tl.load(x + at, mask=there, other=nobody)
    return score[:, :, None, :]


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
        votes = cast_votes(children, weight, first_votes(offset, start, i, j, m, S, T), T) + centre
    else:
        start = centre if nothing is None else centre + nothing
        votes = cast_votes(children, weight, first_votes(offset, start, i, j, m, S, T), T)
    return votes


@triton.jit
def vote_and_rest(children, weight, centre, offset, nothing, i, j, m, S, T: tl.constexpr, KIND: tl.constexpr):
    """Row m of the votes as logits are made of it, and what is left of it from the centre on."""
    if KIND == AGREED:
        vote = from_centre(children, weight, alone(0.0), offset, nothing, i, j, m, S, T)
        rest = vote + centre
    else:
        rest = from_centre(children, weight, centre, offset, nothing, i, j, m, S, T)
        vote = rest
    return vote, rest


@triton.jit
def likeness(vote, sharp, KIND: tl.constexpr):
    """What a row of votes adds to `logits_of`."""
    if KIND == FITTED:
        vote *= vote
    return vote * sharp


@triton.jit
def logits_of(known, likenesses, KIND: tl.constexpr):
    """Shapes: [JB, BN, 1, JL], [JB, BN, C, EH, JL, EL] -> [JB, BN, C, JL]"""
    total = over_entries(likenesses)
    if KIND == FITTED:
        total *= -0.5
    return known + total


@triton.jit
def no_entries(T: tl.constexpr):
    return tl.zeros((T.JB, T.BN, T.C, T.EH, T.JL, T.EL), dtype=tl.float32)


@launched
@triton.jit
def em_gather(
    poses, weight, offset, centre, precision, score, gathered, per_split, S, T: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """For each child, the log of the sum over a block of parents of exp of their logits.

    Shapes: gathered [blocks, n, i]
    """
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    gathered += tl.program_id(2).to(tl.int64) * S.N * S.I
    middle, sharp = load_centre(centre, n, j, S, T), load_rows(precision, n, j, S, T)
    known = load_score(score, n, j, S, T, KIND)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        likenesses = no_entries(T)
        for m in tl.static_range(T.M):
            vote, _ = vote_and_rest(children[m], w, middle[m], offset, None, i, j, unknown(m), S, T, KIND)
            likenesses += likeness(vote, sharp[m], KIND)
        logits = logits_of(known, likenesses, KIND)
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
    if KIND >= FITTED:
        sharp = load_rows(precision, n, j, S, T)
        known = load_score(score, n, j, S, T, KIND)
    zeroth = tl.zeros((T.JB, T.BN, T.JL), dtype=tl.float32)
    once, twice = no_rows(T), no_rows(T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        again = nothing * zeroth[:, :, None, None, :, None] if KIND >= FITTED else None
        if KIND == GIVEN:
            at, there = pairs_of(n, i, j, S, T)
            share = tl.load(gates + at, mask=there, other=0.0)
        else:
            share = load_gates(gates, n, i, 0.0, S, T)
        share = tl.broadcast_to(share, (T.JB, T.BN, T.C, T.JL))
        if KIND >= FITTED:
            likenesses = no_entries(T)
            for m in tl.static_range(T.M):
                vote, _ = vote_and_rest(children[m], w, middle[m], offset, None, i, j, unknown(m), S, T, KIND)
                likenesses += likeness(vote, sharp[m], KIND)
            share *= tl.exp(logits_of(known, likenesses, KIND) - load_gates(log_total, n, i, float("inf"), S, T))
        new_once, new_twice = (), ()
        for m in tl.static_range(T.M):
            _, x = vote_and_rest(children[m], w, middle[m], offset, again, i, j, unknown(m), S, T, KIND)
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
