"""What passes between the parts. Everything is a plain tensor or a named tuple of them.

The letters used in every shape, comment and einsum:

    b  batch            i  children (lower capsules)    p  size of a child's pose
    c  capsule types    j  parents (upper capsules)     d  size of a parent's pose
    h w  space          ...  any leading dimensions     k  objects in an image

Flat capsules have poses [b, n, d] and activations [b, n]; spatial ones [b, c, d, h, w] and [b, c, h, w].
Matrix poses are stored flat, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torchcaps.ops.votes import Votes

Image = tuple[int, int, int]  # channels, height, width


class ImageTooSmall(ValueError):
    """Raised where a layer's window does not fit its input any more."""


class Capsules(NamedTuple):
    """Poses, how present each capsule is, and who was routed to whom.

    `activations` is None where a routing has no such notion; `coupling` [..., i, j] is None on fused paths.
    """

    poses: Tensor
    activations: Tensor | None = None
    coupling: Tensor | None = None


class Output(NamedTuple):
    """What every network returns.

    Shapes: scores and probabilities [b, j], capsules.poses [b, j, d], reconstruction [b, k, c, h, w], penalty []
    """

    scores: Tensor  # what the loss is taken of: lengths, activations or logits
    capsules: Capsules | None
    reconstruction: Tensor | None
    penalty: Tensor | None  # a loss of the network's own (Li's feedback), in training only
    probabilities: Tensor  # in [0, 1], for every network


class Routing(Protocol):
    """Built by a layer as `routing(in_caps, out_caps, out_dim)`, then called with the votes it cast.

    `parents` [..., j, d] are the poses of the iteration before, for routings that go on from there.
    """

    def __call__(
        self, votes: Votes | Tensor, activations: Tensor | None = None, parents: Tensor | None = None
    ) -> Capsules: ...
