"""Files in the official formats are written here byte by byte, with values that say where they belong."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch

from torchcaps.data import formats
from torchcaps.data.errors import DataError

WEB_PAGE = b"<!DOCTYPE html>\n<html><body>503 Service Unavailable</body></html>"


def idx(values, code, letter):
    values = np.asarray(values)
    head = struct.pack(">BBBB", 0, 0, code, values.ndim) + b"".join(struct.pack(">I", n) for n in values.shape)
    return head + b"".join(struct.pack(f">{letter}", value) for value in values.reshape(-1).tolist())


def norb(values, magic, letter):
    values = np.asarray(values)
    sizes = list(values.shape) + [1] * (3 - values.ndim)
    head = struct.pack("<ii", magic, values.ndim) + b"".join(struct.pack("<i", n) for n in sizes)
    return head + b"".join(struct.pack(f"<{letter}", value) for value in values.reshape(-1).tolist())


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def coded(n, h, w):
    """Pixel (y, x) of image n is 100 n + 10 y + x, so that no two axes can be exchanged unseen."""
    return [[[100 * i + 10 * y + x for x in range(w)] for y in range(h)] for i in range(n)]


@pytest.mark.parametrize(
    ("code", "letter", "dtype"),
    [
        (0x08, "B", torch.uint8),
        (0x09, "b", torch.int8),
        (0x0B, "h", torch.int16),
        (0x0C, "i", torch.int32),
        (0x0D, "f", torch.float32),
        (0x0E, "d", torch.float64),
    ],
)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 3, 5), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_idx_of_every_type(tmp_path, code, letter, dtype, shape, zipped):
    values = np.arange(np.prod(shape)).reshape(shape)
    content = idx(values, code, letter)
    tensor = formats.read_idx(write(tmp_path, "any", gzip.compress(content) if zipped else content))
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert torch.equal(tensor.double(), torch.from_numpy(values).double())


def test_idx_pair_keeps_rows_and_columns(tmp_path):
    images = write(tmp_path, "images", idx(coded(2, 3, 4), 0x08, "B"))
    labels = write(tmp_path, "labels", idx([7, 0], 0x08, "B"))
    pixels, names = formats.read_idx_pair(images, labels, 10)
    assert pixels.shape == (2, 3, 4)
    assert pixels[1, 2, 3] == 123
    assert names.tolist() == [7, 0]
    assert names.dtype == torch.int64


@pytest.mark.parametrize("length", range(4 + 3 * 4 + 24))
def test_idx_cut_anywhere(tmp_path, length):
    path = write(tmp_path, "cut", idx(coded(2, 3, 4), 0x08, "B")[:length])
    with pytest.raises(DataError, match="cut is cut short"):
        formats.read_idx(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (WEB_PAGE, "web page"),
        (b"\n  " + WEB_PAGE.lower(), "web page"),
        (b"\1" + idx([1], 8, "B")[1:], "no idx file"),
        (b"\0\0\x0a\1" + idx([1], 8, "B")[4:], "no idx file"),
        (b"\0\0\x08\0" + idx([1], 8, "B")[4:], "no idx file"),
        (idx([1, 2], 8, "B") + b"x", "goes on after its end"),
        (gzip.compress(idx(coded(2, 3, 4), 8, "B"))[:-9], "gzip"),
        (b"\x1f\x8b" + b"nonsense" * 9, "gzip"),
        (struct.pack(">BBBBIII", 0, 0, 8, 3, *[2**32 - 1] * 3), "cut short"),
    ],
    ids=["html", "html-later", "magic", "type", "dimensions", "long", "gzip-cut", "gzip-bad", "huge"],
)
def test_idx_refuses(tmp_path, content, says):
    path = write(tmp_path, "some-file", content)
    with pytest.raises(DataError, match=says) as problem:
        formats.read_idx(path)
    assert str(path) in str(problem.value)


def test_idx_pair_refuses(tmp_path):
    images = write(tmp_path, "images", idx(coded(2, 3, 4), 0x08, "B"))
    good = write(tmp_path, "good", idx([1, 2], 0x08, "B"))
    with pytest.raises(DataError, match="labels from 1 to 10 where 0 to 9"):
        formats.read_idx_pair(images, write(tmp_path, "high", idx([1, 10], 0x08, "B")), 10)
    with pytest.raises(DataError, match=r"2 images.*3 labels"):
        formats.read_idx_pair(images, write(tmp_path, "three", idx([1, 2, 3], 0x08, "B")), 10)
    with pytest.raises(DataError, match=r"uint8 \[n, h, w\]"):
        formats.read_idx_pair(good, good, 10)
    with pytest.raises(DataError, match=r"labels uint8 \[n\]"):
        formats.read_idx_pair(images, images, 10)
    with pytest.raises(DataError, match="missing"):
        formats.read_idx_pair(tmp_path / "nowhere", good, 10)
    with pytest.raises(DataError, match="cannot be read"):
        formats.read_idx_pair(tmp_path, good, 10)


def test_an_idx_file_may_be_empty(tmp_path):
    path = write(tmp_path, "none", struct.pack(">BBBBIII", 0, 0, 8, 3, 0, 28, 28))
    assert formats.read_idx(path).shape == (0, 28, 28)


def pixel(image, channel, y, x):
    return (image * 7 + channel * 101 + y * 3 + x * 5) % 256


def cifar_rows(n):
    return [[pixel(i, c, y, x) for c in range(3) for y in range(32) for x in range(32)] for i in range(n)]


def check_cifar(images, labels, expected):
    assert labels.tolist() == expected
    assert images.shape == (len(expected), 3, 32, 32)
    for i, c, y, x in [(0, 0, 0, 0), (1, 2, 3, 31), (1, 1, 30, 2), (0, 2, 17, 5)]:
        assert images[i, c, y, x] == pixel(i, c, y, x)


def test_cifar_binary(tmp_path):
    ten = b"".join(bytes([label, *row]) for label, row in zip([3, 9], cifar_rows(2), strict=True))
    check_cifar(*formats.read_cifar(write(tmp_path, "data_batch_1.bin", ten)), [3, 9])
    hundred = b"".join(bytes([19, label, *row]) for label, row in zip([99, 20], cifar_rows(2), strict=True))
    path = write(tmp_path, "train.bin", hundred)
    check_cifar(*formats.read_cifar(path, classes=100), [99, 20])
    for length in (0, 1, 3073, 6147):
        with pytest.raises(DataError, match="3074-byte records"):
            formats.read_cifar(write(tmp_path, "cut.bin", hundred[:length]), classes=100)
    with pytest.raises(DataError, match="labels from 3 to 10"):
        formats.read_cifar(write(tmp_path, "bad.bin", ten[:3073] + b"\n" + ten[3074:]))
    with pytest.raises(DataError, match="web page"):
        formats.read_cifar(write(tmp_path, "page.bin", WEB_PAGE))


def python2_batch(rows, labels, key="labels"):
    """A batch as Python 2's cPickle wrote it (protocol 2): strings as BINSTRING, the array through _reconstruct."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    raw = b"".join(map(bytes, rows))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x08(cnumpy\nndarray\nq\tK\x00\x85q\n" + short(b"b") + b"q\x0btRq\x0c"
        b"(K\x01" + b"J" + struct.pack("<i", len(rows)) + b"M" + struct.pack("<H", 3072) + b"\x86q\r"
        b"cnumpy\ndtype\nq\x0e(" + short(b"u1") + b"q\x0fK\x00K\x01tRq\x10"
        b"(K\x03" + short(b"|") + b"q\x11NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x12"
        b"\x89T" + struct.pack("<I", len(raw)) + raw + b"q\x13tb"
    )
    numbers = b"]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    name = short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03"
    return (
        b"\x80\x02}q\x01(" + name + short(key.encode()) + b"q\x04" + numbers + short(b"data") + b"q\x06" + array + b"u."
    )


