"""Inverted dot-product attention routing (Tsai, Srivastava, Goh & Salakhutdinov 2020), procedure 1: one step.

Concurrent iterations run across layers and belong to `CapsuleStack`; sequential ones are a loop here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.functional import check_count, layer_norm, widen
from torchcaps.ops import Votes, agreement_fit, agreement_step, in_full_precision
from torchcaps.routing.em import VARIANCE_FLOOR, hinton_temperature, parent_logits
from torchcaps.types import Capsules


@in_full_precision
def inverted_attention(
    votes: Votes | Tensor,
    parents: Tensor | None = None,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
    activations: Tensor | None = None,
    betas: tuple[Tensor, Tensor] | None = None,
) -> Capsules:
    """The parents of the iteration before attract the children whose votes point their way.

    Args:
        parents: none yet counts as zero: every child then spreads evenly.
        norm: applied to the new parents, LayerNorm in the paper.
        scale: of the agreement; 1 / sqrt(d) by default, as in the released code (procedure 1 has none, scale=1).
        activations: of the children, which then weigh their votes (ablation C).
        betas: beta_u and beta_a [j] of EM's M-step, by which the parents get activations too (ablation C).

    Shapes: votes [..., i, j, d], parents [..., j, d], activations [..., i]
        -> poses [..., j, d], activations [..., j] or None, coupling [..., i, j] or None from kernels
    """
    votes = Votes.of(votes)
    scale = votes.dim**-0.5 if scale is None else scale
    above = None
    if activations is None and betas is None:
        mixture, coupling = agreement_step(votes, parents, scale=scale)
    else:
        mass, mixture, variance, coupling = agreement_fit(votes, activations, parents, scale=scale)
    if betas is not None:
        beta_u, beta_a = (widen(beta) for beta in betas)
        above = parent_logits(mass, variance + VARIANCE_FLOOR, beta_u, beta_a, hinton_temperature(0)).sigmoid()
    if isinstance(norm, nn.LayerNorm):
        poses = layer_norm(mixture, norm.weight, norm.bias, norm.eps, votes.products)
    else:
        poses = mixture if norm is None else norm(mixture)
    return Capsules(poses, above, coupling)


class InvertedAttentionRouting(nn.Module):
    """One step of the routing, or several in sequence.

    Args:
        iterations: steps at each call; 1 leaves them to the stack (concurrent), more is ablation B (sequential).
        norm: LayerNorm on the parents; off is ablation A.
        scaled: divides the agreement by sqrt(d).
        start: the parents before the first step: "zero", "random" (drawn anew at each call) or "learnt" (from zero).
        activations: parents have them too, by EM's M-step, and children's weigh their votes (ablation C).
    """

    rehearses = True  # its kernels can be compiled before there is anything to route

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        out_dim: int,
        iterations: int = 1,
        *,
        norm: bool = True,
        scaled: bool = True,
        start: str = "zero",
        activations: bool = False,
    ):
        super().__init__()
        check_count("iterations", iterations)
        if start not in ("zero", "random", "learnt"):
            raise ValueError(f'start must be "zero", "random" or "learnt", got {start!r}')
        self.iterations, self.scaled, self.start_at = iterations, scaled, start
        self.dims = (out_caps, out_dim)
        self.norm = nn.LayerNorm(out_dim) if norm else None
        self.start = nn.Parameter(torch.zeros(out_caps, out_dim)) if start == "learnt" else None
        self.beta_u = nn.Parameter(torch.zeros(out_caps)) if activations else None
        self.beta_a = nn.Parameter(torch.zeros(out_caps)) if activations else None

    def forward(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules:
        votes = Votes.of(votes)
        if parents is None:
            parents = self._first_parents(votes)
        betas = None if self.beta_u is None or self.beta_a is None else (self.beta_u, self.beta_a)
        for _ in range(self.iterations):
            capsules = inverted_attention(
                votes,
                parents,
                norm=self.norm,
                scale=None if self.scaled else 1.0,
                activations=None if betas is None else activations,
                betas=betas,
            )
            parents = capsules.poses
        return capsules

    def _first_parents(self, votes: Votes) -> Tensor | None:
        if self.start is not None:
            return self.start.expand(*votes.lead, -1, -1)
        if self.start_at == "random":
            return torch.randn(*votes.lead, *self.dims, dtype=votes.dtype, device=votes.device)
        return None
