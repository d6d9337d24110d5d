"""TrivialAugment (Müller & Hutter 2021), wide: each image undergoes one change out of fourteen, of any strength."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.augment import Step, _brighter, _contrasted, _need, _per_image, _saturated
from torchcaps.data.random import Draws
from torchcaps.data.stronger import _sample

MOVES = ("shear_x", "shear_y", "move_x", "move_y", "turn")
COLOURS = ("brightness", "colour", "contrast", "sharpness", "posterise", "solarise", "stretch", "equalise")
CHANGES = ("nothing", *MOVES, *COLOURS)
LEVELS = 30  # strengths are 0, 1/30, ... 1
SHEAR, SHIFT, DEGREES, FACTOR, BITS = 0.99, 32.0, 135.0, 0.99, 6  # the most of each


@dataclass(frozen=True)
class trivial(Step, random=True, geometric=True):
    """One of `CHANGES` for each image, all with the same chance, as are the strengths and the two directions.

    Strengths as in the paper's wide space; shifts, which it gives for sides of 32, are in pixels. What moves in is
    black. Unlike there, places between pixels are interpolated. All changes are made to all images and one is kept:
    on a GPU that is faster than to sort the images.
    """

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        u = _need(self, draws).uniform(3)
        change = (len(CHANGES) * u[:, 0]).long()
        strength = (u[:, 1] * (LEVELS + 1)).floor() / LEVELS
        return self.by(images, change, strength, 2 * (u[:, 2] * 2).floor() - 1)

    def by(self, images: Tensor, change: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
        """`change` is a place in `CHANGES`.

        Shapes: images [b, c, h, w], change, strength (0 to 1) and sign [b] -> [b, c, h, w]
        """
        strength, sign = strength.to(images.dtype), sign.to(images.dtype)
        changed = torch.where(
            _per_image((change > 0) & (change <= len(MOVES))), _moved(images, change, strength * sign), images
        )
        factor, strength = _per_image(1 + FACTOR * strength * sign), _per_image(strength)
        colours = (
            _brighter(images, factor),
            _saturated(images, factor),
            _contrasted(images, factor),
            _sharpened(images, factor),
            _posterised(images, strength),
            torch.where(images >= 1 - strength, 1 - images, images),
            _stretched(images),
            _equalised(images),
        )
        for place, coloured in enumerate(colours, 1 + len(MOVES)):
            changed = torch.where(_per_image(change == place), coloured, changed)
        return changed


def _moved(images: Tensor, change: Tensor, strength: Tensor) -> Tensor:
    """What is seen at p comes from A (p - t), counted from the centre.

    Shapes: images [b, c, h, w], change and strength [b] -> [b, c, h, w]
    """
    shear_x, shear_y, move_x, move_y, turn = (
        torch.where(change == place, most * strength, 0)
        for place, most in enumerate((SHEAR, SHEAR, SHIFT, SHIFT, math.radians(DEGREES)), 1)
    )
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2 - move_y[:, None]
    x = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2 - move_x[:, None]
    y, x = y[:, :, None], x[:, None]  # [b, h, 1], [b, 1, w]
    cos, sin, shear_x, shear_y = (each[:, None, None] for each in (turn.cos(), turn.sin(), shear_x, shear_y))
    return _sample(images, cos * y + (shear_y - sin) * x, cos * x + (shear_x + sin) * y, "zero")


def _sharpened(images: Tensor, factor: Tensor) -> Tensor:
    """Away from, or towards, what a filter that counts the middle five times makes of it; the border stays."""
    smooth = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[..., 1:-1, 1:-1]) / 13
    smooth = torch.cat([images[..., 1:-1, :1], smooth, images[..., 1:-1, -1:]], -1)
    smooth = torch.cat([images[..., :1, :], smooth, images[..., -1:, :]], -2)
    return (factor * images + (1 - factor) * smooth).clamp(0, 1)


def _posterised(images: Tensor, strength: Tensor) -> Tensor:
    """The uppermost 8 to 2 bits of each pixel."""
    step = torch.exp2((BITS * strength).round())
    return (255 * images / step + 1e-3).floor() * step / 255


def _stretched(images: Tensor) -> Tensor:
    """Each channel from 0 to 1, unless it has a single value."""
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(most > least, (images - least) / (most - least).clamp(min=1e-6), images)


def _equalised(images: Tensor) -> Tensor:
    """Each channel with as many pixels of each shade as of any other, or nearly so.

    A shade becomes the number of darker pixels, in units of a 255th of those that are not of the lightest shade.
    Counts come from sorting, for histograms would have to be added up atomically.
    """
    pixels = (255 * images).round().flatten(2)
    order = pixels.sort(-1).values
    darker = torch.searchsorted(order, pixels.contiguous())
    below = torch.searchsorted(order, order[..., -1:].contiguous())  # the lightest shade
    unit = below // 255
    shade = ((unit // 2 + darker) // unit.clamp(min=1)).clamp(max=255)
    return torch.where((unit > 0)[..., None], (shade / 255).to(images.dtype).unflatten(2, images.shape[2:]), images)
