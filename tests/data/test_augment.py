"""Each batched step against a plain version for one image, written with loops or another library."""

from __future__ import annotations

import colorsys
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import ndimage

from torchcaps.data import augment
from torchcaps.data.augment import (
    affine,
    apply,
    brightness,
    byerly,
    byerly_erase,
    byerly_rotate,
    byerly_shift,
    byerly_squish,
    centre_crop,
    colour_jitter,
    contrast,
    flip,
    n_crop,
    normalise,
    pad,
    random_crop,
    resize,
    rotate,
    scale,
    shift,
    standardise,
    ten_crop,
    translate,
)
from torchcaps.data.random import Draws

RANDOM = [
    shift(2),
    affine(20, 0.1),
    translate(0.1),
    rotate(25),
    random_crop(9, padding=2),
    flip(),
    brightness(0.25),
    contrast(0.2, 1.8),
    colour_jitter(0.2, 0.2, 0.2, 0.2),
    byerly_rotate(),
    byerly_shift(),
    byerly_squish(),
    byerly_erase(),
    byerly(),
]
STILL = [centre_crop(8), pad(3), resize(7), scale(0.5), normalise(0.5, 0.25), standardise(), ten_crop(9), n_crop(8, 5)]


def coloured(b=12, c=3, h=13, w=15):
    return torch.rand(b, c, h, w)


def digits(b=200, size=28):
    """Blots of ink with empty margins of many widths."""
    images = torch.zeros(b, 1, size, size)
    for k in range(b):
        top, left = 2 + k % 9, 1 + k % 11
        bottom, right = size - 1 - k % 7, size - 2 - k % 5
        images[k, 0, top:bottom, left:right] = 0.1 + 0.9 * torch.rand(bottom - top, right - left)
    return images


def draws(images, seed=3, epoch=1):
    return Draws(seed, epoch, 1000 + torch.arange(len(images)))


def assert_close(ours, expected, atol=2e-6):
    assert ours.shape == expected.shape
    assert (ours.double() - torch.as_tensor(expected).double()).abs().max() < atol


def half(z):
    return min(abs(np.float32(0.33) * np.float32(z)), np.float32(0.9999))


def moved(image, down, right, size=None):
    height, width = image.shape[-2:]
    out = torch.zeros(image.shape[0], size or height, size or width)
    for y in range(out.shape[1]):
        for x in range(out.shape[2]):
            if 0 <= y - down < height and 0 <= x - right < width:
                out[:, y, x] = image[:, y - down, x - right]
    return out


@pytest.mark.parametrize("step", RANDOM + STILL, ids=repr)
def test_steps_are_frozen_pickle_print_and_keep_dtypes(step):
    assert pickle.loads(pickle.dumps(step)) == step
    assert eval(repr(step), vars(augment)) == step
    assert hash(step) == hash(pickle.loads(pickle.dumps(step)))
    with pytest.raises(AttributeError):
        step.anything = 1
    images = coloured()
    assert step.random == (step in RANDOM)
    for dtype in (torch.float32, torch.float64):
        out = step(images.to(dtype), draws(images) if step.random else None)
        assert out.dtype == dtype
        assert out.isfinite().all()


@pytest.mark.parametrize("step", RANDOM, ids=repr)
def test_random_steps_depend_on_the_position_alone(step):
    images = pad(3)(coloured(b=40, h=10, w=10))
    whole = step(images, Draws(1, 2, torch.arange(40)))
    assert torch.equal(step(images, Draws(1, 2, torch.arange(40))), whole)
    parts = [step(images[part], Draws(1, 2, part)) for part in torch.arange(40).split([1, 7, 32])]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(step(images, Draws(2, 2, torch.arange(40))), whole)
    assert not torch.equal(step(images, Draws(1, 3, torch.arange(40))), whole)
    with pytest.raises(ValueError, match="needs draws"):
        step(images)


@pytest.mark.parametrize("step", STILL, ids=repr)
def test_still_steps_do_not_depend_on_the_batch(step):
    images = coloured(b=40)
    assert torch.equal(torch.cat([step(part) for part in images.split([1, 7, 32])]), step(images))


