"""Accuracies under growing changes of the image, one line a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, theme, title, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {
    "rotation": ("Rotation", "degrees", 1),
    "shift": ("Shift", "per cent of a side", 100),
    "scale": ("Scale", "factor", 1),
    "shear": ("Shear", "degrees", 1),
    "noise": ("Noise", "deviation", 1),
}
COLUMNS = 3


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    colours, levels, lines = theme(dark), numbers["levels"], numbers["lines"]
    inks = [colours.lines[k % len(colours.lines)] for k in (1, 2, 3, 4, 5, 0)]
    rows = -(-(len(levels) + 1) // COLUMNS)
    with drawing(1.75 * rows, dark, layout="constrained") as figure:
        grid = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False)
        places = list(grid.flat)
        for place, (axes, way) in enumerate(zip(places, levels, strict=False)):
            name, unit, factor = WORDS[way]
            title(axes, name)
            for number, line in enumerate(lines):
                x = [factor * level for level in levels[way]]
                y = [100 * value for value in line["accuracy"][way]]
                style = {"marker": "os^Dv*"[number // len(inks) % 6], "label": line["name"]}
                axes.plot(x, y, color=inks[number % len(inks)], **style)
            axes.set(ylim=(0, 104), xlabel=unit)
            if place % COLUMNS == 0:
                axes.set_ylabel("accuracy (%)")
        for axes in places[len(levels) :]:
            axes.axis("off")
        legend = places[len(levels)]
        handles, names = places[0].get_legend_handles_labels()
        legend.legend(
            handles, [wrapped(name, 24) for name in names], loc="upper left", fontsize=7, borderaxespad=0,
            title=f"{lines[0]['images']:,} test images\nof {numbers['data']}", title_fontsize=7, alignment="left",
        )  # fmt: skip
        legend.get_legend().get_title().set_color(colours.muted)
    return figure
