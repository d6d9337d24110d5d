"""EM's first step backward, where a child's share is the same for all parents: products of matrices, and no votes.

With F and S for the gradients of the sums of votes and squares, and g for the share, a vote x from the centre c has the
gradient g (F + 2 x S). Votes v = p W are linear in the pose, so with F' = F - 2 c S the gradients are

    of the pose       g (F' W + 2 (S W W) p)
    of the share      p F' W + p (S W W) p, and what does not depend on the child
    of the weight     (g p) F' + 2 W (g p p) S

where products are made of W W and g p p, the pairs of a row's entries. Where votes agree, the two terms nearly cancel.
So what is rounded is S and g p, in both terms alike; F' and pairs of rounded numbers come in two parts, the second
being what rounding left over, and then an error is as large as that of votes' gradients that are rounded.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.fused.launch_triton import launched
from torchcaps.ops.plan_triton import Plan, few_pairs, interpreted, pose_sum, precision_of, room
from torchcaps.ops.votes import Votes
from torchcaps.ops.votes_backward_triton import add_up
from torchcaps.ops.votes_triton import Tile, children_at, children_of, rounded

LARGEST = 4  # numbers in a row of a pose
COLUMNS = 128  # of a product, over parents and entries
ROWS = 128, 64  # of windows' poses at a time, for the gradients of poses and of weights
ENTRIES = 16, 32  # of children's rows at a time, for the same
SHARED_BYTES = 220_000  # which these take, or less
PROGRAMS = 1024  # or more, if nothing is split
MULTIPROCESSORS = 132  # of an H200; with others some of them end early


@triton.jit
def two_parts(x, T: tl.constexpr):
    upper = rounded(x, T)
    return upper, rounded(x - upper.to(tl.float32), T)


@triton.jit
def load_rows_of(x, row, there, k, columns):
    """Shapes: x [..., columns] -> [row, k]"""
    at = row.to(tl.int64)[:, None] * columns + k[None, :]
    return tl.load(x + at, mask=there[:, None] & (k < columns)[None, :], other=0.0)


@triton.jit
def load_terms(terms, n, m, k, S, T: tl.constexpr):
    """S and the two parts of F'. Shapes: terms [3, n, m, (j e)] -> 3 times [(n m), K]"""
    columns = S.J * T.E
    row, there = n.to(tl.int64) * T.M + m, (n < S.N) & (m < T.M)
    each = tl.cast(S.N, tl.int64) * T.M
    curve = load_rows_of(terms, row, there, k, columns)
    upper = load_rows_of(terms, row + each, there, k, columns)
    return curve, upper, load_rows_of(terms, row + 2 * each, there, k, columns)


@triton.jit
def load_shared(poses, gates, n, m, i, S, T: tl.constexpr):
    """Poses and shares of children i to i + C. Shapes: [(n m), (c a)], [(n m), C]"""
    at, there = children_at(n, i, m[:, None], S, T)
    p = tl.load(poses + at, mask=there & (m < T.M)[:, None], other=0.0)
    at, there = children_of(n, i, S, T)
    return p, tl.load(gates + at, mask=there, other=0.0)


@triton.jit
def by_child(p, g, T: tl.constexpr):
    """Shapes: as `load_shared` gives them -> [(n m), C, AP], [(n m), C, 1]"""
    return tl.reshape(rounded(p, T).to(tl.float32), (p.shape[0], T.C, T.AP)), g[:, :, None]


