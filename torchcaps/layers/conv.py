"""Capsule layers in which a window of children votes at each site."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchcaps.layers.linear import Init, Voting, check_children, normal_init, vote_weight
from torchcaps.layers.sizes import out_size
from torchcaps.ops import Votes, Window
from torchcaps.types import Capsules, Routing


class ConvCaps(Voting):
    """At each site, every capsule in a k x k window votes for every parent type with its own weight.

    Args:
        in_types, out_types: capsule types below and above.
        in_dim, out_dim: sizes of their poses.
        routing: a routing class or a partial of one, called with (in_types x k x k, out_types, out_dim).
        pose: "vector", or "matrix" for square poses that a vote multiplies from the right.
        windows: "true", or "scrambled" for the order in Tsai's released code (see `ops.Window`).
        init: fills the weights [(c k k), a, j, e].

    Shapes: poses [b, c, p, h, w], activations [b, c, h, w], parents [b, j, d, y, x] -> poses [b, j, d, y, x],
        activations [b, j, y, x], coupling [b, y, x, i, j]
    """

    def __init__(
        self,
        in_types: int,
        in_dim: int,
        out_types: int,
        out_dim: int,
        kernel_size: int,
        stride: int,
        routing: Callable[..., Routing],
        *,
        pose: str = "vector",
        windows: str = "true",
        init: Init = normal_init,
    ):
        super().__init__()
        if windows not in ("true", "scrambled"):
            raise ValueError(f'windows must be "true" or "scrambled", got {windows!r}')
        self.in_types, self.in_dim = in_types, in_dim
        self.window = Window(kernel_size, stride, windows == "scrambled")
        children = in_types * kernel_size**2
        self.weight = vote_weight(children, in_dim, out_types, out_dim, pose, init)
        self.routing = routing(children, out_types, out_dim)

    def out_space(self, height: int, width: int) -> tuple[int, int]:
        window = self.window
        return out_size(height, window.kernel_size, window.stride), out_size(width, window.kernel_size, window.stride)

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        check_children(poses, self.in_types, self.in_dim)
        self.out_space(*poses.shape[3:])
        if activations is not None:
            activations = self.window.unfold(activations[:, :, None])[..., 0]
        if parents is not None:
            parents = parents.permute(0, 3, 4, 1, 2)
        votes = Votes(poses, self.weight, self.window)
        capsules: Capsules = self.routing(votes, activations, parents)
        above = capsules.activations
        return Capsules(
            capsules.poses.permute(0, 3, 4, 1, 2),
            None if above is None else above.permute(0, 3, 1, 2),
            capsules.coupling,
        )
