"""The step that three papers share: couple each child to the parents that agree with it, and mix its votes so.

They differ in what stands as parent: the sum of the parents so far (Sabour), the sum of the votes (Mazzia), the
parents of the iteration before (Tsai); and in what follows.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from torchcaps.ops import agreement_cpu
from torchcaps.ops.backend import runs_fused, runs_in_cache
from torchcaps.ops.votes import Votes, mix


def agreement_step(
    votes: Votes | Tensor,
    parents: Tensor | None = None,
    *,
    scale: float = 1.0,
    logits: Tensor | None = None,
    prior: Tensor | None = None,
    leak: bool = False,
    constant: bool = False,
    coupling: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax over the parents of their agreement with each vote, then the votes so weighted and summed.

    Without parents nothing is known yet: each child spreads evenly, and the mixture is one matrix product.

    Args:
        scale: of the agreement, before the softmax.
        logits: added before the softmax (Sabour's log priors).
        prior: added after the softmax (Mazzia's).
        leak: one more parent, with logit 0, that takes its share and is dropped (Sabour's none of the above).
        constant: agreements count as constants; the gradient flows through the mixture and the logits.
        coupling: is wanted; otherwise kernels do not make it.

    Shapes: votes [..., i, j, d], parents [..., j, d], logits and prior [i, j], or what broadcasts to them
        -> mixture [..., j, d], coupling [..., i, j] or None
    """
    votes = Votes.of(votes)
    logits, prior = (None if x is None else x.expand(votes.in_caps, votes.parents) for x in (logits, prior))
    if parents is None:
        return _uniform_step(votes, logits, prior, leak)
    parents = parents.expand(*votes.lead, votes.parents, votes.dim)
    if not coupling and runs_fused(votes):
        from torchcaps.ops.agreement_triton import Options, fused_agreement_step

        return fused_agreement_step(votes, parents, logits, prior, Options(scale, leak, constant)), None
    if runs_in_cache(votes):
        return agreement_cpu.agreement_step(
            votes, parents, scale=scale, logits=logits, prior=prior, leak=leak, constant=constant
        )
    pairs = [x for x in (logits, prior) if x is not None]
    step = partial(
        _step,
        scale=scale,
        has_logits=logits is not None,
        has_prior=prior is not None,
        leak=leak,
        constant=constant,
    )
    return votes.sweep(step, windows=[parents], pairs=pairs)


def _step(
    votes: Tensor,
    parents: Tensor,
    *pairs: Tensor,
    scale: float,
    has_logits: bool,
    has_prior: bool,
    leak: bool,
    constant: bool,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad() if constant else nullcontext():
        agreement = scale * (votes @ parents[..., None])[..., 0]  # [n, j, i]
    if has_logits:
        agreement = agreement + pairs[0]
    coupling = softmax_over_parents(agreement, leak)
    if has_prior:
        coupling = coupling + pairs[-1]
    return mix(votes, coupling), coupling


def _uniform_step(votes: Votes, logits: Tensor | None, prior: Tensor | None, leak: bool) -> tuple[Tensor, Tensor]:
    everyone = (*votes.lead, votes.in_caps, votes.parents)
    if logits is None and prior is None:
        share = 1 / (votes.parents + leak)
        return votes.total() * share, torch.full((), share, dtype=votes.dtype, device=votes.device).expand(everyone)
    if logits is None:
        logits = torch.zeros(votes.in_caps, votes.parents, dtype=votes.dtype, device=votes.device)
    coupling = softmax_over_parents(logits.mT, leak).mT
    if prior is not None:
        coupling = coupling + prior
    return votes.total(coupling), coupling.expand(everyone)


def softmax_over_parents(agreement: Tensor, leak: bool = False) -> Tensor:
    """Shapes: agreement [..., j, i] -> the same, summing to 1 over j, or to less with a leak"""
    if not leak:
        return agreement.softmax(dim=-2)
    nobody = torch.zeros_like(agreement[..., :1, :])
    return torch.cat([nobody, agreement], dim=-2).softmax(dim=-2)[..., 1:, :]
