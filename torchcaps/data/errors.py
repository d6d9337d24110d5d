from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """Data that cannot be had, read or used: one sentence with the file's name and what to do."""


class Unavailable(Exception):
    """One source cannot give a file. The next one is asked; only when all fail does the user see why."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk may say while `path` is written into a sentence."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk is full: {path} could not be written; free some space, "
                "or choose another folder with --root or TORCHCAPS_DATA"
            ) from None
        raise DataError(
            f"{path} cannot be written ({problem.strerror or problem}); "
            "choose another folder with --root or TORCHCAPS_DATA"
        ) from None
