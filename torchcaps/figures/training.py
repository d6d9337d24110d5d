"""How several runs went, on one plot: losses, accuracies, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, from_zero, shortened, theme, title, whole_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKED = 40  # points up to which each is marked


def draw_losses(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.histories.losses` gives."""
    series = numbers["series"]
    with drawing(2.6, dark, layout="constrained") as figure:
        axes = figure.add_subplot()
        title(axes, f"Training loss on {numbers['data']}")
        stepped = all(step is not None for each in series for step in each["steps"])
        for each, colour in zip(series, _colours(dark), strict=False):
            count = each["iterations"]
            name = shortened(each["name"], 34)
            label = name if "iterations" in name else f"{name}, iterations {count}"
            _line(axes, each["steps" if stepped else "epochs"], each["loss"], colour, label)
        _log(axes, [value for each in series for value in each["loss"]])
        batch = f" of {numbers['batch']} images" if numbers["batch"] else ""
        axes.set_xlabel(f"training step{batch}" if stepped else "epoch")
        whole_ticks(axes)
        axes.legend(loc="best", fontsize=7.5)
    return figure


def draw_feedback(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.histories.feedback` gives: the same network in one colour, with feedback a full line."""
    networks = list(dict.fromkeys(each["network"] for each in numbers["series"]))
    colours = dict(zip(networks, _colours(dark)[1:], strict=False))
    with drawing(2.9, dark, layout="constrained") as figure:
        axes = figure.add_subplot()
        title(axes, "Training loss with and without feedback")
        seen: set[str] = set()
        for each in numbers["series"]:
            kind = each["feedback"]
            label = shortened(each["network"], 28) + (", no feedback" if kind is None else f", {str(kind).upper()}")
            style = (0, (3, 2)) if kind is None else "-"
            _line(axes, each["epochs"], each["loss"], colours[each["network"]], "" if label in seen else label, style)
            seen.add(label)
        _log(axes, [value for each in numbers["series"] for value in each["loss"]])
        axes.legend(loc="best", fontsize=7.5)
        whole_ticks(axes)
        words = [
            f"{shortened(each['network'], 28)}: error {100 * each['without']:.2f} to {100 * each['with']:.2f} %, "
            f"{100 * each['gain']:.0f} % of it gone"
            for each in numbers["gains"]
        ]
        paper = ", ".join(f"{name} {100 * gain:.0f} %" for name, gain in numbers["paper"].items())
        axes.set_xlabel("\n".join(["epoch", *words, f"(in the paper: {paper})"]), fontsize=8)
    return figure


def draw_iterations(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.costs.by_iteration` gives: accuracy above, memory and time below."""
    lines = numbers["lines"]
    with drawing(3.9, dark, layout="constrained") as figure:
        parts = figure.subplot_mosaic([["accuracy", "accuracy"], ["memory", "time"]], height_ratios=(1.5, 1))
        for line, colour in zip(lines, _colours(dark)[1:], strict=False):
            points = line["points"]
            steps = [point["iterations"] for point in points]
            accuracies = [100 * point["accuracy"] for point in points]
            how = "" if line["trained"] else f" (trained with {line['own']})"
            style = "-" if line["trained"] else (0, (3, 2))
            label = shortened(line["name"], 40) + how
            _line(parts["accuracy"], steps, accuracies, colour, label, style)
            spread = [100 * (point["spread"] or 0) for point in points]
            if any(spread):
                low, high = ([a + sign * s for a, s in zip(accuracies, spread, strict=True)] for sign in (-1, 1))
                parts["accuracy"].fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            _line(parts["memory"], steps, [point["memory"] / 2**20 for point in points], colour)
            _line(parts["time"], steps, [point["milliseconds"] for point in points], colour)
        title(parts["accuracy"], "Test accuracy (%)")
        small: dict[str, Any] = {"loc": "left", "fontsize": 8}
        parts["memory"].set_title(f"MiB to train, batch {numbers['batch']}", **small)
        parts["time"].set_title(f"ms for an image, {numbers['device']}", **small)
        parts["accuracy"].legend(loc="best", fontsize=7.5)
        for name, axes in parts.items():
            whole_ticks(axes)
            if name != "accuracy":
                from_zero(axes)
                axes.set_xlabel("iterations")
    return figure


def draw_convergence(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.costs.convergence` gives."""
    series = numbers["series"]
    colours = _colours(dark)[1:]
    with drawing(2.7 + 0.21 * (len(series) + 2), dark, layout="constrained") as figure:
        axes, below = figure.subplots(2, 1, height_ratios=(2.5, 0.21 * (len(series) + 2)))
        title(axes, "Validation accuracy (%)")
        for each, colour in zip(series, colours, strict=False):
            values = [None if value is None else 100 * value for value in each["accuracy"]]
            _line(axes, each["epochs"], values, colour, shortened(each["name"], 40))
        axes.set_xlabel("epoch")
        whole_ticks(axes)
        head = (
            f"batch {numbers['batch']}, {numbers['device']}",
            "test %",
            "paper %",
            "parameters",
            "memory",
            "an image",
        )
        rows = [
            (
                shortened(each["name"], 28),
                "" if each["test"] is None else f"{100 * each['test']:.2f}",
                each["paper"],
                f"{each['parameters']:,}",
                f"{each['memory'] / 2**20:,.0f} MiB",
                f"{each['milliseconds']:.2f} ms",
            )
            for each in series
        ]
        table(below, head, rows, dark, (0.38, 0.1, 0.12, 0.15, 0.14, 0.12), marks=colours)
    return figure


def table(
    axes: Axes,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    dark: bool,
    widths: Sequence[float],
    marks: Sequence[str] = (),
    size: float = 7,
) -> None:
    """Words in columns, the first to the left and the others to the right; `marks` colour the first of each row."""
    colours = theme(dark)
    axes.axis("off")
    axes.set(xlim=(0, sum(widths)), ylim=(len(rows) + 0.9, -0.6))
    for y, row in enumerate([head, *rows]):
        x = 0.0
        for k, (word, width) in enumerate(zip(row, widths, strict=True)):
            colour = colours.muted if y == 0 else colours.ink
            if y and k == 0 and marks:
                colour = marks[(y - 1) % len(marks)]
            at, side = (x, "left") if k == 0 else (x + width, "right")
            axes.text(at, y, word, ha=side, va="center", fontsize=size - 0.5 * (y == 0), color=colour)
            x += width
    axes.plot([0, sum(widths)], [0.5, 0.5], color=colours.grid, linewidth=0.8)


def _line(axes: Axes, x: Sequence[Any], y: Sequence[Any], colour: str, label: str = "", style: Any = "-") -> None:
    values = [math.nan if value is None else value for value in y]
    marker = "o" if len(values) <= MARKED else ""
    axes.plot(x, values, color=colour, label=label or None, linestyle=style, marker=marker, markersize=3)


def _log(axes: Axes, values: Sequence[Any]) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    known = [value for value in values if value is not None and math.isfinite(value)]
    if known and min(known) > 0 and max(known) > 10 * min(known):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif known:
        from_zero(axes)


def _colours(dark: bool) -> list[str]:
    return list(theme(dark).lines) * 20
