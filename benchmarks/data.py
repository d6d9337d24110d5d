"""How fast augmentation and generation are on this machine: python benchmarks/data.py [--device cuda] [--compile]

Digits are MNIST's where it is in the cache, else random ones; the time is the same.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch

from torchcaps.data.augment import byerly
from torchcaps.data.generated import DiverseMultiMNIST, Generated, GeneratedAffNIST, MultiMNIST
from torchcaps.data.random import Draws, permuted
from torchcaps.data.splits import Stored

TARGET = 20e6  # images a second on a GPU
STEP = 0.4  # milliseconds of an Efficient-CapsNet training step of 16 images, a tenth of which the chain may take


def digits(device: torch.device, root: str | None) -> tuple[Stored, str]:
    try:
        from torchcaps.data.sets import load

        train = load("mnist", root=root, offline=True).train.to(device)
        assert isinstance(train, Stored)
        return train, "MNIST"
    except (ImportError, ValueError, OSError):
        generator = torch.Generator().manual_seed(0)
        images = torch.zeros(60_000, 28, 28, dtype=torch.uint8)
        images[:, 4:24, 4:24] = torch.randint(0, 256, (60_000, 20, 20), dtype=torch.uint8, generator=generator)
        return Stored(images, torch.arange(60_000) % 10, tuple("0123456789")).to(device), "random"


def seconds(work: Callable[[], object], device: torch.device, least: float) -> float:
    """The median time of one call, over as many as take `least` seconds, at least 5."""
    times: list[float] = []
    for _ in range(3):
        work()
    while len(times) < 5 or sum(times) < least:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--root", help="the cache folder, if not the usual one")
    parser.add_argument("--batches", type=int, default=256, help="batches of 16 drawn in one call of the Byerly chain")
    parser.add_argument("--images", type=int, help="generated in one call (262,144 on a GPU, 4,096 on a CPU)")
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--least", type=float, default=1.0, help="seconds to spend on each number")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    count = arguments.images or (262_144 if device.type == "cuda" else 4_096)
    base, origin = digits(device, arguments.root)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {origin} digits\n")

    def measure(work: Callable[[], object]) -> float:
        with torch.inference_mode():
            return seconds(work, device, arguments.least)

    print(f"{'Byerly chain':44} {'ms a batch of 16':>18} {'images a second':>18}   of {STEP} ms")

    def chain(title: str, step: Callable[..., object], batches: int) -> None:
        positions = torch.arange(16 * batches, device=device)
        images = base.images[: 16 * batches, None].float() / 255

        def work() -> object:
            return step(images, Draws(0, 0, positions))

        took = measure(work)
        each = 1000 * took / batches
        print(f"{title:44} {each:18.4f} {16 * batches / took:18,.0f}   {each / STEP:6.1%}")

    chain("one batch in a call", byerly(), 1)
    chain(f"{arguments.batches} batches in a call", byerly(), arguments.batches)
    if arguments.compile:
        chain(f"{arguments.batches} batches in a call, compiled", torch.compile(byerly()), arguments.batches)

    length = 60_000_000
    took = measure(lambda: permuted(torch.arange(count, device=device), length, 0, 0))
    print(f"\n{f'order of {length:,}':44} {'':18} {count / took:18,.0f}")

    print(f"\n{f'generated, {count:,} in a call':44} {'ms a call':>18} {'images a second':>18}   of {TARGET:,.0f}")
    sets: list[tuple[str, Generated, bool]] = [
        ("MultiMNIST", MultiMNIST(base), False),
        ("MultiMNIST, with targets", MultiMNIST(base), True),
        ("MultiMNIST, shift 6, with targets", MultiMNIST(base, shift=6), True),
        ("MultiMNIST, relative, with targets", MultiMNIST(base, relative=True), True),
        ("DiverseMultiMNIST", DiverseMultiMNIST(base, 21_000_000), False),
        ("DiverseMultiMNIST, with targets", DiverseMultiMNIST(base, 21_000_000), True),
        ("DiverseMultiMNIST, mean, with targets", DiverseMultiMNIST(base, 21_000_000, overlay="mean"), True),
        ("affNIST, generated", GeneratedAffNIST(base), False),
    ]
    for title, split, targets in sets:
        indices = permuted(torch.arange(count, device=device), len(split), 0, 0)
        gathers: list[tuple[str, Callable[..., object]]] = [(title, split.gather)]
        if arguments.compile:
            gathers.append((f"{title}, compiled", torch.compile(split.gather)))
        for label, gather in gathers:
            took = measure(partial(gather, indices, targets=targets))
            print(f"{label:44} {1000 * took:18.3f} {count / took:18,.0f}   {count / took / TARGET:6.2f}")


if __name__ == "__main__":
    main()
