"""A figure of the catalogue as files: NAME.png and NAME.svg, NAME.json with its numbers, NAME.gif where it moves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.figures.kind import RUNS, Kind, resolve
from torchcaps.figures.style import need_matplotlib, png, svg
from torchcaps.runs import Opened
from torchcaps.train import checkpoint


@dataclass(frozen=True)
class Drawn:
    """A kind with its numbers as JSON gives them back, so that all drawings are made of what the file holds."""

    kind: Kind
    numbers: dict[str, Any]
    runs: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None

    def png(self, dark: bool = False) -> bytes:
        return png(resolve(self.kind.draw)(self.numbers, dark=dark))

    def gif(self, dark: bool = False) -> bytes | None:
        return resolve(self.kind.animate)(self.numbers, dark=dark) if self.kind.animate else None

    def json(self) -> bytes:
        about = {
            "figure": self.kind.name,
            "paper": self.kind.paper,
            "runs": list(self.runs),
            "options": dict(self.options or {}),
            "numbers": self.numbers,
        }
        return json.dumps(about, indent=1, allow_nan=False).encode() + b"\n"

    def files(self, dark: bool = False) -> dict[str, bytes]:
        """Their contents by the ends of their names."""
        figure = resolve(self.kind.draw)(self.numbers, dark=dark)
        made = {".png": png(figure), ".svg": svg(figure), ".json": self.json()}
        moving = self.gif(dark)
        return made if moving is None else {**made, ".gif": moving}

    def write(self, folder: Path, files: Mapping[str, bytes]) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.kind.name}{end}" for end in files]
        for path, content in zip(paths, files.values(), strict=True):
            checkpoint.write(path, content)
        return paths


def take_numbers(kind: Kind, runs: Sequence[Opened], given: Mapping[str, Any] | None = None) -> Drawn:
    """Takes a figure's numbers from runs.

    Args:
        given: options other than the kind's own values for them.
    """
    need_matplotlib()
    check_runs(kind, len(runs))
    given = dict(given or {})
    for name in given:
        if name not in kind.options:
            there = f"it has {', '.join(kind.options)}" if kind.options else "it has none"
            raise ValueError(f"the figure {kind.name} has no option {name!r}; {there}")
    options = {**kind.options, **given}
    numbers = _plain(resolve(kind.numbers)(list(runs), dict(options)))
    return Drawn(kind, numbers, tuple(str(run.folder) for run in runs), _plain(options))


def check_runs(kind: Kind, count: int) -> None:
    least, most = RUNS[kind.runs]
    if not least <= count <= most:
        words = {"none": "no run", "one": "one run", "two": "two runs", "several": "one run or more"}
        raise ValueError(f"the figure {kind.name} takes {words[kind.runs]}, got {count}")


def read_drawn(path: Path, kinds: Mapping[str, Kind]) -> Drawn:
    """A figure from its JSON alone."""
    try:
        about = json.loads(path.read_text())
        kind, numbers, runs, options = kinds[about["figure"]], about["numbers"], about["runs"], about["options"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path} holds no figure; torchcaps figure NAME RUN writes such files") from None
    if not isinstance(numbers, dict):
        raise ValueError(f"{path} holds no figure; torchcaps figure NAME RUN writes such files")
    return Drawn(kind, numbers, tuple(map(str, runs)), options)


def _plain(value: Any) -> Any:
    """As JSON would give it back, with None for what is no number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