def test_the_hand_written_batch_is_a_pickle():
    batch = pickle.loads(python2_batch(cifar_rows(2), [3, 9]), encoding="bytes")
    assert batch[b"labels"] == [3, 9]
    assert batch[b"data"].tolist() == cifar_rows(2)


def test_cifar_python(tmp_path):
    path = write(tmp_path, "data_batch_1", python2_batch(cifar_rows(2), [3, 9]))
    check_cifar(*formats.read_cifar(path), [3, 9])
    path = write(tmp_path, "train", python2_batch(cifar_rows(2), [99, 20], "fine_labels"))
    check_cifar(*formats.read_cifar(path, classes=100), [99, 20])


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_python_3(tmp_path, protocol, order):
    data = np.asarray(cifar_rows(2), np.uint8, order=order)
    batch = {b"data": data, "labels": [3, 9], "more": {"big": 2**40, "none": None, "pair": (1.5, "é")}}
    path = write(tmp_path, "batch", pickle.dumps(batch, protocol=protocol))
    check_cifar(*formats.read_cifar(path), [3, 9])
    assert formats.read_pickle(path)["more"] == batch["more"]
    wide = np.arange(6, dtype=">i4").reshape(2, 3)
    path = write(tmp_path, "wide", pickle.dumps({"wide": wide, "again": wide.astype("<f8")}, protocol=protocol))
    assert formats.read_pickle(path)["wide"].tolist() == wide.tolist()
    assert formats.read_pickle(path)["again"].tolist() == wide.tolist()


