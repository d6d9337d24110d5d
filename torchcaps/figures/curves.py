"""How a run went: loss terms, validation error and learning rate by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, theme, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_TERMS = {"epoch", "step", "lr", "loss", "validation_error"}  # columns of metrics.csv that are no part of the loss
MARKED = 40  # epochs up to which each is a point


def curves(rows: Sequence[Mapping[str, Any]], *, selected: int | None = None, dark: bool = False) -> Figure:
    """One panel under the other, those of which there is something to show.

    Args:
        rows: of metrics.csv; a value may be missing or None.
        selected: the epoch, from 1, whose weights were kept, marked where it is not the last.
    """
    if not rows:
        raise ValueError("there is nothing to draw before the first epoch is over")
    colours = theme(dark)
    epochs = [float(row["epoch"]) for row in rows]
    terms = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in NO_TERMS]
    losses = {name: _column(rows, name) for name in (["loss", *terms] if len(terms) != 1 else terms)}
    validation = [100 * value for value in _column(rows, "validation_error")]
    rates = _column(rows, "lr")
    panels = [("loss", 1.9)] + [("error", 1.6)] * _any(validation) + [("lr", 1.0)] * _any(rates)
    with drawing(sum(height for _, height in panels) + 0.3, dark, layout="constrained") as figure:
        heights = [height for _, height in panels]
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (kind, _) in zip(grid, panels, strict=True):
            if kind == "loss":
                title(axes, "Loss" if len(losses) > 1 else f"Loss: {_words(next(iter(losses)))}")
                for (name, values), colour in zip(losses.items(), _cycle(colours.lines), strict=False):
                    wide = 1.6 if name != "loss" or len(losses) == 1 else 1.1
                    _line(axes, epochs, values, colour, "total" if name == "loss" else _words(name), wide)
                if len(losses) > 1:
                    axes.legend(loc="best", ncols=1 if len(losses) < 5 else 2)
                _scale(axes, [value for values in losses.values() for value in values])
            elif kind == "error":
                title(axes, "Validation error (%)")
                _line(axes, epochs, validation, colours.wrong)
                _scale(axes, validation)
            else:
                title(axes, "Learning rate")
                _line(axes, epochs, rates, colours.muted)
                axes.set_ylim(0, 1.15 * max(value for value in rates if math.isfinite(value)))
                axes.ticklabel_format(axis="y", style="plain", useOffset=False)
            if selected is not None and selected != rows[-1]["epoch"]:
                axes.axvline(selected, color=colours.right, linewidth=1, linestyle=(0, (4, 3)))
        if selected is not None and selected != rows[-1]["epoch"]:
            where = (selected, 1.0)
            grid[-1].annotate(
                "selected", where, (4, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
                fontsize=8, color=colours.right, va="top",
            )  # fmt: skip
        bottom = grid[-1]
        bottom.set_xlabel("epoch")
        bottom.set_xlim(epochs[0] - 0.5, epochs[0] + 0.5) if len(epochs) == 1 else bottom.margins(x=0.03)
        from matplotlib.ticker import MaxNLocator

        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _line(axes: Axes, x: list[float], y: list[float], colour: str, label: str = "", width: float = 1.6) -> None:
    marker = "o" if len(x) <= MARKED else ""
    axes.plot(x, y, color=colour, label=label or None, linewidth=width, marker=marker, clip_on=False)


def _scale(axes: Axes, values: list[float]) -> None:
    """Logarithmic where the values span more than a factor of twenty."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    known = [value for value in values if math.isfinite(value)]
    if known and min(known) > 0 and max(known) > 20 * min(known):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(known) < 200 * min(known) else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif known and min(known) >= 0:
        axes.set_ylim(0, 1.08 * max(known) or 1)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [row.get(name) for row in rows]
    return [math.nan if value is None or value == "" else float(value) for value in values]


def _any(values: list[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cycle(colours: Sequence[str]) -> list[str]:
    return list(colours) * 10
