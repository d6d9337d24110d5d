"""Augmentation of our own rows, beyond what the papers do: `warp`, `elastic`, `bend`, `sometimes`, `cutout`.

`mirrored` and `nudged` are for testing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.augment import FILLS, Step, _check, _check_fill, _need, apply
from torchcaps.data.random import Draws

TINY = 1e-6  # in place of the mass of an empty image


@dataclass(frozen=True)
class warp(Step, random=True, geometric=True):
    """A rotation, a zoom and a shear of each axis, and a shift, about the centre, in one bilinear resampling.

    What is seen at p comes from A (p - centre - t) + centre, where A = R(angle) [[zoom_y, shear_y], [shear_x, zoom_x]].
    The angle is uniform within `degrees` either way, each zoom in [1 - zoom, 1 + zoom], each shear in [-shear, shear],
    the shift within `pixels` on both axes.
    """

    degrees: float = 0.0
    zoom: float = 0.0
    shear: float = 0.0
    pixels: float = 0.0
    fill: str = "zero"

    def __post_init__(self) -> None:
        _check(self, min(self.degrees, self.zoom, self.shear, self.pixels) >= 0, "none of its numbers is negative")
        _check(self, self.zoom < 1, "a zoom by 1 would leave a single point")
        _check_fill(self.fill)

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        u = (2 * _need(self, draws).uniform(7) - 1).to(images.dtype)
        matrix = _matrix(u[:, 0] * self.degrees, 1 + self.zoom * u[:, 1:3], self.shear * u[:, 3:5])
        rows, columns = _turned(images, matrix, self.pixels * u[:, 5:7])
        return _sample(images, rows, columns, self.fill)


@dataclass(frozen=True)
class elastic(Step, random=True, geometric=True):
    """Each pixel comes from a place nearby; how far and where to varies smoothly (Simard et al. 2003).

    Arrows whose both parts are normal, with a deviation of `pixels`, are drawn on a grid of `knots` x `knots`, whose
    corners are the image's; between them they are interpolated linearly.
    """

    pixels: float
    knots: int = 5
    fill: str = "zero"

    def __post_init__(self) -> None:
        _check(self, self.pixels >= 0 and self.knots > 1, "no deviation is negative, and there are at least two knots")
        _check_fill(self.fill)

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        field = _field(images, self.pixels * _need(self, draws).normal(2 * self.knots**2), self.knots)
        y, x = _axes(images)
        return _sample(images, y[:, None] + field[:, 0], x + field[:, 1], self.fill)


@dataclass(frozen=True)
class bend(Step, random=True, geometric=True):
    """`warp` and `elastic` in one resampling, after which the ink is about as sharp as before and where it was.

    Two bilinear resamplings halve the squared difference of neighbouring pixels. Here there is one, cubic, and
    `contrast` stretches grey levels about the middle, by 1.2 for MNIST, whose shares of black and grey that keeps. The
    centre of mass, which MNIST has in the middle, nearly stays, but for a shift within `pixels` on both axes.
    """

    degrees: float = 0.0
    zoom: float = 0.0
    shear: float = 0.0
    pixels: float = 0.0
    elastic: float = 0.0
    contrast: float = 1.0
    knots: int = 5

    def __post_init__(self) -> None:
        least = min(self.degrees, self.zoom, self.shear, self.pixels, self.elastic)
        _check(self, least >= 0 and self.contrast > 0, "none of its numbers is negative, and the contrast is above 0")
        _check(self, self.zoom < 1, "a zoom by 1 would leave a single point")
        _check(self, self.knots > 1, "there are at least two knots")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        draws = _need(self, draws)
        u = (2 * draws.uniform(7) - 1).to(images.dtype)
        field = _field(images, self.elastic * draws.normal(2 * self.knots**2), self.knots)
        matrix = _matrix(u[:, 0] * self.degrees, 1 + self.zoom * u[:, 1:3], self.shear * u[:, 3:5])

        def bent(shift: Tensor, mode: str) -> Tensor:
            rows, columns = _turned(images, matrix, shift)
            return _sample(images, rows + field[:, 0], columns + field[:, 1], "zero", mode)

        moved = _centre_of_mass(bent(torch.zeros_like(u[:, 5:7]), "bilinear")) - _centre_of_mass(images)
        out = bent(self.pixels * u[:, 5:7] - moved, "bicubic")
        return (self.contrast * (out - 0.5) + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class sometimes(Step, random=True, geometric=True):
    """Takes these steps with a chance of `share` for each image, and `others`, or none, for the rest.

    What is resampled is also blurred. A network that never sees a sharp image in training takes sharp ones for
    something new when it is tested.
    """

    steps: tuple[Step, ...]
    share: float
    others: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        _check(self, 0 < self.share <= 1, "the share of images that are changed is above 0 and at most 1")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        changed, rest = apply(self.steps, images, draws), apply(self.others, images, draws)
        taken = _need(self, draws).uniform(1)[:, 0] < self.share
        return torch.where(taken[:, None, None, None], changed, rest)


@dataclass(frozen=True)
class cutout(Step, random=True, geometric=True):
    """Sets a square of `size` pixels to 0, which is the mean colour after `normalise` (DeVries & Taylor 2017).

    Its centre is any pixel with the same chance, so that a part of it may lie outside the image.
    """

    size: int

    def __post_init__(self) -> None:
        _check(self, self.size > 0, "a square has at least one pixel")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        draws = _need(self, draws)
        inside = []
        for side in images.shape[-2:]:
            first = draws.integers(0, side) - self.size // 2
            distance = torch.arange(side, device=images.device) - first[:, None]  # [b, side]
            inside.append((distance >= 0) & (distance < self.size))
        return torch.where((inside[0][:, :, None] & inside[1][:, None])[:, None], 0, images)


@dataclass(frozen=True)
class mirrored(Step, geometric=True):
    """The image and its mirror image, for testing.

    Shapes: images [b, c, h, w] -> [b, 2, c, h, w]
    """

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return torch.stack([images, images.flip(-1)], 1)


@dataclass(frozen=True)
class nudged(Step, geometric=True):
    """The image where it is and moved by one pixel to each of eight sides, for testing; what moves in is 0.

    Shapes: images [b, c, h, w] -> [b, 9, c, h, w]
    """

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        height, width = images.shape[-2:]
        wider = F.pad(images, (1, 1, 1, 1))
        return torch.stack([wider[..., y : y + height, x : x + width] for y in range(3) for x in range(3)], 1)


def _axes(images: Tensor) -> tuple[Tensor, Tensor]:
    """Distances from the centre, in pixels. Shapes: -> [h], [w]"""
    height, width = images.shape[-2:]
    y, x = (torch.arange(n, device=images.device, dtype=images.dtype) - (n - 1) / 2 for n in (height, width))
    return y, x


def _matrix(degrees: Tensor, zooms: Tensor, shears: Tensor) -> Tensor:
    """R(degrees) [[zoom_y, shear_y], [shear_x, zoom_x]].

    Shapes: degrees [b], zooms and shears [b, 2] -> [b, 2, 2]
    """
    angle = degrees * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    yy, yx = cos * zooms[:, 0] - sin * shears[:, 1], cos * shears[:, 0] - sin * zooms[:, 1]
    xy, xx = sin * zooms[:, 0] + cos * shears[:, 1], sin * shears[:, 0] + cos * zooms[:, 1]
    return torch.stack([yy, yx, xy, xx], 1).unflatten(1, (2, 2))


def _turned(images: Tensor, matrix: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Where each pixel comes from, counted from the centre.

    Shapes: images [b, c, h, w], matrix [b, 2, 2], shifts [b, 2] -> rows and columns [b, h, w]
    """
    y, x = (axis - shift[:, None] for axis, shift in zip(_axes(images), shifts.unbind(1), strict=True))
    rows, columns = (
        part[:, 0, None, None] * y[:, :, None] + part[:, 1, None, None] * x[:, None] for part in matrix.unbind(1)
    )
    return rows, columns


