"""Augmentation: batched steps that run on the images' device, with no loop over images and no wait for the device.

A step takes float images [b, c, h, w] in [0, 1] and the batch's `Draws`, and gives images back; steps that draw nothing
accept None. A transform is a tuple of steps, see `apply`. Steps are frozen dataclasses with small names, called like
functions: `(shift(2), flip())`. Crops for testing, `ten_crop` and `n_crop`, give [b, n, c, h, w].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.random import Draws

FILLS = {"zero": "zeros", "nearest": "border"}
SPREAD, MOST = 0.33, 0.9999  # Byerly's half-normal draws: min(|N(0, 0.33)|, 0.9999)
LUMA = (0.2989, 0.587, 0.114)


class Step:
    """`random`: it needs draws; `geometric`: it moves pixels, so that an image and its targets would part."""

    random: ClassVar[bool]
    geometric: ClassVar[bool]

    def __init_subclass__(cls, random: bool = False, geometric: bool = False):
        cls.random, cls.geometric = random, geometric

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        raise NotImplementedError


def apply(steps: Sequence[Step], images: Tensor, draws: Draws | None = None) -> Tensor:
    """One step after the other.

    Shapes: images [b, c, h, w] -> [b, c, h', w'], or [b, n, c, h', w'] where the last step is a test crop
    """
    for step in steps:
        images = step(images, draws)
    return images


@dataclass(frozen=True)
class shift(Step, random=True, geometric=True):
    """Whole pixels, uniform in [-pixels, pixels] on both axes; zeros come in (Sabour: 2)."""

    pixels: int

    def __post_init__(self) -> None:
        _check(self, self.pixels >= 0, "no shift is negative")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        amount = _need(self, draws).integers(-self.pixels, self.pixels + 1, 2)
        return _move(images, amount[:, 0], amount[:, 1])


@dataclass(frozen=True)
class affine(Step, random=True, geometric=True):
    """A rotation about the centre and a shift by a fraction of each side, both uniform, in one bilinear resampling.

    As Keras composes them: what is seen at p comes from R (p - centre + t) + centre.
    """

    degrees: float = 0.0
    fraction: float = 0.0
    fill: str = "nearest"

    def __post_init__(self) -> None:
        _check_fill(self.fill)

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        height, width = images.shape[-2:]
        u = (2 * _need(self, draws).uniform(3) - 1).to(images.dtype)
        down, right = u[:, 1] * (self.fraction * height), u[:, 2] * (self.fraction * width)
        centre = ((height - 1) / 2, (width - 1) / 2)
        return _turn(images, u[:, 0] * self.degrees, centre, self.fill, down, right)


def translate(fraction: float, fill: str = "nearest") -> affine:
    """A shift by up to a fraction of each side, between pixels too (Choi: 0.1)."""
    return affine(fraction=fraction, fill=fill)


def rotate(degrees: float, fill: str = "zero") -> affine:
    """A rotation about the centre by up to `degrees` either way (Choi: 20, with fill="nearest")."""
    return affine(degrees=degrees, fill=fill)


@dataclass(frozen=True)
class random_crop(Step, random=True, geometric=True):
    """A window of `size`, after `padding` zeros on each side, anywhere with the same chance."""

    size: int
    padding: int = 0

    def __post_init__(self) -> None:
        _check(self, self.size > 0 and self.padding >= 0, "a crop has at least one pixel, and no padding is negative")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        rows, columns = _room(self, images, self.size, self.padding)
        draws = _need(self, draws)
        top = draws.integers(0, rows + 1) - self.padding
        left = draws.integers(0, columns + 1) - self.padding
        return _move(images, -top, -left, self.size)


@dataclass(frozen=True)
class centre_crop(Step, geometric=True):
    """The window of `size` in the middle; an odd row or column is left at the bottom or right."""

    size: int

    def __post_init__(self) -> None:
        _check(self, self.size > 0, "a crop has at least one pixel")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        rows, columns = _room(self, images, self.size)
        return _window(images, rows // 2, columns // 2, self.size)


@dataclass(frozen=True)
class flip(Step, random=True, geometric=True):
    """Left becomes right, for half of the images."""

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        chosen = _need(self, draws).uniform() < 0.5
        return torch.where(_per_image(chosen), images.flip(-1), images)


@dataclass(frozen=True)
class pad(Step, geometric=True):
    """`pixels` zeros on each side."""

    pixels: int

    def __post_init__(self) -> None:
        _check(self, self.pixels >= 0, "no padding is negative")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return F.pad(images, (self.pixels,) * 4)


@dataclass(frozen=True)
class resize(Step, geometric=True):
    """To size x size, bilinear; where it shrinks, the triangle widens so that nothing is skipped."""

    size: int

    def __post_init__(self) -> None:
        _check(self, self.size > 0, "an image has at least one pixel")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return F.interpolate(images, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True)


@dataclass(frozen=True)
class scale(Step):
    """All pixels times a factor; scale(255 / 256) makes the pixels value / 256, as Efficient-CapsNet reads MNIST."""

    factor: float

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return images * self.factor


@dataclass(frozen=True)
class normalise(Step):
    """(pixel - mean) / std, one number for all channels or one for each."""

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]

    def __post_init__(self) -> None:
        stds = (self.std,) if isinstance(self.std, (int, float)) else self.std
        _check(self, all(std > 0 for std in stds), "a deviation is above 0")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        channels = images.shape[1]
        means, stds = _each(self, self.mean, channels), _each(self, self.std, channels)
        return torch.stack([(images[:, k] - means[k]) / stds[k] for k in range(channels)], 1)


@dataclass(frozen=True)
class standardise(Step):
    """Each image to mean 0 and deviation 1, all channels together; the deviation is at least 1 / sqrt(pixels)."""

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        least = 1 / math.sqrt(math.prod(images.shape[1:]))
        centred = images - _mean(images, (1, 2, 3))
        return centred / _mean(centred.square(), (1, 2, 3)).sqrt().clamp(min=least)


@dataclass(frozen=True)
class brightness(Step, random=True):
    """Adds one number, uniform in [-delta, delta); nothing is clipped (Hinton: 63 / 255)."""

    delta: float

    def __post_init__(self) -> None:
        _check(self, self.delta >= 0, "delta is not negative")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return images + _per_image(_between(_need(self, draws), -self.delta, self.delta).to(images.dtype))


@dataclass(frozen=True)
class contrast(Step, random=True):
    """Stretches each channel about its mean by one factor, uniform in [low, high); nothing is clipped."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check(self, 0 <= self.low <= self.high, "it runs from low to high, and neither is negative")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        mean = _mean(images, (2, 3))
        return (images - mean) * _per_image(_between(_need(self, draws), self.low, self.high).to(images.dtype)) + mean


