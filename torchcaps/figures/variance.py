"""Mazzia's table 5 and figure 8: the share of the variance that the first principal components hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, theme, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {"x": "Shift in x", "y": "Shift in y", "rotation": "Rotation"}
MOST = 16  # components that are drawn


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """The cumulated shares above, the first component's in a table below, beside the paper's."""
    colours, ways = theme(dark), numbers["ways"]
    printed = numbers["printed"]
    with drawing(3.5, dark, layout="constrained") as figure:
        above, below = figure.subplots(2, 1, height_ratios=(1.6, 1), subplot_kw={"frame_on": False})
        for axes in (above, below):
            axes.axis("off")
        places = above.get_subplotspec().subgridspec(1, len(ways), wspace=0.08)
        for k, (way, found) in enumerate(ways.items()):
            axes = figure.add_subplot(places[0, k])
            title(axes, WORDS[way])
            for name, colour, dash in (("ours", colours.right, "-"), ("random", colours.muted, (0, (3, 2)))):
                values = found[name]["cumulated"][:MOST]
                label = "this network" if name == "ours" else "random"
                axes.plot(range(1, len(values) + 1), values, color=colour, linestyle=dash, label=label, marker="o",
                          markersize=2.2)  # fmt: skip
            axes.set(ylim=(0, 104), xlim=(0.4, MOST + 0.6), xticks=[1, 5, 10, 15])
            axes.set_xlabel("components")
            if k:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel("variance held (%)")
                axes.legend(loc="lower right", fontsize=7)
        rows = [
            (f"this network, {numbers['images']:,} images", {way: _spread(each["ours"]) for way, each in ways.items()}),
            (f"uniform random, D = {numbers['dim']}", {way: _spread(each["random"]) for way, each in ways.items()}),
            *((f"{name}, as printed", {way: f"{values[way]:.2f}" for way in ways}) for name, values in printed.items()),
        ]
        below.set(xlim=(0, 1), ylim=(len(rows) + 0.2, -0.75))
        columns = [0.52 + 0.19 * k for k in range(len(ways))]
        below.text(0, -0.55, "First component (%)", fontsize=8.5, weight="bold", va="center")
        for x, way in zip(columns, ways, strict=True):
            below.text(x + 0.09, -0.55, WORDS[way], fontsize=7.5, color=colours.muted, ha="right", va="center")
        for y, (name, cells) in enumerate(rows):
            ink = colours.right if not y else colours.ink if y == 1 else colours.muted
            below.text(0, y + 0.4, name, fontsize=8, color=ink, va="center")
            for x, way in zip(columns, ways, strict=True):
                below.text(x + 0.09, y + 0.4, cells[way], fontsize=8, color=ink, ha="right", va="center")
    return figure


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['first']:.1f} ± {found['deviation']:.1f}"
