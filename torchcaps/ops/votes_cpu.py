"""Routing on a CPU in pieces that stay in its cache: votes are made, used and dropped, forward and backward.

A piece is some windows n of some children i. Votes lie as [i, j, (e m), n]: the windows are innermost, so that making
them, the agreement, the sums and every gradient is either one batched matrix product or one pass over contiguous
numbers. What is summed over the children never needs votes: the mixture is W (coupling x pose), a product with
i x a terms in each sum. Nor does the agreement where poses are smaller than votes: it is pose . (W parent).

The functions here are those of `agreement.py`, `em.py` and `Votes.mixture`, with the same arguments and results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torchcaps.ops.votes import Votes

WINDOWS = 128  # in a piece, where there are so many
LEAST = 2**20  # bytes of votes below which there is nothing to gain


def fits(votes: Votes) -> bool:
    """Whether these votes are routed here: made from poses on a CPU, and more than a cache would hold anyway."""
    return (
        hasattr(votes, "weight")
        and votes.device.type == "cpu"
        and votes.poses.dtype == votes.weight.dtype
        and votes.dtype in (torch.float32, torch.float64)
        and votes._size() >= LEAST
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap needs the formula
    )


def agreement_step(
    votes: Votes,
    parents: Tensor,
    *,
    scale: float = 1.0,
    logits: Tensor | None = None,
    prior: Tensor | None = None,
    leak: bool = False,
    constant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Shapes: parents [..., j, d], logits and prior [i, j] -> mixture [..., j, d], coupling [..., i, j]"""
    mixture, coupling = _Agreement.apply(*_parts(votes), _flat(parents), logits, prior, scale, leak, constant)
    return mixture.unflatten(0, votes.lead), coupling.unflatten(0, votes.lead)


def sums(votes: Votes) -> bool:
    """Whether `total` is for these too: each child has a weight of its own, and there is nothing else to add."""
    return votes.window is None and votes.sharing == 1 and votes.offset is None


def total(votes: Votes) -> Tensor:
    """Shapes: -> [..., j, d]"""
    return _Total.apply(*_parts(votes)).unflatten(0, votes.lead)


def mixture(votes: Votes, coupling: Tensor) -> Tensor:
    """Shapes: coupling [..., i, j] -> [..., j, d]"""
    return _Mixture.apply(*_parts(votes), _flat(coupling)).unflatten(0, votes.lead)


