"""The papers' tables with our numbers beside theirs, made from the lines of finished runs.

>>> print(render("mazzia2021_table2", read("results")))
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any

from torchcaps import recipes
from torchcaps.results import Result
from torchcaps.results.notes import assumed, latest, remarks, word
from torchcaps.results.sheet import FORMATS, Line, Sheet
from torchcaps.shorten import moved

SAME_IN_ENSEMBLES = ("model", "model_args", "data", "data_args", "protocol")
TELLS_NOTHING = {"epochs", "seeds", "keep_epochs", "metric", "reported", "assumed", "note"}  # of how a run was trained
UNEVEN = 1.1  # times the fastest run's time, from which on a mean of times would mislead
LEGEND = "Ours: mean ± standard deviation over n seeds; the standard error is that of a share, for one run's test set."


def render(table: Any, results: Iterable[Result], format: str = "text") -> str:
    """A paper's table, printed numbers beside ours: mean ± standard deviation over the seeds.

    Runs with another setting than the row's, shortened ones among them, stand on lines of their own below it; of two
    runs with one seed the later counts.

    Args:
        table: its name, or a module with TITLE, ROWS and perhaps CITED.
        format: text, markdown or html.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; it is text, markdown or html")
    if isinstance(table, str):
        table = find(table)
    return FORMATS[format](_sheet(table, list(results)))


def find(table: str) -> Any:
    """The table of that name, or a sentence that says which there are."""
    known = recipes.tables()
    if table not in known:
        near = get_close_matches(table, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"there is no table {table!r}; {hint}")
    return known[table]


def disagreement(text: str, wanted: str) -> str:
    """Empty where a text is as the results have it, else a sentence with the first line that is not."""
    there, made = text.splitlines(keepends=True), wanted.splitlines(keepends=True)
    for number, (old, new) in enumerate(zip_longest(there, made, fillvalue=""), 1):
        if old != new:
            return f"line {number} is {old!r}, but the results give {new!r}"
    return ""


def _sheet(table: Any, results: list[Result]) -> Sheet:
    found, sheet = _by_row(table, results), Sheet(table.TITLE)
    sheet.legend = LEGEND if any(found.values()) else ""
    for row, recipe in table.ROWS.items():
        groups: dict[tuple[bool, str, int | None], list[Result]] = {}
        for result in found[row]:
            groups.setdefault((result.look, variation(recipe, result), result.kept), []).append(result)
        notes = [sheet.note(text) for text in (assumed(recipe), recipe.note) if text]
        metric = recipe.metric.replace("_", " ") + ("" if recipe.metric == "loss" else " %")
        plain, before = latest(groups.pop((False, "", None), []))
        cells = _cells(recipe, plain) if plain else ("" if groups else "not run", "", "", "", "")
        more = [sheet.note(text) for text in remarks(plain, replaced(recipe.metric, before))]
        sheet.lines.append(Line((row, metric, recipe.reported, *cells), notes + more))
        for (_, label, kept), group in groups.items():
            runs, before = latest(group)
            at = f"epoch {kept}" if kept and f"{kept} of {recipe.epochs} epochs" not in label else ""
            label = ", ".join(filter(None, (label, at)))
            said = [sheet.note(text) for text in remarks(runs, replaced(recipe.metric, before))]
            label = (label or "tested anew") + ", shortened" * is_short(recipe, runs[0])
            sheet.lines.append(Line((label, "", "", *_cells(recipe, runs)), said, "variant"))
    for row, printed in getattr(table, "CITED", {}).items():
        sheet.lines.append(Line((row, "", str(printed), "cited", "", "", "", ""), kind="cited"))
    strangers = sorted(found.keys() - table.ROWS.keys())
    if strangers:
        sheet.note(f"there are results of rows that this table does not have: {', '.join(strangers)}")
    return sheet


