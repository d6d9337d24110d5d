"""A capsule bent dimension by dimension: a row for each, a column for each amount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import MINUS, WIDTH, drawing, paste, sheet, shortened, theme
from torchcaps.pictures import unpacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, BARS, GAP, HEAD, FOOT = 0.42, 0.62, 0.02, 0.56, 0.3  # inches


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.perturb.perturbations` gives: a block for each run, one below the other."""
    runs = numbers["runs"]
    heights = [HEAD + _cell(run)[1] * len(run["shown"]) + FOOT for run in runs]
    with drawing(sum(heights), dark) as figure:
        axes, top = sheet(figure), 0.0
        for run, height in zip(runs, heights, strict=True):
            name = f"{shortened(run['name'], 40)}: class" if len(runs) > 1 else "Class"
            axes.text(
                0.1, top + 0.2, f"{name} {run['class']}, test image {run['image']:,}", fontsize=9.5, weight="bold"
            )
            _draw(axes, run, top, dark)
            top += height
            axes.text(0.1, top - 0.09, _note(run), fontsize=7, color=theme(dark).muted)
    return figure


def _draw(axes: Axes, run: Mapping[str, Any], top: float, dark: bool) -> None:
    colours = theme(dark)
    amounts, shown, pictures = run["amounts"], run["shown"], run["pictures"]
    (cell, high), top = _cell(run), top + HEAD
    most = max(run["effect"]) or 1.0
    for column, amount in enumerate(amounts):
        word = "0" if not amount else f"{amount:+.2f}".replace("-", MINUS)
        size = 6.5 if max(map(abs, amounts)) < 10 else 5.5
        middle = LEFT + (column + 0.5) * cell
        axes.text(middle, top - 0.06, word, fontsize=size, color=colours.muted, ha="center")
    bars = LEFT + cell * len(amounts) + 0.08
    axes.text(bars, top - 0.06, "change", fontsize=6.5, color=colours.muted)
    for row, dimension in enumerate(shown):
        y = top + row * high
        axes.text(LEFT - 0.07, y + high / 2, str(dimension + 1), fontsize=7.5, color=colours.muted, ha="right",
                  va="center")  # fmt: skip
        for column, each in enumerate(pictures[row]):
            paste(axes, unpacked(each), LEFT + column * cell, y, cell - GAP, high - GAP)
        share = run["effect"][dimension] / most
        axes.barh(y + high / 2, (BARS - 0.12) * share, 0.3 * high, bars, color=colours.right, label=f"{dimension}")
    x, upper, lower = LEFT + (len(amounts) // 2) * cell - GAP / 2, top - GAP / 2, top + high * len(shown) - GAP / 2
    axes.plot([x, x + cell, x + cell, x, x], [upper, upper, lower, lower, upper], color=colours.wrong, linewidth=0.9,
              label="as it is")  # fmt: skip


def _cell(run: Mapping[str, Any]) -> tuple[float, float]:
    """Width and height of a picture with the gap beside it, in inches."""
    first = unpacked(run["pictures"][0][0])
    cell = (WIDTH - LEFT - BARS - 0.1) / len(run["amounts"])
    return cell, cell * min(1.0, first.shape[0] / first.shape[1])


def _note(run: Mapping[str, Any]) -> str:
    shown, dims = len(run["shown"]), len(run["effect"])
    more = f", the {shown} of {dims} that change most" if shown < dims else ""
    scale = "" if run["scale"] == 1 else f", to 0.25 times {run['scale_is'].partition(',')[0]}"
    return f"Rows: dimensions{more}. Columns: what is added{scale}. Framed: as it is."