def gaussian_fit(votes: Votes, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: weights [..., i, j] -> mass [..., j], mean [..., j, d], variance [..., j, d]"""
    mass, mean, variance = _Fit.apply(*_parts(votes), _flat(weights))
    return mass.unflatten(0, votes.lead), mean.unflatten(0, votes.lead), variance.unflatten(0, votes.lead)


def gaussian_log_density(votes: Votes, mean: Tensor, variance: Tensor) -> Tensor:
    """Shapes: mean and variance [..., j, d] -> [..., i, j]"""
    return _LogDensity.apply(*_parts(votes), _flat(mean), _flat(variance)).unflatten(0, votes.lead)


def _parts(votes: Votes) -> tuple[Tensor, Tensor, int, _Gathered]:
    """Children, the weight of each, the rows of a pose, and where gradients gather; all steps of a routing share them.

    Offsets are weights too, for rows of ones in the poses.

    Shapes: [n, i, p], [i, a, j, e]
    """
    known = votes._in_cache.get(torch.is_grad_enabled())
    if known is not None:
        return known
    children, weight = votes.children().flatten(1, 2), votes.weight
    if votes.sharing > 1:
        weight = weight.repeat_interleave(votes.sharing, 0)
    if votes.offset is not None:
        offset = votes.offset.expand(len(votes.weight), votes.sharing, votes.parents, votes.dim)
        offset = offset.flatten(0, 1).unflatten(2, (votes.rows, -1)).transpose(1, 2)  # [i, m, j, e]
        weight = torch.cat([weight, offset], 1)
    gathered = _Gathered()
    parts = children, _Gather.apply(weight.contiguous(), gathered), votes.rows, gathered
    votes._in_cache[torch.is_grad_enabled()] = parts
    return parts


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -3)


@cache
def _cache_size() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 2**10
    except (OSError, ValueError):
        return 2**20


class _Sweep:
    """The pieces of a sweep over all votes, and the memory they share.

    Shapes: children [n, i, p], weight [i, a, j, e]
    """

    def __init__(self, children: Tensor, weight: Tensor, rows: int):
        self.children, self.weight, self.rows = children, weight, rows
        self.n, self.i, pose = children.shape
        _, self.a, self.j, self.e = weight.shape
        self.own = pose // rows  # of the a rows of a weight; what is left are offsets
        self.by_parent = self.a < self.e
        room = _cache_size() * torch.get_num_threads()
        one = max(self.e, self.a) * rows * self.j * weight.itemsize  # of a vote for each parent, or of a pose
        self.windows = -(-self.n // max(1, self.n // WINDOWS))
        self.some = min(self.i, max(1, room // (one * self.windows)))
        self._scratch: dict[str, Tensor] = {}
        self._shaped: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def over_windows(self) -> Iterator[slice]:
        return _slices(self.n, self.windows)

    def over_children(self, poses: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Shapes: poses [i, a, m, n]"""
        return ((of, poses[of]) for of in _slices(self.i, self.some))

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

    def poses(self, ns: slice) -> Tensor:
        """Shapes: -> [i, a, m, n]"""
        part = self.children[ns].unflatten(2, (self.rows, -1))
        out = self.empty("poses", self.i, self.a, self.rows, len(part))
        out[:, : self.own].copy_(part.permute(1, 3, 2, 0))
        if self.own < self.a:
            ones = torch.eye(self.rows, dtype=out.dtype)[:, :, None]
            out[:, self.own :].copy_(ones.expand(-1, -1, len(part)))
        return out

    def votes(self, poses: Tensor, of: slice) -> Tensor:
        """Shapes: poses [i, a, m, n] -> [i, j, (e m), n]"""
        i, _, m, n = poses.shape
        out = self.empty("votes", i, self.j * self.e, m * n)
        torch.bmm(self.weight[of].flatten(2).mT, poses.flatten(2), out=out)
        return out.view(i, self.j, self.e * m, n)

    def agree(self, above: Tensor, poses: Tensor, of: slice, out: Tensor) -> Tensor:
        """The product of each vote with its parent, through votes or, where these are larger than poses, without.

        Then W above is made instead: what each pose would have to be.

        Shapes: above [j, (e m), n], poses [i, a, m, n] -> [i, j, n]
        """
        if not self.by_parent:
            return torch.sum(self.votes(poses, of).mul_(above), 2, out=out)
        i, a, m, n = poses.shape
        weight = self.weight[of].flatten(0, 1).transpose(0, 1)  # [j, (i a), e]
        wanted = self.empty("votes", self.j, i * a, m * n)
        torch.bmm(weight, above.view(self.j, self.e, -1), out=wanted)
        products = wanted.view(self.j, i, a * m, n).mul_(poses.flatten(1, 2))
        torch.sum(products, 2, out=out.transpose(0, 1))
        return out

    def mix(self, total: Tensor, coupling: Tensor, poses: Tensor, of: slice) -> Tensor:
        """Adds the votes of these children, weighted by their coupling, to the total; gives the weighted poses.

        Shapes: total [j, e, (m n)], coupling [i, j, n], poses [i, a, m, n] -> [j, (i a), (m n)]
        """
        weighted = self.weigh(coupling, poses)
        total.baddbmm_(self.weight[of].flatten(0, 1).permute(1, 2, 0), weighted)
        return weighted

    def weigh(self, coupling: Tensor, poses: Tensor) -> Tensor:
        """Shapes: coupling [i, j, n], poses [i, a, m, n] -> [j, (i a), (m n)]"""
        i, a, m, n = poses.shape
        weighted = self.empty("weighted", self.j, i, a, m, n)
        torch.mul(coupling.transpose(0, 1)[:, :, None, None], poses, out=weighted)
        return weighted.view(self.j, i * a, m * n)

    def window(self, x: Tensor, ns: slice) -> Tensor:
        """What belongs to parents, laid out as the votes. Shapes: x [n, j, (m e)] -> [j, (e m), n]"""
        return x[ns].unflatten(2, (self.rows, -1)).permute(1, 3, 2, 0).flatten(1, 2).contiguous()

    def back(self, x: Tensor) -> Tensor:
        """Shapes: x [j, ..., n] with (e m) or e, m between -> [n, j, (m e)]"""
        return x.reshape(self.j, self.e, self.rows, -1).permute(3, 0, 2, 1).flatten(2)

    def pair(self, x: Tensor, ns: slice, of: slice, name: str = "pair") -> Tensor:
        """Shapes: x [n, i, j] -> [i, j, n]"""
        part = x[ns, of].permute(1, 2, 0)
        return part if part.stride(2) == 1 else self.empty(name, *part.shape).copy_(part)

    def share(self, weights: Tensor, one: Tensor, ns: slice, of: slice) -> Tensor:
        """Weights that sum to 1, exactly where there is one child. Shapes: [n, i, j], [j, n] -> [i, j, n]"""
        part = weights[ns, of].permute(1, 2, 0)
        return torch.div(part, one, out=self.empty("share", *part.shape))


class _Gathered:
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
    def forward(ctx: Any, weight: Tensor, gathered: _Gathered) -> Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.gathered.sum = None
        return grad, None


class _Gradients:
    """Gradients of children and weights, as far as they are asked for, from those of the votes."""

    def __init__(self, sweep: _Sweep, needed: Sequence[bool], gathered: _Gathered):
        self.sweep = sweep
        self.children = torch.empty_like(sweep.children, memory_format=torch.contiguous_format) if needed[0] else None
        self.weight: Tensor | None = None
        self.unwritten = False
        if needed[1]:
            self.weight, self.unwritten = gathered.begin(sweep.weight)
        self.given = self.weight if self.unwritten else None  # to autograd
        self.needed = any(needed[:2])

    def add(self, votes: Tensor, poses: Tensor, of: slice) -> None:
        """Shapes: votes [i, j, (e m), n], poses [i, a, m, n]"""
        sweep = self.sweep
        i, a, m, n = poses.shape
        votes = votes.view(i, -1, m * n)  # [i, (j e), (m n)]
        if self.children is not None:
            out = sweep.empty("d poses", sweep.i, sweep.own, m * n)[of]
            torch.bmm(sweep.weight[of, : sweep.own].flatten(2), votes, out=out)
        if self.weight is not None:
            weight = self.weight[of].view(i, a, -1)
            if self.unwritten:
                torch.bmm(poses.flatten(2), votes.mT, out=weight)
            else:
                weight.baddbmm_(poses.flatten(2), votes.mT)

    def add_agreement(
        self, share: Tensor, slope: Tensor | None, grad: Tensor, above: Tensor, poses: Tensor, of: slice
    ) -> None:
        """For votes that have the gradient share x grad + slope x above.

        Shapes: share and slope [i, j, n], grad and above [j, (e m), n], poses [i, a, m, n]
        """
        i, _, m, n = poses.shape
        votes = self.sweep.empty("votes", i, self.sweep.j, self.sweep.e * m, n)
        torch.mul(share[:, :, None], grad, out=votes)
        self.add(votes if slope is None else votes.addcmul_(slope[:, :, None], above), poses, of)

    def close(self, ns: slice) -> None:
        """Hands over the gradients of these windows' poses, when all children have been seen."""
        self.unwritten = False
        if self.children is not None:
            sweep, n = self.sweep, ns.stop - ns.start
            grad = sweep.empty("d poses", sweep.i, sweep.own, sweep.rows, n)
            self.children[ns].unflatten(2, (sweep.rows, -1)).copy_(grad.permute(3, 0, 2, 1))


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        children: Tensor,
        weight: Tensor,
        rows: int,
        gathered: _Gathered,
        parents: Tensor,
        logits: Tensor | None,
        prior: Tensor | None,
        scale: float,
        leak: bool,
        constant: bool,
    ) -> tuple[Tensor, Tensor]:
        sweep = _Sweep(children, weight, rows)
        mixture = torch.empty_like(parents, memory_format=torch.contiguous_format)
        coupling = weight.new_empty(sweep.i, sweep.j, sweep.n)
        for ns in sweep.over_windows():
            above = sweep.window(parents, ns).mul_(scale)
            n = above.shape[2]
            total = weight.new_zeros(sweep.j, sweep.e, rows * n)
            for of, poses in sweep.over_children(sweep.poses(ns)):
                i = len(poses)
                agreement = sweep.empty("agreement", i, sweep.j + leak, n)
                sweep.agree(above, poses, of, out=agreement[:, : sweep.j])
                if logits is not None:
                    agreement[:, : sweep.j] += logits[of, :, None]
                if leak:
                    agreement[:, sweep.j] = 0
                share = torch.softmax(agreement, 1, out=sweep.empty("share", i, sweep.j + leak, n))[:, : sweep.j]
                if prior is not None:
                    share += prior[of, :, None]
                coupling[of, :, ns] = share
                sweep.mix(total, share, poses, of)
            mixture[ns] = sweep.back(total)
        coupling = coupling.permute(2, 0, 1)
        ctx.save_for_backward(children, weight, parents, prior, coupling)
        ctx.rows, ctx.gathered, ctx.scale, ctx.constant = rows, gathered, scale, constant
        ctx.set_materialize_grads(False)
        return mixture, coupling

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixture: Tensor | None, d_coupling: Tensor | None) -> tuple[Tensor | None, ...]:
        children, weight, parents, prior, coupling = ctx.saved_tensors
        sweep = _Sweep(children, weight, ctx.rows)
        gradients = _Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        needs_parents, needs_logits, needs_prior = ctx.needs_input_grad[4:7]
        d_parents = (
            torch.empty_like(parents, memory_format=torch.contiguous_format)
            if needs_parents and not ctx.constant
            else None
        )
        d_logits = weight.new_zeros(sweep.i, sweep.j) if needs_logits else None
        d_prior = weight.new_zeros(sweep.i, sweep.j) if needs_prior else None
        if d_mixture is None:
            d_mixture = torch.zeros_like(parents)
        for ns in sweep.over_windows():
            above, grad = sweep.window(parents, ns).mul_(ctx.scale), sweep.window(d_mixture, ns)
            n = above.shape[2]
            total = weight.new_zeros(sweep.j, sweep.e, ctx.rows * n)
            for of, poses in sweep.over_children(sweep.poses(ns)):
                share = sweep.pair(coupling, ns, of)
                d_share = sweep.agree(grad, poses, of, out=sweep.empty("d share", len(poses), sweep.j, n))
                if d_coupling is not None:
                    d_share += sweep.pair(d_coupling, ns, of, "d pair")
                if d_prior is not None:
                    d_prior[of] += d_share.sum(2)
                bare = share if prior is None else share - prior[of, :, None]
                d_share.mul_(bare)
                d_agreement = d_share.sub_(bare * d_share.sum(1, keepdim=True))
                if d_logits is not None:
                    d_logits[of] += d_agreement.sum(2)
                if gradients.needed:
                    slope = None if ctx.constant else d_agreement
                    gradients.add_agreement(share, slope, grad, above, poses, of)
                if d_parents is not None:
                    sweep.mix(total, d_agreement, poses, of)
            gradients.close(ns)
            if d_parents is not None:
                d_parents[ns] = sweep.back(total).mul_(ctx.scale)
        return gradients.children, gradients.given, None, None, d_parents, d_logits, d_prior, None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: _Gathered) -> Tensor:
        j = weight.shape[2]
        ctx.save_for_backward(children, weight)
        ctx.rows, ctx.gathered = rows, gathered
        sums = _by_row(children, rows) @ weight.flatten(0, 1).flatten(1)  # [(n m), (j e)]
        return sums.view(len(children), rows, j, -1).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        children, weight = ctx.saved_tensors
        wide = weight.flatten(0, 1).flatten(1)  # [(i a), (j e)]
        grad = _by_row(d_total, ctx.rows)
        d_children = d_weight = None
        if ctx.needs_input_grad[0]:
            d_children = (grad @ wide.T).view(len(children), ctx.rows, len(weight), -1).transpose(1, 2).flatten(2)
        if ctx.needs_input_grad[1]:
            gathered, unwritten = ctx.gathered.begin(weight)
            gathered.view(wide.shape).addmm_(_by_row(children, ctx.rows).T, grad, beta=0 if unwritten else 1)
            d_weight = gathered if unwritten else None
        return d_children, d_weight, None, None


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: _Gathered, coupling: Tensor) -> Tensor:
        sweep = _Sweep(children, weight, rows)
        mixture = weight.new_empty(sweep.n, sweep.j, rows * sweep.e)
        for ns in sweep.over_windows():
            total = weight.new_zeros(sweep.j, sweep.e, rows * (ns.stop - ns.start))
            for of, poses in sweep.over_children(sweep.poses(ns)):
                sweep.mix(total, sweep.pair(coupling, ns, of), poses, of)
            mixture[ns] = sweep.back(total)
        ctx.save_for_backward(children, weight, coupling)
        ctx.rows, ctx.gathered = rows, gathered
        return mixture

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixture: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, coupling = ctx.saved_tensors
        sweep = _Sweep(children, weight, ctx.rows)
        gradients = _Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_coupling = weight.new_empty(sweep.i, sweep.j, sweep.n) if ctx.needs_input_grad[4] else None
        for ns in sweep.over_windows():
            grad = sweep.window(d_mixture, ns)
            for of, poses in sweep.over_children(sweep.poses(ns)):
                share = sweep.pair(coupling, ns, of)
                d_share = sweep.agree(grad, poses, of, out=sweep.empty("d share", *share.shape))
                if d_coupling is not None:
                    d_coupling[of, :, ns] = d_share
                if gradients.needed:
                    gradients.add_agreement(share, None, grad, grad, poses, of)
            gradients.close(ns)
        d_coupling = None if d_coupling is None else d_coupling.permute(2, 0, 1)
        return gradients.children, gradients.given, None, None, d_coupling


