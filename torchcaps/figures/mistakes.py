"""The worst mistakes, each with the lengths of its capsules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchcaps.figures.style import WIDTH, drawing, paste, sheet, shortened, theme
from torchcaps.pictures import Picture, unpacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = 10  # classes up to which each has a bar; of more the longest have, the labels and what was said
COLUMNS = 2
HEAD, PICTURE, GAP, FOOT = 0.24, 1.08, 0.2, 0.22  # inches
LETTER = 0.066  # inches, of a class name


class Case(NamedTuple):
    """An image that was taken for something else. `values` are the lengths of its capsules [j], `number` its place."""

    picture: Picture
    labels: tuple[int, ...]
    chosen: tuple[int, ...]
    values: Sequence[float]
    number: int


def mistakes(
    cases: Sequence[Case], names: Sequence[str], *, measure: str = "capsule length", dark: bool = False
) -> Figure:
    """Two cases side by side. Blue bars are the labels', orange ones what was said instead.

    Args:
        measure: what the bars are, for the line below.
    """
    colours = theme(dark)
    down, across = HEAD + PICTURE + GAP, WIDTH / COLUMNS
    height = math.ceil(len(cases) / COLUMNS) * down + FOOT if cases else 1.0
    with drawing(height, dark) as figure:
        axes = sheet(figure)
        if not cases:
            axes.text(WIDTH / 2, height / 2, "There are no mistakes to show.", ha="center", va="center", fontsize=10)
        for position, case in enumerate(cases):
            row, column = divmod(position, COLUMNS)
            _draw(axes, case, names, column * across + 0.1, row * down, across - 0.1, dark)
        if cases:
            note = f"Bars: {measure} from 0 to 1; blue is the label's, orange what was predicted instead."
            axes.text(0.1, height - 0.08, note, fontsize=7, color=colours.muted)
    return figure


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """Of the numbers that `analysis.examples.mistakes` gives."""
    return mistakes(cases_of(numbers), numbers["names"], measure=numbers["measure"], dark=dark)


def cases_of(numbers: Mapping[str, Any]) -> list[Case]:
    return [
        Case(unpacked(each["picture"]), tuple(each["labels"]), tuple(each["chosen"]), each["values"], each["number"])
        for each in numbers["cases"]
    ]


def _draw(axes: Axes, case: Case, names: Sequence[str], x: float, y: float, width: float, dark: bool) -> None:
    colours = theme(dark)
    label, said = (" and ".join(names[k] for k in which) or "nothing" for which in (case.labels, case.chosen))
    label, said = (shortened(words, max(8, 24 - len(other))) for words, other in ((label, said), (said, label)))
    parts = [("label ", colours.muted), (label, colours.right), (", predicted ", colours.muted), (said, colours.wrong)]
    _line(axes, x, y + HEAD - 0.06, parts)
    y += HEAD
    number = f"test image {case.number:,}"
    axes.text(x, y + PICTURE + 0.03, number, fontsize=6, color=colours.muted, va="top")

    shown = _shown(case)
    words = [shortened(names[k], 10) for k in shown]
    letters = max(map(len, words))
    side = PICTURE if letters < 4 else 0.8 * PICTURE  # long names need the room
    paste(axes, case.picture, x, y, side, PICTURE)
    lengths = np.array([float(case.values[k]) for k in shown])
    left = x + side + 0.1 + LETTER * letters
    track = x + width - 0.32 - left
    pitch = PICTURE / max(8, len(shown))
    middles = y + pitch * (np.arange(len(shown)) + 0.5)
    marks = [colours.right if k in case.labels else colours.wrong if k in case.chosen else colours.muted for k in shown]
    axes.barh(middles, track, 0.62 * pitch, left, color=colours.grid, label="track")
    axes.barh(middles, track * lengths.clip(max=1), 0.62 * pitch, left, color=marks, label=number)
    for k, middle, word, length, mark in zip(shown, middles, words, lengths, marks, strict=True):
        axes.text(left - 0.04, middle, word, fontsize=7, color=mark, ha="right", va="center_baseline")
        if k in case.labels or k in case.chosen:
            end = left + track + 0.04
            axes.text(end, middle, f"{length:.2f}", fontsize=7, color=mark, va="center_baseline")


def _shown(case: Case) -> list[int]:
    """The classes that have a bar: all in order, or the longest."""
    classes = len(case.values)
    if classes <= BARS:
        return list(range(classes))
    named = set(case.labels) | set(case.chosen)
    order = sorted(range(classes), key=lambda k: (k not in named, -case.values[k], k))[: max(8, len(named))]
    return sorted(order, key=lambda k: (-case.values[k], k))


def _line(axes: Axes, x: float, y: float, parts: Sequence[tuple[str, str]]) -> None:
    """One line of text in several colours: each part begins where the one before it ends."""
    last: Any = None
    for text, colour in parts:
        place: Any = {"xy": (x, y)} if last is None else {"xy": (1, y), "xycoords": (last, "data")}
        last = axes.annotate(text, **place, fontsize=7.5, color=colour)
