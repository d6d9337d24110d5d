"""Parameters and operations, ours beside the paper's (Mazzia's Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, theme, title
from torchcaps.figures.training import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Operations are two for each multiply-add, of one image and without the decoder: so counted, CapsNet and\n"
    "Efficient-CapsNet come out as printed. AR-CapsNet and EM, built as their own papers say, do not, and how\n"
    "these two were counted is not told."
)


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.costs.table_1` gives."""
    colours, rows = theme(dark), numbers["rows"]
    names = [row["method"] for row in rows]
    places = range(len(rows))
    height = 4.0
    with drawing(height, dark) as figure:
        for key, words, unit, left in (
            ("parameters", "Parameters (millions)", 1e6, 0.23),
            ("operations", "Operations (G)", 1e9, 0.64),
        ):
            axes = figure.add_axes((left, 1 - 2.1 / height, 0.34, 1.75 / height))
            title(axes, words)
            ours = [_counted(row, key) / unit for row in rows]
            paper = [row[f"paper_{key}"] / unit for row in rows]
            axes.barh([y - 0.19 for y in places], ours, 0.36, color=colours.right, label="ours")
            axes.barh([y + 0.19 for y in places], paper, 0.36, color=colours.muted, alpha=0.55, label="the paper")
            axes.set_yticks(places, names if key == "parameters" else [""] * len(rows), fontsize=7.5)
            axes.invert_yaxis()
            axes.grid(False, axis="y")
            if key == "operations":
                axes.legend(loc="lower right", fontsize=7.5)
        head = ("", "parameters", "paper", "operations", "paper", "saved", "paper")
        lines = [
            (
                row["method"],
                f"{_counted(row, 'parameters'):,}",
                f"{row['paper_parameters'] / 1000:,.0f}K",
                f"{row['operations'] / 1e9:.3f} G",
                f"{row['paper_operations'] / 1e9:.3f} G",
                _percent(row["gain"]),
                _percent(row["paper_gain"]),
            )
            for row in rows
        ]
        below = figure.add_axes((0.025, 0.42 / height, 0.95, 1.1 / height))
        table(below, head, lines, dark, (0.28, 0.14, 0.1, 0.14, 0.12, 0.12, 0.1))
        figure.text(0.025, 0.22 / height, NOTE, fontsize=6.5, color=colours.muted, va="center", linespacing=1.4)
    return figure


def _counted(row: Mapping[str, Any], key: str) -> int:
    """With the decoder's parameters where the paper's number has them."""
    value: int = row[key]
    return value + (row["decoder"] if key == "parameters" and row["decoder_in_paper"] else 0)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else ""
