"""Every kernel's tests under a memory checker: python -m benchmarks.memcheck [FILE ...] [--at-once 4] [--limit 600]

compute-sanitizer, which comes with CUDA, looks at every access of every kernel, and PyTorch gives each tensor memory of
its own, so that one past the end is seen. It needs a GPU. What it found is printed and written to --out, file by file;
it ends with 1 where there is an error, a test fails or a file has not been finished.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import machine
from torchcaps.results import source

CHECKER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
TESTS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-m", "triton", "-k", "not graph")  # which cannot be recorded so
COMPILING = "test_ahead_triton.py"  # of kernels, which run nowhere in it


def files() -> list[str]:
    found = (path for folder in ("tests/fused", "tests/ops") for path in Path(folder).glob("test_*triton.py"))
    return sorted(str(path) for path in found if path.name != COMPILING)


def check(file: str, limit: float) -> dict[str, Any]:
    with subprocess.Popen(
        [*CHECKER, sys.executable, "-m", "pytest", *TESTS, file],
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
    print(in_words(row), flush=True)
    if not right(row):
        print("\n".join(said.splitlines()[-20:]), flush=True)
    return row


def reading(said: str) -> dict[str, Any]:
    """What the checker and the tests say in the end. Without either, errors or passed are None."""
    errors = re.search(r"ERROR SUMMARY: (\d+) error", said)
    last = [line for line in said.splitlines() if re.search(r"\d+ (passed|failed|errors?)\b.* in [\d.]+s", line)][-1:]
    counts = {word: int(count) for line in last for count, word in re.findall(r"(\d+) (passed|failed|error)", line)}
    return {
        "errors": None if errors is None else int(errors[1]),
        "passed": counts.get("passed"),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
    }


def right(row: dict[str, Any]) -> bool:
    return bool(row["ended"] and row["errors"] == 0 and row["passed"] and not row["failed"])


def in_words(row: dict[str, Any]) -> str:
    if not row["ended"]:
        return f"{row['file']}: not finished"
    return f"{row['file']}: {row['passed']} tests passed, {row['failed']} failed, {row['errors']} errors"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="tests, if not all of kernels")
    parser.add_argument("--at-once", type=int, default=4, help="files")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a file")
    parser.add_argument("--out", type=Path, default=Path("runs/memcheck.json"))
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available():
        parser.error("there is no GPU whose memory could be checked")
    if shutil.which(CHECKER[0]) is None:
        parser.error(f"there is no {CHECKER[0]} on the path; it comes with CUDA")
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(partial(check, limit=arguments.limit), arguments.files or files()))
    found = {"machine": machine(torch.device("cuda")), "date": str(date.today()), "commit": source()[0], "files": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    part = arguments.out.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.rename(arguments.out)
    return 0 if all(map(right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