@dataclass(frozen=True)
class colour_jitter(Step, random=True):
    """Brightness, contrast, saturation and hue, changed in an order drawn for each image (Li: 0.2 each).

    The first three are factors in [max(0, 1 - x), 1 + x], clipped to [0, 1] after each; the hue turns by up to x of
    the circle, at most 0.5. Grey images know brightness and contrast only.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        least = min(self.brightness, self.contrast, self.saturation, self.hue)
        _check(self, least >= 0 and self.hue <= 0.5, "no amount is negative, and hue is at most 0.5")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        draws = _need(self, draws)
        u, order = draws.uniform(4).to(images.dtype), draws.uniform(4).argsort(stable=True)  # order [b, place]
        if images.shape[1] not in (1, 3):
            raise ValueError(f"colour_jitter takes grey or RGB images, not {images.shape[1]} channels")
        amounts = (self.brightness, self.contrast, self.saturation, self.hue)
        changes = (_brighter, _contrasted, _saturated, _turned)
        used = [k for k in range(4) if amounts[k] > 0 and (k < 2 or images.shape[1] == 3)]
        low = [max(0.0, 1 - x) for x in amounts[:3]] + [-self.hue]
        high = [1 + x for x in amounts[:3]] + [self.hue]
        factors = [_per_image(low[k] + (high[k] - low[k]) * u[:, k]) for k in range(4)]
        for place in range(4):
            changed = images
            for k in used:
                changed = torch.where(_per_image(order[:, place] == k), changes[k](images, factors[k]), changed)
            images = changed
        return images


@dataclass(frozen=True)
class ten_crop(Step, geometric=True):
    """The four corners and the centre, then the same five of the mirrored image.

    Shapes: images [b, c, h, w] -> [b, 10, c, size, size]
    """

    size: int

    def __post_init__(self) -> None:
        _check(self, self.size > 0, "a crop has at least one pixel")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        rows, columns = _room(self, images, self.size)
        corners = [(0, 0), (0, columns), (rows, 0), (rows, columns), (rows // 2, columns // 2)]
        sides = (images, images.flip(-1))
        return torch.stack([_window(side, y, x, self.size) for side in sides for y, x in corners], 1)


@dataclass(frozen=True)
class n_crop(Step, geometric=True):
    """The centre and the places around it: first 12 on the diagonals, 1, 2 and 3 pixels off (Hinton's 13 crops).

    No paper says where more would lie (Mazzia's 40): they follow in order of distance from the centre.

    Shapes: images [b, c, h, w] -> [b, n, c, size, size]
    """

    size: int
    n: int = 13

    def __post_init__(self) -> None:
        _check(self, self.size > 0 and self.n > 0, "there is at least one crop, of at least one pixel")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        rows, columns = _room(self, images, self.size)
        top, left = rows // 2, columns // 2
        around = [(y - top, x - left) for y in range(rows + 1) for x in range(columns + 1)]
        around.sort(key=lambda p: (abs(p[0]) != abs(p[1]) or abs(p[0]) > 3, p[0] ** 2 + p[1] ** 2, p))
        if not 1 <= self.n <= len(around):
            raise ValueError(f"{self} is out of range: here there are 1 to {len(around)} places for a crop")
        return torch.stack([_window(images, top + y, left + x, self.size) for y, x in around[: self.n]], 1)


@dataclass(frozen=True)
class byerly_rotate(Step, random=True, geometric=True):
    """int(30 clip(N(0, 0.33), -0.9999, 0.9999)) degrees about pixel (h / 2, w / 2), for half of the images."""

    degrees: float = 30.0

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return self.by(images, _need(self, draws).normal(2))

    def by(self, images: Tensor, normal: Tensor) -> Tensor:
        """Shapes: images [b, c, h, w], normal [b, 2] -> [b, c, h, w]"""
        height, width = images.shape[-2:]
        angle = ((SPREAD * normal[:, 0]).clamp(-MOST, MOST) * self.degrees).trunc()
        angle = torch.where(normal[:, 1] > 0, angle, 0).to(images.dtype)
        turned = _turn(images, angle, (height / 2, width / 2), "zero")
        return torch.where(_per_image(angle == 0), images, turned)  # rounding must not smear ink into a margin


@dataclass(frozen=True)
class byerly_shift(Step, random=True, geometric=True):
    """Left or right, up or down, by a half-normal share of the margin that is empty there: nothing leaves the frame."""

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        draws = _need(self, draws)
        return self.by(images, draws.normal(2), draws.uniform(2))

    def by(self, images: Tensor, normal: Tensor, uniform: Tensor) -> Tensor:
        """Shapes: images [b, c, h, w], normal and uniform [b, 2] (vertical, horizontal) -> [b, c, h, w]"""
        ink = (images != 0).any(1)
        down = self._amount(ink.any(2), _half(normal[:, 0]), uniform[:, 0])
        right = self._amount(ink.any(1), _half(normal[:, 1]), uniform[:, 1])
        return _move(images, down, right)

    def _amount(self, full: Tensor, share: Tensor, uniform: Tensor) -> Tensor:
        before, after = _margins(full)
        return torch.where(uniform < 0.5, (-share * before).floor(), (share * (1 + after)).floor()).long()


@dataclass(frozen=True)
class byerly_squish(Step, random=True, geometric=True):
    """Narrows by 1 to w / 4 pixels, Lanczos over 3 lobes, and puts the result near the middle, at times 1 to the right.

    The lobes overshoot: pixels may end a little below 0 or above 1.
    """

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return self.by(images, _need(self, draws).normal(2))

    def by(self, images: Tensor, normal: Tensor) -> Tensor:
        """Shapes: images [b, c, h, w], normal [b, 2] -> [b, c, h, w]"""
        share = _half(normal)
        less = (share[:, 0] * (images.shape[-1] / 4) + 1).floor()
        offset = (less / 2).floor() + (2 * share[:, 1]).floor()
        return _narrowed(images, less, offset)


@dataclass(frozen=True)
class byerly_erase(Step, random=True, geometric=True):
    """Sets a patch to 0; its corner is uniform on both axes, from 4 to side - patch - 2 (22 of 28)."""

    patch: int = 4

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        return self.by(images, _need(self, draws).uniform(2))

    def by(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Shapes: images [b, c, h, w], uniform [b, 2] -> [b, c, h, w]"""
        inside = []
        for axis, side in enumerate(images.shape[-2:]):
            places = side - self.patch - 5
            if places < 1:
                raise ValueError(f"{self} needs sides of at least {self.patch + 6} pixels, not {side}")
            corner = (uniform[:, axis] * places).floor() + 4
            distance = torch.arange(side, device=images.device) - corner[:, None]  # [b, side]
            inside.append((distance >= 0) & (distance < self.patch))
        return torch.where((inside[0][:, :, None] & inside[1][:, None])[:, None], 0, images)


@dataclass(frozen=True)
class byerly(Step, random=True, geometric=True):
    """Byerly's chain as Efficient-CapsNet uses it: rotate, shift, squish, erase; its pixels are value / 256 (`scale`).

    The ten numbers of an image are drawn in two calls: on a GPU the time goes to the number of operations.
    """

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        draws = _need(self, draws)
        normal, uniform = draws.normal(6), draws.uniform(4)
        images = byerly_rotate().by(images, normal[:, 0:2])
        images = byerly_shift().by(images, normal[:, 2:4], uniform[:, 0:2])
        images = byerly_squish().by(images, normal[:, 4:6])
        return byerly_erase().by(images, uniform[:, 2:4])


def _need(step: Any, draws: Draws | None) -> Draws:
    if draws is None:
        raise ValueError(f"{step} is random and needs draws, but was given none")
    return draws


def _check(step: Any, fits: bool, rule: str) -> None:
    if not fits:
        raise ValueError(f"{step} is out of range: {rule}")


def _check_fill(fill: str) -> None:
    if fill not in FILLS:
        raise ValueError(f"fill={fill!r} is not known; it is one of {', '.join(FILLS)}")


def _room(step: Any, images: Tensor, size: int, padding: int = 0) -> tuple[int, int]:
    """How many rows and columns a window may move by."""
    height, width = images.shape[-2:]
    rows, columns = height + 2 * padding - size, width + 2 * padding - size
    if min(rows, columns) < 0:
        raise ValueError(f"{step} does not fit into an image of {height} x {width}")
    return rows, columns


def _each(step: Any, value: float | tuple[float, ...], channels: int) -> tuple[float, ...]:
    values = (value,) * channels if isinstance(value, (int, float)) else tuple(value)
    if len(values) != channels:
        raise ValueError(f"{step} has {len(values)} numbers for {channels} channels")
    return values


def _between(draws: Draws, low: float, high: float) -> Tensor:
    return low + (high - low) * draws.uniform()


def _half(normal: Tensor) -> Tensor:
    return (SPREAD * normal).abs().clamp(max=MOST)


def _wide(device: torch.device) -> torch.dtype:
    """Sums in float64, then rounded, do not depend on how many images share a call, nor on autocast or TF32."""
    return torch.float32 if device.type == "mps" else torch.float64


def _mean(images: Tensor, dims: tuple[int, ...]) -> Tensor:
    return images.mean(dims, keepdim=True, dtype=_wide(images.device)).to(images.dtype)


def _per_image(x: Tensor) -> Tensor:
    return x[:, None, None, None]


def _window(images: Tensor, top: int, left: int, size: int) -> Tensor:
    return images[..., top : top + size, left : left + size]


def _move(images: Tensor, down: Tensor, right: Tensor, size: int | None = None) -> Tensor:
    """out[y, x] = in[y - down, x - right], and 0 where there is none.

    Shapes: images [b, c, h, w], down and right [b] -> [b, c, h, w] or [b, c, size, size]
    """
    b, c, height, width = images.shape
    rows = torch.arange(size or height, device=images.device) - down[:, None]
    columns = torch.arange(size or width, device=images.device) - right[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]  # [b, h, w]
    index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    moved = images.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, c, -1))
    return torch.where(inside[:, None], moved.view(b, c, *index.shape[1:]), 0)


