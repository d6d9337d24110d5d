"""RESULTS.md: every row that was to be reproduced, the papers' figures beside ours, and what a reader makes of them.

The tables are rendered from the lines of finished runs. What a person wrote stands between markers with the name of its
section, `<!-- reading 1: begin -->` and `<!-- reading 1: end -->`, and comes through every rendering as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchcaps import recipes
from torchcaps.recipes import Recipe, with_overrides
from torchcaps.results import Result
from torchcaps.results.notes import assumed, held_out, latest, remarks
from torchcaps.results.plan import BOTH, GROUPS, TESTED_ON_OTHERS, Entry, Group
from torchcaps.results.sheet import escaped
from torchcaps.results.tables import (
    cell_of,
    fewer_images,
    is_ensemble_for,
    is_short,
    replaced,
    took,
    variation,
    with_last_epoch,
    with_one_view,
)

HEADINGS = ("row", "metric", "paper", "ours", "n", "protocol", "epochs", "a run took", "commit")
RIGHT = {"paper", "ours", "n"}
USUAL = ("precision = bf16", "schedule shortened alike")  # the one is told with the time, the other goes without saying
READING = re.compile(r"<!-- reading (\S+): begin -->\n(.*?)<!-- reading \1: end -->", re.DOTALL)
INTRODUCTION = (
    "Rendered by `torchcaps table --page RESULTS.md` from the lines in `results/`, but for the parts headed Reading. "
    "Ours is the mean ± standard deviation over n seeds, on the test set, which is read once for each run unless a "
    "note or a reading says otherwise; the column protocol says whether the last epoch counts, or the best on held-out "
    "training images or on the test set. Shortened rows were trained for fewer epochs, or images, than their recipe "
    "has. Of seeds that were trained at once, each has its share of the whole time; an ensemble's time is that of its "
    "members added up. Most runs on a GPU had two to four others beside them, and some were paused for these, so they "
    "took longer than they would alone. No paper trained in bf16, as most runs did here; short trainings in float32 "
    "differed by no more than chance, but EM was not compared ([docs/speed.md](docs/speed.md)). Most tests on a GPU "
    "convolved in TF32, which can move a figure a little ([results/README.md](results/README.md)). "
    "`torchcaps table --commands` prints the command behind each line, `--missing` those of the rows that have not "
    "been run, and `--shortened` those that would train in full what was shortened, with the time it takes."
)


def render_page(results: Sequence[Result], old: str = "", groups: Iterable[Group] | None = None) -> str:
    """The whole page; what `old` has between its reading markers stays."""
    sections = [*(GROUPS if groups is None else groups)]
    if groups is None:
        sections += [ours(), others(results)]
    keys = ["all", *(group.key for group in sections if group.entries)]
    readings = _readings(old, keys)
    claimed = claimed_by(results, [entry for group in sections for entry in group.entries])
    parts = ["# Results", INTRODUCTION, f"## Reading\n\n{_reading('all', readings)}"]
    for group in sections:
        if group.entries:
            number = f"{group.key}. " if group.key.isdecimal() else ""
            parts.append(f"## {number}{group.title}\n\n{_table(group, claimed)}\n\n{_reading(group.key, readings)}")
    return "\n\n".join(parts) + "\n"


def not_run(results: Iterable[Result]) -> list[tuple[Group, Entry]]:
    """What the page has no figure for, or only those of runs with a defect, in its order."""
    return [(group, entry) for group, entry, runs in _sound(results) if not runs]


def not_whole(results: Iterable[Result]) -> list[tuple[Group, Entry, list[Result]]]:
    """What the page tells shortened runs of, in its order, and these."""
    found = []
    for group, entry, runs in _sound(results):
        recipe = _recipe(entry)
        first = next((same for _, same in alike(recipe, runs)), [])
        if not entry.look and any(is_short(recipe, run) for run in first):
            found.append((group, entry, first))
    return found


def _sound(results: Iterable[Result]) -> Iterator[tuple[Group, Entry, list[Result]]]:
    """Every row of the page with its runs but those with a defect."""
    results = list(results)
    sections = (*GROUPS, ours(), others(results))
    claimed = claimed_by(results, [entry for group in sections for entry in group.entries])
    for group in sections:
        for entry in group.entries:
            yield group, entry, [run for run in claimed[id(entry)] if not run.defect and run.look == entry.look]


def ours() -> Group:
    """All our rows, and after them tests of their networks on other data."""
    entries: list[Entry] = []
    for name, recipe in recipes.tables()["ours"].ROWS.items():
        entries.append(Entry(name, f"ours:{name}", metrics=BOTH if recipe.metric in BOTH else ()))
        entries += [TESTED_ON_OTHERS[name]] if name in TESTED_ON_OTHERS else []
    return Group("ours", "Our own rows", tuple(entries))


def others(results: Iterable[Result]) -> Group:
    """Rows of the papers' tables that no group names, where they have been run."""
    named = {entry.row for group in (*GROUPS, ours()) for entry in group.entries}
    known = set(recipes.names())
    found = sorted({f"{result.table}:{result.row}" for result in results} & known - named)
    return Group("others", "Other rows that were run", tuple(Entry(name, name) for name in found))


