"""The README's table: every row that has been run, in one line, beside what the paper prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchcaps.results import Result
from torchcaps.results.page import brief, claimed_by, lines_of, others, ours
from torchcaps.results.plan import GROUPS, Group
from torchcaps.results.sheet import escaped

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEAD = "| | metric | paper | ours | n | epochs | a run took |\n| --- | --- | ---: | ---: | ---: | --- | --- |"


def render_readme_section(results: Sequence[Result], groups: Iterable[Group] | None = None) -> str:
    """Of several lines in RESULTS.md the first, which has the row's own settings, or the most epochs and seeds."""
    groups = (*GROUPS, ours(), others(results)) if groups is None else tuple(groups)
    claimed = claimed_by(results, [entry for group in groups for entry in group.entries])
    lines = []
    for group in groups:
        ran = [
            entry
            for entry in group.entries
            if not group.curves and any(run.look <= entry.look for run in claimed[id(entry)])
        ]
        lines += [f"| **{escaped(group.title)}** | | | | | | |"] * bool(ran)
        for entry in ran:
            (label, metric, printed, found, n, protocol, epochs, took, _), *_ = lines_of(entry, claimed[id(entry)])[0]
            views = [word for word in protocol.split(", ") if "views" in word]  # by which a test is kinder
            name = ", ".join([brief(entry.label, label), *views])
            cells = (name, metric, printed, found, n, epochs, took.removesuffix(" in bf16"))
            lines.append(f"| {' | '.join(map(escaped, cells))} |")
    return "\n".join([BEGIN, "", *([HEAD, *lines] if lines else ["Nothing has been run yet."]), "", END])


def update_readme(text: str, results: Sequence[Result], groups: Iterable[Group] | None = None) -> str:
    """The text with its results section as the results have it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the README needs {BEGIN!r} and {END!r}, once each and in this order, around its results")
    return before + render_readme_section(results, groups) + after
