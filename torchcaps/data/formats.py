"""Readers for the files as their makers publish them, plain or gzipped. Nothing is ever unpickled.

    idx          MNIST, Fashion-MNIST     big-endian header, any number of dimensions
    CIFAR        binary batches, python batches (their pickles are parsed, not run), and archives of either
    .mat         SVHN, affNIST            Matlab 5, through scipy
    .mat         smallNORB                a binary format of its own, little-endian

Whatever is wrong with a file, a DataError says so in one sentence with the file's name.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.data.errors import DataError, is_web_page
from torchcaps.data.pickles import AGAIN, parse_pickle

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
NORB_TYPES = {0x1E3D4C51: "<f4", 0x1E3D4C53: "<f8", 0x1E3D4C54: "<i4", 0x1E3D4C55: "u1", 0x1E3D4C56: "<i2"}
NORB_RANGES = {"instance": range(10), "elevation": range(9), "azimuth": range(0, 36, 2), "lighting": range(6)}
CIFAR_IMAGE = (3, 32, 32)


def read_bytes(path: Path | str) -> bytes:
    """The file's content, unzipped where it is gzipped; a web page in its place is refused."""
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: fetch it again") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise DataError(f"{path} is cut short or damaged inside its gzip packing: {AGAIN}") from None
    except OSError as problem:
        raise DataError(f"{path} cannot be read ({problem.strerror}): see that it is a file you may open") from None
    refuse_web_page(content, path)
    return content


def refuse_web_page(content: bytes, path: Path | str) -> None:
    if is_web_page(content[:512]):
        raise DataError(f"{path} holds a web page instead of data: {AGAIN}, from another source")


def check_labels(labels: Tensor, classes: int, path: Path | str) -> Tensor:
    """The labels as int64, all of them one of 0..classes-1."""
    labels = labels.long()
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        low, high = int(labels.min()), int(labels.max())
        raise DataError(f"{path} has labels from {low} to {high} where 0 to {classes - 1} are expected: {AGAIN}")
    return labels


def _matrix(content: bytes, start: int, dtype: str, shape: tuple[int, ...], path: Path | str) -> Tensor:
    expected = start + math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) != expected:
        state = "is cut short" if len(content) < expected else "goes on after its end"
        raise DataError(f"{path} {state}, {len(content):,} bytes where its header promises {expected:,}: {AGAIN}")
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=True))


def read_idx(path: Path | str) -> Tensor:
    """Any idx file, as a tensor of its own type and dimensions."""
    content = read_bytes(path)
    if len(content) < 4:
        raise DataError(f"{path} is cut short, it ends within its header: {AGAIN}")
    if content[:2] != b"\0\0" or content[2] not in IDX_TYPES or not content[3]:
        raise DataError(f"{path} is no idx file, it starts with {content[:4].hex(' ')}: {AGAIN}")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} is cut short, it ends within its header: {AGAIN}")
    return _matrix(content, start, IDX_TYPES[content[2]], struct.unpack_from(f">{content[3]}I", content, 4), path)


def read_idx_pair(images: Path | str, labels: Path | str, classes: int) -> tuple[Tensor, Tensor]:
    """Shapes: -> images uint8 [n, h, w], labels int64 [n]"""
    pixels, names = read_idx(images), read_idx(labels)
    if pixels.dtype != torch.uint8 or pixels.dim() != 3:
        raise DataError(f"{images} holds {pixels.dtype} {list(pixels.shape)} where images uint8 [n, h, w] are expected")
    if names.dtype != torch.uint8 or names.dim() != 1:
        raise DataError(f"{labels} holds {names.dtype} {list(names.shape)} where labels uint8 [n] are expected")
    _same_number(images, pixels, labels, names)
    return pixels, check_labels(names, classes, labels)


def _same_number(images: Path | str, pixels: Tensor, labels: Path | str, names: Tensor) -> None:
    if len(pixels) != len(names):
        raise DataError(
            f"{images} has {len(pixels):,} images, but {labels} has {len(names):,} labels: delete both and fetch again"
        )


