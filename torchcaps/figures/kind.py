"""What a figure is: numbers taken from runs, plain enough for a JSON file, and a drawing made of them alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

RUNS = {"none": (0, 0), "one": (1, 1), "two": (2, 2), "several": (1, 100)}  # how many: at least, at most


@dataclass(frozen=True)
class Kind:
    """One figure of the catalogue. Where its functions are is said as "module:function", so that listing is cheap.

    Args:
        name: as `torchcaps figure NAME` takes it, in lower case with hyphens.
        title: of a few words, for the report.
        paper: whose figure it is, as "Sabour 2017, figure 4; Mazzia 2021, figure 7", or "" for one of our own.
        what: one sentence that says what there is to see.
        numbers: `numbers(runs: Sequence[Opened], options: dict) -> dict`, of values that json.dumps takes; pictures
            are base64 PNG strings (`pictures.packed`). A ValueError says in a sentence what a run lacks.
        draw: `draw(numbers: dict, *, dark: bool = False) -> Figure`, which gets what json.loads gives back.
        runs: "none", "one", "two" or "several" (one or more).
        needs: what a run must have, in a word or two each, such as "decoder", "two labels" or "routing log".
        options: what can be set, with the values it has otherwise; `numbers` gets all of them.
        animate: `animate(numbers: dict, *, dark: bool = False) -> bytes` of a GIF, where the figure moves; or "".
        wide: the drawing is better scrolled than made small on a phone.
    """

    name: str
    title: str
    paper: str
    what: str
    numbers: str
    draw: str
    runs: str = "one"
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    animate: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        if self.runs not in RUNS:
            raise ValueError(f"runs of {self.name} is one of {', '.join(RUNS)}, got {self.runs!r}")


def resolve(place: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
