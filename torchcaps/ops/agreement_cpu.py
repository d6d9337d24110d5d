"""The agreement step, the mixture and the plain sum of votes on a CPU, in pieces that stay in its cache.

The functions are those of `agreement.py` and `Votes`, with the same arguments and results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.votes_cpu import Gathered, Gradients, Sweep, by_child, parts

if TYPE_CHECKING:
    from torchcaps.ops.votes import Votes


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
    parents = parents.flatten(0, -3)
    mixture, coupling = _Agreement.apply(*parts(votes), parents, logits, prior, scale, leak, constant)
    return mixture.unflatten(0, votes.lead), coupling.unflatten(0, votes.lead)


def mixture(votes: Votes, coupling: Tensor) -> Tensor:
    """Shapes: coupling [..., i, j] -> [..., j, d]"""
    return _Mixture.apply(*parts(votes), coupling.flatten(0, -3)).unflatten(0, votes.lead)


def sums(votes: Votes) -> bool:
    """Whether `total` is for these too: each child has a weight of its own, and there is nothing else to add."""
    return votes.window is None and votes.sharing == 1 and votes.offset is None


def total(votes: Votes) -> Tensor:
    """Shapes: -> [..., j, d]"""
    return _Total.apply(*parts(votes)).unflatten(0, votes.lead)


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        children: Tensor,
        weight: Tensor,
        rows: int,
        gathered: Gathered,
        parents: Tensor,
        logits: Tensor | None,
        prior: Tensor | None,
        scale: float,
        leak: bool,
        constant: bool,
    ) -> tuple[Tensor, Tensor]:
        sweep = Sweep(children, weight, rows)
        j = sweep.j
        mixture = torch.empty_like(parents, memory_format=torch.contiguous_format)
        pairs = sweep.pairs()

        for at in sweep.places():
            above = sweep.per_parent(parents, at).mul_(scale)
            total = sweep.zeros(at)
            for piece in sweep.pieces(at):
                agreement = piece.empty("agreement", piece.g, j + leak, piece.x)
                piece.agree(above, out=agreement[:, :j])
                if logits is not None:
                    agreement[:, :j] += piece.of_all(logits)
                if leak:
                    agreement[:, j] = 0
                there = None if leak or prior is not None else piece.kept(pairs)
                out = piece.empty("share", *agreement.shape) if there is None else there
                share = torch.softmax(agreement, 1, out=out)[:, :j]
                if prior is not None:
                    share += piece.of_all(prior)
                if there is None:
                    piece.keep(pairs, share)
                piece.mix(total, share)
            sweep.give(mixture, total, at)
        coupling = by_child(pairs)
        ctx.save_for_backward(children, weight, parents, prior, coupling)
        ctx.rows, ctx.gathered, ctx.scale, ctx.constant = rows, gathered, scale, constant
        ctx.set_materialize_grads(False)
        return mixture, coupling

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixture: Tensor | None, d_coupling: Tensor | None) -> tuple[Tensor | None, ...]:
        children, weight, parents, prior, coupling = ctx.saved_tensors
        sweep = Sweep(children, weight, ctx.rows)
        gradients = Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        needs_parents, needs_logits, needs_prior = ctx.needs_input_grad[4:7]
        d_parents = None
        if needs_parents and not ctx.constant:
            d_parents = torch.empty_like(parents, memory_format=torch.contiguous_format)
        d_logits, d_prior = (
            weight.new_zeros(coupling.shape[1:]) if needed else None for needed in (needs_logits, needs_prior)
        )
        if d_mixture is None:
            d_mixture = torch.zeros_like(parents)

        for at in sweep.places():
            above, grad = sweep.per_parent(parents, at).mul_(ctx.scale), sweep.per_parent(d_mixture, at)
            total = sweep.zeros(at)
            for piece in sweep.pieces(at):
                share = piece.pair(coupling)
                d_share = piece.agree(grad, out=piece.empty("d share", *share.shape))
                if d_coupling is not None:
                    d_share += piece.pair(d_coupling, "d pair")
                if d_prior is not None:
                    piece.add_to_all(d_prior, d_share)
                bare = share if prior is None else share - piece.of_all(prior)
                d_share.mul_(bare)
                d_agreement = d_share.addcmul_(bare, d_share.sum(1, keepdim=True), value=-1)
                if d_logits is not None:
                    piece.add_to_all(d_logits, d_agreement)
                if gradients.needed:
                    gradients.add_agreement(share, None if ctx.constant else d_agreement, grad, above, piece)
                if d_parents is not None:
                    piece.mix(total, d_agreement)
            if d_parents is not None:
                sweep.give(d_parents, total.mul_(ctx.scale), at)
        return gradients.children, gradients.given, None, None, d_parents, d_logits, d_prior, None, None, None


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: Gathered, coupling: Tensor) -> Tensor:
        sweep = Sweep(children, weight, rows)
        mixture = weight.new_empty(sweep.n, sweep.j, rows * sweep.e)

        for at in sweep.places():
            total = sweep.zeros(at)
            for piece in sweep.pieces(at):
                piece.mix(total, piece.pair(coupling))
            sweep.give(mixture, total, at)
        ctx.save_for_backward(children, weight, coupling)
        ctx.rows, ctx.gathered = rows, gathered
        return mixture

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixture: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, coupling = ctx.saved_tensors
        sweep = Sweep(children, weight, ctx.rows)
        gradients = Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_coupling = sweep.pairs() if ctx.needs_input_grad[4] else None

        for at in sweep.places():
            grad = sweep.per_parent(d_mixture, at)
            for piece in sweep.pieces(at):
                share = piece.pair(coupling)
                if d_coupling is not None:
                    piece.keep(d_coupling, piece.agree(grad, out=piece.empty("d share", *share.shape)))
                if gradients.needed:
                    gradients.add_agreement(share, None, grad, grad, piece)
        return gradients.children, gradients.given, None, None, None if d_coupling is None else by_child(d_coupling)


class _Total(torch.autograd.Function):
    """Of children that have one neighbour each: a matrix product."""

    @staticmethod
    def forward(ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: Gathered) -> Tensor:
        ctx.save_for_backward(children, weight)
        ctx.rows, ctx.gathered = rows, gathered
        sums = _by_row(children[:, :, 0], rows) @ weight.flatten(0, 1).flatten(1)  # [(n m), (j e)]
        return sums.view(len(children), rows, weight.shape[2], -1).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        children, weight = ctx.saved_tensors
        wide = weight.flatten(0, 1).flatten(1)  # [(g a), (j e)]
        grad = _by_row(d_total, ctx.rows)
        d_children = d_weight = None
        if ctx.needs_input_grad[0]:
            d_children = (grad @ wide.T).view(len(children), ctx.rows, len(weight), -1).transpose(1, 2)
            d_children = d_children.flatten(2)[:, :, None]
        if ctx.needs_input_grad[1]:
            gathered, unwritten = ctx.gathered.begin(weight)
            gathered.view(wide.shape).addmm_(_by_row(children[:, :, 0], ctx.rows).T, grad, beta=0 if unwritten else 1)
            d_weight = gathered if unwritten else None
        return d_children, d_weight, None, None


def _by_row(x: Tensor, rows: int) -> Tensor:
    """Shapes: x [n, i, (m a)] -> [(n m), (i a)]"""
    return x.unflatten(2, (rows, -1)).transpose(1, 2).reshape(len(x) * rows, -1)
