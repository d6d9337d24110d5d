"""Images of any number of channels as pictures that can be shown."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]  # [h, w, 3]


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
