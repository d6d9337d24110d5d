"""Networks that have been trained one by one, tested together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcaps import evaluate
from torchcaps.commands.ask import Ask, Found, answer
from torchcaps.commands.looks import ledger, looked, looks, name_of, note_look, tested, validation_predictions
from torchcaps.commands.words import choose
from torchcaps.evaluate import Figures
from torchcaps.finish import append_line, figures_of, load_predictions, result_of
from torchcaps.recipes import TOLD
from torchcaps.runs import is_exported, look, open_run, read_json


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
    found = figures_of(evaluate.ensemble(said), data[chosen[0]].test)
    for name in chosen:
        note_look(names[name], key, found)
    told = _ensemble(names, chosen, ask, found, stored=False)
    lead = opened[chosen[0]]
    alike = all(opened[name].recipe == lead.recipe for name in chosen)
    if (named is not None or alike) and ask.images is None:
        table, word = name_of(lead.folder) if named is None else (named.table, named.row)
        recipe = lead.recipe
        if named is not None:
            own = {name: getattr(named.recipe, name) for name in TOLD}
            recipe = replace(lead.recipe, **own) if alike else named.recipe
        more = {"recipe": ask.recipe(recipe).to_dict(), "members": chosen, "test_reads": told.test_reads}
        more["look"] = not ask.plain
        more["chosen_from"] = None if members is None else len(folders)
        more |= _costs([names[name] for name in chosen])
        if not alike:
            more |= _length([names[name] for name in chosen])
        append_line(ledger(lead.folder, ask), result_of(lead, data[chosen[0]], table, word, test=found, **more))
    return told


def _ensemble(names: dict[str, Path], chosen: tuple[str, ...], ask: Ask, found: Figures, stored: bool) -> Found:
    """Its own reads are those for any ensemble that one of the members was in."""
    reads = max(sum("ensemble" in each["ask"] for each in looks(names[name], ask.data)) for name in chosen)
    return answer("ensemble", ask, found, None, reads, stored, chosen)


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