@triton.jit
def paired(x, y, T: tl.constexpr):
    """Each entry of a row of x times each of y, in one thread. Shapes: [(n m), C, AP] twice -> [(n m), (c a a)]"""
    if T.AP == 4:
        even, odd = tl.split(tl.reshape(y, (y.shape[0], T.C, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        even = tl.join(x * first[:, :, None], x * third[:, :, None])
        odd = tl.join(x * second[:, :, None], x * fourth[:, :, None])
        both = tl.join(even, odd)
    elif T.AP == 2:
        first, second = tl.split(y)
        both = tl.join(x * first[:, :, None], x * second[:, :, None])
    else:
        both = x * y
    return tl.reshape(both, (x.shape[0], T.C * T.AP * T.AP))


@launched
@triton.jit
def first_terms(d_mass, d_first, d_second, centre, terms, level, S, T: tl.constexpr, BLOCK: tl.constexpr):
    """S and the two parts of F' with a window's rows side by side, and what all its children's shares gain.

    Shapes: d_mass [n, j], d_first, d_second and centre [n, j, (m e)] -> terms [3, n, m, (j e)], level [n]
    """
    n = tl.program_id(0).to(tl.int64)
    columns, size = S.J * T.E, T.M * S.J * T.E
    each = tl.cast(S.N, tl.int64) * size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        m, k = at // columns, at % columns
        source = n * size + (k // T.E * T.M + m) * T.E + k % T.E
        slope = tl.load(d_first + source, mask=at < size, other=0.0)
        curve = rounded(tl.load(d_second + source, mask=at < size, other=0.0), T)
        middle = tl.load(centre + source, mask=at < size, other=0.0)
        bend = middle * curve.to(tl.float32)
        upper, lower = two_parts(slope - 2 * bend, T)
        total -= middle * (bend + upper.to(tl.float32) + lower.to(tl.float32))  # as votes meet F', or they differ by it
        total += tl.load(d_mass + n * S.J + at, mask=at < S.J, other=0.0)
        terms_at = terms + n * size + at
        tl.store(terms_at, curve, mask=at < size)
        tl.store(terms_at + each, upper, mask=at < size)
        tl.store(terms_at + 2 * each, lower, mask=at < size)
    tl.store(level + n, tl.sum(total, 0))


@launched
@triton.jit
def first_pairs(weight, rows, pairs, S, T: tl.constexpr, BLOCK: tl.constexpr):
    """A child's weights and their pairs, rounded and in two parts.

    Shapes: weight [i, a, (j e)] -> rows [i, AP, (j e)], pairs [2, i, AP, AP, (j e)]
    """
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = S.J * T.E
    row = tl.arange(0, T.AP)
    w = rounded(load_rows_of(weight, i * T.A + row, row < T.A, k, columns), T)
    tl.store(rows + (i * T.AP + row)[:, None] * columns + k[None, :], w, mask=(k < columns)[None, :])
    w = w.to(tl.float32)
    upper, lower = two_parts(w[:, None, :] * w[None, :, :], T)
    pair = row[:, None] * T.AP + row[None, :]
    at = (i * (T.AP * T.AP) + pair)[:, :, None] * columns + k[None, None, :]
    tl.store(pairs + at, upper, mask=(k < columns)[None, None, :])
    pairs += tl.cast(S.I, tl.int64) * (T.AP * T.AP) * columns
    tl.store(pairs + at, lower, mask=(k < columns)[None, None, :])


@launched
@triton.jit
def first_children(
    poses, rows, pairs, gates, terms, level, d_poses, d_gates, per_split, S, T: tl.constexpr, MP: tl.constexpr,
    K: tl.constexpr, ATOMIC_POSES: tl.constexpr,
):  # fmt: skip
    """Gradients of poses and shares from a block of columns. Shapes: [blocks or 1, n, i, p], [blocks or 1, n, i]"""
    row = tl.arange(0, T.BN * MP)
    n, m = tl.program_id(0) * T.BN + row // MP, row % MP
    split = tl.program_id(1)
    block = tl.program_id(2)
    k = block * K + tl.arange(0, K)
    columns = S.J * T.E
    if not ATOMIC_POSES:
        d_poses += block.to(tl.int64) * S.N * S.I * (T.M * T.A)
        d_gates += block.to(tl.int64) * S.N * S.I
    curve, upper, lower = load_terms(terms, n, m, k, S, T)
    whole = tl.program_id(0) * T.BN + tl.arange(0, T.BN)
    common = tl.where(block == 0, tl.load(level + whole, mask=whole < S.N, other=0.0), 0.0)[:, None]
    entry = tl.arange(0, T.C * T.AP)
    pair = tl.arange(0, T.C * T.AP * T.AP)
    lower_pairs = tl.cast(S.I, tl.int64) * (T.AP * T.AP)
    poses_ahead, gates_ahead = load_shared(poses, gates, n, m, split * per_split, S, T)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, S.I), T.C):
        p, g = by_child(poses_ahead, gates_ahead, T)
        poses_ahead, gates_ahead = load_shared(poses, gates, n, m, i + T.C, S, T)
        here = i * T.AP + entry
        w = tl.trans(load_rows_of(rows, here, here < S.I * T.AP, k, columns))
        slope = tl.dot(upper, w, input_precision=T.PRECISION)
        slope = tl.dot(lower, w, slope, input_precision=T.PRECISION)
        here = i * (T.AP * T.AP) + pair
        there = here < S.I * (T.AP * T.AP)
        bend = tl.dot(curve, tl.trans(load_rows_of(pairs, here, there, k, columns)), input_precision=T.PRECISION)
        w = tl.trans(load_rows_of(pairs, here + lower_pairs, there, k, columns))
        bend = tl.dot(curve, w, bend, input_precision=T.PRECISION)
        slope = tl.reshape(slope, (T.BN * MP, T.C, T.AP))
        bend = tl.sum(tl.reshape(bend, (T.BN * MP, T.C, T.AP, T.AP)) * p[:, :, None, :], 3)
        child, a = i + entry // T.AP, entry % T.AP
        at = (n.to(tl.int64)[:, None] * S.I + child[None, :]) * (T.M * T.A) + (m[:, None] * T.A + a[None, :])
        there = ((n < S.N) & (m < T.M))[:, None] & ((child < S.I) & (a < T.A))[None, :]
        grad = tl.reshape(g * (slope + 2 * bend), (T.BN * MP, T.C * T.AP))
        add_up(d_poses + at, grad.to(d_poses.dtype.element_ty), there, ATOMIC_POSES)
        gain = tl.sum(tl.reshape(tl.sum(p * (slope + bend), 2), (T.BN, MP, T.C)), 1)
        at, there = children_of(whole, i, S, T)
        add_up(d_gates + at, gain + common, there, ATOMIC_POSES)


@launched
@triton.jit
def first_weight(poses, rows, gates, terms, d_weight, per_split, S, T: tl.constexpr, MP: tl.constexpr, K: tl.constexpr):
    """Gradient of the weights from some of the windows. Shapes: d_weight [splits, i, a, (j e)]"""
    row = tl.arange(0, T.BN * MP)
    split = tl.program_id(0)
    i = tl.program_id(1) * T.C
    k = tl.program_id(2) * K + tl.arange(0, K)
    columns = S.J * T.E
    once = tl.zeros((K, T.C * T.AP), dtype=tl.float32)
    twice = tl.zeros((K, T.C * T.AP * T.AP), dtype=tl.float32)
    for first in range(split * per_split, tl.minimum((split + 1) * per_split, S.N), T.BN):
        n, m = first + row // MP, row % MP
        curve, upper, lower = load_terms(terms, n, m, k, S, T)
        p, g = by_child(*load_shared(poses, gates, n, m, i, S, T), T)
        shared = rounded(tl.reshape(g * p, (T.BN * MP, T.C * T.AP)), T)
        above, below = two_parts(paired(tl.reshape(shared.to(tl.float32), p.shape), p, T), T)
        twice = tl.dot(tl.trans(curve), above, twice, input_precision=T.PRECISION)
        twice = tl.dot(tl.trans(curve), below, twice, input_precision=T.PRECISION)
        once = tl.dot(tl.trans(upper), shared, once, input_precision=T.PRECISION)
        once = tl.dot(tl.trans(lower), shared, once, input_precision=T.PRECISION)
    entry = tl.arange(0, T.C * T.AP)
    here = i * T.AP + entry
    w = tl.trans(load_rows_of(rows, here, here < S.I * T.AP, k, columns)).to(tl.float32)
    w = tl.reshape(w, (K, T.C, T.AP))[:, :, None, :]
    bend = tl.sum(tl.reshape(twice, (K, T.C, T.AP, T.AP)) * w, 3)
    grad = once + 2 * tl.reshape(bend, (K, T.C * T.AP))
    child, a = i + entry // T.AP, entry % T.AP
    at = (split.to(tl.int64) * S.I + child)[None, :] * T.A + a[None, :]
    there = ((child < S.I) & (a < T.A))[None, :] & (k < columns)[:, None]
    tl.store(d_weight + at * columns + k[:, None], grad, mask=there)


def without_votes(votes: Votes) -> bool:
    """Whether the first step's gradients can be had from products of matrices, which are small enough to pay."""
    _, size, parents, columns = votes.weight.shape
    plain = votes.offset is None and votes.sharing == 1 and not few_pairs(votes)
    small = size <= LARGEST and votes.rows <= min(ROWS) and 2 * size * size <= parents * columns
    return plain and small and precision_of(votes.products)[1] == "tf32" and room() >= SHARED_BYTES


def first_gradients(
    votes: Votes,
    plan: Plan,
    gates: Tensor,
    centre: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of poses, weights and shares, in parts.

    Args:
        grads: of mass [n, j], first and second [n, j, d].
        dtype: of the poses' gradient, if it comes in one part.

    Shapes: gates [n, i], centre [..., j, d] -> [s, n, i, p], [s, i, a, j, e], [s, n, i]
    """
    n, i, j = plan.space[-3:]
    size, columns = votes.weight.shape[1], j * votes.weight.shape[3]
    half = precision_of(votes.products)[0] == tl.bfloat16
    new = partial(torch.empty, dtype=torch.float32, device=gates.device)
    made = partial(new, dtype=torch.bfloat16 if half else torch.float32)
    a, m = triton.next_power_of_2(size), triton.next_power_of_2(votes.rows)
    wide = max(16, min(COLUMNS if half else COLUMNS // 2, triton.next_power_of_2(columns)))
    blocks = triton.cdiv(columns, wide)
    options = {"num_warps": 8, "num_stages": 3 if half else 2, "enable_fp_fusion": True}

    windows, children, tile = _cut(plan, m, a, ROWS[0], ENTRIES[0])
    terms, level = made(3, n, votes.rows, columns), new(n)
    block = min(1024, triton.next_power_of_2(votes.rows * columns))
    first_terms[(n,)](*grads, centre, terms, level, plan.space, tile, block)
    rows, pairs = made(i, a, columns), made(2, i, a, a, columns)
    first_pairs[(i, blocks)](votes.weight, rows, pairs, plan.space, tile, wide)

    over_windows = triton.cdiv(n, windows)
    per_split = children * _split(triton.cdiv(i, children), over_windows * blocks)
    over_parents = pose_sum(blocks, gates.device)
    d_poses = over_parents.new(n, i, votes.child_dim, dtype=dtype if blocks == 1 else torch.float32)
    d_gates = over_parents.new(n, i)
    first_children[(over_windows, triton.cdiv(i, per_split), blocks)](
        votes.poses, rows, pairs, gates, terms, level, d_poses, d_gates, per_split, plan.space, tile, m, wide,
        over_parents.atomic, **options,
    )  # fmt: skip

    windows, children, tile = _cut(plan, m, a, ROWS[1], ENTRIES[1])
    over_children = triton.cdiv(i, children)
    per_split = windows * _split(triton.cdiv(n, windows), over_children * blocks)
    d_weight = new(triton.cdiv(n, per_split), *votes.weight.shape)
    first_weight[(len(d_weight), over_children, blocks)](
        votes.poses, rows, gates, terms, d_weight, per_split, plan.space, tile, m, wide, **options
    )
    return d_poses, d_weight, d_gates


def _cut(plan: Plan, m: int, a: int, rows: int, entries: int) -> tuple[int, int, Tile]:
    """Windows and children in so many rows of poses and entries of their rows, and a tile of them."""
    windows, children = rows // m, entries // a
    cut: dict[str, Any] = {"BN": windows, "C": children, "AP": a}
    known = {name: x if interpreted() else tl.constexpr(x) for name, x in cut.items()}
    return windows, children, plan.tile._replace(**known)


@cache
def _split(steps: int, others: int) -> int:
    """Steps in a part, where each of so many others does all steps: such that multiprocessors end together."""

    def time(parts: int) -> int:
        return triton.cdiv(parts * others, MULTIPROCESSORS) * (triton.cdiv(steps, parts) + 2)  # to begin and to end

    most = max(1, min(steps, PROGRAMS // others))
    return triton.cdiv(steps, min(range(1, most + 1), key=time))
