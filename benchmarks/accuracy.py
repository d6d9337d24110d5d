"""Does the fast path learn as well as the reference? python benchmarks/accuracy.py [--rows capsnet] [--seeds 4]

Short trainings of a row, some seeds each: in float32 by the formulas in plain PyTorch, step by step; and as runs go by
default on this device, in bf16 with fused kernels and a captured step where there is a GPU. Errors are those on
held-out training images; the test set is not read. It ends with 1 where means are over three standard errors apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from torchcaps import ops, recipes
from torchcaps.recipes import Recipe
from torchcaps.train import train
from torchcaps.train.prepare import load_data

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "capsnet": ("sabour2017_table1:routing3", {"epochs": 2}),
    "inverted": ("tsai2020_table1:inverted-simple-cifar10", {"epochs": 6, "samples": 12_800}),
    "efficient": ("quick:mnist", {"epochs": 3}),
    "em": ("tsai2020_figure4:em-2", {"epochs": 5, "samples": 3_200, "batch_size": 32}),
    "encapnet": ("li2018_table3:7-skip-both", {"epochs": 3, "samples": 12_800}),
}


def short(row: str) -> Recipe:
    name, changes = ROWS[row]
    return replace(recipes.find(name), **changes, validation=0.1, select="last")


def errors(recipe: Recipe, seeds: int, device: str, reference: bool) -> tuple[list[float], float]:
    """Validation errors in per cent, and seconds."""
    data = load_data(recipe)
    found, start = [], time.perf_counter()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder, ops.backend("torch" if reference else "auto"):
            options: dict[str, Any] = {"capture": False} if reference else {}
            run = train(recipe, out=folder, seed=seed, data=data, device=device, log=None, **options)
            found.append(100 * run.metrics[-1]["validation_error"])
    return found, time.perf_counter() - start


def told(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", help="of the fast path; bf16 on a GPU, else 32")
    parser.add_argument("--samples", type=int, help="images an epoch, to see that it runs")
    args = parser.parse_args()
    precision = args.precision or ("bf16" if args.device.startswith("cuda") else "32")
    fine = True
    print(f"validation error (%), mean ± standard deviation over {args.seeds} seeds\n")
    print(f"{'':12}{'float32 reference':>22}{'seconds':>9}{f'fast, {precision}':>18}{'seconds':>9}{'apart by':>18}")
    for row in args.rows:
        recipe = short(row)
        recipe = replace(recipe, samples=args.samples) if args.samples else recipe
        plain, slow = errors(replace(recipe, precision="32"), args.seeds, args.device, reference=True)
        fast, quick = errors(replace(recipe, precision=precision), args.seeds, args.device, reference=False)
        noise = ((statistics.variance(plain) + statistics.variance(fast)) / args.seeds) ** 0.5
        apart = statistics.mean(fast) - statistics.mean(plain)
        ratio = abs(apart) / noise if noise else 0.0
        fine &= ratio <= 3
        print(
            f"{row:12}{told(plain):>22}{slow:>9.0f}{told(fast):>18}{quick:>9.0f}{ratio:>8.1f} std. errors", flush=True
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
