"""Overlaid digits in two colours: the image, what the two capsules explain of it, and the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.figures.style import WIDTH, drawing, paste, sheet, shortened, theme
from torchcaps.pictures import Picture, unpacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, SECOND = (255, 116, 46), (40, 160, 255)  # add up to near white where both digits are
LEFT, GAP, HEAD, LINE, FOOT, MOST = 0.66, 0.05, 0.5, 0.15, 0.34, 6  # inches; columns in a row


def overlaid(first: Picture, second: Picture) -> Picture:
    """Two pictures over each other, each in its colour.

    Shapes: [h, w, 3] both -> [h, w, 3]
    """
    parts = (
        picture.max(axis=2, keepdims=True) / 255.0 * np.array(colour)
        for picture, colour in zip((first, second), (FIRST, SECOND), strict=True)
    )
    return np.clip(np.round(sum(parts)), 0, 255).astype(np.uint8)


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    columns = numbers["columns"]
    if not columns:
        raise ValueError("no image of the sample can be shown: none is recognised, and none has one digit right")
    colours = theme(dark)
    cell = (WIDTH - LEFT - 0.1) / MOST
    side = cell - GAP
    strips = 3 if columns[0]["theirs"] else 2
    down = strips * (side + GAP) + 2 * LINE + 0.2
    groups = [columns[k : k + MOST] for k in range(0, len(columns), MOST)]
    height = HEAD + len(groups) * down + FOOT
    with drawing(height, dark) as figure:
        axes = sheet(figure)
        axes.text(0.1, 0.2, "Two digits taken apart", fontsize=9.5, weight="bold")
        share = numbers["overlap"]
        found = f"; {100 * share:.0f} % of the pixels of a digit and its picture are of both" if share else ""
        words = f"{numbers['recognised']:,} of {numbers['images']:,} pairs recognised{found}."
        axes.text(0.1, 0.38, words, fontsize=7.5, color=colours.muted)
        for number, group in enumerate(groups):
            top = HEAD + number * down
            for strip, name in enumerate(("input", "capsules", "truth")[:strips]):
                y = top + strip * (side + GAP) + side / 2
                axes.text(0.1, y, name, fontsize=7.5, color=colours.muted, va="center")
            for place, column in enumerate(group):
                _column(axes, column, numbers["names"], LEFT + place * cell, top, side, dark)
        notes = "L: labels, R: reconstructed. P: from the prediction, which is wrong."
        axes.text(0.1, height - 0.2, notes, fontsize=7, color=colours.muted)
        notes = "*: the second capsule is of a digit that is neither there nor predicted."
        axes.text(0.1, height - 0.07, notes, fontsize=7, color=colours.muted)
    return figure


def _column(
    axes: Any, column: Mapping[str, Any], names: Sequence[str], x: float, y: float, side: float, dark: bool
) -> None:
    colours = theme(dark)
    paste(axes, unpacked(column["input"]), x, y, side, side)
    for strip, key in enumerate(("ours", "theirs"), 1):
        if column[key]:
            first, second = map(unpacked, column[key])
            paste(axes, overlaid(first, second), x, y + strip * (side + GAP), side, side)
    bottom = y + (3 if column["theirs"] else 2) * (side + GAP) + LINE - 0.06
    labels, ours = column["labels"], column["reconstructed"]
    mark = f" {column['mark']}" if column["mark"] else ""
    axes.text(x + side / 2, bottom, f"L: {_pair(labels, names)}", fontsize=7, color=colours.muted, ha="center")
    tone = colours.wrong if column["mark"] else colours.right
    axes.text(x + side / 2, bottom + LINE, f"R: {_pair(ours, names)}{mark}", fontsize=7, color=tone, ha="center")


def _pair(classes: Sequence[int], names: Sequence[str]) -> str:
    return f"({', '.join(shortened(names[k], 5) for k in classes)})"
