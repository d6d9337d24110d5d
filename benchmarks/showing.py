"""Tables and a plot of what the benchmark has found so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.measuring import PATHS

Results = dict[str, Any]
MARKS = "osD^v"


def table(section: str, head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """The first column to the left, numbers to the right."""
    rows = [list(head), *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(len(head))]
    print(f"\n{section}")
    for row in rows:
        cells = [cell.ljust(widths[n]) if n == 0 else cell.rjust(widths[n]) for n, cell in enumerate(row)]
        print("  ".join(cells).rstrip(), flush=True)


def show_ceilings(results: Results) -> None:
    found = results["ceilings"]
    table("ceilings", ["what", "reached"], [[name.replace("_", " "), f"{value:.3g}"] for name, value in found.items()])


def show_steps(results: Results) -> None:
    rows, top = results["steps"], results["ceilings"]
    lines = []
    for row in rows:
        start = [row["name"], row["batch"], row["path"]]
        if "failed" in row:
            lines.append([*start, row["failed"]])
            continue
        ours = next(r for r in rows if (r["name"], r["batch"]) == (row["name"], row["batch"]))
        peak = top[{"bf16": "matmul_bf16_tflops", "tf32": "matmul_tf32_tflops"}.get(row["precision"], "matmul_tflops")]
        against = [f"{row[k] / ours[k]:.2f}" for k in ("ms", "peak_mib")] if "ms" in ours else ["", ""]
        numbers = [f"{row['ms']:.2f}", f"{row['images_per_second']:,.0f}", f"{row['peak_mib']:,.0f}", *against]
        reached = [f"{row['tflops']:.3g}", f"{row['tflops'] / peak:.1%}"]
        reached += [f"{row['gbps']:.3g}", f"{row['gbps'] / top['copy_gbps']:.1%}"]
        lines.append([*start, *numbers, *reached, f"{row['first_step_s']:.1f}"])
    head = ["training step", "batch", "path", "ms", "images/s", "peak MiB", "x ms", "x MiB"]
    table("steps", [*head, "TFLOP/s", "of peak", "GB/s", "of copy", "first s"], lines)
    if results.get("compiled_at_once", 1) > 1:
        print(f"compiled {results['compiled_at_once']} at once, timed one after the other")


def show_growth(results: Results) -> None:
    lines = []
    for path, axes in results["growth"].items():
        for axis, row in axes.items() if path != "base" else ():
            sizes, times, memory = ("  ".join(f"{x:.3g}" for x in row[key]) for key in ("sizes", "ms", "mib"))
            lines.append([path, axis, sizes, times, f"{row['slopes'][0]:.2f}", memory, f"{row['slopes'][1]:.2f}"])
    table("growth", ["path", "with", "sizes", "ms", "slope", "MiB above the weights", "slope"], lines)


def show_inference(results: Results) -> None:
    rows = results["inference"]
    paths = [path for path in PATHS if any(path in row for row in rows)]
    held = [path for path in paths if any(f"{path}_mib" in row for row in rows)]
    lines = []
    for row in rows:
        times = [f"{row[path]:.3f}" if path in row else "" for path in paths]
        memory = [f"{row[f'{path}_mib']:,.0f}" for path in held]
        lines.append([row["preset"], row["batch"], row["precision"], *times, *memory])
    table("inference", ["latency, ms", "batch", "precision", *paths, *(f"{path} MiB" for path in held)], lines)


def show_cold(results: Results) -> None:
    lines = []
    for row in results["cold"]:
        parts = ("imports_s", "build_s", "step_s", "total_s")
        lines.append([row["preset"], *([row["failed"]] if "failed" in row else [f"{row[k]:.1f}" for k in parts])])
    table("cold", ["cold start, seconds", "imports", "network", "first step", "in all"], lines)
    slowest = max((row["total_s"] for row in results["cold"] if "failed" not in row), default=math.nan)
    beside = results.get("cold_at_once", 1)
    print(f"the slowest of {len(results['cold'])}: {slowest:.1f} s" + f", {beside} at once" * (beside > 1))


def show_papers(results: Results) -> None:
    found = results["papers"]
    head = ["Li et al. 2018, table 1", "path", "batch", "MB", "s a batch", "printed: batch", "MB", "s a batch"]
    lines = []
    for r in found["li"]:
        got = [r["failed"], ""] if "failed" in r else [f"{r['peak_mib'] * 2**20 / 1e6:,.0f}", f"{r['ms'] / 1e3:.4f}"]
        lines.append([r["row"], r["path"], r["batch"], *got, r["printed_batch"], r["printed_mb"], r["printed_s"]])
    table("papers", head, lines)
    head = [
        "Choi et al. 2019, epoch time",
        "batch",
        "AR s",
        "CapsuleNet s",
        "ratio",
        "plain: AR s",
        "CapsuleNet s",
        "ratio",
    ]
    lines = []
    for r in found["choi"]:
        s = [f"{x:.1f}" for x in r["seconds"]]
        lines.append(
            [r["data"], r["batch"], *s[:2], f"{r['ratios'][0]:.2f}", *s[2:], f"{r['ratios'][1]:.2f}", r["printed"]]
        )
    if lines:
        table("papers", [*head, "printed"], lines)


SHOWN: dict[str, Callable[[Results], None]] = {
    "ceilings": show_ceilings,
    "steps": show_steps,
    "growth": show_growth,
    "inference": show_inference,
    "cold": show_cold,
    "papers": show_papers,
}


def plot(results: Results, path: Path) -> bool:
    """Step times and memory of each path, and how a layer's cost grows, where matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row for row in results.get("steps", []) if "ms" in row]
    growth = {name: axes for name, axes in results.get("growth", {}).items() if name != "base"}
    if not steps and not growth:
        return False
    figure, charts = pyplot.subplots(2, 2, figsize=(15, 10), constrained_layout=True)
    names = list(dict.fromkeys(f"{row['name']}, {row['batch']}" for row in steps))
    paths = [path for path in PATHS if any(row["path"] == path for row in steps)]
    for chart, unit, label in ((charts[0, 0], "ms", "ms"), (charts[0, 1], "peak_mib", "MiB at most")):
        for n, which in enumerate(paths):
            rows = [row for row in steps if row["path"] == which]
            places = [names.index(f"{row['name']}, {row['batch']}") + 0.1 * (n - (len(paths) - 1) / 2) for row in rows]
            chart.plot([row[unit] for row in rows], places, MARKS[n % len(MARKS)], label=which)
        told = [fill(name, 34) for name in names] if unit == "ms" else []  # once for both charts
        chart.set(yticks=range(len(names)), xscale="log" if steps else "linear", xlabel=label)
        chart.set_yticklabels(told or [""] * len(names), fontsize="small")
        chart.set(title=f"a training step, {label}")
        chart.grid(axis="both", which="both", alpha=0.2)
        chart.invert_yaxis()
    for chart, unit, n in ((charts[1, 0], "ms", 0), (charts[1, 1], "mib", 1)):
        for which, axes in growth.items():
            for axis, row in axes.items():
                sizes = [size / row["sizes"][0] for size in row["sizes"]]
                style = "-o" if which == "ours" else "--x"
                values = [max(x, 2**-10) for x in row[unit]]
                chart.loglog(sizes, values, style, label=f"{which}, {axis}: {row['slopes'][n]:.2f}")
    charts[1, 0].set(title="a layer's time, ms, and its slope")
    charts[1, 1].set(title="a layer's memory, MiB, and its slope")
    for chart in charts[1]:
        chart.set_xticks([1, 2, 4], ["smallest size", "2 x", "4 x"])
        chart.set_xticks([], minor=True)
    for chart in charts.flat if growth else charts[0]:
        if chart.get_legend_handles_labels()[0] and chart is not charts[0, 0]:  # its marks are its neighbour's
            chart.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{results['machine']}, {results['date']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
