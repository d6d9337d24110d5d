"""EM's step backward, in two passes like the forward one."""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from torchcaps.fused.launch_triton import launched
from torchcaps.ops.em_forward_triton import (
    AGREED,
    FITTED,
    GIVEN,
    likeness,
    load_centre,
    load_gates,
    load_parents,
    load_score,
    logits_of,
    no_entries,
    pairs_of,
    times,
    vote_and_rest,
)
from torchcaps.ops.votes_backward_triton import add_up, hand_down, no_weight_gradient, store_weight_gradient
from torchcaps.ops.votes_triton import (
    children_of,
    load_children,
    load_rows,
    load_weight,
    no_rows,
    over_entries,
    over_parents,
    parents_at,
    store_rows,
    to_entries,
    unknown,
)


@launched
@triton.jit
def em_backward_gather(
    poses, weight, offset, centre, precision, score, log_total, d_mass, d_first, d_second, d_gates, per_split, S,
    T: tl.constexpr, KIND: tl.constexpr, ATOMIC_POSES: tl.constexpr,
):  # fmt: skip
    """For each child, the gradient of its gate from a block of parents. Shapes: d_gates [blocks or 1, n, i]"""
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    if not ATOMIC_POSES:
        d_gates += tl.program_id(2).to(tl.int64) * S.N * S.I
    middle, sharp = load_centre(centre, n, j, S, T), load_rows(precision, n, j, S, T)
    d_once, d_twice = load_rows(d_first, n, j, S, T), load_rows(d_second, n, j, S, T)
    known, d_zeroth = load_score(score, n, j, S, T, KIND), load_parents(d_mass, n, j, 0.0, S, T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        likenesses, slopes = no_entries(T), no_entries(T)
        for m in tl.static_range(T.M):
            vote, x = vote_and_rest(children[m], w, middle[m], offset, None, i, j, unknown(m), S, T, KIND)
            likenesses += likeness(vote, sharp[m], KIND)
            slopes += x * (d_once[m] + x * d_twice[m])
        d_share = over_entries(slopes) + d_zeroth
        coupling = tl.exp(logits_of(known, likenesses, KIND) - load_gates(log_total, n, i, float("inf"), S, T))
        at, there = children_of(n, i, S, T)
        add_up(d_gates + at, over_parents(coupling * d_share), there, ATOMIC_POSES)


@launched
@triton.jit
def em_backward(
    poses, weight, offset, gates, centre, precision, score, log_total, total, d_mass, d_first, d_second, d_poses,
    d_weight, d_offset, d_gates, d_mean, d_precision, d_score, nothing, per_split, S, T: tl.constexpr,
    KIND: tl.constexpr, SQUARES: tl.constexpr, ATOMIC: tl.constexpr, ATOMIC_POSES: tl.constexpr,
):  # fmt: skip
    """Makes the votes again.

    A log density's gradient weights votes and squares, summed in d_mean and d_precision; that of agreement weights
    votes, summed in d_precision.
    """
    n = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    split = tl.program_id(1)
    j = tl.program_id(2) * (T.JB * T.JL)
    block = tl.program_id(2).to(tl.int64)
    if not ATOMIC_POSES:
        d_poses += block * S.N * S.I * (T.M * T.A)
    if not ATOMIC:
        pairs = tl.program_id(0).to(tl.int64) * S.I * S.J
        d_weight += pairs * (T.A * T.E)
        d_offset += pairs * (T.M * T.E)
    middle, d_once = load_centre(centre, n, j, S, T), load_rows(d_first, n, j, S, T)
    if SQUARES:
        d_twice = load_rows(d_second, n, j, S, T)
        d_zeroth = load_parents(d_mass, n, j, 0.0, S, T)
    if KIND >= FITTED:
        sharp = load_rows(precision, n, j, S, T)
        known = load_score(score, n, j, S, T, KIND)
        d_twice = times(d_twice, 2.0, T)
    once, twice = no_rows(T), no_rows(T)
    zeroth = tl.zeros((T.JB, T.BN, T.JL), dtype=tl.float32)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        w = load_weight(weight, i, j, S, T)
        children = load_children(poses, n, i, S, T)
        again = nothing * zeroth[:, :, None, None, :, None] if KIND >= FITTED else None
        if KIND == GIVEN:
            pair, paired = pairs_of(n, i, j, S, T)
            share = tl.load(gates + pair, mask=paired, other=0.0)
        else:
            share = load_gates(gates, n, i, 0.0, S, T)
        share = tl.broadcast_to(share, (T.JB, T.BN, T.C, T.JL))
        slopes = no_entries(T)
        if KIND >= FITTED:
            likenesses, bends = no_entries(T), no_entries(T)
            for m in tl.static_range(T.M):
                vote, x = vote_and_rest(children[m], w, middle[m], offset, None, i, j, unknown(m), S, T, KIND)
                likenesses += likeness(vote, sharp[m], KIND)
                bends += x * x * d_twice[m]
                slopes += x * d_once[m]
            d_share = over_entries(slopes + 0.5 * bends) + d_zeroth
            coupling = tl.exp(logits_of(known, likenesses, KIND) - load_gates(log_total, n, i, float("inf"), S, T))
            d_logit = coupling * (share * d_share - load_gates(total, n, i, 0.0, S, T))
            share *= coupling
            zeroth += tl.sum(d_logit, 2)
        d_w = no_weight_gradient(T)
        new_once, new_twice = (), ()
        for top in tl.static_range(0, T.M, T.G):
            grads = ()
            for m in tl.static_range(top, top + T.G):
                vote, x = vote_and_rest(children[m], w, middle[m], offset, again, i, j, unknown(m), S, T, KIND)
                if KIND >= FITTED:
                    grad = to_entries(share) * (d_once[m] + x * d_twice[m])
                elif SQUARES:
                    slope = d_once[m] + x * d_twice[m]
                    grad = to_entries(share) * (slope + x * d_twice[m])
                else:
                    slope = tl.broadcast_to(d_once[m], x.shape)
                    grad = to_entries(share) * slope
                if KIND >= FITTED:
                    weighted = to_entries(d_logit) * vote
                    new_once = new_once + (once[m] + tl.sum(weighted, 2),)
                    if KIND == FITTED:
                        new_twice = new_twice + (twice[m] + tl.sum(weighted * vote, 2),)
                        grad -= weighted * sharp[m]
                    else:
                        grad += to_entries(d_logit) * sharp[m]
                else:
                    slopes += x * slope
                grads = grads + (grad,)
            d_w = hand_down(grads, poses, w, d_w, d_poses, d_offset, n, i, j, unknown(top), S, T, ATOMIC, ATOMIC_POSES)
        store_weight_gradient(d_weight, d_w, i, j, S, T, ATOMIC)
        if KIND >= FITTED:
            once = new_once
            if KIND == FITTED:
                twice = new_twice
        else:
            d_share = over_entries(slopes)
            if SQUARES:
                d_share += d_zeroth
            if KIND == GIVEN:
                tl.store(d_gates + pair, d_share, mask=paired)
            else:
                at, there = children_of(n, i, S, T)
                at = at[None] + tl.zeros((T.JB, 1, 1), dtype=tl.int64)
                if not ATOMIC_POSES:
                    at += (block * T.JB + tl.arange(0, T.JB))[:, None, None] * S.N * S.I
                add_up(d_gates + at, tl.sum(d_share, 3), there[None], ATOMIC_POSES)
    if KIND == FITTED:
        moved = ()
        for m in tl.static_range(T.M):
            moved = moved + (once[m] * tl.reshape(sharp[m], once[m].shape),)
        store_rows(d_mean, moved, split, n, j, S, T)
        store_rows(d_precision, times(twice, -0.5, T), split, n, j, S, T)
        at, there = parents_at(n, j, S, T)
        tl.store(d_score + split.to(tl.int64) * S.N * S.J + at, zeroth, mask=there)
    if KIND == AGREED:
        store_rows(d_precision, once, split, n, j, S, T)
