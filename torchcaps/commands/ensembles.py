"""Networks that have been trained one by one, tested together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcaps import evaluate
from torchcaps.commands.ask import Ask, Found, answer
from torchcaps.commands.counted import looked, looks, note_look, tell, to_tell
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
    networks = [opened[name] for name in chosen]
    places = [each.folder for each in networks]
    table, word = name_of(places[0]) if named is None else (named.table, named.row)
    path = Path(ask.results) if ask.results else results_file(table, places[0])
    check_ledger(path)
    if ask.plain:
        for folder in places:
            if not (folder / "result.json").exists():
                tested(folder, replace(ask, results=""))  # its line is where it was trained
    key = {"ensemble": sorted(chosen), **ask.key()}
    with ExitStack() as locks:
        for folder in sorted(places):
            locks.enter_context(checkpoint.locked(folder))
        known = [looked(folder, key) for folder in places]
        taken = known[0]
        stored = taken is not None and all(each and each["figures"] == taken["figures"] for each in known)
        if taken is None or not stored:
            said = _said(networks, [data[name] for name in chosen], ask)
            found = figures_of(evaluate.ensemble(said), data[chosen[0]].test)
            taken = note_look(places, key, found, 1 + _reads(places, ask))
        alike = all(each.recipe == networks[0].recipe for each in networks)
        if (alike or named is not None) and ask.images is None and to_tell(taken, bool(row or ask.results)):
            recipe = ask.recipe(_recipe(networks[0].recipe, named, alike)).to_dict()
            more: dict[str, Any] = {"table": table, "row": word, "members": chosen}
            more["chosen_from"] = None if members is None else len(folders)
            more |= {"test": taken["figures"], "recipe": recipe, "look": not ask.plain, **taken["made"]}
            tell(places[0], taken, path, _line(networks, data[chosen[0]], alike, **more))
        return answer("ensemble", ask, taken["figures"], None, _reads(places, ask), stored, chosen)


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


def _recipe(lead: Recipe, named: Row | None, alike: bool) -> Recipe:
    """How the members were trained, with what the named row has to tell; the row's own where they differ."""
    if named is None:
        return lead
    return replace(lead, **{name: getattr(named.recipe, name) for name in TOLD}) if alike else named.recipe


def _line(networks: Sequence[Opened], data: DataSet, alike: bool, *, table: str, row: str, **more: Any) -> Result:
    places = [each.folder for each in networks]
    more |= _costs(places)
    if not alike:
        more |= _length(places)
    return result_of(networks[0], data, table, row, **more)


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
