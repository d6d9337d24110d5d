"""Every kernel's tests under a memory checker: python -m benchmarks.memcheck [FILE ...] [--at-once 4] [--limit 600]

compute-sanitizer, which comes with CUDA, looks at every access of every kernel, and PyTorch gives each tensor memory of
its own, so that one past the end is seen. It needs a GPU. What it found is printed and written to --out as it comes,
some tests of a file at a time; files that stand there without an error, of this commit and machine, are passed over. It
ends with 1 where there is an error, a test fails or a file has not been finished.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import machine
from torchcaps.data.errors import write_whole
from torchcaps.results import source

CHECKER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
TESTS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-m", "triton", "-k", "not graph")  # which cannot be recorded so
PART = 40  # tests
COMPILING = "test_ahead_triton.py"  # of kernels, which run nowhere in it


def files() -> list[str]:
    found = (path for folder in ("tests/fused", "tests/ops") for path in Path(folder).glob("test_*triton.py"))
    return sorted(str(path) for path in found if path.name != COMPILING)


def parts(of: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The tests of these files, cut into parts that take minutes."""
    if not of:
        return []
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS, "--collect-only", *of], capture_output=True, text=True
    )
    if listed.returncode != 0:
        raise SystemExit(f"{listed.stdout}{listed.stderr}the tests of {', '.join(of)} cannot be listed")
    tests: dict[str, list[str]] = {file: [] for file in of}
    for line in listed.stdout.splitlines():
        if "::" in line:
            tests[line.partition("::")[0]].append(line)
    return [(file, found[n : n + PART]) for file, found in tests.items() for n in range(0, len(found), PART)]


def check(file: str, tests: Sequence[str], limit: float) -> dict[str, Any]:
    with subprocess.Popen(
        [*CHECKER, sys.executable, "-m", "pytest", *TESTS, *tests],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        start_new_session=True,
    ) as process:
        try:
            said, ended = process.communicate(timeout=limit)[0], True
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tests too, which would go on without their checker
            said, ended = process.communicate()[0], False
    row = {"file": file, "ended": ended, **reading(said)}
    if not right(row):
        print("\n".join(said.splitlines()[-20:]), flush=True)
    return row


def reading(said: str) -> dict[str, Any]:
    """What the checker and the tests say in the end. Without either, errors or passed are None."""
    errors = re.search(r"ERROR SUMMARY: (\d+) error", said)
    counted = re.compile(r"\d+ (passed|failed|errors?|skipped)\b.* in [\d.]+s")
    last = [line for line in said.splitlines() if counted.search(line)][-1:]
    counts = {word: int(count) for line in last for count, word in re.findall(r"(\d+) (passed|failed|error)", line)}
    return {
        "errors": None if errors is None else int(errors[1]),
        "passed": counts.get("passed", 0) if last else None,
        "failed": counts.get("failed", 0) + counts.get("error", 0),
    }


def right(row: dict[str, Any]) -> bool:
    return bool(row["ended"] and row["errors"] == 0 and row["passed"] and not row["failed"])


def in_words(row: dict[str, Any]) -> str:
    if not row["ended"]:
        return f"{row['file']}: not finished"
    return f"{row['file']}: {row['passed']} tests passed, {row['failed']} failed, {row['errors']} errors"


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A file by its parts; what one of them has not said, the file has not."""

    def total(name: str) -> int | None:
        counts = [row[name] for row in rows]
        return None if None in counts else sum(counts)

    counts = {name: total(name) for name in ("errors", "passed", "failed")}
    return {"file": rows[0]["file"], "ended": all(row["ended"] for row in rows), **counts}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of tests, if not all of kernels")
    parser.add_argument("--at-once", type=int, default=4, help="parts of files")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each")
    parser.add_argument("--out", type=Path, default=Path("runs/memcheck.json"))
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available():
        parser.error("there is no GPU whose memory could be checked")
    if shutil.which(CHECKER[0]) is None:
        parser.error(f"there is no {CHECKER[0]} on the path; it comes with CUDA")
    wanted, rows = [str(Path(file)) for file in arguments.files] or files(), {}
    for file in wanted:
        if not Path(file).is_file():
            parser.error(f"{file} is no file of tests")
    commit, changed = source()
    found = {"machine": machine(torch.device("cuda")), "date": str(date.today()), "commit": commit}
    if arguments.out.exists() and commit != "unknown" and not changed:
        before = json.loads(arguments.out.read_text())
        if all(before[name] == found[name] for name in ("machine", "commit")):
            rows = {row["file"]: row for row in before["files"] if right(row)}
    cut = parts([file for file in wanted if file not in rows])
    coming: dict[str, list[Any]] = {}
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for file, tests in cut:
            coming.setdefault(file, []).append(pool.submit(check, file, tests, arguments.limit))
        for file, futures in coming.items():
            rows[file] = together([future.result() for future in futures])
            print(in_words(rows[file]), flush=True)
            with write_whole(arguments.out) as place:
                place.write_text(json.dumps(found | {"files": list(rows.values())}, indent=1))
    for file in wanted:
        if file not in rows:
            print(f"{file}: no tests", flush=True)
    return 0 if all(file in rows and right(rows[file]) for file in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
