"""EM routing (Hinton, Sabour & Frosst 2018): each parent is a Gaussian, fitted to the votes it is responsible for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.functional import check_count
from torchcaps.ops import Votes, em_step, in_full_precision
from torchcaps.ops.backend import runs_fused
from torchcaps.types import Capsules

VARIANCE_FLOOR = 5e-4  # added to variances, which are zero where a parent has one child


def hinton_temperature(iteration: int, final: float = 0.01, decay: float = 0.95) -> float:
    """The inverse temperature at an iteration, counted from 0; the authors' schedule."""
    return final * (1 - decay ** (iteration + 1))


@in_full_precision
def em_routing(
    votes: Votes | Tensor,
    activations: Tensor | None,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int = 3,
    *,
    inverse_temperature: Callable[[int], float] = hinton_temperature,
    sites: bool = True,
    variance_floor: float = VARIANCE_FLOOR,
) -> Capsules:
    """M-step and E-step in turn, in log space, ending on an M-step.

    Args:
        activations: of the children; none means all are present.
        beta_u: [j], the cost of describing a vote.
        beta_a: [j], the cost of a parent being there.
        sites: parents of all windows a child stands in compete for it, rather than those of one window.
        variance_floor: added to the variances.

    Shapes: votes [..., i, j, d], activations [..., i] -> poses [..., j, d], activations [..., j], coupling [..., i, j]
    """
    check_count("iterations", iterations)
    votes = Votes.of(votes)
    if runs_fused(votes):
        from torchcaps.ops.em_triton import fused_em

        temperatures = [inverse_temperature(iteration) for iteration in range(iterations)]
        competing = votes.window if sites else None
        return Capsules(*fused_em(votes, activations, beta_u, beta_a, temperatures, competing, variance_floor), None)

    parents = None
    for iteration in range(iterations):
        mass, mean, variance, coupling = em_step(votes, activations, parents, sites=sites)
        variance = variance + variance_floor
        logits = parent_logits(mass, variance, beta_u, beta_a, inverse_temperature(iteration))
        parents = (mean, variance, F.logsigmoid(logits))
    return Capsules(mean, logits.sigmoid(), coupling)


def parent_logits(mass: Tensor, variance: Tensor, beta_u: Tensor, beta_a: Tensor, temperature: float) -> Tensor:
    """How sure it is that a parent is there: what describing its votes by it saves, less what it costs.

    Shapes: mass [..., j], variance [..., j, d] -> [..., j]
    """
    cost = (beta_u[:, None] + 0.5 * variance.log()).sum(-1) * mass
    return temperature * (beta_a - cost)


class EMRouting(nn.Module):
    """Args: as `em_routing`; one beta_u and one beta_a is learnt for each parent type."""

    rehearses = True  # its kernels can be compiled before there is anything to route

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        out_dim: int,
        iterations: int = 3,
        *,
        sites: bool = True,
        inverse_temperature: Callable[[int], float] = hinton_temperature,
        variance_floor: float = VARIANCE_FLOOR,
    ):
        super().__init__()
        check_count("iterations", iterations)
        self.iterations, self.sites = iterations, sites
        self.inverse_temperature, self.variance_floor = inverse_temperature, variance_floor
        self.beta_u = nn.Parameter(torch.zeros(out_caps))
        self.beta_a = nn.Parameter(torch.zeros(out_caps))

    def forward(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules:
        return em_routing(
            votes,
            activations,
            self.beta_u,
            self.beta_a,
            self.iterations,
            inverse_temperature=self.inverse_temperature,
            sites=self.sites,
            variance_floor=self.variance_floor,
        )
