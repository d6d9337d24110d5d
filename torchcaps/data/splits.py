"""What a data set is made of: examples, batches, and splits that hold them on one device.

An example's image is uint8 [c, h, w], its label int64 [], or [k] padded with -1, its target uint8 [k, c, h, w].
"""

from __future__ import annotations

import logging
import math
import re
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchcaps.data.random import hashed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchcaps.data.protocols import Protocol as PaperProtocol

log = logging.getLogger("torchcaps")

HOLD_OUT = 0x5B117  # the stream of `hashed` that validation splits draw from
FAMILIAR = {"azimuth": (30, 32, 34, 0, 2, 4), "elevation": (0, 1, 2)}  # 300 to 40 degrees; the three lowest


class Example(NamedTuple):
    """One image with its label or labels; `target` holds its objects one by one, where the set has them."""

    image: Tensor
    label: Tensor
    target: Tensor | None = None


class Batch(NamedTuple):
    """Images are uint8 from a split and float after Batches.

    Shapes: images [b, c, h, w], labels [b] or [b, k], targets [b, k, c, h, w]
    """

    images: Tensor
    labels: Tensor
    targets: Tensor | None = None


class Split(Protocol):
    """A train, validation or test set, stored or made by index; what `gather` gives stays on the split's device."""

    @property
    def image(self) -> tuple[int, int, int]: ...

    @property
    def classes(self) -> int: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    def gather(self, indices: Tensor) -> Batch: ...

    def to(self, device: Any) -> Split: ...


class Labelled(Split, Protocol):
    """A split whose labels are at hand, so that it can be parted."""

    @property
    def labels(self) -> Tensor: ...

    def take(self, indices: Tensor) -> Any: ...


S = TypeVar("S", bound=Labelled)


