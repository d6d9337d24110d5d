"""Looks at the test set, each of them counted.

What a run said of the test set when it ended is stored with it and looked up. Whatever else is asked of the test set
is counted, in the run's looks.json and in the line that the results get.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchcaps import evaluate
from torchcaps.commands.words import choose, percent, results_file, times
from torchcaps.data import DataSet
from torchcaps.evaluate import Figures, Predictions, figures
from torchcaps.finish import append_line, figures_of, finish, load_predictions, result_of
from torchcaps.models.pretrained import find_pretrained
from torchcaps.recipes import TOLD, Recipe, with_overrides
from torchcaps.results import Result, checksums, from_line, read
from torchcaps.runs import (
    Opened,
    check_finished,
    check_run,
    is_exported,
    look,
    open_run,
    read_json,
    read_recipe,
    write_json,
)
from torchcaps.train import checkpoint
from torchcaps.train.prepare import load_data

OF_A_LOOK = (
    "recipe",
    "data",
    "test",
    "test_last",
    "test_reads",
    "validation",
    "commit",
    "dirty",
    "environment",
    "finished",
)


@dataclass
class Found:
    """Figures of a run or of an ensemble, and where they are from."""

    run: str
    split: str
    figures: Figures
    epoch: int | None
    test_reads: int | None  # None for validation
    stored: bool
    data: str | None = None
    protocol: str | None = None
    crops: int | None = None
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """What is asked of a run, but for its folder."""

    split: str
    data: str
    protocol: str
    crops: int | None
    epoch: int | None
    images: int | None
    device: str
    results: str

    @property
    def plain(self) -> bool:
        """Whether this is what a run stores of itself."""
        asked = (self.crops, self.epoch, self.images)
        return not self.data and not self.protocol and asked == (None, None, None)

    def key(self) -> dict[str, Any]:
        other = {"data": self.data} if self.data else {}
        protocol = self.protocol or None
        return {**other, "protocol": protocol, "crops": self.crops, "epoch": self.epoch, "images": self.images}

    def recipe(self, recipe: Recipe) -> Recipe:
        words = {"data": self.data, "protocol": self.protocol}
        changes: dict[str, Any] = {name: word for name, word in words.items() if word}
        if self.crops is not None:
            changes["data_args.crops"] = self.crops
        return with_overrides(recipe, changes)

    def load(self, opened: Opened) -> DataSet:
        """What is asked for, if it has the classes of the network."""
        data = load_data(self.recipe(opened.recipe))
        if self.data and data.class_names != opened.class_names:
            raise ValueError(f"{opened.folder} tells other classes apart than those of {self.data}")
        return data

    def ledger(self, folder: Path) -> Path:
        return Path(self.results) if self.results else results_file(name_of(folder)[0], folder)


def check(folder: Path, ask: Ask) -> None:
    """Refuses what cannot be asked, before anything is read or written."""
    if is_exported(folder):
        if ask.results:
            if ask.plain or ask.split == "validation" or ask.images is not None:
                raise ValueError(
                    f"{folder} is no run, so there is no line to add to {ask.results}; leave --results out"
                )
            read(ask.results)
        return
    check_run(folder)
    if ask.epoch is None:
        check_finished(folder)
    read(ask.ledger(folder))


def name_of(folder: Path) -> tuple[str, str]:
    """Table and row of a run; of one that another program trained, its data and model."""
    about = read_json(folder / "row.json")
    if about:
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
            own = from_line(json.dumps(find_pretrained(folder).about["result"]))
            changes: dict[str, Any] = {"recipe": recipe.to_dict(), "data": checksums(data.splits()), "test": found}
            of_training = {name: value for name, value in vars(own).items() if name not in OF_A_LOOK}
            append_line(Path(ask.results), Result.now(**of_training, **changes, test_reads=own.test_reads + 1))
    return Found(
        str(folder), ask.split, found, opened.epoch, None, False, ask.data or None, ask.protocol or None, ask.crops
    )


def tested(folder: Path, ask: Ask) -> Result:
    """A run's own result; the test set is read if it has not been yet, and only then is there a line to add."""
    table, row = name_of(folder)
    reads = 1 + len(looks(folder))
    results = None if (folder / "result.json").exists() and not ask.results else ask.ledger(folder)
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
    """A look at the test set that a run does not make by itself: counted, stored, and a line of the results."""
    with checkpoint.locked(folder):
        opened = open_run(folder, device=ask.device, epoch=ask.epoch)
        known = looked(folder, ask.key()) or _one_view(folder, ask)
        if known is not None:
            return _found(folder, ask, known, opened.epoch, True)
        recipe, data = ask.recipe(opened.recipe), ask.load(opened)
        found = figures_of(look(opened.model, data.test, data, recipe, ask.images), data.test)
        note_look(folder, ask.key(), found)
        if ask.images is None:
            table, row = name_of(folder)
            changes: dict[str, Any] = {"recipe": recipe.to_dict(), "test": found, "test_reads": reads_of(folder)}
            if ask.epoch is not None:
                changes |= {"epochs": ask.epoch, "selected": "last"}
            append_line(ask.ledger(folder), result_of(opened, data, table, row, **changes))
        return _found(folder, ask, found, opened.epoch, False)


