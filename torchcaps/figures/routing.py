"""What routing does, layer by layer: how much it still changes, and how well the votes agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torchcaps.figures.style import MINUS, drawing, shortened, theme, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPOCHS = 4  # lines in a panel
DYNAMIC_NOTE = (
    "The change is |v · u|, which Sabour's procedure 1 adds to a logit: where the votes agree ever better, it\n"
    "grows with the iterations. The paper's falls, from 0.007 at the second to 0.00001 at the fifth, and it\n"
    "does not say how that was measured."
)


def layer_title(number: int, count: int) -> str:
    """What a layer that routes votes is called, by its place among them."""
    return "Class capsules" if number == count else f"Layer {number} of {count}"


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
            title(left, f"{layer_title(layers.index(name) + 1, len(layers))}, {kind}")
            title(right, "Votes by cosine")
            _changes(left, some, name, dark)
            _cosines(right, some, name, dark)
            left.set_ylabel("change of logits")
        grid[-1, 0].set_xlabel("iteration")
        grid[-1, 1].set_xlabel("cosine")
    return figure


def draw_changes(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.histories.logit_changes` gives: by epoch on a linear scale, by iteration on a logarithmic one."""
    from matplotlib.ticker import MaxNLocator

    layers = numbers["layers"]
    dynamic = any(layer["routing"] == "Dynamic" for layer in layers)
    with drawing(0.35 + 1.75 * len(layers) + 0.4 * dynamic, dark, layout="constrained") as figure:
        grid = figure.subplots(len(layers), 2, squeeze=False)
        for (left, right), layer in zip(grid, layers, strict=True):
            changes = [[math.nan if value is None else value for value in row] for row in layer["changes"]]
            steps = len(changes[-1])
            title(left, f"{layer_title(*layer['place'])}, {layer['routing']}")
            for k, shade in zip(range(steps), reversed(_shades(steps, dark)), strict=True):
                values = [row[k] if k < len(row) else math.nan for row in changes]
                left.plot(layer["epochs"], values, "o-", color=shade, label=f"iteration {k + 1}", markersize=2.5)
            left.set_ylim(bottom=0)
            left.set_ylabel("change of logits")
            left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            left.legend(loc="best", fontsize=7)
            title(right, "On a log scale")
            chosen = sorted({round(k * (len(changes) - 1) / (EPOCHS - 1)) for k in range(EPOCHS)})
            for k, shade in zip(chosen, _shades(len(chosen), dark), strict=True):
                label = f"epoch {layer['epochs'][k]}"
                right.plot(range(1, steps + 1), changes[k], "o-", color=shade, label=label, markersize=2.5)
            further = [math.nan if value is None else value for value in layer["further"]]
            if len(further) > steps:
                places = range(1, len(further) + 1)
                label = f"the end, {len(further)} iterations"
                right.plot(places, further, "o:", color=theme(dark).ink, label=label, markersize=2.5, linewidth=1)
            if numbers["paper"] and layer["routing"] == "Dynamic":
                points = [(float(step), value) for step, value in numbers["paper"].items()]
                right.plot(*zip(*points, strict=True), "D", color=theme(dark).wrong, label="the paper, epoch 500")
            right.set_yscale("log")
            right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            right.margins(x=0.08)
            right.legend(loc="best", fontsize=7)
        grid[-1, 0].set_xlabel("epoch")
        grid[-1, 1].set_xlabel("iteration")
        if dynamic:
            figure.supxlabel(DYNAMIC_NOTE, fontsize=7, color=theme(dark).muted, x=0.02, ha="left")
    return figure


def draw_agreement(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.histories.agreement` gives: as in Li's figure 2, grey the share of votes, blue their length.

    Below it, how many votes are how long, and what the last epoch comes to beside the paper's.
    """
    colours = theme(dark)
    runs = numbers["runs"]
    columns = max(len(run["panels"]) for run in runs)
    edges, lengths = numbers["cosine_edges"], numbers["length_edges"]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    with drawing(0.3 + 2.75 * len(runs), dark, layout="constrained") as figure:
        for part, run in zip(figure.subfigures(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
            name = shortened(run["name"], 36)
            part.suptitle(
                f"{name}: {layer_title(*run['place']).lower()}, {run['routing']}",
                fontsize=9.5,
                x=0.01,
                ha="left",
                weight="bold",
            )
            grid = part.subplots(2, columns, squeeze=False, sharey="row", height_ratios=(1.6, 1))
            longest = max((value or 0 for panel in run["panels"] for value in panel["cosine_lengths"]), default=1) or 1
            for column in range(columns):
                above, below = grid[:, column]
                if column >= len(run["panels"]):
                    above.axis("off")
                    below.axis("off")
                    continue
                panel = run["panels"][column]
                above.set_title(f"epoch {panel['epoch']}", fontsize=8, color=colours.muted, weight="normal")
                above.stairs(
                    [100 * share for share in panel["cosine"]], edges, fill=True, color=colours.muted, alpha=0.45
                )
                above.set(xlim=(-1, 1), xticks=(-1, 0, 1))
                twin = above.twinx()
                twin.grid(False)
                values = [math.nan if value is None else value for value in panel["cosine_lengths"]]
                twin.plot(middles, values, color=colours.right, linewidth=1.3)
                twin.set_ylim(0, 1.1 * longest)
                last = column == len(run["panels"]) - 1
                twin.tick_params(labelright=last, labelsize=6.5, labelcolor=colours.right)
                above.tick_params(labelsize=6.5)
                filled = _used(panel["lengths"])
                below.stairs(
                    [100 * share for share in panel["lengths"][filled]], lengths[filled.start : filled.stop + 1],
                    fill=True, color=colours.right, alpha=0.55,
                )  # fmt: skip
                below.set_xscale("log")
                below.tick_params(labelsize=6.5)
                if last:
                    twin.set_ylabel("length", fontsize=7, color=colours.right)
            grid[0, 0].set_ylabel("% of votes\nby cosine", fontsize=7)
            grid[1, 0].set_ylabel("% of votes\nby length", fontsize=7)
            grid[0, 0].set_ylim(bottom=0)
            part.supxlabel(_agreement_words(run, edges), fontsize=7, color=colours.muted, x=0.02, ha="left")
    return figure


def _agreement_words(run: Mapping[str, Any], edges: Sequence[float]) -> str:
    low, high = f"{edges[1]:g}".replace("-", MINUS), f"{edges[-2]:g}"
    words = f"At the end {100 * run['dissimilar']:.0f} % of the votes have a cosine below {low}"
    if run["paper_dissimilar"] is not None:
        words += f" (the paper finds {100 * run['paper_dissimilar']:.0f} % dissimilar)"
    length = run["similar_length"]
    rest = f"none is above {high}" if length is None else f"those above {high} are {length:.2g} long on average"
    return f"{words};\n{rest}."


def _used(shares: Sequence[float]) -> slice:
    """The bins that hold anything."""
    full = [k for k, share in enumerate(shares) if share > 0] or [0]
    return slice(full[0], full[-1] + 1)


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
