"""EM's two sweeps over votes on a CPU, in pieces that stay in its cache.

The functions are those of `em.py`, with the same arguments and results. Unlike the agreement, distances need votes:
squares written out as sums of products would cancel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.votes_cpu import Gathered, Gradients, Sweep, by_child, parts

if TYPE_CHECKING:
    from torchcaps.ops.votes import Votes


def gaussian_fit(votes: Votes, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: weights [..., i, j] -> mass [..., j], mean [..., j, d], variance [..., j, d]"""
    mass, mean, variance = _Fit.apply(*parts(votes), weights.flatten(0, -3))
    return mass.unflatten(0, votes.lead), mean.unflatten(0, votes.lead), variance.unflatten(0, votes.lead)


def gaussian_log_density(votes: Votes, mean: Tensor, variance: Tensor) -> Tensor:
    """Shapes: mean and variance [..., j, d] -> [..., i, j]"""
    mean, variance = mean.flatten(0, -3), variance.flatten(0, -3)
    return _LogDensity.apply(*parts(votes), mean, variance).unflatten(0, votes.lead)


class _Fit(torch.autograd.Function):
    """The M-step: twice over the children, for the mean and then for the variance around it."""

    @staticmethod
    def forward(
        ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: Gathered, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sweep = Sweep(children, weight, rows)
        mass = weights.sum(1)  # [n, j]
        mean, variance = (weight.new_empty(sweep.n, sweep.j, rows * sweep.e) for _ in range(2))
        alone = sweep.g == sweep.s == 1

        for at in sweep.places():
            one, total = sweep.per_column(mass, at).clamp(min=1e-7), sweep.zeros(at)
            for piece in sweep.pieces(at):
                share = piece.share(weights, one)
                if alone:  # the mean is this vote to the last bit, and the variance 0
                    torch.mul(piece.votes()[0], share[0, :, None], out=total)
                else:
                    piece.mix(total, share)
            sweep.give(mean, total, at)
        for at in sweep.places():
            one, center, total = sweep.per_column(mass, at).clamp(min=1e-7), sweep.per_parent(mean, at), sweep.zeros(at)
            for piece in sweep.pieces(at):
                squares = piece.votes().sub_(center).square_()
                total += squares.mul_(piece.share(weights, one)[:, :, None]).sum(0)
            sweep.give(variance, total, at)
        ctx.save_for_backward(children, weight, weights, mass, mean, variance)
        ctx.rows, ctx.gathered = rows, gathered
        return mass, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mass: Tensor, d_mean: Tensor, d_variance: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, weights, mass, mean, variance = ctx.saved_tensors
        sweep = Sweep(children, weight, ctx.rows)
        gradients = Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_weights = sweep.pairs() if ctx.needs_input_grad[4] else None

        for at in sweep.places():
            sums = sweep.per_column(mass, at)  # [j, x]
            one = sums.clamp(min=1e-7)
            enough = (sums >= 1e-7).to(sums)
            center, spread = sweep.per_parent(mean, at), sweep.per_parent(variance, at)
            of_spread = sweep.per_parent(d_variance, at).div_(one[:, None])
            of_mean = sweep.per_parent(d_mean, at).div_(one[:, None])
            of_mean -= 2 * of_spread * center * (1 - sums / one)[:, None]  # 0 but for a mass that was clamped
            rest = sweep.per_column(d_mass, at) - enough * (of_spread * spread).sum(1)
            # a clamped mass is a constant, so that the votes then count from 0 and not from their mean
            rest += (1 - enough) * (of_mean * center).sum(1)
            for piece in sweep.pieces(at):
                apart = piece.votes().sub_(center)
                slope = torch.mul(apart, of_spread, out=piece.empty("slope", *apart.shape))
                slope.add_(of_mean)
                if d_weights is not None:
                    product = torch.mul(slope, apart, out=piece.empty("product", *apart.shape))
                    piece.keep(d_weights, product.sum(2).add_(rest))
                if gradients.needed:
                    slope.addcmul_(apart, of_spread).mul_(piece.pair(weights)[:, :, None])
                    gradients.add(slope, piece)
        return gradients.children, gradients.given, None, None, None if d_weights is None else by_child(d_weights)


class _LogDensity(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, children: Tensor, weight: Tensor, rows: int, gathered: Gathered, mean: Tensor, variance: Tensor
    ) -> Tensor:
        sweep = Sweep(children, weight, rows)
        density = sweep.pairs()

        for at in sweep.places():
            center, spread = sweep.per_parent(mean, at), sweep.per_parent(variance, at)
            size = (spread.log() + math.log(2 * math.pi)).sum(1)  # [j, x]
            sharp = spread.reciprocal_()
            for piece in sweep.pieces(at):
                squares = piece.votes().sub_(center).square_().mul_(sharp)
                piece.keep(density, squares.sum(2).add_(size).mul_(-0.5))
        ctx.save_for_backward(children, weight, mean, variance)
        ctx.rows, ctx.gathered = rows, gathered
        return by_child(density)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_density: Tensor) -> tuple[Tensor | None, ...]:
        children, weight, mean, variance = ctx.saved_tensors
        sweep = Sweep(children, weight, ctx.rows)
        gradients = Gradients(sweep, ctx.needs_input_grad, ctx.gathered)
        d_mean, d_variance = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (mean, variance))

        for at in sweep.places():
            center, sharp = sweep.per_parent(mean, at), sweep.per_parent(variance, at).reciprocal_()
            of_mean, of_variance = sweep.zeros(at), sweep.zeros(at)
            for piece in sweep.pieces(at):
                apart = piece.votes().sub_(center).mul_(sharp)
                grad = piece.pair(d_density)[:, :, None]
                slope = torch.mul(apart, grad, out=piece.empty("slope", *apart.shape))
                of_mean += slope.sum(0)
                of_variance += apart.mul_(slope).sum(0)
                of_variance -= sharp * grad.sum(0)
                if gradients.needed:
                    gradients.add(slope.neg_(), piece)
            sweep.give(d_mean, of_mean, at)
            sweep.give(d_variance, of_variance.mul_(0.5), at)
        return gradients.children, gradients.given, None, None, d_mean, d_variance
