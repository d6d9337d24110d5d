"""Pictures for the page, as data URLs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torchcaps.pictures import Picture, packed, picture

RED, GREEN = (235, 94, 40), (31, 158, 137)  # the two of an overlay; where both are, they add up
HEAT = ((13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33))  # plasma, in five steps


def grey_or_colour(image: Tensor) -> str:
    """Shapes: [c, h, w]"""
    return url(picture(image.detach().cpu().numpy()))


def two_colours(drawn: Tensor) -> str:
    """Two reconstructions in one picture, each in its own colour. Shapes: [2, c, h, w]"""
    first, second = drawn.detach().cpu().mean(1).clamp(0, 1).numpy()
    mixed = first[..., None] * np.array(RED) + second[..., None] * np.array(GREEN)
    return url(mixed.clip(0, 255).round().astype(np.uint8))


def heat(values: Tensor, image: Tensor) -> str:
    """How strongly each pixel of an image counts, from dark blue to yellow, the picture shining through.

    Shapes: values [h, w], image [c, h, w]
    """
    share = values.detach().cpu().numpy() / max(float(values.max()), 1e-12)
    at = share * (len(HEAT) - 1)
    low = np.minimum(at.astype(int), len(HEAT) - 2)
    colours = np.array(HEAT, dtype=np.float64)
    mixed = colours[low] + (at - low)[..., None] * (colours[low + 1] - colours[low])
    ground = picture(image.detach().cpu().numpy()).mean(-1, keepdims=True)
    return url((0.72 * mixed + 0.28 * ground).clip(0, 255).round().astype(np.uint8))


def thumbnails(images: Tensor) -> str:
    """All test images one below the other in one picture. Shapes: [n, c, h, w]"""
    return url(np.concatenate([picture(image.numpy()) for image in images]))


def url(pixels: Picture) -> str:
    grey = bool((pixels == pixels[..., :1]).all())
    return "data:image/png;base64," + packed(np.ascontiguousarray(pixels[..., 0] if grey else pixels))
