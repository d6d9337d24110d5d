"""Convolutional capsules in which the window votes as one (Choi et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.functional import glorot_uniform_
from torchcaps.layers.same import pad_same
from torchcaps.ops.grouped import convolve_groups
from torchcaps.types import Capsules, Routing


class PooledConvCaps(nn.Module):
    """Each child type's window is convolved into one vote for each parent type; the votes of a site are routed.

    Every pair of types has a convolution and a bias of its own, and all of them are one grouped convolution. The
    routing sees capsule types only. A window has no one activation, so those of the children are not looked at.

    Args:
        routing: a routing class or a partial of one, called with (in_caps, out_caps, out_dim).
        dropout: share of the children's entries set to 0 in training.
        whole: weights start as one Keras kernel for all pairs, whose outs are those of all, as in the released code;
            otherwise each pair's as a kernel of its own, several times larger.

    Shapes: poses [b, i, p, h, w] -> Capsules with poses [b, j, d, ceil(h / stride), ceil(w / stride)] and coupling
        [b, h', w', i, j]
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        routing: Callable[..., Routing],
        kernel_size: int | tuple[int, int] = 3,
        stride: int = 1,
        dropout: float = 0.5,
        *,
        whole: bool = False,
    ):
        super().__init__()
        self.stride = stride
        window = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        weight = torch.empty(in_caps, out_caps, out_dim, in_dim, *window)  # [i, j, d, p, y, x]
        area = window[0] * window[1]
        outs = area * out_dim * (in_caps * out_caps if whole else 1)
        self.weight = nn.Parameter(glorot_uniform_(weight, area * in_dim, outs))
        self.bias = nn.Parameter(torch.zeros(in_caps, out_caps, out_dim))
        self.dropout = nn.Dropout(dropout)
        self.routing = routing(in_caps, out_caps, out_dim)

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        if parents is not None:
            parents = parents.permute(0, 3, 4, 1, 2)
        routed = self.routing(self.vote(self.dropout(poses)), None, parents)
        presence = routed.activations
        return Capsules(
            routed.poses.permute(0, 3, 4, 1, 2),
            None if presence is None else presence.permute(0, 3, 1, 2),
            routed.coupling,
        )

    def vote(self, poses: Tensor) -> Tensor:
        """Shapes: poses [b, i, p, h, w] -> votes [b, h', w', i, j, d]"""
        rows, columns = self.weight.shape[4:]
        features, padding = pad_same(poses.flatten(1, 2), (rows, columns), self.stride)
        votes = convolve_groups(features, self.weight.flatten(1, 2), self.bias.flatten(1), self.stride, padding)
        return votes.unflatten(4, self.bias.shape[1:])


class FullWindowCaps(PooledConvCaps):
    """The same with one window as large as the map, which gives the class capsules.

    Its weights grow with the map: in_caps x out_caps x in_dim x out_dim for each site.

    Args:
        size: height and width of the map.

    Shapes: poses [b, i, p, h, w] -> Capsules with poses [b, j, d] and coupling [b, i, j]
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        routing: Callable[..., Routing],
        size: tuple[int, int],
        dropout: float = 0.5,
        *,
        whole: bool = False,
    ):
        super().__init__(in_caps, in_dim, out_caps, out_dim, routing, kernel_size=size, dropout=dropout, whole=whole)

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        return self.routing(self.vote(self.dropout(poses)), None, parents)

    def vote(self, poses: Tensor) -> Tensor:
        """Shapes: poses [b, i, p, h, w] -> votes [b, i, j, d]"""
        if poses.shape[3:] != self.weight.shape[4:]:
            size, given = ("{} x {}".format(*x.shape[-2:]) for x in (self.weight, poses))
            raise ValueError(f"the window is as large as the map, {size}, and got a map of {given}")
        weight, children = self.weight.flatten(3).flatten(1, 2), poses.flatten(2).permute(1, 2, 0)
        votes = torch.bmm(weight, children)  # [i, (j d), b]: the gradient of the weights then lies as they do
        return votes.permute(2, 0, 1).reshape(len(poses), *self.bias.shape) + self.bias
