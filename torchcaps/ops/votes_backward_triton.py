"""Gradients of votes in registers, handed down to the poses and weights that made them."""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from torchcaps.ops.votes_triton import children_at, offset_at, own_child, rounded, weight_at


@triton.jit
def add_up(x, value, there, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(x, value, mask=there, sem="relaxed")
    else:
        tl.store(x, value, mask=there)


@triton.jit
def stacked(rows, T: tl.constexpr):
    """G tensors as one.

    Shapes: G times [JB, BN, C, EH, JL, EL] -> [(g n), (jb c e j)] if G is 4, or [JB, (g n), (c e j)]
    """
    if T.G == 4:
        x = tl.join(tl.join(rows[0], rows[1]), tl.join(rows[2], rows[3]))
        x = tl.permute(x, (0, 7, 6, 1, 2, 3, 4, 5))
    elif T.G == 2:
        x = tl.permute(tl.join(rows[0], rows[1]), (0, 6, 1, 2, 3, 4, 5))
    else:
        x = rows[0]
    columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
    x = tl.reshape(x, (T.JB, T.G * T.BN, columns))
    return side_by_side(x, T) if T.G == 4 else x


@triton.jit
def side_by_side(x, T: tl.constexpr):
    """All warps' parents in one row, 16 columns of each in turn. Shapes: [JB, r, (c e j)] -> [r, (h jb l)]"""
    columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
    low: tl.constexpr = 16 if columns > 16 else columns
    x = tl.permute(tl.reshape(x, (T.JB, x.shape[1], columns // low, low)), (1, 2, 0, 3))
    return tl.reshape(x, (x.shape[0], T.JB * columns))


@triton.jit
def onto_children(grad, weight, T: tl.constexpr):
    """Shapes: [(g n), (jb c e j)] if G is 4, or [JB, (g n), (c e j)]; [JB, (c a), (c e j)] -> [(g n), (c a)]"""
    if T.G == 4:
        d_children = tl.dot(grad, tl.permute(side_by_side(weight, T), (1, 0)), input_precision=T.PRECISION)
    else:
        d_children = tl.sum(tl.dot(grad, tl.permute(weight, (0, 2, 1)), input_precision=T.PRECISION), 0)
    return d_children


@triton.jit
def onto_weight(grad, children, d_weight, T: tl.constexpr):
    """Shapes: grad as in `onto_children`, children [(g n), (c a)], d_weight as in `no_weight_gradient`"""
    if T.G == 4:
        d_weight = tl.dot(tl.permute(grad, (1, 0)), children, d_weight, input_precision=T.PRECISION)
    else:
        children = tl.broadcast_to(tl.permute(children, (1, 0))[None], (T.JB, T.C * T.AP, T.G * T.BN))
        d_weight = tl.dot(children, grad, d_weight, input_precision=T.PRECISION)
    return d_weight


@triton.jit
def hand_down(
    grads, poses, weight, d_weight, d_poses, d_offset, n, i, j, first, S, T: tl.constexpr, ATOMIC: tl.constexpr,
    ATOMIC_POSES: tl.constexpr,
):  # fmt: skip
    """Takes the gradients of G rows of the votes to the poses; returns the weights', added to `d_weight`.

    Several rows go together, as if they were windows, for each time all warps have to wait for each other. Four are
    tall enough for products that read from shared memory, where both find the gradients, and one adds up over all
    warps' parents.

    Shapes: grads G times [JB, BN, C, EH, JL, EL], d_poses [n, i, p], d_offset [i, j, d]
    """
    columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
    upper, lower = (), ()
    for m in tl.static_range(T.G):
        if T.OFFSET:
            at, there = offset_at(i, j, first + m, S, T)
            add_up(d_offset + at, tl.sum(tl.reshape(grads[m], (T.JB, T.BN, columns)), 1), there, ATOMIC)
        upper = upper + (rounded(grads[m], T),)
        if T.SPLIT:
            lower = lower + (rounded(grads[m] - upper[m].to(tl.float32), T),)
    k = tl.arange(0, T.C * T.AP)[None, :]
    child, a = i + k // T.AP, k % T.AP
    row = tl.arange(0, T.G * T.BN)[:, None]
    n = tl.reshape(tl.broadcast_to(n[None, :], (T.G, T.BN)), (T.G * T.BN,))
    at, there = children_at(n, i, first + row // T.BN, S, T)
    children = rounded(tl.load(poses + at, mask=there, other=0.0), T)
    grad = stacked(upper, T)
    d_children = onto_children(grad, weight, T)
    d_weight = onto_weight(grad, children, d_weight, T)
    if T.SPLIT:
        rest = stacked(lower, T)
        d_children += onto_children(rest, weight, T)
        d_weight = onto_weight(rest, children, d_weight, T)
    there = (n < S.N)[:, None] & (child < S.I) & (a < T.A)
    at = (n.to(tl.int64)[:, None] * S.I + child) * (T.M * T.A) + (first + row // T.BN) * T.A + a
    add_up(d_poses + at, d_children.to(d_poses.dtype.element_ty), there, ATOMIC_POSES)
    return d_weight


@triton.jit
def no_weight_gradient(T: tl.constexpr):
    """Only where the child of a row is that of a column will it count.

    Shapes: [(jb c e j), (c a)] if G is 4, or [JB, (c a), (c e j)]
    """
    columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
    if T.G == 4:
        nothing = tl.zeros((T.JB * columns, T.C * T.AP), dtype=tl.float32)
    else:
        nothing = tl.zeros((T.JB, T.C * T.AP, columns), dtype=tl.float32)
    return nothing


@triton.jit
def store_weight_gradient(x, grad, i, j, S, T: tl.constexpr, ATOMIC: tl.constexpr):
    if T.G == 4:
        columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
        low: tl.constexpr = 16 if columns > 16 else columns
        grad = tl.permute(tl.reshape(grad, (columns // low, T.JB, low, T.C * T.AP)), (1, 3, 0, 2))
    grad = tl.reshape(grad, (T.JB, T.C * T.AP, T.C, T.EH * T.JL * T.EL))
    at, there = weight_at(i, j, S, T)
    add_up(x + at, tl.sum(tl.where(own_child(T), grad, 0.0), 2), there, ATOMIC)
