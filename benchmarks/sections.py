"""What the benchmark measures, a section of its results at a time; `bench` says on what, for how long, and keeps it."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.cases import CHOI, COLD, LI, QUICK_COLD
from benchmarks.measuring import Case, ceilings, held_by, median_time, products_in, slope
from benchmarks.plain import plain
from torchcaps.layers import LinearCaps
from torchcaps.models import Inference, create_model
from torchcaps.routing import DynamicRouting

if TYPE_CHECKING:
    from benchmarks.bench import Bench


def in_words(row: dict[str, Any]) -> str:
    cost = row["failed"] if "failed" in row else f"{row['ms']:.1f} ms, {row['peak_mib']:,.0f} MiB"
    return f"{row['name']}, {row['batch']}, {row['path']}: {cost}"


def measure_ceilings(bench: Bench) -> None:
    bench.results["ceilings"] = ceilings(bench.device, bench.least)
    bench.save("ceilings")


def measure_steps(bench: Bench) -> None:
    """Training steps of the presets on every path, on a CPU by turns; compiling comes last, since it takes so long."""
    if "ceilings" not in bench.results:
        measure_ceilings(bench)
    rows = bench.results["steps"] = []
    cases, paths = bench.cases(), bench.paths()
    order = [(case.name, case.batch, path) for case in cases for path in paths]

    def add(found: Sequence[dict[str, Any]]) -> None:
        for row in found:
            rows.append(row)
            rows.sort(key=lambda row: order.index((row["name"], row["batch"], row["path"])))
            bench.save(f"{in_words(row)} ({len(rows)} of {len(order)})")

    for case in cases:
        ways = [replace(case, path=path) for path in paths if path != "compiled"]
        for some in [[way] for way in ways] if bench.cuda else [ways]:  # whose memory would not hold all of them
            add(bench.measure(*some))
    if "compiled" in paths:
        for row in bench.compiled([replace(case, path="compiled") for case in cases]):
            add([row])


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
    bench.results["growth"] = found
    found["base"] = base
    for path in [path for path in bench.paths() if path in ("ours", "plain")]:
        for axis, sizes in steps.items():
            pairs = [layer_cost(bench, path, **{**base, axis: size}) for size in sizes]
            ms, mib = ([pair[n] for pair in pairs] for n in range(2))
            slopes = slope(list(sizes), ms), slope(list(sizes), [max(x, 2**-10) for x in mib])
            found.setdefault(path, {})[axis] = {"sizes": sizes, "ms": ms, "mib": mib, "slopes": slopes}
            bench.save(f"growth with {axis}, {path}: slopes {slopes[0]:.2f} in time, {slopes[1]:.2f} in memory")


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

    with plain() if path == "plain" else torch.enable_grad():
        work()
        given = sum(p.nbytes for p in layer.parameters()) + poses.nbytes
        layer.zero_grad()
        poses.grad = None
        held = max(0.0, held_by(work, bench.device) - given)
        return 1e3 * median_time(work, bench.device, bench.least / 2), held / 2**20


def measure_inference(bench: Bench) -> None:
    """Latency of a forward pass and what it holds, one image and many of them."""
    rows = bench.results["inference"] = []
    precisions, many = ("bf16", "tf32") if bench.cuda else ("32",), 4 if bench.quick else 256
    sizes = {"efficient_capsnet_mnist": (1, many), "capsnet_mnist": (1, many)}
    if not bench.quick:
        sizes["inverted_cifar10"] = (1, 128 if bench.cuda else 8)
    ones = [(preset, batch) for preset, batches in sizes.items() for batch in batches]
    for (preset, batch), precision in itertools.product(ones, precisions):
        network: nn.Module = create_model(preset).eval().to(bench.device)
        images = torch.rand(batch, *network.image, device=bench.device)  # type: ignore[misc]
        ways: dict[str, partial[Any]] = {"plain": partial(network, images)}
        last = create_model(preset).eval().to(bench.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ways["ours"] = partial(last, images.contiguous(memory_format=torch.channels_last))
        row: dict[str, Any] = {"preset": preset, "batch": batch, "precision": precision}
        rows.append(row)
        half = torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
        with torch.inference_mode(), products_in(precision), half:
            for path, work in ways.items():
                with plain() if path == "plain" else nullcontext():
                    work()
                    row[f"{path}_mib"] = held_by(work, bench.device) / 2**20
            if bench.cuda:
                ways["captured"] = partial(Inference(last), ways["ours"].args[0])
                ways["captured"]()
            turns: dict[str, list[float]] = {path: [] for path in ways}
            for _ in range(1 if bench.quick else 5):  # by turns, so that a busy minute befalls all of them
                for path, work in ways.items():
                    with plain() if path == "plain" else nullcontext():
                        turns[path].append(1e3 * median_time(work, bench.device, bench.least / 5))
        for path, times in turns.items():
            row[path] = sorted(times)[len(times) // 2]
            bench.save(f"inference of {preset}, {batch}, {precision}, {path}: {row[path]:.3f} ms")


def measure_cold(bench: Bench) -> None:
    """From the start of a process, with empty caches, to the end of the first training step; --presets all for all."""
    presets: Sequence[str] = QUICK_COLD if bench.quick else COLD
    if bench.arguments.presets:
        presets = [case.preset for case in bench.cases()]
    at_once, lock = min(bench.arguments.at_once, len(presets)), threading.Lock()
    bench.results |= {"cold": [], "cold_at_once": at_once}
    rows = bench.results["cold"]

    def lane(some: Sequence[str]) -> None:
        for row in bench.cold(some, 16 if bench.cuda else 2):
            with lock:
                rows.append(row)
                news = row["failed"] if "failed" in row else f"{row['total_s']:.1f} s"
                bench.save(f"cold start of {row['preset']}: {news} ({len(rows)} of {len(presets)})")

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lane, [presets[n::at_once] for n in range(at_once)]))
    rows.sort(key=lambda row: presets.index(row["preset"]))


def measure_papers(bench: Bench) -> None:
    """The columns of Li's table 1 and Choi's ratios, beside the printed numbers."""
    most = bench.arguments.batch or (None if bench.cuda else 2 if bench.quick else 4)  # images at once
    precision, ours = ("tf32", "captured") if bench.cuda else ("32", "ours")
    found = bench.results["papers"] = {"li": [], "choi": []}
    rows = {row: LI[row] for row in LI if not bench.quick or "same shape" in row}
    for row, (preset, options, memory, batch, seconds) in rows.items():
        case = Case(preset, min(most or batch, batch), options, ours, precision)
        got = {**bench.measure(case)[0], "row": row, "printed_mb": memory, "printed_batch": batch, "printed_s": seconds}
        found["li"].append(got)
        bench.save(f"Li, {row}: {in_words(got)}")
    for data, (ar, caps, images, printed) in CHOI.items():
        batch, times = most or 100, []
        pairs = [replace(case, batch=batch, precision=precision) for case in (ar, caps)]
        for got in bench.measure(*(replace(case, path=path) for path in (ours, "plain") for case in pairs)):
            times.append(got.get("ms", math.nan) * images / batch / 1e3)
            bench.save(f"Choi, {data}: {in_words(got)}")
        ratios = times[0] / times[1], times[2] / times[3]
        found["choi"].append({"data": data, "batch": batch, "seconds": times, "ratios": ratios, "printed": printed})
        bench.save(f"Choi, {data}: {ratios[0]:.2f}, plain {ratios[1]:.2f}, printed {printed}")
        if bench.quick:
            break


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "ceilings": measure_ceilings,
    "steps": measure_steps,
    "growth": measure_growth,
    "inference": measure_inference,
    "cold": measure_cold,
    "papers": measure_papers,
}
