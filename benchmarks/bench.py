"""Speed and memory of the presets on this machine: python -m benchmarks.bench [--device cuda] [--only steps,growth]

Prints tables, and writes bench.json and bench.png; --show prints the tables of an earlier bench.json. Every number is a
median. All paths of a table are measured in one run, so that they can be compared: "ours" as the library runs by
default; "captured", the same step in a CUDA graph; "reference", our formulas in plain PyTorch with all votes stored;
"compiled", torch.compile of these; and "plain", each routing by the textbook with einsum. It may be stopped at any
time: what is known by then is shown and kept, and --resume measures the sections that were not finished.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.apart import Apart, groups, ready
from benchmarks.cases import ON_CPU, ON_CUDA, QUICK
from benchmarks.measuring import (
    PATHS,
    Case,
    Training,
    machine,
    measure,
    measure_by_turns,
    wait_for,
)
from benchmarks.sections import SECTIONS
from benchmarks.showing import SHOWN, plot
from torchcaps.models import list_models
from torchcaps.results import source


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