def test_python_batches_cut_anywhere(tmp_path):
    whole = python2_batch(cifar_rows(1), [3])
    start, end = whole.index(b"T\x00"), len(whole)
    for length in [*range(start + 8), *range(end - 60, end)]:
        with pytest.raises(DataError):
            formats.read_cifar_python(write(tmp_path, "cut", whole[:length]))


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    sign = tmp_path / "sign"
    content = pickle.dumps({"data": Payload(sign), "labels": [1]}, protocol=protocol)
    with pytest.raises(DataError, match="do not use it" if protocol > 1 else None):
        formats.read_cifar_python(write(tmp_path, "batch", content))
    assert not sign.exists()
    pickle.loads(content)
    assert sign.exists(), "the payload would have worked"


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cbuiltins\neval\nU\x041+11\x85R.",
        b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
        b"\x80\x02(ios\nsystem\nU\x02ls\x85R.",
        b"\x80\x02}U\x01aK\x01sb.",
        b"\x80\x02(U\x02lsios\nsystem\n.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02]K\x01a.",
        b"\x80\x02Pmodule\n.",
        b"\x80\x02K\x01h\x07.",
        b"\x80\x02.",
        b"\x80\x02}(U\x01ae.",
        b"\x80\x02}(]K\x01u.",
    ],
)
def test_other_pickles_are_refused(tmp_path, content):
    with pytest.raises(DataError, match="batch"):
        formats.read_pickle(write(tmp_path, "batch", content))


def test_python_batches_with_wrong_content(tmp_path):
    for batch in (
        {"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.int32), "labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, "2"]},
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2]},
        {"labels": [1, 2]},
    ):
        with pytest.raises(DataError, match="batch"):
            formats.read_cifar(write(tmp_path, "batch", pickle.dumps(batch, protocol=2)))


