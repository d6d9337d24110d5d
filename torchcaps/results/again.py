"""The commands that made the lines of results, to be given again, and those that would make what is missing or short.

>>> print(commands(read("results")))
>>> print(missing(read("results")))
>>> print(in_full(read("results")))
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from torchcaps import recipes
from torchcaps.results import Result
from torchcaps.results.notes import latest, spans
from torchcaps.results.page import not_run, not_whole
from torchcaps.results.tables import cell_of, changed, duration, fewer_images, took
from torchcaps.shorten import MOVED, is_shortened

ASKED = ("data", "protocol", "data_args.crops")  # fields of a recipe that evaluate has options for


def commands(results: Iterable[Result]) -> str:
    """Each command once, for all seeds that it trains, and under it what came out; ensembles are remarks among them."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.table, result.row, result.seed)):
        if f"{result.table}:{result.row}" in recipes.names():
            how = tuple(words(result)), result.members, result.together, result.look, result.kept, result.defect
            groups.setdefault(how, []).append(result)
    return "\n".join(line for group in groups.values() for line in _lines(latest(group)[0]))


def missing(results: Iterable[Result]) -> str:
    """A command for each row of the page that has not been run, and under it which one it is."""
    lines = []
    for group, entry in not_run(results):
        command = shlex.join(["torchcaps", "train", entry.row, *_switches(entry.changes)])
        look = f"# torchcaps evaluate RUN...{_after(_asked(entry.changes))}, with runs of {entry.row}"
        remark = look if entry.look else _of_members(entry.row)
        lines += [remark or command, f"    # {group.title}: {entry.label}"]
    return "\n".join(lines)


def in_full(results: Iterable[Result]) -> str:
    """A command for each row of the page that has been shortened, to train all of it, and under it how long that takes.

    Time is that of what was trained, as many times as the row is longer: of the fastest seed, alone or beside others.
    """
    lines = []
    for group, entry, runs in not_whole(results):
        row, first = recipes.find(entry.row), runs[0]
        changes = {path: value for path, value in changed(row, first.recipe).items() if path not in (*MOVED, "samples")}
        command = ["torchcaps", "train", entry.row, *_switches(changes)]
        trainings = [
            shlex.join([*command, *_seeds(span, first.together > 1)]) for span in spans(run.seed for run in runs)
        ]
        remark = _of_members(entry.row)
        lines += [remark] if remark else trainings
        whole = [(run.seconds / _share(row, run), run.device) for run in runs if run.seconds is not None]
        time = ""
        if whole:
            seconds, device = min(whole)
            each = "for all members" if remark else "a run"
            time = f", in full about {duration(seconds)} {each} on {device}"
        share = 100 * min(_share(row, run) for run in runs)
        part = f"{share:.0f}" if share >= 10 else f"{share:.2g}"
        lines.append(f"    # {group.title}: {entry.label}; was {part} % of it{time}")
    return "\n".join(lines)


def _of_members(row: str) -> str:
    """An ensemble is not trained: its members are, by rows of their own."""
    ensemble = recipes.find(row).metric.startswith("ensemble_")
    return f"# torchcaps evaluate --ensemble RUN... --row {row}" * ensemble


def _asked(changes: Mapping[str, Any], epoch: int | None = None) -> list[str]:
    """What `torchcaps evaluate` is told for a look with these changes of a row."""
    asked = {path.partition(".")[2] or path: value for path, value in changes.items() if path in ASKED}
    return _switches(asked if epoch is None else {**asked, "epoch": epoch})


def _differing(look: Result) -> dict[str, Any]:
    """What a look was at instead of what its row has."""
    row, own = recipes.find(f"{look.table}:{look.row}"), look.recipe["data_args"]
    crops = {"data_args.crops": own["crops"]} if own.get("crops") not in (None, row.data_args.get("crops")) else {}
    return {**changed(row, look.recipe), **crops}


def _not_told(look: Result) -> tuple[str, ...]:
    """Fields in which the recipe of a look is not that of its run; another protocol has other options."""
    row = recipes.find(f"{look.table}:{look.row}")
    return (*ASKED, "data_args") if look.recipe["protocol"] != row.protocol else ASKED


def _after(options: list[str]) -> str:
    return "".join(f" {word}" for word in options)


def _share(row: recipes.Recipe, run: Result) -> float:
    """How much of a row's training a run had."""
    images = run.recipe["samples"] / row.samples if row.samples and fewer_images(row, run) else 1.0
    return images * run.epochs / row.epochs


def words(result: Result, without: Iterable[str] = ()) -> list[str]:
    """What `torchcaps` is called with for this run, but for its seed.

    Args:
        without: fields that are left out.
    """
    row, epochs = recipes.find(f"{result.table}:{result.row}"), result.recipe.get("epochs", result.epochs)
    found = ["train", f"{result.table}:{result.row}"]
    changes = {path: value for path, value in changed(row, result.recipe).items() if path not in without}
    if is_shortened(row, result.recipe, epochs, exactly=True) and any(path in MOVED for path in changes):
        found += ["--shorten", str(epochs)]
        changes = {path: value for path, value in changes.items() if path not in MOVED}
    elif epochs != row.epochs:
        found += ["--epochs", str(epochs)]
    return [*found, *_switches(changes)]


def _switches(changes: Mapping[str, Any]) -> list[str]:
    """What differs from a row, as the command line takes it."""
    pairs = ((f"--{path.replace('_', '-')}", value) for path, value in changes.items())
    return [word for name, x in pairs for word in (name, x if isinstance(x, str) else json.dumps(x))]


def _lines(runs: list[Result]) -> list[str]:
    first = runs[0]
    asked = _asked(_differing(first), first.kept) * first.look
    if first.members:
        name = f"{first.table}:{first.row}"
        row = ["--row", name] if recipes.find(name).metric.startswith("ensemble_") else []
        options = _after([*asked, *row])
        lines = [f"# torchcaps evaluate --ensemble{options}, with the folders of {', '.join(first.members)}"]
    elif first.look:
        seeds = ", ".join(f"seed {seed}" for seed in sorted(run.seed for run in runs))
        runs_of = shlex.join(["torchcaps", *words(first, without=_not_told(first))])
        lines = [f"# torchcaps evaluate RUN...{_after(asked)}, with the runs of {runs_of}, {seeds}"]
    else:
        together = first.together > 1
        lines = [
            shlex.join(["torchcaps", *words(first), *_seeds(span, together)])
            for span in spans(run.seed for run in runs)
        ]
    metric = recipes.find(f"{first.table}:{first.row}").metric.removeprefix("ensemble_")
    commits = " and ".join(sorted({run.commit[:7] + "*" * run.dirty for run in runs}))
    per_cent = "" if metric == "loss" else " %"
    defect = f"with {first.defect}" if first.defect else ""
    told = [f"{metric.replace('_', ' ')} {cell_of(metric, runs)}{per_cent}", defect, took(runs), f"commit {commits}"]
    return [*lines, f"    # {', '.join(filter(None, told))}"]


def _seeds(span: list[int], together: bool) -> list[str]:
    begin = ["--seed", str(span[0])] if span[0] else []
    several = ["--seeds", str(len(span)), *["--together"] * together] if len(span) > 1 else []
    return [*begin, *several]
