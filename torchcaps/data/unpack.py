"""Files out of archives and packages. Every member's name is looked at, and only those wanted are written.

They are written under temporary names of our own choosing and checked while they are; `commit` gives them their real
names once the whole archive has been walked.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

import numpy as np

from torchcaps.data.catalog import Bundle, File
from torchcaps.data.errors import DataError, Unavailable, writing

CHUNK = 1 << 20


@dataclass
class Unpacked:
    """A file that is complete and has the right checksums, still under its temporary name."""

    file: File
    temporary: Path
    sha256: str

    def commit(self) -> Path:
        path = self.temporary.with_name(self.file.name)
        with writing(path):
            os.replace(self.temporary, path)
        return path


def unpack(bundle: Bundle, path: Path, files: Iterable[File], folder: Path) -> list[Unpacked]:
    """Writes those of `files` that the bundle at `path` holds into `folder`, or none of them."""
    wanted = {file.key: file for file in files}
    made: list[Unpacked] = []
    try:
        for keys, stream in _members(bundle, path, wanted):
            for key, content in _convert(bundle, keys, stream, path):
                if key in wanted:
                    made.append(_write(content, wanted[key], folder, bundle.name))
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as problem:
        _discard(made)
        raise Unavailable(f"{bundle.name} is cut short or damaged ({problem})") from None
    except BaseException:
        _discard(made)
        raise
    missing = [key for keys in bundle.members.values() for key in keys if key in wanted]
    missing = [key for key in missing if key not in {unpacked.file.key for unpacked in made}]
    if missing:
        _discard(made)
        raise Unavailable(f"{bundle.name} does not hold {wanted[missing[0]].name}")
    return made


def _discard(made: list[Unpacked]) -> None:
    for unpacked in made:
        unpacked.temporary.unlink(missing_ok=True)


def check(file: File | Bundle, size: int, md5: str, sha256: str) -> str:
    """What is wrong with a file of this size and these checksums, if anything is."""
    expected = getattr(file, "size", None)
    if expected is not None and size != expected:
        return f"{file.name} has {size:,} bytes where {expected:,} are expected"
    if not size:
        return f"{file.name} is empty"
    for kind, found in (("md5", md5), ("sha256", sha256)):
        right = getattr(file, kind, None)
        if right and found != right:
            return f"{file.name} has the {kind.upper().replace('SHA', 'SHA-')} {found} where {right} is expected"
    return ""


def digests(path: Path) -> tuple[int, str, str]:
    """Size, MD5 and SHA-256 of a file."""
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            md5.update(chunk)
            sha256.update(chunk)
            size += len(chunk)
    return size, md5.hexdigest(), sha256.hexdigest()


def _write(content: IO[bytes], file: File, folder: Path, source: str) -> Unpacked:
    temporary = folder / f".{file.name}.tmp"
    md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
    try:
        with writing(temporary):
            target = temporary.open("wb")
        with target:
            while chunk := content.read(CHUNK):
                md5.update(chunk)
                sha256.update(chunk)
                size += len(chunk)
                if file.size is not None and size > file.size:
                    raise Unavailable(f"{file.name} in {source} is larger than the {file.size:,} bytes expected")
                with writing(temporary):
                    target.write(chunk)
            with writing(temporary):
                target.flush()
        wrong = check(file, size, md5.hexdigest(), sha256.hexdigest())
        if wrong:
            raise Unavailable(f"in {source}, {wrong}")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return Unpacked(file, temporary, sha256.hexdigest())


def _members(bundle: Bundle, path: Path, wanted: Iterable[str]) -> Iterator[tuple[tuple[str, ...], IO[bytes]]]:
    members = {name: keys for name, keys in bundle.members.items() if any(key in wanted for key in keys)}

    def keys_of(inside: str) -> tuple[str, ...]:
        for name, keys in members.items():
            if inside == name or inside.endswith(f"/{name}") or name.endswith(f"/{inside}"):
                return keys
        return ()

    if bundle.packing in ("plain", "gz"):
        with path.open("rb") as plain:
            opened: IO[bytes] = gzip.GzipFile(fileobj=plain) if bundle.packing == "gz" else plain  # type: ignore[assignment]
            yield from ((keys, opened) for keys in members.values())
    elif bundle.packing == "zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                _refuse_escape(info.filename, bundle)
            for info in archive.infolist():
                if keys := keys_of(info.filename):
                    with archive.open(info) as stream:
                        yield keys, stream
    else:
        with tarfile.open(path) as tar:
            for member in tar:
                _refuse_escape(member.name, bundle)
                if member.islnk() or member.issym():
                    _refuse_escape(member.linkname, bundle)
                if member.isfile() and (keys := keys_of(member.name)):
                    content = tar.extractfile(member)
                    if content is not None:
                        yield keys, content


def _refuse_escape(name: str, bundle: Bundle) -> None:
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            raise Unavailable(f"{bundle.name} holds {name!r}, which points outside of it: it was not unpacked")


def _convert(bundle: Bundle, keys: tuple[str, ...], stream: IO[bytes], path: Path) -> Iterable[tuple[str, IO[bytes]]]:
    if not bundle.convert:
        return [(keys[0], stream)]
    converters: dict[str, Callable[[IO[bytes], Path], tuple[bytes, ...]]] = {
        "mnist_csv": _idx_from_csv,
        "cifar_python": _binary_from_python,
    }
    try:
        contents = converters[bundle.convert](stream, path)
    except (DataError, ValueError) as problem:
        raise Unavailable(f"{bundle.name} cannot be understood: {problem}") from None
    return [(key, io.BytesIO(content)) for key, content in zip(keys, contents, strict=True)]


def _idx_from_csv(stream: IO[bytes], path: Path) -> tuple[bytes, bytes]:
    """A header line, then `label,pixel,pixel...` for each image, into the bytes of the two official idx files."""
    stream.readline()
    rows = []
    rest = b""
    while chunk := stream.read(1 << 22):
        chunk = rest + chunk
        end = chunk.rfind(b"\n") + 1
        rows.append(_numbers(chunk[:end]))
        rest = chunk[end:]
    if rest.strip():
        rows.append(_numbers(rest + b"\n"))
    values = np.concatenate([np.zeros(0, np.uint8), *rows])
    if not len(values) or len(values) % 785:
        raise ValueError("its rows are not a label and 28 x 28 pixels each")
    table = values.reshape(-1, 785)
    images = struct.pack(">4I", 0x803, len(table), 28, 28) + table[:, 1:].tobytes()
    labels = struct.pack(">2I", 0x801, len(table)) + table[:, 0].tobytes()
    return images, labels


def _numbers(text: bytes) -> np.ndarray:
    """The numbers 0..255 of comma-separated lines; text.split and int would take a minute for all of MNIST."""
    characters = np.frombuffer(text.replace(b"\r", b""), np.uint8)
    ends = np.flatnonzero((characters == ord(",")) | (characters == ord("\n")))
    digits = characters - ord("0")  # wraps around for what is no digit
    lengths = np.diff(ends, prepend=-1) - 1
    if not len(ends):
        return np.zeros(0, np.uint8)
    if lengths.min() < 1 or lengths.max() > 3 or np.count_nonzero(digits < 10) + len(ends) != len(characters):
        raise ValueError("it holds something else than numbers from 0 to 255")
    values = digits[ends - 1].astype(np.uint16)
    for place, factor in ((2, 10), (3, 100)):
        longer = lengths >= place
        values[longer] += factor * digits[ends[longer] - place].astype(np.uint16)
    if values.max() > 255:
        raise ValueError("it holds numbers above 255")
    return values.astype(np.uint8)


def _binary_from_python(stream: IO[bytes], path: Path) -> tuple[bytes]:
    """A pickled CIFAR batch, parsed and never unpickled, into the bytes of the official binary one."""
    from torchcaps.data.formats import read_pickle

    batch = read_pickle(path, stream.read())
    names = ("coarse_labels", "fine_labels") if "fine_labels" in batch else ("labels",)
    columns = [np.asarray(batch.get(name, ()), np.uint8).reshape(-1, 1) for name in names]
    return (np.concatenate([*columns, np.asarray(batch.get("data"), np.uint8)], axis=1).tobytes(),)
