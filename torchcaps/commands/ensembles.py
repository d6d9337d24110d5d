"""Networks that have been trained one by one, tested together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcaps import evaluate
from torchcaps.commands.ask import Ask, Found, answer
from torchcaps.commands.counted import line_of, looked, looks, note_look, share, tell
from torchcaps.commands.looks import name_of, tested, validation_predictions
from torchcaps.commands.words import Row, choose, results_file
from torchcaps.data import DataSet
from torchcaps.evaluate import Predictions
from torchcaps.finish import figures_of, load_predictions, result_of
from torchcaps.recipes import TOLD, Recipe
from torchcaps.results import Result, check_ledger
from torchcaps.runs import Opened, is_exported, look, open_run, read_json
from torchcaps.train import checkpoint


def together(folders: list[Path], members: int | None, ask: Ask, row: str = "") -> Found:
    """An ensemble by summed lengths. What its members said of the test set is stored, so it need not be read again.

    Args:
        row: whose line this is; if not given, that of the members, where they are all of one recipe.
    """
    opened = _opened(folders, ask)
    named = _named(row, opened) if row else None
    data = {name: ask.load(each) for name, each in opened.items()}
    chosen = tuple(opened)
    if members is not None:
        seen = {n: validation_predictions(each, data[n], ask.recipe(each.recipe), ask) for n, each in opened.items()}
        chosen = evaluate.choose_members(seen, members)
    names = sorted(chosen)
    networks = [opened[name] for name in names]
    places = [each.folder for each in networks]
    alike = all(each.recipe == networks[0].recipe for each in networks)
    if ask.results and not alike and named is None:
        raise ValueError(f"{' and '.join(names)} differ in recipe, so their line needs a row; name it by --row")
    table = name_of(places[0])[0] if named is None else named.table
    path = Path(ask.results) if ask.results else results_file(table, places[0])
    check_ledger(path)
    if ask.plain:
        for folder in places:
            if not (folder / "result.json").exists():
                tested(folder, replace(ask, results=""))  # its line is where it was trained
    weights = [hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest() for folder in places]
    key = {"ensemble": names, "weights": weights, **ask.key()}
    with ExitStack() as locks:
        for folder in sorted(places):
            locks.enter_context(checkpoint.locked(folder))
        known = looked(places, key)
        stored = known is not None
        if known is None:
            said = _said(networks, [data[name] for name in names], ask)
            found = figures_of(evaluate.ensemble(said), data[names[0]].test)
            line = None
            if ask.images is None:
                more = {"test": found, "test_reads": 1 + _reads(places, ask), "members": tuple(names)}
                more["chosen_from"] = None if members is None else len(folders)
                line = _line(networks, data[names[0]], ask, alike, more)
            known = note_look(places, key, found, line)
        share(places, known)
        if known.get("line") and (named is not None or (alike and (ask.results or not known["told"]))):
            line = line_of(known)
            tell(places, known, path, line if named is None else _as_row(line, named, networks[0].recipe, alike, ask))
        return answer("ensemble", ask, known["figures"], None, _reads(places, ask), stored, chosen)


def _opened(folders: list[Path], ask: Ask) -> dict[str, Opened]:
    """The networks by the names that results give them."""
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
    return opened


def _named(row: str, opened: dict[str, Opened]) -> Row:
    """The row of that name, if these networks can be its ensemble."""
    named = choose(row, {})
    for name, other in opened.items():
        for word in ("data", "model"):
            own, theirs = getattr(named.recipe, word), getattr(other.recipe, word)
            if own != theirs:
                raise ValueError(f"{row} is of {own}, and {name} is of {theirs}")
    return named


def _said(networks: Sequence[Opened], data: Sequence[DataSet], ask: Ask) -> list[Predictions]:
    if ask.plain:
        return [load_predictions(each.folder / "predictions.safetensors") for each in networks]
    return [
        look(each.model, own.test, own, ask.recipe(each.recipe), ask.images)
        for each, own in zip(networks, data, strict=True)
    ]


def _reads(places: Sequence[Path], ask: Ask) -> int:
    """An ensemble's own reads are those for any ensemble that one of the members was in."""
    return max(sum("ensemble" in each["ask"] for each in looks(folder, ask.data)) for folder in places)


def _line(networks: Sequence[Opened], data: DataSet, ask: Ask, alike: bool, more: dict[str, Any]) -> Result:
    """By the row of the members; where they differ, by that of the first."""
    places = [each.folder for each in networks]
    recipe = ask.recipe(networks[0].recipe).to_dict()
    lengths = {} if alike else _length(places)
    more = {"recipe": recipe, "look": not ask.plain, **_costs(places), **lengths, **more}
    return result_of(networks[0], data, *name_of(places[0]), **more)


def _as_row(line: Result, named: Row, lead: Recipe, alike: bool, ask: Ask) -> Result:
    """The line under another row: how its members were trained, with what the row has to tell; the row's own recipe
    where they differ."""
    own = {name: getattr(named.recipe, name) for name in TOLD}
    recipe = ask.recipe(replace(lead, **own) if alike else named.recipe)
    planned = named.recipe.epochs if alike else line.planned
    return replace(line, table=named.table, row=named.row, recipe=recipe.to_dict(), planned=planned)


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


def _short(folder: Path) -> str:
    """As the results name a member: without the places that one machine has it in."""
    folder = folder.resolve()
    return f"{folder.parent.name}/{folder.name}"
