"""Files out of archives and packages. Every member's name is looked at, and only those wanted are written.

They are written under temporary names of our own choosing, checked while they are, and get their real names together.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

import numpy as np

from torchcaps.data.cache import CHUNK, Tally, check
from torchcaps.data.catalog import Bundle, File
from torchcaps.data.errors import IN_CACHE, DataError, Unavailable, write_whole, writing

Members = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Unpacked:
    """A file that is there under its own name, with the right checksums."""

    file: File
    path: Path
    sha256: str


def unpack(bundle: Bundle, path: Path, files: Iterable[File], folder: Path) -> list[Unpacked]:
    """Writes those of `files` that the bundle at `path` holds into `folder`, or none of them."""
    wanted = {file.key: file for file in files}
    made: dict[str, Unpacked] = {}
    with ExitStack() as names:
        with _reading(bundle.name):
            for keys, stream in _members(bundle, path, wanted):
                for key, content in _convert(bundle, keys, stream, path):
                    if key in wanted:
                        temporary = names.enter_context(write_whole(folder / wanted[key].name, IN_CACHE))
                        made[key] = _write(content, wanted[key], temporary, bundle.name)
        for key in (key for keys in bundle.members.values() for key in keys if key in wanted):
            if key not in made:
                raise Unavailable(f"{bundle.name} does not hold {wanted[key].name}")
    return list(made.values())


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as problem:
        raise Unavailable(f"{source} is cut short or damaged ({problem})") from None
    except OSError as problem:
        raise Unavailable(f"{source} cannot be read ({problem.strerror or problem})") from None


def _chunks(content: IO[bytes], source: str) -> Iterator[bytes]:
    while True:
        with _reading(source):
            chunk = content.read(CHUNK)
        if not chunk:
            return
        yield chunk


def _write(content: IO[bytes], file: File, temporary: Path, source: str) -> Unpacked:
    path, tally = temporary.with_name(file.name), Tally()
    with writing(path, IN_CACHE), temporary.open("wb") as target:
        for chunk in _chunks(content, source):
            tally.add(chunk)
            if file.size is not None and tally.size > file.size:
                raise Unavailable(f"{file.name} in {source} is larger than the {file.size:,} bytes expected")
            target.write(chunk)
    wrong = check(file, tally)
    if wrong:
        raise Unavailable(f"in {source}, {wrong}")
    return Unpacked(file, path, tally.sha256)


def _members(bundle: Bundle, path: Path, wanted: Iterable[str]) -> Iterator[tuple[tuple[str, ...], IO[bytes]]]:
    members = {name: keys for name, keys in bundle.members.items() if any(key in wanted for key in keys)}
    if bundle.packing in ("plain", "gz"):
        with path.open("rb") as plain:
            opened: IO[bytes] = gzip.GzipFile(fileobj=plain) if bundle.packing == "gz" else plain  # type: ignore[assignment]
            yield from ((keys, opened) for keys in members.values())
    elif bundle.packing == "zip":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _refuse_escapes(names, bundle)
            for name, keys in _choose(names, members, bundle).items():
                with archive.open(name) as stream:
                    yield keys, stream
    else:
        with tarfile.open(path) as tar:
            everything = tar.getmembers()
            _refuse_escapes([member.name for member in everything], bundle)
            _refuse_escapes([member.linkname for member in everything if member.islnk() or member.issym()], bundle)
            files = [member for member in everything if member.isfile()]
            chosen = _choose([member.name for member in files], members, bundle)
            for member in files:
                content = tar.extractfile(member) if member.name in chosen else None
                if content is not None:
                    yield chosen[member.name], content


def _choose(names: Sequence[str], members: Members, bundle: Bundle) -> Members:
    """Which names inside to take: the one expected, or if it is not there, the same one in or out of some folder."""
    chosen = {}
    for name, keys in members.items():
        found = [inside for inside in names if inside == name]
        found = found or [inside for inside in names if inside.endswith(f"/{name}") or name.endswith(f"/{inside}")]
        if len(found) > 1:
            raise Unavailable(f"{bundle.name} holds both {found[0]} and {found[1]} where one {name} is expected")
        if found:
            chosen[found[0]] = keys
    return chosen


def _refuse_escapes(names: Iterable[str], bundle: Bundle) -> None:
    for name, path in ((name, kind(name)) for name in names for kind in (PurePosixPath, PureWindowsPath)):
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
