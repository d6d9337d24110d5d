import re
from pathlib import Path

import numpy as np
import pytest

import torchcaps.data
from torchcaps.data import fetch
from torchcaps.data.catalog import CATALOG, Archive, File, _sums, find
from torchcaps.data.errors import DataError
from torchcaps.data.sets import SETS

PUBLISHED = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_md5s(name):
    assert {file.name: file.md5 for file in CATALOG[name].files} == PUBLISHED[name]
    assert all(file.sha256 and file.size for file in CATALOG[name].files)


def test_every_set_that_can_be_loaded_is_listed():
    assert set(CATALOG) == set(SETS)


@pytest.mark.parametrize("entry", CATALOG.values(), ids=list(CATALOG))
def test_entries_hold_together(entry):
    assert entry.about
    assert entry.licence
    assert entry.origin
    assert bool(entry.files) + bool(entry.made_from) + bool(entry.hint) == 1
    keys = [file.key for file in entry.files]
    assert len(set(keys)) == len(keys) == len({file.name for file in entry.files})
    bundles = entry.archives + entry.packages
    held = [key for bundle in bundles for members in bundle.members.values() for key in members]
    assert set(held) == set(keys) or entry.shipped
    for thing in (*entry.files, *entry.archives):
        assert thing.md5 is None or re.fullmatch("[0-9a-f]{32}", thing.md5)
        assert thing.sha256 is None or re.fullmatch("[0-9a-f]{64}", thing.sha256)
    for archive in entry.archives:
        assert archive.addresses
        assert all(re.match("https?://.*/$", address) for address in archive.addresses)
        assert bool(archive.size) == bool(archive.md5) == bool(archive.sha256)
    if entry.made_from:
        assert CATALOG[entry.made_from].files


def test_download_sizes_are_those_of_the_first_archives_that_hold_everything():
    for entry in CATALOG.values():
        needed = {file.key for file in entry.wanted()}
        total = 0
        for archive in entry.archives:
            keys = needed & {key for members in archive.members.values() for key in members}
            total += (archive.size or 0) if keys else 0
            needed -= keys
        assert entry.download == (total or None)


def test_tables_of_checksums():
    assert _sums("\na 12 0f 1e\nb 3 2d -\n") == {"a": (12, "0f", "1e"), "b": (3, "2d", None)}
    with pytest.raises(ValueError, match="unpack"):
        _sums("a 12 0f")


def test_no_two_checksums_are_the_same():
    things: dict[str, File | Archive] = {}
    for entry in CATALOG.values():
        for thing in (*entry.files, *entry.archives):
            for checksum in filter(None, (thing.md5, thing.sha256)):
                other = things.setdefault(checksum, thing)
                assert other.name == thing.name or thing.name.endswith("-cat.mat")


def test_registries_are_known_by_their_clients_alone():
    for path in Path(torchcaps.data.__file__).parent.glob("*.py"):
        assert not re.search(r"pypi|npmjs|pythonhosted|deb\.debian|registry\.\w+\.\w+", path.read_text()), path


def test_unknown_names_and_parts():
    with pytest.raises(DataError, match=r"no data set 'mnits'; did you mean mnist\?"):
        find("mnits")
    with pytest.raises(DataError, match="no data set 'x'; there are digits, mnist"):
        find("x")
    with pytest.raises(DataError, match="svhn has no part 'more'; it has extra"):
        CATALOG["svhn"].wanted(("more",))
    assert [file.key for file in CATALOG["svhn"].wanted()] == ["train", "test"]
    assert [file.key for file in CATALOG["svhn"].wanted(("extra",))] == ["train", "test", "extra"]


def test_digits_come_with_the_package(tmp_path):
    path = fetch.ensure("digits", root=tmp_path / "none", offline=True)["digits"]
    assert not (tmp_path / "none").exists()
    with np.load(path) as digits:
        images, labels = digits["images"], digits["labels"]
    assert images.shape == (1797, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    assert (images.min(), images.max(), int(images.sum())) == (0, 16, 561718)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:10].tolist() == list(range(10))
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert all(80 < count < 200 for count in np.bincount(labels[:1437]))
    text = path.with_name("README.md").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text


@pytest.mark.parametrize("name", ["himagenet", "folder"])
def test_sets_of_ones_own_are_never_fetched(name, tmp_path):
    with pytest.raises(DataError, match=f"{name} cannot be fetched: .*FOLDER"):
        fetch.ensure(name, root=tmp_path)
