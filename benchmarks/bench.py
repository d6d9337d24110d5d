"""Speed and memory of the presets on this machine: python -m benchmarks.bench [--device cuda] [--only steps,growth]

Prints tables, and writes bench.json and bench.png; --show prints the tables of an earlier bench.json. Every number is a
median. All paths of a table are measured in one run, so that they can be compared: "ours" as the library runs by
default; "captured", the same step in a CUDA graph; "reference", our formulas in plain PyTorch with all votes stored;
"compiled", torch.compile of these; and "plain", each routing by the textbook with einsum. It may be stopped at any
time: what is known by then is shown and kept, and --resume measures the sections that were not finished.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.apart import Apart, groups, ready
from benchmarks.measuring import (
    PATHS,
    Case,
    Training,
    ceilings,
    held_by,
    machine,
    measure,
    measure_by_turns,
    median_time,
    products_in,
    slope,
    wait_for,
)
from benchmarks.plain import plain
from benchmarks.showing import SHOWN, plot
from torchcaps.layers import LinearCaps
from torchcaps.models import Inference, create_model, list_models
from torchcaps.results import source
from torchcaps.routing import DynamicRouting

SIMPLE = {"backbone": "simple"}
ON_CPU = (
    Case("efficient_capsnet_mnist", 16),
    Case("capsnet_mnist", 32),
    Case("capsnet_mnist", 32, {"classes": 200, "decoder": False}),
    Case("inverted_cifar10", 4, SIMPLE),
    Case("inverted_cifar10", 4),
    Case("em_cifar10", 2, SIMPLE),
    Case("ar_capsnet_mnist", 16),
    Case("encapnet6_cifar10", 4),
)
LARGE = {"image": (3, 227, 227), "classes": 196, "decoder": False}  # 12 x 12 x 32 children; step.py has 11 x 11
ON_CUDA = (
    Case("efficient_capsnet_mnist", 16, precision="bf16"),
    Case("capsnet_mnist", 128, precision="bf16"),
    Case("em_cifar10", 128, SIMPLE, precision="bf16"),
    Case("inverted_cifar10", 128, precision="bf16"),
    Case("inverted_cifar10", 128, {"iterations": 3}, precision="bf16"),
    Case("capsnet", 128, LARGE, precision="bf16"),
    Case("efficient_capsnet_mnist", 16, precision="tf32"),
    Case("capsnet_mnist", 128, precision="tf32"),
    Case("em_cifar10", 128, SIMPLE, precision="tf32"),
    Case("inverted_cifar10", 128, precision="tf32"),
)
QUICK = (Case("efficient_capsnet_mnist", 4), Case("inverted_cifar10", 1, SIMPLE))
QUICK_COLD = ("efficient_capsnet_mnist",)
COLD = (
    "efficient_capsnet_mnist",
    "capsnet_mnist",
    "inverted_cifar10",
    "em_cifar10",
    "ar_capsnet_mnist",
    "encapnet6_cifar10",
    "capnet_em_cifar10",
)
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

    def __init__(self, arguments: argparse.Namespace, caches: str):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.cuda, self.quick = self.device.type == "cuda", arguments.quick
        self.least = 0.0 if self.quick else arguments.least
        self.results: dict[str, Any] = {"machine": machine(self.device), "date": str(date.today())}
        self.results |= {"commit": source()[0], "asked": asked(arguments), "took_s": {}}
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.compiling = arguments.compiling
        self.caches = caches  # the folder of what is compiled in this run

    def resume(self) -> None:
        """Takes over the finished sections of the bench.json that is there, if it measured the same."""
        path = self.out / "bench.json"
        if not path.exists():
            return
        try:
            before = json.loads(path.read_text())
            another = [key for key in ("machine", "commit", "asked") if before[key] != self.results[key]]
            unfinished = set(SECTIONS) - set(before["took_s"]) - {"ceilings"}  # which steps have measured on their way
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no bench.json that can be gone on with: {error!r}") from error
        if another:
            differs = ", ".join(f"{key} {before[key]} and now {self.results[key]}" for key in another)
            raise ValueError(f"{path} is of something else: {differs}; without --resume it is begun anew")
        self.results = {name: found for name, found in before.items() if name not in unfinished}
        self.results["calls"] = before.get("calls", 1) + 1

    def save(self, news: str) -> None:
        """Writes all there is, and says what is new."""
        part = self.out / "bench.json.part"
        part.write_text(json.dumps(self.results, indent=1))
        part.rename(self.out / "bench.json")
        print(f"{time.monotonic() - self.began:5.0f} s  {news}", file=sys.stderr, flush=True)

    @contextmanager
    def clock(self, section: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.results["took_s"][section] = time.monotonic() - began
        self.save(f"{section}: done")

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

    def measure(self, *cases: Case) -> list[dict[str, Any]]:
        return measure_by_turns(cases, self.device, self.least)

    def compiled(self, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
        """Each in a process of its own with the caches of this run, in what is left of the time for compiling.

        On a GPU as many as its memory holds are compiled side by side, as that is work for a processor, and then timed
        one after the other.
        """
        sides = groups(*self.room(cases)) if self.cuda else [[number] for number in range(len(cases))]
        self.results["compiled_at_once"] = max(map(len, sides), default=1)
        for side in ([cases[number] for number in numbers] for numbers in sides):
            rows = [{**case.plain(), "name": case.name} for case in side]
            if self.compiling < 1:
                yield from ({**row, "failed": "no time left for compiling"} for row in rows)
                continue
            began, until = time.monotonic(), time.monotonic() + min(self.arguments.limit, self.compiling)
            workers = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // len(side)))}
            asked = [{"case": case.plain(), "least": self.least} for case in side]
            apart = [Apart(self.job(one), workers | caches_in(self.caches)) for one in asked]
            try:
                for one in apart:
                    one.wait(until)
                self.compiling -= time.monotonic() - began
                for row, one in zip(rows, apart, strict=True):
                    yield {**one.answer(self.arguments.limit), **row}  # JSON has made lists of tuples
            finally:
                for one in apart:
                    one.forget()

    def room(self, cases: Sequence[Case]) -> tuple[list[float], float, int]:
        """MiB that each will take, by what the reference has taken; those of the GPU; and how many at most."""
        total = torch.cuda.get_device_properties(self.device).total_memory / 2**20
        rows = [row for row in self.results["steps"] if row["path"] == "reference" and "peak_mib" in row]
        known = {(row["name"], row["batch"]): row["peak_mib"] for row in rows}
        sizes = [1.25 * known.get((case.name, case.batch), total) + 1024 for case in cases]  # and its CUDA context
        return sizes, 0.9 * total, max(1, (os.cpu_count() or 1) // 2)

    def cold(self, presets: Sequence[str], batch: int) -> Iterator[dict[str, Any]]:
        """First steps, each in a process that has done nothing before but import; with empty caches of kernels."""
        asked = {"cold": list(presets), "batch": batch, "limit": self.arguments.limit, "began": time.time()}
        with subprocess.Popen(self.job(asked), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout)

    def job(self, asked: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", "benchmarks.bench", "--device", str(self.device), "--job", json.dumps(asked)]


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers of a run depend on besides machine and source."""
    return {name: getattr(arguments, name) for name in ("device", "quick", "presets", "paths", "batch", "least")}


