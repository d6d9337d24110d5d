"""`torchcaps quick`, which `make run` calls: a capsule network trained in minutes, its figure and its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torchcaps.commands.train import CODES
from torchcaps.commands.words import Row, choose, described, headline, run_folder

FIRST, INSTEAD = "quick:mnist", "quick:digits"
WHY = "MNIST cannot be had, so the digits in the package take its place; torchcaps data get mnist tells why."


def quick(*, out: str = "runs", device: str = "auto") -> int:
    """Train Efficient-CapsNet on MNIST in about three minutes, and write a report with its mistakes.

    Where MNIST cannot be had, the small digits in the package take its place. Stopped in between, the same command goes
    on; once finished, it shows what came out.

    Args:
        out: the folder for the run's own folder.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from torchcaps.data.errors import DataError, NotWritten
    from torchcaps.finish import finish
    from torchcaps.train.folder import check_folder
    from torchcaps.train.prepare import load_data

    row, data = choose(FIRST, {}), None
    folder = _folder(row, out)
    if not (folder / "test.json").exists():
        try:
            data = load_data(row.recipe)
        except NotWritten:
            raise
        except DataError:
            print(WHY, flush=True)
            row = choose(INSTEAD, {})
            folder = _folder(row, out)
    if (folder / "final.json").exists():
        check_folder(folder, row.recipe, 0, resume=True)
    elif code := _train(row, folder, data, device):
        return code
    results = Path(out) / "quick.jsonl"
    result = finish(folder, table=row.table, row=row.row, results=results, device=device, say=print)
    report = folder / "report.html"
    print(headline(result, row.recipe))
    print(f"report: {report}" if report.exists() else f"run: {folder}", flush=True)
    return 0


def _train(row: Row, folder: Path, data: Any, device: str) -> int:
    """The exit code: 0 for a run at its end."""
    from torchcaps.train import train

    print("\n".join(described(row)), flush=True)
    run = train(row.recipe, out=folder, about=row.about(), data=data, device=device, resume=True)
    if run.finished:
        return 0
    print(f"saved at step {run.step}; the same command goes on", file=sys.stderr, flush=True)
    return CODES.get(run.stopped, 1)


def _folder(row: Row, out: str) -> Path:
    return Path(out) / run_folder(row).name / "seed-0"
