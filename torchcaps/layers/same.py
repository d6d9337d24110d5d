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
    top, bottom = same_padding(features.shape[2], weight.shape[2], stride)
    left, right = same_padding(features.shape[3], weight.shape[3], stride)
    if (top, left) == (bottom, right):
        return F.conv2d(features, weight, bias, stride, (top, left), groups=groups)
    return F.conv2d(F.pad(features, (left, right, top, bottom)), weight, bias, stride, groups=groups)
