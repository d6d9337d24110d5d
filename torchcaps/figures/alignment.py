"""Choi's alignment ratios by class and transformation beside what random vectors give, and the cosine histogram."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.figures.style import MINUS, drawing, shortened, theme, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 20  # classes up to which each has a row
TINT = 0.5  # the strongest shade, on which ink is still easy to read
WORDS = {"Rot": "rotation", "x": "shift in x", "y": "shift in y"}


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """A table of ratios, shaded by how far they lie above chance; below it the means and the references."""
    from matplotlib.colors import to_rgb

    colours, ways = theme(dark), numbers["ways"]
    names = list(numbers["names"])[:ROWS]
    paper, right = (np.array(to_rgb(colour)) for colour in (colours.paper, colours.right))
    printed, random = numbers["printed"], numbers["random"]
    rows = [(name, [numbers["ratios"][way][k] for way in ways]) for k, name in enumerate(names)]
    rows.append(("all", [numbers["all"][way] for way in ways]))
    rows.append(("Choi, MNIST", [printed["all"][way] for way in ways]))
    chance = random[str(numbers["dim"])]["mean"]
    with drawing(0.62 + 0.235 * (len(rows) + 0.75 * (len(random) + 1)), dark, layout="constrained") as figure:
        axes = figure.add_subplot()
        title(axes, f"Alignment ratio, {numbers['images']:,} images of {numbers['data']}")
        axes.set(xlim=(-0.5, len(ways) - 0.5), ylim=(len(rows) - 0.3 + 0.75 * (len(random) + 1), -0.5))
        axes.grid(False)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(ways)), [way.replace("-", MINUS) for way in ways], color=colours.ink)
        ticks = [shortened(name, 12) for name, _ in rows]
        axes.set_yticks(range(len(rows)), ticks, color=colours.ink)
        for y, (name, values) in enumerate(rows):
            for x, value in enumerate(values):
                if value is None:
                    continue
                strength = min(1.0, max(0.0, (value - chance) / (1 - chance))) ** 1.5
                strength *= TINT
                shade = strength * right + (1 - strength) * paper
                plain = name == "Choi, MNIST"
                if not plain:
                    axes.fill_between([x - 0.48, x + 0.48], y - 0.47, y + 0.47, color=shade, linewidth=0)
                ink = colours.muted if plain else colours.ink
                axes.text(x, y, f"{value:.2f}", ha="center", va="center_baseline", fontsize=8, color=ink,
                          weight="bold" if name == "all" else "normal")  # fmt: skip
        lines = [
            f"random vectors by Eq. 15, D = {dim}: {each['mean']:.3f} ± {each['deviation']:.3f}"
            + (" (this network)" if int(dim) == numbers["dim"] else "")
            for dim, each in random.items()
        ]
        theirs = printed["random"]
        lines.append(
            f"random vectors as printed, D = 32: {theirs['mean']:.3f} ± {theirs['deviation']:.3f}, "
            "which Eq. 15 does not give"
        )
        for k, line in enumerate(lines):
            axes.text(0, len(rows) + 0.75 * k, line, fontsize=7.5, color=colours.muted, va="center",
                      transform=axes.get_yaxis_transform())  # fmt: skip
        left_out = len(numbers["names"]) - len(names)
        if left_out:
            axes.set_xlabel(f"the first {len(names)} classes; {left_out} more are in the numbers")
    return figure


def draw_cosines(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """One histogram for each transformation, of all images."""
    colours, edges = theme(dark), numbers["edges"]
    ways = list(numbers["counts"])
    with drawing(2.3, dark, layout="constrained") as figure:
        grid = figure.subplots(1, len(ways), squeeze=False)[0]
        for axes, way in zip(grid, ways, strict=True):
            title(axes, WORDS.get(way, way))
            counts = np.asarray(numbers["counts"][way], dtype=float)
            shares = 100 * counts / max(1.0, counts.sum())
            axes.bar(edges[:-1], shares, np.diff(edges), align="edge", color=colours.right, label=way, linewidth=0)
            both = numbers["shares"][way]
            axes.set(xlim=(-1, 1), xticks=[-1, 0, 1])
            axes.set_xlabel(
                f"{100 * both['below']:.0f} % below {MINUS}½, {100 * both['above']:.0f} % above ½", fontsize=7
            )
        grid[0].set_ylabel("images (%)")
        note = "Cosine of the directions in which a capsule goes for a transformation and for its opposite."
        figure.supxlabel(note, fontsize=7, color=colours.muted, x=0.02, ha="left")
    return figure
