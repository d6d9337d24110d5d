"""Training steps, captured in a CUDA graph and not: python benchmarks/step.py [--device cuda] [--rows ...]

For each row and precision: whether both give the same losses over 30 steps, milliseconds a step with sampling and
augmentation, peak memory, and seconds from nothing to the first step. Images are random, of the data set's shape. On a
CPU nothing is captured. It ends with 1 where losses differ by more than rounding, or where a step that cannot be
captured does not go on without.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps import recipes
from torchcaps.capture import WARM_UP, Captured, own_stream
from torchcaps.data import Batch, DataSet
from torchcaps.data.protocols import bind, find
from torchcaps.data.splits import Stored
from torchcaps.optim import create_optimizer
from torchcaps.prepare import create_fabric, create_network, numerics, training_batches
from torchcaps.recipes import Recipe
from torchcaps.step import Step

ROWS = ("mazzia2021_table2:efficient", "sabour2017_table1:routing3", "tsai2020_table1:inverted-resnet-cifar10")
SHAPES = {"mnist": (28, 28), "cifar10": (3, 32, 32)}
STEPS = 30  # whose losses are compared
SAME = {"32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}  # of the loss, after so many steps of accumulated rounding
AT_ONCE = 1e-4  # at the first replay, where nothing has accumulated yet


def random_images(recipe: Recipe, count: int = 8192) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *SHAPES[recipe.data]), dtype=torch.uint8, generator=generator)
    split = Stored(images, torch.arange(count) % 10, tuple("0123456789"))
    steps = bind(find(recipe.protocol, recipe.data).train, split, split) if recipe.protocol else ()
    return DataSet("random", split, split, None, train_transform=steps)


class Training:
    """A recipe's steps, one after the other."""

    def __init__(self, recipe: Recipe, data: DataSet, device: str, capture: bool, channels_last: bool):
        fabric = create_fabric(recipe, device)
        torch.manual_seed(0)
        self.device = fabric.device
        network = create_network(recipe, data, fabric, channels_last).to(self.device)
        model, optimizer = fabric.setup(network, create_optimizer(recipe, network.parameters(), capture))
        model.train()
        self.batches = training_batches(recipe, data, 0, {"device": self.device, "rank": 0, "world": 1})
        self.said: list[str] = []
        self.step = Step(
            recipe, 0, fabric, network, model, optimizer, len(self.batches), capture=capture, say=self.said.append
        )
        self.number = 0
        self.source = self._endless()

    def take(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            terms = self.step(next(self.source), self.number)
            losses.append(torch.stack(list(terms.values())).sum())
            self.number += 1
        return losses

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _endless(self) -> Iterator[Batch]:
        return (batch for _, _, batch in self.batches.steps() if len(batch.images) == self.step.recipe.batch_size)


def measure(
    recipe: Recipe, data: DataSet, device: str, capture: bool, channels_last: bool, steps: int, least: float
) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    with ExitStack() as stack:
        stack.enter_context(numerics(recipe.precision, False))
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            stack.enter_context(own_stream(torch.device(device)))
        began = time.perf_counter()
        training = Training(recipe, data, device, capture, channels_last)
        losses = training.take(1)
        training.wait()
        first = time.perf_counter() - began
        losses = torch.stack(losses + training.take(steps - 1)).tolist()
        count, took = 0, 0.0
        while took < least or count < 5:
            training.wait()
            began = time.perf_counter()
            training.take(5 if count == 0 else 20)
            training.wait()
            took, count = took + time.perf_counter() - began, count + (5 if count == 0 else 20)
        captured = isinstance(training.step.run, Captured) and training.step.run.graph is not None
        return {
            "losses": losses,
            "ms": 1000 * took / count,
            "peak": torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan"),
            "first": first,
            "captured": captured,
            "said": training.said,
        }


def compared(plain: list[float], other: list[float]) -> tuple[float, float]:
    """The largest relative difference of all losses, and the one at the first replay."""
    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain, other, strict=True)]
    return max(differences), differences[min(WARM_UP, len(differences) - 1)]


def goes_on_without(device: torch.device) -> bool:
    """A step that asks the device something in the middle cannot be captured, and must run all the same."""
    said: list[str] = []

    def update(batch: Batch) -> dict[str, Tensor]:
        loss = F.dropout(batch.images).sum()
        return {"loss": loss * float(loss > -1e9)}

    with own_stream(device):
        captured = Captured(update, 4, said.append)
        batch = Batch(torch.ones(4, 64, device=device), torch.zeros(4, device=device))
        found = []
        for _ in range(WARM_UP + 4):
            torch.manual_seed(1)
            found.append(float(captured(batch)["loss"]))
    print(f"a step that cannot be captured says: {' / '.join(said)}")
    return len(said) == 1 and len(set(found)) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--precisions", nargs="+", default=("32", "tf32", "bf16"))
    parser.add_argument("--batch-size", type=int, help="instead of the recipe's")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--least", type=float, default=0.5, help="seconds to spend on each time")
    arguments = parser.parse_args()
    cuda = arguments.device.startswith("cuda")
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}")
    began, fine = time.perf_counter(), True
    for row in arguments.rows:
        recipe = recipes.find(row)
        recipe = replace(recipe, batch_size=arguments.batch_size or recipe.batch_size)
        data = random_images(recipe)
        print(f"\n{row}, batch {recipe.batch_size}")
        print(f"{'':32} {'ms a step':>10} {'peak GiB':>9} {'first, s':>9} {'differs':>9} {'at once':>9}")
        for precision in arguments.precisions:
            recipe = replace(recipe, precision=precision)
            plain: list[float] = []
            for capture, channels_last in (False, True), (True, True), (True, False), (False, True):
                if capture and not cuda:
                    continue
                least = 0.0 if plain and not capture else arguments.least  # the last one shows what noise there is
                found = measure(recipe, data, arguments.device, capture, channels_last, arguments.steps, least)
                plain = plain or found["losses"]
                differs, at_once = compared(plain, found["losses"])
                words = "captured" if found["captured"] else "as it is"
                words = f"{precision} {words}, {'channels last' if channels_last else 'contiguous'}"
                numbers = f"{found['ms']:10.3f} {found['peak']:9.2f} {found['first']:9.2f}"
                print(f"{words:32} {numbers} {differs:9.1e} {at_once:9.1e}", flush=True)
                for sentence in found["said"]:
                    print(f"    {sentence}")
                if channels_last:
                    fine &= differs <= SAME[precision] and at_once <= max(AT_ONCE, SAME[precision] / 10)
    if cuda:
        fine &= goes_on_without(torch.device(arguments.device))
    print(f"\n{'fine' if fine else 'NOT fine'}, after {time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