def _turn(images: Tensor, angle: Tensor, centre: tuple[float, float], fill: str, *shifts: Tensor) -> Tensor:
    """What is seen at p comes from R (p - centre + shifts) + centre, bilinear; angle in degrees.

    Shapes: images [b, c, h, w], angle and shifts (down, right) [b] -> [b, c, h, w]
    """
    height, width = images.shape[-2:]
    angle = angle * (math.pi / 180)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    y = torch.arange(height, device=images.device, dtype=images.dtype) - centre[0]
    x = torch.arange(width, device=images.device, dtype=images.dtype) - centre[1]
    if shifts:
        y, x = y + shifts[0][:, None], x + shifts[1][:, None]
    rows = torch.stack([2 * sin * y / width, 2 * cos * y / height], -1)  # [b, h, (x, y)]
    columns = torch.stack(
        [(2 * (cos * x + centre[1]) + 1) / width - 1, (2 * (centre[0] - sin * x) + 1) / height - 1], -1
    )
    grid = rows[:, :, None] + columns[:, None]  # [b, h, w, (x, y)]
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=FILLS[fill], align_corners=False)


def _margins(full: Tensor) -> tuple[Tensor, Tensor]:
    """How many False stand before the first True and after the last; 0 and 0 where there is no True.

    Shapes: full [b, n] -> [b], [b]
    """
    full = full.to(torch.uint8)
    return full.argmax(1), full.flip(1).argmax(1)


