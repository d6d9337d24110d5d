"""`torchcaps figure NAME RUN...`: one figure of the papers or beyond, as PNG, SVG and JSON."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDE = 160  # columns where there is no terminal to ask


def draw_figure(
    name: str = "",
    runs: tuple[str, ...] = (),
    *,
    out: str = "",
    settings: tuple[str, ...] = (),
    dark: bool = False,
    device: str = "auto",
) -> int:
    """Draw a figure from finished runs, as NAME.png and NAME.svg, with its numbers beside them as NAME.json.

    Without a name, all figures are listed with what they need. A file NAME.json instead of a name draws that figure
    again, without its runs.

    Args:
        name: of the figure.
        runs: folders of finished runs, as many as the figure is of; or of what was exported, or names of weights in
            the package.
        out: the folder for the files; by default figures in the run's folder, or here for several runs. What is drawn
            of weights without such a folder goes into figures in one here of their name.
        settings: an option of the figure, such as digit=5 or images=1000.
        dark: for dark paper.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from torchcaps.figures.catalog import KINDS, find
    from torchcaps.figures.style import need_matplotlib
    from torchcaps.report.drawn import check_runs, read_drawn, take_numbers
    from torchcaps.runs import home, open_run

    if not name:
        _list()
        return 0
    if name.endswith(".json"):
        if runs or settings:
            raise ValueError(f"{name} is drawn from its numbers alone; leave the runs and options out")
        need_matplotlib()
        drawn = read_drawn(Path(name), {kind.name: kind for kind in KINDS})
        folder = Path(out) if out else Path(name).parent
    else:
        kind = find(name)
        need_matplotlib()
        check_runs(kind, len(runs))
        opened = [open_run(run, device=device) for run in runs]
        drawn = take_numbers(kind, opened, read_settings(settings))
        folder = Path(out) if out else home(Path(runs[0])) / "figures" if len(runs) == 1 else Path("figures")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder; --out names one for the files")
    try:
        files = drawn.files(dark)
    except (LookupError, TypeError):
        if name.endswith(".json"):
            raise ValueError(f"the numbers in {name} are not those of {drawn.kind.name}") from None
        raise
    print("\n".join(map(str, drawn.write(folder, files))))
    return 0


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, where the value is as `read_value` reads it."""
    found: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"an option is KEY=VALUE, got {word!r}")
        found[key] = read_value(text)
    return found


def read_value(text: str) -> Any:
    """true, false, none, a Python literal, or else a plain word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from torchcaps.figures.catalog import KINDS

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("figure", "runs", "needs", "options", "what it shows"):
        table.add_column(heading, no_wrap=heading in ("figure", "runs"))
    for kind in KINDS:
        paper = f" ({kind.paper})" if kind.paper else ""
        options = ", ".join(kind.options)
        table.add_row(kind.name, kind.runs, ", ".join(kind.needs), options, f"{kind.what}{paper}")
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    console.print(table)
    console.print("\ntorchcaps figure NAME RUN draws one of them, torchcaps report RUN all that a run can give.")
