"""The two halves of EM over votes: fit a Gaussian to each parent's votes, and ask how likely each vote is under it."""

from __future__ import annotations

import math

from torch import Tensor

from torchcaps.ops import votes_cpu
from torchcaps.ops.backend import runs_in_cache
from torchcaps.ops.votes import Votes, mix


def gaussian_fit(votes: Votes | Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass, mean and variance of each parent's votes.

    Shapes: votes [..., i, j, d], weights [..., i, j] -> [..., j], [..., j, d], [..., j, d]
    """
    votes = Votes.of(votes)
    if runs_in_cache(votes):
        return votes_cpu.gaussian_fit(votes, weights)
    mass = weights.sum(-2)
    share = weights / mass.clamp(min=1e-7)[..., None, :]
    mean = votes.mixture(share)
    variance, _ = votes.sweep(_variance, windows=[mean], pairs=[share], recompute=True)
    return mass, mean, variance


def gaussian_log_density(votes: Votes | Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Shapes: votes [..., i, j, d], mean and variance [..., j, d] -> [..., i, j]"""
    votes = Votes.of(votes)
    if runs_in_cache(votes):
        return votes_cpu.gaussian_log_density(votes, mean, variance)
    _, density = votes.sweep(_log_density, windows=[mean, variance], recompute=True)
    return density


def _variance(votes: Tensor, mean: Tensor, share: Tensor) -> tuple[Tensor, None]:
    return mix((votes - mean[:, :, None]) ** 2, share), None


def _log_density(votes: Tensor, mean: Tensor, variance: Tensor) -> tuple[None, Tensor]:
    squares = (votes - mean[:, :, None]) ** 2 @ (1 / variance)[..., None]  # [n, j, i, 1]
    return None, -0.5 * (squares[..., 0] + (variance.log() + math.log(2 * math.pi)).sum(-1, keepdim=True))