def _narrowed(images: Tensor, less: Tensor, offset: Tensor) -> Tensor:
    """The width resampled to w - less with an antialiased Lanczos kernel of 3 lobes, from column `offset` on.

    Each (less, offset) is a matrix; the few there are cost less than to keep them.

    Shapes: images [b, c, h, w], less and offset [b] -> [b, c, h, w]
    """
    width = images.shape[-1]
    wide = _wide(images.device)
    place = torch.arange(width, device=images.device, dtype=wide)
    choices = torch.arange(2 * (width // 4 + 1), device=images.device)  # less from 1 on, each with offset + 0 and + 1
    narrower = (choices // 2 + 1).to(wide)[:, None, None]
    new = place - (narrower / 2).floor() - (choices % 2)[:, None, None]  # column of the narrow image  [k, 1, out]
    stretch = width / (width - narrower)
    distance = (place[:, None] + 0.5 - (new + 0.5) * stretch) / stretch  # [k, in, out]
    weights = torch.where(distance.abs() < 3, torch.sinc(distance) * torch.sinc(distance / 3), 0)
    weights = weights / weights.sum(1, keepdim=True)
    weights = torch.where((new >= 0) & (new < width - narrower), weights, 0)
    chosen = (2 * (less - 1) + offset - (less / 2).floor()).long()
    return (images.to(wide) @ weights.index_select(0, chosen)[:, None]).to(images.dtype)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _brighter(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp(0, 1)


def _contrasted(images: Tensor, factor: Tensor) -> Tensor:
    mean = _mean(_grey(images), (1, 2, 3))
    return (factor * images + (1 - factor) * mean).clamp(0, 1)


def _saturated(images: Tensor, factor: Tensor) -> Tensor:
    return (factor * images + (1 - factor) * _grey(images)).clamp(0, 1)


def _turned(images: Tensor, turn: Tensor) -> Tensor:
    """The hue turned by a part of the circle, saturation and value kept."""
    red, green, blue = images.unbind(1)
    value, least = images.amax(1), images.amin(1)
    chroma = value - least
    safe = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixths = sixths + 6 * turn[:, 0]
    shades = [(sixths + n) % 6 for n in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in shades], 1)
