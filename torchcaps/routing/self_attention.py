"""Self-attention routing (Mazzia, Salvetti & Chiaberge 2021), equations 4 to 6."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.functional import length, squash_exp
from torchcaps.ops import Votes, agreement_step, in_full_precision
from torchcaps.ops.backend import attends_itself_fused
from torchcaps.ops.precision import product_dtype
from torchcaps.types import Capsules


def self_attention_routing(
    votes: Votes | Tensor, prior: Tensor | None = None, *, scale: float | None = None
) -> Capsules:
    """Each child goes to the parents for which its vote agrees with all the votes; no iterations.

    The attention of every vote to every other, summed, is u_ij . (sum of the u_kj): no i x i matrix is needed.

    Args:
        prior: [i, j], added after the softmax.
        scale: of the agreement; 1 / sqrt(d) by default.

    Shapes: votes [..., i, j, d] -> poses [..., j, d], activations [..., j], coupling [..., i, j]
    """
    votes = Votes.of(votes)
    scale = votes.dim**-0.5 if scale is None else scale
    if attends_itself_fused(votes):
        from torchcaps.ops.self_attention_triton import self_attention

        poses, lengths = self_attention(votes, prior, scale, product_dtype(votes))
        return Capsules(poses, lengths, None)
    return _by_formula(votes, prior, scale)


@in_full_precision
def _by_formula(votes: Votes, prior: Tensor | None, scale: float) -> Capsules:
    mixture, coupling = agreement_step(votes, votes.total(), scale=scale, prior=prior)
    poses = squash_exp(mixture)
    return Capsules(poses, length(poses), coupling)


class SelfAttentionRouting(nn.Module):
    """Args: scale_by: whose pose size scales the agreement, "parent" (the released code) or "child" (the paper)."""

    def __init__(self, in_caps: int, out_caps: int, out_dim: int, *, scale_by: str = "parent"):
        super().__init__()
        if scale_by not in ("parent", "child"):
            raise ValueError(f'scale_by must be "parent" or "child", got {scale_by!r}')
        self.scale_by = scale_by
        self.prior = nn.Parameter(torch.zeros(in_caps, out_caps))

    def forward(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules:
        if self.scale_by == "parent":
            return self_attention_routing(votes, self.prior)
        if isinstance(votes, Tensor):
            raise ValueError('scale_by="child" needs votes that know their children, got a plain tensor of votes')
        return self_attention_routing(votes, self.prior, scale=votes.child_dim**-0.5)
