"""Sets made from another by index: image i is a pure function of (seed, i), the same on every machine.

Everything random is an integer hash of the index, and so is everything drawn: whole pixels for MultiMNIST; for affNIST
fixed-point coordinates with so few bits that float32 holds every product and sum of the interpolation exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.random import hashed
from torchcaps.data.splits import Batch, Example, Stored

PARTNER, SHIFTS, SINGLE, SHAPE, ROW, COLUMN, BASE = range(0xD161, 0xD168)  # streams of `hashed`
ONE = 1 << 16  # fixed point: 16 bits behind the point
STEPS = 4001  # values that an angle, a scale or a shear can take; the angles are 0.01 degrees apart


class Generated:
    """What the generated sets share; `gather` is their own."""

    image: tuple[int, int, int]

    def __init__(self, base: Stored, length: int, **options: Any):
        if length < 1 or len(base) < 1:
            raise ValueError(f"a set of {length} images cannot be made from {len(base)}")
        self.base, self.length, self.options = base, length, options
        self.each = -(-length // len(base))  # images for each of the base's

    @property
    def classes(self) -> int:
        return self.base.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.base.class_names

    @property
    def device(self) -> torch.device:
        return self.base.device

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        batch = self.gather(torch.tensor([index % len(self)], device=self.device))
        return Example(batch.images[0], batch.labels[0], None if batch.targets is None else batch.targets[0])

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.image))
        options = "".join(f", {word}={value}" for word, value in self.options.items())
        return f"{type(self).__name__}({len(self):,} images of {size}{options}, on {self.device})"

    def gather(self, indices: Tensor, targets: bool = True) -> Batch:
        raise NotImplementedError

    def to(self, device: Any) -> Generated:
        return type(self)(self.base.to(device), self.length, **self.options)


class MultiMNIST(Generated):
    """Two digits of different classes over each other (Sabour et al. 2017), and both alone as targets.

    Image i shows digit i // 1000 of the base with a partner of another class, each moved by up to `shift` pixels on a
    canvas `pad` pixels larger on each side; the sum is cut at 255. With `relative` the first digit stays, which gives
    the paper's 80 % overlap; its released command has shift=6.

    Args:
        base: a set of single digits; a training and a test set are made from different ones.
        length: 1000 images for each digit of the base unless told otherwise.
        different: "class", or "image" for a partner that is any other digit of the base (Efficient-CapsNet's released
            code trains so). A tenth of the pairs are then of one class, and both their labels are equal.
        base_shift: "image" draws a shift of the first digit for each image, "digit" one for all images of that digit
            (Sabour's released code).

    Shapes: indices [b] -> images [b, c, h, w], labels [b, 2], targets [b, 2, c, h, w]
    """

    def __init__(
        self,
        base: Stored,
        length: int | None = None,
        *,
        shift: int = 4,
        pad: int = 4,
        relative: bool = False,
        different: str = "class",
        base_shift: str = "image",
        seed: int = 0,
    ):
        length = 1000 * len(base) if length is None else length
        options: dict[str, Any] = dict(relative=relative, different=different, base_shift=base_shift, seed=seed)
        super().__init__(base, length, shift=shift, pad=pad, **options)
        channels, height, width = base.image
        if min(shift, pad) < 0:
            raise ValueError(f"shift={shift} and pad={pad} cannot be negative")
        if shift >= min(height, width) + pad:
            raise ValueError(f"shift={shift} moves digits of {height} x {width} off a canvas with pad={pad}; lower it")
        if different not in ("class", "image"):
            raise ValueError(f"different={different!r} is not known; it is class or image")
        if base_shift not in ("image", "digit"):
            raise ValueError(f"base_shift={base_shift!r} is not known; it is image or digit")
        self.shift, self.pad, self.relative, self.seed = shift, pad, relative, seed
        self.different, self.base_shift = different, base_shift
        self.image = (channels, height + 2 * pad, width + 2 * pad)
        self._sort(base.labels)
        self._lay_out(base.images.view(len(base), *base.image))

    def _sort(self, labels: Tensor) -> None:
        """The partners of a digit are all places of `order` but its block: its class, or itself alone."""
        if labels.dim() != 1:
            raise ValueError(f"a base has one label for each image, not {list(labels.shape)}")
        kind = labels if self.different == "class" else torch.arange(len(labels), device=labels.device)
        order = kind.argsort(stable=True)
        counts = torch.bincount(kind, minlength=self.classes)
        if len(counts.nonzero()) < 2:
            raise ValueError(f"all digits of the base are of one {self.different}, and two different ones are needed")
        self.order, self.own = order, counts[kind]
        self.start = (counts.cumsum(0) - counts)[kind]
        self.digit_labels = F.pad(labels, (0, 1), value=-1)  # one more for no digit at all

    def _lay_out(self, digits: Tensor) -> None:
        """All digits in one strip of memory, zeros between rows and between digits, so that any window is a view of it.

        The zeros after a row serve the next row too: with shift = pad the strip is no larger than the canvases. The
        digit after the last is empty.
        """
        room = self.pad + self.shift
        self.line = digits.shape[3] + room
        self.plane = (digits.shape[2] + room) * self.line
        self.first = room * self.line + room
        strip = F.pad(digits, (0, room, 0, room)).flatten()
        channels, height, width = self.image
        strip = F.pad(strip, (self.first, channels * self.plane + self.first))
        reach = (channels - 1) * self.plane + (height - 1) * self.line + width
        size = (len(strip) - reach + 1, *self.image)
        self.windows = strip.as_strided(size, (1, self.plane, self.line, 1))

    def gather(self, indices: Tensor, targets: bool = True) -> Batch:
        digits, shifts = self._pairs(indices), self._shifts(indices)  # [b, 2], [b, 2, 2]
        corner = -(shifts + self.pad)
        start = self.first + digits * (self.image[0] * self.plane) + corner[..., 0] * self.line + corner[..., 1]
        # the CUDA kernel behind index_select takes 64-bit steps through so large a view, the one behind [] does not
        windows = self.windows[start] if start.is_cuda else self.windows.index_select(0, start.flatten())
        windows = windows.view(-1, 2, *self.image)
        images = self._overlay(windows[:, 0], windows[:, 1], digits)
        return Batch(images, self.digit_labels[digits], windows if targets else None)

    def _pairs(self, indices: Tensor) -> Tensor:
        digit = indices // self.each
        own, start = self.own[digit], self.start[digit]
        place = hashed(self.seed, PARTNER, indices) % (len(self.order) - own)
        return torch.stack([digit, self.order[torch.where(place < start, place, place + own)]], 1)

    def _shifts(self, indices: Tensor) -> Tensor:
        """Shapes: indices [b] -> [b, digit, axis]"""
        way = 2 * self.shift + 1
        draw = hashed(self.seed, SHIFTS, indices) % way**4
        shifts = torch.stack([draw // way**3, draw // way**2 % way, draw // way % way, draw % way], 1) - self.shift
        shifts = shifts.view(-1, 2, 2)
        if self.relative:
            return F.pad(shifts[:, 1:], (0, 0, 1, 0))
        if self.base_shift == "image":
            return shifts
        draw = hashed(self.seed, BASE, indices // self.each) % way**2
        return torch.stack([torch.stack([draw // way, draw % way], 1) - self.shift, shifts[:, 1]], 1)

    def _overlay(self, first: Tensor, second: Tensor, digits: Tensor) -> Tensor:
        return first + torch.minimum(second, ~first)


class DiverseMultiMNIST(MultiMNIST):
    """MultiMNIST with one digit only in a sixth of the images (Tsai et al. 2020); its second label is -1.

    The paper trains on 21 million images and tests on 10,000. overlay="mean" halves two digits instead of cutting
    their sum, as a public loader does; a digit alone stays as it is.
    """

    def __init__(self, base: Stored, length: int | None = None, *, overlay: str = "sum", **options: Any):
        if overlay not in ("sum", "mean"):
            raise ValueError(f"overlay={overlay!r} is not known; it is sum or mean")
        self.overlay = overlay
        super().__init__(base, length, **options)
        self.options["overlay"] = overlay

    def _pairs(self, indices: Tensor) -> Tensor:
        digit, partner = super()._pairs(indices).unbind(1)
        single = hashed(self.seed, SINGLE, indices) % 6 == 0
        return torch.stack([digit, torch.where(single, len(self.base), partner)], 1)

    def _overlay(self, first: Tensor, second: Tensor, digits: Tensor) -> Tensor:
        if self.overlay == "sum":
            return super()._overlay(first, second, digits)
        mean = (first >> 1) + (second >> 1) + (first & second & 1)
        return torch.where((digits[:, 1] == len(self.base))[:, None, None, None], first, mean)


class GeneratedAffNIST(Generated):
    """affNIST's documented ranges applied to a set of single digits: 32 images of 40 x 40 for each.

    Rotation by up to 20 degrees, shear by up to 0.2, height and width scaled by 0.8 to 1.2 each, and any place where
    the digit's box stays on the canvas. These are not the official files, which were made with other numbers.

    Shapes: indices [b] -> images [b, c, 40, 40], labels [b]
    """

    def __init__(self, base: Stored, length: int | None = None, *, size: int = 40, seed: int = 0):
        super().__init__(base, 32 * len(base) if length is None else length, size=size, seed=seed)
        self.size, self.seed = size, seed
        channels, height, width = base.image
        self.image = (channels, size, size)
        digits = base.images.view(len(base), *base.image)
        self.frame = tuple(1 << (side - 1).bit_length() for side in (height, width))  # powers of 2 divide exactly
        self.digits = F.pad(digits, (0, self.frame[1] - width, 0, self.frame[0] - height))
        self.boxes = torch.stack([*_extent(digits.amax((1, 3))), *_extent(digits.amax((1, 2)))], 1)  # [n, 4]
        angles = [math.radians(40 * k / (STEPS - 1) - 20) for k in range(STEPS)]
        turns = [[round(ONE * math.cos(x)), round(ONE * math.sin(x))] for x in angles]
        self.turns = torch.tensor(turns, device=base.device)

    def gather(self, indices: Tensor, targets: bool = True) -> Batch:
        digit = indices // self.each
        grid = self._grid(indices, self.boxes[digit])
        images = F.grid_sample(self.digits[digit].float(), grid, padding_mode="zeros", align_corners=False)
        return Batch((images + 0.5).to(torch.uint8), self.base.labels[digit])

    def _grid(self, indices: Tensor, box: Tensor) -> Tensor:
        """Where on its digit each pixel of an image lies, as grid_sample wants it.

        A digit is scaled, sheared, rotated and moved; a pixel goes the other way. Rows and columns each bring their
        part of a coordinate, rounded to 1 / 128 pixel.

        Shapes: indices [b], box [b, 4] (top, bottom, left, right, in half pixels from the middle) -> [b, size, size, 2]
        """
        draw = hashed(self.seed, SHAPE, indices)
        cos, sin = self.turns[draw % STEPS].unbind(1)
        tall, broad = (ONE * 4 // 5 + draw // STEPS**k % STEPS * (ONE * 2 // 5) // (STEPS - 1) for k in (1, 2))
        shear = draw // STEPS**3 % STEPS * (ONE * 2 // 5) // (STEPS - 1) - ONE // 5
        along, across = cos + (sin * shear >> 16), (cos * shear >> 16) - sin

        top, bottom, left, right = box.unbind(1)
        y = self._place(indices, ROW, _range(sin * broad, left, right), _range(along * tall, top, bottom))
        x = self._place(indices, COLUMN, _range(cos * broad, left, right), _range(across * tall, top, bottom))
        (height, width), (tall_frame, broad_frame) = self.base.image[1:], self.frame
        rows = [_part(-across, broad, y) / broad_frame, _part(cos, tall, y) / tall_frame]
        columns = [
            (_part(along, broad, x) + width) / broad_frame - 1,
            (_part(-sin, tall, x) + height) / tall_frame - 1,
        ]
        return torch.stack(rows, 2)[:, :, None] + torch.stack(columns, 2)[:, None]

    def _place(self, indices: Tensor, stream: int, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        """Puts the digit's middle anywhere its box has room, and gives each line's distance from it.

        The box reaches from one[0] + other[0] to one[1] + other[1] about its middle.

        Shapes: indices [b] -> [b, size] in half pixels and 16 bits
        """
        low, high = -ONE - one[0] - other[0], (2 * self.size - 1) * ONE - one[1] - other[1]
        room = high - low
        draw = hashed(self.seed, stream, indices) % (room.clamp(min=0) + 1)
        middle = low + torch.where(room < 0, room >> 1, draw)
        return torch.arange(0, 2 * ONE * self.size, 2 * ONE, device=indices.device) - middle[:, None]


def _extent(ink: Tensor) -> tuple[Tensor, Tensor]:
    """The outer edges of the first and the last line with ink, in half pixels from the middle.

    Shapes: ink [n, side] -> [n], [n]
    """
    side = ink.shape[1]
    full = (ink > 0).to(torch.uint8)
    return 2 * full.argmax(1) - side, side - 2 * full.flip(1).argmax(1)


def _range(factor: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    ends = (factor >> 16) * low, (factor >> 16) * high
    return torch.minimum(*ends), torch.maximum(*ends)


def _part(factor: Tensor, divisor: Tensor, distance: Tensor) -> Tensor:
    """What lines at a distance add to a coordinate on the digit: float32, in half pixels, a multiple of 1 / 64.

    Shapes: factor and divisor [b], distance [b, size] -> [b, size]
    """
    return ((factor * ONE // divisor)[:, None] * distance + (1 << 25) >> 26).float() / 64


def canvas(base: Stored, size: int = 40) -> Stored:
    """The same images in the middle of size x size pixels of zeros; an odd row or column is at the bottom or right."""
    _, height, width = base.image
    if size < max(height, width):
        raise ValueError(f"images of {height} x {width} do not fit on a canvas of {size} x {size}")
    top, left = (size - height) // 2, (size - width) // 2
    images = F.pad(base.images, (left, size - width - left, top, size - height - top))
    return Stored(images, base.labels, base.class_names, base.about)
