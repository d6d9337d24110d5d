"""Augmentation of our own rows against plain loops."""

import math
import pickle

import pytest
import torch

from torchcaps.data import augment, protocols, stronger
from torchcaps.data.random import Draws
from torchcaps.data.stronger import cutout, elastic, mirrored, nudged, sometimes, warp
from torchcaps.data.trivial import trivial

RANDOM = [warp(15, 0.1, 0.2, 3), elastic(1.2, 4), cutout(5), sometimes((warp(15), elastic(1.2)), 0.7), trivial()]


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
    "make", [lambda: warp(zoom=1), lambda: warp(-1), lambda: cutout(0), lambda: elastic(1, 1), lambda: sometimes((), 0)]
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="is out of range"):
        make()


def test_our_protocol_does_what_a_row_says():
    digits = protocols.find("ours", "mnist", degrees=10, elastic=1.0)
    assert digits.train == (warp(10), elastic(1.0))
    some = protocols.find("ours", "mnist", degrees=10, elastic=1.0, share=0.5)
    assert some.train == (sometimes((warp(10), elastic(1.0)), 0.5),)
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
