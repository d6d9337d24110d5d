"""The papers' tables with our numbers beside theirs, made from the lines of finished runs.

>>> print(render("mazzia2021_table2", read("results")))
"""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torchcaps import recipes
from torchcaps.results import Result

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TELLS_NOTHING = {"epochs", "seeds", "keep_epochs", "metric", "reported", "assumed", "note"}  # of how a run was trained
HEADINGS = ("row", "metric", "paper", "ours", "n", "standard error", "epoch")
NUMBERS = {"paper", "ours", "n", "standard error"}
LEGEND = "Ours: mean ± standard deviation over n seeds; the standard error is that of a share, for one run's test set."
STYLE = (
    "body { font: 16px/1.5 system-ui, sans-serif; color-scheme: light dark; margin: 2em } "
    "table { border-collapse: collapse } th, td { padding: .2em .8em; border-bottom: 1px solid #8886 } "
    "th, td { text-align: left } .number { text-align: right } .cited { opacity: .7 }"
)


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
        known = recipes.tables()
        if table not in known:
            near = get_close_matches(table, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"there is no table {table!r}; {hint}")
        table = known[table]
    return FORMATS[format](_sheet(table, list(results)))


def render_readme_section(results: Sequence[Result], tables: Iterable[Any] | None = None) -> str:
    """The tables of which something has been run, between two markers."""
    tables = recipes.tables().values() if tables is None else tables
    ran = {result.table for result in results}
    parts = [render(table, results, "markdown") for table in tables if _name(table) in ran]
    return "\n".join([BEGIN, "", *(parts or ["Nothing has been run yet.\n"]), END])


def update_readme(text: str, results: Sequence[Result], tables: Iterable[Any] | None = None) -> str:
    """The text with its results section as the results have it."""
    before, after = _around(text)
    return before + render_readme_section(results, tables) + after


def readme_disagreement(text: str, results: Sequence[Result], tables: Iterable[Any] | None = None) -> str:
    """Empty where the results section is as the results have it, else a sentence with the first line that is not."""
    wanted = update_readme(text, results, tables)
    if wanted == text:
        return ""
    there, made = text.splitlines(), wanted.splitlines()
    pairs = zip(there + [""] * len(made), made + [""] * len(there), strict=True)
    number, (old, new) = next((k, pair) for k, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} of the README is {old!r}, but the results give {new!r}"


def _around(text: str) -> tuple[str, str]:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the README needs {BEGIN!r} and {END!r}, once each and in this order, around its results")
    return before, after


@dataclass
class Line:
    """A table's line; `notes` are the numbers of its notes."""

    cells: tuple[str, ...]
    notes: list[int] = field(default_factory=list)
    kind: str = "row"  # row, variant or cited


@dataclass
class Sheet:
    title: str
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: str = ""  # where there are numbers to explain

    def note(self, text: str) -> int:
        if text not in self.notes:
            self.notes.append(text)
        return 1 + self.notes.index(text)


def _sheet(table: Any, results: list[Result]) -> Sheet:
    name, sheet = _name(table), Sheet(table.TITLE)
    own = sorted((result for result in results if result.table == name), key=lambda result: result.finished)
    sheet.legend = LEGEND if own else ""
    for row, recipe in table.ROWS.items():
        groups: dict[str, dict[Any, Result]] = {}
        for result in own:
            if result.row == row:
                groups.setdefault(variation(recipe, result), {})[result.seed, result.members] = result
        notes = [sheet.note(text) for text in (assumed(recipe), recipe.note) if text]
        metric = recipe.metric.replace("_", " ") + ("" if recipe.metric == "loss" else " %")
        plain = list(groups.pop("", {}).values())
        cells = _cells(recipe, plain) if plain else ("not run", "", "", "")
        more = [sheet.note(text) for text in remarks(plain)]
        sheet.lines.append(Line((row, metric, recipe.reported, *cells), notes + more))
        for label, group in groups.items():
            runs = list(group.values())
            said = [sheet.note(text) for text in remarks(runs)]
            sheet.lines.append(Line((label, "", "", *_cells(recipe, runs)), said, "variant"))
    for row, printed in getattr(table, "CITED", {}).items():
        sheet.lines.append(Line((row, "", str(printed), "cited", "", "", ""), kind="cited"))
    strangers = sorted({result.row for result in own} - set(table.ROWS))
    if strangers:
        sheet.note(f"there are results of rows that this table does not have: {', '.join(strangers)}")
    return sheet


def variation(recipe: recipes.Recipe, result: Result) -> str:
    """In what a run differs from its row; empty if in nothing."""
    ours, theirs = recipe.to_dict(), result.recipe
    changes = []
    for name in sorted(ours.keys() & theirs.keys() - TELLS_NOTHING):
        old, new = ours[name], theirs[name]
        if isinstance(old, dict) and isinstance(new, dict):
            keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            changes += [f"{name}.{key} = {_word(new.get(key))}" for key in keys]
        elif old != new:
            changes.append(f"{name} = {_word(new)}")
    if result.epochs != recipe.epochs and not result.reached:
        changes.append(f"{result.epochs} of {recipe.epochs} epochs")
    together = recipe.metric.startswith("ensemble_")
    if result.members and not (together and len(result.members) == recipe.seeds):
        changes.append(f"an ensemble of {len(result.members)}")
    elif together and not result.members:
        changes.append("members alone")
    return ", ".join(changes)