class _Fit(torch.autograd.Function):
    """EM's M-step: twice over the children, for the mean and then for the variance around it."""

    @staticmethod
    def forward(
        ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: _Gathered, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sweep = _Sweep(children, weight, rows)
        mass = weight.new_empty(sweep.n, sweep.j)
        mean, variance = (weight.new_empty(sweep.n, sweep.j, rows * sweep.e) for _ in range(2))
        for ns in sweep.over_windows():
            n = ns.stop - ns.start
            mass[ns] = weights[ns].sum(1)
            one = mass[ns].mT.clamp(min=1e-7).contiguous()  # [j, n]
            total, spread = (weight.new_zeros(sweep.j, sweep.e, rows * n) for _ in range(2))
            everyone = sweep.poses(ns)
            for of, poses in sweep.over_children(everyone):
                share = sweep.share(weights, one, ns, of)
                if sweep.i > 1:
                    sweep.mix(total, share, poses, of)
                else:  # the mean is this vote to the last bit, and the variance 0
                    total = sweep.votes(poses, of)[0] * share[0, :, None]
            center, spread = total.view(sweep.j, -1, n), spread.view(sweep.j, -1, n)
            for of, poses in sweep.over_children(everyone):
                votes = sweep.votes(poses, of).sub_(center).square_()
                spread += votes.mul_(sweep.share(weights, one, ns, of)[:, :, None]).sum(0)
            mean[ns], variance[ns] = sweep.back(center), sweep.back(spread)
        ctx.save_for_backward(children, weight, weights, mass, mean, variance)
        ctx.rows, ctx.gathered = rows, gathered
        return mass, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mass: Tensor, d_mean: Tensor, d_variance: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, weights, mass, mean, variance = ctx.saved_tensors
        sweep = _Sweep(children, weight, ctx.rows)
        gradients = _Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_weights = weight.new_empty(sweep.i, sweep.j, sweep.n) if ctx.needs_input_grad[4] else None
        for ns in sweep.over_windows():
            sums = mass[ns].mT  # [j, n]
            one = sums.clamp(min=1e-7)
            enough = (sums >= 1e-7).to(sums)
            center, spread = sweep.window(mean, ns), sweep.window(variance, ns)
            of_spread = sweep.window(d_variance, ns).div_(one[:, None])
            of_mean = sweep.window(d_mean, ns).div_(one[:, None])
            of_mean -= 2 * of_spread * center * (1 - sums / one)[:, None]  # 0 but for a mass that was clamped
            rest = d_mass[ns].mT - enough * (of_spread * spread).sum(1)
            # a clamped mass is a constant, so that the votes then count from 0 and not from their mean
            rest += (1 - enough) * (of_mean * center).sum(1)
            for of, poses in sweep.over_children(sweep.poses(ns)):
                apart = sweep.votes(poses, of).sub_(center)
                slope = torch.mul(apart, of_spread, out=sweep.empty("slope", *apart.shape))
                slope.add_(of_mean)
                if d_weights is not None:
                    product = torch.mul(slope, apart, out=sweep.empty("product", *apart.shape))
                    d_weights[of, :, ns] = product.sum(2).add_(rest)
                if gradients.needed:
                    slope.addcmul_(apart, of_spread).mul_(sweep.pair(weights, ns, of)[:, :, None])
                    gradients.add(slope, poses, of)
            gradients.close(ns)
        d_weights = None if d_weights is None else d_weights.permute(2, 0, 1)
        return gradients.children, gradients.given, None, None, d_weights


class _LogDensity(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: _Gathered, mean: Tensor, variance: Tensor
    ) -> Tensor:
        sweep = _Sweep(children, weight, rows)
        density = weight.new_empty(sweep.i, sweep.j, sweep.n)
        for ns in sweep.over_windows():
            center, spread = sweep.window(mean, ns), sweep.window(variance, ns)
            size = (spread.log() + math.log(2 * math.pi)).sum(1)  # [j, n]
            spread.reciprocal_()
            for of, poses in sweep.over_children(sweep.poses(ns)):
                votes = sweep.votes(poses, of).sub_(center).square_().mul_(spread)
                density[of, :, ns] = votes.sum(2).add_(size).mul_(-0.5)
        ctx.save_for_backward(children, weight, mean, variance)
        ctx.rows, ctx.gathered = rows, gathered
        return density.permute(2, 0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_density: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, mean, variance = ctx.saved_tensors
        sweep = _Sweep(children, weight, ctx.rows)
        gradients = _Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_mean, d_variance = torch.empty_like(mean), torch.empty_like(variance)
        for ns in sweep.over_windows():
            center, sharp = sweep.window(mean, ns), sweep.window(variance, ns).reciprocal_()
            of_mean, of_variance = torch.zeros_like(center), torch.zeros_like(center)
            for of, poses in sweep.over_children(sweep.poses(ns)):
                apart = sweep.votes(poses, of).sub_(center).mul_(sharp)
                grad = sweep.pair(d_density, ns, of)[:, :, None]
                slope = torch.mul(apart, grad, out=sweep.empty("slope", *apart.shape))
                of_mean += slope.sum(0)
                of_variance += apart.mul_(slope).sum(0)
                of_variance -= sharp * grad.sum(0)
                if gradients.needed:
                    gradients.add(slope.neg_(), poses, of)
            gradients.close(ns)
            d_mean[ns], d_variance[ns] = sweep.back(of_mean), sweep.back(of_variance.mul_(0.5))
        return gradients.children, gradients.given, None, None, d_mean, d_variance


def _by_row(x: Tensor, rows: int) -> Tensor:
    """Shapes: x [n, i, (m a)] -> [(n m), (i a)]"""
    return x.unflatten(2, (rows, -1)).transpose(1, 2).reshape(len(x) * rows, -1)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
