"""One HTML file with everything inside: no request leaves it, and it follows the reader's light or dark."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchcaps.figures.style import DARK, LIGHT, Theme


@dataclass(frozen=True)
class Shown:
    """A figure's PNG, or GIF, for light and for dark paper, and what it shows in words."""

    light: bytes
    dark: bytes
    words: str
    wide: bool = False  # better scrolled than made small


@dataclass(frozen=True)
class Table:
    """Cells are text; `marks` has a small word for some rows, which stands beside the first cell."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    marks: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    title: str
    text: str = ""
    figure: Shown | None = None
    table: Table | None = None
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """`headline` are numbers with a word below each, the first of them ours."""

    title: str
    subtitle: str
    headline: Sequence[tuple[str, str]]
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    foot: str = ""


def render_page(page: Page) -> str:
    headline = [f"<div><b>{_text(number)}</b><span>{_text(word)}</span></div>" for number, word in page.headline]
    facts = [f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in page.facts]
    notes = [f"<li>{_text(note)}</li>" for note in page.notes]
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{_text(page.title)}</title>",
        f"<style>{_style()}</style>",
        "</head>",
        "<body>",
        "<main>",
        "<header>",
        f"<h1>{_text(page.title)}</h1>",
        f"<p>{_text(page.subtitle)}</p>",
        "</header>",
        '<div class="headline">',
        *headline,
        "</div>",
        *(["<dl>", *facts, "</dl>"] if facts else []),
        *(['<ul class="notes">', *notes, "</ul>"] if notes else []),
        *(line for section in page.sections for line in _section(section)),
        *([f"<footer>{_text(page.foot)}</footer>"] if page.foot else []),
        "</main>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _section(section: Section) -> list[str]:
    lines = [f"<p>{_text(section.text)}</p>"] if section.text else []
    if section.figure is not None:
        lines += _figure(section.figure)
    if section.table is not None:
        lines += _table(section.table)
    title = f"<h2>{_text(section.title)}</h2>"
    if section.folded:
        return ["<section>", "<details>", f"<summary>{title}</summary>", *lines, "</details>", "</section>"]
    return ["<section>", title, *lines, "</section>"]


def _figure(shown: Shown) -> list[str]:
    light, dark = (
        f"data:image/{'gif' if each.startswith(b'GIF8') else 'png'};base64,{base64.b64encode(each).decode()}"
        for each in (shown.light, shown.dark)
    )
    return [
        f'<div class="{"figure wide" if shown.wide else "figure"}"><picture>',
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">',
        f'<img src="{light}" alt="{_text(shown.words)}">',
        "</picture></div>",
    ]


def _table(table: Table) -> list[str]:
    lines = ['<div class="table"><table>']
    if table.head:
        lines.append("<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in table.head) + "</tr>")
    for number, row in enumerate(table.rows):
        first, *rest = map(_text, row)
        mark = f" <small>{_text(table.marks[number])}</small>" if number in table.marks else ""
        lines.append(f"<tr><td>{first}{mark}</td>" + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>")
    return [*lines, "</table></div>"]


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _style() -> str:
    def variables(theme: Theme, page: str, faint: str) -> str:
        return (
            f"--page: {page}; --paper: {theme.paper}; --ink: {theme.ink}; --muted: {theme.muted}; "
            f"--line: {theme.grid}; --right: {theme.right}; --wrong: {theme.wrong}; --faint: {faint}"
        )

    return f"""
:root {{ color-scheme: light dark; {variables(LIGHT, "#f5f6f8", "#fdf0e8")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK, "#0f1115", "#33231b")} }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }}
main {{ max-width: 43rem; margin: 0 auto; padding: 1.5rem 1rem 3rem }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere }}
h2 {{ font-size: 1.1rem; margin: 0 0 .6rem; display: inline-block }}
header p, section > p, details > p {{ margin: 0 0 .8rem; color: var(--muted); overflow-wrap: anywhere }}
section, .headline, dl {{ background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 1rem; margin: 1rem 0 0 }}
.headline {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem }}
.headline b {{ display: block; font-size: 2rem; line-height: 1.15; font-variant-numeric: tabular-nums }}
.headline div:first-child b {{ color: var(--right) }}
.headline span {{ color: var(--muted); font-size: .9rem }}
dl {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem 1.2rem }}
dt {{ color: var(--muted); font-size: .8rem }}
dd {{ margin: 0; overflow-wrap: anywhere }}
.notes {{ background: var(--faint); border-radius: 12px; margin: 1rem 0 0; padding: .8rem 1rem .8rem 2rem }}
.figure {{ overflow-x: auto; margin: 0 -.4rem }}
.figure img {{ display: block; width: 100%; height: auto }}
.wide img {{ min-width: 44rem }}
.table {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere }}
th {{ color: var(--muted); font-weight: 500 }}
tr:last-child td {{ border-bottom: 0 }}
.figure + .table {{ margin-top: .8rem }}
small {{ color: var(--wrong); border: 1px solid; border-radius: 6px; padding: 0 .35em; font-size: .75rem;
  white-space: nowrap }}
summary {{ cursor: pointer }}
summary h2 {{ margin: 0 }}
details[open] summary {{ margin-bottom: .6rem }}
footer {{ color: var(--muted); font-size: .85rem; margin-top: 1.5rem }}
@media (max-width: 34rem) {{ main {{ padding: 1rem .6rem 2rem }} section, .headline, dl {{ padding: .8rem }} }}
"""