def read_cifar_binary(path: Path | str, *, classes: int = 10, content: bytes | None = None) -> tuple[Tensor, Tensor]:
    """One binary batch. CIFAR-100 has a coarse label before each fine one; the fine one is read.

    Shapes: -> images uint8 [n, 3, 32, 32], labels int64 [n]
    """
    content = read_bytes(path) if content is None else content
    before = 2 if classes == 100 else 1
    record = before + math.prod(CIFAR_IMAGE)
    if not content or len(content) % record:
        raise DataError(f"{path} has {len(content):,} bytes, not a whole number of {record}-byte records: {AGAIN}")
    rows = torch.from_numpy(np.frombuffer(content, np.uint8).reshape(-1, record).copy())
    return rows[:, before:].reshape(-1, *CIFAR_IMAGE), check_labels(rows[:, before - 1], classes, path)


def read_cifar_python(path: Path | str, *, classes: int = 10, content: bytes | None = None) -> tuple[Tensor, Tensor]:
    """One python batch, parsed by `read_pickle`.

    Shapes: -> images uint8 [n, 3, 32, 32], labels int64 [n]
    """
    batch = read_pickle(path, content)
    images, labels = batch.get("data"), batch.get("fine_labels" if classes == 100 else "labels")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (math.prod(CIFAR_IMAGE),):
        raise DataError(f"{path} has no data of uint8 [n, 3072]: {AGAIN}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path} has no list of labels for {classes} classes: {AGAIN}")
    pixels, names = torch.from_numpy(images.reshape(-1, *CIFAR_IMAGE)), torch.tensor(labels, dtype=torch.int64)
    _same_number(path, pixels, path, names)
    return pixels, check_labels(names, classes, path)


def read_pickle(path: Path | str, content: bytes | None = None) -> dict[str, Any]:
    """A pickled dictionary, see `parse_pickle`; never unpickled."""
    return parse_pickle(read_bytes(path) if content is None else content, path)


def read_cifar(path: Path | str, *, classes: int = 10, names: Iterable[str] = ()) -> tuple[Tensor, Tensor]:
    """A batch in either format; or, with `names`, these batches of an archive, one after the other."""
    if names:
        members = read_archive(path, names)
        batches = [_cifar_batch(Path(path) / name, classes, content) for name, content in members.items()]
        return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])
    return _cifar_batch(path, classes, read_bytes(path))


def _cifar_batch(path: Path | str, classes: int, content: bytes) -> tuple[Tensor, Tensor]:
    reader = read_cifar_python if content[:1] == b"\x80" else read_cifar_binary
    return reader(path, classes=classes, content=content)


def read_archive(path: Path | str, names: Iterable[str]) -> dict[str, bytes]:
    """The members with these file names, in the order asked for; nothing is unpacked to disk."""
    names = list(names)
    found: dict[str, bytes] = {}
    with io.BytesIO(read_bytes(path)) as stream:
        try:
            with tarfile.open(fileobj=stream) as archive:
                for member in archive:
                    inside = PurePosixPath(member.name)
                    if inside.is_absolute() or ".." in inside.parts:
                        raise DataError(f"{path} would write outside its folder ({member.name}): do not use it")
                    content = archive.extractfile(member) if inside.name in names and member.isfile() else None
                    if content is not None:
                        found[inside.name] = content.read()
        except (tarfile.TarError, EOFError, zlib.error, OSError):
            raise DataError(f"{path} is cut short or no tar archive: {AGAIN}") from None
    for name in names:
        if name not in found:
            raise DataError(f"{path} holds no {name}: {AGAIN}")
        refuse_web_page(found[name], Path(path) / name)
    return {name: found[name] for name in names}


def _load_mat(path: Path | str) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError(f"{path} needs scipy to be read: pip install 'torchcaps[data]'") from None
    content = read_bytes(path)
    try:
        return loadmat(io.BytesIO(content))
    except Exception as problem:  # scipy raises whatever its parser stumbles over
        raise DataError(f"{path} is cut short or no Matlab 5 file ({type(problem).__name__}): {AGAIN}") from None


