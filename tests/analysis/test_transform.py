"""Images moved by amounts whose outcome is known pixel by pixel."""

import math

import pytest
import torch

from torchcaps.analysis.robustness import LEVELS, changed
from torchcaps.analysis.transform import add_noise, dark_frame, moved


def pictures(count=3, side=7):
    """Random, with a dark frame."""
    images = torch.rand(count, 2, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images[..., [0, -1], :] = 0
    images[..., [0, -1]] = 0
    return images


def shifted(images, right, down):
    """By whole pixels, in a loop."""
    found = torch.zeros_like(images)
    height, width = images.shape[2:]
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                found[..., y, x] = images[..., y - down, x - right]
    return found


def test_nothing_moves_by_nothing():
    images = pictures()
    assert torch.allclose(moved(images), images, atol=1e-12)


@pytest.mark.parametrize("quarters", [1, 2, 3, -1])
def test_quarter_turns_go_counter_clockwise(quarters):
    images = pictures()
    found = moved(images, degrees=90.0 * quarters)
    assert torch.allclose(found, torch.rot90(images, quarters, (2, 3)), atol=1e-12)


@pytest.mark.parametrize(("right", "down"), [(2, 0), (-1, 0), (0, 3), (0, -2), (2, -3)])
def test_shifts_by_whole_pixels(right, down):
    images = pictures(side=8)
    assert torch.allclose(moved(images, right=right, down=down), shifted(images, right, down), atol=1e-12)


def test_amounts_may_differ_from_image_to_image():
    images = pictures()
    found = moved(images, right=torch.tensor([0.0, 1.0, -2.0]), degrees=torch.tensor([180.0, 0.0, 0.0]))
    assert torch.allclose(found[0], torch.rot90(images[0], 2, (1, 2)), atol=1e-12)
    assert torch.allclose(found[1:2], shifted(images[1:2], 1, 0), atol=1e-12)
    assert torch.allclose(found[2:], shifted(images[2:], -2, 0), atol=1e-12)


def test_a_turn_comes_before_a_shift():
    images = pictures()
    found = moved(images, degrees=90, right=2)
    assert torch.allclose(found, shifted(torch.rot90(images, 1, (2, 3)), 2, 0), atol=1e-12)


def test_shear_leans_upright_lines_to_the_right():
    images = pictures(side=5)
    found = moved(images, shear=45.0)
    for row in range(5):
        expected = shifted(images[:, :, row : row + 1], 2 - row, 0)
        assert torch.allclose(found[:, :, row : row + 1], expected, atol=1e-12)


def test_scale_shows_all_larger():
    images = pictures(side=5)
    found = moved(images, scale=2.0)
    assert torch.allclose(found[..., ::2, ::2], images[..., 1:4, 1:4], atol=1e-12)
    with pytest.raises(ValueError, match="a scale is above 0"):
        moved(images, scale=0.0)


def test_what_comes_in_from_outside():
    dark, bright = pictures(), pictures() + 0.5
    assert dark_frame(dark)
    assert not dark_frame(bright)
    assert torch.equal(moved(dark, right=2)[..., 0], torch.zeros(3, 2, 7, dtype=torch.float64))
    assert torch.allclose(moved(bright, right=2)[..., 0], bright[..., 0], atol=1e-12)
    assert torch.equal(moved(bright, right=2, fill="zeros")[..., 0], torch.zeros(3, 2, 7, dtype=torch.float64))


def test_noise_is_the_same_each_time_and_stays_within_bounds():
    images = torch.full((4, 1, 50, 50), 0.5)
    found = add_noise(images, 0.1)
    assert torch.equal(found, add_noise(images, 0.1))
    assert abs(float((found - images).std()) - 0.1) < 0.003
    wild = add_noise(images, 5.0)
    assert float(wild.min()) == 0
    assert float(wild.max()) == 1
    assert torch.equal(add_noise(images, 0.0), images)


def test_each_way_of_changing_images_goes_both_ways():
    images = pictures(4, 8)
    expected = [(2, 0), (0, 2), (-2, 0), (0, -2)]
    found = changed(images, "shift", 0.25)
    for k, (right, down) in enumerate(expected):
        assert torch.allclose(found[k : k + 1], shifted(images[k : k + 1], right, down), atol=1e-6)
    turned = changed(images, "rotation", 90.0)
    assert torch.allclose(turned[0], torch.rot90(images[0], 1, (1, 2)), atol=1e-6)
    assert torch.allclose(turned[1], torch.rot90(images[1], -1, (1, 2)), atol=1e-6)
    for way, levels in LEVELS.items():
        still = 1.0 if way == "scale" else 0.0
        assert still in levels
        assert list(levels) == sorted(levels)
        assert torch.allclose(changed(images, way, still), images, atol=1e-6)
    with pytest.raises(ValueError, match="no way 'melting' of changing images; there are rotation"):
        changed(images, "melting", math.pi)