def claimed_by(results: Iterable[Result], entries: Sequence[Entry]) -> dict[int, list[Result]]:
    """The runs of each entry, by its id: of those whose settings a run has, the one that asks for most has it."""
    found: dict[int, list[Result]] = {id(entry): [] for entry in entries}
    for result in sorted(results, key=lambda result: result.finished):
        row = f"{result.table}:{result.row}"
        together = [entry for entry in entries if is_ensemble_for(_recipe(entry), result)]
        fits = together or [
            entry for entry in entries if row == entry.row and entry.look <= result.look and _has(result, entry.changes)
        ]
        if fits:
            found[id(max(fits, key=lambda entry: len(entry.changes)))].append(result)
    return found


def _recipe(entry: Entry) -> Recipe:
    return with_overrides(recipes.find(entry.row), entry.changes)


def _has(result: Result, changes: Mapping[str, Any]) -> bool:
    for path, value in changes.items():
        name, _, key = path.partition(".")
        own = result.recipe.get(name)
        if (own.get(key) if key and isinstance(own, dict) else own) != value:
            return False
    return True


def _table(group: Group, claimed: Mapping[int, list[Result]]) -> str:
    notes: list[str] = []
    sides = ["---:" if heading in RIGHT else "---" for heading in HEADINGS]
    lines = [f"| {' | '.join(HEADINGS)} |", f"| {' | '.join(sides)} |"]
    epochs = _common_epochs([claimed[id(entry)] for entry in group.entries]) if group.curves else None
    for entry in group.entries:
        (cells, said, _), *rest = lines_of(entry, claimed[id(entry)], epochs)
        told = [
            *said,
            *(_also(entry, other, [text for text in more if text not in said], look) for other, more, look in rest),
        ]
        numbers = "".join(f" ({_number(notes, text)})" for text in told)
        first = brief(entry.label, cells[0]) + numbers
        lines.append(f"| {' | '.join(escaped(cell) for cell in (first, *cells[1:]))} |")
    numbered = "\n".join(f"{number}. {escaped(text)}" for number, text in enumerate(notes, 1))
    return "\n".join(lines) + (f"\n\n{numbered}" if numbered else "")


def _common_epochs(claimed: Iterable[list[Result]]) -> int | None:
    """The most epochs that all rows with runs have been trained for."""
    found = [{run.epochs for run in runs if not run.defect and not run.look} for runs in claimed]
    return max(set.intersection(*(epochs for epochs in found if epochs)), default=None) if any(found) else None


def brief(name: str, label: str) -> str:
    """A label without the settings that most rows have, or another column tells."""
    settings = label.removeprefix(name).removeprefix(", with ").split(", ")
    told = [setting for setting in settings if setting not in USUAL]
    return with_settings(name, ", ".join(filter(None, told)))


def _also(entry: Entry, cells: tuple[str, ...], said: list[str], look: Result | None) -> str:
    """A further line of an entry, as a note.

    Args:
        look: the first, where these are looks at weights that have a line.
    """
    label, _, _, found, n, _, epochs, took, commit = cells
    settings = brief(entry.label, label).removeprefix(entry.label).removeprefix(", ")
    if look is not None:
        how = ", ".join(filter(None, [settings, f"epoch {look.kept}" if look.kept else "", f"n = {n}"]))
        return "; ".join([f"looked at again: {found} ({how})", *said])
    how = ", ".join(filter(None, [settings, f"epochs {epochs}", f"n = {n}", took, commit]))
    return "; ".join([f"also run: {found} ({how})", *said])


def _number(notes: list[str], text: str) -> int:
    if text not in notes:
        notes.append(text)
    return 1 + notes.index(text)


