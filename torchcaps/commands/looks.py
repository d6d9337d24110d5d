"""Looks at the test set, each of them counted.

What a run said of the test set when it ended is stored with it and looked up. Whatever else is asked of the test set
is counted, by `counted` and in the line that the results get.
"""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchcaps import recipes
from torchcaps.commands.ask import Ask, Found, answer
from torchcaps.commands.counted import line_of, looked, looks, note_look, reads_of, tell
from torchcaps.commands.words import results_file
from torchcaps.data import DataSet
from torchcaps.evaluate import Figures, Predictions, figures
from torchcaps.finish import add_line, figures_of, finish, result_of
from torchcaps.models.pretrained import find_pretrained
from torchcaps.recipes import Recipe
from torchcaps.results import Result, check_ledger, checksums, from_line, read
from torchcaps.runs import (
    Opened,
    check_finished,
    check_run,
    is_exported,
    look,
    open_run,
    read_json,
    read_recipe,
)
from torchcaps.train import checkpoint

OF_A_LOOK = (
    "recipe",
    "data",
    "test",
    "test_last",
    "test_reads",
    "validation",
    "look",
    "commit",
    "dirty",
    "environment",
    "finished",
)


def check(folder: Path, ask: Ask) -> Ask:
    """Refuses what cannot be asked, before anything is read or written; gives what is asked beyond a run's own test."""
    if ask.results and ask.images is not None:
        raise ValueError(f"a test of {ask.images} images gets no line; leave --results or --images out")
    if is_exported(folder):
        ask = ask.of(_trained_by(folder))
        if ask.results:
            if ask.plain or ask.split == "validation":
                raise ValueError(
                    f"{folder} is no run, so there is no line to add to {ask.results}; leave --results out"
                )
            check_ledger(ask.results)
            _result(folder)
        return ask
    check_run(folder)
    if ask.epoch is None:
        check_finished(folder)
    if ask.results and ask.split == "validation":
        raise ValueError("a look at held-out images gets no line; leave --results out")
    check_ledger(ledger(folder, ask))
    if ask.epoch is not None and ask.epoch == (read_json(folder / "final.json") or {}).get("selected_epoch"):
        ask = replace(ask, epoch=None)
    return ask.of(read_recipe(folder)[0])


def ledger(folder: Path, ask: Ask) -> Path:
    return Path(ask.results) if ask.results else results_file(name_of(folder)[0], folder)


def name_of(folder: Path) -> tuple[str, str]:
    """Table and row of a run; of one that another program trained, its data and model."""
    about = read_json(folder / "row.json") or {}
    if {"table", "row"} <= about.keys():
        return str(about["table"]), str(about["row"])
    recipe, _ = read_recipe(folder)
    return recipe.data, recipe.model


def single(folder: Path, ask: Ask) -> Found:
    if is_exported(folder):
        return exported(folder, ask)
    if ask.split == "validation":
        return on_validation(folder, ask)
    if not ask.plain:
        return further(folder, ask)
    stored = (folder / "test.json").exists()
    line = tested(folder, ask)
    return _found(folder, ask, line.test, line.epoch, stored)


def exported(folder: Path, ask: Ask) -> Found:
    """Of weights that were handed on. They are looked at anew, and nothing is written: their own run has the count.

    What they are asked for beyond their own test can be a line, if a file is named for it.
    """
    opened = open_run(folder, device=ask.device, epoch=ask.epoch)
    recipe, data = ask.recipe(opened.recipe), ask.load(opened)
    if ask.split == "validation":
        found = figures(validation_predictions(opened, data, recipe, ask))
    else:
        found = figures_of(look(opened.model, data.test, data, recipe, ask.images), data.test)
        if ask.results:
            _note_exported(folder, ask, recipe, checksums(data.splits()), found)
    return answer(str(folder), ask, found, opened.epoch, None, False)


