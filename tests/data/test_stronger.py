"""Augmentation of our own rows against plain loops."""

import itertools
import math
import pickle

import pytest
import torch

from torchcaps.data import augment, load, protocols, stronger
from torchcaps.data.augment import apply
from torchcaps.data.random import Draws
from torchcaps.data.stronger import bend, cutout, elastic, mirrored, nudged, sometimes, warp
from torchcaps.data.trivial import trivial

RANDOM = [
    warp(15, 0.1, 0.2, 3),
    elastic(1.2, 4),
    bend(15, 0.1, 0.2, 1, 0.8, 1.2),
    cutout(5),
    sometimes((warp(15), elastic(1.2)), 0.7),
    trivial(),
]


def draws(images, seed=3):
    return Draws(seed, 1, 1000 + torch.arange(len(images)))


def bilinear(image, y, x):
    """What lies at a place of one channel, 0 outside."""
    top, left = math.floor(y), math.floor(x)
    total = 0.0
    for row, a in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, b in ((left, 1 - (x - left)), (left + 1, x - left)):
            if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                total += a * b * float(image[row, column])
    return total


def cubic(image, y, x):
    """The same, over four rows and columns (Keys 1981, with torch's -0.75)."""

    def weight(distance):
        d = abs(distance)
        inner, outer = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
        return inner if d <= 1 else outer if d < 2 else 0.0

    total = 0.0
    for row in range(math.floor(y) - 1, math.floor(y) + 3):
        for column in range(math.floor(x) - 1, math.floor(x) + 3):
            if 0 <= row < image.shape[0] and 0 <= column < image.shape[1]:
                total += weight(y - row) * weight(x - column) * float(image[row, column])
    return total


def centre_of_mass(image):
    ink = [(float(image[c, y, x]), y, x) for c, y, x in itertools.product(*map(range, image.shape))]
    mass = sum(value for value, _, _ in ink)
    return sum(value * y for value, y, _ in ink) / mass, sum(value * x for value, _, x in ink) / mass


@pytest.mark.parametrize("step", [*RANDOM, mirrored(), nudged()], ids=repr)
def test_steps_are_frozen_and_depend_on_the_position_alone(step):
    assert pickle.loads(pickle.dumps(step)) == step
    assert eval(repr(step), {**vars(augment), **vars(stronger), "trivial": trivial}) == step
    images = torch.rand(12, 3, 13, 15)
    whole = step(images, draws(images))
    assert whole.dtype == images.dtype
    few = step(images[4:7], Draws(3, 1, 1000 + torch.arange(4, 7)))
    torch.testing.assert_close(few, whole[4:7], rtol=0, atol=1e-6)
    if step.random:
        assert not torch.equal(step(images, draws(images, 4)), whole)
        with pytest.raises(ValueError, match="needs draws"):
            step(images)


