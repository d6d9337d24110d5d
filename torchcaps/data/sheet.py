"""A contact sheet: images in rows, with the names of their classes below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.errors import DataError, write_whole

CELL = 72  # pixels that a picture is enlarged to at least
GAP = 6
LINE = 14  # pixels of a line of text
PAPER, INK = (250, 250, 250), (40, 40, 40)


def draw_sheet(images: Sequence[Tensor], captions: Sequence[str], columns: int, title: str = "") -> Any:
    """A Pillow image. Two channels are a stereo pair, shown side by side.

    Shapes: images uint8, or float, shown from darkest to brightest where they leave [0, 1]; each [c, h, w]
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise DataError("contact sheets need Pillow: pip install 'torchcaps[data]'") from None

    pictures = [_picture(image) for image in images]
    height, width = (max(picture.shape[side] for picture in pictures) for side in (0, 1))
    factor = max(1, math.ceil(CELL / max(height, 1)))
    columns = min(columns, len(pictures))
    across, down = width * factor + GAP, height * factor + LINE + GAP
    top = GAP + (LINE + GAP if title else 0)
    font = ImageFont.load_default()
    size = (GAP + columns * across, top + math.ceil(len(pictures) / columns) * down)
    least = GAP * 2 + math.ceil(font.getlength(title))
    sheet = Image.new("RGB", (max(size[0], least), size[1]), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, GAP // 2), title, INK, font)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, columns)
        x, y = GAP + column * across, top + row * down
        large = picture.repeat(factor, 0).repeat(factor, 1)
        sheet.paste(Image.fromarray(large), (x, y))
        pen.text((x, y + height * factor + 1), _fitting(caption, across - 2, font), INK, font)
    return sheet


def save_sheet(sheet: Any, out: Path) -> None:
    with write_whole(out, "choose another file with --out") as temporary:
        sheet.save(temporary, "PNG")


def _picture(image: Tensor) -> np.ndarray:
    """Shapes: [c, h, w] -> uint8 [h, w, 3]"""
    image = image.detach().cpu()
    if image.dtype != torch.uint8:
        image = image.float()
        low, high = image.aminmax()
        if low < 0 or high > 1:
            image = (image - low) / (high - low).clamp(min=1e-12)
        image = (255 * image).round().to(torch.uint8)
    if image.shape[0] == 2:
        image = torch.cat([image[:1], image[1:]], dim=2)
    image = image[:3] if image.shape[0] > 2 else image[:1].expand(3, -1, -1)
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def _fitting(text: str, width: int, font: Any) -> str:
    text = text.encode("latin-1", "replace").decode("latin-1")  # all that Pillow's own bitmap font has
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "..") > width:
        text = text[:-1]
    return text + ".."
