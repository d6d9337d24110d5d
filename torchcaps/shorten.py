"""A recipe in fewer epochs: its learning rate falls as far as in all of them, only sooner, and so for its margin.

>>> shortened(recipes.find("tsai2020_table1:inverted-resnet-cifar10"), 30).schedule_args["milestones"]
(13, 21)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import eq
from typing import Any

from torchcaps.recipes import DEFAULTS, Recipe

MOVED = (
    "schedule_args.every",
    "schedule_args.decay",
    "schedule_args.milestones",
    "optimizer_args.decay",
    "spread_steps",
)
ROUNDING = 5e-4  # of a decay with three or four digits


def shortened(recipe: Recipe, epochs: int, samples: int | None = None) -> Recipe:
    """With milestones, decays and the like moved by the same share, the spread loss's margin among them.

    Warm-ups and what is a share already stay.

    Args:
        samples: images in an epoch, where they are to be fewer as well.
    """
    if not 1 <= epochs <= recipe.epochs:
        raise ValueError(f"{recipe.epochs} epochs can be shortened to 1 and more of them, not to {epochs}")
    if samples is not None and not (recipe.samples and 1 <= samples <= recipe.samples):
        most = f"{recipe.samples:,} images" if recipe.samples else "all images of the training set"
        raise ValueError(f"an epoch of this recipe has {most}, so it cannot have {samples:,}")
    share = epochs / recipe.epochs
    of_steps = share * (1 if samples is None or recipe.samples is None else samples / recipe.samples)
    schedule: dict[str, Any] = dict(recipe.schedule_args)
    optimizer: dict[str, Any] = dict(recipe.optimizer_args)
    if "every" in schedule:
        schedule["every"] = max(1, round(of_steps * schedule["every"]))
    elif "decay" in schedule:
        schedule["decay"] = _rounded(schedule["decay"] ** (1 / share))
    if "milestones" in schedule:
        schedule["milestones"] = tuple(max(1, round(share * epoch)) for epoch in schedule["milestones"])
    if optimizer.get("decay"):
        optimizer["decay"] = _rounded(optimizer["decay"] / of_steps)
    grows = max(1, round(of_steps * recipe.spread_steps)) if recipe.loss == "spread" else recipe.spread_steps
    kept = tuple(epoch for epoch in recipe.keep_epochs if epoch <= epochs)
    return replace(
        recipe,
        epochs=epochs,
        samples=samples or recipe.samples,
        schedule_args=schedule,
        optimizer_args=optimizer,
        spread_steps=grows,
        keep_epochs=kept,
    )


def is_shortened(recipe: Recipe, ran: Mapping[str, Any], epochs: int, exactly: bool = False) -> bool:
    """Whether the learning rate of a run, with a recipe as `to_dict` gives it, falls as `shortened` has it.

    Args:
        exactly: or but for the rounding of its decay.
    """
    return epochs <= recipe.epochs and all(moved(recipe, ran, epochs, exactly).values())


def moved(recipe: Recipe, ran: Mapping[str, Any], epochs: int, exactly: bool = False) -> dict[str, bool]:
    """Of each path in MOVED, whether a run has it where `shortened` puts it for so many epochs, and images in them."""
    images = ran.get("samples")
    fewer = images if images and recipe.samples and images < recipe.samples else None
    wanted = shortened(recipe, epochs, fewer).to_dict()
    same = eq if exactly else _same
    return {path: same(_at(path, wanted), _at(path, ran)) for path in MOVED}


def _at(path: str, recipe: Mapping[str, Any]) -> Any:
    name, _, key = path.partition(".")
    return recipe.get(name, {}).get(key) if key else recipe.get(name, DEFAULTS.get(name))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ROUNDING)
    return bool(one == other)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
