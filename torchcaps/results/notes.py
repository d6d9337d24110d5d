"""What stands under a table: what a paper leaves open, and what a reader should know of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from torchcaps.data import protocols
from torchcaps.models import list_models
from torchcaps.models.registry import find_preset
from torchcaps.recipes import Recipe
from torchcaps.results import Result

LAST = re.compile(r"(?<!\d)(0|[1-9]\d*)\Z")  # a number that can be counted on from
AGAIN = "the test set was read more than once"
ELSEWHERE = "trained weights, tested on other data"
EARLIER = "the weights of another epoch than the run's own"


def latest(results: Iterable[Result]) -> tuple[list[Result], list[Result]]:
    """Of each seed, and of each ensemble, the last of these results; and those that they replace."""
    found: dict[Any, Result] = {}
    earlier = []
    for result in results:
        key = result.seed, result.members
        if key in found:
            earlier.append(found.pop(key))
        found[key] = result
    return list(found.values()), earlier


def remarks(runs: list[Result], earlier: Iterable[tuple[Result, str]] = ()) -> list[str]:
    """Args: earlier: runs that others of their seeds have replaced, with what they had."""
    said = [
        f"members{', chosen on validation' * bool(run.chosen_from)}: {in_short(run.members)}"
        for run in runs
        if run.members
    ]
    looked = any(run.look for run in runs)
    if runs and not looked and (at_once := max(run.together for run in runs)) > len(runs):
        have = "has" if len(runs) == 1 else "have"
        said.append(f"{at_once} were trained at once, of which {len(runs)} {have} a line")
    sampled = sorted({(run.test["images"], whole) for run in runs if (whole := run.test.get("sampled_from"))})
    said += [f"tested on {images:,} of {whole:,} images" for images, whole in sampled]
    dirty = sorted({run.commit[:7] for run in runs if run.dirty})
    if dirty:
        said.append(f"run with changes that commit {' and '.join(dirty)} does not have")
    if any(map(_chosen_on_test, runs)):
        said.append("the epoch was chosen on the test set, which was read after each")
    elif any(run.test_reads != 1 for run in runs):
        said.append(AGAIN)
    elif looked:
        said.append(EARLIER if any(run.kept for run in runs) else ELSEWHERE)
    said += [f"an earlier run of seed {run.seed} had {figure}" for run, figure in earlier]
    return said


def _chosen_on_test(run: Result) -> bool:
    return not run.look and run.selected == "best" and run.data.get("validation", ...) == run.data.get("test")


def spans(numbers: Iterable[int]) -> list[list[int]]:
    """In order, those without a gap in one list."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def in_short(members: Iterable[str]) -> str:
    """Names that differ in their last number alone are told as one: efficient/seed-0 to 15."""
    families: dict[tuple[str, bool], list[int]] = {}
    for name in members:
        number = LAST.search(name)
        start = name[: number.start()] if number else name
        families.setdefault((start, number is None), []).extend([int(number[0])] if number else [])
    told = []
    for (start, _), numbers in families.items():
        words = [f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans(numbers)]
        told.append(start + " and ".join(words))
    return ", ".join(told)


def assumed(recipe: Recipe) -> str:
    """What the paper leaves open: fields with the values taken, and the protocol's own words."""
    values, words = {**recipe.to_dict(), "validation": held_out(recipe)}, []
    for path in recipe.assumed:
        if path == "seeds":
            continue  # their number stands beside the figure
        name, _, key = path.partition(".")
        value = values.get(name, ...)
        if key:
            value = value.get(key, ...) if isinstance(value, dict) else ...
        if value is ... and name == "model_args" and recipe.model in list_models():
            options = find_preset(recipe.model).options
            if key not in options:
                continue
            value = options[key]
        words.append(path if value is ... else f"{path} = {word(value)}")
    protocol = protocol_of(recipe)
    sentences = [", ".join(words)] * bool(words) + list(() if protocol is None else protocol.assumed)
    return "assumed: " + "; ".join(sentences) if sentences else ""


def held_out(recipe: Recipe) -> float | str | None:
    """What is held out of the training images, the protocol's if the recipe leaves it to that; or "test"."""
    if recipe.validation is not None:
        return recipe.validation
    protocol = protocol_of(recipe)
    return None if protocol is None else protocol.validation


def protocol_of(recipe: Recipe) -> protocols.Protocol | None:
    if recipe.protocol is None:
        return None
    known = protocols.protocol_options(recipe.protocol)
    own = {name: value for name, value in recipe.data_args.items() if name in known}
    return protocols.find(recipe.protocol, recipe.data, **own)


def word(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)
