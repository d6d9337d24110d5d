"""A digit's capsule on its way while the digit turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.figures.style import MINUS, drawing, theme, title
from torchcaps.pictures import unpacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """The digit on its way, framed in the colours of its angles; its path; and how long its capsule stays."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap

    colours = theme(dark)
    path, angles = np.asarray(numbers["path"], dtype=float), np.asarray(numbers["angles"], dtype=float)
    shade = LinearSegmentedColormap.from_list("turn", [colours.wrong, "#b08900", "#2b8a5e", colours.right])
    part = (angles - angles[0]) / max(angles[-1] - angles[0], 1e-12)
    shown = {float(each["angle"]): unpacked(each["picture"]) for each in numbers["pictures"]}
    with drawing(5.4, dark, layout="constrained") as figure:
        words = f"Class {numbers['class']}, test image {numbers['image']:,}, turned by up to {angles[-1]:.0f}°"
        figure.suptitle(words, fontsize=9.5, weight="bold", x=0.02, ha="left")
        places = figure.add_gridspec(3, len(shown), height_ratios=(0.75, 3, 1.1))
        for column, (angle, picture) in enumerate(shown.items()):
            axes = figure.add_subplot(places[0, column])
            axes.imshow(picture)
            axes.grid(False)
            axes.set(xticks=[], yticks=[])
            axes.set_xlabel(_degrees(angle), fontsize=7)
            for side in axes.spines.values():
                side.set(visible=True, color=shade(float(np.interp(angle, angles, part))), linewidth=1.8)
        above, below = figure.add_subplot(places[1, :]), figure.add_subplot(places[2, :])
        pieces = np.stack([path[:-1], path[1:]], axis=1)
        above.add_collection(LineCollection(list(pieces), colors=shade((part[1:] + part[:-1]) / 2), linewidths=1.4))
        large = np.isin(angles, list(shown))
        above.scatter(path[:, 0], path[:, 1], c=shade(part), s=np.where(large, 34, 7), zorder=3, label="poses")
        zero = path[int(np.abs(angles).argmin())]
        above.annotate(
            "as it is", tuple(zero), (9, 9), textcoords="offset points", fontsize=7, color=colours.muted,
            arrowprops={"arrowstyle": "-", "color": colours.muted, "linewidth": 0.6, "shrinkB": 3},
        )  # fmt: skip
        above.margins(0.08)
        names = [f"component {k}" + (f", {100 * s:.1f} % of the variance" if s is not None else "")
                 for k, s in enumerate(numbers["shares"], 1)]  # fmt: skip
        above.set(xlabel=names[0], ylabel=names[1])
        above.set_title(
            "axes not to the same scale", loc="right", pad=3, fontsize=6.5, color=colours.muted, weight="normal"
        )
        title(below, "How present")
        below.plot(angles, numbers["length"], color=colours.ink, label=f"class {numbers['class']}")
        rival = f"class {numbers['rival']}"
        below.plot(angles, numbers["rival_length"], color=colours.muted, linestyle=(0, (3, 2)), label=rival)
        below.set(ylim=(0, 1.05), xlim=(angles[0], angles[-1]), xlabel="degrees, counter-clockwise")
        below.legend(loc="best", fontsize=7)
    return figure


def _degrees(angle: float) -> str:
    return f"{angle:+.0f}°".replace("-", MINUS) if angle else "0°"
