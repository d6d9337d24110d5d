"""Images of any number of channels as pictures that can be shown."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]  # [h, w, 3]
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture(image: Any, low: float | None = None, high: float | None = None) -> Picture:
    """Grey, colour, the two views of a stereo pair side by side, or, of any other number of channels, their mean.

    Args:
        image: an array or a tensor on the CPU: bytes, or numbers in [0, 1].
        low: what is shown black, and `high` white; standardised images without them go from darkest to brightest.

    Shapes: [c, h, w] -> [h, w, 3]
    """
    values = np.asarray(image)
    if values.ndim != 3 or not values.size:
        raise ValueError(f"a picture is [c, h, w] and not empty, got {list(values.shape)}")
    values = values / 255.0 if values.dtype == np.uint8 else values.astype(np.float64)
    values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
    if low is None or high is None:
        low, high = brightness(values)
    values = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
    channels = len(values)
    if channels == 2:
        values = np.concatenate([values[:1], values[1:]], axis=2)
    elif channels != 3:
        values = values.mean(axis=0, keepdims=True)
    return np.round(255 * np.broadcast_to(values, (3, *values.shape[1:])).transpose(1, 2, 0)).astype(np.uint8)


def brightness(image: Any) -> tuple[float, float]:
    """From where to where a picture goes: [0, 1], or its own extremes where it leaves that."""
    values = np.asarray(image)
    if values.dtype == np.uint8:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def packed(picture: Any) -> str:
    """A picture as a base64 PNG, for JSON; `unpacked` gives the same bytes back.

    Shapes: uint8 [h, w] or [h, w, 3]
    """
    values = np.asarray(picture)
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3):
        raise ValueError(f"a picture has bytes [h, w] or [h, w, 3], got {values.dtype} {list(values.shape)}")
    height, width = values.shape[:2]
    rows = values.reshape(height, -1)
    body = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if values.ndim == 2 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b""))
    return base64.b64encode(SIGNATURE + b"".join(_chunk(*chunk) for chunk in chunks)).decode()


def unpacked(text: str) -> Picture:
    """Shapes: -> [h, w, 3]"""
    content = base64.b64decode(text)
    try:
        width, height, depth, colour = struct.unpack(">IIBB", content[16:26])
        size = struct.unpack(">I", content[33:37])[0]
        channels = {0: 1, 2: 3}[colour]
        rows = np.frombuffer(zlib.decompress(content[41 : 41 + size]), np.uint8).reshape(height, 1 + width * channels)
        if not content.startswith(SIGNATURE) or depth != 8 or rows[:, 0].any():
            raise ValueError(content[:8])
    except (KeyError, ValueError, struct.error, zlib.error):
        raise ValueError("a picture in the numbers of a figure is not as torchcaps writes them") from None
    values = rows[:, 1:].reshape(height, width, channels)
    return np.broadcast_to(values, (height, width, 3)).copy()


def columns_for(height: int, width: int) -> int:
    """How many pictures of this shape go side by side."""
    return 8 if width < 1.5 * height else 4


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
