"""Images that stay on disk: how one is read, and batches of them through worker processes, with the order of Batches.

Workers only decode. Which image comes when is decided before it is read, and augmentation happens afterwards on the
device, so neither depends on the number of workers or ranks, and a run resumes without reading what it has seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcaps.data.batches import Batches, Order
from torchcaps.data.errors import DataError
from torchcaps.data.splits import Batch, Example, Split

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # 8192 x 8192; what claims to be larger is more likely a bomb than a picture
GREY = ("1", "L", "LA", "I")  # and I;16 in its byte orders
ORIENTATION = 0x0112  # the EXIF tag; from 5 on the sides change places


class Header(NamedTuple):
    """What a file says of its image before it is decoded."""

    height: int
    width: int
    grey: bool


def look(path: str) -> Header:
    """Size as seen (EXIF turns it) and colour of a still image of bearable size; a DataError for anything else."""
    return _reading(path, _header)


def read_image(path: str, image: tuple[int, int, int]) -> Tensor:
    """Turned as EXIF says, laid on white where transparent, scaled to cover the size asked for, cropped to its centre.

    Shapes: image (c, h, w) with c = 1 or 3 -> uint8 [c, h, w]
    """
    return _reading(path, lambda opened: _pixels(opened, image))


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


def pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError("reading images needs Pillow: pip install 'torchcaps[data]'") from error
    return PIL.Image


def track(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """`items` under a progress bar, where there is a terminal to show it."""
    from rich.console import Console
    from rich.progress import track as bar

    console = Console(stderr=True)
    return bar(items, what, total, console=console, transient=True, disable=not console.is_terminal)


def _reading(path: str, what: Callable[[Image], Any]) -> Any:
    try:
        with pillow().open(path) as opened:
            return what(opened)
    except DataError as error:
        reason = str(error)
    except FileNotFoundError:
        reason = "is not there"
    except Exception as error:  # Pillow's decoders raise SyntaxError, struct.error, EOFError and more
        reason = f"cannot be read as an image ({error})"
    raise DataError(f"{path} {reason}; replace or remove it, or leave such files out with on_error='skip'")


def _header(opened: Image) -> Header:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise DataError(f"claims {width} x {height} pixels, more than the {MOST_PIXELS:,} that are read")
    frames = getattr(opened, "n_frames", 1)
    if frames > 1 and opened.format != "MPO":  # cameras keep a second view or a preview in an MPO
        raise DataError(f"holds {frames} frames, not one still image")
    # a TIFF tells its turned size already; asking a PNG for EXIF it has not met yet would decode it
    ask = opened.format not in ("TIFF", "PNG") or (opened.format == "PNG" and "exif" in opened.info)
    if ask and opened.getexif().get(ORIENTATION, 1) >= 5:
        width, height = height, width
    palette = opened.getpalette() if opened.mode == "P" else None
    grey = opened.mode.split(";")[0] in GREY or (palette is not None and palette[::3] == palette[1::3] == palette[2::3])
    return Header(height, width, grey)


def _pixels(opened: Image, image: tuple[int, int, int]) -> Tensor:
    import numpy as np
    from PIL import ImageOps

    _header(opened)
    channels, height, width = image
    side = 2 * max(height, width)
    opened.draft(None, (side, side))  # a large JPEG is decoded at a half, a quarter or an eighth of its size
    still = _coloured(ImageOps.exif_transpose(opened), channels)
    if still.size != (width, height):
        still = ImageOps.fit(still, (width, height), pillow().Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(still)).view(height, width, channels)
    return pixels.permute(2, 0, 1).contiguous()


def _coloured(still: Image, channels: int) -> Image:
    import numpy as np

    if still.mode == "F":
        raise DataError("holds floating-point pixels, whose range nobody knows; save it with 8 or 16 bits")
    if still.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        values = np.asarray(still).astype(np.int64).clip(0, 65535)
        still = pillow().fromarray(((values + 128) // 257).astype(np.uint8))
    elif still.mode in ("RGBA", "LA", "PA") or "transparency" in still.info:
        colours = still.convert("RGBA")
        still = pillow().alpha_composite(pillow().new("RGBA", still.size, "white"), colours)
    return still.convert("L" if channels == 1 else "RGB")
