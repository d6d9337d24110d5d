"""`torchcaps table` and `torchcaps recipes`: the papers' tables, with our numbers, and what there is to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torchcaps import recipes
from torchcaps.commands.words import OWN, metric_name
from torchcaps.recipes import Recipe
from torchcaps.results import Result, again, read, tables
from torchcaps.results.page import render_page
from torchcaps.results.readme import update_readme
from torchcaps.train import checkpoint

WIDE = 200  # columns where there is no terminal to ask


def print_table(
    name: str = "",
    *,
    format: Literal["text", "markdown", "html"] = "text",
    results: str = "",
    out: str = "",
    readme: str = "",
    page: str = "",
    commands: bool = False,
    missing: bool = False,
    shortened: bool = False,
    check: bool = False,
) -> int:
    """Print a table of a paper with our numbers beside its own: mean ± standard deviation over the seeds.

    Args:
        name: a table; without one they are listed.
        format: text, markdown or html.
        results: a file or folder of results; the usual places if not given: results, or beside the runs.
        out: write the table to this file instead.
        readme: render the results section of this README anew, from all results.
        page: render this page of all rows that were to be reproduced, RESULTS.md, keeping what is written in it.
        commands: print the commands that made the results, to be given again, instead.
        missing: print the commands of the rows on that page which have no result yet, instead.
        shortened: print the commands that would train in full the rows on that page which were shortened, instead, with
            the time that they would take.
        check: with --readme or --page, change nothing, but fail if the file is not as the results have it.
    """
    asked = [name for name, on in (("commands", commands), ("missing", missing), ("shortened", shortened)) if on]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} print different things; ask for one of them")
    if readme:
        _render_into(Path(readme), results, check, update_readme)
    if page:
        _render_into(Path(page), results, check, lambda text, lines: render_page(lines, text), new=True)
    if readme or page:
        return 0
    if check:
        raise ValueError("--check goes with --readme FILE or --page FILE")
    if commands:
        return _print_commands(name, results)
    if missing or shortened:
        if name:
            raise ValueError(f"--{'missing' if missing else 'shortened'} is for all tables; leave NAME out")
        lines = _results("", results or "results")
        if missing:
            print(again.missing(lines) or "# every row of the page has a result")
        else:
            print(again.in_full(lines) or "# no row of the page was shortened")
        return 0
    if not name:
        return _list(results)
    known: Any = recipes.tables().get(name, name)
    lines = _results(name, results)
    text = tables.render(_own(lines) if name == OWN else known, lines, format)
    if out:
        if not Path(out).parent.is_dir():
            raise ValueError(f"{out} cannot be written, as its folder is not there")
        checkpoint.write(Path(out), text.encode())
        print(f"{name} is in {out}")
    else:
        print(text, end="")
    return 0


def list_recipes(pattern: str = "*", *, json: bool = False) -> int:
    """Print all rows of all tables: what is trained on what, for how long, and the paper's number.

    Args:
        pattern: part of a row's name, or a shell pattern such as 'sabour2017_*'.
        json: print JSON with all fields instead of a table.
    """
    wanted = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    found = {name: recipes.find(name) for name in recipes.names() if fnmatchcase(name, wanted)}
    if not found:
        recipes.find(pattern)
    if json:
        _print_json({name: recipe.to_dict() for name, recipe in found.items()})
    else:
        _print_recipes(found)
    return 0


def _print_recipes(found: dict[str, Recipe]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("table:row", "model", "data", "epochs", "metric", "paper"):
        table.add_column(heading, justify="right" if heading == "epochs" else "left", no_wrap=heading == "table:row")
    for name, recipe in found.items():
        cells = (name, recipe.model, recipe.data, str(recipe.epochs), metric_name(recipe), recipe.reported)
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    console.print(table)
    console.print("\ntorchcaps train TABLE:ROW trains one of them; figures are per cent.")


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def _print_commands(name: str, results: str) -> int:
    if name:
        tables.find(name)
    lines = [line for line in _results(name, results or "results" * (not name)) if name in ("", line.table)]
    if not lines:
        raise ValueError(f"there are no results of {name or 'any table'}")
    print(again.commands(lines))
    return 0


def _list(results: str) -> int:
    width = max(map(len, recipes.tables()))
    for name, table in recipes.tables().items():
        if table.ROWS:
            runs = sum(line.table == name for line in _results(name, results))
            print(f"{name:<{width}}  {table.TITLE} ({len(table.ROWS)} rows, {runs or 'no'} result{'s' * (runs != 1)})")
    return 0


def _render_into(
    path: Path, results: str, check: bool, render: Callable[[str, list[Result]], str], new: bool = False
) -> None:
    """Writes a file anew from what it holds and from the results, or only looks whether it would change."""
    try:
        text = "" if new and not path.exists() else path.read_text()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    lines = read(results or "results")
    wanted = render(text, lines)
    if check:
        if sentence := tables.disagreement(text, wanted):
            raise ValueError(f"{path}, {sentence}; the same command without --check renders it anew")
        print(f"{path} is as the results have it")
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written, as its folder is not there")
    if wanted != text:
        checkpoint.write(path, wanted.encode())
    print(f"{path} has {len(lines)} result{'s' * (len(lines) != 1)}{'' if wanted != text else ', as before'}")


def _results(table: str, where: str) -> list[Result]:
    """From one place, or from all where `torchcaps train` puts them by itself."""
    if where:
        if not Path(where).exists():
            raise ValueError(f"there are no results in {where}: no such file or folder")
        return read(where)
    name = f"{table}.jsonl"
    places = [Path(name), Path("results"), Path("runs", name), *sorted(Path("runs").glob(f"*/{name}"))]
    return [line for place in places for line in read(place)]


def _own(lines: list[Result]) -> Any:
    """A table of what was trained on one's own images."""
    rows = {line.row: recipes.from_dict(line.recipe) for line in lines if line.table == OWN}
    return SimpleNamespace(__name__=OWN, TITLE="Images of one's own", ROWS=rows)