def _note_exported(folder: Path, ask: Ask, recipe: Recipe, data: dict[str, str], found: Figures) -> None:
    """A line of the look, unless the file has it."""
    own = _result(folder)
    of_training = {name: value for name, value in vars(own).items() if name not in OF_A_LOOK}
    run = attrgetter("table", "row", "seed", "members", "epochs", "selected", "look")
    of_look = {"recipe": recipe.to_dict(), "data": data, "test": found, "look": True}
    line = from_line(Result.now(**of_training, **of_look).line())
    there = [other for other in read(ask.results) if run(other) == run(line) and other.data.get("test") == data["test"]]
    if all(other.recipe != line.recipe for other in there):
        reads = 1 + len(there) + own.test_reads * (not ask.data)
        add_line(ask.results, replace(line, test_reads=reads))


def _trained_by(folder: Path) -> Recipe:
    """How exported weights were trained."""
    about = find_pretrained(folder).about
    try:
        return recipes.from_dict(about["result"]["recipe"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not say how its weights were trained: {error}") from None


def _result(folder: Path) -> Result:
    """The line of exported weights' test."""
    about = find_pretrained(folder).about
    try:
        return from_line(json.dumps(about["result"]))
    except ValueError as error:
        raise ValueError(f"{folder} does not have the line of its test: {error}") from None


def tested(folder: Path, ask: Ask) -> Result:
    """A run's own result; the test set is read if it has not been yet, and only then is there a line to add."""
    table, row = name_of(folder)
    reads = 1 + len(looks(folder, ""))
    results = None if (folder / "result.json").exists() and not ask.results else ledger(folder, ask)
    return finish(folder, table=table, row=row, results=results, reads=reads, device=ask.device)


def on_validation(folder: Path, ask: Ask) -> Found:
    stored = read_json(folder / "validation.json") if ask.plain else None
    opened = open_run(folder, device=ask.device, epoch=ask.epoch)
    found: Any = stored["figures"] if stored else None
    if found is None:
        found = figures(validation_predictions(opened, ask.load(opened), ask.recipe(opened.recipe), ask))
    return _found(folder, ask, found, opened.epoch, stored is not None)


def validation_predictions(opened: Opened, data: DataSet, recipe: Recipe, ask: Ask) -> Predictions:
    if data.validation is None:
        raise ValueError(f"{opened.folder} was trained without a validation set; --validation 0.1 holds one out")
    return look(opened.model, data.validation, data, recipe, ask.images)


def further(folder: Path, ask: Ask) -> Found:
    """A look at a test set that a run does not make by itself: counted, stored, and a line of the results."""
    with checkpoint.locked(folder):
        opened = open_run(folder, device=ask.device, epoch=ask.epoch)
        alone = _one_view(folder, ask)
        if alone is not None:
            if ask.results:
                raise ValueError(f"what one view has stands in the line of {folder} itself; leave --results out")
            return _found(folder, ask, alone, opened.epoch, True)
        known = looked([folder], ask.key())
        stored = known is not None
        if known is None:
            recipe, data = ask.recipe(opened.recipe), ask.load(opened)
            found = figures_of(look(opened.model, data.test, data, recipe, ask.images), data.test)
            changes: dict[str, Any] = {"recipe": recipe.to_dict(), "test": found, "look": True}
            changes["test_reads"] = 1 + reads_of(folder, ask.data)
            if ask.epoch is not None:
                changes |= {"epochs": ask.epoch, "selected": "last"}
            line = None if ask.images is not None else result_of(opened, data, *name_of(folder), **changes)
            known = note_look([folder], ask.key(), found, line)
        if known.get("line") and (ask.results or not known["told"]):
            tell([folder], known, ledger(folder, ask), line_of(known))
        return _found(folder, ask, known["figures"], opened.epoch, stored)


def _one_view(folder: Path, ask: Ask) -> Figures | None:
    """Where several views count, a run has looked at each image alone as well, in the same reading."""
    if ask != replace(ask, crops=1, data="", protocol="", epoch=None, images=None):
        return None
    found: Figures = (read_json(folder / "test.json") or {"figures": {}})["figures"]
    return found.get("one_view")


def _found(folder: Path, ask: Ask, found: Figures, epoch: int | None, stored: bool) -> Found:
    reads = None if ask.split == "validation" else reads_of(folder, ask.data)
    return answer(str(folder), ask, found, epoch, reads, stored)
