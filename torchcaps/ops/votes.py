"""Votes that need not exist.

A layer hands its routing a `Votes`: child poses, weights and window, which together know every vote. Routings ask for
sums and agreements. Votes are stored when they fit a budget; beyond it they are made, used and dropped piece by piece,
and made again in the backward pass, so that memory no longer grows with children times parents times dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchcaps.functional import widen
from torchcaps.fused import wanted
from torchcaps.ops.windows import Window

_budget = 2**28  # bytes of votes that one layer may store
_piece = 2**23  # bytes of votes held at a time beyond that

Step = Callable[..., tuple[Tensor | None, Tensor | None]]


@contextmanager
def vote_budget(size: int) -> Iterator[None]:
    """Within it, a layer stores at most `size` bytes of votes; the default is 256 MiB."""
    global _budget
    before, _budget = _budget, size
    try:
        yield
    finally:
        _budget = before


class Votes:
    """What every child says of every parent: its pose times a weight.

    A pose of p numbers is read as rows of a numbers, a vector pose as one row. Each row times the weight [a, e] is a
    row of the vote, so d = p / a * e. If there are more children than weights, s = i / g neighbours share one.

    Args:
        poses: flat [b, i, p], or spatial [b, c, p, h, w] with a window.
        weight: [g, a, j, e]; with a window, g runs over type, row and column in it.
        offset: added to the votes, broadcastable to [g, s, j, d].
        products: dtype in which kernels multiply; by default that of the poses.

    Shapes: votes [..., i, j, d], where ... is b, or b y x with a window
    """

    def __init__(
        self,
        poses: Tensor,
        weight: Tensor,
        window: Window | None = None,
        offset: Tensor | None = None,
        products: torch.dtype | None = None,
    ):
        self.poses, self.weight, self.window, self.offset = poses, weight, window, offset
        self.products = poses.dtype if products is None else products
        self.dtype = torch.promote_types(poses.dtype, weight.dtype)
        groups, size, self.parents, columns = weight.shape
        pose_dim = poses.shape[2]
        self.child_dim = pose_dim
        self.rows = pose_dim // size
        self.dim = self.rows * columns
        if window is None:
            self.lead: tuple[int, ...] = (poses.shape[0],)
            self.in_caps = poses.shape[1]
        else:
            self.lead = (poses.shape[0], *window.sites(poses.shape[3], poses.shape[4]))
            self.in_caps = groups
        self.sharing = self.in_caps // groups
        self._stored: Tensor | None = None
        self._in_cache: dict[bool, Any] = {}  # what the steps on a CPU share, with and without gradients

    @classmethod
    def of(cls, votes: Votes | Tensor) -> Votes:
        """Votes that somebody already has, as a tensor [..., i, j, d]."""
        return StoredVotes(votes) if isinstance(votes, Tensor) else votes

    @property
    def device(self) -> torch.device:
        return self.poses.device

    def to(self, dtype: torch.dtype) -> Votes:
        if self.poses.dtype == self.weight.dtype == dtype:
            return self
        offset = None if self.offset is None else self.offset.to(dtype)
        return Votes(self.poses.to(dtype), self.weight.to(dtype), self.window, offset)

    def with_products(self, dtype: torch.dtype) -> Votes:
        """The same votes, which kernels multiply in this dtype.

        Half-precision poses and weights become float32 all the same, so that whole sums, and gradients to which
        several steps add, are not rounded on the way.
        """
        poses, weight = widen(self.poses), widen(self.weight)
        if poses is self.poses and weight is self.weight and dtype == self.products:
            return self
        return Votes(poses, weight, self.window, self.offset, dtype)

    def detach(self) -> Votes:
        offset = None if self.offset is None else self.offset.detach()
        same = Votes(self.poses.detach(), self.weight.detach(), self.window, offset, self.products)
        same._stored = None if self._stored is None else self._stored.detach()
        return same

    def children(self) -> Tensor:
        """Shapes: [n, g, s, p], n being the windows of all images"""
        poses = self.poses if self.window is None else self.window.unfold(self.poses).flatten(0, 2)
        return poses.unflatten(1, (-1, self.sharing))

    def materialise(self) -> Tensor:
        """All votes. Shapes: [..., i, j, d]"""
        return self._by_parent().transpose(1, 2).unflatten(0, self.lead)

    def total(self, coupling: Tensor | None = None) -> Tensor:
        """The votes summed over the children, weighted by `coupling` [i, j] if given: one matrix product, no votes.

        Shapes: -> [..., j, d]
        """
        from torchcaps.ops.backend import runs_in_cache

        if coupling is None and runs_in_cache(self):
            from torchcaps.ops import agreement_cpu

            if agreement_cpu.sums(self):
                return agreement_cpu.total(self)
        if coupling is None and self._few():
            return self._by_parent().sum(2).unflatten(0, self.lead)
        weight = self.weight.to(self.poses.dtype)
        if coupling is not None:
            if self.sharing > 1:
                return self.mixture(coupling.expand(*self.lead, -1, -1))
            weight = weight * coupling[:, None, :, None].to(weight.dtype)
        if self.window is None or self.window.scrambled:
            children = self.children()
            rows = (children.sum(2) if self.sharing > 1 else children.squeeze(2)).unflatten(2, (self.rows, -1))
            sums = rows.transpose(1, 2).flatten(2).flatten(0, 1) @ weight.flatten(0, 1).flatten(1)  # [(n m), (j e)]
            sums = sums.unflatten(1, (self.parents, -1)).unflatten(0, (-1, self.rows))
            total = sums.transpose(1, 2).flatten(2).unflatten(0, self.lead)
        else:
            total = self._convolve(weight)
        total = widen(total)
        if self.offset is not None:
            offset = self.offset.expand(len(weight), self.sharing, self.parents, self.dim)
            total = total + (offset if coupling is None else offset * coupling[:, None, :, None]).sum((0, 1))
        return total

    def _convolve(self, weight: Tensor) -> Tensor:
        """Every site's sum at once is a convolution."""
        assert self.window is not None
        b, c, _, h, w = self.poses.shape
        k, columns = self.window.kernel_size, weight.shape[3]
        rows = self.poses.permute(0, 3, 4, 1, 2).unflatten(4, (self.rows, -1)).permute(0, 4, 1, 2, 3, 5)
        images = rows.reshape(b * self.rows, h, w, -1)  # with their channels last, as convolutions like them
        kernel = weight.view(c, k, k, -1, self.parents, columns).permute(4, 5, 1, 2, 0, 3)
        kernel = kernel.reshape(self.parents * columns, k, k, -1)
        sums = F.conv2d(images.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), stride=self.window.stride)
        sums = sums.permute(0, 2, 3, 1).unflatten(3, (self.parents, columns)).unflatten(0, (b, self.rows))
        sums = sums.permute(0, 2, 3, 4, 1, 5)  # [b, y, x, j, m, e]
        return sums.to(torch.promote_types(sums.dtype, torch.float32), memory_format=torch.contiguous_format).flatten(4)

    def mixture(self, coupling: Tensor) -> Tensor:
        """The votes summed over the children, weighted by the coupling.

        Shapes: coupling [..., i, j] -> [..., j, d]
        """
        from torchcaps.ops.backend import runs_in_cache

        if runs_in_cache(self):
            from torchcaps.ops import agreement_cpu

            return agreement_cpu.mixture(self, coupling)
        from torchcaps.ops.backend import runs_fused

        if runs_fused(self):
            from torchcaps.ops.em_triton import fused_mixture

            return fused_mixture(self, coupling)
        mixture, _ = self.sweep(lambda votes, coupling: (mix(votes, coupling), None), pairs=[coupling])
        assert mixture is not None
        return mixture

    def per_child(self, x: Tensor) -> Tensor:
        """log of the sum of exp(x) over every parent a child can vote for, in all its windows.

        Shapes: x [..., i, j] -> [..., i]
        """
        x = x.logsumexp(-1)
        return x if self.window is None else self.window.logsumexp(x, (self.poses.shape[3], self.poses.shape[4]))

    def sweep(
        self, step: Step, windows: Sequence[Tensor] = (), pairs: Sequence[Tensor] = (), recompute: bool = False
    ) -> Any:
        """Shows a step all the votes, at once or in pieces; this is where a kernel takes over from the reference.

        The step gets votes [n, j, i, d], then what belongs to windows [n, j, d] and to pairs [n, j, i]. It returns a
        sum over the children [n, j, d] and something for each pair [n, j, i]; either may be None. With `recompute` it
        runs again in the backward pass, rather than keep what it made on the way.

        Shapes: windows [..., j, d], pairs [..., i, j] or [i, j] -> [..., j, d], [..., i, j]
        """
        if self.poses.dtype != widen(self.poses).dtype:
            wide = [widen(x) for x in windows], [widen(x) for x in pairs]
            return self.to(torch.float32).sweep(step, *wide, recompute)
        windows = [x.reshape(-1, *x.shape[-2:]) for x in windows]
        pairs = [x.reshape(-1, *x.shape[-2:]).mT for x in pairs]
        if self._size() <= _budget:
            votes = self._by_parent()
            summed, paired = _again(step, votes, *windows, *pairs) if recompute else step(votes, *windows, *pairs)
        else:
            summed, paired = self._sweep_pieces(step, windows, pairs)
        return (
            None if summed is None else summed.reshape(*self.lead, *summed.shape[1:]),
            None if paired is None else paired.mT.reshape(*self.lead, self.in_caps, self.parents),
        )

    def _size(self) -> int:
        n = 1
        for size in self.lead:
            n *= size
        return n * self.in_caps * self.parents * self.dim * self.dtype.itemsize

    def _few(self) -> bool:
        """Whether these votes are so few that on a CPU one more product costs more than to sum them."""
        from torchcaps.ops.votes_cpu import LEAST

        if self.device.type != "cpu" or wanted(self.device) or torch.compiler.is_compiling():
            return False
        wide = widen(self.poses) is self.poses and self.poses.dtype == self.weight.dtype
        return wide and self._size() < LEAST and self._size() <= _budget

    def _by_parent(self) -> Tensor:
        if self._stored is None:
            self._stored = self._vote(self.children(), self.weight, self.offset)
        return self._stored

    def _vote(self, children: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        """Shapes: children [n, g, s, p], weight [g, a, j, e], offset [g, s, j, d] -> [n, j, (g s), d]"""
        votes = torch.einsum("ngsma,gaje->njgsme", children.unflatten(3, (self.rows, -1)), weight).flatten(4)
        if offset is not None:
            votes = votes + offset.permute(2, 0, 1, 3)
        return votes.flatten(2, 3).contiguous()

    def _sweep_pieces(self, step: Step, windows: list[Tensor], pairs: list[Tensor]) -> Any:
        children = self.children()
        n, groups = children.shape[:2]
        one, room = self._size() // n, min(_budget, _piece)
        images = max(1, room // one)  # in a piece; where not even one fits, some of its groups
        some = groups if images > 1 else max(1, groups * room // one)
        offset = self.offset
        if offset is not None:
            offset = offset.expand(groups, self.sharing, self.parents, self.dim)
        weights = self.weight.split(some)
        offsets = [None] * len(weights) if offset is None else offset.split(some)
        batches = zip(
            children.split(images),
            *(x.split(images) for x in windows),
            *(x.split(images) if len(x) > 1 else repeat(x) for x in pairs),
            strict=False,
        )

        def of_piece(children: Tensor, weight: Tensor, offset: Tensor | None, *rest: Tensor) -> Any:
            return step(self._vote(children, weight, offset), *rest)

        sums: list[Any] = []
        matches: list[Any] = []
        for batch in batches:
            of_windows, of_pairs = batch[1 : 1 + len(windows)], batch[1 + len(windows) :]
            inside = zip(
                batch[0].split(some, 1),
                weights,
                offsets,
                *(x.split(some * self.sharing, 2) for x in of_pairs),
                strict=True,
            )
            parts = [
                _again(of_piece, *first, *of_windows, *rest)
                for *first, rest in ((*piece[:3], piece[3:]) for piece in inside)
            ]
            sums.append(None if parts[0][0] is None else reduce(torch.add, [part for part, _ in parts]))
            matches.append(None if parts[0][1] is None else torch.cat([pair for _, pair in parts], 2))
        return (
            None if sums[0] is None else torch.cat(sums),
            None if matches[0] is None else torch.cat(matches),
        )


class StoredVotes(Votes):
    """Votes that exist as a tensor [..., i, j, d]."""

    def __init__(self, votes: Tensor):
        self.poses, self.window, self.offset = votes, None, None
        self.dtype = self.products = votes.dtype
        self.lead = tuple(votes.shape[:-3])
        self.in_caps, self.parents, self.dim = votes.shape[-3:]

    def to(self, dtype: torch.dtype) -> Votes:
        return self if self.dtype == dtype else StoredVotes(self.poses.to(dtype))

    def detach(self) -> Votes:
        return StoredVotes(self.poses.detach())

    def materialise(self) -> Tensor:
        return self.poses

    def total(self, coupling: Tensor | None = None) -> Tensor:
        return self.poses.sum(-3) if coupling is None else torch.einsum("ij,...ijd->...jd", coupling, self.poses)

    def _size(self) -> int:
        return 0

    def _by_parent(self) -> Tensor:
        return self.poses.reshape(-1, *self.poses.shape[-3:]).transpose(1, 2)


def _again(step: Step, *inputs: Any) -> Any:
    if any(isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x) for x in inputs):
        return step(*inputs)  # vmap is over by the time of the backward pass
    return checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)


def mix(votes: Tensor, coupling: Tensor) -> Tensor:
    """Shapes: votes [n, j, i, d], coupling [n, j, i] -> [n, j, d]"""
    return (coupling[:, :, None, :] @ votes)[:, :, 0]
