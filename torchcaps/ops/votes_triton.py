"""Votes in registers: what every fused step shares.

A program takes BN windows and goes through their children, C at a time. Their votes for JB x JL parents are one product
for each row m of a pose, [BN, (c a)] x [(c a), (c e j)], with weights that are zero where the two children differ: so
small matrices fill the depth of a tensor-core tile. Each warp has JL parents of its own (the batch of the product), and
the numbers of a vote lie in one thread: columns run over c, then e / EL, then JL parents, then EL neighbours in e,
where JL x EL are the 8 columns of a tile. So agreement and mixture move nothing between threads, and a softmax over the
parents moves two numbers for each child.
"""

# ruff: noqa: RUF005 - Triton grows a tuple by adding to it
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.ops.ahead_triton import launched
from torchcaps.ops.votes import Votes
from torchcaps.ops.windows import Window

LEAST = tl.constexpr(-1e38)  # stands for the log of 0
# Gradients of votes rounded to bfloat16 err about as much as rounding the result does, and three products in TF32 a
# little more than one in float32. Among many results the largest error hardly grows by it; among few it can, and there
# a second product for what rounding left over, sums of windows in float32 and full products are cheap.
FEW_PAIRS = 2**18
PARTIAL_BYTES = 2**26  # of weight gradients, one for each block of windows; beyond that they are added atomically


class Tile(NamedTuple):
    """What a kernel knows when it is compiled. Poses have M rows of A, votes M rows of E; AP and EH * EL are padded.

    Gradients of G rows are multiplied together; with SPLIT in two parts, the second being what rounding left over.
    Weights lie in memory as they are, or PACKED, as products take them.
    """

    M: int
    A: int
    AP: int
    E: int
    EH: int
    EL: int
    JB: int
    JL: int
    C: int
    BN: int
    G: int
    KS: int
    SCRAMBLED: bool
    SHARING: int
    OFFSET: bool
    DT: tl.dtype
    PRECISION: str
    SPLIT: bool
    PACKED: bool


class Space(NamedTuple):
    """Where things are, as a kernel is told at each launch: the poses' strides, and how many of everything."""

    sb: int
    sc: int
    sp: int
    sh: int
    sw: int
    sy: int  # from a window to the one below it
    sx: int
    Y: int
    X: int
    N: int
    I: int  # noqa: E741
    J: int


@triton.jit
def column(T: tl.constexpr, C: tl.constexpr):
    """Child, entry of the row and parent of each column."""
    q = tl.arange(0, C * T.EH * T.JL * T.EL)
    return q // (T.EH * T.JL * T.EL), q // (T.JL * T.EL) % T.EH * T.EL + q % T.EL, q // T.EL % T.JL


