"""Where the files of a set are kept, and whether those that are there are right.

A stamp with size, time and SHA-256 of each file spares reading it whole every time it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchcaps.data.catalog import Archive, Entry, File, find
from torchcaps.data.errors import NotWritten, is_web_page, write_whole

STAMPS = ".stamps.json"
CHUNK = 1 << 20

Stamps = dict[str, dict[str, Any]]


def cache_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """`root`, else TORCHCAPS_DATA, else torchcaps in the user's cache folder; always absolute."""
    chosen = root or os.environ.get("TORCHCAPS_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "torchcaps"


def folder_of(entry: Entry, root: str | os.PathLike[str] | None) -> Path:
    return Path(__file__).parent / entry.name if entry.shipped else cache_folder(root) / entry.name


@dataclass
class Check:
    """What `verify` found of a file: nothing `wrong`, or what is."""

    file: File
    path: Path
    wrong: str
    missing: bool = False


def verify(name: str, root: str | os.PathLike[str] | None = None) -> list[Check]:
    """Reads all files of a set and compares size, MD5 and SHA-256. Optional parts that are not there are left out."""
    entry = find(name)
    if entry.made_from:
        return verify(entry.made_from, root)
    folder = folder_of(entry, root)
    stamps = read_stamps(folder)
    checks = []
    for file in entry.files:
        path = folder / file.name
        if path.is_file():
            checks.append(Check(file, path, wrong_with(path, file, stamps, full=True)))
        elif not file.part:
            checks.append(Check(file, path, "missing", missing=True))
    if not entry.shipped and any(not found.wrong for found in checks):
        write_stamps(folder, stamps)
    return checks


def is_cached(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Whether all files that are not optional are there with the right sizes; nothing is read."""
    entry = find(name)
    if entry.made_from:
        return is_cached(entry.made_from, root)
    folder = folder_of(entry, root)
    files = entry.wanted()
    return bool(files) and all(
        (folder / file.name).is_file() and file.size in (None, (folder / file.name).stat().st_size) for file in files
    )


def lacking(folder: Path, files: Sequence[File]) -> dict[str, str]:
    """The keys of those files that are absent (with no text) or damaged (with what is wrong)."""
    stamps = read_stamps(folder)
    before = dict(stamps)
    found = {}
    for file in files:
        path = folder / file.name
        wrong = wrong_with(path, file, stamps) if path.is_file() else ""
        if wrong or not path.is_file():
            found[file.key] = wrong
    if stamps != before:
        write_stamps(folder, stamps)
    return found


def wrong_with(path: Path, file: File, stamps: Stamps, full: bool = False) -> str:
    """What is wrong with a file; it is read only where `full` asks for it or its stamp does not fit."""
    try:
        known = stamps.get(file.name, {})
        now = stamp(path, known.get("sha256", ""))
        if not full and now["sha256"] and now.items() <= known.items() and file.sha256 in (None, now["sha256"]):
            return wrong_size(file, now["size"])
        tally = digests(path)
        remembered = file if file.sha256 or file.md5 else replace(file, sha256=known.get("sha256"))
        wrong = check(remembered, tally)
        if not wrong:
            stamps[file.name] = {**known, **stamp(path, tally.sha256)}
        return wrong
    except OSError as problem:
        return f"{file.name} cannot be read ({problem.strerror or problem})"


@dataclass
class Tally:
    """Size and checksums of what was added, and how it begins."""

    size: int = 0
    start: bytes = b""
    _md5: Any = field(default_factory=lambda: hashlib.md5(usedforsecurity=False))
    _sha256: Any = field(default_factory=hashlib.sha256)

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self.start = self.start or chunk[:512]
        self._md5.update(chunk)
        self._sha256.update(chunk)

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


def digests(path: Path) -> Tally:
    tally = Tally()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            tally.add(chunk)
    return tally


def check(file: File | Archive, tally: Tally) -> str:
    """What is wrong with a file, if anything is. One that has no checksum is looked at instead."""
    wrong = wrong_size(file, tally.size) or _wrong_sums(file, tally)
    unknown = not (file.md5 or file.sha256)
    if (wrong or unknown) and is_web_page(tally.start):
        return f"{file.name} is a web page instead of data"
    if not wrong and unknown and file.name.endswith(".mat") and not tally.start.startswith(b"MATLAB 5.0"):
        return f"{file.name} does not begin as a MATLAB 5.0 file does"
    return wrong


def wrong_size(file: File | Archive, size: int) -> str:
    if file.size not in (None, size):
        return f"{file.name} has {size:,} bytes where {file.size:,} are expected"
    return "" if size else f"{file.name} is empty"


def _wrong_sums(file: File | Archive, tally: Tally) -> str:
    for kind, found, right in (("MD5", tally.md5, file.md5), ("SHA-256", tally.sha256, file.sha256)):
        if right and found != right:
            return f"{file.name} has the {kind} {found} where {right} is expected"
    return ""


def stamp(path: Path, sha256: str) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "time": status.st_mtime_ns, "sha256": sha256}


def read_stamps(folder: Path) -> Stamps:
    try:
        stamps = json.loads((folder / STAMPS).read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in stamps.items() if isinstance(v, dict)} if isinstance(stamps, dict) else {}


def write_stamps(folder: Path, stamps: Stamps) -> None:
    """A cache that may only be read has none, and is hashed each time instead."""
    with suppress(NotWritten), write_whole(folder / STAMPS) as temporary:
        temporary.write_text(json.dumps(stamps, indent=1))
