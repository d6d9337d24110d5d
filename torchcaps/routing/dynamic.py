"""Dynamic routing (Sabour, Frosst & Hinton 2017), procedure 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.functional import check_count, length, squash
from torchcaps.ops import Votes, agreement_step, in_full_precision
from torchcaps.types import Capsules


@in_full_precision
def dynamic_routing(
    votes: Votes | Tensor,
    iterations: int = 3,
    *,
    logits: Tensor | None = None,
    leak: bool = False,
    bias: Tensor | None = None,
    detach_inner: bool = False,
) -> Capsules:
    """Sends each child's vote to the parents it agrees with.

    The paper's logits gather v_j . u_ij at each iteration, so they equal u_ij . (sum of the v_j so far):
    that sum is the whole state, and no logit is kept.

    Args:
        logits: learnt log priors [i, j], added before the softmax.
        leak: lets a child vote for none of the parents.
        bias: [j, d], added to the mixture inside every iteration, as in the authors' code.
        detach_inner: the gradient flows through the last mixture only, past agreements count as constants.

    Shapes: votes [..., i, j, d] -> poses [..., j, d], activations [..., j], coupling [..., i, j]
    """
    check_count("iterations", iterations)
    votes = Votes.of(votes)
    total = None  # of the parents so far, [..., j, d]
    for iteration in range(iterations):
        inner = detach_inner and iteration < iterations - 1
        seen = votes.detach() if inner else votes
        mixture, coupling = agreement_step(seen, total, logits=logits, leak=leak, constant=detach_inner)
        poses = squash(mixture if bias is None else mixture + bias)
        if inner:
            poses = poses.detach()
        total = poses if total is None else total + poses
    return Capsules(poses, length(poses), coupling)


class DynamicRouting(nn.Module):
    """Args: as `dynamic_routing`; `priors` and `bias` say whether there are any to learn."""

    rehearses = True  # its kernels can be compiled before there is anything to route

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        out_dim: int,
        iterations: int = 3,
        *,
        priors: bool = False,
        leak: bool = False,
        bias: bool = False,
        detach_inner: bool = False,
    ):
        super().__init__()
        check_count("iterations", iterations)
        self.iterations, self.leak, self.detach_inner = iterations, leak, detach_inner
        self.logits = nn.Parameter(torch.zeros(in_caps, out_caps)) if priors else None
        self.bias = nn.Parameter(torch.full((out_caps, out_dim), 0.1)) if bias else None

    def forward(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules:
        return dynamic_routing(
            votes,
            self.iterations,
            logits=self.logits,
            leak=self.leak,
            bias=self.bias,
            detach_inner=self.detach_inner,
        )
