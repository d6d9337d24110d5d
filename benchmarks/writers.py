"""MNIST rows judged on writers they have not seen: python -m benchmarks.writers ours:mnist-plain5 ours:mnist-resnet

MNIST's training digits stand in the order of their writers, those of two groups in turn, which --order shows: digits at
a small even distance are alike in slant and thickness, and at an odd one are not. So digits held out here and there are
by writers who are in the training set too, which those of the test set are not, and a part in one piece is by others.
Each row is trained --parts times, with another part held out, and all 60,000 training digits are judged by a network
that has not seen their writer, but for those at the borders. The test set is not looked at.

What is finished is passed over and what was begun goes on. Several trainings run at once (--at-once), on a GPU best
under its multi-process service (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps import recipes
from torchcaps.data import load
from torchcaps.evaluate import Predictions, ensemble
from torchcaps.models import create_model
from torchcaps.recipes import Recipe, differing, with_overrides
from torchcaps.runs import look, open_run, read_recipe
from torchcaps.train import train
from torchcaps.train.prepare import load_data

LAGS = (1, 2, 3, 4, 9, 10, 49, 50, 99, 100, 199, 200, 999, 1000)


class Job(NamedTuple):
    """A row with a part held out."""

    recipe: Recipe
    seed: int
    folder: Path


def order() -> str:
    """How alike digits are by their distance, each compared with those of its class at even or at odd places."""
    split = load("mnist", validation=0).train
    images, labels = split.images.double() / 255, split.labels
    ink = images.sum((1, 2))
    axis = torch.arange(28.0, dtype=torch.float64)
    y, x = ((images.sum(across) * axis).sum(1) / ink for across in (2, 1))
    down, right = axis - y[:, None], axis - x[:, None]
    slant = torch.einsum("bhw,bh,bw->b", images, down, right) / torch.einsum("bhw,bh->b", images, down.square())
    thickness = ink / (images.diff(dim=1).abs().sum((1, 2)) + images.diff(dim=2).abs().sum((1, 2)))
    alike = 2 * labels + torch.arange(len(labels)) % 2
    lags = [lag for lag in LAGS if lag < len(labels)]
    lines = ["distance   " + "".join(f"{lag:7}" for lag in lags)]
    for name, values in (("slant", slant), ("thickness", thickness)):
        even = torch.zeros_like(values)
        for kind in alike.unique():
            own = alike == kind
            even[own] = (values[own] - values[own].mean()) / values[own].std().clamp(min=1e-6)
        lines.append(f"{name:11}" + "".join(f"{float((even[:-lag] * even[lag:]).mean()):7.2f}" for lag in lags))
    return "\n".join(lines)


def plan(line: str, parts: int, out: Path) -> list[Job]:
    """The jobs of a row, which may have changes behind it, such as "ours:mnist lr=0.002 seed=1"."""
    row, *words = line.split()
    changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word} is no change of {row}; one is written as lr=0.002")
        changes[name] = value
    seed = changes.pop("seed", "0")
    if not seed.isdecimal():
        raise ValueError(f"seed must be a whole number from 0, got {seed}")
    folder = out / "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in line)
    jobs = []
    for part in range(1, parts + 1):
        recipe = with_overrides(recipes.find(row), changes | {"validation": f"part-{part}-of-{parts}"})
        job = Job(recipe, int(seed), folder / f"part-{part}-of-{parts}")
        if (job.folder / "recipe.json").exists():
            begun, _ = read_recipe(job.folder)
            if (field := differing(begun.to_dict(), recipe.to_dict())) is not None:
                raise ValueError(f"{job.folder} was trained with another {field}; remove it, or give another --out")
        jobs.append(job)
    data = load_data(jobs[0].recipe)
    create_model(recipe.model, **{"image": data.image, "classes": data.classes, **recipe.model_args})
    return jobs


def judged(job: Job) -> Predictions:
    """Trains, or goes on, and says what the network has for the digits held out, in their order."""
    recipe, seed, folder = job
    if not (folder / "final.json").exists():
        run = train(recipe, out=folder, seed=seed, resume=True, log=None)
        if not run.finished:
            raise RuntimeError(f"{folder} was stopped by {run.stopped}; the same command goes on")
    data = load_data(recipe)
    assert data.validation is not None
    found = look(open_run(folder).model, data.validation, data, recipe)
    print(f"{folder}: {int(wrong(found).sum())} of {len(found.labels):,} wrong", flush=True)
    return found


def wrong(found: Predictions) -> Tensor:
    return found.scores.argmax(1) != found.labels


def told(name: str, missed: Tensor) -> str:
    even, odd = int(missed[::2].sum()), int(missed[1::2].sum())
    return f"{name:60}{even + odd:6}{100 * float(missed.double().mean()):8.3f}{even:7}{odd:7}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="TABLE:ROW, or 'TABLE:ROW lr=0.002 seed=1' with changes")
    parser.add_argument("--order", action="store_true", help="show that digits stand in the order of their writers")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/writers"))
    arguments = parser.parse_args(words)
    try:
        if not arguments.rows and not arguments.order:
            raise ValueError("name a row, such as ours:mnist-plain5, or ask for --order")
        if arguments.parts < 2 or arguments.at_once < 1:
            raise ValueError("--parts must be at least 2 and --at-once at least 1")
        jobs = [plan(line, arguments.parts, arguments.out) for line in arguments.rows]
    except ValueError as error:
        print(f"writers: {error}", file=sys.stderr)
        return 2
    if arguments.order:
        print(order())
    if not jobs:
        return 0
    try:
        with ProcessPoolExecutor(arguments.at_once, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(judged, itertools.chain(*jobs)))
    except RuntimeError as error:
        print(f"writers: {error}", file=sys.stderr)
        return 3
    members = []
    print(f"{'':60} wrong       %   even    odd")
    for number, line in enumerate(arguments.rows):
        own = found[number * arguments.parts : (number + 1) * arguments.parts]
        members.append(Predictions(*(torch.cat(pieces) for pieces in zip(*own, strict=True))))
        print(told(line, wrong(members[-1])))
    if len(members) > 1:
        print(told("all together", wrong(ensemble(members))))
        print(told("wrong for every one", torch.stack([wrong(member) for member in members]).all(0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
