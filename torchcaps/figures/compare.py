"""Two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import (
    WIDTH,
    drawing,
    from_zero,
    paste,
    sheet,
    shortened,
    theme,
    title,
    whole_ticks,
    wrapped,
)
from torchcaps.figures.training import table
from torchcaps.pictures import unpacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LISTED = 12  # settings in which they differ
LETTERS = 98  # of a line of small print
CELL = 0.71  # inches from one picture to the next


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.compare.side_by_side` gives: curves, a table, and the images that one run alone recognises."""
    colours = theme(dark)
    runs, test = numbers["runs"], numbers["test"]
    tones = (colours.right, colours.wrong)
    rows = _rows(numbers)
    strips = [] if test is None else [(key, test["cases"][key]) for key in ("only_first", "only_second")]
    strips = [(key, cases) for key, cases in strips if cases]
    curves, listed, shown = 2.0, 0.19 * (len(rows) + 2), 1.12 * len(strips)
    words = [] if test is None else [*wrap(_counts(test), LETTERS), *wrap(_chance(test["p_value"]), LETTERS)]
    told = 0.13 * len(words) + 0.18 if words else 0.0
    height = curves + listed + told + shown + 0.2
    with drawing(height, dark) as figure:
        left = figure.add_axes((0.09, 1 - 1.55 / height, 0.37, 1.25 / height))
        right = figure.add_axes((0.59, 1 - 1.55 / height, 0.37, 1.25 / height))
        _curves(left, runs, "loss", "Training loss", tones, 1)
        _curves(right, runs, "validation_error", "Validation error (%)", tones, 100)
        middle = figure.add_axes((0.025, 1 - (curves + listed) / height, 0.95, listed / height))
        head = ("", *(shortened(run["name"], 34) for run in runs))
        table(middle, head, rows, dark, (0.28, 0.36, 0.36))
        page = sheet(figure)
        y = curves + listed + 0.12
        if words:
            page.text(0.12, y - 0.03, "\n".join(words), fontsize=6.8, color=colours.ink, va="top", linespacing=1.4)
            y += told - 0.12
        for key, cases in strips:
            _strip(page, key, cases, runs, y, tones[key == "only_second"], dark)
            y += 1.12
    return figure


def _curves(axes: Axes, runs: Sequence[Mapping[str, Any]], key: str, words: str, tones: Any, unit: float) -> None:
    title(axes, words)
    for run, tone in zip(runs, tones, strict=True):
        values = [math.nan if value is None else unit * value for value in run[key]]
        marker = "o" if len(values) <= 40 else ""
        axes.plot(run["epochs"], values, color=tone, marker=marker, markersize=2.5, label=wrapped(run["name"], 30))
    from_zero(axes)
    axes.set_xlabel("epoch", labelpad=1)
    whole_ticks(axes)
    axes.tick_params(labelsize=7.5)
    if key == "loss":
        axes.legend(loc="best", fontsize=6.5)


def _rows(numbers: Mapping[str, Any]) -> list[tuple[str, ...]]:
    runs = numbers["runs"]
    facts = [
        ("test error", *(_error(run) for run in runs)),
        ("parameters", *(f"{run['parameters']:,}" for run in runs)),
        ("operations", *(f"{run['operations'] / 1e9:.3f} G" for run in runs)),
        ("training time", *("" if run["seconds"] is None else f"{run['seconds']:,.0f} s" for run in runs)),
    ]
    differences = numbers["differences"]
    listed = [
        (
            shortened(each["setting"].partition("args.")[2] or each["setting"].replace("_", " "), 30),
            shortened(each["first"], 38),
            shortened(each["second"], 38),
        )
        for each in differences[:LISTED]
    ]
    left = len(differences) - len(listed)
    return [*facts, *listed, *([(f"and {left} more settings", "", "")] if left else [])]


def _error(run: Mapping[str, Any]) -> str:
    if run["test_error"] is None:
        return "not tested"
    spread = "" if run["standard_error"] is None else f" ± {100 * run['standard_error']:.2f}"
    return f"{100 * run['test_error']:.2f}{spread} %"


def _counts(test: Mapping[str, Any]) -> str:
    return (
        f"Of {test['images']:,} test images both recognise {test['both']:,}, neither {test['neither']:,}, "
        f"the first alone {test['only_first']:,}, the second alone {test['only_second']:,}."
    )


def _chance(p_value: float) -> str:
    share = f"{100 * p_value:.0f} %" if p_value >= 0.01 else f"{100 * p_value:.1g} %" if p_value >= 1e-5 else "0.001 %"
    among = "fewer than " if p_value < 1e-5 else ""
    return f"Equals split at least so unevenly by chance in {among}{share} of cases (McNemar's test)."


def _strip(
    page: Axes,
    key: str,
    cases: Sequence[Mapping[str, Any]],
    runs: Sequence[Mapping[str, Any]],
    y: float,
    tone: str,
    dark: bool,
) -> None:
    which = key == "only_second"
    page.text(0.12, y + 0.12, f"Only {shortened(runs[which]['name'], 60)}", fontsize=8, weight="bold", color=tone)
    other = "first" if which else "second"
    most = int((WIDTH - 0.2) / CELL)
    for k, case in enumerate(cases[:most]):
        x = 0.12 + k * CELL
        paste(page, unpacked(case["picture"]), x, y + 0.2, CELL - 0.06, CELL - 0.06)
        word = f"{' '.join(case['labels'])}, not {' '.join(case[other])}"
        colour = theme(dark).muted
        page.text(
            x + CELL / 2 - 0.03,
            y + 0.24 + CELL - 0.06,
            shortened(word, 16),
            fontsize=6.5,
            ha="center",
            va="top",
            color=colour,
        )
