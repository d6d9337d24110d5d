"""What has been asked of a test set for a run beyond its own test: looks.json, in which each look is counted.

A look is stored there with its line before the results get that. So one whose line could not be added is known, is not
taken again, and gives its line the next time that it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchcaps.evaluate import Figures
from torchcaps.finish import add_line
from torchcaps.results import Result, from_line
from torchcaps.runs import read_json, write_json

TOLD = {"error", "standard_error", "calibration_error", "images"}  # figures that an answer has


def looks(folder: Path, data: str | None = None) -> list[dict[str, Any]]:
    """Args: data: of which set; "" for the run's own, None for any."""
    path = folder / "looks.json"
    content = read_json(path)
    found = [] if content is None else content.get("looks")
    if not isinstance(found, list) or not all(map(_whole, found)):
        raise ValueError(f"{path} does not hold what has been asked of this run; repair it, or move it away")
    return [each for each in found if data is None or each["ask"].get("data", "") == data]


def _whole(look: Any) -> bool:
    if not isinstance(look, dict) or not isinstance(look.get("told", True), bool):
        return False
    ask, figures, line = (look.get(name) for name in ("ask", "figures", "line"))
    return isinstance(ask, dict) and isinstance(figures, dict) and figures.keys() >= TOLD and _is_line(line)


def _is_line(line: Any) -> bool:
    try:
        return line is None or bool(line_of({"line": line}))
    except (ValueError, TypeError):
        return False


def looked(folders: Iterable[Path], key: dict[str, Any]) -> dict[str, Any] | None:
    """The look that one of these runs has, if it has been taken already."""
    return next((each for folder in folders for each in looks(folder) if each["ask"] == key), None)


def note_look(folders: Iterable[Path], key: dict[str, Any], found: Figures, line: Result | None) -> dict[str, Any]:
    """Args: line: None for a look that is to have none."""
    stored = None if line is None else json.loads(line.line())
    look = {"ask": key, "figures": found, "line": stored, "told": False}
    share(folders, look)
    return look


def share(folders: Iterable[Path], look: dict[str, Any]) -> None:
    """Stores a look in all of these runs, in place of what they have of it."""
    for folder in folders:
        found = looks(folder)
        others = [each for each in found if each["ask"] != look["ask"]]
        if look not in found:
            write_json(folder / "looks.json", {"looks": [*others, look]})


def line_of(look: dict[str, Any]) -> Result:
    return from_line(json.dumps(look["line"]))


def tell(folders: Iterable[Path], look: dict[str, Any], path: Path, line: Result) -> None:
    """Adds a look's line, unless the file has it."""
    add_line(path, line)
    share(folders, {**look, "told": True})


def reads_of(folder: Path, data: str = "") -> int:
    """How often a test set has been read for a run: its own, readings that were cut short and those after each epoch
    among them, or that of other data."""
    own = {} if data else read_json(folder / "reading.json") or {}
    return own.get("begun", 0) + own.get("epochs", 0) + len(looks(folder, data))