def tar(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def test_cifar_archives(tmp_path):
    first, second = python2_batch(cifar_rows(1), [3]), python2_batch(cifar_rows(2)[1:], [9])
    folder = "cifar-10-batches-py"
    content = tar({f"{folder}/b": second, f"{folder}/readme.html": WEB_PAGE, f"{folder}/a": first})
    path = write(tmp_path, "cifar.tar.gz", content)
    check_cifar(*formats.read_cifar(path, names=("a", "b")), [3, 9])
    with pytest.raises(DataError, match="holds no c"):
        formats.read_cifar(path, names=("a", "c"))
    with pytest.raises(DataError, match="web page"):
        formats.read_cifar(path, names=("readme.html",))
    for climbing in ("../a", "/etc/a", "x/../../a"):
        with pytest.raises(DataError, match="outside its folder"):
            formats.read_archive(write(tmp_path, "bad.tar.gz", tar({climbing: first})), ["a"])
    for length in (20, len(content) // 2, len(content) - 1):
        with pytest.raises(DataError, match="cut short"):
            formats.read_archive(write(tmp_path, "cut.tar.gz", content[:length]), ["a"])
    plain = gzip.decompress(content)
    with pytest.raises(DataError, match=r"cut short|holds no"):
        formats.read_archive(write(tmp_path, "cut.tar", plain[: plain.index(first) + 9]), ["a"])


def test_svhn(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    images = np.zeros((32, 32, 3, 2), np.uint8)
    for n, c, y, x in np.ndindex(2, 3, 32, 32):
        images[y, x, c, n] = pixel(n, c, y, x)
    path = tmp_path / "train_32x32.mat"
    scipy_io.savemat(path, {"X": images, "y": np.array([[10], [9]], np.uint8)}, do_compression=True)
    check_cifar(*formats.read_svhn(path), [0, 9])
    whole = path.read_bytes()
    for length in [*range(0, 136, 8), len(whole) // 2, len(whole) - 1]:
        with pytest.raises(DataError, match=r"cut\.mat"):
            formats.read_svhn(write(tmp_path, "cut.mat", whole[:length]))
    with pytest.raises(DataError, match="web page"):
        formats.read_svhn(write(tmp_path, "page.mat", WEB_PAGE))
    for content, says in (
        ({"X": images, "y": np.array([[0], [9]])}, "labels from 0 to 9 where 1 to 10"),
        ({"X": images, "y": np.array([[1]])}, "2 images"),
        ({"X": images[..., 0], "y": np.array([[1]])}, "no X"),
        ({"X": images}, "no X"),
    ):
        scipy_io.savemat(path, content)
        with pytest.raises(DataError, match=says):
            formats.read_svhn(path)


def test_affnist(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    images = np.zeros((1600, 3), np.uint8)
    for n, y, x in np.ndindex(3, 40, 40):
        images[40 * y + x, n] = pixel(n, 0, y, x)
    path = tmp_path / "test.mat"

    def save(**fields):
        fields = {"affine_matrix": np.eye(3), "human_readable_transform": np.zeros((6, 3)), **fields}
        scipy_io.savemat(path, {"affNISTdata": fields})

    save(image=images, label_int=np.array([[7, 0, 9]], np.uint8))
    pixels, labels = formats.read_affnist(path)
    assert labels.tolist() == [7, 0, 9]
    assert pixels.shape == (3, 40, 40)
    for n, y, x in [(0, 0, 0), (1, 3, 39), (2, 38, 2)]:
        assert pixels[n, y, x] == pixel(n, 0, y, x)
    whole = path.read_bytes()
    with pytest.raises(DataError, match="cut short or no Matlab"):
        formats.read_affnist(write(tmp_path, "cut.mat", whole[: len(whole) // 2]))
    save(image=images, label_int=np.array([[7, 0, 10]], np.uint8))
    with pytest.raises(DataError, match="labels from 0 to 10"):
        formats.read_affnist(path)
    save(image=images.T, label_int=np.array([[7, 0, 9]], np.uint8))
    with pytest.raises(DataError, match=r"\[3, 1600\]"):
        formats.read_affnist(path)
    save(image=images, label_int=np.array([[7, 0]], np.uint8))
    with pytest.raises(DataError, match="3 images"):
        formats.read_affnist(path)
    scipy_io.savemat(path, {"image": images})
    with pytest.raises(DataError, match="no affNISTdata"):
        formats.read_affnist(path)


INFO = [[4, 0, 34, 5], [9, 8, 0, 0], [7, 3, 12, 2]]


def norb_files(folder, labels=(4, 0, 2), info=INFO, zipped=False):
    pairs = [[[[pixel(n, c, y, x) for x in range(5)] for y in range(4)] for c in range(2)] for n in range(3)]
    contents = {
        "dat.mat": norb(pairs, 0x1E3D4C55, "B"),
        "cat.mat": norb(labels, 0x1E3D4C54, "i"),
        "info.mat": norb(info, 0x1E3D4C54, "i"),
    }
    return [write(folder, name, gzip.compress(content) if zipped else content) for name, content in contents.items()]


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_smallnorb(tmp_path, zipped):
    images, labels, about = formats.read_smallnorb(*norb_files(tmp_path, zipped=zipped))
    assert images.shape == (3, 2, 4, 5)
    for n, c, y, x in np.ndindex(3, 2, 4, 5):
        assert images[n, c, y, x] == pixel(n, c, y, x)
    assert labels.tolist() == [4, 0, 2]
    assert {word: values.tolist() for word, values in about.items()} == {
        "instance": [4, 9, 7],
        "elevation": [0, 8, 3],
        "azimuth": [34, 0, 12],
        "lighting": [5, 0, 2],
    }


@pytest.mark.parametrize("which", range(3), ids=["dat", "cat", "info"])
def test_smallnorb_cut_anywhere(tmp_path, which):
    paths = norb_files(tmp_path)
    whole = paths[which].read_bytes()
    for length in range(len(whole)):
        paths[which].write_bytes(whole[:length])
        with pytest.raises(DataError, match=paths[which].name):
            formats.read_smallnorb(*paths)


def test_smallnorb_refuses(tmp_path):
    with pytest.raises(DataError, match="labels from 0 to 5"):
        formats.read_smallnorb(*norb_files(tmp_path, labels=(5, 0, 2)))
    with pytest.raises(DataError, match="azimuth 33"):
        formats.read_smallnorb(*norb_files(tmp_path, info=[[4, 0, 33, 5], *INFO[1:]]))
    with pytest.raises(DataError, match=r"3 images.*2 labels"):
        formats.read_smallnorb(*norb_files(tmp_path, labels=(1, 0)))
    dat, cat, info = norb_files(tmp_path)
    for order in ((cat, cat, info), (dat, info, info), (dat, cat, cat)):
        with pytest.raises(DataError, match="expected"):
            formats.read_smallnorb(*order)
    swapped = bytes(reversed(dat.read_bytes()[:4])) + dat.read_bytes()[4:]
    with pytest.raises(DataError, match="no file of smallNORB"):
        formats.read_norb_matrix(write(tmp_path, "big-endian.mat", swapped))
    with pytest.raises(DataError, match="web page"):
        formats.read_norb_matrix(write(tmp_path, "page.mat", WEB_PAGE))
