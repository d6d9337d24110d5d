"""A table's cells and notes, as text, Markdown or HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field

HEADINGS = ("row", "metric", "paper", "ours", "n", "standard error", "epoch", "a run took")
NUMBERS = {"paper", "ours", "n", "standard error"}
STYLE = (
    "body { font: 16px/1.5 system-ui, sans-serif; color-scheme: light dark; margin: 2em } "
    "table { border-collapse: collapse } th, td { padding: .2em .8em; border-bottom: 1px solid #8886 } "
    "th, td { text-align: left } .number { text-align: right } .cited { opacity: .7 }"
)


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
