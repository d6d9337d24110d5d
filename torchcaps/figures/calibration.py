"""How often predictions came true, by how sure they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import drawing, theme, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def calibration(table: Sequence[Mapping[str, Any]], *, dark: bool = False) -> Figure:
    """The share that came true in each bin beside the line of a well-calibrated network, and what the bins hold.

    Args:
        table: as `reliability` in the figures of a test: low, high, cases, confidence, accuracy of each bin.
    """
    colours = theme(dark)
    full = [each for each in table if each["cases"]]
    with drawing(2.4, dark, layout="constrained") as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        title(left, "Came true")
        left.plot([0, 1], [0, 1], color=colours.ink, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
        left.bar(
            [each["low"] for each in full], [each["accuracy"] for each in full], align="edge",
            width=[0.94 * (each["high"] - each["low"]) for each in full], color=colours.right, label="accuracy",
        )  # fmt: skip
        left.plot(
            [each["confidence"] for each in full], [each["accuracy"] for each in full], "o", color=colours.wrong,
            markersize=3.5, label="bins", clip_on=False, zorder=4,
        )  # fmt: skip
        left.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence, dots: mean")
        title(right, "Predictions")
        right.bar(
            [each["low"] for each in full], [each["cases"] for each in full], align="edge",
            width=[0.94 * (each["high"] - each["low"]) for each in full], color=colours.muted, label="cases",
        )  # fmt: skip
        if max((each["cases"] for each in full), default=1) > 20 * min((each["cases"] for each in full), default=1):
            right.set_yscale("log")
            from matplotlib.ticker import NullFormatter, StrMethodFormatter

            right.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            right.yaxis.set_minor_formatter(NullFormatter())
        right.set(xlim=(0, 1), xlabel="confidence")
    return figure