def lines_of(
    entry: Entry, results: list[Result], epochs: int | None = None
) -> list[tuple[tuple[str, ...], list[str], Result | None]]:
    """One for all runs with the same settings and epochs, each with what it has to note, and with a look if it is one.

    Args:
        epochs: of the runs that come first; those with most of them if not given.
    """
    recipe = _recipe(entry)
    metrics = entry.metrics or (recipe.metric,)
    words = " and ".join(metric.removeprefix("ensemble_").replace("_", " ") for metric in metrics) + " %"
    printed = entry.printed or recipe.reported or "-"
    said = [text for text in (assumed(recipe), recipe.note) if text]
    lines: list[tuple[tuple[str, ...], list[str], Result | None]] = []
    for how, found in alike(recipe, results, epochs):
        runs, earlier = latest(found)
        if fewer_images(recipe, runs[0]):  # which the epochs tell
            how = ", ".join(setting for setting in how.split(", ") if not setting.startswith("samples = "))
        older = "" if runs[0].planned == recipe.epochs else f"an older recipe of {runs[0].planned} epochs"
        how = ", ".join(filter(None, (how, older)))
        label = with_settings(entry.label, how)
        cells = (label, words, printed, _ours_of(metrics, runs), str(len(runs)), *_how(recipe, runs))
        notes = [*said, *_otherwise(metrics[0], runs), *remarks(runs, replaced(metrics[0], earlier))]
        lines.append((cells, notes, runs[0] if runs[0].look else None))
    if not lines or (not entry.look and all(run.look for run in results)):
        lines.insert(0, ((entry.label, words, printed, "not run", "", _protocol(recipe), "", "", ""), said, None))
    return lines


def alike(recipe: Recipe, results: Iterable[Result], first: int | None = None) -> list[tuple[str, list[Result]]]:
    """Runs with the same settings and epochs, and what these settings are; first those that a page tells first."""
    groups: dict[tuple[str, int, bool, int | None], list[Result]] = {}
    for result in results:
        epochs = recipe.epochs if result.reached else result.epochs
        groups.setdefault((variation(recipe, result, epochs=False), epochs, result.look, result.kept), []).append(
            result
        )

    def order(group: tuple[tuple[str, int, bool, int | None], list[Result]]) -> tuple[Any, ...]:
        (how, epochs, look, _), runs = group
        return look, bool(runs[0].defect), how != "", epochs != first, -epochs, -len(runs), how

    return [(how, runs) for (how, *_), runs in sorted(groups.items(), key=order)]


def with_settings(label: str, how: str) -> str:
    return f"{label}, with {how}" if how else label


def _ours_of(metrics: Sequence[str], runs: list[Result]) -> str:
    cells = [cell_of(metric, runs) for metric in metrics]
    return cells[0] if len(cells) == 1 else "; ".join(cells)


def _otherwise(metric: str, runs: list[Result]) -> list[str]:
    """What the last epochs have, where a run selected another, and what one view has, where several count."""
    at_last, alone = with_last_epoch(metric, runs), with_one_view(metric, runs)
    return [
        *([f"{at_last} with the last epoch instead"] if at_last else []),
        *([f"{alone} with one view of each test image"] if alone else []),
    ]


def _how(recipe: Recipe, runs: list[Result]) -> tuple[str, str, str, str]:
    """Protocol, epochs, time and device, commit."""
    first = runs[0]
    epochs = _span([run.epochs for run in runs])
    if any(run.reached for run in runs):
        epochs += f", at {100 * first.recipe['stop_at']:g} % on validation"
    else:
        if first.epochs != first.planned:
            epochs += f" of {first.planned}"
        if fewer_images(recipe, first):
            epochs += f", each of {first.recipe['samples']:,} images instead of {recipe.samples:,}"
        epochs += ", shortened" * is_short(recipe, first)
    commits = ", ".join(sorted({run.commit[:7] + "*" * run.dirty for run in runs}))
    ran = recipes.from_dict(first.recipe)
    time = " ".join(filter(None, [took(runs), f"in {ran.precision}" if ran.precision != "32" else ""]))
    return _protocol(ran), epochs, time, commits


def _protocol(recipe: Recipe) -> str:
    """Whose protocol, and which epoch was taken by it; several views of a test image are said."""
    words = [recipe.protocol or "none"]
    on = "the test set" if held_out(recipe) == "test" else "validation"
    words.append(f"best epoch on {on}" if recipe.select == "best" else "last epoch")
    if (several := recipes.views(recipe.data_args)) > 1:
        words.append(f"{several} views of each test image")
    return ", ".join(words)


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _reading(key: str, readings: Mapping[str, str]) -> str:
    return f"<!-- reading {key}: begin -->\n{readings.get(key, '')}<!-- reading {key}: end -->"


def _readings(old: str, keys: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, text in READING.findall(old):
        if key in found:
            raise ValueError(f"the page has two readings {key!r}; join them, so that none is lost")
        found[key] = text
    if old.count("<!-- reading ") != 2 * len(found):
        raise ValueError("a marker of a reading in the page has lost its other end; mend it, so that nothing is lost")
    for key, text in found.items():
        if key not in keys and text.strip():
            raise ValueError(f"the page has a reading {key!r}, but no such section; move its text to one of {keys}")
    return found
