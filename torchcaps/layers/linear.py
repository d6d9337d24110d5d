"""Capsule layers in which every child votes for every parent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.functional import flatten_capsules, side_of
from torchcaps.ops import Votes
from torchcaps.types import Capsules, Routing

Init = Callable[[Tensor], object]


def normal_init(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.1)


def vote_weight(groups: int, in_dim: int, out_caps: int, out_dim: int, pose: str, init: Init) -> nn.Parameter:
    """Weights [g, a, j, e] with which poses become votes: whole vectors, or each row of a square matrix.

    In this order both the votes and their sum over the children are plain matrix products, with no copy of the weights.
    """
    if pose not in ("vector", "matrix"):
        raise ValueError(f'pose must be "vector" or "matrix", got {pose!r}')
    if pose == "matrix":
        in_dim, rows = side_of(in_dim), side_of(in_dim)
        if out_dim != rows * side_of(out_dim):
            raise ValueError(f"matrix poses keep their size: children have {rows}x{rows}, parents would have {out_dim}")
        out_dim = out_dim // rows
    weight = torch.empty(groups, in_dim, out_caps, out_dim)
    init(weight)
    return nn.Parameter(weight)


class Voting(nn.Module):
    """A layer with vote weights, which stay as they lie when a network is made channels-last.

    That order is for images: votes would have to copy weights in it back at each step.
    """

    weight: nn.Parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        if not self.weight.is_contiguous():
            self.weight.data = self.weight.data.contiguous()
        return self


def flat_activations(activations: Tensor | None) -> Tensor | None:
    return None if activations is None else activations.flatten(1)


def check_children(poses: Tensor, caps: int, dim: int) -> None:
    if poses.shape[1:3] != (caps, dim):
        given = (
            f"{poses.shape[1]} of {poses.shape[2]}" if poses.dim() >= 3 else f"a tensor of shape {list(poses.shape)}"
        )
        raise ValueError(f"the layer is built for {caps} children of {dim}, got {given}")


class LinearCaps(Voting):
    """Every child votes for every parent with W_ij u_i; the votes are routed.

    Args:
        in_caps: children; with spatial input, types x height x width.
        in_dim: size of a child's pose.
        out_caps: parents.
        out_dim: size of a parent's pose.
        routing: a routing class or a partial of one, called with (in_caps, out_caps, out_dim).
        pose: "vector", or "matrix" for square poses that a vote multiplies from the right.
        init: fills the weights [i, a, j, e].

    Shapes: poses [b, i, p] or [b, c, p, h, w], parents [b, j, d] -> Capsules with poses [b, j, d]
    """

    def __init__(
        self,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        routing: Callable[..., Routing],
        *,
        pose: str = "vector",
        init: Init = normal_init,
    ):
        super().__init__()
        self.in_caps, self.in_dim = in_caps, in_dim
        self.weight = vote_weight(in_caps, in_dim, out_caps, out_dim, pose, init)
        self.routing = routing(in_caps, out_caps, out_dim)

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        poses = flatten_capsules(poses)
        check_children(poses, self.in_caps, self.in_dim)
        return self.routing(Votes(poses, self.weight), flat_activations(activations), parents)


class SharedCaps(Voting):
    """As `LinearCaps`, but children of one type vote with one weight wherever they are.

    Args:
        in_types: types of children, of which in_caps are given at each call, ordered by type.
        coordinates: adds to each vote where its child stands: row and column, in [0, 1], to the first two entries of
            the pose matrix's right-hand column (Hinton's coordinate addition). Needs spatial input.
        bias: a learnt vote for each type and parent (Li's convolutional form).

    Shapes: poses [b, i, p] or [b, c, p, h, w], parents [b, j, d] -> Capsules with poses [b, j, d]
    """

    def __init__(
        self,
        in_types: int,
        in_caps: int,
        in_dim: int,
        out_caps: int,
        out_dim: int,
        routing: Callable[..., Routing],
        *,
        pose: str = "vector",
        coordinates: bool = False,
        bias: bool = False,
        init: Init = normal_init,
    ):
        super().__init__()
        if coordinates and pose != "matrix":
            raise ValueError(f"coordinates go into the right-hand column of a matrix pose, got pose={pose!r}")
        if in_caps % in_types:
            raise ValueError(f"{in_caps} children cannot be shared out evenly among {in_types} types")
        self.in_caps, self.in_dim, self.coordinates = in_caps, in_dim, coordinates
        self.weight = vote_weight(in_types, in_dim, out_caps, out_dim, pose, init)
        self.bias = nn.Parameter(torch.zeros(in_types, 1, out_caps, out_dim)) if bias else None  # [g, s, j, d]
        self.routing = routing(in_caps, out_caps, out_dim)

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        offset = self._offset(poses)
        poses = flatten_capsules(poses)
        check_children(poses, self.in_caps, self.in_dim)
        votes = Votes(poses, self.weight, offset=offset)
        return self.routing(votes, flat_activations(activations), parents)

    def _offset(self, poses: Tensor) -> Tensor | None:
        if not self.coordinates:
            return self.bias
        if poses.dim() != 5:
            raise ValueError(f"coordinates need spatial poses [b, c, d, h, w], got {list(poses.shape)}")
        h, w = poses.shape[3:]
        side = self.weight.shape[1]
        where = torch.zeros(1, h * w, 1, poses.shape[2], dtype=self.weight.dtype, device=poses.device)
        rows = (torch.arange(h, device=poses.device) + 0.5) / h
        columns = (torch.arange(w, device=poses.device) + 0.5) / w
        where[0, :, 0, side - 1] = rows.repeat_interleave(w).to(where.dtype)
        where[0, :, 0, 2 * side - 1] = columns.repeat(h).to(where.dtype)
        return where if self.bias is None else where + self.bias
