"""The windows of a convolutional capsule layer: which children each output site sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """A square window that slides over spatial capsules without padding.

    Args:
        scrambled: reads the windows in the order of Tsai's released code, which stacks the sites on the last axis and
            then views [.., p, (y x)] as [.., y, x, p]: a "pose" is then one component taken from p sites.
    """

    kernel_size: int
    stride: int = 1
    scrambled: bool = False

    def sites(self, height: int, width: int) -> tuple[int, int]:
        return (height - self.kernel_size) // self.stride + 1, (width - self.kernel_size) // self.stride + 1

    def unfold(self, x: Tensor) -> Tensor:
        """Shapes: x [b, c, p, h, w] -> [b, y, x, (c k k), p]"""
        patches = self._cut(self._cut(x, 3), 4)
        b, c, p, sites_y, sites_x, k, _ = patches.shape
        if self.scrambled:
            patches = patches.permute(0, 1, 5, 6, 2, 3, 4).reshape(b, c, k, k, sites_y, sites_x, p)
            patches = patches.permute(0, 4, 5, 1, 2, 3, 6)
        else:
            patches = patches.permute(0, 3, 4, 1, 5, 6, 2)
        return patches.reshape(b, sites_y, sites_x, c * k * k, p)

    def _cut(self, x: Tensor, dim: int) -> Tensor:
        """`x.unfold` along a dimension."""
        end = x.shape[dim] - self.kernel_size + 1
        if end <= 0 or x.device.type != "cpu" or not torch.compiler.is_compiling():
            return x.unfold(dim, self.kernel_size, self.stride)
        # torch 2.13 compiles the backward of two unfolds for several threads so that it writes outside its memory
        cuts = [(slice(None),) * dim + (slice(n, end + n, self.stride),) for n in range(self.kernel_size)]
        return torch.stack([x[cut] for cut in cuts], -1)

    def logsumexp(self, x: Tensor, space: tuple[int, int]) -> Tensor:
        """log of the sum of exp(x) over every window a child stands in, handed back to each of these windows.

        Shapes: x [b, y, x, (c k k)] -> the same
        """
        b, sites_y, sites_x, n = x.shape
        c, (h, w) = n // self.kernel_size**2, space
        here = torch.arange(c * h * w, device=x.device).view(1, c, 1, h, w)
        here = Window(self.kernel_size, self.stride).unfold(here).flatten().expand(b, -1)  # the child behind each entry
        flat = x.flatten(1)
        with torch.no_grad():
            top = flat.new_full((b, c * h * w), -torch.inf).scatter_reduce(1, here, flat, "amax").gather(1, here)
        parts = (flat - top).exp().view(b, sites_y * sites_x, n).mT  # [b, (c k k), (y x)]
        sums = F.fold(parts, space, self.kernel_size, stride=self.stride)
        tiny = torch.finfo(sums.dtype).tiny  # children in no window sum to 0
        return (sums.clamp(min=tiny).log().flatten(1).gather(1, here) + top).view_as(x)
