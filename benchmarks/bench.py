"""Speed and memory of the presets on this machine: python -m benchmarks.bench [--device cuda] [--only steps,growth]

Prints tables, and writes bench.json and bench.png. Every number is a median. All paths of a table are measured in one
run, so that they can be compared: "ours" as the library runs by default; "captured", the same step in a CUDA graph;
"reference", our formulas in plain PyTorch with all votes stored; "compiled", torch.compile of these; and "plain", each
routing by the textbook with einsum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import (
    PATHS,
    Case,
    Training,
    ceilings,
    graph_of,
    machine,
    measure,
    median_time,
    own_stream,
    reset_peak,
    resident,
    slope,
    wait_for,
)
from benchmarks.plain import plain
from torchcaps.layers import LinearCaps
from torchcaps.models import create_model, list_models
from torchcaps.routing import DynamicRouting

SIMPLE = {"backbone": "simple"}
ON_CPU = (
    Case("efficient_capsnet_mnist", 16),
    Case("capsnet_mnist", 32),
    Case("capsnet_mnist", 32, {"classes": 200, "decoder": False}),
    Case("inverted_cifar10", 16, SIMPLE),
    Case("inverted_cifar10", 16),
    Case("em_cifar10", 8, SIMPLE),
    Case("ar_capsnet_mnist", 32),
    Case("encapnet6_cifar10", 8),
)
LARGE = {"image": (3, 227, 227), "classes": 196, "decoder": False}  # 11 x 11 x 32 children, as an issue tracker has it
ON_CUDA = (
    Case("efficient_capsnet_mnist", 16, precision="tf32"),
    Case("capsnet_mnist", 128, precision="bf16"),
    Case("capsnet_mnist", 128, precision="tf32"),
    Case("inverted_cifar10", 128, precision="bf16"),
    Case("inverted_cifar10", 128, precision="tf32"),
    Case("inverted_cifar10", 128, {"iterations": 3}, precision="bf16"),
    Case("em_cifar10", 128, SIMPLE, precision="tf32"),
    Case("capsnet", 128, LARGE, precision="bf16"),
)
QUICK = (Case("efficient_capsnet_mnist", 4), Case("inverted_cifar10", 1, SIMPLE))
COLD = ("efficient_capsnet_mnist", "capsnet_mnist", "inverted_cifar10", "em_cifar10", "ar_capsnet_mnist")
LI = {  # row of table 1: preset, options, memory in MB at a batch, seconds a batch
    "a dynamic": ("capnet_dynamic_cifar10", {}, 3961, 8, 0.444),
    "b EM": ("capnet_em_cifar10", {}, 10078, 4, 0.957),
    "c CNN, same shape": ("li_cnn6_cifar10", {}, 1652, 128, 0.026),
    "d CNN, similar parameters": ("li_cnn6_cifar10", {"width": 79}, 2420, 128, 0.146),
    "e EncapNet, master": ("encapnet6_cifar10", {"aide_modules": ()}, 1433, 128, 0.039),
    "f EncapNet, master and aide": ("encapnet6_cifar10", {}, 1755, 128, 0.061),
}
CHOI = {  # AR-CapsNet, CapsuleNet, images of an epoch, the printed ratio of their epoch times
    "MNIST": (Case("ar_capsnet_mnist", 100), Case("capsnet_mnist", 100), 54_000, 0.19),
    "CIFAR-10": (
        Case("ar_capsnet_cifar10", 100),
        Case("dynamic_cifar10", 100, {"backbone": "simple", "decoder": True}),
        45_000,
        0.35,
    ),
}


class Bench:
    """What all sections share: the device, how long to take, and the results so far."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.cuda, self.quick = self.device.type == "cuda", arguments.quick
        self.least = 0.0 if self.quick else arguments.least
        self.results: dict[str, Any] = {"machine": machine(self.device)}
        self.out = Path(arguments.out)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        part = self.out / "bench.json.part"
        part.write_text(json.dumps(self.results, indent=1))
        part.rename(self.out / "bench.json")

    def paths(self) -> list[str]:
        chosen = self.arguments.paths.split(",") if self.arguments.paths else PATHS
        if self.quick and not self.arguments.paths:
            chosen = ("ours", "reference", "plain")
        return [path for path in chosen if self.cuda or path != "captured"]

    def cases(self) -> Sequence[Case]:
        wanted = self.arguments.presets
        if not wanted:
            return QUICK if self.quick else ON_CUDA if self.cuda else ON_CPU
        names = list_models() if wanted == "all" else wanted.split(",")
        batch = self.arguments.batch or (128 if self.cuda else 8)
        return [Case(name, batch, precision="tf32" if self.cuda else "32") for name in names]

    def measure(self, case: Case) -> dict[str, Any]:
        return measure(case, self.device, self.least)

    def apart(self, case: Case, cold: bool = False) -> dict[str, Any]:
        """Measured in a process of its own with empty caches of kernels, which may take only so long."""
        limit = self.arguments.limit
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            job = json.dumps({"case": case.plain(), "least": self.least, "cold": cold, "began": time.time()})
            command = [sys.executable, "-m", "benchmarks.bench", "--device", str(self.device), "--job", job]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=limit, env={**os.environ, **caches}
                )
            except subprocess.TimeoutExpired:
                return {**case.plain(), "name": case.name, "failed": f"over {limit} s"}
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
            return {**case.plain(), "name": case.name, "failed": reason[:60]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def measure_ceilings(bench: Bench) -> None:
    found = bench.results["ceilings"] = ceilings(bench.device, bench.least)
    table("ceilings", ["what", "reached"], [[name.replace("_", " "), f"{value:.3g}"] for name, value in found.items()])


def measure_steps(bench: Bench) -> None:
    """Training steps of the presets on every path."""
    if "ceilings" not in bench.results:
        measure_ceilings(bench)
    rows = bench.results["steps"] = []
    for case in bench.cases():
        for path in bench.paths():
            one = replace(case, path=path)
            rows.append(bench.apart(one) if path == "compiled" else bench.measure(one))
            print(".", end="", flush=True, file=sys.stderr)
        bench.save()
    print(file=sys.stderr)
    top = bench.results["ceilings"]
    lines = []
    for row in rows:
        start = [row["name"], row["batch"], row["path"]]
        if "failed" in row:
            lines.append([*start, row["failed"]])
            continue
        ours = next(r for r in rows if (r["name"], r["batch"]) == (row["name"], row["batch"]))
        peak = top[{"bf16": "matmul_bf16_tflops", "tf32": "matmul_tf32_tflops"}.get(row["precision"], "matmul_tflops")]
        against = f"{row['ms'] / ours['ms']:.2f}" if "ms" in ours else ""
        numbers = [f"{row['ms']:.2f}", f"{row['images_per_second']:,.0f}", f"{row['peak_mib']:,.0f}", against]
        reached = [f"{row['tflops']:.3g}", f"{row['tflops'] / peak:.1%}"]
        reached += [f"{row['gbps']:.3g}", f"{row['gbps'] / top['copy_gbps']:.1%}"]
        lines.append([*start, *numbers, *reached, f"{row['first_step_s']:.1f}"])
    head = ["training step", "batch", "path", "ms", "images/s", "peak MiB", "x first"]
    table("steps", [*head, "TFLOP/s", "of peak", "GB/s", "of copy", "first s"], lines)


def measure_growth(bench: Bench) -> None:
    """Forward and backward of one capsule layer with dynamic routing, as each of its sizes doubles."""
    base = {"batch": 32, "children": 512, "parents": 16, "iterations": 3}
    steps = {"batch": (16, 32, 64), "children": (256, 512, 1024), "parents": (16, 32, 64), "iterations": (2, 4, 8)}
    if bench.cuda:
        base = {"batch": 128, "children": 1152, "parents": 32, "iterations": 3}
        steps = {
            "batch": (128, 256, 512),
            "children": (1152, 2304, 4608),
            "parents": (32, 64, 128),
            "iterations": (2, 4, 8),
        }
    if bench.quick:
        base |= {"batch": 4, "children": 64}
        steps = {"batch": (4, 8), "children": (64, 128), "parents": (16, 32), "iterations": (2, 4)}
    found: dict[str, Any] = {}
    lines = []
    for path in [path for path in bench.paths() if path in ("ours", "plain")]:
        for axis, sizes in steps.items():
            pairs = [layer_cost(bench, path, **{**base, axis: size}) for size in sizes]
            ms, mib = ([pair[n] for pair in pairs] for n in range(2))
            slopes = slope(list(sizes), ms), slope(list(sizes), [max(x, 2**-10) for x in mib])
            found.setdefault(path, {})[axis] = {"sizes": sizes, "ms": ms, "mib": mib, "slopes": slopes}
            times, memory = ("  ".join(f"{x:.3g}" for x in row) for row in (ms, mib))
            shown = "  ".join(map(str, sizes))
            lines.append([path, axis, shown, times, f"{slopes[0]:.2f}", memory, f"{slopes[1]:.2f}"])
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    bench.results["growth"] = {"base": base, **found}
    table("growth", ["path", "with", "sizes", "ms", "slope", "MiB above the weights", "slope"], lines)


def layer_cost(
    bench: Bench, path: str, batch: int, children: int, parents: int, iterations: int
) -> tuple[float, float]:
    """Milliseconds, and MiB that forward and backward hold besides weights, poses and their gradients."""
    torch.manual_seed(0)
    routing = partial(DynamicRouting, iterations=iterations)
    layer = LinearCaps(children, 8, parents, 16, routing).to(bench.device)
    poses = torch.randn(batch, children, 8, device=bench.device, requires_grad=True)

    def work() -> None:
        layer.zero_grad()
        poses.grad = None
        layer(poses).poses.sum().backward()

    def most(work: Callable[[], None]) -> float:
        layer.zero_grad()
        poses.grad = None
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
            rest = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - rest
        rest = resident(trim=True)
        reset_peak()
        work()
        return max(0, resident("VmHWM") - rest)

    with plain() if path == "plain" else torch.enable_grad():
        work()
        given = sum(p.nbytes for p in layer.parameters()) + poses.nbytes
        held = max(0.0, most(work) - given)
        return 1e3 * median_time(work, bench.device, bench.least / 2), held / 2**20


def measure_inference(bench: Bench) -> None:
    """Latency of a forward pass, one image and 256 of them."""
    rows = bench.results["inference"] = []
    for preset in ("efficient_capsnet_mnist", "capsnet_mnist"):
        for batch in (1, 4 if bench.quick else 256):
            network: nn.Module = create_model(preset).eval().to(bench.device)
            images = torch.rand(batch, *network.image, device=bench.device)  # type: ignore[misc]
            ways: dict[str, Callable[[], Any]] = {"plain": partial(network, images)}
            last = create_model(preset).eval().to(bench.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            ways["ours"] = partial(last, images.contiguous(memory_format=torch.channels_last))
            if bench.cuda:
                ways["captured"] = ways["ours"]
            row = {"preset": preset, "batch": batch}
            for path, work in ways.items():
                with torch.inference_mode():
                    if path == "captured":
                        with own_stream(bench.device):
                            row[path] = 1e3 * median_time(graph_of(work), bench.device, bench.least)
                    else:
                        with plain() if path == "plain" else torch.inference_mode():
                            row[path] = 1e3 * median_time(work, bench.device, bench.least)
            rows.append(row)
    paths = [path for path in ("ours", "captured", "plain") if path in rows[0]]
    lines = [[r["preset"], r["batch"], *(f"{r[path]:.3f}" for path in paths)] for r in rows]
    table("inference", ["latency, ms", "batch", *paths], lines)


def measure_cold(bench: Bench) -> None:
    """From the start of a process, with empty caches, to the end of the first training step."""
    rows = bench.results["cold"] = []
    presets = ("efficient_capsnet_mnist",) if bench.quick else COLD
    for preset in [case.preset for case in bench.cases()] if bench.arguments.presets else presets:
        rows.append(bench.apart(Case(preset, 16 if bench.cuda else 2), cold=True))
        bench.save()
    lines = []
    for row in rows:
        numbers = (
            [row["failed"]]
            if "failed" in row
            else [f"{row[k]:.1f}" for k in ("imports_s", "build_s", "step_s", "total_s")]
        )
        lines.append([row["preset"], *numbers])
    table("cold", ["cold start, seconds", "imports", "network", "first step", "in all"], lines)


def measure_papers(bench: Bench) -> None:
    """The columns of Li's table 1 and Choi's ratios, beside the printed numbers."""
    small = bench.arguments.batch or (None if bench.cuda else 2 if bench.quick else 8)
    precision = "tf32" if bench.cuda else "32"
    found = bench.results["papers"] = {"li": [], "choi": []}
    rows = {row: LI[row] for row in LI if not bench.quick or "same shape" in row}
    for row, (preset, options, memory, batch, seconds) in rows.items():
        case = Case(preset, batch if small is None else min(small, batch), options, precision=precision)
        got = {**bench.measure(case), "row": row, "printed_mb": memory, "printed_batch": batch, "printed_s": seconds}
        found["li"].append(got)
    head = ["Li et al. 2018, table 1", "batch", "MB", "s a batch", "printed: batch", "MB", "s a batch"]
    lines = []
    for r in found["li"]:
        got = [r["failed"], ""] if "failed" in r else [f"{r['peak_mib']:,.0f}", f"{r['ms'] / 1e3:.4f}"]
        lines.append([r["row"], r["batch"], *got, r["printed_batch"], r["printed_mb"], r["printed_s"]])
    table("papers", head, lines)
    for data, (ar, caps, images, printed) in CHOI.items():
        batch = 100 if small is None else small
        times = [
            bench.measure(replace(case, batch=batch, path=path, precision=precision))["ms"] * images / batch / 1e3
            for case, path in ((ar, "ours"), (caps, "ours"), (ar, "plain"), (caps, "plain"))
        ]
        ratios = times[0] / times[1], times[2] / times[3]
        found["choi"].append({"data": data, "batch": batch, "seconds": times, "ratios": ratios, "printed": printed})
        if bench.quick:
            break
    head = ["Choi et al. 2019, epoch time", "AR s", "CapsuleNet s", "ratio", "plain: AR s", "CapsuleNet s", "ratio"]
    lines = []
    for r in found["choi"]:
        s = [f"{x:.1f}" for x in r["seconds"]]
        lines.append([r["data"], *s[:2], f"{r['ratios'][0]:.2f}", *s[2:], f"{r['ratios'][1]:.2f}", r["printed"]])
    table("papers", [*head, "printed"], lines)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "ceilings": measure_ceilings,
    "steps": measure_steps,
    "growth": measure_growth,
    "inference": measure_inference,
    "cold": measure_cold,
    "papers": measure_papers,
}


def table(section: str, head: list[str], lines: list[list[Any]]) -> None:
    """The first column to the left, numbers to the right."""
    rows = [head, *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(len(head))]
    print(f"\n{section}")
    for row in rows:
        cells = [cell.ljust(widths[n]) if n == 0 else cell.rjust(widths[n]) for n, cell in enumerate(row)]
        print("  ".join(cells).rstrip(), flush=True)


def plot(results: dict[str, Any], path: Path) -> bool:
    """Step times as bars, and how a layer's cost grows, where matplotlib is there."""
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
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 5), constrained_layout=True)
    names = list(dict.fromkeys(f"{row['name']}, {row['batch']}" for row in steps))
    paths = [path for path in PATHS if any(row["path"] == path for row in steps)]
    for n, which in enumerate(paths):
        rows = [row for row in steps if row["path"] == which]
        places = [names.index(f"{row['name']}, {row['batch']}") + 0.8 * n / len(paths) for row in rows]
        left.barh(places, [row["ms"] for row in rows], 0.8 / len(paths), label=which)
    left.set(yticks=range(len(names)), yticklabels=names, xscale="log" if steps else "linear", xlabel="ms a step")
    for which, axes in growth.items():
        for axis, row in axes.items():
            sizes = [size / row["sizes"][0] for size in row["sizes"]]
            style = "-o" if which == "ours" else "--x"
            for chart, unit, n in ((middle, "ms", 0), (right, "mib", 1)):
                values = [max(x, 2**-10) for x in row[unit]]
                chart.loglog(sizes, values, style, label=f"{which}, {axis}: {row['slopes'][n]:.2f}")
    middle.set(title="time, ms, and its slope", xlabel="times the smallest size")
    right.set(title="memory, MiB, and its slope", xlabel="times the smallest size")
    for chart in (left, middle, right):
        if chart.get_legend_handles_labels()[0]:
            chart.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def job(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own measures."""
    asked = json.loads(arguments.job)
    case, device = Case(**asked["case"]), torch.device(arguments.device)
    if not asked["cold"]:
        return measure(case, device, asked["least"])
    imports = time.time() - asked["began"]
    training = Training(case, device)
    built = time.time() - asked["began"]
    with training.on_path():
        training.step()
    wait_for(device)
    total = time.time() - asked["began"]
    parts = {"imports_s": imports, "build_s": built - imports, "step_s": total - built, "total_s": total}
    return {**case.plain(), "name": case.name, **parts}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help=f"some of the sections {', '.join(SECTIONS)}")
    parser.add_argument("--presets", help="names with commas, or all; the usual ones if not given")
    parser.add_argument("--paths", help=f"some of {', '.join(PATHS)}")
    parser.add_argument("--batch", type=int, help="in place of the usual ones, with --presets and for the papers")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--least", type=float, default=1.0, help="seconds to spend on each number")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that compiling and a cold start may take")
    parser.add_argument("--out", default="runs/bench", help="folder for bench.json and bench.png")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.job:
        print(json.dumps(job(arguments)))
        return
    sections = arguments.only.split(",") if arguments.only else list(SECTIONS)
    for unknown in set(sections) - set(SECTIONS):
        parser.error(f"there is no section {unknown!r}; there are {', '.join(SECTIONS)}")
    for unknown in set((arguments.paths or "ours").split(",")) - set(PATHS):
        parser.error(f"there is no path {unknown!r}; there are {', '.join(PATHS)}")
    bench = Bench(arguments)
    print(bench.results["machine"])
    for section in sections:
        if section not in bench.results:
            SECTIONS[section](bench)
            bench.save()
    written = ["bench.json"] + ["bench.png"] * plot(bench.results, bench.out / "bench.png")
    print(f"\nwritten to {bench.out}: {', '.join(written)}")


if __name__ == "__main__":
    main()
