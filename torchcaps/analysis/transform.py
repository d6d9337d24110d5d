"""Images moved by exact amounts: turned, shifted, scaled and sheared about their centre, and noise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DARK = 0.1  # mean brightness of the frame below which what comes in from outside is black


def moved(
    images: Tensor,
    *,
    degrees: Tensor | float = 0.0,
    right: Tensor | float = 0.0,
    down: Tensor | float = 0.0,
    scale: Tensor | float = 1.0,
    shear: Tensor | float = 0.0,
    fill: str | None = None,
) -> Tensor:
    """Scaled, sheared, turned and then shifted, in one bilinear resampling. Amounts are for all images or for each.

    Args:
        degrees: counter-clockwise.
        right, down: pixels.
        scale: 2 shows everything twice as large.
        shear: degrees by which upright lines lean to the right.
        fill: "zeros" or "border" for what comes in from outside; zeros where the images have a dark frame, if not said.

    Shapes: images [n, c, h, w], amounts [] or [n] -> [n, c, h, w]
    """
    count, _, height, width = images.shape
    like: dict[str, Any] = {"dtype": torch.float64, "device": images.device}
    angle, lean, by, x, y = (
        torch.as_tensor(value, **like).expand(count) for value in (degrees, shear, scale, right, down)
    )
    if bool((by <= 0).any()):
        raise ValueError(f"a scale is above 0, got {float(by.min()):g}")
    angle, lean = angle * (math.pi / 180), lean * (math.pi / 180)
    cos, sin, tan = angle.cos(), angle.sin(), lean.tan()
    # what is seen at p comes from shear^-1 R^-1 (p - shift) / scale, all about the centre, y pointing down
    from_x = torch.stack([(cos + tan * sin) / by, (-sin + tan * cos) / by], -1)
    from_y = torch.stack([sin / by, cos / by], -1)
    rows = torch.arange(height, **like) - (height - 1) / 2
    columns = torch.arange(width, **like) - (width - 1) / 2
    p = torch.stack(
        [
            (columns - x[:, None])[:, None, :].expand(count, height, width),
            (rows - y[:, None])[:, :, None].expand(count, height, width),
        ],
        -1,
    )
    source = torch.stack([(p * from_x[:, None, None]).sum(-1), (p * from_y[:, None, None]).sum(-1)], -1)
    grid = 2 * source / torch.tensor([width, height], **like)
    mode = ("zeros" if dark_frame(images) else "border") if fill is None else fill
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode=mode, align_corners=False)


def add_noise(images: Tensor, deviation: float, seed: int = 0) -> Tensor:
    """Gaussian noise on pixels in [0, 1], cut there; the same for the same seed on every machine's CPU."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator).to(images)
    return (images + deviation * noise).clamp(0, 1)


def dark_frame(images: Tensor) -> bool:
    """Whether the outermost pixels are black by and large."""
    frame = (images[..., :1, :], images[..., -1:, :], images[..., :, :1], images[..., :, -1:])
    return float(torch.cat([part.flatten() for part in frame]).double().mean()) < DARK