def _field(images: Tensor, arrows: Tensor, knots: int) -> Tensor:
    """Shapes: images [b, c, h, w], arrows [b, 2 knots knots] -> [b, 2, h, w]"""
    grid = arrows.to(images.dtype).unflatten(1, (2, knots, knots))
    return F.interpolate(grid, images.shape[-2:], mode="bilinear", align_corners=True)


def _centre_of_mass(images: Tensor) -> Tensor:
    """Counted from the centre; of an empty image it is there. Shapes: [b, c, h, w] -> [b, 2]"""
    ink = images.sum(1)
    places = torch.stack(
        [(ink.sum(across) * axis).sum(1) for across, axis in zip((2, 1), _axes(images), strict=True)], 1
    )
    return places / ink.sum((1, 2)).clamp(min=TINY)[:, None]


def _sample(images: Tensor, rows: Tensor, columns: Tensor, fill: str, mode: str = "bilinear") -> Tensor:
    """What lies at these places, counted in pixels from the centre.

    Shapes: images [b, c, h, w], rows and columns [b, h, w] -> [b, c, h, w]
    """
    height, width = images.shape[-2:]
    grid = torch.stack([2 / width * columns, 2 / height * rows], -1)
    return F.grid_sample(images, grid, mode=mode, padding_mode=FILLS[fill], align_corners=False)
