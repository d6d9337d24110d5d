"""What tells runs apart: their options and iterations, and a name for each that says no more than it must."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.registry import find_preset
from torchcaps.routing import InvertedAttentionRouting
from torchcaps.runs import Opened

UNSAID = {"reported", "assumed", "note", "seeds", "keep_epochs"}  # fields that do not change what is trained
SAID = {"model", "model_args", "data"}  # fields that a name has in words of its own


def names_of(runs: Sequence[Opened], apart: Sequence[str] = ()) -> list[str]:
    """A name for each run: its model, and the options in which it differs from other runs of that model.

    Where that does not tell them apart, other settings do, else their seeds, else the ends of their folders' names.

    Args:
        apart: options that are not told.
    """
    options = [options_of(run) for run in runs]
    models = [run.recipe.model for run in runs]
    found = _told_apart(models, [{k: v for k, v in each.items() if k not in apart} for each in options])
    if len({run.recipe.data for run in runs}) > 1:
        found = [f"{name} on {run.recipe.data}" for name, run in zip(found, runs, strict=True)]
    if len(set(found)) < len(found):
        fields = [asdict(run.recipe) for run in runs]
        found = _told_apart(found, [{k: v for k, v in each.items() if k not in UNSAID | SAID} for each in fields])
    if len(set(found)) < len(found):
        found = [f"{name}, seed {run.seed}" for name, run in zip(found, runs, strict=True)]
    return found if len(set(found)) == len(found) else _folders(runs)


def options_of(run: Opened) -> dict[str, Any]:
    """All options of a run's model, those it was not given as they are otherwise."""
    options = {**find_preset(run.recipe.model).options, **dict(run.recipe.model_args)}
    if "iterations" in options:
        options["iterations"] = iterations_of(run.model)
    return options


def but_for_iterations(run: Opened) -> str:
    """The same for runs whose recipes differ in their iterations and seeds alone, and in what is said of them."""
    fields = {key: value for key, value in asdict(run.recipe).items() if key not in UNSAID}
    fields["model_args"] = {key: value for key, value in fields["model_args"].items() if key != "iterations"}
    return json.dumps(fields, sort_keys=True, default=str)


def iterations_of(network: Any) -> int:
    """How often votes are routed: the most that any layer or stack of the network says, 1 where none does."""
    counts = [getattr(module, "iterations", 1) for module in network.modules()]
    return max((count for count in counts if isinstance(count, int)), default=1)


def with_iterations(network: nn.Module, iterations: int) -> nn.Module:
    """A copy that routes so often; refuses a network whose routing has no iterations."""
    copied = copy.deepcopy(network)
    changed = False
    for module in copied.modules():
        inverted = isinstance(module, InvertedAttentionRouting)
        if isinstance(module, CapsuleStack):
            continue
        if isinstance(getattr(module, "iterations", None), int) and not (inverted and module.iterations == 1):
            module.iterations = iterations  # type: ignore[assignment]
            changed = True
    for module in copied.modules():
        steps = isinstance(module, CapsuleStack) and any(
            isinstance(m, InvertedAttentionRouting) for m in module.modules()
        )
        if steps and not changed:
            module.iterations = iterations  # type: ignore[assignment]
            changed = True
    if not changed:
        raise ValueError("this network routes without iterations, so there is nothing to count by them")
    return copied


def _told_apart(names: Sequence[str], values: Sequence[dict[str, Any]]) -> list[str]:
    """Each name with the values in which it differs from others of that name."""
    found = []
    for name, own in zip(names, values, strict=True):
        others = [each for other, each in zip(names, values, strict=True) if other == name]
        differing = [key for key in own if len({str(each.get(key)) for each in others}) > 1]
        found.append(", ".join([name, *(f"{key.replace('_', ' ')} {_word(own[key])}" for key in differing)]))
    return found


def _folders(runs: Sequence[Opened]) -> list[str]:
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(runs):
            return names
    return [f"{each[-1]}, {k}" for k, each in enumerate(parts, 1)]


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_word(each)}" for key, each in value.items())
    return " x ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
