"""MNIST rows judged on writers they have not seen: python -m benchmarks.writers ours:mnist-plain5 ours:mnist-resnet

MNIST's training digits stand in the order of their writers, those of two groups in turn, which --order shows: digits at
a small even distance are alike in slant and thickness, and at an odd one are not. So digits held out here and there are
by writers who are in the training set too, which those of the test set are not, and a part in one piece is by others.
Each row is trained --parts times, with another part held out, and all 60,000 training digits are judged by a network
that has not seen their writer, but for those at the borders. The test set is not looked at.

What is finished is passed over and what was begun goes on, so the same call, given again, takes up where the last one
ended. Trainings run side by side as in `benchmarks.rows`, whose words on time, logs and exit codes hold here too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import rows
from torchcaps import recipes
from torchcaps.data import load
from torchcaps.evaluate import Predictions, ensemble
from torchcaps.models import create_model
from torchcaps.recipes import Recipe, differing, with_overrides
from torchcaps.runs import look, open_run, read_recipe
from torchcaps.train.prepare import load_data

LAGS = (1, 2, 3, 4, 9, 10, 49, 50, 99, 100, 199, 200, 999, 1000)


class Job(NamedTuple):
    """A row with a part held out, and the command that trains it."""

    recipe: Recipe
    folder: Path
    words: list[str]


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
    name = "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in line)
    jobs = []
    for part in range(1, parts + 1):
        changes["validation"] = f"part-{part}-of-{parts}"
        recipe, folder = with_overrides(recipes.find(row), changes), out / name / changes["validation"]
        if (folder / "recipe.json").exists():
            begun, _ = read_recipe(folder)
            if (field := differing(begun.to_dict(), recipe.to_dict())) is not None:
                raise ValueError(f"{folder} was trained with another {field}; remove it, or give another --out")
        options = [word for change in changes.items() for word in ("--set", "=".join(change))]
        jobs.append(Job(recipe, folder, ["train", row, *options, "--seed", seed, "--no-test", "--out", str(folder)]))
    data = load_data(recipe)
    create_model(recipe.model, **{"image": data.image, "classes": data.classes, **recipe.model_args})
    return jobs


def judged(jobs: Sequence[Job]) -> Predictions:
    """What the networks of a row have for the digits held out, in their order."""
    found = []
    for recipe, folder, _ in jobs:
        data = load_data(recipe)
        assert data.validation is not None
        found.append(look(open_run(folder).model, data.validation, data, recipe))
    return Predictions(*(torch.cat(pieces) for pieces in zip(*found, strict=True)))


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
    parser.add_argument("--minutes", type=float, default=float("inf"))
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
    left = [job.words for row in jobs for job in row if not (job.folder / "final.json").exists()]
    if left:
        logs = arguments.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if code := rows.run(left, arguments.at_once, arguments.minutes, logs):
            return code
    members = [judged(row) for row in jobs]
    print(f"{'':60} wrong       %   even    odd")
    for line, member in zip(arguments.rows, members, strict=True):
        print(told(line, wrong(member)))
    if len(members) > 1:
        print(told("all together", wrong(ensemble(members))))
        print(told("wrong for every one", torch.stack([wrong(member) for member in members]).all(0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