def test_warp():
    images = torch.rand(5, 2, 9, 11, dtype=torch.float64)
    u = 2 * draws(images).uniform(7).double() - 1
    out = warp(degrees=20, zoom=0.2, shear=0.3, pixels=2)(images, draws(images))
    for k, (turn, zy, zx, sy, sx, down, right) in enumerate(u.tolist()):
        angle = math.radians(20 * turn)
        a = [[1 + 0.2 * zy, 0.3 * sy], [0.3 * sx, 1 + 0.2 * zx]]
        r = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        m = [[sum(r[i][n] * a[n][j] for n in range(2)) for j in range(2)] for i in range(2)]
        for y in range(9):
            for x in range(11):
                p = (y - 4 - 2 * down, x - 5 - 2 * right)
                row, column = (m[i][0] * p[0] + m[i][1] * p[1] for i in range(2))
                for channel in range(2):
                    expected = bilinear(images[k, channel], row + 4, column + 5)
                    assert float(out[k, channel, y, x]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(warp()(images, draws(images)), images)


def test_elastic():
    images = torch.rand(3, 1, 7, 9, dtype=torch.float64)
    arrows = 1.5 * draws(images).normal(18).double().view(3, 2, 3, 3)
    out = elastic(1.5, knots=3)(images, draws(images))
    for k in range(3):
        for y in range(7):
            for x in range(9):
                down, right = (bilinear(part, y * 2 / 6, x * 2 / 8) for part in arrows[k])
                expected = bilinear(images[k, 0], y + down, x + right)
                assert float(out[k, 0, y, x]) == pytest.approx(expected, abs=1e-6)


def test_bend():
    images = torch.rand(3, 2, 9, 11, dtype=torch.float64)
    drawn = draws(images)
    u = 2 * drawn.uniform(7).double() - 1
    arrows = 0.7 * drawn.normal(18).double().view(3, 2, 3, 3)
    out = bend(20, 0.2, 0.3, 2, 0.7, contrast=1.3, knots=3)(images, draws(images))
    for k, (turn, zy, zx, sy, sx, down, right) in enumerate(u.tolist()):
        angle = math.radians(20 * turn)
        a = [[1 + 0.2 * zy, 0.3 * sy], [0.3 * sx, 1 + 0.2 * zx]]
        r = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        m = [[sum(r[i][n] * a[n][j] for n in range(2)) for j in range(2)] for i in range(2)]

        def comes_from(y, x, shift, m=m, k=k):
            p = (y - 4 - shift[0], x - 5 - shift[1])
            row, column = (m[i][0] * p[0] + m[i][1] * p[1] for i in range(2))
            arrow = [bilinear(part, y * 2 / 8, x * 2 / 10) for part in arrows[k]]
            return row + 4 + arrow[0], column + 5 + arrow[1]

        first = torch.zeros(2, 9, 11)
        for c, y, x in itertools.product(range(2), range(9), range(11)):
            first[c, y, x] = bilinear(images[k, c], *comes_from(y, x, (0, 0)))
        before, after = centre_of_mass(images[k]), centre_of_mass(first)
        shift = (2 * down + before[0] - after[0], 2 * right + before[1] - after[1])
        for c, y, x in itertools.product(range(2), range(9), range(11)):
            grey = cubic(images[k, c], *comes_from(y, x, shift))
            expected = min(1, max(0, 1.3 * (grey - 0.5) + 0.5))
            assert float(out[k, c, y, x]) == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(bend()(images, draws(images)), images)
    assert not bend(20, 0.2, elastic=1.0)(torch.zeros_like(images), draws(images)).any()


def test_bent_digits_are_as_sharp_as_real_ones():
    digits = load("digits", validation=0).train
    images = digits.gather(torch.arange(400)).images / 255

    def sharpness(images):
        return float(images.diff(dim=3).square().mean() + images.diff(dim=2).square().mean())

    blurred = apply((warp(15, 0.15, 0.15, 1), elastic(1.0)), images, draws(images))
    bent = bend(15, 0.15, 0.15, 1, 1.0, contrast=1.2)(images, draws(images))
    assert sharpness(blurred) < 0.6 * sharpness(images)
    assert 0.9 < sharpness(bent) / sharpness(images) < 1.1


def test_cutout():
    images = 1 + torch.rand(300, 3, 8, 10)
    out = cutout(4)(images, draws(images))
    drawn = draws(images)
    tops, lefts = (drawn.integers(0, side) - 2 for side in (8, 10))
    for image, before, top, left in zip(out, images, tops.tolist(), lefts.tolist(), strict=True):
        expected = before.clone()
        expected[:, max(0, top) : max(0, top + 4), max(0, left) : max(0, left + 4)] = 0
        assert torch.equal(image, expected)
    assert set(tops.tolist()) == set(range(-2, 6))


def test_sometimes():
    images = torch.rand(40, 1, 6, 6)
    out = sometimes((warp(degrees=20), elastic(1.0)), 0.75)(images, draws(images))
    drawn = draws(images)
    changed = elastic(1.0)(warp(degrees=20)(images, drawn), drawn)
    taken = drawn.uniform(1)[:, 0] < 0.75
    assert 20 < taken.sum() < 40
    for image, before, after, own in zip(out, images, changed, taken, strict=True):
        assert torch.equal(image, after if own else before)
    out = sometimes((warp(degrees=20),), 0.75, (elastic(1.0),))(images, draws(images))
    drawn = draws(images)
    turned, stretched = warp(degrees=20)(images, drawn), elastic(1.0)(images, drawn)
    taken = drawn.uniform(1)[:, 0] < 0.75
    for image, one, other, own in zip(out, turned, stretched, taken, strict=True):
        assert torch.equal(image, one if own else other)


def test_mirrored():
    images = torch.rand(2, 3, 4, 5)
    out = mirrored()(images)
    assert out.shape == (2, 2, 3, 4, 5)
    assert torch.equal(out[:, 0], images)
    assert torch.equal(out[:, 1], images.flip(-1))


def test_nudged():
    images = torch.rand(2, 3, 4, 5)
    out = nudged()(images)
    assert out.shape == (2, 9, 3, 4, 5)
    assert torch.equal(out[:, 4], images)
    moved = iter(out.unbind(1))
    for down in (1, 0, -1):
        for right in (1, 0, -1):
            view = next(moved)
            for y in range(4):
                for x in range(5):
                    inside = 0 <= y - down < 4 and 0 <= x - right < 5
                    expected = images[:, :, y - down, x - right] if inside else torch.zeros(2, 3)
                    assert torch.equal(view[:, :, y, x], expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: warp(zoom=1),
        lambda: warp(-1),
        lambda: cutout(0),
        lambda: elastic(1, 1),
        lambda: sometimes((), 0),
        lambda: bend(zoom=1),
        lambda: bend(-1),
        lambda: bend(contrast=0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="is out of range"):
        make()


def test_our_protocol_does_what_a_row_says():
    digits = protocols.find("ours", "mnist", degrees=10, elastic=1.0)
    assert digits.train == (warp(10), elastic(1.0))
    some = protocols.find("ours", "mnist", degrees=10, elastic=1.0, share=0.5)
    assert some.train == (sometimes((warp(10), elastic(1.0)), 0.5),)
    sharp = protocols.find("ours", "mnist", degrees=10, move=1, elastic=0.5, contrast=1.2, share=0.9)
    assert sharp.train == (sometimes((bend(10, 0, 0, 1, 0.5, 1.2),), 0.9),)
    half = protocols.find("ours", "mnist", degrees=10, share=0.9, byerly=0.5)
    assert half.train == (sometimes((augment.byerly(),), 0.5, (sometimes((warp(10),), 0.9),)),)
    assert digits.test == ()
    assert digits.crops is None
    assert digits.validation == 0.1
    photos = protocols.find("ours", "cifar10", padding=4, mirror=True, cutout=8, crops=2)
    numbers = augment.normalise(*protocols.CIFAR10_STATISTICS)
    assert photos.train == (augment.random_crop(32, padding=4), augment.flip(), numbers, cutout(8))
    assert photos.test == (numbers,)
    assert photos.crops == (numbers, mirrored())
    assert protocols.find("ours", "cifar10", crops=9).crops == (numbers, nudged())
    assert protocols.find("ours", "mnist", crops=9).crops == (nudged(),)
    assert protocols.find("ours", "multimnist").train == ()
    with pytest.raises(ValueError, match="multimnist has targets"):
        protocols.find("ours", "multimnist", degrees=5)
    with pytest.raises(ValueError, match="crops=3 is not known; it is one of 1, 2, 9"):
        protocols.find("ours", "cifar10", crops=3)
