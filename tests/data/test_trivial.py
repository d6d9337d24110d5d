"""TrivialAugment against Pillow's own operations and plain loops."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from tests.data.test_stronger import bilinear, draws
from torchcaps.data import protocols
from torchcaps.data.trivial import CHANGES, trivial

STRENGTHS = [0.0, 1 / 30, 0.5, 0.7, 1.0]


def photos(n=6, side=17):
    """Of different ranges; the last has one shade only."""
    images = (torch.rand(n, 3, side, side + 2) * torch.linspace(0.3, 1, n).view(-1, 1, 1, 1) * 255).round()
    images[-1] = 77
    return images / 255


def changed(images, change, strength, sign):
    n = len(images)
    each = torch.full((n,), CHANGES.index(change)), torch.full((n,), strength), torch.full((n,), float(sign))
    return trivial().by(images, *each)


def by_pillow(image, change, strength, sign):
    picture = Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy())
    factor = 1 + 0.99 * strength * sign
    made = {
        "nothing": lambda: picture,
        "brightness": lambda: ImageEnhance.Brightness(picture).enhance(factor),
        "colour": lambda: ImageEnhance.Color(picture).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(picture).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(factor),
        "posterise": lambda: ImageOps.posterize(picture, 8 - round(6 * strength)),
        "solarise": lambda: ImageOps.solarize(picture, math.ceil(255 * (1 - strength) - 1e-4)),
        "stretch": lambda: ImageOps.autocontrast(picture),
        "equalise": lambda: ImageOps.equalize(picture),
    }[change]()
    return torch.from_numpy(np.array(made)).permute(2, 0, 1) / 255


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("change", ["nothing", *CHANGES[6:]])
def test_colours_are_those_of_pillow(change, strength, sign):
    """But for roundings: its pixels are whole numbers after each of its steps."""
    torch.manual_seed(0)
    images = photos()
    out = changed(images, change, strength, sign)
    exact = change in ("nothing", "posterise", "solarise", "equalise")
    for image, before in zip(out, images, strict=True):
        expected = by_pillow(before, change, strength, sign)
        torch.testing.assert_close(image, expected, rtol=0, atol=1e-6 if exact else 2.5 / 255)


@pytest.mark.parametrize("strength", [0.1, -0.4, 1.0])
@pytest.mark.parametrize("change", ["shear_x", "shear_y", "move_x", "move_y", "turn"])
def test_moves(change, strength):
    images = torch.rand(2, 3, 9, 11, dtype=torch.float64)
    out = changed(images, change, abs(strength), math.copysign(1, strength))
    angle = math.radians(135 * strength)
    source = {
        "shear_x": lambda y, x: (y, x + 0.99 * strength * y),
        "shear_y": lambda y, x: (y + 0.99 * strength * x, x),
        "move_x": lambda y, x: (y, x - 32 * strength),
        "move_y": lambda y, x: (y - 32 * strength, x),
        "turn": lambda y, x: (math.cos(angle) * y - math.sin(angle) * x, math.sin(angle) * y + math.cos(angle) * x),
    }[change]
    for y in range(9):
        for x in range(11):
            row, column = source(y - 4, x - 5)
            for k in range(2):
                expected = bilinear(images[k, 1], row + 4, column + 5)
                assert float(out[k, 1, y, x]) == pytest.approx(expected, abs=1e-5)


def test_each_image_has_one_change_of_its_own():
    images = photos(1).expand(2000, -1, -1, -1).clone()
    u = draws(images).uniform(3)
    change, strength, sign = (14 * u[:, 0]).long(), (31 * u[:, 1]).floor() / 30, torch.where(u[:, 2] < 0.5, -1.0, 1.0)
    assert torch.bincount(change).min() > 100
    assert sorted(set((30 * strength).round().int().tolist())) == list(range(31))
    out = trivial()(images, draws(images))
    for k in range(0, 2000, 97):
        alone = changed(images[k : k + 1], CHANGES[change[k]], float(strength[k]), int(sign[k]))
        torch.testing.assert_close(out[k : k + 1], alone, rtol=0, atol=1e-6)
    assert out.min() >= 0
    assert out.max() <= 1


def test_a_grey_image_keeps_its_one_channel():
    images = torch.rand(60, 1, 8, 8)
    assert trivial()(images, draws(images)).shape == images.shape


def test_our_protocol_takes_it_between_flips_and_numbers():
    photos = protocols.find("ours", "cifar10", padding=4, mirror=True, trivial=True, cutout=8)
    names = [type(step).__name__ for step in photos.train]
    assert names == ["random_crop", "flip", "trivial", "normalise", "cutout"]
    assert "trivial" not in [type(step).__name__ for step in photos.test]
