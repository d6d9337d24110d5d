"""One line of JSON for each finished run, and the papers' tables with our numbers beside theirs, made from these lines.

>>> append("results/mnist.jsonl", Result.now(table="mazzia2021_table2", row="efficient", ...))
>>> print(render("mazzia2021_table2", read("results")))

Figures are fractions in the lines and per cent in the tables.
"""

from __future__ import annotations

import hashlib
import html
import json
import logging
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from torchcaps import recipes

log = logging.getLogger("torchcaps")

PACKAGE = Path(__file__).parent
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


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run. `test` is of the epoch that the recipe selects, `test_last` of the last where that is another.

    `planned` are the epochs that the table's row asks for, `energy` joules, `curves` one value an epoch for each word,
    `data` a checksum for each split, `members` the runs of an ensemble.
    """

    table: str
    row: str
    recipe: dict[str, Any]
    seed: int
    test: dict[str, Any]
    epochs: int
    planned: int
    selected: str = "last"
    epoch: int | None = None
    test_last: dict[str, Any] | None = None
    test_reads: int = 1
    validation: dict[str, Any] | None = None
    curves: dict[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    commit: str = "unknown"
    dirty: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    seconds: float | None = None
    energy: float | None = None
    finished: str = ""

    @property
    def shortened(self) -> bool:
        return self.epochs < self.planned

    @classmethod
    def now(cls, **values: Any) -> Result:
        """With the commit, the environment, the time, and the epochs planned, unless they are given."""
        commit, dirty = source()
        found = {"commit": commit, "dirty": dirty, "environment": environment(), "planned": _planned(values)}
        return cls(**{**found, "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"), **values})

    def line(self) -> str:
        """Numbers that are none become null."""
        return json.dumps(_plain({**asdict(self), "shortened": self.shortened}), ensure_ascii=False, allow_nan=False)


KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a word"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "dict": ((dict,), "names with values"),
    "tuple": ((list, tuple), "a list"),
}


def from_line(line: str) -> Result:
    """The result that a line holds. Fields that are not known, from a newer version, are left out."""
    values = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(values, dict):
        raise ValueError("it holds no fields")
    known: dict[str, Any] = {}
    for each in fields(Result):
        kind, _, optional = str(each.type).partition(" | ")
        if each.name in values:
            value = values[each.name]
            types, word = KINDS[kind.partition("[")[0]]
            whole = not isinstance(value, bool) or bool in types
            if not (isinstance(value, types) and whole) and not (optional and value is None):
                raise ValueError(f"its {each.name} must be {word}, got {json.dumps(value)[:40]}")
            known[each.name] = tuple(values[each.name]) if types == (list, tuple) else value
    missing = [name for name in ("table", "row", "recipe", "seed", "test", "epochs", "planned") if name not in known]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return Result(**known)


def append(path: str | os.PathLike[str], result: Result) -> None:
    """Adds a line at the end, whole or not at all, and on the disk when this returns. What is there stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = result.line().encode() + b"\n"
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=60):
        new = not path.exists()
        with path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end and file.read(1) != b"\n"  # a line that was cut short must not take this one with it
            try:
                _write_all(file.fileno(), b"\n" + line if torn else line)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        if new:
            _sync_folder(path.parent)


def read(where: str | os.PathLike[str], *, broken: str = "refuse") -> list[Result]:
    """All results of a file, or of a folder's *.jsonl in the order of their names; none where there is no such place.

    Args:
        broken: "refuse" raises for a line that is none, "skip" says so in the log and goes on.
    """
    if broken not in ("refuse", "skip"):
        raise ValueError(f"broken must be 'refuse' or 'skip', got {broken!r}")
    where = Path(where)
    found = []
    for path in sorted(where.glob("*.jsonl")) if where.is_dir() else [where] if where.exists() else []:
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                found.append(from_line(line.decode()))
            except (ValueError, RecursionError) as problem:
                what = "it is cut short or no JSON" if isinstance(problem, UNREADABLE) else problem
                sentence = f"{path}, line {number} is broken: {what}"
                if broken == "refuse":
                    raise ValueError(f"{sentence}; repair or remove that line, nothing was changed") from None
                log.warning("%s; it is skipped", sentence)
    return found


UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, RecursionError)


def source() -> tuple[str, bool]:
    """The commit of this package and whether its files differ from it; "unknown" where it is not in a checkout."""
    tracked, commit = _git("ls-files", "--error-unmatch", "__init__.py"), _git("rev-parse", "HEAD")
    if not tracked or not commit:
        return "unknown", False
    return commit, bool(_git("status", "--porcelain", "--", "."))


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def checksums(splits: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each split's images and labels; of what is generated, its base and options; of files, their names."""
    return {word: _checksum(split) for word, split in splits.items()}


def _checksum(split: Any) -> str:
    digest = hashlib.sha256()
    about: list[Any] = [type(split).__name__, len(split), list(split.image), list(split.class_names)]
    if hasattr(split, "base"):
        about += [_checksum(split.base), split.options]
    elif hasattr(split, "paths"):
        common = os.path.commonpath([os.path.dirname(path) for path in split.paths])
        about += [[os.path.relpath(path, common), os.path.getsize(path)] for path in split.paths]
    digest.update(json.dumps(_plain(about)).encode())
    for word in ("images", "labels"):
        if (values := getattr(split, word, None)) is not None and not hasattr(split, "base"):
            digest.update(values.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


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
                groups.setdefault(_variation(recipe, result), {})[result.seed, result.members] = result
        notes = [sheet.note(text) for text in (_assumed(recipe), recipe.note) if text]
        metric = recipe.metric.replace("_", " ") + ("" if recipe.metric == "loss" else " %")
        plain = list(groups.pop("", {}).values())
        cells = _cells(recipe, plain) if plain else ("not run", "", "", "")
        more = [sheet.note(text) for text in _remarks(plain)]
        sheet.lines.append(Line((row, metric, recipe.reported, *cells), notes + more))
        for label, group in groups.items():
            runs = list(group.values())
            remarks = [sheet.note(text) for text in _remarks(runs)]
            sheet.lines.append(Line((label, "", "", *_cells(recipe, runs)), remarks, "variant"))
    for row, printed in getattr(table, "CITED", {}).items():
        sheet.lines.append(Line((row, "", str(printed), "cited", "", "", ""), kind="cited"))
    strangers = sorted({result.row for result in own} - set(table.ROWS))
    if strangers:
        sheet.note(f"there are results of rows that this table does not have: {', '.join(strangers)}")
    return sheet


def _variation(recipe: recipes.Recipe, result: Result) -> str:
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
    if result.epochs != recipe.epochs:
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
    deviation = f"{statistics.mean(errors):.2f}" if errors and recipe.metric != "loss" else ""
    return _mean([_figure(recipe.metric, run.test, run) for run in runs]), str(len(runs)), deviation, where


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


def _remarks(runs: list[Result]) -> list[str]:
    """What a reader should know of these runs."""
    remarks = [f"members, chosen on validation: {', '.join(run.members)}" for run in runs if run.members]
    dirty = sorted({run.commit[:7] for run in runs if run.dirty})
    if dirty:
        remarks.append(f"run with changes that commit {' and '.join(dirty)} does not have")
    if any(run.test_reads != 1 for run in runs):
        remarks.append("the test set was read more than once")
    return remarks


def _assumed(recipe: recipes.Recipe) -> str:
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


def _markdown(sheet: Sheet) -> str:
    def escaped(text: str) -> str:
        return " ".join("".join(f"\\{c}" if c in "\\|<>*_`" else c for c in text).split())

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


def _planned(values: Mapping[str, Any]) -> int:
    table = recipes.tables().get(values["table"])
    row = table.ROWS.get(values["row"]) if table else None
    return values["recipe"]["epochs"] if row is None else row.epochs


def _plain(value: Any) -> Any:
    """As JSON has it: numbers that are none become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _git(*words: str) -> str:
    """What git says of the package's folder; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