def test_the_steps_compile_in_one_graph():
    steps = [
        step for step in RANDOM + STILL if step not in (byerly_rotate(), byerly_shift(), translate(0.1), rotate(25))
    ]

    def everything(images, positions):
        return [step(images, Draws(0, 0, positions)) for step in steps]

    images, positions = coloured(b=3), torch.arange(3)
    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for ours, expected in zip(compiled(images, positions), everything(images, positions), strict=True):
        assert torch.equal(ours, expected)


def test_shift():
    images = coloured()
    amounts = draws(images).integers(-2, 3, 2)
    out = shift(2)(images, draws(images))
    for image, ours, (down, right) in zip(images, out, amounts.tolist(), strict=True):
        assert torch.equal(ours, moved(image, down, right))
    many = Draws(0, 0, torch.arange(25_000))
    point = torch.zeros(25_000, 1, 5, 5)
    point[:, :, 2, 2] = 1
    counts = shift(2)(point, many).sum((0, 1))
    assert ((counts - 1000).abs() < 5 * math.sqrt(1000)).all()


@pytest.mark.parametrize("fill", ["zero", "nearest"])
@pytest.mark.parametrize(("degrees", "fraction"), [(20, 0.1), (0, 0.2), (35, 0)])
def test_affine_as_scipy_does_it(degrees, fraction, fill):
    images = coloured()
    out = affine(degrees, fraction, fill)(images, draws(images))
    u = 2 * draws(images).uniform(3).double().numpy() - 1
    centre = np.array([6.0, 7.0])
    for image, ours, (turn, down, right) in zip(images, out, u, strict=True):
        angle = math.radians(turn * degrees)
        matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        offset = centre + matrix @ (np.array([down * fraction * 13, right * fraction * 15]) - centre)
        mode = {"zero": "grid-constant", "nearest": "nearest"}[fill]
        expected = [ndimage.affine_transform(p, matrix, offset, order=1, mode=mode) for p in image.double().numpy()]
        assert_close(ours, np.stack(expected), atol=2e-5)


def test_rotate_and_translate_are_parts_of_affine():
    assert rotate(20) == affine(degrees=20, fill="zero")
    assert translate(0.1) == affine(fraction=0.1, fill="nearest")
    with pytest.raises(ValueError, match="fill='mirror' is not known; it is one of zero, nearest"):
        rotate(20, fill="mirror")


def test_random_crop():
    images = coloured()
    draw = draws(images)
    tops, lefts = draw.integers(0, 13 + 4 - 9 + 1).tolist(), draw.integers(0, 15 + 4 - 9 + 1).tolist()
    out = random_crop(9, padding=2)(images, draws(images))
    for image, ours, top, left in zip(images, out, tops, lefts, strict=True):
        padded = torch.zeros(3, 17, 19)
        padded[:, 2:15, 2:17] = image
        assert torch.equal(ours, padded[:, top : top + 9, left : left + 9])
    assert torch.equal(random_crop(13)(images[..., :13], draws(images)), images[..., :13])
    with pytest.raises(ValueError, match=r"random_crop\(size=20, padding=2\) does not fit into an image of 13 x 15"):
        random_crop(20, padding=2)(images, draws(images))


def test_centre_crop_and_pad():
    images = coloured()
    assert torch.equal(centre_crop(7)(images), images[:, :, 3:10, 4:11])
    assert torch.equal(centre_crop(8)(images), images[:, :, 2:10, 3:11])
    assert torch.equal(centre_crop(13)(pad(3)(images[..., :13])), images[..., :13])
    assert pad(3)(images).sum() == images.sum()
    with pytest.raises(ValueError, match="does not fit"):
        centre_crop(14)(images)


def test_flip():
    images = coloured(b=400)
    chosen = draws(images).uniform() < 0.5
    out = flip()(images, draws(images))
    for image, ours, turned in zip(images, out, chosen, strict=True):
        assert torch.equal(ours, torch.stack([image[..., 14 - x] for x in range(15)], -1) if turned else image)
    assert 150 < chosen.sum() < 250


