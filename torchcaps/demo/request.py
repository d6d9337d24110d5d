"""What the page asks for, checked before anything is done with it: it may come from anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TURN, SHIFT, APART = 360.0, 100.0, 100.0  # degrees and pixels, either way


@dataclass(frozen=True)
class Request:
    """`source` says where the picture comes from, `capsule` which class is looked into, None for the longest.

    `bend` has the sliders from -1 to 1; one beyond an end is held there.
    """

    source: Mapping[str, Any]
    capsule: int | None
    bend: tuple[float, ...]
    turn: float
    right: float
    down: float


def check(asked: Any, classes: int) -> Request:
    """The request, or a sentence for what is wrong with it."""
    asked = names(asked, "a request")
    source = names(asked.get("source") or {}, "the source of a picture")
    bend = asked.get("bend") or []
    if not isinstance(bend, list | tuple):
        raise ValueError(f"bend is a list of numbers from -1 to 1, got {said(bend)}")
    return Request(
        source,
        None if asked.get("capsule") is None else place(asked["capsule"], classes, "capsule"),
        tuple(max(-1.0, min(1.0, number(value, "a slider", math.inf))) for value in bend),
        number(asked.get("turn") or 0, "turn", TURN),
        number(asked.get("right") or 0, "right", SHIFT),
        number(asked.get("down") or 0, "down", SHIFT),
    )


def names(asked: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(asked, Mapping):
        raise ValueError(f"{what} has names with values, got {said(asked)}")
    return asked


def model_of(asked: Any) -> str | None:
    """The network's name, None where the page has not been told any yet."""
    model = names(asked, "a request").get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"a network goes by its name, got {said(model)}")
    return model


def place(value: Any, count: int, what: str) -> int:
    """One of so many, counted from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        there = f"there are {count}, counted from 0" if count else "there is none"
        raise ValueError(f"there is no {what} {said(value)} to choose; {there}")
    return value


def number(value: Any, what: str, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or abs(value) > most:
        among = f" from {-most:g} to {most:g}" if most < math.inf else ""
        raise ValueError(f"{what} is a number{among}, got {said(value)}")
    return float(value)


def said(value: Any) -> str:
    """Short enough to stand in a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