def read_svhn(path: Path | str) -> tuple[Tensor, Tensor]:
    """Cropped digits; the file's label 10 is the digit 0.

    Shapes: -> images uint8 [n, 3, 32, 32], labels int64 [n]
    """
    content = _load_mat(path)
    images, labels = content.get("X"), content.get("y")
    if images is None or labels is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
        raise DataError(f"{path} has no X of uint8 [h, w, 3, n] with its y: {AGAIN}")
    digits = torch.from_numpy(labels.reshape(-1).astype(np.int64))
    if len(digits) and not 1 <= int(digits.min()) <= int(digits.max()) <= 10:
        raise DataError(f"{path} has labels from {digits.min()} to {digits.max()} where 1 to 10 are expected: {AGAIN}")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    _same_number(path, pixels, path, digits)
    return pixels, digits % 10


def read_affnist(path: Path | str) -> tuple[Tensor, Tensor]:
    """A file of affNIST: one column of 1,600 pixels, row by row, for each image.

    Shapes: -> images uint8 [n, 40, 40], labels int64 [n]
    """
    content = _load_mat(path)
    try:
        fields = content["affNISTdata"][0, 0]
        images, labels = fields["image"], fields["label_int"].reshape(-1)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise DataError(f"{path} has no affNISTdata with image and label_int: {AGAIN}") from None
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[0] != 1600:
        raise DataError(f"{path} has image {images.dtype} {list(images.shape)} where uint8 [1600, n] is expected")
    pixels = torch.from_numpy(np.ascontiguousarray(images.T).reshape(-1, 40, 40))
    names = check_labels(torch.from_numpy(labels.astype(np.int64)), 10, path)
    _same_number(path, pixels, path, names)
    return pixels, names


def read_norb_matrix(path: Path | str) -> Tensor:
    """One of smallNORB's files: magic number, number of dimensions, at least three sizes, then the values."""
    content = read_bytes(path)
    if len(content) < 8:
        raise DataError(f"{path} is cut short, it ends within its header: {AGAIN}")
    magic, dimensions = struct.unpack_from("<Ii", content)
    if magic not in NORB_TYPES or not 1 <= dimensions <= 8:
        raise DataError(f"{path} is no file of smallNORB, it starts with {content[:8].hex(' ')}: {AGAIN}")
    start = 8 + 4 * max(3, dimensions)
    if len(content) < start:
        raise DataError(f"{path} is cut short, it ends within its header: {AGAIN}")
    sizes = struct.unpack_from(f"<{dimensions}I", content, 8)
    return _matrix(content, start, NORB_TYPES[magic], sizes, path)


def read_smallnorb(dat: Path | str, cat: Path | str, info: Path | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stereo pairs as two channels, their categories, and about each its instance, elevation, azimuth and lighting.

    Elevation 0..8 stands for 30 to 70 degrees in steps of 5, azimuth 0, 2 .. 34 for tens of degrees.

    Shapes: -> images uint8 [n, 2, h, w], labels int64 [n], about int64 [n] each
    """
    images, labels, rows = read_norb_matrix(dat), read_norb_matrix(cat), read_norb_matrix(info)
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 2:
        raise DataError(f"{dat} holds {images.dtype} {list(images.shape)} where pairs uint8 [n, 2, h, w] are expected")
    if labels.dim() != 1 or labels.dtype != torch.int32:
        raise DataError(f"{cat} holds {labels.dtype} {list(labels.shape)} where categories int32 [n] are expected")
    if rows.dim() != 2 or rows.shape[1] != 4 or rows.dtype != torch.int32:
        raise DataError(f"{info} holds {rows.dtype} {list(rows.shape)} where int32 [n, 4] is expected")
    _same_number(dat, images, cat, labels)
    _same_number(dat, images, info, rows)
    about = {word: rows[:, k].long() for k, word in enumerate(NORB_RANGES)}
    for word, values in about.items():
        odd = set(values.unique().tolist()) - set(NORB_RANGES[word])
        if odd:
            raise DataError(f"{info} has {word} {min(odd)}, which smallNORB does not know: {AGAIN}")
    return images, check_labels(labels, 5, cat), about