@pytest.mark.parametrize("size", [7, 10, 15, 31])
def test_resize_with_a_triangle_that_widens(size):
    def weights(old, new):
        matrix, stretch = np.zeros((new, old)), max(old / new, 1)
        for i in range(new):
            for k in range(old):
                matrix[i, k] = max(0, 1 - abs((k + 0.5) - (i + 0.5) * old / new) / stretch)
        return matrix / matrix.sum(1, keepdims=True)

    images = coloured(b=3)
    expected = np.einsum("yh,bchw,xw->bcyx", weights(13, size), images.double().numpy(), weights(15, size))
    assert_close(resize(size)(images), expected)


def test_resize_as_pillow_does_it():
    image = pytest.importorskip("PIL.Image")
    images = coloured(b=3, c=1, h=96, w=96)
    for size in (48, 64):
        expected = [image.fromarray(x.numpy()).resize((size, size), image.Resampling.BILINEAR) for x in images[:, 0]]
        assert_close(resize(size)(images)[:, 0], np.stack([np.asarray(x) for x in expected]))


def test_scale_gives_value_over_256():
    values = torch.arange(256).view(1, 1, 16, 16)
    assert_close(scale(255 / 256)(values.float() / 255), values.double() / 256, atol=1e-7)


def test_normalise():
    images = coloured()
    out = normalise((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))(images)
    for k, (mean, std) in enumerate([(0.1, 0.5), (0.2, 1.0), (0.3, 2.0)]):
        assert_close(out[:, k], (images[:, k].double() - mean) / std)
    assert torch.equal(normalise(0.5, 0.25)(images), normalise((0.5,) * 3, (0.25,) * 3)(images))
    with pytest.raises(ValueError, match="has 2 numbers for 3 channels"):
        normalise((0.5, 0.5), 1.0)(images)


def test_standardise():
    images = coloured()
    images[1] = 0.5
    images[2] = 0.5 + images[2] / 1000
    for image, ours in zip(images.double().numpy(), standardise()(images), strict=True):
        expected = (image - image.mean()) / max(image.std(), 1 / math.sqrt(image.size))
        assert_close(ours, expected, atol=1e-5)
    assert (standardise()(images)[1] == 0).all()


def test_brightness_and_contrast():
    images = coloured()
    u = draws(images).uniform().double().numpy()
    bright, contrasted = brightness(0.25)(images, draws(images)), contrast(0.2, 1.8)(images, draws(images))
    for k, image in enumerate(images.double().numpy()):
        assert_close(bright[k], image + (0.5 * u[k] - 0.25))
        mean = image.mean((1, 2), keepdims=True)
        assert_close(contrasted[k], (image - mean) * (0.2 + 1.6 * u[k]) + mean)


def jittered(image, factors, order):
    """One image [c, h, w] in float64, hue by the standard library, pixel by pixel."""
    for change in order:
        grey = image if len(image) == 1 else np.tensordot([0.2989, 0.587, 0.114], image, 1)[None]
        if change == 0:
            image = np.clip(image * factors[0], 0, 1)
        elif change == 1:
            image = np.clip(factors[1] * image + (1 - factors[1]) * grey.mean(), 0, 1)
        elif change == 2:
            image = np.clip(factors[2] * image + (1 - factors[2]) * grey, 0, 1)
        elif len(image) == 3:
            turned = np.empty_like(image)
            for y in range(image.shape[1]):
                for x in range(image.shape[2]):
                    hue, saturation, value = colorsys.rgb_to_hsv(*image[:, y, x])
                    turned[:, y, x] = colorsys.hsv_to_rgb((hue + factors[3]) % 1, saturation, value)
            image = turned
    return image