def caches_in(folder: str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


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


def job(asked: dict[str, Any], device: torch.device) -> None:
    """What a process of its own measures; a line of JSON for each result."""
    if "cold" not in asked:
        print(json.dumps(measure(Case(**asked["case"]), device, asked["least"], ready)), flush=True)
        return
    imports = time.time() - asked["began"]
    apart = multiprocessing.get_context("fork")  # which has imported everything and done nothing yet
    for preset in asked["cold"]:
        case = Case(preset, asked["batch"])
        answers, answer = apart.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            process = apart.Process(target=first_step, args=(case, device, folder, answer))
            process.start()
            answer.close()
            row: dict[str, Any] = {**case.plain(), "name": case.name}
            if not answers.poll(asked["limit"]):
                row["failed"] = f"over {asked['limit']:.0f} s"
                process.kill()
            else:
                try:
                    build, step = answers.recv()
                    row |= {"imports_s": imports, "build_s": build, "step_s": step, "total_s": imports + build + step}
                except EOFError:
                    row["failed"] = "it was killed"
            process.join()
        print(json.dumps(row), flush=True)


def first_step(case: Case, device: torch.device, folder: str, answer: Connection) -> None:
    os.environ.update(caches_in(folder))
    began = time.perf_counter()
    training = Training(case, device)
    built = time.perf_counter()
    with training.on_path():
        training.step()
    wait_for(device)
    answer.send((built - began, time.perf_counter() - built))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda where there is one")
    parser.add_argument("--only", help=f"some of the sections {', '.join(SECTIONS)}")
    parser.add_argument("--presets", help="names with commas, or all; the usual ones if not given")
    parser.add_argument("--paths", help=f"some of {', '.join(PATHS)}")
    parser.add_argument("--batch", type=int, help="in place of the usual ones, with --presets and for the papers")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--least", type=float, default=1.0, help="seconds to spend on each number")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that compiling and a cold start may take")
    parser.add_argument("--at-once", type=int, default=1, help="cold starts side by side, which slows each of them")
    parser.add_argument("--compiling", type=float, default=240.0, help="seconds that all compiling may take together")
    parser.add_argument("--caches", help="folder that keeps what was compiled, for another run")
    parser.add_argument("--out", default="runs/bench", help="folder for bench.json and bench.png")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the sections that --out has finished",
    )
    parser.add_argument("--show", metavar="FILE", help="print the tables of this bench.json and measure nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.job:  # which asks nothing of CUDA, for its processes are forked
        with suppress(KeyboardInterrupt):
            job(json.loads(arguments.job), torch.device(arguments.device))
        return
    if arguments.show:
        try:
            results = json.loads(Path(arguments.show).read_text())
            calls = f"in {results['calls']} calls" if "calls" in results else "one run"
            print(f"{results['machine']}, {results['date']}, commit {results['commit'][:7]}, {calls}")
            show(results)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{arguments.show} is no bench.json: {error}")
        return
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sections = arguments.only.split(",") if arguments.only else list(SECTIONS)
    if arguments.at_once < 1:
        parser.error(f"--at-once must be at least 1, got {arguments.at_once}")
    for unknown in set(sections) - set(SECTIONS):
        parser.error(f"there is no section {unknown!r}; there are {', '.join(SECTIONS)}")
    for unknown in set((arguments.paths or "ours").split(",")) - set(PATHS):
        parser.error(f"there is no path {unknown!r}; there are {', '.join(PATHS)}")
    with tempfile.TemporaryDirectory() as caches:
        bench = Bench(arguments, arguments.caches or caches)
        if arguments.resume:
            try:
                bench.resume()
            except ValueError as error:
                parser.error(str(error))
        run(bench, sections)


def show(results: dict[str, Any]) -> None:
    for section, tables in SHOWN.items():
        if results.get(section):
            tables(results)


def run(bench: Bench, sections: Sequence[str]) -> None:
    print(bench.results["machine"])
    stopped = False
    try:
        for section in sections:
            if section not in bench.results:
                with bench.clock(section):
                    SECTIONS[section](bench)
    except KeyboardInterrupt:
        stopped = True
    show(bench.results)
    took = ", ".join(f"{section} {seconds:.0f}" for section, seconds in bench.results["took_s"].items())
    print(f"\n{time.monotonic() - bench.began:.0f} s in all: {took}")
    bench.save("done")
    written = ["bench.json"] + ["bench.png"] * plot(bench.results, bench.out / "bench.png")
    print(f"written to {bench.out}: {', '.join(written)}")
    if stopped:
        sys.exit("stopped before everything was measured")


if __name__ == "__main__":
    main()
