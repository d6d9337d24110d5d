"""What may go wrong with data, as sentences; and files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

IN_CACHE = "choose another folder with --root or TORCHCAPS_DATA"  # advice for files of the cache
WEB_PAGE = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")


class DataError(ValueError):
    """Data that cannot be had, read or used: one sentence with the file's name and what to do."""


class NotWritten(DataError):
    """A file that could not be written: no other source helps, and nothing can be skipped."""


class Unavailable(Exception):
    """One source cannot give a file. The next one is asked; only when all fail does the user see why."""


def is_web_page(start: bytes) -> bool:
    """Whether data begin as the page of a server, login or proxy does."""
    return start[:512].lstrip(b"\xef\xbb\xbf \t\r\n\f").lower().startswith(WEB_PAGE)


def disk_full(path: Path, advice: str) -> NotWritten:
    return NotWritten(f"the disk is full: {path} could not be written; free some space, or {advice}")


@contextmanager
def writing(path: Path, advice: str = "choose another place for it") -> Iterator[None]:
    """Turns what the disk may say while `path` is written into a sentence."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path, advice) from None
        misplaced = isinstance(problem, (FileExistsError, NotADirectoryError))
        reason = "there is a file in the place of a folder" if misplaced else problem.strerror or problem
        raise NotWritten(f"{path} cannot be written ({reason}); {advice}") from None


@contextmanager
def write_whole(path: Path, advice: str = "choose another place for it") -> Iterator[Path]:
    """A temporary name beside `path`; what was written there takes its place in the end, or is gone if that failed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with writing(path, advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