@pytest.mark.parametrize("amounts", [(0.2, 0.2, 0.2, 0.2), (0.8, 1.5, 0.9, 0.5), (0.4, 0, 0, 0.3)], ids=str)
def test_colour_jitter(amounts):
    images = coloured(b=16, h=5, w=6)
    images[0] = 0.5
    images[1, :, 0] = torch.tensor([0.0, 1.0, 1.0])[:, None]
    draw = draws(images)
    u, order = draw.uniform(4).double().numpy(), draw.uniform(4).argsort(stable=True).tolist()
    assert len({tuple(x) for x in order}) > 8
    out = colour_jitter(*amounts)(images, draws(images))
    for k, image in enumerate(images.double().numpy()):
        low = [max(0, 1 - x) for x in amounts[:3]] + [-amounts[3]]
        high = [1 + x for x in amounts[:3]] + [amounts[3]]
        factors = [a + (b - a) * x for a, b, x in zip(low, high, u[k], strict=True)]
        assert_close(out[k], jittered(image, factors, order[k]), atol=1e-5)


def test_colour_jitter_of_grey_images():
    images = coloured(b=16, c=1, h=5, w=6)
    draw = draws(images)
    factors, order = 0.5 + draw.uniform(4).double().numpy(), draw.uniform(4).argsort(stable=True).tolist()
    out = colour_jitter(0.5, 0.5, 0.5, 0.5)(images, draws(images))
    for k, image in enumerate(images.double().numpy()):
        assert_close(out[k], jittered(image, factors[k], [x for x in order[k] if x < 2]))
    with pytest.raises(ValueError, match="grey or RGB images, not 2 channels"):
        colour_jitter(0.1)(coloured(c=2), draws(coloured()))
    with pytest.raises(ValueError, match="hue is at most"):
        colour_jitter(hue=0.6)


def test_ten_crop():
    images = coloured()
    out = ten_crop(9)(images)
    assert out.shape == (12, 10, 3, 9, 9)
    for half_of, side in enumerate((images, torch.stack([images[..., 14 - x] for x in range(15)], -1))):
        for k, (y, x) in enumerate([(0, 0), (0, 6), (4, 0), (4, 6), (2, 3)]):
            assert torch.equal(out[:, 5 * half_of + k], side[:, :, y : y + 9, x : x + 9])


def test_n_crop_is_the_centre_and_the_diagonals():
    images = coloured(b=2, c=2, h=48, w=48)
    out = n_crop(32)(images)
    assert out.shape == (2, 13, 2, 32, 32)
    assert torch.equal(out[:, 0], centre_crop(32)(images))
    offsets = {(sy * k, sx * k) for k in (1, 2, 3) for sy in (-1, 1) for sx in (-1, 1)}
    found = {
        (y, x)
        for k in range(1, 13)
        for y in range(-8, 9)
        for x in range(-8, 9)
        if torch.equal(out[:, k], images[:, :, 8 + y : 40 + y, 8 + x : 40 + x])
    }
    assert found == offsets


@pytest.mark.parametrize("n", [1, 5, 40, 289])
def test_n_crop_gives_as_many_as_asked_for(n):
    images = torch.rand(1, 1, 48, 48)
    out = n_crop(32, n)(images)
    assert out.shape == (1, n, 1, 32, 32)
    assert len({tuple(crop.flatten()[:4].tolist()) for crop in out[0]}) == n
    assert torch.equal(out[:, : min(n, 13)], n_crop(32)(images)[:, :n])
    with pytest.raises(ValueError, match="1 to 289 places"):
        n_crop(32, 290)(images)


def test_byerly_rotate():
    images = digits()
    z = draws(images).normal(2).numpy()
    out = byerly_rotate()(images, draws(images))
    turned = 0
    for image, ours, (first, second) in zip(images[:, 0].double().numpy(), out[:, 0], z, strict=True):
        angle = int(np.float32(30) * np.clip(np.float32(0.33) * first, -0.9999, 0.9999)) if second > 0 else 0
        a = math.radians(angle)
        matrix = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        offset = np.array([14.0, 14.0]) - matrix @ np.array([14.0, 14.0])
        expected = ndimage.affine_transform(image, matrix, offset, order=1, mode="grid-constant")
        assert_close(ours, expected, atol=2e-5)
        turned += angle != 0
        assert angle != 0 or np.array_equal(ours.double().numpy(), image)
    assert 70 < turned < 120  # half of them, less those below one degree


