"""Batches of a split that fits into memory: drawn, augmented and normalised on its device, with no worker processes.

Which image stands where, and what happens to it, are pure functions of (seed, epoch, position). So the epoch and the
number of the next batch are all there is to save: `batches.epoch(epoch, start)` goes on exactly where a run stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.augment import Step, apply
from torchcaps.data.random import Draws, permuted
from torchcaps.data.splits import Batch, Split

BLOCK = 1 << 16  # positions whose order is worked out in one call


@dataclass(frozen=True)
class Order:
    """Which images make up each batch of each epoch, and which of them belong to this rank.

    The epochs follow each other through shuffled laps of the whole split: with `samples` below its length the next
    epoch goes on where this one ends, so that every image is seen once before any is seen again. Unshuffled, every
    epoch takes the first `samples` images as they stand.

    Args:
        length: of the split.
        batch_size: of the global batch. Each rank takes its rows rank::world, so that the batches of all ranks together
            are those of one process.
        samples: in an epoch; the length of the split if not given.
    """

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world: int = 1
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError("the split is empty; batches need at least one image")
        if self.batch_size < 1 or self.size < 1:
            raise ValueError(f"batch_size {self.batch_size} and samples {self.size} must both be at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not among {self.world} processes; they count from 0")
        if self.batch_size < self.world:
            raise ValueError(f"a batch of {self.batch_size} cannot be shared by {self.world} processes; enlarge it")
        if not self.shuffle and self.size > self.length:
            raise ValueError(f"{self.size} samples in order need as many images, but the split has {self.length}")
        if not len(self):
            raise ValueError(
                f"an epoch of {self.size} fills no batch of {self.batch_size}; make it smaller or let drop_last=False"
            )

    @property
    def size(self) -> int:
        return self.length if self.samples is None else self.samples

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def shares(self, epoch: int, start: int = 0, device: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and image numbers of this rank's rows in batch `start` and those after it.

        Shapes: int64 [b] each; a last batch smaller than `world` leaves some ranks with b = 0
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(f"epoch {epoch} from batch {start}: epochs start at 0, and each has {len(self)} batches")
        end = min(self.size, len(self) * self.batch_size)
        block = max(1, BLOCK // self.batch_size) * self.batch_size
        for first in range(start * self.batch_size, end, block):
            last = min(first + block, end)
            positions = torch.arange(first, last, device=device)
            indices = self._indices(epoch, first, last, device)
            for batch in range(0, last - first, self.batch_size):
                rows = slice(batch + self.rank, min(batch + self.batch_size, last - first), self.world)
                yield positions[rows], indices[rows]

    def _indices(self, epoch: int, first: int, last: int, device: Any) -> Tensor:
        if not self.shuffle:
            return torch.arange(first, last, device=device)
        laps, begin, end = [], epoch * self.size + first, epoch * self.size + last
        while begin < end:
            lap, place = divmod(begin, self.length)
            count = min(end - begin, self.length - place)
            laps.append(permuted(torch.arange(place, place + count, device=device), self.length, self.seed, lap))
            begin += count
        return torch.cat(laps)


class Batches:
    """An epoch's batches, made on the device that holds the split.

    Args:
        split: images as uint8, stored or generated; `batches_for` also takes a split that streams.
        batch_size: of the global batch, shared by all ranks (see Order).
        transform: steps of torchcaps.data.augment, applied in order to images in [0, 1]. Where the split has targets,
            the same is done to them, so no step may be random or move pixels.
        shuffle: False for evaluation: each image once, as they stand.
        drop_last: leave out a last batch that is not full, as training on several ranks wants it.
        device: moves the split there first.
        samples: in an epoch, for generated sets with more images than an epoch should have.
        together: batches drawn and augmented in one call, for small batches on a fast device. The result is the same.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        transform: Sequence[Step] = (),
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        device: Any = None,
        rank: int = 0,
        world: int = 1,
        samples: int | None = None,
        together: int = 1,
    ):
        self.order = Order(len(split), batch_size, seed, shuffle, drop_last, rank, world, samples)
        if together < 1:
            raise ValueError(f"{together} batches cannot be drawn together; 1 draws them one by one")
        self.split = split if device is None else split.to(device)
        self.transform = tuple(transform)
        self.together = together
        self.device = torch.device(device if device is not None else getattr(split, "device", "cpu"))

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on.

        Shapes: images float32 [b, c, h, w], labels [b] or [b, k], targets float32 [b, k, c, h, w] or None
        """
        group = start - start % self.together  # groups begin at the same batches whether resumed or not
        shares = self.order.shares(epoch, group, self.device)
        while parts := list(islice(shares, self.together)):
            positions, indices = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
            batch = self._finish(self.split.gather(indices), epoch, positions)
            row = 0
            for number, (own, _) in enumerate(parts, group):
                if number >= start:
                    rows = slice(row, row + len(own))
                    targets = None if batch.targets is None else batch.targets[rows]
                    yield Batch(batch.images[rows], batch.labels[rows], targets)
                row += len(own)
            group += len(parts)

    def steps(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """Batches without end, each with its epoch and number; hand those of the next batch back to go on later."""
        while True:
            for number, batch in enumerate(self.epoch(epoch, start), start):
                yield epoch, number, batch
            epoch, start = epoch + 1, 0

    def _finish(self, batch: Batch, epoch: int, positions: Tensor) -> Batch:
        draws = Draws(self.order.seed, epoch, positions)
        if batch.targets is None:
            return Batch(apply(self.transform, as_float(batch.images), draws), batch.labels)
        for step in self.transform:
            if getattr(step, "geometric", False) or getattr(step, "random", False):
                raise ValueError(f"{step} would part the images from their targets; leave it out for this set")
        images = apply(self.transform, as_float(batch.images), draws)
        targets = apply(self.transform, as_float(batch.targets.flatten(0, 1)))
        return Batch(images, batch.labels, targets.unflatten(0, batch.targets.shape[:2]))


def as_float(images: Tensor) -> Tensor:
    """uint8 as float32 in [0, 1]."""
    return images.to(torch.float32) / 255
