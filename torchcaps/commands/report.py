"""`torchcaps report RUN`: every figure that a run can give, in one HTML file."""

from __future__ import annotations

import sys


def make_report(run: str, *, out: str = "", beside: tuple[str, ...] = (), device: str = "auto") -> int:
    """Write the report of a finished run anew, with every figure that it can give, into one HTML file.

    Each figure that torchcaps figure lists is also in the folder figures beside it, as PNG, SVG and JSON. The report
    tells what this run cannot give; weights without the folder of their run have no curves, and are tested anew.

    Args:
        run: the folder of a finished run, one that torchcaps export wrote, or the name of weights in the package.
        out: the folder for the files; by default the run's, or for weights without one a folder here of their name.
        beside: other runs, for the figures that compare several.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from torchcaps.figures.style import need_matplotlib
    from torchcaps.report import write_report

    need_matplotlib()

    def say(title: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{title}", end="", file=sys.stderr, flush=True)

    path = write_report(run, out=out or None, everything=True, beside=beside, device=device, say=say)
    say("")
    print(path)
    return 0
