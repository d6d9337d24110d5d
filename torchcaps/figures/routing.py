"""What routing does, layer by layer: how much it still changes, and how well the votes agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, shortened, theme, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPOCHS = 4  # lines in a panel


def routing(rows: Sequence[Mapping[str, Any]], *, dark: bool = False) -> Figure:
    """On the left the mean change of the logits by iteration, on the right the votes by cosine with their parent.

    Args:
        rows: of routing.jsonl, one an epoch; a few are drawn, the first and the last among them.
    """
    layers = list(rows[-1]["layers"]) if rows else []
    if not layers:
        raise ValueError("the routing log names no layer that routes votes")
    chosen = sorted({round(k * (len(rows) - 1) / (EPOCHS - 1)) for k in range(EPOCHS)})
    some = [rows[k] for k in chosen]
    with drawing(0.35 + 1.55 * len(layers), dark, layout="constrained") as figure:
        grid = figure.subplots(len(layers), 2, squeeze=False)
        for (left, right), name in zip(grid, layers, strict=True):
            kind = some[-1]["layers"][name].get("routing", "").removesuffix("Routing")
            title(left, shortened(f"{name}, {kind}", 28))
            title(right, "Votes by cosine")
            _changes(left, some, name, dark)
            _cosines(right, some, name, dark)
            left.set_ylabel("change of logits")
        grid[-1, 0].set_xlabel("iteration")
        grid[-1, 1].set_xlabel("cosine")
    return figure


def _changes(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, dark: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn = False
    for row, shade in zip(rows, _shades(len(rows), dark), strict=True):
        values = [math.nan if value is None else value for value in row["layers"].get(name, {}).get("logits", [])]
        if values:
            drawn = True
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, "o-", color=shade, label=f"epoch {row.get('epoch', '')}".strip())
    if not drawn:
        axes.text(0.5, 0.5, "no iterations", transform=axes.transAxes, ha="center", color=theme(dark).muted)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(loc="best", fontsize=7)


def _cosines(axes: Axes, rows: Sequence[Mapping[str, Any]], name: str, dark: bool) -> None:
    for row, shade in zip(rows, _shades(len(rows), dark), strict=True):
        counts = row["layers"].get(name, {}).get("cosine", [])
        if total := sum(counts):
            label = f"epoch {row.get('epoch', '')}".strip()
            axes.stairs([count / total for count in counts], row["cosine_edges"], color=shade, label=label)
    axes.set(xlim=(-1, 1), yticks=[])
    axes.set_ylim(bottom=0)


def _shades(count: int, dark: bool) -> list[Any]:
    """From pale to full, the last row being the strongest."""
    from matplotlib.colors import to_rgb

    paper, ink = (to_rgb(colour) for colour in (theme(dark).paper, theme(dark).right))
    strengths = [0.3 + 0.7 * (k + 1) / count for k in range(count)]
    return [tuple(s * b + (1 - s) * a for a, b in zip(paper, ink, strict=True)) for s in strengths]
