"""What has been asked of a test set for a run beyond its own test: looks.json, in which each look is counted.

A look is written there before its line is added to the results. So one whose line could not be written is known, is
not taken again, and gets its line the next time that it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchcaps.evaluate import Figures
from torchcaps.finish import add_line
from torchcaps.results import Result, moment
from torchcaps.runs import read_json, write_json


def looks(folder: Path, data: str | None = None) -> list[dict[str, Any]]:
    """Args: data: of which set; "" for the run's own, None for any."""
    path = folder / "looks.json"
    content = read_json(path)
    try:
        found = [] if content is None else content["looks"]
        of = [each["ask"].get("data", "") for each in found if each["figures"]]
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} does not hold what has been asked of this run; repair it, or move it away") from None
    return [each for each, own in zip(found, of, strict=True) if data is None or own == data]


def looked(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The look that has been taken already, where one has been."""
    return next((each for each in looks(folder) if each["ask"] == key), None)


def note_look(folders: Iterable[Path], key: dict[str, Any], found: Figures, reads: int) -> dict[str, Any]:
    """Args: reads: how often this test set has been read so, this time included."""
    look = {"ask": key, "figures": found, "made": {**moment(), "test_reads": reads}, "told": False}
    for folder in folders:
        write_json(folder / "looks.json", {"looks": [*looks(folder), look]})
    return look


def tell(folder: Path, look: dict[str, Any], path: Path, line: Result) -> None:
    """Adds the line of a look, unless the file has it."""
    add_line(path, line)
    told = [{**each, "told": True} if each["ask"] == look["ask"] else each for each in looks(folder)]
    write_json(folder / "looks.json", {"looks": told})


def to_tell(look: dict[str, Any], named: bool) -> bool:
    """Whether a look's line may be missing: it has not been added, or a file or row is named that may not have it."""
    return "made" in look and (named or not look["told"])


def reads_of(folder: Path, data: str = "") -> int:
    """How often a test set has been read for a run: its own, readings that were cut short and those after each epoch
    among them, or that of other data."""
    own = {} if data else read_json(folder / "reading.json") or {}
    return own.get("begun", 0) + own.get("epochs", 0) + len(looks(folder, data))