def _by_row(table: Any, results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of a table's rows, oldest first, and of rows that it does not have."""
    name = _name(table)
    found: dict[str, list[Result]] = {row: [] for row in table.ROWS}
    for result in sorted(results, key=lambda result: result.finished):
        together = [row for row, recipe in table.ROWS.items() if is_ensemble_for(recipe, result)]
        if not together and _counted_elsewhere(result):
            continue
        if result.table == name and (not together or result.row in together):
            found.setdefault(result.row, []).append(result)
        elif together:
            found[together[0]].append(result)
    return found


def _counted_elsewhere(result: Result) -> bool:
    """Whether some table has a row for this ensemble."""
    rows = (recipe for table in recipes.tables().values() for recipe in table.ROWS.values())
    return bool(result.members) and any(is_ensemble_for(recipe, result) for recipe in rows)


def is_ensemble_for(recipe: recipes.Recipe, result: Result) -> bool:
    """Whether the row counts ensembles, and this is one of its networks on its images, as whichever row these were."""
    if not result.members or not recipe.metric.startswith("ensemble_"):
        return False
    return not any(path.partition(".")[0] in SAME_IN_ENSEMBLES for path in changed(recipe, result.recipe))


def variation(recipe: recipes.Recipe, result: Result, epochs: bool = True) -> str:
    """In what a run differs from its row; empty if in nothing.

    Args:
        epochs: whether their number is to be told.
    """
    own, asked = changed(recipe, result.recipe), result.recipe.get("epochs", result.epochs)
    there = moved(recipe, result.recipe, asked) if asked <= recipe.epochs else {}
    alike = [path for path in own if there.get(path)]
    changes = [f"{path} = {word(value)}" for path, value in own.items() if path not in alike]
    changes += ["schedule shortened alike"] * bool(alike)
    if result.planned == recipe.epochs and (asked < recipe.epochs or fewer_images(recipe, result)):
        left = [path for path, right in there.items() if not right and not {path, path.partition(".")[0]} & own.keys()]
        fields = ("its schedule" if path.startswith("schedule_args.") else path for path in left)
        changes += [f"{name} not shortened" for name in dict.fromkeys(fields)]
    changes += [result.defect] * bool(result.defect)
    if epochs and result.epochs != recipe.epochs and not result.reached:
        changes.append(f"{result.epochs} of {recipe.epochs} epochs")
    together = recipe.metric.startswith("ensemble_")
    if result.members and not (together and len(result.members) == recipe.seeds):
        changes.append(f"an ensemble of {len(result.members)}")
    elif together and not result.members:
        changes.append("members alone")
    return ", ".join(changes)


def fewer_images(recipe: recipes.Recipe, result: Result) -> bool:
    """Whether an epoch has fewer images than the row's."""
    images = result.recipe.get("samples")
    return bool(recipe.samples and images and images < recipe.samples)


def is_short(recipe: recipes.Recipe, result: Result) -> bool:
    """Whether a run had fewer epochs, or images in them, than its row."""
    return result.shortened or fewer_images(recipe, result)


def changed(recipe: recipes.Recipe, ran: Mapping[str, Any]) -> dict[str, Any]:
    """Fields, or single arguments, with which a run differs from its row; whole fields that lack an argument there.

    One that a line is too old to have is at its default there.
    """
    ours, theirs = recipe.to_dict(), {**recipes.DEFAULTS, **ran}
    found: dict[str, Any] = {}
    for name in sorted(ours.keys() & theirs.keys() - TELLS_NOTHING):
        old, new = ours[name], theirs[name]
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() <= new.keys():
            found |= {f"{name}.{key}": new[key] for key in sorted(new) if key not in old or old[key] != new[key]}
        elif old != new:
            found[name] = new
    return found


def _cells(recipe: recipes.Recipe, runs: list[Result]) -> tuple[str, str, str, str, str]:
    """Ours, n, standard error, epoch, time."""
    epochs = sorted({run.epochs if run.epoch is None else run.epoch for run in runs})
    span = f"{epochs[0]}" + (f" to {epochs[-1]}" if len(epochs) > 1 else "")
    whole = sorted({recipe.epochs if run.reached else run.epochs for run in runs})
    where = f"{' or '.join(sorted({run.selected for run in runs}))} {span} of {whole[-1]}"
    if any(run.members for run in runs):
        where = f"each its {where.split()[0]}"
    if at_last := with_last_epoch(recipe.metric, runs):
        where += f", last {at_last}"
    errors = [
        100 * run.test["standard_error"] for run in runs if isinstance(run.test.get("standard_error"), int | float)
    ]
    deviation = f"{statistics.mean(errors):.2f}" if errors and recipes.is_share_of_images(recipe.metric) else ""
    return cell_of(recipe.metric, runs), str(len(runs)), deviation, where, took(runs)


def took(runs: Sequence[Result]) -> str:
    """The time of a run and the devices; of seeds that were trained at once, the share of each.

    It is the mean, or the span where others beside them or pauses made some take much longer. Of an ensemble, the time
    of all its members. Empty where it is not known.
    """
    timed = [run for run in runs if run.seconds is not None]
    if not timed:
        return ""
    seconds, together = sorted(run.seconds or 0.0 for run in timed), max(run.together for run in timed)
    spread = seconds[-1] > UNEVEN * seconds[0]
    time = f"{duration(seconds[0])} to {duration(seconds[-1])}" if spread else duration(statistics.mean(seconds))
    devices = ", ".join(sorted({run.device for run in timed if run.device}))
    how = " for all members" if timed[0].members else f" each, {together} at once" * (together > 1)
    return time + how + (f" on {devices}" if devices else "")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def with_last_epoch(metric: str, runs: Sequence[Result]) -> str:
    """What the last epochs have; empty where no run has selected another."""
    if all(run.test_last is None for run in runs):
        return ""
    return _mean([_figure(metric, run.test_last or run.test, run) for run in runs])


def with_one_view(metric: str, runs: Sequence[Result]) -> str:
    """What they have with one view of each test image; empty where that is what they are told by, or it is unknown."""
    views = [run.test.get("one_view") for run in runs]
    known = [_figure(metric, view or {}, run) for view, run in zip(views, runs, strict=True)]
    return _mean(known) if all(views) else ""


def replaced(metric: str, runs: Iterable[Result]) -> list[tuple[Result, str]]:
    """Runs that others of their seeds have replaced, with what they had."""
    return [(run, cell_of(metric, [run])) for run in runs]


def cell_of(metric: str, runs: Iterable[Result]) -> str:
    """Mean ± standard deviation over the runs, in per cent but for a loss."""
    return _mean([_figure(metric, run.test, run) for run in runs])


def _figure(metric: str, figures: Mapping[str, Any], run: Result) -> float | None:
    if metric == "loss":
        values = run.curves.get("loss")
        value = values[-1] if isinstance(values, list) and values else None
    else:
        value = figures.get(metric.removeprefix("ensemble_"))
    if not isinstance(value, int | float):
        return None
    return float(value) if metric == "loss" else 100.0 * value


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not known for {len(values) - len(known)} of {len(values)}"
    mean = statistics.mean(known)
    digits = 3 if abs(mean) < 1 else 2
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{mean:.{digits}f}{spread}"


def _name(table: Any) -> str:
    return table.__name__.rpartition(".")[2]
