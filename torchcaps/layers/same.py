"""TensorFlow's SAME padding, which PyTorch has for stride 1 alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """What TensorFlow's SAME adds before and after, so that ceil(size / stride) windows fit; an odd one goes after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def conv_same(features: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, groups: int = 1) -> Tensor:
    """A convolution with TensorFlow's SAME padding: PyTorch's own has no stride, and pads evenly.

    Shapes: features [b, c, h, w], weight [c', c / groups, k, k] -> [b, c', ceil(h / stride), ceil(w / stride)]
    """
    features, padding = pad_same(features, (weight.shape[2], weight.shape[3]), stride)
    return F.conv2d(features, weight, bias, stride, padding, groups=groups)


def pad_same(features: Tensor, window: tuple[int, int], stride: int) -> tuple[Tensor, tuple[int, int]]:
    """The features, and what a convolution still has to add on both sides; uneven padding is added to them already.

    Shapes: [b, c, h, w] -> [b, c, h', w']
    """
    top, bottom = same_padding(features.shape[2], window[0], stride)
    left, right = same_padding(features.shape[3], window[1], stride)
    if (top, left) == (bottom, right):
        return features, (top, left)
    return F.pad(features, (left, right, top, bottom)), (0, 0)
