"""Generated sets against plain loops, and their statistics against arithmetic."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import ndimage

from torchcaps.data.generated import DiverseMultiMNIST, GeneratedAffNIST, MultiMNIST, canvas
from torchcaps.data.random import hashed
from torchcaps.data.splits import Stored

WORDS = tuple("0123456789")


def base(n=60, channels=1, height=28, width=28, classes=10):
    """Digits made of integers alone, so that what is pinned does not hang on a download or a generator."""
    number = torch.arange(n * channels * height * width).view(n, channels, height, width)
    images = (number * 2654435761 % 2**32 >> 24).to(torch.uint8)
    images[:, :, :4], images[:, :, -4:], images[..., :4], images[..., -4:] = 0, 0, 0, 0
    labels = torch.arange(n) * 7 % 13 % classes
    return Stored(images[:, 0] if channels == 1 else images, labels, WORDS[:classes])


def boxes(n=50):
    """20 x 20 boxes in the middle of 28 x 28."""
    images = torch.zeros(n, 28, 28, dtype=torch.uint8)
    images[:, 4:24, 4:24] = 100
    return Stored(images, torch.arange(n) % 10, WORDS)


def digest(*tensors):
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors)).hexdigest()[:16]


def placed(digit, down, right, pad):
    """One digit [c, h, w] on a larger canvas, pixel by pixel."""
    channels, height, width = digit.shape
    out = np.zeros((channels, height + 2 * pad, width + 2 * pad), np.uint8)
    for y in range(height):
        for x in range(width):
            row, column = y + pad + down, x + pad + right
            if 0 <= row < out.shape[1] and 0 <= column < out.shape[2]:
                out[:, row, column] = digit[:, y, x]
    return out


@pytest.mark.parametrize(
    ("shift", "pad", "relative", "size"),
    [(4, 4, False, (1, 28, 28)), (6, 4, True, (1, 28, 28)), (2, 5, False, (3, 9, 11)), (9, 1, False, (1, 10, 10))],
)
def test_multimnist_against_loops(shift, pad, relative, size):
    single = base(60, *size)
    split = MultiMNIST(single, shift=shift, pad=pad, relative=relative, seed=5)
    assert len(split) == 60_000
    assert split.image == (size[0], size[1] + 2 * pad, size[2] + 2 * pad)
    indices = torch.tensor([0, 999, 1000, 31_234, 59_999, *range(500, 520)])
    images, labels, targets = split.gather(indices)
    digits = single.images.view(60, *size).numpy()
    way = 2 * shift + 1
    for k, index in enumerate(indices.tolist()):
        digit = index // 1000
        own = int(single.labels[digit])
        others = [i for i in sorted(range(60), key=lambda i: int(single.labels[i])) if single.labels[i] != own]
        partner = others[int(hashed(5, 0xD161, indices[k])) % len(others)]
        number = int(hashed(5, 0xD162, indices[k])) % way**4
        shifts = [number // way**power % way - shift for power in (3, 2, 1, 0)]
        if relative:
            shifts[:2] = 0, 0
        first, second = placed(digits[digit], *shifts[:2], pad), placed(digits[partner], *shifts[2:], pad)
        assert np.array_equal(targets[k].numpy(), np.stack([first, second]))
        assert np.array_equal(images[k].numpy(), np.minimum(first.astype(int) + second, 255))
        assert labels[k].tolist() == [own, int(single.labels[partner])]


@pytest.mark.parametrize("kind", [MultiMNIST, DiverseMultiMNIST, GeneratedAffNIST])
def test_a_batch_is_its_images_one_by_one(kind):
    split = kind(base(), seed=3)
    indices = torch.randint(0, len(split), (30,))
    batch = split.gather(indices)
    assert batch.images.dtype == torch.uint8
    assert batch.labels.dtype == torch.int64
    for k, index in enumerate(indices.tolist()):
        one = split[index]
        assert torch.equal(one.image, batch.images[k])
        assert torch.equal(one.label, batch.labels[k])
        assert one.target is None if batch.targets is None else torch.equal(one.target, batch.targets[k])
    assert torch.equal(split[-1].image, split[len(split) - 1].image)
    assert torch.equal(split.to("cpu").gather(indices).images, batch.images)
    bare = split.gather(indices, targets=False)
    assert bare.targets is None
    assert torch.equal(bare.images, batch.images)
    assert repr(split).startswith(kind.__name__)
    with pytest.raises(IndexError):
        split[len(split)]


@pytest.mark.parametrize("kind", [MultiMNIST, DiverseMultiMNIST, GeneratedAffNIST])
def test_one_seed_repeats_and_two_differ(kind):
    indices = torch.arange(0, 1900, 19)
    first, again, other = (kind(base(), seed=seed).gather(indices) for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not (first.images == other.images).all((1, 2, 3)).any()


@pytest.mark.parametrize("kind", [MultiMNIST, DiverseMultiMNIST, GeneratedAffNIST])
def test_options_travel_with_the_split(kind):
    options = {} if kind is GeneratedAffNIST else {"shift": 2, "pad": 3, "base_shift": "digit", "different": "image"}
    if kind is DiverseMultiMNIST:
        options["overlay"] = "mean"
    split = kind(base(), 777, seed=9, **options)
    moved = split.to("cpu")
    assert len(moved) == 777
    assert moved.options == split.options
    assert torch.equal(moved[776].image, split[776].image)
    with pytest.raises(TypeError):
        kind(base(), shfit=3)


def test_the_test_sets_image_7654321_is_pinned():
    split = MultiMNIST(base(10_000), seed=2)
    assert len(split) == 10_000_000
    image, label, target = split[7_654_321]
    assert digest(image, label, target) == "ad8a4e934a79acea"
    everywhere = torch.arange(12_345, 10_000_000, 999_983)
    assert digest(*split.gather(everywhere)) == "f8da9e4f6c74a7f5"
    assert digest(*MultiMNIST(base(10_000), shift=6, relative=True).gather(everywhere)) == "84dc1d7f91fdb18f"


def test_other_sets_are_pinned():
    diverse = DiverseMultiMNIST(base(10_000), 21_000_000, seed=2).gather(torch.arange(54_321, 21_000_000, 999_983))
    assert digest(*diverse) == "fa3784f7a984ac11"
    affnist = GeneratedAffNIST(base(10_000), seed=2).gather(torch.arange(0, 320_000, 9_973))
    assert digest(*affnist[:2]) == "8338b66d6c44f5b6"


@pytest.mark.parametrize(
    ("shift", "relative", "printed"), [(4, False, 72.6), (4, True, 79.0), (6, False, 61.6), (6, True, 70.3)]
)
def test_overlap_of_two_boxes(shift, relative, printed):
    """The mean common part of 20 x 20 boxes, which is the square of its mean along one axis."""
    ways = range(-shift, shift + 1)
    gaps = [abs(a - b) for a in ([0] if relative else ways) for b in ways]
    exact = float(sum(1 - Fraction(gap, 20) for gap in gaps) / len(gaps)) ** 2
    assert abs(100 * exact - printed) < 0.05
    split = MultiMNIST(boxes(), shift=shift, relative=relative)
    targets = split.gather(torch.arange(0, 50_000, 5)).targets
    common = (targets > 0).all(1).sum((1, 2, 3)).double() / 400
    assert abs(common.mean() - exact) < 5 * common.std() / math.sqrt(len(common))
    assert (targets[:, 0] > 0).sum() == 400 * 10_000  # no box is cut


def test_multimnist_labels():
    split = MultiMNIST(base(500))
    labels = split.gather(torch.arange(0, 500_000, 7), targets=False).labels
    assert (labels[:, 0] != labels[:, 1]).all()
    counts = torch.bincount(split.base.labels, minlength=10).double()
    for own in range(10):
        partners = torch.bincount(labels[labels[:, 0] == own, 1], minlength=10)
        share = counts / (500 - counts[own])
        share[own] = 0
        expected = share * partners.sum()
        assert partners[own] == 0
        assert ((partners - expected).abs() <= 5 * expected.sqrt()).all()


def test_pairs_of_different_images_may_be_of_one_class():
    single = base(500)
    split = MultiMNIST(single, different="image")
    indices = torch.arange(0, 500_000, 7)
    pairs, labels = split._pairs(indices), split.gather(indices, targets=False).labels
    assert torch.equal(pairs[:, 0], indices // 1000)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert torch.equal(labels, single.labels[pairs])
    counts = torch.bincount(single.labels, minlength=10).double()
    share = float((counts * (counts - 1)).sum() / (500 * 499))
    alike = (labels[:, 0] == labels[:, 1]).double()
    assert abs(alike.mean() - share) < 5 * alike.std() / math.sqrt(len(alike))
    every = MultiMNIST(base(40), 400_000, different="image")._pairs(torch.arange(30_000, 40_000))  # digit 3's
    counts = torch.bincount(every[:, 1], minlength=40)
    assert counts[3] == 0
    expected = 10_000 / 39
    assert ((counts[torch.arange(40) != 3] - expected).abs() < 5 * math.sqrt(expected)).all()
    one = MultiMNIST(base(20, classes=1), different="image")[0]
    assert one.label.tolist() == [0, 0]
    with pytest.raises(ValueError, match="different='digit' is not known"):
        MultiMNIST(single, different="digit")


def test_one_base_shift_for_a_digit():
    split, free = (MultiMNIST(base(2000), shift=1, base_shift=word, seed=3) for word in ("digit", "image"))
    shifts = split._shifts(torch.arange(0, 2_000_000, 10)).view(2000, 100, 2, 2)
    assert (shifts[:, :, 0] == shifts[:, :1, 0]).all()
    counts = torch.bincount(((shifts[:, 0, 0] + 1) * torch.tensor([3, 1])).sum(1), minlength=9)
    assert ((counts - 2000 / 9).abs() < 5 * math.sqrt(2000 / 9)).all()
    indices = torch.arange(500)
    assert torch.equal(split._shifts(indices)[:, 1], free._shifts(indices)[:, 1])
    assert len(free._shifts(indices)[:, 0].unique(dim=0)) == 9
    targets = split.gather(indices).targets
    assert (targets[:, 0] == targets[:1, 0]).all()
    with pytest.raises(ValueError, match="base_shift='pair' is not known"):
        MultiMNIST(base(), base_shift="pair")


def test_every_digit_of_another_class_can_be_a_partner():
    split = MultiMNIST(base(40), 400_000)
    pairs = split._pairs(torch.arange(10_000))  # the first digit's
    assert (pairs[:, 0] == 0).all()
    others = (split.base.labels != split.base.labels[0]).nonzero()[:, 0]
    assert torch.equal(pairs[:, 1].unique(), others)
    expected = 10_000 / len(others)
    counts = torch.bincount(pairs[:, 1], minlength=40)[others]
    assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all()


def test_shifts_are_uniform_and_independent():
    split = MultiMNIST(base(), 2_000_000, shift=1)
    shifts = split._shifts(torch.arange(81_000)).flatten(1) + 1
    counts = torch.bincount((shifts * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81)
    assert ((counts - 1000).abs() < 5 * math.sqrt(1000)).all()


def test_a_length_that_does_not_divide():
    split = MultiMNIST(base(60), 61)
    assert split.gather(torch.arange(61)).images.shape == (61, 1, 36, 36)
    assert split._pairs(torch.arange(61))[:, 0].tolist() == [k // 2 for k in range(61)]


def test_diverse_multimnist_has_one_sixth_of_single_digits():
    single = base(300)
    split = DiverseMultiMNIST(single, seed=4)
    images, labels, targets = split.gather(torch.arange(0, 300_000, 10))
    assert split.image == (1, 36, 36)
    alone = labels[:, 1] == -1
    assert abs(alone.sum() - 5000) < 5 * math.sqrt(30_000 * 5 / 36)
    assert (labels[:, 0] >= 0).all()
    assert (labels[:, 0] != labels[:, 1]).all()
    assert torch.equal(images[alone], targets[alone][:, 0])
    assert (targets[alone][:, 1] == 0).all()
    assert (targets[~alone].amax((2, 3, 4)) > 0).all()
    pairs = targets[~alone].int()
    assert torch.equal(images[~alone].int(), pairs.sum(1).clamp(max=255))


def test_diverse_multimnist_may_average():
    split = DiverseMultiMNIST(base(), overlay="mean")
    images, labels, targets = split.gather(torch.arange(0, 60_000, 30))
    alone = labels[:, 1] == -1
    assert torch.equal(images[~alone].int(), targets[~alone].int().sum(1) // 2)
    assert torch.equal(images[alone], targets[alone][:, 0])
    with pytest.raises(ValueError, match="overlay='max' is not known"):
        DiverseMultiMNIST(base(), overlay="max")


def matrix_of(split, index):
    """What one image does to its digit, on (y, x), in floating point."""
    draw = int(hashed(split.seed, 0xD164, torch.tensor(index)))
    angle, tall, broad, shear = (draw // 4001**k % 4001 / 4000 for k in range(4))
    angle, tall, broad, shear = math.radians(40 * angle - 20), 0.8 + 0.4 * tall, 0.8 + 0.4 * broad, 0.4 * shear - 0.2
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    return turn @ np.array([[1, 0], [shear, 1]]) @ np.diag([tall, broad])


def test_generated_affnist_is_the_documented_transform():
    """Laid over each other by their middles: where an image is put is another test's matter."""
    y, x = np.mgrid[:28, :28]
    blob = (250 * np.exp(-((y - 12) ** 2 / 18 + (x - 15) ** 2 / 10))).astype(np.uint8)
    images = torch.from_numpy(blob).expand(20, 28, 28).clone()
    split = GeneratedAffNIST(Stored(images, torch.arange(20) % 10, WORDS))
    assert len(split) == 640
    for index in range(0, 640, 13):
        ours = split[index].image[0].double().numpy()
        inverse = np.linalg.inv(matrix_of(split, index))
        wanted = ndimage.center_of_mass(ours)
        source = np.array(ndimage.center_of_mass(blob))
        expected = ndimage.affine_transform(
            blob.astype(float), inverse, source - inverse @ wanted, (40, 40), order=1, mode="grid-constant"
        )
        assert abs(ours - expected).max() < 6
        assert abs(ours - expected).mean() < 0.6


