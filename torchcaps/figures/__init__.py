"""Figures of a run: each a function from plain data to a matplotlib Figure, in light or dark, and `png` for its bytes.

matplotlib is imported when the first figure is drawn; without it there is a sentence that says how to get it.
"""

from torchcaps.figures.calibration import calibration
from torchcaps.figures.confusion import confusion
from torchcaps.figures.curves import curves
from torchcaps.figures.mistakes import Case, mistakes
from torchcaps.figures.reconstructions import Block, Strip, reconstructions
from torchcaps.figures.routing import routing
from torchcaps.figures.style import png
from torchcaps.pictures import picture

__all__ = [
    "Block",
    "Case",
    "Strip",
    "calibration",
    "confusion",
    "curves",
    "mistakes",
    "picture",
    "png",
    "reconstructions",
    "routing",
]