@triton.jit
def children_at(n, i, m, S, T: tl.constexpr):
    """Where row m of the poses of children i to i + C lies, and whether it is there. Shapes: [BN, (c a)]"""
    k = tl.arange(0, T.C * T.AP)
    a = (k % T.AP)[None, :]
    child = (i + k // T.AP)[None, :]
    sites = S.Y * S.X
    site = (n % sites)[:, None]
    entry = m * T.A + a
    if T.SCRAMBLED:
        flat = site * (T.M * T.A) + entry
        site, entry = flat % sites, flat // sites
    at = (n // sites).to(tl.int64)[:, None] * S.sb + entry * S.sp
    at += site // S.X * S.sy + site % S.X * S.sx
    at += child // (T.KS * T.KS) * S.sc + child // T.KS % T.KS * S.sh + child % T.KS * S.sw
    return at, (n < S.N)[:, None] & (child < S.I) & (a < T.A)


@triton.jit
def rounded(x, T: tl.constexpr):
    """To the nearest number of the dots' dtype: of TF32 a dot would only read the upper bits."""
    x = x.to(T.DT)
    if tl.float32 == T.DT and T.PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def load_children(poses, n, i, S, T: tl.constexpr):
    """Shapes: M times [JB, BN, (c a)], the same for every JB"""
    rows = ()
    for m in tl.static_range(T.M):
        at, there = children_at(n, i, m, S, T)
        tile = rounded(tl.load(poses + at, mask=there, other=0.0), T)
        rows = rows + (tl.broadcast_to(tile[None], (T.JB, T.BN, T.C * T.AP)),)
    return rows


@triton.jit
def weight_at(i, j, S, T: tl.constexpr):
    """Where the weights of child i for the parents from j on lie, and whether they are there.

    Shapes: [JB, (c a), (e j)]
    """
    k = tl.arange(0, T.C * T.AP)
    a, child = (k % T.AP)[None, :, None], (i + k // T.AP)[None, :, None]
    _, e, low = column(T, 1)
    parent = (j + tl.arange(0, T.JB)[:, None] * T.JL + low[None, :])[:, None, :]
    there = (parent < S.J) & (e < T.E)[None, None, :] & (child < S.I) & (a < T.A)
    return ((child // T.SHARING * T.A + a) * S.J + parent) * T.E + e[None, None, :], there


@triton.jit
def load_weight(weight, i, j, S, T: tl.constexpr):
    """Weights of children i to i + C, zero where the child of a row is not that of a column.

    Shapes: [JB, (c a), (c e j)]
    """
    if T.PACKED:
        w = tl.load(weight + packed_at(i, j, S, T))
    else:
        at, there = weight_at(i, j, S, T)
        dense = rounded(tl.load(weight + at, mask=there, other=0.0), T)[:, :, None, :]
        w = tl.reshape(tl.where(own_child(T), dense, 0.0), (T.JB, T.C * T.AP, T.C * T.EH * T.JL * T.EL))
    return w


@triton.jit
def packed_at(i, j, S, T: tl.constexpr):
    """Where packed weights lie: a tile for each C children and JL parents. Shapes: [JB, (c a), (c e j)]"""
    columns: tl.constexpr = T.C * T.EH * T.JL * T.EL
    tile = i // T.C * (tl.cdiv(S.J, T.JB * T.JL) * T.JB) + j // T.JL + tl.arange(0, T.JB)
    row = tile[:, None] * (T.C * T.AP) + tl.arange(0, T.C * T.AP)[None, :]
    return row[:, :, None] * columns + tl.arange(0, columns)[None, None, :]


@launched
@triton.jit
def pack(weight, packed, S, T: tl.constexpr, PLAIN: tl.constexpr):
    """Args: PLAIN: T, but for weights as they are."""
    i, j = tl.program_id(0) * T.C, tl.program_id(1) * (T.JB * T.JL)
    tl.store(packed + packed_at(i, j, S, T), load_weight(weight, i, j, S, PLAIN).to(packed.dtype.element_ty))


@triton.jit
def offset_at(i, j, m, S, T: tl.constexpr):
    """Where row m of what is added to the votes [i, j, d] lies, and whether it is there. Shapes: [JB, (c e j)]"""
    child, e, low = column(T, T.C)
    parent = j + tl.arange(0, T.JB)[:, None] * T.JL + low[None, :]
    at = ((i + child)[None, :] * S.J + parent) * (T.M * T.E) + m * T.E + e[None, :]
    return at, (parent < S.J) & ((i + child < S.I) & (e < T.E))[None, :]


@triton.jit
def alone(x):
    """A number as a tensor that broadcasts. Shapes: [] -> [1, 1, 1, 1, 1, 1]"""
    return tl.zeros((1, 1, 1, 1, 1, 1), dtype=tl.float32) + x


@triton.jit
def first_votes(offset, start, i, j, m, S, T: tl.constexpr):
    """What votes are added to: `start`, and the offset if there is one.

    Where they are made twice, a `start` that the compiler cannot know, other for each child, keeps it from holding on
    to the first ones, for which there are no registers.

    Shapes: start broadcastable to [JB, BN, C, EH, JL, EL] -> [JB, BN, (c e j)]
    """
    wide = tl.broadcast_to(start, (T.JB, T.BN, T.C, T.EH, T.JL, T.EL))
    wide = tl.reshape(wide, (T.JB, T.BN, T.C * T.EH * T.JL * T.EL))
    if T.OFFSET:
        at, there = offset_at(i, j, m, S, T)
        wide += tl.load(offset + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    return wide


@triton.jit
def cast_votes(children, weight, start, T: tl.constexpr):
    """Shapes: [JB, BN, (c a)], [JB, (c a), (c e j)] -> [JB, BN, C, EH, JL, EL]"""
    votes = tl.dot(children, weight, start, input_precision=T.PRECISION)
    return tl.reshape(votes, (T.JB, T.BN, T.C, T.EH, T.JL, T.EL))


@triton.jit
def pairs_at(i, j, S, T: tl.constexpr):
    """Where [i, j] lies, whether it is there, and whether its parent is. Shapes: [JB, 1, C, JL], the last without C"""
    child = (i + tl.arange(0, T.C))[None, None, :, None]
    parent = (j + tl.arange(0, T.JB)[:, None] * T.JL + tl.arange(0, T.JL)[None, :])[:, None, None, :]
    return child * S.J + parent, (child < S.I) & (parent < S.J), parent < S.J


@triton.jit
def children_of(n, i, S, T: tl.constexpr):
    """Where [n, i] lies, and whether it is there. Shapes: [BN, C]"""
    child = (i + tl.arange(0, T.C))[None, :]
    return n.to(tl.int64)[:, None] * S.I + child, (n < S.N)[:, None] & (child < S.I)


@triton.jit
def parents_at(n, j, S, T: tl.constexpr):
    """Where [n, j] lies, and whether it is there. Shapes: [JB, BN, JL]"""
    parent = j + tl.arange(0, T.JB)[:, None, None] * T.JL + tl.arange(0, T.JL)[None, None, :]
    return n.to(tl.int64)[None, :, None] * S.J + parent, (n < S.N)[None, :, None] & (parent < S.J)


@triton.jit
def rows_at(n, j, m, S, T: tl.constexpr):
    """Where row m of the parents [n, j, d] lies, and whether it is there. Shapes: [JB, BN, (e j)]"""
    _, e, low = column(T, 1)
    parent = j + tl.arange(0, T.JB)[:, None, None] * T.JL + low[None, None, :]
    there = (n < S.N)[None, :, None] & (parent < S.J) & (e < T.E)[None, None, :]
    return (n.to(tl.int64)[None, :, None] * S.J + parent) * (T.M * T.E) + (m * T.E + e)[None, None, :], there


@triton.jit
def load_rows(x, n, j, S, T: tl.constexpr):
    """What belongs to windows, row by row. Shapes: x [n, j, d] -> M times [JB, BN, 1, EH, JL, EL]"""
    rows = ()
    for m in tl.static_range(T.M):
        at, there = rows_at(n, j, m, S, T)
        row = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        rows = rows + (tl.reshape(row, (T.JB, T.BN, 1, T.EH, T.JL, T.EL)),)
    return rows


@triton.jit
def no_rows(T: tl.constexpr):
    rows = ()
    for _ in tl.static_range(T.M):
        rows = rows + (tl.zeros((T.JB, T.BN, T.EH, T.JL, T.EL), dtype=tl.float32),)
    return rows


@triton.jit
def store_rows(x, rows, split, n, j, S, T: tl.constexpr):
    """Shapes: M times [JB, BN, EH, JL, EL] -> x [splits, n, j, d]"""
    x += split.to(tl.int64) * S.N * S.J * (T.M * T.E)
    for m in tl.static_range(T.M):
        at, there = rows_at(n, j, m, S, T)
        tl.store(x + at, tl.reshape(rows[m], (T.JB, T.BN, T.EH * T.JL * T.EL)), mask=there)


@triton.jit
def over_entries(x):
    """Shapes: [JB, BN, C, EH, JL, EL] -> [JB, BN, C, JL]"""
    return tl.sum(tl.sum(x, 5), 3)


@triton.jit
def to_entries(x):
    """Shapes: [JB, BN, C, JL] -> [JB, BN, C, 1, JL, 1]"""
    return x[:, :, :, None, :, None]


@triton.jit
def over_parents(x):
    """Shapes: [JB, BN, C, JL] -> [BN, C]"""
    return tl.sum(tl.sum(x, 3), 0)


@triton.jit
def to_parents(x):
    """Shapes: [BN, C] -> [1, BN, C, 1]"""
    return x[None, :, :, None]


@triton.jit
def own_child(T: tl.constexpr):
    """Whether the child of a row is that of a column. Shapes: [1, (c a), C, 1]"""
    return ((tl.arange(0, T.C * T.AP) // T.AP)[:, None] == tl.arange(0, T.C)[None, :])[None, :, :, None]


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
    grads, poses, weight, d_weight, d_poses, d_offset, n, i, j, first, S, T: tl.constexpr, ATOMIC: tl.constexpr
):
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
    tl.store(d_poses + at, d_children.to(d_poses.dtype.element_ty), mask=there)
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


@triton.jit
def window_over(y, x, tap, there, S, KS: tl.constexpr, STRIDE: tl.constexpr):
    """The site whose window has a place in its tap-th entry, and whether there is one."""
    row, col = y - tap // KS, x - tap % KS
    seen = there & (row >= 0) & (col >= 0) & (row % STRIDE == 0) & (col % STRIDE == 0)
    row, col = row // STRIDE, col // STRIDE
    return row * S.X + col, seen & (row < S.Y) & (col < S.X)


@launched
@triton.jit
def fold(windows, poses, blocks, H, W, CAPS, S, T: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up what each child got from all blocks of parents in all its windows.

    Shapes: windows [blocks, n, (c k k), p] -> poses [b, h, w, c, p]
    """
    P: tl.constexpr = T.M * T.A
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p, c, x, y = at % P, at // P % CAPS, at // (P * CAPS) % W, at // (P * CAPS * W)
    windows += image * (S.Y * S.X * S.I * P)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        for tap in tl.static_range(T.KS * T.KS):
            site, seen = window_over(y, x, tap, y < H, S, T.KS, STRIDE)
            entry = p
            if T.SCRAMBLED:
                flat = p * (S.Y * S.X) + site
                site, entry = flat // P, flat % P
            source = (site * S.I + c * (T.KS * T.KS) + tap) * P + entry
            total += tl.load(windows + source, mask=seen, other=0.0).to(tl.float32)
        windows += tl.cast(S.N, tl.int64) * S.I * P
    tl.store(poses + image * (H * W * CAPS * P) + at, total.to(poses.dtype.element_ty), mask=y < H)


@launched
@triton.jit
def over_windows(
    x, factor, out, blocks, S, KS: tl.constexpr, STRIDE: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of x times a factor, or with LOG the log of the sum of exp(x), over all windows a child stands in.

    Shapes: x [blocks, n, (c k k)], factor [n, (c k k)] -> out [n, (c k k)], for each of these windows
    """
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    child, site = at % S.I, at // S.I
    sites = S.Y * S.X
    there = site < sites
    x += image * (sites * S.I)
    factor += image * (sites * S.I)
    down, right = site // S.X * STRIDE + child // KS % KS, site % S.X * STRIDE + child % KS
    top = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        for tap in range(KS * KS):
            source, seen = window_over(down, right, tap, there, S, KS, STRIDE)
            source = source * S.I + child // (KS * KS) * (KS * KS) + tap
            if LOG:
                value = tl.load(x + source, mask=seen, other=LEAST)
                new = tl.maximum(top, value)
                total = total * tl.exp(top - new) + tl.exp(value - new)
                top = new
            else:
                weight = tl.load(factor + source, mask=seen, other=0.0)
                total += tl.load(x + source, mask=seen, other=0.0) * weight
        x += tl.cast(S.N, tl.int64) * S.I
    if LOG:
        total = top + tl.log(total)
    tl.store(out + image * (sites * S.I) + at, total, mask=there)


class Plan(NamedTuple):
    """How votes are cut up for a launch."""

    tile: Tile
    space: Space
    per_split: int
    grid: tuple[int, int, int]  # blocks of windows, splits of the children, blocks of parents
    options: dict[str, int | bool]


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def why_not(votes: Votes) -> str | None:
    """What keeps these votes from running fused, if anything does."""
    if not (votes.device.type == "cuda" or interpreted()):
        return f"the votes are on {votes.device.type}"
    if votes.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the votes are {votes.dtype}"
    size, columns = votes.weight.shape[1], votes.weight.shape[3]
    if size > 64 or columns > 64 or votes.dim > 128:
        return f"a pose of {votes.rows} x {size} and a vote of {votes.rows} x {columns} numbers take too many registers"
    return None


def precision_of(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """float16 poses have no more digits than TF32, but their gradients need more, and float16 would overflow."""
    if dtype == torch.bfloat16 and not interpreted():
        return tl.bfloat16, "tf32"
    exact = dtype == torch.float16 or (dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest")
    return tl.float32, "tf32x3" if exact else "tf32"


def few_pairs(votes: Votes) -> bool:
    return math.prod(votes.lead) * votes.in_caps * votes.parents < FEW_PAIRS


def plan(
    votes: Votes,
    *,
    block: int | None = None,
    low: int | None = None,
    wide: int = 64,
    together: int | None = None,
    stages: int = 2,
    registers: int | None = None,
    programs: int = 1024,
    packed: bool = False,
) -> Plan:
    """How to cut these votes up.

    Args:
        block: parents in a program; fewer where poses are large, for a thread has no more than 255 registers.
        low: of them in a warp, 2, 4 or 8.
        wide: columns of a product in a warp, over children and entries.
        together: rows whose gradients are multiplied at once, 1, 2 or 4.
        programs: enough to keep every multiprocessor busy to the end.
    """
    _, size, parents, columns = votes.weight.shape
    window = votes.window or Window(1)
    poses = votes.poses
    y, x = votes.lead[1:] if votes.window is not None else (1, 1)
    sb, sc, sp, sh, sw = (*poses.stride(), 0, 0)[:5]
    large = votes.rows * triton.next_power_of_2(columns) > 32
    dtype, precision = precision_of(votes.products)
    if precision == "tf32x3" and votes.products == torch.float32 and few_pairs(votes) and not interpreted():
        precision = "ieee"
    if together is None:
        together = 4 if dtype == tl.bfloat16 else 2 if precision == "tf32" else 1
    low = (2 if large else 4) if low is None else low
    block = (16 if large else 32) if block is None else block
    entries = max(8 // low, triton.next_power_of_2(columns))
    padded = triton.next_power_of_2(size)
    children = max(1, min(16 // padded, wide // (entries * low)))
    high = max(1, min(block, triton.next_power_of_2(parents)) // low)
    n = math.prod(votes.lead)
    tile = Tile(
        M=votes.rows,
        A=size,
        AP=max(padded, 16 // children),
        E=columns,
        EH=entries * low // 8,
        EL=8 // low,
        JB=high,
        JL=low,
        C=children,
        BN=16,
        G=math.gcd(votes.rows, together),
        KS=window.kernel_size,
        SCRAMBLED=window.scrambled,
        SHARING=votes.sharing,
        OFFSET=votes.offset is not None,
        DT=dtype,
        PRECISION=precision,
        SPLIT=votes.products == torch.bfloat16 and few_pairs(votes),
        PACKED=packed,
    )
    over_windows, over_parents = triton.cdiv(n, tile.BN), triton.cdiv(parents, high * low)
    splits = max(1, min(triton.cdiv(programs, over_windows * over_parents), triton.cdiv(votes.in_caps, 8 * children)))
    per_split = triton.cdiv(triton.cdiv(votes.in_caps, splits), children) * children
    return Plan(
        _known(tile),
        Space(sb, sc, sp, sh, sw, sh * window.stride, sw * window.stride, y, x, n, votes.in_caps, parents),
        per_split,
        (over_windows, triton.cdiv(votes.in_caps, per_split), over_parents),
        {"num_warps": high, "num_stages": stages, "enable_fp_fusion": True}
        | ({} if registers is None else {"maxnreg": registers}),
    )


def _known(tile: Tile) -> Tile:
    """As kernels take it."""
    return tile if interpreted() else Tile(*(tl.constexpr(x) for x in tile))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def pack_weight(weight: Tensor, plan: Plan) -> Tensor:
    """The weights in the products' dtype, with their zeros, tile after tile: a kernel takes them as they come.

    Shapes: weight [g, a, j, e] -> [i / C, j / JL, (c a), (c e j)], the numbers of tiles rounded up
    """
    tile = Tile(*(_value(x) for x in plan.tile))
    over_children, over_parents = triton.cdiv(plan.space.I, tile.C), triton.cdiv(plan.space.J, tile.JB * tile.JL)
    shape = (over_children, over_parents * tile.JB, tile.C * tile.AP, tile.C * tile.EH * tile.JL * tile.EL)
    dtype = torch.bfloat16 if tl.bfloat16 == tile.DT else torch.float32
    packed = torch.empty(shape, dtype=dtype, device=weight.device)
    plain = _known(tile._replace(PACKED=False))
    pack[(over_children, over_parents)](weight, packed, plan.space, plan.tile, plain, num_warps=tile.JB)
    return packed


def fold_windows(windows: Tensor, poses: Tensor, plan: Plan, window: Window | None) -> Tensor:
    """The gradient of the poses from that of each window's.

    Shapes: windows [blocks of parents, n, i, p], poses [b, i, p] or [b, c, p, h, w] -> as poses
    """
    if poses.dim() == 3:
        return windows.sum(0) if len(windows) > 1 else windows[0]
    assert window is not None
    b, c, p, h, w = poses.shape
    folded = torch.empty(b, h, w, c, p, dtype=windows.dtype, device=poses.device)
    block = 512
    grid = (b, triton.cdiv(h * w * c * p, block))
    fold[grid](windows, folded, len(windows), h, w, c, plan.space, plan.tile, window.stride, block)
    return folded.permute(0, 3, 4, 1, 2)


def sum_over_windows(x: Tensor, plan: Plan, window: Window | None, factor: Tensor | None = None) -> Tensor:
    """The sum of x times a factor, without one the log of the sum of exp(x).

    Shapes: x [blocks, n, i], factor [n, i] -> [n, i]
    """
    window = window or Window(1)
    out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    block = 512
    sites = plan.space.Y * plan.space.X
    grid = (plan.space.N // sites, triton.cdiv(sites * plan.space.I, block))
    log, factor = factor is None, x if factor is None else factor
    over_windows[grid](x, factor, out, len(x), plan.space, window.kernel_size, window.stride, log, block)
    return out


def or_(x: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel wants an address for what it does not read."""
    return unused if x is None else x


def summed(x: Tensor) -> Tensor:
    """The sum of partial sums, which a single one is already. Shapes: [k, ...] -> [...]"""
    return x[0] if len(x) == 1 else x.sum(0)
