"""`load` on small files in the official formats, handed over in place of those that fetching would bring."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.data.test_formats import cifar_rows, idx, norb, pixel, write
from torchcaps.data import fetch, sets
from torchcaps.data.augment import apply
from torchcaps.data.errors import DataError
from torchcaps.data.random import Draws
from torchcaps.data.sets import SETS, load


def digit_images(n, offset=0):
    """28 x 28, ink in the middle, its amount telling the image's number."""
    images = np.zeros((n, 28, 28), np.uint8)
    images[:, 8:20, 10:18] = 100
    images[:, 9, 11], images[:, 9, 12] = (np.arange(n) + offset) // 256, (np.arange(n) + offset) % 256
    return images


def mnist_files(folder, n_train=120, n_test=20):
    contents = {
        "train_images": digit_images(n_train),
        "train_labels": np.arange(n_train) % 10,
        "test_images": digit_images(n_test, offset=5000),
        "test_labels": np.arange(n_test) * 3 % 10,
    }
    return {key: write(folder, f"mnist_{key}", idx(values, 8, "B")) for key, values in contents.items()}


def cifar10_files(folder):
    keys = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    rows = cifar_rows(4)
    return {
        key: write(folder, key, b"".join(bytes([(4 * k + i) % 10, *row]) for i, row in enumerate(rows)))
        for k, key in enumerate(keys)
    }


def cifar100_files(folder):
    rows = cifar_rows(2)
    content = b"".join(bytes([7, 98 + i, *row]) for i, row in enumerate(rows))
    return {key: write(folder, key, content) for key in ("train", "test")}


def svhn_files(folder):
    scipy_io = pytest.importorskip("scipy.io")
    files = {}
    for key, n in (("train", 8), ("test", 2), ("extra", 3)):
        files[key] = folder / f"{key}_32x32.mat"
        labels = (np.arange(n) % 2 * 9 + 1)[:, None]
        scipy_io.savemat(files[key], {"X": np.full((32, 32, 3, n), n, np.uint8), "y": labels})
    return files


