"""Votes on a CPU in pieces that stay in its cache: made, used and dropped, forward and backward.

A piece is some windows n of some groups g of children. Neighbours s that share a weight
count as windows: a column x = (n s) is a child of a group in a window. Votes lie as [g, j, (e m), x], with the columns
innermost, so that making them, the agreement, the sums and every gradient is either one batched matrix product or one
pass over contiguous numbers. What is summed over the children never needs votes: the mixture is W (coupling x pose), a
product with g x a terms in each sum. Nor does the agreement where poses are smaller than votes: it is
pose . (W parent).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchcaps.ops.votes import Votes

WINDOWS = 128  # columns of a piece, where there are so many
LEAST = 2**20  # bytes of votes below which there is nothing to gain
FEWEST = 12  # children that share a weight, below which reading weights takes longer than the votes do


def fits(votes: Votes) -> bool:
    """Whether these votes are routed here: made from poses on a CPU, and more than a cache would hold anyway."""
    return (
        hasattr(votes, "weight")
        and votes.device.type == "cpu"
        and votes.poses.dtype == votes.weight.dtype
        and votes.dtype in (torch.float32, torch.float64)
        and votes._size() >= LEAST
        and math.prod(votes.lead) * votes.in_caps >= FEWEST * len(votes.weight)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap needs the formula
    )


class Parts(NamedTuple):
    """What votes are made of. Shapes: children [n, g, s, p], weight [g, a, j, e]"""

    children: Tensor
    weight: Tensor
    rows: int
    gathered: Gathered


def parts(votes: Votes) -> Parts:
    """All steps of a routing share them. Offsets are weights too, for rows of ones in the poses."""
    known: Parts | None = votes._in_cache.get(torch.is_grad_enabled())
    if known is not None:
        return known
    children, weight, offset = votes.children(), votes.weight, votes.offset
    if offset is not None:
        neighbours = offset.shape[1]
        if neighbours > 1:  # each has an offset of its own, so each has a weight of its own
            children, weight = children.flatten(1, 2)[:, :, None], weight.repeat_interleave(neighbours, 0)
        offset = offset.expand(len(votes.weight), neighbours, votes.parents, votes.dim)
        offset = offset.flatten(0, 1).unflatten(2, (votes.rows, -1)).transpose(1, 2)  # [g, m, j, e]
        weight = torch.cat([weight, offset], 1)
    gathered = Gathered()
    known = Parts(children, _Gather.apply(weight.contiguous(), gathered), votes.rows, gathered)
    votes._in_cache[torch.is_grad_enabled()] = known
    return known


class Gathered:
    """One gradient of the weights for all steps of a routing, as large as those of one.

    The step whose backward pass is first makes it and gives it to autograd; the rest add to it, before `_Gather`, which
    waits for all of them, lets it pass.
    """

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self._pass = -1

    def begin(self, weight: Tensor) -> tuple[Tensor, bool]:
        """The gradient, and whether nobody has written it yet."""
        now = torch._C._current_graph_task_id()
        if self.sum is not None and self._pass == now:
            return self.sum, False
        self.sum, self._pass = torch.empty_like(weight), now
        return self.sum, True


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gathered: Gathered) -> Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.gathered.sum = None
        return grad, None


class Place(NamedTuple):
    """Windows, and which of the neighbours that share a weight."""

    windows: slice
    neighbours: slice


class Sweep:
    """The pieces of a sweep over all votes, and the memory they share.

    Shapes: children [n, g, s, p], weight [g, a, j, e]
    """

    def __init__(self, children: Tensor, weight: Tensor, rows: int):
        self.children, self.weight, self.rows = children, weight, rows
        self.n, self.g, self.s, pose = children.shape
        _, self.a, self.j, self.e = weight.shape
        self.own = pose // rows  # of the a rows of a weight; what is left are offsets
        self.by_parent = self.a < self.e
        self.few_neighbours = min(self.s, WINDOWS)
        self.few_windows = _evenly(self.n, WINDOWS // self.few_neighbours)
        room = 2 * _cache_size() * torch.get_num_threads()  # twice, since the next level is near and calls are fewer
        one = max(self.e, self.a) * rows * self.j * weight.itemsize  # of a vote for each parent, or of a pose
        self.some = max(1, room // (one * self.few_windows * self.few_neighbours))
        self._scratch: dict[str, Tensor] = {}
        self._shaped: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def places(self) -> Iterator[Place]:
        for windows in _slices(self.n, self.few_windows):
            for neighbours in _slices(self.s, self.few_neighbours):
                yield Place(windows, neighbours)

    def pieces(self, at: Place) -> Iterator[Piece]:
        poses = self.poses(at)
        return (Piece(self, at, of, poses[of]) for of in _slices(self.g, self.some))

    def empty(self, name: str, *shape: int) -> Tensor:
        """Memory that the next piece uses again, so that it stays in the cache."""
        known = self._shaped.get((name, shape))
        if known is None:
            size = math.prod(shape)
            flat = self._scratch.get(name)
            if flat is None or flat.numel() < size:
                flat = self._scratch[name] = self.weight.new_empty(size)
            known = self._shaped[name, shape] = flat[:size].view(shape)
        return known

    def zeros(self, at: Place) -> Tensor:
        """For sums over the children. Shapes: -> [j, (e m), x]"""
        return self.weight.new_zeros(self.j, self.e * self.rows, _size(at.windows) * _size(at.neighbours))

    def poses(self, at: Place) -> Tensor:
        """Shapes: -> [g, a, m, x]"""
        part = self.children[at.windows, :, at.neighbours].unflatten(3, (self.rows, -1)).permute(1, 4, 3, 0, 2)
        out = self.empty("poses", self.g, self.a, *part.shape[2:])
        out[:, : self.own].copy_(part)
        if self.own < self.a:
            out[:, self.own :].copy_(torch.eye(self.rows, dtype=out.dtype)[:, :, None, None])
        return out.flatten(3)

    def per_parent(self, x: Tensor, at: Place) -> Tensor:
        """What belongs to parents as the votes lie, in memory of its own. Shapes: x [n, j, (m e)] -> [j, (e m), x]"""
        part = x[at.windows].unflatten(2, (self.rows, -1)).permute(1, 3, 2, 0)[..., None]
        out = x.new_empty(*part.shape[:4], _size(at.neighbours))
        return out.copy_(part.expand_as(out)).view(self.j, -1, out.shape[3] * out.shape[4])

    def per_column(self, x: Tensor, at: Place) -> Tensor:
        """Shapes: x [n, j] -> [j, x]"""
        return x[at.windows].mT.repeat_interleave(_size(at.neighbours), 1)

    def give(self, out: Tensor, x: Tensor, at: Place) -> None:
        """Sums over neighbours are part of what the parents get. Shapes: out [n, j, (m e)], x [j, (e m), x]"""
        neighbours = _size(at.neighbours)
        x = x.view(self.j, self.e, self.rows, -1, neighbours)
        x = (x.sum(4) if neighbours > 1 else x[..., 0]).permute(3, 0, 2, 1)
        part = out[at.windows].unflatten(2, (self.rows, -1))
        part.copy_(x) if at.neighbours.start == 0 else part.add_(x)

    def pairs(self) -> Tensor:
        """Memory for something that each child has for each parent. Shapes: [g, j, n, s]"""
        return self.weight.new_empty(self.g, self.j, self.n, self.s)


def by_child(pairs: Tensor) -> Tensor:
    """Shapes: [g, j, n, s] -> [n, (g s), j]"""
    return pairs.permute(2, 0, 3, 1).flatten(1, 2)


class Piece:
    """Some columns of some groups. Shapes: poses [g, a, m, x]"""

    def __init__(self, sweep: Sweep, at: Place, of: slice, poses: Tensor):
        self.sweep, self.empty, self.at, self.of, self.poses = sweep, sweep.empty, at, of, poses
        self.weight = sweep.weight[of]
        if sweep.by_parent:  # what follows reads it in strides, for which it had better be in the cache
            self.weight = sweep.empty("weight", *self.weight.shape).copy_(self.weight)
        self.g, self.a, self.m, self.x = poses.shape

    def votes(self) -> Tensor:
        """Shapes: -> [g, j, (e m), x]"""
        sweep = self.sweep
        out = self.empty("votes", self.g, sweep.j * sweep.e, self.m * self.x)
        torch.bmm(self.weight.flatten(2).mT, self.poses.flatten(2), out=out)
        return out.view(self.g, sweep.j, sweep.e * self.m, self.x)

    def agree(self, above: Tensor, out: Tensor) -> Tensor:
        """The product of each vote with its parent, through votes or, where these are larger than poses, without.

        Then W above is made instead: what each pose would have to be.

        Shapes: above [j, (e m), x] -> [g, j, x]
        """
        if not self.sweep.by_parent:
            return torch.sum(self.votes().mul_(above), 2, out=out)
        j = self.sweep.j
        wanted = self.empty("votes", j, self.g * self.a, self.m * self.x)
        torch.bmm(self.weight.flatten(0, 1).transpose(0, 1), above.view(j, self.sweep.e, -1), out=wanted)
        products = wanted.view(j, self.g, self.a * self.m, self.x).mul_(self.poses.flatten(1, 2))
        torch.sum(products, 2, out=out.transpose(0, 1))
        return out

    def mix(self, total: Tensor, coupling: Tensor) -> None:
        """Adds the votes, weighted by their coupling, to the total. Shapes: total [j, (e m), x], coupling [g, j, x]"""
        j = self.sweep.j
        weighted = self.empty("weighted", j, self.g, self.a, self.m, self.x)
        torch.mul(coupling.transpose(0, 1)[:, :, None, None], self.poses, out=weighted)
        weight = self.weight.flatten(0, 1).permute(1, 2, 0)  # [j, e, (g a)]
        total.view(j, self.sweep.e, -1).baddbmm_(weight, weighted.view(j, self.g * self.a, -1))

    def pair(self, x: Tensor, name: str = "pair") -> Tensor:
        """Shapes: x [n, (g s), j] -> [g, j, x]"""
        part = self._pairs(x)
        if part.shape[3] == 1 and part.stride(2) == 1:
            return part[..., 0]
        return self.empty(name, *part.shape).copy_(part).flatten(2)

    def share(self, weights: Tensor, one: Tensor) -> Tensor:
        """Weights that sum to 1, exactly where there is one child. Shapes: [n, (g s), j], [j, x] -> [g, j, x]"""
        part = self._pairs(weights)
        out = self.empty("share", *part.shape)
        return torch.div(part, one.view(part.shape[1:]), out=out).flatten(2)

    def _pairs(self, x: Tensor) -> Tensor:
        """Shapes: x [n, (g s), j] -> [g, j, n, s]"""
        x = x.unflatten(1, (self.sweep.g, self.sweep.s))
        return x[self.at.windows, self.of, self.at.neighbours].permute(1, 3, 0, 2)

    def keep(self, pairs: Tensor, x: Tensor) -> None:
        """Shapes: pairs [g, j, n, s], x [g, j, x]"""
        part = pairs[self.of, :, self.at.windows, self.at.neighbours]
        part.copy_(x.unflatten(2, part.shape[2:]))

    def kept(self, pairs: Tensor) -> Tensor | None:
        """Where these are to be, if they lie there as they do in a piece. Shapes: [g, j, n, s] -> [g, j, x]"""
        part = pairs[self.of, :, self.at.windows, self.at.neighbours]
        return part.view(self.g, -1, self.x) if part.is_contiguous() else None

    def of_all(self, x: Tensor) -> Tensor:
        """What pairs have in every window. Shapes: x [(g s), j] -> [g, j, x], or [g, j, 1] for all columns"""
        part = self._in_all(x).transpose(1, 2)
        return part if self.sweep.s == 1 else part.repeat(1, 1, _size(self.at.windows))

    def add_to_all(self, out: Tensor, x: Tensor) -> None:
        """Shapes: out [(g s), j], x [g, j, x]"""
        self._in_all(out).add_(x.unflatten(2, (-1, _size(self.at.neighbours))).sum(2).transpose(1, 2))

    def _in_all(self, x: Tensor) -> Tensor:
        """Shapes: x [(g s), j] -> [g, s, j]"""
        return x.unflatten(0, (self.sweep.g, self.sweep.s))[self.of, self.at.neighbours]


class Gradients:
    """Gradients of children and weights, as far as they are asked for, from those of the votes."""

    def __init__(self, sweep: Sweep, needed: Sequence[bool], gathered: Gathered):
        self.sweep = sweep
        self.children = torch.empty_like(sweep.children, memory_format=torch.contiguous_format) if needed[0] else None
        self.weight: Tensor | None = None
        self.unwritten = False
        if needed[1]:
            self.weight, self.unwritten = gathered.begin(sweep.weight)
        self.given = self.weight if self.unwritten else None  # to autograd
        self.needed = any(needed[:2])

    def add(self, votes: Tensor, piece: Piece) -> None:
        """Shapes: votes [g, j, (e m), x]"""
        sweep, at, of = self.sweep, piece.at, piece.of
        votes = votes.view(piece.g, -1, piece.m * piece.x)  # [g, (j e), (m x)]
        if self.children is not None:
            out = piece.empty("d poses", piece.g, sweep.own, piece.m * piece.x)
            torch.bmm(piece.weight[:, : sweep.own].flatten(2), votes, out=out)
            part = self.children[at.windows, of, at.neighbours].unflatten(3, (sweep.rows, -1))  # [n, g, s, m, a]
            part.copy_(out.view(piece.g, sweep.own, piece.m, len(part), -1).permute(3, 0, 4, 2, 1))
        if self.weight is not None:
            weight = self.weight[of].view(piece.g, piece.a, -1)
            if self.unwritten and at.windows.start == at.neighbours.start == 0:
                torch.bmm(piece.poses.flatten(2), votes.mT, out=weight)
            else:
                weight.baddbmm_(piece.poses.flatten(2), votes.mT)

    def add_agreement(self, share: Tensor, slope: Tensor | None, grad: Tensor, above: Tensor, piece: Piece) -> None:
        """For votes that have the gradient share x grad + slope x above.

        Shapes: share and slope [g, j, x], grad and above [j, (e m), x]
        """
        votes = piece.empty("votes", piece.g, *grad.shape)
        torch.mul(share[:, :, None], grad, out=votes)
        self.add(votes if slope is None else votes.addcmul_(slope[:, :, None], above), piece)


@cache
def _cache_size() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 2**10
    except (OSError, ValueError):
        return 2**20


def _evenly(size: int, most: int) -> int:
    """In parts of about `most`, the last hardly smaller than the rest."""
    return -(-size // max(1, size // max(1, most)))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size
