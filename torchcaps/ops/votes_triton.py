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

from typing import NamedTuple

import triton
import triton.language as tl

from torchcaps.fused.launch_triton import launched


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
def unknown(m):
    """A number that a helper is not traced anew for; nothing is left of it when the helper is in its place."""
    return tl.full((), m, tl.int32)


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
        at, there = children_at(n, i, unknown(m), S, T)
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
        at, there = rows_at(n, j, unknown(m), S, T)
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
        at, there = rows_at(n, j, unknown(m), S, T)
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
