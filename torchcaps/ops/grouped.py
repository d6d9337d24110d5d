"""Convolutions and linear maps by groups of few channels, which a GPU does faster all at once.

A group of one to sixteen channels fills no tensor core, and the kernels for it are many times slower than their
operations warrant. One map over all channels, with zeros between the groups, reads and writes the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.fused import autocasted
from torchcaps.ops.backend import convolves_fused

MOST_CHANNELS = 1024  # beyond them the zeros cost more than they save


def spreads(x: Tensor, channels: int) -> bool:
    """Whether groups run as one map over all channels here."""
    return x.is_cuda and channels <= MOST_CHANNELS


def block_diagonal(weight: Tensor, groups: int) -> Tensor:
    """The weights of all groups as one kernel, laid out as channels-last convolutions want it.

    Shapes: weight [(g a), e, y, x] -> [(g a), (g e), y, x], 0 between different groups
    """
    blocks = weight.unflatten(0, (groups, -1)).permute(1, 3, 4, 2, 0)  # [a, y, x, e, g]
    return torch.diag_embed(blocks, dim1=0, dim2=4).flatten(4).flatten(0, 1).permute(0, 3, 1, 2)


class GroupedConv2d(nn.Conv2d):
    """nn.Conv2d for groups of few channels.

    Shapes: [b, (g p), h, w] -> [b, (g d), h', w']
    """

    def _conv_forward(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.dilation != (1, 1) or self.padding_mode != "zeros" or not spreads(features, self.in_channels):
            return super()._conv_forward(features, weight, bias)
        (weight,) = autocasted(weight)
        dense = block_diagonal(weight, self.groups)
        return F.conv2d(features, dense, bias, self.stride, self.padding)  # type: ignore[arg-type]


class GroupedConvTranspose2d(nn.ConvTranspose2d):
    """nn.ConvTranspose2d for groups of few channels.

    Shapes: [b, (g p), h, w] -> [b, (g d), *size]
    """

    def forward(self, features: Tensor, size: list[int] | None = None) -> Tensor:
        if self.dilation != (1, 1) or not spreads(features, self.in_channels):
            return super().forward(features, size)
        spare = self._output_padding(features, size, self.stride, self.padding, self.kernel_size, 2)  # type: ignore[arg-type]
        (weight,) = autocasted(self.weight)
        dense = block_diagonal(weight, self.groups)
        return F.conv_transpose2d(features, dense, self.bias, self.stride, self.padding, spare)  # type: ignore[arg-type]


def map_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An affine map for each group.

    Shapes: x [..., g, p], weight [g, p, d], bias [g, d] -> [..., g, d]
    """
    if not spreads(x, weight.shape[0] * weight.shape[1]):
        return torch.einsum("...gp,gpd->...gd", x, weight) + bias
    dense = torch.diag_embed(weight.permute(2, 1, 0), dim1=0, dim2=2)  # [g, d, g, p]
    return F.linear(x.flatten(-2), dense.flatten(2).flatten(0, 1), bias.flatten()).unflatten(-1, bias.shape)


def convolve_groups(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: tuple[int, int]) -> Tensor:
    """A convolution for each group, laid out as it is given back.

    Shapes: x [b, (g p), h, w], weight [g, d, p, y, x], bias [g, d] -> [b, h', w', g, d]
    """
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        x, weight, bias = (t.to(torch.get_autocast_dtype(device)) for t in (x, weight, bias))
    if convolves_fused(x, weight):
        from torchcaps.ops.replica_conv import ReplicaConv

        if padding[0] != padding[1]:
            x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
        maps: Tensor = ReplicaConv.apply(x.unflatten(1, (len(weight), -1)), weight, bias, stride, padding[0])
        return maps.permute(0, 3, 4, 1, 2)
    maps = F.conv2d(x, weight.flatten(0, 1), bias.flatten(), stride, padding, groups=len(weight))
    return maps.unflatten(1, bias.shape).permute(0, 3, 4, 1, 2).contiguous()