def norb_rows(instances):
    return [
        (label, instance, elevation, azimuth, (label + azimuth // 2) % 6)
        for label in range(5)
        for instance in instances
        for elevation in (0, 2, 5)
        for azimuth in (0, 12, 32)
    ]


def smallnorb_files(folder):
    files = {}
    for part, instances in (("train", (4, 6, 7, 8, 9)), ("test", (0, 1, 2, 3, 5))):
        rows = norb_rows(instances)
        pairs = np.zeros((len(rows), 2, 96, 96), np.uint8)
        pairs[:, 0], pairs[:, 1] = np.arange(len(rows))[:, None, None], np.arange(len(rows))[:, None, None] % 7
        head = norb(pairs[:0].reshape(0, 2, 96, 96), 0x1E3D4C55, "B")
        dat = head[:8] + np.int32(len(rows)).tobytes() + head[12:] + pairs.tobytes()
        files[f"{part}_dat"] = write(folder, f"{part}-dat", dat)
        files[f"{part}_cat"] = write(folder, f"{part}-cat", norb([row[0] for row in rows], 0x1E3D4C54, "i"))
        files[f"{part}_info"] = write(folder, f"{part}-info", norb([row[1:] for row in rows], 0x1E3D4C54, "i"))
    return files


def affnist_files(folder):
    scipy_io = pytest.importorskip("scipy.io")
    files = {}
    for key, n in (("test", 6), ("validation", 4), *((f"train_{k}", 2) for k in range(1, 33))):
        files[key] = folder / f"{key}.mat"
        images = np.full((1600, n), n, np.uint8)
        scipy_io.savemat(files[key], {"affNISTdata": {"image": images, "label_int": np.arange(n)[None] % 10}})
    return files


FILES = {
    "mnist": mnist_files,
    "fashion_mnist": mnist_files,
    "cifar10": cifar10_files,
    "cifar100": cifar100_files,
    "svhn": svhn_files,
    "smallnorb": smallnorb_files,
    "affnist": affnist_files,
}
OPTIONAL = {"extra", "validation", *(f"train_{k}" for k in range(1, 33))}


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Puts small files in place of fetching, and notes what was asked for."""
    calls = []
    ensure = fetch.ensure

    def small(name, root=None, offline=False, sources=None, parts=()):
        calls.append((name, root, offline, sources, tuple(parts)))
        if name == "digits":
            return ensure(name)
        files = FILES[name](tmp_path)
        return {key: path for key, path in files.items() if key not in OPTIONAL or key.partition("_")[0] in parts}

    monkeypatch.setattr(fetch, "ensure", small)
    return calls


def marks(split):
    """The numbers that `digit_images` wrote, wherever the image lies."""
    images = split.images.flatten(-2)
    side = split.images.shape[-1]
    corner = (side - 28) // 2
    place = (corner + 9) * side + corner + 11
    return (images[:, place].long() * 256 + images[:, place + 1].long()).tolist()


@pytest.mark.parametrize(
    ("name", "train", "test", "image", "classes"),
    [
        ("mnist", 120, 20, (1, 28, 28), 10),
        ("fashion_mnist", 120, 20, (1, 28, 28), 10),
        ("cifar10", 20, 4, (3, 32, 32), 10),
        ("cifar100", 2, 2, (3, 32, 32), 100),
        ("svhn", 8, 2, (3, 32, 32), 10),
        ("smallnorb", 225, 225, (2, 96, 96), 5),
        ("affnist", 120, 6, (1, 40, 40), 10),
        ("affnist_generated", 120, 640, (1, 40, 40), 10),
        ("mnist40", 120, 20, (1, 40, 40), 10),
        ("multimnist", 120_000, 20_000, (1, 36, 36), 10),
        ("diverse_multimnist", 21_000_000, 10_000, (1, 36, 36), 10),
        ("digits", 1437, 360, (1, 8, 8), 10),
    ],
)
def test_every_set_has_one_interface(asked, name, train, test, image, classes):
    data = load(name, root="cache", offline=True, sources=("cache",))
    assert data.name == name
    assert (len(data.train), len(data.test), data.validation) == (train, test, None)
    assert data.train.image == data.test.image == data.image == image
    assert data.classes == len(data.class_names) == classes
    assert all(call[1:4] == ("cache", True, ("cache",)) for call in asked)
    for split in (data.train, data.test):
        last = split[len(split) - 1]
        assert last.image.shape == image
        assert last.image.dtype == torch.uint8
        assert last.label.dtype == torch.int64
        batch = split.gather(torch.tensor([len(split) - 1, 0]))
        assert torch.equal(batch.images[0], last.image)
        assert torch.equal(batch.labels[0], last.label)


def test_values_and_labels_arrive(asked):
    assert load("mnist").train.labels.tolist() == [k % 10 for k in range(120)]
    assert marks(load("mnist").test) == list(range(5000, 5020))
    cifar = load("cifar10")
    assert cifar.train.labels.tolist() == [k % 10 for k in range(20)]
    assert cifar.test.labels.tolist() == [0, 1, 2, 3]
    assert cifar.train.images[17, 2, 30, 4] == pixel(1, 2, 30, 4)
    assert load("cifar100").train.labels.tolist() == [98, 99]
    assert load("svhn").train.labels.tolist() == [1, 0] * 4
    norb = load("smallnorb")
    assert norb.train.labels.tolist() == [row[0] for row in norb_rows((4, 6, 7, 8, 9))]
    assert set(norb.test.about["instance"].tolist()) == {0, 1, 2, 3, 5}
    assert norb.train.images[:, 0, 5, 9].tolist() == list(range(225))
    assert marks(load("mnist40").train) == list(range(120))


def test_class_names():
    assert len(set(sets.CIFAR100)) == 100
    assert list(sets.CIFAR100) == sorted(sets.CIFAR100)
    assert list(sets.CIFAR10) == sorted(sets.CIFAR10)
    assert len(sets.FASHION) == len(sets.DIGITS) == 10
    assert sets.FASHION[9] == "Ankle boot"
    assert sets.SMALLNORB[0] == "animal"


def test_digits_need_no_files_from_elsewhere():
    data = load("digits", offline=True, validation=137)
    assert (len(data.train), len(data.validation), len(data.test)) == (1300, 137, 360)
    assert int(data.train.images.min()) == 0
    assert int(data.train.images.max()) == 255
    assert set(data.test.images.unique().tolist()) <= {(255 * level + 8) // 16 for level in range(17)}
    assert torch.bincount(data.test.labels).tolist() == [35, 36, 35, 37, 37, 37, 37, 36, 33, 37]
    assert data.train.labels[:3].tolist() != [0, 0, 0]


@pytest.mark.parametrize("name", ["mnist", "mnist40", "affnist"])
def test_validation_comes_from_the_training_images(asked, name):
    data, again, other = (load(name, validation=0.25, seed=seed) for seed in (0, 0, 1))
    assert sorted(marks(data.train) + marks(data.validation)) == list(range(120))
    assert torch.bincount(data.validation.labels).tolist() == [3] * 10
    assert marks(data.validation) == marks(again.validation)
    assert marks(data.validation) != marks(other.validation)
    first = load(name, validation="first-30")
    assert marks(first.validation) == list(range(30))
    assert marks(load(name, validation="part-2-of-4").validation) == list(range(30, 60))


@pytest.mark.parametrize("name", ["multimnist", "diverse_multimnist", "affnist_generated"])
def test_generated_sets_are_made_of_digits_that_are_apart(asked, name):
    data = load(name, validation=30)
    bases = [getattr(split, "base", split) for split in (data.train, data.validation, data.test)]
    seen = [set(marks(base)) for base in bases]
    assert [len(one) for one in seen] == [90, 30, 20]
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]


def test_multimnist_variants(asked):
    paper, relative, six = (load(name) for name in ("multimnist", "multimnist_relative", "multimnist_shift6"))
    indices = torch.arange(0, 20_000, 777)
    assert not torch.equal(paper.test.gather(indices).images, relative.test.gather(indices).images)
    assert torch.equal(paper.test.gather(indices).images, load("multimnist").test.gather(indices).images)
    assert (paper.test.shift, relative.test.shift, six.test.shift) == (4, 4, 6)
    assert (paper.test.relative, relative.test.relative, six.test.relative) == (False, True, False)
    assert six.name == "multimnist_shift6"
    official = load("multimnist", protocol="mazzia2021-official")
    assert official.test.shift == 6
    assert (official.train.different, official.test.different) == ("image", "class")
    assert load("multimnist", protocol="mazzia2021").train.different == "class"
    sabour = load("multimnist_shift6", protocol="sabour2017-official")
    assert (sabour.train.shift, sabour.train.base_shift, sabour.test.base_shift) == (6, "digit", "digit")
    assert sabour.protocol.data == sabour.name == "multimnist_shift6"
    with pytest.raises(ValueError, match=r"sabour2017 shifts by 4 .* has sabour2017-official, mazzia2021-official"):
        load("multimnist_shift6", protocol="sabour2017")
    with pytest.raises(ValueError, match=r"tsai2020 has no protocol for multimnist_shift6; .* has sabour2017-official"):
        load("multimnist_shift6", protocol="tsai2020-official")
    with pytest.raises(ValueError, match="shift=40 moves digits of 28 x 28 off a canvas with pad=4"):
        load("multimnist", shift=40)
    assert load("multimnist", protocol="mazzia2021").test.shift == 4
    assert len(load("multimnist", per_digit=3).train) == 360


@pytest.mark.parametrize("name", ["multimnist", "multimnist_relative", "diverse_multimnist", "affnist_generated"])
def test_draw_seed_draws_other_images(asked, name):
    usual, again, other = (load(name, validation=30, **options) for options in ({}, {"draw_seed": 0}, {"draw_seed": 1}))
    indices = torch.arange(0, 600, 7)
    images = [[split.test.gather(indices).images for split in (usual, again, other)]]
    if name != "affnist_generated":
        images.append([split.train.gather(indices).images for split in (usual, again, other)])
        assert {split.seed for data in (usual, other) for split in data.splits().values()} == set(range(6))
    for first, second, third in images:
        assert torch.equal(first, second)
        assert not (first == third).all((1, 2, 3)).all()
    with pytest.raises(ValueError, match="draw_seed=-1 is no whole number from 0 on"):
        load(name, draw_seed=-1)


def test_smallnorb_is_held_out_by_toy(asked):
    data = load("smallnorb", validation=0.2)
    toys = [
        set(zip(split.labels.tolist(), split.about["instance"].tolist(), strict=True))
        for split in (data.train, data.validation)
    ]
    assert (len(data.train), len(data.validation)) == (180, 45)
    assert not toys[0] & toys[1]


def test_smallnorb_viewpoints(asked):
    data = load("smallnorb", viewpoint="azimuth", validation=0.2)
    for split in (data.train, data.validation, data.familiar):
        assert set(split.about["azimuth"].tolist()) == {0, 32}
    assert set(data.test.about["azimuth"].tolist()) == {12}
    assert len(data.familiar) + len(data.test) == 225
    data = load("smallnorb", viewpoint="elevation")
    assert set(data.train.about["elevation"].tolist()) == {0, 2}
    assert set(data.test.about["elevation"].tolist()) == {5}
    with pytest.raises(ValueError, match="azimuth, elevation"):
        load("smallnorb", viewpoint="lighting")


def test_optional_parts(asked):
    assert len(load("svhn", extra=True).train) == 11
    assert asked[-1][4] == ("extra",)
    assert len(load("affnist", training="affnist", validation="affnist").train) == 64
    assert asked[-1][4] == ("validation", "train")
    data = load("affnist", validation="affnist")
    assert (len(data.train), len(data.validation)) == (120, 4)
    with pytest.raises(ValueError, match="goes with validation='affnist'"):
        load("affnist", training="affnist", validation=5)
    with pytest.raises(ValueError, match="training='cifar' is not known"):
        load("affnist", training="cifar")


@pytest.mark.parametrize("name", ["affnist", "affnist_generated"])
def test_affnist_validation_of_choi(asked, name, caplog):
    data = load(name, protocol="choi2019")
    assert marks(data.train) == list(range(100)), "the digits of affNIST's validation set are not trained on"
    assert len(data.validation) == (4 if name == "affnist" else 20 * 32)
    if name == "affnist_generated":
        assert marks(data.validation.base) == list(range(100, 120))
        everything = load(name, training="affnist", validation="affnist")
        assert marks(everything.train.base) == list(range(100))
    assert len(load(name, protocol="choi2019-official").train) == 120
    clean = load(name, protocol="choi2019", validation=0.1)
    assert sorted(marks(clean.train) + marks(clean.validation)) == list(range(120))


def test_the_test_set_validates_only_by_the_official_name(asked, caplog):
    data = load("cifar10", protocol="tsai2020")
    assert data.validation is None
    assert not caplog.records
    data = load("cifar10", protocol="tsai2020-official")
    assert data.validation is data.test
    assert "tsai2020-official of cifar10 validates on the test set" in caplog.text
    caplog.clear()
    data = load("cifar10", protocol="tsai2020-official", validation=4)
    assert len(data.validation) == 4
    assert not caplog.records
    with pytest.raises(ValueError, match="the test set is no validation set"):
        load("cifar10", validation="test")


def test_a_protocol_brings_transforms_and_split(asked):
    data = load("mnist", protocol="choi2019")
    assert (len(data.train), len(data.validation)) == (108, 12)
    assert data.protocol.name == "choi2019"
    assert len(load("mnist", protocol="choi2019", validation=0).train) == 120
    data = load("cifar10", protocol="sabour2017")
    assert data.image == (3, 24, 24)
    images = data.train.gather(torch.arange(3)).images / 255
    assert apply(data.train_transform, images, Draws(0, 0, torch.arange(3))).shape == (3, 3, 24, 24)
    assert apply(data.test_transform, images).shape == (3, 3, 24, 24)
    assert load("cifar10", protocol="li2018", augmentation="+").protocol.train[0].size == 34


def test_smallnorb_split_statistics(asked):
    data = load("smallnorb", protocol="mazzia2021-official")
    shared = load("smallnorb", protocol="mazzia2021-official", statistics="train")
    for split, own in ((data.train, data.train_transform), (data.test, data.test_transform)):
        images = split.images.double() / 255
        assert own[0].mean == pytest.approx(images.mean((0, 2, 3)).tolist())
        assert own[0].std == pytest.approx(images.std((0, 2, 3), correction=0).tolist())
    assert shared.test_transform[0] == data.train_transform[0]
    assert data.image == (2, 48, 48)


def test_test_crops(asked):
    data = load("smallnorb", protocol="mazzia2021", crops=40)
    images = data.test.gather(torch.arange(2)).images / 255
    assert apply(data.test_transform, images).shape == (2, 40, 2, 48, 48)
    assert data.image == (2, 48, 48)
    data = load("cifar10", protocol="li2018", crops=10)
    assert apply(data.test_transform, data.test.gather(torch.arange(2)).images / 255).shape == (2, 10, 3, 32, 32)
    alone = load("cifar10", protocol="ours", crops=1)
    assert alone.test_transform == load("cifar10", protocol="ours").test_transform
    with pytest.raises(ValueError, match="tests on crops=10, not 13"):
        load("cifar10", protocol="li2018", crops=13)
    with pytest.raises(ValueError, match="tests mnist on no crops"):
        load("mnist", protocol="sabour2017", crops=13)
    with pytest.raises(ValueError, match="needs a protocol"):
        load("mnist", crops=13)


def test_folders_load_by_name(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(10):
            image.fromarray(np.full((8, 9, 3), 10 * k, np.uint8)).save(tmp_path / name / f"{k}.png")
    data = load("folder", path=tmp_path, test=0.2, validation=0.25, seed=3)
    assert (len(data.train), len(data.validation), len(data.test)) == (12, 4, 4)
    assert data.class_names == ("cat", "dog")
    assert data.image == (3, 8, 9)
    assert torch.bincount(data.validation.labels).tolist() == [2, 2]
    with pytest.raises(ValueError, match="folder has no option 'sise'; it has path, balance, csv"):
        load("folder", path=tmp_path, sise=3)


def test_himagenet_is_never_downloaded(tmp_path):
    with pytest.raises(DataError, match="data make himagenet --from"):
        load("himagenet", root=tmp_path)


def test_names_and_options_that_do_not_exist(asked):
    with pytest.raises(ValueError, match="there is no data set 'minst'; did you mean mnist"):
        load("minst")
    with pytest.raises(ValueError, match="there are mnist, fashion_mnist"):
        load("galaxies")
    with pytest.raises(ValueError, match="there is no data set None; there are mnist"):
        load(None)
    for validation in (float("nan"), [5], {}):
        with pytest.raises(ValueError, match=r"validation=\S+ is no number of images, no fraction and no rule"):
            load("mnist", validation=validation)
    with pytest.raises(ValueError, match="validation=inf is neither"):
        load("mnist", validation=float("inf"))
    with pytest.raises(DataError, match="folder needs path=, or --path in a shell"):
        load("folder")
    with pytest.raises(ValueError, match="mnist has no option 'viewpoint'; it has none"):
        load("mnist", viewpoint="azimuth")
    with pytest.raises(ValueError, match="svhn has no option 'extras'; it has extra"):
        load("svhn", extras=True)
    with pytest.raises(ValueError, match="mnist has no option 'augmentation'"):
        load("mnist", protocol="sabour2017", augmentation="+")
    with pytest.raises(ValueError, match="other sets do not have"):
        load("mnist", validation="affnist")
    assert not asked or asked[-1][0] == "mnist"


def test_every_catalogued_set_loads_by_its_name():
    from torchcaps.data.catalog import CATALOG

    assert set(CATALOG) == set(SETS)


def test_notes_of_a_protocol_are_logged(asked, caplog):
    with caplog.at_level(logging.INFO, "torchcaps"):
        load("mnist", protocol="mazzia2021")
    assert "pixels are value / 256" in caplog.text
