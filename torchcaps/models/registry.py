"""Presets by name. A preset is a function; its keyword defaults are the paper's network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from torchcaps.types import Image, ImageTooSmall

BUDGET = 1_000_000_000  # weights a network may have before `create_model` asks whether that was meant


@dataclass(frozen=True)
class Preset:
    name: str
    build: Callable[..., nn.Module]
    paper: str
    parameters: str  # as the paper prints them, "" where it does not
    operations: str  # the same, as in Mazzia's Table 1

    @property
    def options(self) -> dict[str, Any]:
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}


_presets: dict[str, Preset] = {}


def register(paper: str, parameters: str = "", operations: str = "") -> Callable[[Callable], Callable]:
    """Makes a function that builds a network available by its own name."""

    def add(build: Callable) -> Callable:
        _presets[build.__name__] = Preset(build.__name__, build, paper, parameters, operations)
        return build

    return add


def variant(build: Callable, **defaults: Any) -> Callable[[Callable], Callable]:
    """A preset with all options of another and these defaults; the function it decorates is its docstring."""
    bound = partial(build, **defaults)

    def decorate(preset: Callable) -> Callable:
        @wraps(preset)
        def call(**options: Any) -> nn.Module:
            return bound(**options)

        call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
        return call

    return decorate


def list_models(pattern: str = "*") -> list[str]:
    """Names of the presets that match a shell pattern, in order."""
    return sorted(name for name in _presets if fnmatch(name, pattern))


def find_preset(name: str) -> Preset:
    if not isinstance(name, str):
        raise ValueError(f"a preset is asked for by name, got {name!r}")
    if name not in _presets:
        near = get_close_matches(name, _presets, n=4, cutoff=0.4) or list_models(f"*{name.split('_')[0]}*")[:4]
        hint = f"did you mean {', '.join(near)}?" if near else "list_models() has them all"
        raise ValueError(f"there is no preset {name!r}; {hint}")
    return _presets[name]


def create_model(name: str, *, pretrained: bool = False, budget: int = BUDGET, **options: Any) -> nn.Module:
    """Builds a preset. Options are the preset's own keywords; all take `image` and `classes`.

    Args:
        pretrained: with trained weights that come with the package, in evaluation mode; the name may then be that of
            any such weights, and options must fit them.
        budget: the most weights it may have; the network is measured before any memory is taken.
    """
    if pretrained:
        from torchcaps.models.pretrained import find_shipped, shipped

        if name not in shipped():
            find_preset(name)
        return find_shipped(name).load(**options)
    preset = find_preset(name)
    _check_options(preset, options)
    options = {"image": tuple(options.pop("image", preset.options["image"])), **options}
    image = options["image"]
    try:
        count = count_on_meta(preset, options)
    except ImageTooSmall:
        raise ValueError(
            f"{name} cannot take image {_by(image)}, which is too small{_smallest_that_fits(preset, options, image)}"
        ) from None
    if count > budget:
        raise ValueError(
            f"{name} for image {_by(image)} and {options.get('classes', preset.options['classes'])} classes would have "
            f"{count:,} weights, more than the budget of {budget:,}{_largest_that_fits(preset, options, image, budget)}"
        )
    return preset.build(**options)


def count_on_meta(preset: Preset, options: dict[str, Any]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in preset.build(**options).parameters())


def _check_options(preset: Preset, options: dict[str, Any]) -> None:
    for option in options:
        if option not in preset.options:
            near = get_close_matches(option, preset.options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(preset.options)}"
            raise ValueError(f"{preset.name} has no option {option!r}; {hint}")
        _check_type(option, options[option], preset.options[option])
    image = options["image"] if "image" in options else preset.options["image"]
    if not (isinstance(image, tuple | list) and len(image) == 3 and all(isinstance(n, int) and n > 0 for n in image)):
        raise ValueError(f"image must be three positive integers (channels, height, width), got {image!r}")
    classes = options.get("classes", preset.options["classes"])
    if not isinstance(classes, int) or classes < 1:
        raise ValueError(f"classes must be a positive integer, got {classes!r}")


def _check_type(option: str, value: Any, default: Any) -> None:
    """An option is of its default's kind; where that is a word or nothing, modules and classes may come too."""
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "True or False"
    elif isinstance(default, int):
        fits, kind = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(default, float):
        fits, kind = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif isinstance(default, tuple):
        fits, kind = value is None or isinstance(value, tuple | list), "a sequence"
    elif isinstance(default, str):
        fits, kind = value is None or not isinstance(value, int | float), "a word, or a part of your own"
    else:
        return
    if not fits:
        raise ValueError(f"{option} must be {kind}, got {value!r}")


def _smallest_that_fits(preset: Preset, options: dict[str, Any], image: Image) -> str:
    for side in range(min(image[1:]) + 1, 513):
        try:
            count_on_meta(preset, {**options, "image": (image[0], max(side, image[1]), max(side, image[2]))})
        except ImageTooSmall:
            continue
        return f"; the smallest that fits has {side} x {side} pixels"
    return ""


def _largest_that_fits(preset: Preset, options: dict[str, Any], image: Image, budget: int) -> str:
    best, fits, too_large = 0, 0, max(image[1:])
    while too_large - fits > 1:
        side = (fits + too_large) // 2
        try:
            count = count_on_meta(preset, {**options, "image": (image[0], side, side)})
        except ImageTooSmall:
            fits = side
            continue
        if count <= budget:
            best = fits = side
        else:
            too_large = side
    return f"; the largest image that fits has {best} x {best} pixels" if best else "; no smaller image helps"


def _by(image: Image) -> str:
    return " x ".join(str(n) for n in image)
