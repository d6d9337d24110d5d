"""From a drawing to an image in the form of MNIST's digits."""

import base64
import io

import numpy as np
import pytest
import torch

from torchcaps.demo.ink import MOST_BYTES, Unreadable, as_digit, centre_of_mass, decode, open_ink, open_picture

Image = pytest.importorskip("PIL.Image")
FIELD = (1, 28, 28)


def drawn(digit, side=280, down=0, right=0):
    """A digit of the test set, ten times as large, somewhere on a canvas. Shapes: uint8 [28, 28] -> [side, side]"""
    canvas = torch.zeros(side, side)
    large = (digit / 255).repeat_interleave(10, 0).repeat_interleave(10, 1)
    rows, columns = (large > 0.1).any(1).nonzero()[:, 0], (large > 0.1).any(0).nonzero()[:, 0]
    large = large[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    canvas[down : down + large.shape[0], right : right + large.shape[1]] = large
    return canvas


def as_file(pixels, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def test_digits_of_the_test_set_come_out_as_they_are(digits):
    """They are in this form already: only what is fainter than ink, and a pixel of the place in rounding, may go."""
    kept = 0
    for digit in digits[0]:
        again = as_digit(drawn(digit), FIELD)[0].int()
        places = [(down, right) for down in (0, -1, 1) for right in (0, -1, 1)]
        apart = [(again - digit.int().roll(place, (0, 1))).abs().max() for place in places]
        assert min(apart) <= 26
        kept += bool(apart[0] <= 26)
    assert kept >= 59


def test_the_form_is_mnists(digits):
    for digit in digits[0][::7]:
        image = as_digit(drawn(digit, down=31, right=5), FIELD)
        assert image.dtype == torch.uint8
        assert image.shape == FIELD
        assert image.max() == 255
        sides = [int((image[0] > 25).any(axis).sum()) for axis in (0, 1)]
        assert max(sides) == 20
        assert all(abs(centre - 14) <= 0.51 for centre in centre_of_mass(image[0].double()))


def test_where_and_how_large_it_is_drawn_makes_no_difference(digits):
    digit = digits[0][20]
    image = as_digit(drawn(digit), FIELD)
    assert torch.equal(as_digit(drawn(digit, 400, 150, 37), FIELD), image)
    doubled = drawn(digit, 300, 50, 20).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert (as_digit(doubled, FIELD).int() - image.int()).abs().max() <= 6


def test_larger_fields_keep_the_box_and_small_ones_are_filled(digits):
    wide = as_digit(drawn(digits[0][0]), (1, 36, 36))[0]
    assert max(int((wide > 25).any(axis).sum()) for axis in (0, 1)) == 20
    small = as_digit(drawn(digits[0][0]), (1, 8, 8), box=8)[0]
    assert max(int((small > 25).any(axis).sum()) for axis in (0, 1)) == 8
    assert as_digit(drawn(digits[0][0]), (3, 32, 32)).shape == (3, 32, 32)


def test_a_digit_far_off_its_own_centre_stays_inside():
    ink = torch.zeros(200, 200)
    ink[:, 0:2] = 0.2
    ink[150:, 0:180] = 1
    assert as_digit(ink, FIELD)[0].count_nonzero() > 100


def test_dark_on_light_and_light_on_dark_are_the_same(digits):
    grey = drawn(digits[0][9], 320, 9, 9).mul(255).byte().numpy()
    light, dark = open_ink(as_file(grey)), open_ink(as_file(255 - grey))
    assert (light - dark).abs().max() < 0.01
    assert light.max() == 1


def test_wide_pictures_are_looked_at_whole():
    paper = np.full((100, 1000), 255, np.uint8)
    paper[20:80, 900:920] = 0
    ink = open_ink(as_file(paper))
    assert ink.shape == (28, 280)
    assert ink[:, 240:].max() == 1


@pytest.mark.parametrize("value", [0, 90, 255])
def test_an_empty_canvas_is_called_empty(value):
    ink = open_ink(as_file(np.full((50, 50), value, np.uint8)))
    with pytest.raises(Unreadable, match="the canvas is empty; draw a digit on it"):
        as_digit(ink, FIELD)


def test_what_is_no_picture_is_refused_with_a_sentence(digits):
    url = "data:image/png;base64," + base64.b64encode(b"hello").decode()
    assert decode(url) == b"hello"
    for wrong, sentence in (
        (None, "this is no picture"),
        ("", "this is no picture"),
        ("data:,%%%", "arrived damaged"),
        ("data:," + "A" * (4 * MOST_BYTES // 3 + 200), "larger than 10 MB"),
    ):
        with pytest.raises(Unreadable, match=sentence):
            decode(wrong)
    whole = as_file(digits[0][0].numpy())
    still = Image.fromarray(digits[0][0].numpy())
    frames = io.BytesIO()
    still.save(frames, "GIF", save_all=True, append_images=[still.rotate(90)])
    for content, sentence in (
        (b"", "it is no image"),
        (whole[:60], "it is no image"),
        (frames.getvalue(), "holds 2 frames"),
    ):
        for reading in (open_ink, lambda content: open_picture(content, FIELD)):
            with pytest.raises(Unreadable, match=f"this file cannot be read.*{sentence}.*upload a PNG or JPEG"):
                reading(content)
