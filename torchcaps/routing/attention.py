"""Attention routing and the capsule activation (Choi, Seo, Im & Kang 2019), Eq. 4 to 9.

No iterations: what dynamic routing finds by agreement is here read off the votes by a learnt linear form. The children
compete for each parent, where in the other routings the parents compete for each child.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from torchcaps.functional import glorot_uniform_
from torchcaps.ops import Votes, in_full_precision
from torchcaps.ops.backend import attends_fused
from torchcaps.ops.grouped import map_groups
from torchcaps.types import Capsules

MOST_CHILDREN = 64


def attention_routing(votes: Votes | Tensor, kernel: Tensor) -> Capsules:
    """Mixes the votes for each parent by a softmax over its children.

    The logit of a child is a linear form in the votes of all children for that parent (the released code, and the
    paper's counts), or in its own vote alone (the vector of D x N numbers in the paper's text). Where kernels do it,
    gradients go through the poses alone; `backend("torch")` has them for the coupling too.

    Args:
        kernel: [m, i, j, d], how much the vote of child m speaks for child i; or [i, j, d], each for itself.

    Shapes: votes [..., i, j, d] -> poses [..., j, d], coupling [..., i, j], which sums to 1 over i
    """
    if isinstance(votes, Tensor) and attends_fused(votes, kernel):
        from torchcaps.ops.attention_triton import attention

        form = kernel if kernel.dim() == 4 else torch.diag_embed(kernel.movedim(0, -1), dim1=0, dim2=1)
        poses, coupling = attention(votes, form)
        return Capsules(poses, None, coupling)
    return _by_formula(votes, kernel)


@in_full_precision
def _by_formula(votes: Votes | Tensor, kernel: Tensor) -> Capsules:
    stored = Votes.of(votes).materialise()
    logits = torch.einsum("...mjd,mijd->...ij" if kernel.dim() == 4 else "...ijd,ijd->...ij", stored, kernel)
    coupling = logits.softmax(dim=-2)  # the children compete for each parent
    return Capsules((coupling[..., None] * stored).sum(dim=-3), None, coupling)


def capsule_map(poses: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An affine map for each capsule channel: the capsule activation before its tanh.

    Shapes: poses [..., j, p], weight [j, p, d], bias [j, d] -> [..., j, d]
    """
    return map_groups(poses, weight, bias)


def capsule_activation(poses: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Eq. 4: an affine map for each capsule channel, then tanh, so that a capsule is at most sqrt(d) long.

    Shapes: poses [..., j, p], weight [j, p, d], bias [j, d] -> [..., j, d]
    """
    return capsule_map(poses, weight, bias).tanh()


class CapsuleActivation(nn.Module):
    """The capsule activation with its weights, in float32 under autocast.

    Args:
        tanh: False leaves the tanh to the caller (a residual is added before it).
        whole: weights start as one kernel for all channels, whose outs are those of all; see `PooledConvCaps`.

    Shapes: poses [..., j, d] -> [..., j, d]
    """

    def __init__(self, caps: int, dim: int, tanh: bool = True, *, whole: bool = False):
        super().__init__()
        self.tanh = tanh
        outs = dim * caps if whole else dim
        self.weight = nn.Parameter(glorot_uniform_(torch.empty(caps, dim, dim), dim, outs))  # [j, p, d]
        self.bias = nn.Parameter(torch.zeros(caps, dim))

    def forward(self, poses: Tensor) -> Tensor:
        device = poses.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            poses = poses.to(self.weight.dtype)
            return (capsule_activation if self.tanh else capsule_map)(poses, self.weight, self.bias)


class AttentionRouting(nn.Module):
    """Attention routing followed by the capsule activation.

    Args:
        in_caps: children, which are capsule channels: at most 64, for the kernel grows with their square.
        attention: "all", a logit sees the votes of all children; "own", its own child's vote alone.
        tanh: False leaves the tanh to the caller.
        whole: weights start as one kernel for all parents, whose outs are those of all; see `PooledConvCaps`.
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        out_dim: int,
        attention: str = "all",
        tanh: bool = True,
        *,
        whole: bool = False,
    ):
        super().__init__()
        if in_caps > MOST_CHILDREN:
            raise ValueError(
                f"attention routing is defined over capsule channels and takes at most {MOST_CHILDREN} children, "
                f"got {in_caps}; PooledConvCaps has as many children as capsule types"
            )
        if attention not in ("all", "own"):
            raise ValueError(f"attention must be all or own, got {attention!r}")
        shape, fan = ((in_caps, in_caps), in_caps * out_dim) if attention == "all" else ((in_caps,), out_dim)
        outs = fan * out_caps if whole else fan
        kernel = torch.empty(*shape, out_caps, out_dim)  # [(m) i, j, d]
        self.kernel = nn.Parameter(glorot_uniform_(kernel, fan, outs))
        self.activation = CapsuleActivation(out_caps, out_dim, tanh, whole=whole)

    def forward(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules:
        mixed = attention_routing(votes, self.kernel)
        return Capsules(self.activation(mixed.poses), mixed.activations, mixed.coupling)
