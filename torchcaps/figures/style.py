"""How all figures look, on light paper and on dark, whatever the user's own matplotlibrc says."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

from torchcaps.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.2  # inches, so that nine points can be read on a phone
DPI = 240
MINUS = "\N{MINUS SIGN}"
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    muted: str
    grid: str
    right: str
    wrong: str
    lines: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2430",
    muted="#667085",
    grid="#e6e8ec",
    right="#2563c9",
    wrong="#d9480f",
    lines=("#1f2430", "#2563c9", "#d9480f", "#2b8a5e", "#8250c4", "#b08900"),
)
DARK = Theme(
    paper="#181b20",
    ink="#e7e9ee",
    muted="#98a1b0",
    grid="#30353e",
    right="#78aaff",
    wrong="#ff9265",
    lines=("#e7e9ee", "#78aaff", "#ff9265", "#6fd3a5", "#c4a1ff", "#e3c34d"),
)


def theme(dark: bool = False) -> Theme:
    return DARK if dark else LIGHT


@contextmanager
def drawing(height: float, dark: bool = False, *, width: float = WIDTH, **options: Any) -> Iterator[Figure]:
    """A new figure, to be drawn within the block."""
    need_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", _settings(theme(dark))]):
        yield Figure(figsize=(width, height), **options)


def need_matplotlib() -> None:
    try:
        import matplotlib.style  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib: pip install 'torchcaps[figures]'") from None


def png(figure: Figure) -> bytes:
    """The same bytes for the same figure: nothing in them tells the time or the program."""
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # shown as a box
        figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """As `png`, the same for the same figure."""
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", {"svg.hashsalt": "torchcaps"}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        colour = figure.get_facecolor()
        figure.savefig(buffer, format="svg", facecolor=colour, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", pad=7)


def sheet(figure: Figure) -> Axes:
    """Axes over the whole figure that are measured in inches from its upper left corner."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def paste(axes: Axes, picture: Picture, x: float, y: float, width: float, height: float) -> None:
    """A picture on a sheet, as large as fits into a box and in its middle."""
    tall = picture.shape[0] / picture.shape[1]
    wide = min(width, height / tall)
    x, y = x + (width - wide) / 2, y + (height - wide * tall) / 2
    how = "nearest" if picture.shape[0] < DPI * height / 2 else "antialiased"
    axes.imshow(picture, extent=(x, x + wide, y + wide * tall, y), aspect="auto", interpolation=how)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def wrapped(text: str, most: int) -> str:
    """In lines of so many letters; a number stays with the word before it."""
    return fill(re.sub(r" (?=\d)", NO_BREAK, text), most).replace(NO_BREAK, " ")


def from_zero(axes: Axes) -> None:
    """The vertical axis from 0 to above the highest marker, also where all values are nearly the same."""
    top = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.08 * top if math.isfinite(top) and top > 0 else 1)


def whole_ticks(axes: Axes) -> None:
    """For epochs, steps and iterations, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _settings(colours: Theme) -> dict[str, Any]:
    return {
        "figure.facecolor": colours.paper,
        "figure.constrained_layout.h_pad": 0.08,
        "figure.constrained_layout.hspace": 0.06,
        "axes.facecolor": colours.paper,
        "axes.edgecolor": colours.grid,
        "axes.labelcolor": colours.muted,
        "axes.titlecolor": colours.ink,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours.grid,
        "grid.linewidth": 0.7,
        "xtick.color": colours.grid,
        "ytick.color": colours.grid,
        "xtick.labelcolor": colours.muted,
        "ytick.labelcolor": colours.muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.labelcolor": colours.ink,
        "legend.handlelength": 1.2,
        "lines.linewidth": 1.6,
        "lines.markersize": 3.5,
        "text.color": colours.ink,
        "text.parse_math": False,  # class names are no formulas
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "image.interpolation": "nearest",
    }
