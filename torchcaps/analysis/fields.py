"""From the first capsules down to the pixels: which part of the image each of them looks at."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.utils import skip_init

from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.same import same_padding
from torchcaps.types import Image

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
DROPS = (nn.modules.dropout._DropoutNd,)


class WindowField:
    """Shares out the mass of capsules among the features of their windows, by what these add to them.

    Before its nonlinearity a capsule is a sum over the sites of its window; what counts is the part of each site along
    the direction in which the capsule is pulled, where that is positive. Mass stays as it is.

    Args:
        change: of the features, from those of an empty image.

    Shapes: change [f, H, W]
    """

    def __init__(self, primary: PrimaryCaps, change: Tensor):
        conv = primary.conv
        self.kernel, self.stride = (conv.kernel_size[0], conv.kernel_size[1]), conv.stride[0]
        self.size = (change.shape[1], change.shape[2])
        top, bottom, left, right = *[int(conv.padding[0])] * 2, *[int(conv.padding[1])] * 2
        if primary.same:
            top, bottom = same_padding(change.shape[1], self.kernel[0], self.stride)
            left, right = same_padding(change.shape[2], self.kernel[1], self.stride)
        self.sides = (left, right, top, bottom)
        weight, columns = conv.weight.detach().to(change).flatten(2), self._windows(change)
        if conv.groups > 1:
            sums = weight.mT * columns
        else:
            sums = (weight.permute(2, 0, 1) @ columns.transpose(0, 1)).transpose(0, 1)
        self.sums = sums.unflatten(0, (primary.types, primary.dim))  # [c, d, (k l), (h w)]

    def _windows(self, x: Tensor) -> Tensor:
        """Shapes: [f, H, W] -> [f, (k l), (h w)]"""
        return F.unfold(F.pad(x, self.sides)[None], self.kernel, stride=self.stride)[0].unflatten(0, (len(x), -1))

    def spread(self, mass: Tensor, pull: Tensor | None) -> Tensor:
        """
        Args:
            pull: for each capsule the direction that adds to its parents; None shares evenly.

        Shapes: mass [c, h, w], pull [c, d, h, w] -> [H, W]
        """
        inside = self._windows(torch.ones(1, *self.size, dtype=torch.float64, device=mass.device))
        parts = torch.zeros(len(mass), *inside.shape[1:], dtype=torch.float64, device=mass.device)
        if pull is not None:
            some = mass.flatten(1).sum(1) > 0  # types that have any
            pulled = pull[some].flatten(2).to(self.sums)[:, :, None]
            parts[some] = (self.sums[some] * pulled).sum(1).double().clamp(min=0)
        total = parts.sum(1, keepdim=True)
        even = (inside / inside.sum(1, keepdim=True)).expand_as(parts)
        shares = torch.where(total > 0, parts / torch.where(total > 0, total, 1), even)
        given = (shares * mass.flatten(1).double()[:, None]).sum(0)
        left, right, top, bottom = self.sides
        (tall, wide), padded = self.size, (self.size[0] + top + bottom, self.size[1] + left + right)
        whole = F.fold(given[None], padded, self.kernel, stride=self.stride)[0, 0]
        return whole[top : top + tall, left : left + wide]


def stretch(mass: Tensor, size: tuple[int, int]) -> Tensor:
    """A map laid evenly over a larger one; its mass stays.

    Shapes: [h, w] -> [H, W]
    """
    if tuple(mass.shape) == tuple(size):
        return mass
    large = F.interpolate(mass[None, None].double(), size, mode="bilinear", align_corners=False)[0, 0]
    return large * (mass.sum() / large.sum().clamp(min=torch.finfo(torch.float64).tiny))


class PixelField:
    """Hands the mass of each feature site to the pixels of its receptive field, by the number of ways that lead there.

    So the middle of a field counts most, as in a network whose weights are all alike, and no pixel outside it counts.
    Windows that overlap by half would leave a chequered pattern: what recurs with the stride is divided out.

    Args:
        size: height and width of the stem's features.
    """

    def __init__(self, stem: nn.Module, image: Image, size: tuple[int, int], device: torch.device | None = None):
        ones = torch.ones(1, 1, *image[1:], dtype=torch.float64, device=device)
        paths = counting_paths(stem, narrow=True)
        try:
            paths(ones)
        except (RuntimeError, ValueError):  # a stem that tells its channels apart
            paths, ones = counting_paths(stem), ones.expand(1, *image).clone()

        def count(pixels: Tensor) -> Tensor:
            return paths(pixels).mean(1)[0]

        with torch.enable_grad():
            self._back = vjp(count, ones)[1]
            (seen,) = self._back(torch.ones(size, dtype=torch.float64, device=device))
            even = _without_pattern(
                seen.mean(1, keepdim=True), max(1, image[1] // size[0]), max(1, image[2] // size[1])
            )
            self._even = even.expand_as(ones)
            self._ways = jvp(count, (ones,), (self._even,))[1]

    def spread(self, mass: Tensor) -> Tensor:
        """Shapes: [H, W] -> [h, w]"""
        there = self._ways > 0
        (pixels,) = self._back(torch.where(there, mass.double() / torch.where(there, self._ways, 1), 0))
        return (self._even * pixels)[0].sum(0).detach()


def _without_pattern(seen: Tensor, tall: int, wide: int) -> Tensor:
    """What to multiply with, so that nothing of a period is left: the mean of the neighbours over the pixel itself.

    Shapes: [1, 1, h, w] -> [1, 1, h, w]
    """
    smooth = seen
    for _ in range(2):
        sides = ((wide - 1) // 2, wide // 2, (tall - 1) // 2, tall // 2)
        smooth = F.avg_pool2d(F.pad(smooth, sides, mode="replicate"), (tall, wide), stride=1).flip(2, 3)
    return torch.where(seen > 0, smooth / torch.where(seen > 0, seen, 1), 0)


def counting_paths(stem: nn.Module, narrow: bool = False) -> nn.Module:
    """A copy in float64 whose convolutions all average and whose norms and nonlinearities let everything through.

    Args:
        narrow: of one channel only, which gives the same and is faster.
    """
    holder = nn.Sequential(copy.deepcopy(stem).double().eval().requires_grad_(False))
    for module in list(holder.modules()):
        for name, child in list(module.named_children()):
            setattr(module, name, _plain(child, narrow))
    return holder


def _plain(module: nn.Module, narrow: bool) -> nn.Module:
    if isinstance(module, nn.Conv2d):
        conv: Any = module
        if narrow:  # and without the random numbers that a new one draws
            shape = (module.kernel_size, module.stride, module.padding, module.dilation)
            same: dict[str, Any] = {"bias": False, "dtype": torch.float64, "device": module.weight.device}
            conv = skip_init(nn.Conv2d, 1, 1, *shape, **same).requires_grad_(False)
        conv.weight.fill_(1 / conv.weight[0].numel())
        if conv.bias is not None:
            conv.bias.fill_(0)
        return conv
    if isinstance(module, nn.MaxPool2d):
        size: Any = module.kernel_size
        return nn.AvgPool2d(size, module.stride, module.padding, module.ceil_mode)
    if isinstance(module, NORMS + DROPS) or (
        type(module).__module__ == nn.ReLU.__module__ and not isinstance(module, nn.MultiheadAttention)
    ):
        return nn.Identity()
    return module
