"""A capsule bent dimension by dimension: a row for each, a column for each amount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.figures.pictures import unpacked
from torchcaps.figures.style import MINUS, WIDTH, drawing, paste, sheet, theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEFT, BARS, GAP, HEAD, FOOT = 0.42, 0.62, 0.02, 0.56, 0.3  # inches


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    colours = theme(dark)
    amounts, shown, pictures = numbers["amounts"], numbers["shown"], numbers["pictures"]
    first = unpacked(pictures[0][0])
    cell = (WIDTH - LEFT - BARS - 0.1) / len(amounts)
    high = cell * min(1.0, first.shape[0] / first.shape[1])
    height = HEAD + high * len(shown) + FOOT
    most = max(numbers["effect"]) or 1.0
    with drawing(height, dark) as figure:
        axes = sheet(figure)
        title = f"Class {numbers['class']}, test image {numbers['image']:,}"
        axes.text(0.1, 0.2, title, fontsize=9.5, weight="bold")
        for column, amount in enumerate(amounts):
            word = "0" if not amount else f"{amount:+.2f}".replace("-", MINUS)
            middle = LEFT + (column + 0.5) * cell
            size = 6.5 if max(map(abs, amounts)) < 10 else 5.5
            axes.text(middle, HEAD - 0.06, word, fontsize=size, color=colours.muted, ha="center")
        bars = LEFT + cell * len(amounts) + 0.08
        axes.text(bars, HEAD - 0.06, "change", fontsize=6.5, color=colours.muted)
        for row, dimension in enumerate(shown):
            y = HEAD + row * high
            axes.text(LEFT - 0.07, y + high / 2, str(dimension + 1), fontsize=7.5, color=colours.muted, ha="right",
                      va="center")  # fmt: skip
            for column, each in enumerate(pictures[row]):
                paste(axes, unpacked(each), LEFT + column * cell, y, cell - GAP, high - GAP)
            share = numbers["effect"][dimension] / most
            axes.barh(y + high / 2, (BARS - 0.12) * share, 0.3 * high, bars, color=colours.right, label=f"{dimension}")
        x = LEFT + (len(amounts) // 2) * cell - GAP / 2
        axes.plot([x, x + cell, x + cell, x, x], [HEAD - GAP / 2] * 2 + [HEAD + high * len(shown) - GAP / 2] * 2
                  + [HEAD - GAP / 2], color=colours.wrong, linewidth=0.9, label="as it is")  # fmt: skip
        left_out = len(numbers["effect"]) - len(shown)
        more = f", the {len(shown)} of {len(numbers['effect'])} that change most" if left_out else ""
        scale = "" if numbers["scale"] == 1 else f", to 0.25 times {numbers['scale_is'].partition(',')[0]}"
        note = f"Rows: dimensions{more}. Columns: what is added{scale}. Framed: as it is."
        axes.text(0.1, height - 0.09, note, fontsize=7, color=colours.muted)
    return figure
