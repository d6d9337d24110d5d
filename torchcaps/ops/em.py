"""EM over votes: fit a Gaussian to each parent's votes, and ask how likely each vote is under it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchcaps.ops import em_cpu
from torchcaps.ops.agreement import agreement_step
from torchcaps.ops.backend import runs_fused, runs_in_cache
from torchcaps.ops.votes import Votes, mix


def em_step(
    votes: Votes | Tensor,
    activations: Tensor | None = None,
    parents: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    sites: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """E-step and M-step, in log space: how far each parent is responsible for each vote, and the fit to these.

    Args:
        activations: of the children; none means all are present.
        parents: mean, variance and log activation of the step before; none means that all are equally responsible.
        sites: parents of all windows a child stands in compete for it, rather than those of one window.

    Shapes: votes [..., i, j, d], activations [..., i], parents [..., j, d], [..., j, d], [..., j]
        -> mass [..., j], mean [..., j, d], variance [..., j, d], coupling [..., i, j] or None from kernels
    """
    votes = Votes.of(votes)
    if parents is not None:  # which may be the same in every image
        poses = (*votes.lead, votes.parents, votes.dim)
        parents = (parents[0].expand(poses), parents[1].expand(poses), parents[2].expand(poses[:-1]))
    if runs_fused(votes):
        from torchcaps.ops.em_triton import fused_em_step

        return *fused_em_step(votes, activations, parents, votes.window if sites else None), None
    if parents is None:
        everyone = (*votes.lead, votes.in_caps, votes.parents)
        logits = torch.zeros(everyone, dtype=votes.dtype, device=votes.device)
    else:
        mean, variance, log_prior = parents
        logits = gaussian_log_density(votes, mean, variance) + log_prior[..., None, :]
    total = votes.per_child(logits) if sites else logits.logsumexp(-1)
    coupling = (logits - total[..., None]).exp()
    weights = coupling if activations is None else coupling * activations[..., None]
    return *gaussian_fit(votes, weights), coupling


def agreement_fit(
    votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The agreement step with children that weigh as much as they are active, and the fit to votes so weighted.

    Shapes: votes [..., i, j, d], activations [..., i], parents [..., j, d]
        -> mass [..., j], mixture [..., j, d], variance [..., j, d], coupling [..., i, j] or None from kernels
    """
    votes = Votes.of(votes)
    if parents is not None:
        parents = parents.expand(*votes.lead, votes.parents, votes.dim)
    if runs_fused(votes):
        from torchcaps.ops.em_triton import fused_agreement_fit

        return *fused_agreement_fit(votes, activations, parents, scale), None
    _, coupling = agreement_step(votes, parents, scale=scale, coupling=True)
    assert coupling is not None
    mass, mean, variance = gaussian_fit(votes, coupling if activations is None else coupling * activations[..., None])
    return mass, mass.clamp(min=1e-7)[..., None] * mean, variance, coupling


def gaussian_fit(votes: Votes | Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass, mean and variance of each parent's votes.

    Shapes: votes [..., i, j, d], weights [..., i, j] -> [..., j], [..., j, d], [..., j, d]
    """
    votes = Votes.of(votes)
    if runs_fused(votes):
        from torchcaps.ops.em_triton import fused_fit

        return fused_fit(votes, weights)
    if runs_in_cache(votes):
        return em_cpu.gaussian_fit(votes, weights)
    mass = weights.sum(-2)
    share = weights / mass.clamp(min=1e-7)[..., None, :]
    mean = votes.mixture(share)
    variance, _ = votes.sweep(_variance, windows=[mean], pairs=[share], recompute=True)
    return mass, mean, variance


def gaussian_log_density(votes: Votes | Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Shapes: votes [..., i, j, d], mean and variance [..., j, d] -> [..., i, j]"""
    votes = Votes.of(votes)
    if runs_in_cache(votes):
        return em_cpu.gaussian_log_density(votes, mean, variance)
    _, density = votes.sweep(_log_density, windows=[mean, variance], recompute=True)
    return density


def _variance(votes: Tensor, mean: Tensor, share: Tensor) -> tuple[Tensor, None]:
    return mix((votes - mean[:, :, None]) ** 2, share), None


def _log_density(votes: Tensor, mean: Tensor, variance: Tensor) -> tuple[None, Tensor]:
    squares = (votes - mean[:, :, None]) ** 2 @ (1 / variance)[..., None]  # [n, j, i, 1]
    return None, -0.5 * (squares[..., 0] + (variance.log() + math.log(2 * math.pi)).sum(-1, keepdim=True))
