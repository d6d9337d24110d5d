"""From what is drawn or uploaded to an image as the network's data set has them."""

from __future__ import annotations

import base64
import binascii
import io
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.images import fit_image, pillow
from torchcaps.types import Image

MOST_BYTES = 10_000_000
SIDE = 280  # pixels to which a large picture of a digit is brought before it is looked at
FAINT = 0.1  # of full ink; what is fainter is paper
BOX = 20  # MNIST's digits are scaled to fit this square, in a field of 28 x 28


class Unreadable(ValueError):
    """What was handed in is no picture, or there is nothing on it."""


def decode(url: str) -> bytes:
    """The bytes of a data URL."""
    if not isinstance(url, str) or "," not in url:
        raise Unreadable("this is no picture; draw one, choose one or upload a PNG or JPEG file")
    if len(url) > 4 * MOST_BYTES // 3 + 100:
        raise Unreadable(f"this file is larger than {MOST_BYTES // 1_000_000} MB; make the picture smaller")
    try:
        return base64.b64decode(url.split(",", 1)[1], validate=True)
    except (binascii.Error, ValueError):
        raise Unreadable("this upload arrived damaged; try it again") from None


def open_picture(content: bytes, image: Image) -> Tensor:
    """A file of any format that Pillow reads; `image` is the size that it is scaled to cover.

    Shapes: -> uint8 [c, h, w]
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow().DecompressionBombWarning)  # refused below, with a sentence
            with pillow().open(io.BytesIO(content)) as opened:
                return fit_image(opened, image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise SyntaxError, struct.error, EOFError and more
        few = str(error).split(";")[0] if "pixels" in str(error) or "frames" in str(error) else "it is no image"
        raise Unreadable(f"this file cannot be read ({few}); upload a PNG or JPEG picture") from None


def open_ink(content: bytes) -> Tensor:
    """A picture of a digit as ink: dark on light paper, or light on dark, whichever its edge says.

    Shapes: -> float [h, w] in [0, 1]
    """
    try:
        with pillow().open(io.BytesIO(content)) as opened:
            width, height = opened.size
    except Exception:  # and open_picture says what is wrong
        width = height = 1
    scale = min(1.0, SIDE / max(width, height))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    grey = open_picture(content, (1, *size))[0] / 255
    edge = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).median()
    ink = (edge - grey).clamp(min=0) if edge > 0.5 else (grey - edge).clamp(min=0)
    return ink / ink.max().clamp(min=1e-3)


def as_digit(ink: Tensor, image: Image, box: int = BOX) -> Tensor:
    """MNIST's form: scaled to fit a box of 20 x 20, anti-aliased, its centre of mass in the middle of the field.

    Shapes: ink [h, w] in [0, 1] -> uint8 [c, h', w']
    """
    there = ink > FAINT
    if int(there.sum()) < 2:
        raise Unreadable("the canvas is empty; draw a digit on it")
    rows, columns = there.any(1).nonzero()[:, 0], there.any(0).nonzero()[:, 0]
    digit = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    channels, height, width = image
    scale = min(box, height, width) / max(digit.shape)
    size = [max(1, round(side * scale)) for side in digit.shape]
    how = {"mode": "area"} if scale < 1 else {"mode": "bilinear", "align_corners": False}
    digit = F.interpolate(digit[None, None], size, **how)[0, 0]  # type: ignore[arg-type]
    digit = (digit / digit.max()).clamp(0, 1)
    top, left = (
        min(max(round(side / 2 - centre), 0), side - length)
        for side, centre, length in zip((height, width), centre_of_mass(digit), size, strict=True)
    )
    field = F.pad(digit, (left, width - left - size[1], top, height - top - size[0]))
    return (255 * field).round().to(torch.uint8).expand(channels, -1, -1)


def centre_of_mass(ink: Tensor) -> tuple[float, float]:
    """Row and column. Shapes: ink [h, w]"""
    total = float(ink.sum())
    return tuple(  # type: ignore[return-value]
        float((ink.sum(other) * torch.arange(side)).sum()) / total
        for side, other in zip(ink.shape, (1, 0), strict=True)
    )