def _cells(recipe: recipes.Recipe, runs: list[Result]) -> tuple[str, str, str, str]:
    """Ours, n, standard error, epoch."""
    epochs = sorted({run.epochs if run.epoch is None else run.epoch for run in runs})
    span = f"{epochs[0]}" + (f" to {epochs[-1]}" if len(epochs) > 1 else "")
    where = f"{' or '.join(sorted({run.selected for run in runs}))} {span} of {recipe.epochs}"
    if all(run.test_last is not None for run in runs):
        where += f", last {_mean([_figure(recipe.metric, run.test_last or {}, run) for run in runs])}"
    errors = [
        100 * run.test["standard_error"] for run in runs if isinstance(run.test.get("standard_error"), int | float)
    ]
    deviation = f"{statistics.mean(errors):.2f}" if errors and recipes.is_share_of_images(recipe.metric) else ""
    return _mean([_figure(recipe.metric, run.test, run) for run in runs]), str(len(runs)), deviation, where


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


def remarks(runs: list[Result]) -> list[str]:
    """What a reader should know of these runs."""
    said = [
        f"members{', chosen on validation' * bool(run.chosen_from)}: {', '.join(run.members)}"
        for run in runs
        if run.members
    ]
    sampled = sorted({(run.test["images"], whole) for run in runs if (whole := run.test.get("sampled_from"))})
    said += [f"tested on {images:,} of {whole:,} images" for images, whole in sampled]
    dirty = sorted({run.commit[:7] for run in runs if run.dirty})
    if dirty:
        said.append(f"run with changes that commit {' and '.join(dirty)} does not have")
    if any(run.test_reads != 1 for run in runs):
        said.append("the test set was read more than once")
    return said


def assumed(recipe: recipes.Recipe) -> str:
    """Fields that the paper leaves open, with the values taken."""
    values, words = recipe.to_dict(), []
    for path in recipe.assumed:
        name, _, key = path.partition(".")
        value = values.get(name, ...)
        if key:
            value = value.get(key, ...) if isinstance(value, dict) else ...
        words.append(path if value is ... else f"{path} = {_word(value)}")
    return "assumed: " + ", ".join(words) if words else ""


def _text(sheet: Sheet) -> str:
    rows = [HEADINGS, *(("  " * (line.kind == "variant") + _marked(line), *line.cells[1:]) for line in sheet.lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if heading in NUMBERS else cell.ljust(width)
            for cell, width, heading in zip(row, widths, HEADINGS, strict=True)
        ).rstrip()
        for row in rows
    ]
    notes = [f"({number}) {text}" for number, text in enumerate(sheet.notes, 1)]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    below = [part for part in ("\n".join(notes), sheet.legend) if part]
    return "\n\n".join([sheet.title, "\n".join([aligned[0], rule, *aligned[1:]]), *below]) + "\n"


def escaped(text: str) -> str:
    """As a cell of Markdown."""
    return " ".join("".join(f"\\{c}" if c in "\\|<>*_`" else c for c in text).split())


def _markdown(sheet: Sheet) -> str:
    sides = ["---:" if heading in NUMBERS else "---" for heading in HEADINGS]
    lines = [f"### {escaped(sheet.title)}", "", f"| {' | '.join(HEADINGS)} |", f"| {' | '.join(sides)} |"]
    for line in sheet.lines:
        first = "with " * (line.kind == "variant") + _marked(line)
        lines.append("| " + " | ".join(map(escaped, (first, *line.cells[1:]))) + " |")
    notes = [f"{number}. {escaped(text)}" for number, text in enumerate(sheet.notes, 1)]
    below = [part for part in ("\n".join(notes), sheet.legend) if part]
    return "\n\n".join(["\n".join(lines), *below]) + "\n"


def _html(sheet: Sheet) -> str:
    def row(cells: Iterable[str], tag: str, kind: str = "row") -> str:
        marks = [' class="number"' if heading in NUMBERS else "" for heading in HEADINGS]
        inner = "".join(f"<{tag}{m}>{html.escape(cell)}</{tag}>" for m, cell in zip(marks, cells, strict=True))
        return f'<tr class="{kind}">{inner}</tr>'

    title = html.escape(sheet.title)
    body = [
        row(("with " * (line.kind == "variant") + _marked(line), *line.cells[1:]), "td", line.kind)
        for line in sheet.lines
    ]
    notes = ["<ol>", *(f"<li>{html.escape(note)}</li>" for note in sheet.notes), "</ol>"] if sheet.notes else []
    notes += [f"<p>{sheet.legend}</p>"] if sheet.legend else []
    head = ["<!doctype html>", '<html lang="en">', '<meta charset="utf-8">', f"<title>{title}</title>"]
    table = ["<table>", f"<caption>{title}</caption>", row(HEADINGS, "th"), *body, "</table>"]
    return "\n".join([*head, f"<style>{STYLE}</style>", *table, *notes, "</html>", ""])


FORMATS = {"text": _text, "markdown": _markdown, "html": _html}


def _marked(line: Line) -> str:
    return line.cells[0] + "".join(f" ({number})" for number in line.notes)


def _name(table: Any) -> str:
    return table.__name__.rpartition(".")[2]


def _word(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
