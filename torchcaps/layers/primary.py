"""From features to the first capsules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.functional import layer_norm, whole_map_capsules
from torchcaps.layers.same import conv_same
from torchcaps.layers.sizes import out_size
from torchcaps.ops import conv_cpu
from torchcaps.types import Capsules


class PrimaryCaps(nn.Module):
    """A convolution whose channels are seen as capsules: types x dim of them.

    Args:
        padding: pixels, or "same" for TensorFlow's rule.
        nonlinearity: over each pose, e.g. `squash`, or a LayerNorm.
        bias: of the convolution.
        scale: multiplies the convolution before its bias; 1/types in Sabour's released code, which routes once here.
        activations: also a sigmoid convolution, one activation for each capsule (EM).
        depthwise: each channel sees only itself (Mazzia), so features must have types x dim channels.

    Shapes: features [b, f, h, w] -> poses [b, c, d, y, x], activations [b, c, y, x] or None
    """

    def __init__(
        self,
        in_channels: int,
        types: int,
        dim: int,
        kernel_size: int | tuple[int, int],
        stride: int = 1,
        padding: int | str = 0,
        *,
        nonlinearity: Callable[..., Tensor] | None = None,
        bias: bool = True,
        scale: float = 1.0,
        activations: bool = False,
        depthwise: bool = False,
    ):
        super().__init__()
        if depthwise and in_channels != types * dim:
            raise ValueError(f"depthwise needs {types} x {dim} = {types * dim} features, got {in_channels}")
        self.types, self.dim, self.scale = types, dim, scale
        self.nonlinearity = nonlinearity
        self.same = padding == "same"
        pixels = 0 if isinstance(padding, str) else padding
        groups = in_channels if depthwise else 1
        self.conv = nn.Conv2d(in_channels, types * dim, kernel_size, stride, pixels, groups=groups, bias=bias)
        self.activation = nn.Conv2d(in_channels, types, kernel_size, stride, pixels, bias=bias) if activations else None

    def out_space(self, height: int, width: int) -> tuple[int, int]:
        (tall, wide), stride, padding = self.conv.kernel_size, self.conv.stride[0], int(self.conv.padding[0])
        if self.same:
            return -(-height // stride), -(-width // stride)
        return out_size(height, tall, stride, padding), out_size(width, wide, stride, padding)

    def forward(self, features: Tensor) -> Capsules:
        conv = self.conv
        weight = conv.weight if self.scale == 1.0 else conv.weight * self.scale
        if self._sees_all(features):
            whole = whole_map_capsules(features, weight, conv.bias, self.dim, self.nonlinearity)
            if whole is not None:
                return Capsules(whole[..., None, None])
        if self.same:
            maps = conv_same(features, weight, conv.bias, conv.stride[0], conv.groups)
        elif conv.padding == (0, 0) and conv.groups > 1 and conv_cpu.covers(features, weight):
            maps = conv_cpu.weigh(features, weight, conv.bias)
        elif conv.padding == (0, 0) and conv.groups == 1 and conv_cpu.suits(features, weight, conv.stride[0]):
            maps = conv_cpu.convolve(features, weight, conv.bias, conv.stride[0])
        else:
            maps = F.conv2d(features, weight, conv.bias, conv.stride, conv.padding, groups=conv.groups)
        poses = maps.unflatten(1, (self.types, self.dim))
        if self.nonlinearity is not None:
            poses = self._nonlinear(poses.movedim(2, -1)).movedim(-1, 2)
        return Capsules(poses, None if self.activation is None else torch.sigmoid(self.activation(features)))

    def _sees_all(self, features: Tensor) -> bool:
        """Whether each channel's window is the whole map, and nothing else looks at it."""
        conv = self.conv
        plain = conv.padding == (0, 0) and not self.same and self.activation is None
        return plain and conv.groups == conv.in_channels and conv.kernel_size == features.shape[2:]

    def _nonlinear(self, poses: Tensor) -> Tensor:
        norm = self.nonlinearity
        assert norm is not None
        if isinstance(norm, nn.LayerNorm) and norm.normalized_shape == poses.shape[-1:]:
            return layer_norm(poses, norm.weight, norm.bias, norm.eps)
        return norm(poses)
