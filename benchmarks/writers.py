"""MNIST rows judged on writers they have not seen: python -m benchmarks.writers ours:mnist-plain5 ours:mnist-resnet

MNIST's training digits stand in the order of their writers, those of two groups in turn, which --order shows: digits at
a small even distance are alike in slant and thickness, and at an odd one are not. So digits held out here and there are
by writers who are in the training set too, and tell less of the test set, which is by others, than a part in one piece.
Each row is trained --parts times, with another part held out, and all 60,000 training digits are judged by
a network that has not seen their writer. The test set is not looked at.

What is finished is passed over and what was begun goes on. Several trainings run at once (--at-once), on a GPU best
under its multi-process service (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchcaps import recipes
from torchcaps.data import load
from torchcaps.evaluate import Predictions, ensemble
from torchcaps.recipes import Recipe, with_overrides
from torchcaps.runs import look, open_run
from torchcaps.train import train
from torchcaps.train.prepare import load_data

Job = tuple[str, int, int, str, str]  # row, part, parts, its changes as words, folder
LAGS = (1, 2, 3, 4, 9, 10, 49, 50, 99, 100)


def order() -> str:
    """How alike digits are by their distance in the training set, each compared with the mean of its class."""
    split = load("mnist", validation=0).train
    images, labels = split.images.double() / 255, split.labels
    ink = images.sum((1, 2))
    axis = torch.arange(28.0, dtype=torch.float64)
    y, x = ((images.sum(across) * axis).sum(1) / ink for across in (2, 1))
    down, right = axis - y[:, None], axis - x[:, None]
    slant = torch.einsum("bhw,bh,bw->b", images, down, right) / torch.einsum("bhw,bh->b", images, down.square())
    thickness = ink / (images.diff(dim=1).abs().sum((1, 2)) + images.diff(dim=2).abs().sum((1, 2)))
    lines = ["distance   " + "".join(f"{lag:7}" for lag in LAGS)]
    for name, values in (("slant", slant), ("thickness", thickness)):
        even = torch.zeros_like(values)
        for label in range(10):
            own = labels == label
            even[own] = (values[own] - values[own].mean()) / values[own].std()
        lines.append(f"{name:11}" + "".join(f"{float((even[:-lag] * even[lag:]).mean()):7.2f}" for lag in LAGS))
    return "\n".join(lines)


def held_out(row: str, part: int, parts: int, changes: str) -> Recipe:
    """Args: changes: fields of the recipe as words, such as "lr=0.002 epochs=25"."""
    words = {}
    for word in changes.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word} is no change of {row}; one is written as lr=0.002")
        words[name] = value
    return with_overrides(recipes.find(row), words | {"validation": f"part-{part}-of-{parts}"})


def judged(job: Job) -> Predictions:
    """Trains, or goes on, and says what the network has for the digits held out, in their order."""
    row, part, parts, changes, folder = job
    recipe = held_out(row, part, parts, changes)
    if not (Path(folder) / "final.json").exists():
        run = train(recipe, out=folder, resume=True, log=None)
        if not run.finished:
            raise SystemExit(f"{folder}: stopped by {run.stopped}; the same command goes on")
    opened = open_run(folder)
    data = load_data(recipe)
    assert data.validation is not None
    found = look(opened.model, data.validation, data, recipe)
    print(f"{folder}: {int(wrong(found).sum())} of {len(found.labels):,} wrong", flush=True)
    return found


def wrong(found: Predictions) -> Tensor:
    return found.scores.argmax(1) != found.labels


def told(name: str, found: Predictions) -> str:
    missed = wrong(found)
    even, odd = int(missed[::2].sum()), int(missed[1::2].sum())
    return f"{name:60}{even + odd:6}{100 * float(missed.double().mean()):8.3f}{even:7}{odd:7}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="TABLE:ROW, or 'TABLE:ROW lr=0.002 epochs=25' with changes")
    parser.add_argument("--order", action="store_true", help="show that digits stand in the order of their writers")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/writers"))
    arguments = parser.parse_args(words)
    if arguments.order:
        print(order())
    jobs: list[Job] = []
    try:
        for line, part in itertools.product(arguments.rows, range(1, arguments.parts + 1)):
            row, _, changes = line.partition(" ")
            held_out(row, part, arguments.parts, changes)
            name = line.replace(":", "-").replace(" ", "-").replace("=", "-").replace("/", "-")
            folder = str(arguments.out / name / f"part-{part}-of-{arguments.parts}")
            jobs.append((row, part, arguments.parts, changes, folder))
    except ValueError as error:
        print(f"writers: {error}", file=sys.stderr)
        return 2
    if not jobs:
        return 0
    with multiprocessing.get_context("spawn").Pool(arguments.at_once) as pool:
        found = pool.map(judged, jobs, chunksize=1)
    members = []
    print(f"{'':60} wrong       %   even    odd")
    for number, line in enumerate(arguments.rows):
        own = found[number * arguments.parts : (number + 1) * arguments.parts]
        members.append(Predictions(*(torch.cat(pieces) for pieces in zip(*own, strict=True))))
        print(told(line, members[-1]))
    if len(members) > 1:
        print(told("all together", ensemble(members)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