def test_byerly_angles_are_whole_degrees_and_half_are_none(monkeypatch):
    angles = []
    monkeypatch.setattr(augment, "_turn", lambda images, angle, *rest: angles.append(angle) or images)
    byerly_rotate()(torch.zeros(20_000, 1, 1, 1), Draws(0, 0, torch.arange(20_000)))
    (angle,) = angles
    assert torch.equal(angle, angle.round())
    assert angle.abs().max() == 29
    probability = 0.5 + 0.5 * math.erf(1 / 30 / 0.33 / math.sqrt(2))  # int() brings what is below 1 to 0
    assert abs((angle == 0).double().mean() - probability) < 5 * math.sqrt(0.25 / 20_000)
    at_least_ten = 0.5 * math.erfc(10 / 30 / 0.33 / math.sqrt(2))
    assert abs((angle.abs() >= 10).double().mean() - at_least_ten) < 5 * math.sqrt(0.25 / 20_000)


def test_byerly_shift():
    images = digits()
    draw = draws(images)
    z, u = draw.normal(2).numpy(), draw.uniform(2).numpy()
    out = byerly_shift()(images, draws(images))
    for k, image in enumerate(images):
        amounts = []
        for axis, lines in enumerate((image[0].sum(1), image[0].sum(0))):
            full = [i for i, ink in enumerate(lines.tolist()) if ink > 0]
            before, after = np.float32(full[0]), np.float32(27 - full[-1])
            share = half(z[k, axis])
            amounts.append(math.floor(-share * before) if u[k, axis] < 0.5 else math.floor(share * (1 + after)))
        assert torch.equal(out[k], moved(image, *amounts))
        assert abs(out[k].sum() - image.sum()) < 1e-3  # nothing left the frame


def test_byerly_shift_reaches_every_edge_and_crosses_none():
    images = torch.zeros(20_000, 1, 28, 28)
    images[:, :, 9:20, 10:18] = 1
    out = byerly_shift()(images, Draws(0, 0, torch.arange(20_000)))
    assert (out.sum((1, 2, 3)) == 88).all()
    tops, lefts = out.amax((1, 3)).argmax(1), out.amax((1, 2)).argmax(1)
    assert set(tops.tolist()) == set(range(18))
    assert set(lefts.tolist()) == set(range(21))
    assert abs((tops < 9).double().mean() - 0.5) < 0.02  # up takes floor(-h m): at least 1 unless h is 0
    empty = torch.zeros(5, 1, 28, 28)
    assert torch.equal(byerly_shift()(empty, Draws(0, 0, torch.arange(5))), empty)


