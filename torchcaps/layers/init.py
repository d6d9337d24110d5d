"""Initialisers by the rules of Keras and TensorFlow, whose fans and cut normals differ from PyTorch's.

Fans are given by hand: for a capsule weight [j, i, p, d] Keras counts j i p ins, PyTorch i p d.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from torchcaps.functional import glorot_uniform_

Init = Callable[[nn.Linear, bool], None]  # called with a layer and whether it is the last

_CUT_STD = 0.87962566103423978  # the standard deviation of a unit normal cut at two


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """A normal drawn again beyond two `std`, as TensorFlow does; what comes out has 0.88 `std`."""
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)


def he_normal_(tensor: Tensor, fan_in: int) -> Tensor:
    """Keras's he_normal: cut at two, with variance 2 / fan_in after the cut."""
    return truncated_normal_(tensor, math.sqrt(2 / fan_in) / _CUT_STD)


def glorot_normal_(tensor: Tensor, fan_in: int, fan_out: int) -> Tensor:
    """Keras's glorot_normal: cut at two, with variance 2 / (fan_in + fan_out) after the cut."""
    return truncated_normal_(tensor, math.sqrt(2 / (fan_in + fan_out)) / _CUT_STD)


def mixture_normal_(weight: Tensor, in_caps: int, size: float = 0.5) -> Tensor:
    """Weights of votes [g, a, j, e] with which evenly coupled children of length 1 give vector parents of that size.

    A child's share is 1/j, so without this parents start shorter the more of them there are, and learn nothing.
    """
    _, _, parents, dim = weight.shape
    return nn.init.normal_(weight, std=size * parents / math.sqrt(in_caps * dim))


def keras_conv_(conv: nn.Conv2d, kind: str = "glorot_uniform") -> nn.Conv2d:
    """A convolution as Keras starts it, the bias at 0; `kind` is glorot_uniform, glorot_normal or he_normal.

    A depthwise kernel is [h, w, c, 1] in Keras, so its fan in counts all channels and its fan out a single one.
    """
    area = conv.weight[0, 0].numel()
    depthwise = conv.groups == conv.in_channels
    ins = area * (conv.in_channels if depthwise else conv.in_channels // conv.groups)
    outs = area * (conv.out_channels // conv.groups if depthwise else conv.out_channels)
    _start(conv.weight, ins, outs, kind)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def keras_linear_(linear: nn.Linear, kind: str = "glorot_uniform") -> nn.Linear:
    """A linear layer as Keras starts it, the bias at 0."""
    _start(linear.weight, linear.in_features, linear.out_features, kind)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def mazzia_decoder(linear: nn.Linear, last: bool) -> None:
    """Mazzia's decoder: he_normal, the last layer glorot_normal."""
    keras_linear_(linear, "glorot_normal" if last else "he_normal")


def sabour_official(linear: nn.Linear, last: bool) -> None:
    """The released CapsNet: weights from a normal of 0.1 cut at two, every bias 0.1."""
    truncated_normal_(linear.weight, 0.1)
    nn.init.constant_(linear.bias, 0.1)


def _start(weight: Tensor, ins: int, outs: int, kind: str) -> None:
    if kind == "he_normal":
        he_normal_(weight, ins)
    elif kind == "glorot_normal":
        glorot_normal_(weight, ins, outs)
    elif kind == "glorot_uniform":
        glorot_uniform_(weight, ins, outs)
    else:
        raise ValueError(f"initialiser must be glorot_uniform, glorot_normal or he_normal, got {kind!r}")
