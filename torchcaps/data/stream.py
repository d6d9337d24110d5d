"""Images that stay on disk: batches of them through worker processes, with the order of Batches.

Workers only decode. Which image comes when is decided before it is read, and augmentation happens afterwards on the
device, so neither depends on the number of workers or ranks, and a run resumes without reading what it has seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcaps.data.batches import Batches, Order
from torchcaps.data.errors import DataError
from torchcaps.data.images import read_image
from torchcaps.data.splits import Batch, Example, Split


class Streamed:
    """A split whose images stay on disk and are decoded each time they are asked for.

    `on_error` says what StreamedBatches does with a file that turns out to be damaged: "stop", or "skip" it, so that
    its batch is a row shorter.

    Shapes: labels int64 [n] or [n, k], image (c, h, w)
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        labels: Tensor,
        class_names: Sequence[str],
        image: tuple[int, int, int],
        *,
        on_error: str = "stop",
        device: Any = "cpu",
    ):
        self.paths = [os.fspath(path) for path in paths]
        self.device = torch.device(device)
        self.labels = labels.long().to(self.device)
        self.class_names = tuple(class_names)
        self.classes = len(self.class_names)
        self.image = image
        self.on_error = on_error

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Example:
        return Example(read_image(self.paths[index], self.image).to(self.device), self.labels[index])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.image))
        return f"Streamed({len(self):,} images of {size}, {self.classes} classes, to {self.device})"

    def gather(self, indices: Tensor) -> Batch:
        images = [read_image(self.paths[index], self.image) for index in indices.tolist()]
        return Batch(_stack(images, self.image).to(self.device), self.labels.index_select(0, indices))

    def take(self, indices: Tensor) -> Streamed:
        """The split of these rows only, in this order."""
        paths = [self.paths[index] for index in indices.tolist()]
        labels = self.labels.index_select(0, indices.to(self.device))
        return Streamed(paths, labels, self.class_names, self.image, on_error=self.on_error, device=self.device)

    def to(self, device: Any) -> Streamed:
        return Streamed(self.paths, self.labels, self.class_names, self.image, on_error=self.on_error, device=device)


class StreamedBatches(Batches):
    """Batches of a Streamed split: decoded by workers, augmented on the device, equal to those of Batches bit for bit.

    `skipped` gathers what was left out under on_error="skip", a sentence for each path.

    Args:
        workers: processes that decode; 0 decodes in this one, None takes a core each, up to 8.
    """

    def __init__(self, split: Streamed, batch_size: int, *, workers: int | None = None, **options: Any):
        super().__init__(split, batch_size, **options)
        self.streamed: Streamed = split if options.get("device") is None else split.to(options["device"])
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.skipped: dict[str, str] = {}

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        split, cuda = self.streamed, self.device.type == "cuda"
        loader = DataLoader(
            _Decoder(split.paths, split.image),
            batch_sampler=_Rows(self.order, epoch, start),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            pin_memory=cuda,
            generator=torch.Generator(),  # or the loader would draw from torch's own, and a resumed run would differ
        )
        shares = self.order.shares(epoch, start)
        for (positions, indices), (images, kept, failures) in zip(shares, loader, strict=True):
            for row, sentence in failures:
                if split.on_error != "skip":
                    raise DataError(sentence)
                self.skipped[split.paths[indices[row]]] = sentence
            positions, indices = positions[kept].to(self.device), indices[kept].to(self.device)
            batch = Batch(images.to(self.device, non_blocking=cuda), split.labels.index_select(0, indices))
            yield self._finish(batch, epoch, positions)


def batches_for(split: Split, batch_size: int, *, workers: int | None = None, **options: Any) -> Batches:
    """StreamedBatches for a split on disk, Batches for one in memory; the options are those of Batches."""
    if isinstance(split, Streamed):
        return StreamedBatches(split, batch_size, workers=workers, **options)
    return Batches(split, batch_size, **options)


class _Decoder(Dataset[Any]):
    """Decodes a batch in a worker; failures travel back as sentences, which a raised error's traceback would bury."""

    def __init__(self, paths: list[str], image: tuple[int, int, int]):
        self.paths, self.image = paths, image

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
        images, kept, failures = [], [], []
        for row, index in enumerate(indices):
            try:
                images.append(read_image(self.paths[index], self.image))
                kept.append(row)
            except DataError as error:
                failures.append((row, str(error)))
        return _stack(images, self.image), torch.tensor(kept, dtype=torch.int64), failures


class _Rows:
    def __init__(self, order: Order, epoch: int, start: int):
        self.order, self.epoch, self.start = order, epoch, start

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for _, indices in self.order.shares(self.epoch, self.start))


def _as_it_is(batch: Any) -> Any:
    return batch


def _stack(images: list[Tensor], image: tuple[int, int, int]) -> Tensor:
    return torch.stack(images) if images else torch.empty((0, *image), dtype=torch.uint8)
