"""What networks answer before their first step: python -m benchmarks.starts tsai2020_figure4 ours:cifar10 ...

Of each row, or of each of a table's rows, a new network sees the first images of its training. Where class capsules
have next to no length and an image's scores are those of any other, SGD may never begin; Adam has with less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from torchcaps import length, recipes
from torchcaps.models import create_model
from torchcaps.recipes import Recipe
from torchcaps.train.prepare import load_data, training_batches

HEAD = f"{'row':45}{'length':>9}{'score':>9}{'spread':>9}"


def start(recipe: Recipe, images: int, seed: int = 0) -> tuple[float, float, float] | None:
    """Mean length of class capsules, mean score, and how far the scores of a class spread over the images."""
    data = load_data(recipe)
    torch.manual_seed(seed)
    model = create_model(recipe.model, **{"image": data.image, "classes": data.classes, **recipe.model_args}).train()
    shared = {"device": torch.device("cpu"), "rank": 0, "world": 1}
    batch = next(iter(training_batches(replace(recipe, batch_size=images), data, seed, shared).epoch(0)))
    with torch.no_grad():
        output = model(batch.images)
    if output.capsules is None:
        return None
    return length(output.capsules.poses).mean().item(), output.scores.mean().item(), output.scores.std(0).mean().item()


def named(row: str) -> list[str]:
    tables = recipes.tables()
    return [f"{row}:{name}" for name in tables[row].ROWS] if row in tables else [row]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW", help="such as tsai2020_figure4, or one of its rows")
    parser.add_argument("--images", type=int, default=16, help="that a network sees at once")
    args = parser.parse_args(argv)
    try:
        if args.images < 2:
            raise ValueError(f"scores spread over two images or more, got --images {args.images}")
        found = {name: recipes.find(name) for row in args.rows for name in named(row)}
        print(HEAD)
        for name, recipe in found.items():
            answers = start(recipe, args.images)
            told = "   no class capsules" if answers is None else "{:9.4f}{:9.4f}{:9.5f}".format(*answers)
            print(f"{name:45}{told}", flush=True)
    except ValueError as problem:
        print(f"starts: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
