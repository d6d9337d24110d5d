"""The layers of EncapNet (Li et al. 2018): capsule convolution, its transpose, and the fully connected layer.

A channel of capsules stays a channel of capsules: parent j continues child j, so a layer has as many capsules as its
input and convolutions are grouped by capsule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.functional import flatten_capsules, leaves_bias, norm_relu_squash, squash
from torchcaps.ops.grouped import GroupedConv2d, GroupedConvTranspose2d
from torchcaps.types import Capsules


class Gate(Protocol):
    """Mixes two votes for each parent; built as `routing(caps, in_dim, out_dim, stride)`."""

    @property
    def reach(self) -> int: ...

    def __call__(self, master: Tensor, aide: Tensor, children: Tensor) -> Capsules: ...


class CapConv(nn.Module):
    """A convolution of each capsule by itself (the master), an aide that sees the other capsules, and a gate.

    After the mixture, and the skip where there is one: batch norm, ReLU, squash. Without `routing` the master is alone.
    Type I raises the dimension with 3 x 3 windows; type II, with 1 x 1 windows, makes a module deeper.

    Args:
        routing: how master and aide are mixed (`MasterAide` or a partial of it); None leaves the master alone.
        aide: "full", the aide sees all capsules (as released); "complement", all but the parent's own child (the
            paper's text). The weights of the own child are then held at 0.
        skip: a 3 x 3 convolution of the input over all channels is added before the batch norm.

    Shapes: poses [b, c, p, h, w] -> poses [b, c, d, h / stride, w / stride], coupling [b, 2, c, h', w']
    """

    def __init__(
        self,
        caps: int,
        in_dim: int,
        out_dim: int,
        kernel_size: int = 3,
        stride: int = 1,
        routing: Callable[..., Gate] | None = None,
        aide: str = "full",
        skip: bool = False,
    ):
        super().__init__()
        if aide not in ("full", "complement"):
            raise ValueError(f"aide must be full or complement, got {aide!r}")
        ins, outs = caps * in_dim, caps * out_dim
        master = GroupedConv2d(ins, outs, kernel_size, stride, padding=kernel_size // 2, groups=caps)
        if routing is None:
            self.routing, self.aide = None, None
            self.master: nn.Conv2d | Vote = master
        else:
            self.routing = routing(caps, in_dim, out_dim, stride)
            self.master = Vote(master, Activation(caps, out_dim))
            wide = kernel_size + self.routing.reach
            others = (
                nn.Conv2d(ins, outs, wide, stride, padding=wide // 2)
                if aide == "full"
                else ComplementConv(caps, in_dim, out_dim, wide, stride)
            )
            self.aide = Vote(others, Activation(caps, out_dim))
        self.skip = nn.Conv2d(ins, outs, 3, stride, padding=1) if skip else None
        self.activation = Activation(caps, out_dim)

    def forward(
        self,
        poses: Tensor,
        activations: Tensor | None = None,
        parents: Tensor | None = None,
        shortcut: Tensor | None = None,
    ) -> Capsules:
        """`shortcut` [b, c, d, h', w'] is added before the batch norm: the skip around several layers of type II."""
        features = poses.flatten(1, 2)
        coupling = bias = None
        if self.routing is None or self.aide is None:
            mixture, bias = self.activation.biased_later(self.master, features)
        else:
            mixed = self.routing(self.master(features), self.aide(features), poses)
            mixture, coupling = mixed.poses.flatten(1, 2), mixed.coupling
        if self.skip is not None:
            around, more = self.activation.biased_later(self.skip, features)
            mixture = mixture + around
            bias = more if bias is None else bias if more is None else bias + more
        if shortcut is not None:
            mixture = mixture + shortcut.flatten(1, 2)
        return Capsules(self.activation(mixture, bias), None, coupling)


class Activation(nn.Module):
    """Batch norm, ReLU, squash, with a bias that the convolution before has not added.

    Shapes: features [b, (c d), h, w], bias [(c d)] -> [b, c, d, h, w]
    """

    def __init__(self, caps: int, dim: int):
        super().__init__()
        self.caps = caps
        self.norm = nn.BatchNorm2d(caps * dim)

    def forward(self, features: Tensor, bias: Tensor | None = None) -> Tensor:
        return norm_relu_squash(features, self.norm, self.caps, bias)

    def biased_later(self, conv: nn.Module, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The convolution, and its bias where that is left to the norm's kernels."""
        if (
            isinstance(conv, nn.Conv2d)
            and type(conv).forward is nn.Conv2d.forward
            and leaves_bias(features, conv, self.norm)
        ):
            return conv._conv_forward(features, conv.weight, None), conv.bias
        return conv(features), None


class Vote(nn.Sequential):
    """A convolution and its activation.

    Shapes: [b, (c p), h, w] -> [b, c, d, h / stride, w / stride]
    """

    def __init__(self, conv: nn.Conv2d, activation: Activation):
        super().__init__(conv, activation)

    def forward(self, features: Tensor) -> Tensor:
        conv, activation = self
        assert isinstance(activation, Activation)
        return cast(Tensor, activation(*activation.biased_later(conv, features)))


class ComplementConv(nn.Conv2d):
    """A convolution in which no capsule sees its own child.

    Shapes: [b, (c p), h, w] -> [b, (c d), h / stride, w / stride]
    """

    others: Tensor

    def __init__(self, caps: int, in_dim: int, out_dim: int, kernel_size: int, stride: int = 1):
        super().__init__(caps * in_dim, caps * out_dim, kernel_size, stride, padding=kernel_size // 2)
        others = (1 - torch.eye(caps)).repeat_interleave(out_dim, 0).repeat_interleave(in_dim, 1)
        self.register_buffer("others", others[..., None, None], persistent=False)

    def _conv_forward(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(features, weight * self.others, bias, self.stride, self.padding)  # type: ignore[arg-type]


class CapDeconv(nn.Module):
    """A transposed 3 x 3 convolution of each capsule by itself, then batch norm, ReLU, squash.

    `size` says which of the two heights and widths that shrink to the input's is meant; by default the even one.

    Shapes: poses [b, c, p, h, w] -> [b, c, d, stride h, stride w], or one less by `size`
    """

    def __init__(self, caps: int, in_dim: int, out_dim: int, stride: int = 1):
        super().__init__()
        self.conv = GroupedConvTranspose2d(caps * in_dim, caps * out_dim, 3, stride, padding=1, groups=caps)
        self.activation = Activation(caps, out_dim)

    def forward(
        self,
        poses: Tensor,
        activations: Tensor | None = None,
        parents: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Capsules:
        stride = self.conv.stride[0]
        size = (poses.shape[3] * stride, poses.shape[4] * stride) if size is None else size
        return Capsules(self.activation(self.conv(poses.flatten(1, 2), size)))


class CapFC(nn.Module):
    """A linear map for each dimension of the capsules by itself, from all children to all parents, then squash.

    Args:
        in_caps: children; with spatial input, types x height x width.
        dim: of children and parents alike.

    Shapes: poses [b, i, d] or [b, c, d, h, w] -> poses [b, j, d]
    """

    def __init__(self, in_caps: int, out_caps: int, dim: int):
        super().__init__()
        bound = 1 / math.sqrt(in_caps)
        self.weight = nn.Parameter(torch.empty(dim, in_caps, out_caps).uniform_(-bound, bound))  # [d, i, j]

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        return Capsules(squash(torch.einsum("bid,dij->bjd", flatten_capsules(poses), self.weight)))
