"""What is left of the accuracy when test images are turned, shifted, scaled, sheared or made noisy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import accuracy, take, whole
from torchcaps.analysis.settings import names_of
from torchcaps.analysis.transform import add_noise, moved
from torchcaps.runs import Opened

LEVELS: dict[str, tuple[float, ...]] = {
    "rotation": (0, 10, 20, 30, 40, 50, 60),  # degrees either way
    "shift": (0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.24),  # of a side, in one of four directions
    "scale": (0.5, 0.6, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 1.75),
    "shear": (0, 10, 20, 30, 40, 50),  # degrees either way
    "noise": (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),  # deviation, of pixels in [0, 1]
}


def changed(images: Tensor, way: str, level: float) -> Tensor:
    """Half of the images one way and half the other; shifts go right, down, left and up in turn.

    Shapes: [n, c, h, w] -> [n, c, h, w]
    """
    place = torch.arange(len(images))
    sign = 1.0 - 2.0 * (place % 2)
    if way == "noise":
        return add_noise(images, level)
    if way == "scale":
        return moved(images, scale=level)
    if way == "shift":
        turn = place % 4 * (torch.pi / 2)
        height, width = images.shape[2:]
        return moved(images, right=level * width * turn.cos(), down=level * height * turn.sin())
    if way == "rotation":
        return moved(images, degrees=level * sign)
    if way == "shear":
        return moved(images, shear=level * sign)
    raise ValueError(f"there is no way {way!r} of changing images; there are {', '.join(LEVELS)}")


def robustness(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Accuracies of each run on the same test images, changed by more and more."""
    first = runs[0]
    for run in runs:
        if run.class_names != first.class_names or run.recipe.data != first.recipe.data:
            raise ValueError(
                f"{run.folder} was trained on {run.recipe.data} and {first.folder} on {first.recipe.data}; "
                "a curve needs runs on the same data"
            )
    count = whole(options, "images")
    lines = []
    for run, name in zip(runs, names_of(runs), strict=True):
        sample = take(run, count)
        found = {
            way: [
                accuracy(run.model, sample.seen(changed(sample.images, way, level)), sample.labels) for level in levels
            ]
            for way, levels in LEVELS.items()
        }
        lines.append({"name": name, "model": run.recipe.model, "images": len(sample), "accuracy": found})
    return {"data": first.recipe.data, "levels": {way: list(levels) for way, levels in LEVELS.items()}, "lines": lines}