class Stored:
    """A split held in memory.

    `about` says more of each image, a tensor [n] for each word (smallNORB: instance, elevation, azimuth, lighting).

    Shapes: images uint8 [n, h, w] or [n, c, h, w], labels int64 [n] or [n, k]
    """

    def __init__(
        self, images: Tensor, labels: Tensor, class_names: tuple[str, ...], about: dict[str, Tensor] | None = None
    ):
        if images.dtype != torch.uint8 or images.dim() not in (3, 4):
            raise ValueError(f"images are uint8 [n, h, w] or [n, c, h, w], not {images.dtype} {list(images.shape)}")
        if labels.dim() not in (1, 2) or len(labels) != len(images):
            raise ValueError(f"{len(images)} images need labels [n] or [n, k], not {list(labels.shape)}")
        self.images = images
        self.labels = labels.long()
        self.class_names = tuple(class_names)
        self.about = dict(about or {})
        for word, values in self.about.items():
            if values.shape != (len(images),):
                raise ValueError(f"{word} of {len(images)} images is a tensor of that length, not {list(values.shape)}")
        if len(labels) and not -1 <= int(self.labels.min()) <= int(self.labels.max()) < self.classes:
            low, high = int(self.labels.min()), int(self.labels.max())
            raise ValueError(f"labels run from {low} to {high}, but {self.classes} classes are named")

    @property
    def image(self) -> tuple[int, int, int]:
        height, width = self.images.shape[-2:]
        return (self.images.shape[1] if self.images.dim() == 4 else 1, height, width)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def device(self) -> torch.device:
        return self.images.device

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return Example(self.images[index].view(self.image), self.labels[index])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.image))
        return f"Stored({len(self):,} images of {size}, {self.classes} classes, on {self.device})"

    def gather(self, indices: Tensor) -> Batch:
        images = self.images.index_select(0, indices)
        return Batch(images.unsqueeze(1) if images.dim() == 3 else images, self.labels.index_select(0, indices))

    def take(self, indices: Tensor) -> Stored:
        """The split of these rows only, in this order."""
        indices = indices.to(self.device)
        return self._each(lambda values: values.index_select(0, indices))

    def to(self, device: Any) -> Stored:
        return self._each(lambda values: values.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Stored:
        changed = copy(self)
        changed.images, changed.labels = change(self.images), change(self.labels)
        changed.about = {word: change(values) for word, values in self.about.items()}
        return changed


@dataclass
class DataSet:
    """Train and test, a validation split where asked for, and a protocol's transforms where one was named.

    `familiar` is the test set seen from the training's viewpoints, where `test` holds the novel ones (smallNORB).
    """

    name: str
    train: Split
    test: Split
    validation: Split | None = None
    train_transform: tuple[Callable[..., Tensor], ...] = ()
    test_transform: tuple[Callable[..., Tensor], ...] = ()
    protocol: PaperProtocol | None = None
    familiar: Split | None = None
    notes: tuple[str, ...] = ()

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of what a network sees: after the test transform, where there is one."""
        from torchcaps.data.protocols import image_after

        return image_after(self.test_transform, self.test.image)

    @property
    def classes(self) -> int:
        return self.train.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def to(self, device: Any) -> DataSet:
        """The same set with all its splits on `device`."""
        moved: dict[str, Any] = {word: split.to(device) for word, split in self.splits().items()}
        return replace(self, **moved)

    def splits(self) -> dict[str, Split]:
        words = ("train", "validation", "test", "familiar")
        return {word: getattr(self, word) for word in words if getattr(self, word) is not None}


def hold_out(split: S, validation: float | str, seed: int = 0, group: str | None = None) -> tuple[S, S]:
    """Parts a training set in two that share nothing: what is trained on, and what is held out.

    A number of images or a fraction is taken class by class, in proportion, by `seed`; each class keeps an image to
    train on, if that leaves enough. With a `group` (smallNORB's
    "instance") whole groups are taken, as many in each class, so that no toy is on both sides. "first-10000" takes
    the first 10,000 images (Sabour's released code), "part-2-of-3" the middle one of three equal parts: where a set
    stands in the order of its writers, as MNIST's training digits do, such a part is by others than the rest.
    """
    if isinstance(validation, str):
        taken = _in_one_piece(len(split), validation)
    elif group is None:
        taken = _stratified(split.labels.cpu(), count_of(validation, len(split)), seed)
    else:
        groups = split.about[group].cpu()  # type: ignore[attr-defined]
        taken = _grouped(split.labels.cpu(), groups, count_of(validation, len(split)), seed, group)
    everything = torch.arange(len(split))
    return split.take(everything[~taken]), split.take(everything[taken])


def balanced(split: S, most: int = 10) -> S:
    """The split with the images of rare classes repeated, each at most `most` times, until the classes are as large.

    Images with several labels stay as they are.
    """
    if split.labels.dim() != 1:
        return split
    labels = split.labels.cpu()
    sizes = torch.bincount(labels, minlength=split.classes).tolist()
    rows = []
    for label, size in enumerate(sizes):
        wanted = min(max(sizes), most * size)
        own = (labels == label).nonzero()[:, 0]
        rows.append(own.repeat(-(-wanted // max(1, size)))[:wanted])
    return split.take(torch.cat(rows))


def by_viewpoint(split: Stored, word: str) -> tuple[Stored, Stored]:
    """smallNORB parted into familiar and novel viewpoints, as Hinton et al. (2018) do, by azimuth or by elevation."""
    if word not in FAMILIAR:
        raise ValueError(f"viewpoint {word!r} is not known; it is one of {', '.join(FAMILIAR)}")
    familiar = torch.isin(split.about[word], torch.tensor(FAMILIAR[word], device=split.device))
    return split.take(familiar.nonzero()[:, 0]), split.take((~familiar).nonzero()[:, 0])


def count_of(validation: float, length: int) -> int:
    """How many of `length` images a number or a fraction stands for; some must be left to train on."""
    number = isinstance(validation, Integral) and not isinstance(validation, bool)
    count = int(validation) if number else round(validation * length) if 0 < validation < 1 else 0
    if not 0 < count < length:
        raise ValueError(
            f"validation={validation!r} is neither a fraction below 1 nor a number of images below {length}"
        )
    return count


def _in_one_piece(length: int, rule: str) -> Tensor:
    """Shapes: -> [length], True where held out"""
    begin, end = 0, 0
    if found := re.fullmatch(r"first-(\d+)", rule):
        end = int(found[1])
    elif found := re.fullmatch(r"part-(\d+)-of-(\d+)", rule):
        part, parts = int(found[1]), int(found[2])
        if 1 <= part <= parts <= length:
            begin, end = length * (part - 1) // parts, length * part // parts
    if not 0 < end - begin < length:
        raise ValueError(
            f"validation={rule!r} is not known; say a number, a fraction, 'first-N' with N below {length}, "
            "or 'part-K-of-N' with K up to N"
        )
    place = torch.arange(length)
    return (place >= begin) & (place < end)


def _stratified(labels: Tensor, count: int, seed: int) -> Tensor:
    """Shapes: labels [n] or [n, k] -> [n], True where held out"""
    _, kind = labels.unique(dim=0, return_inverse=True)
    shares = _leaving_one(shared_out(count, sizes := torch.bincount(kind).tolist()), sizes)
    order = hashed(seed, HOLD_OUT, torch.arange(len(labels))).argsort(stable=True)
    taken = torch.zeros(len(labels), dtype=torch.bool)
    for each, share in enumerate(shares):
        taken[order[kind[order] == each][:share]] = True
    return taken


def _grouped(labels: Tensor, groups: Tensor, count: int, seed: int, word: str) -> Tensor:
    """Shapes: labels and groups [n] -> [n], True where held out"""
    taken = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        own = labels == label
        present = groups[own].unique()
        if len(present) < 2:
            raise ValueError(f"class {label} has a single {word}, and one must be left to train on")
        number = min(max(1, math.ceil(count / len(labels) * len(present) - 0.5)), len(present) - 1)
        order = hashed(seed, HOLD_OUT + 1 + label, present).argsort(stable=True)
        taken |= own & torch.isin(groups, present[order[:number]])
    held = int(taken.sum())
    if held != count:
        log.info("the validation split holds out whole %ss: %d images where %d were asked for", word, held, count)
    return taken


def _leaving_one(shares: list[int], sizes: list[int]) -> list[int]:
    """The shares with those that take all of a class made one less, and the largest rests giving in their place."""
    if sum(shares) > sum(sizes) - len(sizes):
        return shares
    left = [min(share, size - 1) for share, size in zip(shares, sizes, strict=True)]
    for _ in range(sum(shares) - sum(left)):
        left[max(range(len(sizes)), key=lambda k: (sizes[k] - left[k], -k))] += 1
    return left


def shared_out(count: int, sizes: list[int]) -> list[int]:
    """`count` parted in proportion to `sizes`, the largest remainders rounded up, so that the parts sum to it."""
    total = sum(sizes)
    parts = [count * size // total for size in sizes]
    remainders = sorted(range(len(sizes)), key=lambda k: (-(count * sizes[k] % total), k))
    for k in remainders[: count - sum(parts)]:
        parts[k] += 1
    return parts