def _one_view(folder: Path, ask: Ask) -> Figures | None:
    """Where several views count, a run has looked at each image alone as well, in the same reading."""
    if ask != replace(ask, crops=1, data="", protocol="", epoch=None, images=None):
        return None
    found: Figures = (read_json(folder / "test.json") or {"figures": {}})["figures"]
    return found.get("one_view")


def together(folders: list[Path], members: int | None, ask: Ask, row: str = "") -> Found:
    """An ensemble by summed lengths. What its members said of the test set is stored, so it need not be read again.

    Args:
        row: whose line this is; if not given, that of the members, where they are all of one recipe.
    """
    for folder in filter(is_exported, folders):
        raise ValueError(f"{folder} is no run folder, and an ensemble is one of runs")
    names = {_short(folder): folder for folder in folders}
    if len(names) < len(folders):
        names = {str(folder): folder for folder in folders}
    opened = {name: open_run(folder, device=ask.device) for name, folder in names.items()}
    first = next(iter(opened.values()))
    for name, other in opened.items():
        if other.class_names != first.class_names:
            raise ValueError(f"{name} tells other classes apart than {next(iter(opened))}, so they are no ensemble")
    named = choose(row, {}) if row else None
    if named is not None and named.recipe.data != first.recipe.data:
        raise ValueError(f"{row} is of {named.recipe.data}, and these networks are of {first.recipe.data}")
    data = {name: ask.load(each) for name, each in opened.items()}
    chosen = tuple(opened)
    if members is not None:
        seen = {n: validation_predictions(each, data[n], ask.recipe(each.recipe), ask) for n, each in opened.items()}
        chosen = evaluate.choose_members(seen, members)
    key = {"ensemble": sorted(chosen), **ask.key()}
    known = [looked(names[name], key) for name in chosen]
    if known[0] is not None and all(each == known[0] for each in known):
        return _ensemble(names, chosen, ask, known[0], stored=True)
    said = []
    for name in chosen:
        if ask.plain:
            tested(names[name], replace(ask, results=""))  # its line is where it was trained
            said.append(load_predictions(names[name] / "predictions.safetensors"))
        else:
            recipe = ask.recipe(opened[name].recipe)
            said.append(look(opened[name].model, data[name].test, data[name], recipe, ask.images))
    found = figures(evaluate.ensemble(said))
    for name in chosen:
        note_look(names[name], key, found)
    answer = _ensemble(names, chosen, ask, found, stored=False)
    lead = opened[chosen[0]]
    alike = all(opened[name].recipe == lead.recipe for name in chosen)
    if named is not None or alike:
        table, word = name_of(lead.folder) if named is None else (named.table, named.row)
        recipe = lead.recipe
        if named is not None:
            own = {name: getattr(named.recipe, name) for name in TOLD}
            recipe = replace(lead.recipe, **own) if alike else named.recipe
        more = {"recipe": ask.recipe(recipe).to_dict(), "members": chosen, "test_reads": answer.test_reads}
        more["chosen_from"] = None if members is None else len(folders)
        more |= _costs([names[name] for name in chosen])
        if not alike:
            more |= _length([names[name] for name in chosen])
        append_line(ask.ledger(lead.folder), result_of(lead, data[chosen[0]], table, word, test=found, **more))
    return answer


