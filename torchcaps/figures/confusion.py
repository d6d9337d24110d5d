"""Which classes are taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.figures.style import WIDTH, drawing, shortened, theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITTEN = 20  # classes up to which the cells have their counts written in


def confusion(counts: Any, names: Sequence[str], *, dark: bool = False) -> Figure:
    """Rows are labels, columns what was said, and the number beside a row its error.

    The two kinds of cells have scales of their own, as a good network's mistakes would not show on one: the diagonal is
    shaded by the share of its row, the others by their share of the row against the largest such share.

    Shapes: counts [j, j], as `evaluate.confusion_matrix` gives them
    """
    counts = np.asarray(counts, dtype=np.float64)
    if counts.shape != (len(names), len(names)):
        raise ValueError(f"{len(names)} classes have {len(names)} x {len(names)} cells, got {list(counts.shape)}")
    colours, classes = theme(dark), len(names)
    written = classes <= WRITTEN
    totals = counts.sum(axis=1)
    shares = counts / np.maximum(totals, 1e-12)[:, None]
    size = 8.0 if classes <= 10 else 6.0
    width = WIDTH if classes <= 15 else min(12.0, max(7.0, 1.8 + 0.1 * classes))
    with drawing(width - 0.3, dark, width=width, layout="constrained") as figure:
        axes = figure.add_subplot()
        axes.imshow(_shades(shares, dark), aspect="equal")
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(False)
        ticks = [shortened(name, 14) for name in names]
        turned = max(map(len, ticks)) > (4 if written else 1)
        axes.set_xticks(range(classes), ticks, fontsize=size, rotation=90 if turned else 0, color=colours.ink)
        axes.set_yticks(range(classes), ticks, fontsize=size, color=colours.ink)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        for row in range(classes):
            wrong = 1 - shares[row, row]
            if totals[row]:
                axes.annotate(
                    f"{100 * wrong:.1f} %", (1.01, row), xycoords=("axes fraction", "data"), va="center",
                    fontsize=min(size, 7), color=colours.wrong if wrong else colours.muted, annotation_clip=False,
                )  # fmt: skip
            for column in range(classes) if written else ():
                if counts[row, column]:
                    strong = row == column and shares[row, column] > 0.5
                    axes.text(
                        column, row, _count(counts[row, column]), ha="center", va="center",
                        fontsize=size if counts.max() < 10_000 else size - 1.5,
                        color=colours.paper if strong else colours.ink,
                    )  # fmt: skip
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        if classes <= 50:
            axes.grid(which="minor", color=colours.paper, linewidth=2 if written else 0.5)
    return figure


def most_confused(counts: Any, most: int = 10) -> list[tuple[int, int, float]]:
    """Label, what was said instead, and how often; the most frequent first."""
    counts = np.asarray(counts, dtype=np.float64)
    pairs = [(r, c, float(counts[r, c])) for r, c in zip(*np.nonzero(counts), strict=True) if r != c]
    return [(int(r), int(c), n) for r, c, n in sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1]))[:most]]


def _shades(shares: Any, dark: bool) -> Any:
    """Shapes: [j, j] -> [j, j, 3]"""
    from matplotlib.colors import to_rgb

    colours = theme(dark)
    paper, grid, right, wrong = (
        np.array(to_rgb(colour)) for colour in (colours.paper, colours.grid, colours.right, colours.wrong)
    )
    diagonal = np.eye(len(shares), dtype=bool)
    others = np.where(diagonal, 0, shares)
    scaled = 0.65 * np.sqrt(others / max(float(others.max()), 1e-12))
    empty = 0.45 * grid + 0.55 * paper
    shades = (1 - scaled)[..., None] * empty + scaled[..., None] * wrong
    strength = (0.15 + 0.85 * shares[diagonal])[:, None]
    shades[diagonal] = (1 - strength) * empty + strength * right
    return shades


def _count(value: float) -> str:
    return f"{round(value):,}" if abs(value - round(value)) < 1e-9 else f"{value:,.1f}"