def test_byerly_squish():
    images = digits(b=900)
    z = draws(images).normal(2).numpy()
    out = byerly_squish()(images, draws(images))
    widths = set()
    for image, ours, pair in zip(images[:, 0].double().numpy(), out[:, 0], z, strict=True):
        less = math.floor(7 * half(pair[0]) + 1)
        offset = less // 2 + math.floor(2 * half(pair[1]))
        widths.add((less, offset - less // 2))
        new = 28 - less
        expected = np.zeros((28, 28))
        for x in range(new):
            centre, stretch = (x + 0.5) * 28 / new, 28 / new
            weight = np.zeros(28)
            for k in range(28):
                t = (k + 0.5 - centre) / stretch
                if abs(t) < 3:
                    weight[k] = (
                        1 if t == 0 else 3 * math.sin(math.pi * t) * math.sin(math.pi * t / 3) / (math.pi * t) ** 2
                    )
            expected[:, offset + x] = image @ (weight / weight.sum())
        assert_close(ours, expected)
    assert {less for less, _ in widths} == set(range(1, 8))
    assert {more for _, more in widths} == {0, 1}


def test_byerly_squish_as_pillow_does_it():
    image = pytest.importorskip("PIL.Image")
    images = digits(b=40)
    for less in range(1, 8):
        for more in (0, 1):
            amounts = torch.full((40,), float(less)), torch.full((40,), float(less // 2 + more))
            out = augment._narrowed(images, *amounts)[:, 0]
            for ours, pixels in zip(out, images[:, 0], strict=True):
                narrow = image.fromarray(pixels.numpy()).resize((28 - less, 28), image.Resampling.LANCZOS)
                expected = np.zeros((28, 28), np.float32)
                expected[:, less // 2 + more :][:, : 28 - less] = np.asarray(narrow)
                assert_close(ours, expected)


def test_byerly_erase():
    images = torch.rand(20_000, 2, 28, 28) + 0.5
    out = byerly_erase()(images, Draws(0, 0, torch.arange(20_000)))
    gone = out == 0
    assert (gone.sum((1, 2, 3)) == 2 * 16).all()
    assert torch.equal(torch.where(gone, images, out), images)
    assert torch.equal(gone[:, 0], gone[:, 1])
    tops, lefts = gone[:, 0].any(2).to(torch.uint8).argmax(1), gone[:, 0].any(1).to(torch.uint8).argmax(1)
    rows = gone[:, 0].any(2)
    assert (rows.sum(1) == 4).all()
    for corner in (tops, lefts):
        counts = torch.bincount(corner, minlength=28)
        assert counts[:4].sum() == 0
        assert counts[23:].sum() == 0
        assert ((counts[4:23] - 20_000 / 19).abs() < 5 * math.sqrt(20_000 / 19)).all()
    with pytest.raises(ValueError, match="at least 10 pixels, not 8"):
        byerly_erase()(torch.rand(2, 1, 8, 8), Draws(0, 0, torch.arange(2)))


def test_byerly_is_rotate_shift_squish_erase():
    images = digits()
    draw = draws(images)
    normal, uniform = draw.normal(6), draw.uniform(4)
    expected = byerly_rotate().by(images, normal[:, :2])
    expected = byerly_shift().by(expected, normal[:, 2:4], uniform[:, :2])
    expected = byerly_squish().by(expected, normal[:, 4:])
    expected = byerly_erase().by(expected, uniform[:, 2:])
    out = byerly()(images, draws(images))
    assert torch.equal(out, expected)
    assert out.min() < 0 < out.max()  # Lanczos overshoots, and nothing is clipped
    assert out.min() > -0.3
    assert out.max() < 1.3


def test_autocast_changes_nothing():
    images = digits(b=8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = byerly()(images, draws(images))
    assert torch.equal(byerly()(images, draws(images)), inside)


@pytest.mark.parametrize(
    "make",
    [
        lambda: augment.shift(-1),
        lambda: augment.pad(-1),
        lambda: augment.resize(0),
        lambda: augment.centre_crop(0),
        lambda: augment.random_crop(0),
        lambda: augment.random_crop(3, padding=-1),
        lambda: augment.ten_crop(0),
        lambda: augment.n_crop(0),
        lambda: augment.n_crop(8, 0),
        lambda: augment.brightness(-1),
        lambda: augment.contrast(2, 1),
        lambda: augment.contrast(-0.5, 1),
        lambda: augment.normalise(0.5, 0),
        lambda: augment.normalise(0.5, (0.5, 0.0)),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"^\w+\(.*\) is out of range: "):
        make()


def test_apply_takes_the_steps_in_turn():
    images = coloured()
    steps = (shift(2), flip(), standardise())
    draw = draws(images)
    expected = standardise()(flip()(shift(2)(images, draw), draw))
    assert torch.equal(apply(steps, images, draws(images)), expected)
    assert torch.equal(apply((), images), images)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("step", RANDOM + STILL, ids=repr)
def test_a_gpu_gives_the_same_without_waiting(step):
    images = pad(3)(coloured(b=64, h=10, w=10))
    positions = torch.arange(64)
    expected = step(images, Draws(1, 2, positions))
    there, at = images.cuda(), positions.cuda()
    step(there, Draws(1, 2, at))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(there, Draws(1, 2, at))
        part = step(there[:5], Draws(1, 2, at[:5]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out.cpu(), expected, atol=2e-5)
    assert torch.equal(out[:5], part)