def looks(folder: Path) -> list[dict[str, Any]]:
    """All that has been asked of the test set for a run beyond its own test."""
    found = (read_json(folder / "looks.json") or {"looks": []})["looks"]
    return list(found)


def looked(folder: Path, key: dict[str, Any]) -> Figures | None:
    return next((each["figures"] for each in looks(folder) if each["ask"] == key), None)


def note_look(folder: Path, key: dict[str, Any], found: Figures) -> None:
    write_json(folder / "looks.json", {"looks": [*looks(folder), {"ask": key, "figures": found}]})


def reads_of(folder: Path) -> int:
    """How often the test set has been read for a run, readings that were cut short among them."""
    return (read_json(folder / "reading.json") or {"begun": 0})["begun"] + len(looks(folder))


def _found(folder: Path, ask: Ask, found: Figures, epoch: int | None, stored: bool) -> Found:
    reads = None if ask.split == "validation" else reads_of(folder)
    how = ask.data or None, ask.protocol or None, ask.crops
    return Found(str(folder), ask.split, found, epoch, reads, stored, *how)


def _ensemble(names: dict[str, Path], chosen: tuple[str, ...], ask: Ask, found: Figures, stored: bool) -> Found:
    """Its own reads are those for any ensemble that one of the members was in."""
    reads = max(sum("ensemble" in each["ask"] for each in looks(names[name])) for name in chosen)
    how = ask.data or None, ask.protocol or None, ask.crops
    return Found("ensemble", "test", found, None, reads, stored, *how, chosen)


def _costs(folders: list[Path]) -> dict[str, Any]:
    """What an ensemble's members took in all; it has no epochs of its own."""
    ends = [read_json(folder / "final.json") or {} for folder in folders]
    sums: dict[str, Any] = {"epoch": None, "steps": None, "together": 1, "curves": {}}
    for name, key in (("seconds", "seconds"), ("energy", "joules")):
        values = [end.get(key) for end in ends]
        sums[name] = None if None in values else sum(values)
    return sums


def _length(folders: list[Path]) -> dict[str, int]:
    """The epochs of members of several rows: of one that was cut short, if any, else of the longest."""
    lines = [read_json(folder / "result.json") for folder in folders]
    lengths = [(line["epochs"], line["planned"]) for line in lines if line]
    if not lengths:
        return {}
    epochs, planned = min(lengths, key=lambda length: (length[0] / length[1], -length[0]))
    return {"epochs": epochs, "planned": planned}


def told(found: Found) -> str:
    numbers = found.figures
    what = f"ensemble of {', '.join(found.members)}" if found.members else found.run
    words = [f"error {percent(numbers['error'])} ± {percent(numbers['standard_error'])}"]
    if "per_digit_error" in numbers:
        words = [f"exact match {words[0]}", f"per digit {percent(numbers['per_digit_error'])}"]
        words.append(f"at least one {percent(numbers['at_least_one_error'])}")
    words.append(f"calibration error {percent(numbers['calibration_error'])}")
    how = [f"epoch {found.epoch}"] if found.epoch is not None else []
    how += [f"data {found.data}"] if found.data else []
    how += [f"protocol {found.protocol}"] if found.protocol else []
    how += [f"{found.crops} crop{'s' * (found.crops != 1)}"] if found.crops is not None else []
    of = f" of {numbers['images']:,} images"
    told = f"{what}{' (' + ', '.join(how) + ')' if how else ''}: {found.split} {', '.join(words)},{of}"
    if found.test_reads is None:
        return told
    stored = "as stored; " if found.stored else ""
    return f"{told} ({stored}the test set has been read {times(found.test_reads)} for this)"


def as_json(found: list[Found]) -> str:
    return json.dumps([asdict(each) for each in found], indent=2)


def _short(folder: Path) -> str:
    """As the results name a member: without the places that one machine has it in."""
    folder = folder.resolve()
    return f"{folder.parent.name}/{folder.name}"