def test_generated_affnist_keeps_digits_on_the_canvas():
    split = GeneratedAffNIST(boxes(100))
    images, labels, targets = split.gather(torch.arange(3200))
    assert images.shape == (3200, 1, 40, 40)
    assert targets is None
    assert torch.equal(labels, torch.arange(3200) // 32 % 10)
    area = images.sum((1, 2, 3)).double() / 100 / 400  # scale x scale, if nothing is cut
    assert area.min() > 0.8**2 * 0.97
    assert area.max() < 1.2**2 * 1.03
    assert abs(area.mean() - 1) < 5 * area.std() / math.sqrt(3200)
    lines = images.amax((1, 2)), images.amax((1, 3))
    assert all((line[:, edge] > 20).any() for line in lines for edge in (0, -1))  # the edges are reached


def test_generated_affnist_puts_digits_anywhere():
    """Of the room that rows and columns leave free, any share may lie on one side."""
    images = GeneratedAffNIST(boxes(100), seed=1).gather(torch.arange(3200)).images[:, 0]
    shares = []
    for axis in (1, 2):
        full = (images.amax(3 - axis) > 50).to(torch.uint8)
        before, after = full.argmax(1).double(), full.flip(1).argmax(1).double()
        share = before / (before + after)
        assert abs(share.mean() - 0.5) < 0.025
        assert abs(share.std() - 1 / math.sqrt(12)) < 0.03
        shares.append(share)
    assert abs(torch.corrcoef(torch.stack(shares))[0, 1]) < 5 / math.sqrt(3200)


def test_generated_affnist_covers_its_ranges():
    split = GeneratedAffNIST(boxes(500))
    shapes = hashed(split.seed, 0xD164, torch.arange(16_000))
    for k in range(4):
        counts = torch.bincount(shapes // 4001**k % 4001 * 20 // 4001, minlength=20)
        assert ((counts - 800).abs() < 5 * math.sqrt(800)).all()
    degrees = torch.rad2deg(torch.atan2(split.turns[:, 1].double(), split.turns[:, 0].double()))
    assert torch.allclose(degrees, torch.linspace(-20, 20, 4001, dtype=torch.float64), atol=1e-3)


def test_generated_affnist_is_exact_in_float32():
    """The interpolation in float64 gives the same numbers, so the order of its sums cannot matter."""
    split = GeneratedAffNIST(base(100))
    indices = torch.arange(0, 3200, 7)
    grid = split._grid(indices, split.boxes[indices // 32])
    digits = split.digits[indices // 32]
    sample = torch.nn.functional.grid_sample
    single = sample(digits.float(), grid, align_corners=False)
    double = sample(digits.double(), grid.double(), align_corners=False)
    assert torch.equal(single.double(), double)
    assert torch.equal(single * 2**14, (single * 2**14).round())


def test_generated_affnist_of_other_sizes():
    split = GeneratedAffNIST(base(30, 3, 9, 12), size=20)
    assert split.image == (3, 20, 20)
    assert split.gather(torch.arange(960)).images.shape == (960, 3, 20, 20)
    tight = GeneratedAffNIST(base(30), size=10)  # no room: the digit's middle is in the middle
    assert (tight.gather(torch.arange(960)).images[..., 4:6, 4:6].float().mean((1, 2, 3)) > 0).all()


def test_canvas_puts_images_in_the_middle():
    single = base()
    large = canvas(single)
    assert large.image == (1, 40, 40)
    assert torch.equal(large.images[:, 6:34, 6:34], single.images)
    assert large.images.sum() == single.images.sum()
    assert torch.equal(large.labels, single.labels)
    assert canvas(base(5, 3, 9, 12), 20).image == (3, 20, 20)
    with pytest.raises(ValueError, match="28 x 28 do not fit on a canvas of 20 x 20"):
        canvas(single, 20)


def test_bases_that_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="of one class"):
        MultiMNIST(base(20, classes=1))
    with pytest.raises(ValueError, match="one label for each image"):
        MultiMNIST(Stored(torch.zeros(4, 8, 8, dtype=torch.uint8), torch.zeros(4, 2), WORDS))
    with pytest.raises(ValueError, match="cannot be made"):
        MultiMNIST(base(), 0)
    with pytest.raises(ValueError, match="cannot be negative"):
        MultiMNIST(base(), shift=-1)
    with pytest.raises(ValueError, match="shift=32 moves digits of 28 x 28 off a canvas with pad=4"):
        MultiMNIST(base(), shift=32)
    assert not hasattr(MultiMNIST(base()), "labels"), "the base's labels are not the split's"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", [MultiMNIST, DiverseMultiMNIST, GeneratedAffNIST])
def test_a_gpu_gives_the_same_without_waiting(kind):
    split = kind(base(500), seed=3)
    there = split.to("cuda")
    indices = torch.arange(0, len(split), 7)
    at = indices.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = there.gather(at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, expected in zip(batch, split.gather(indices), strict=True):
        assert expected is None if ours is None else torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("kind", [MultiMNIST, DiverseMultiMNIST, GeneratedAffNIST])
def test_gather_compiles_in_one_graph(kind):
    split, indices = kind(base()), torch.arange(20) * 91
    compiled = torch.compile(split.gather, fullgraph=True, backend="eager")(indices)
    for ours, expected in zip(compiled, split.gather(indices), strict=True):
        assert expected is None if ours is None else torch.equal(ours, expected)
