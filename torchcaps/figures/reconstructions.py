"""What the decoder makes of the capsules: inputs above, reconstructions below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchcaps.figures.style import WIDTH, drawing, paste, sheet, shortened, theme
from torchcaps.pictures import Picture, columns_for, unpacked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEFT, GAP, HEAD, LINE, FOOT = 0.92, 0.05, 0.3, 0.17, 0.06  # inches


class Strip(NamedTuple):
    """One row of pictures, None where there is none, each with a word below; `tone` is plain, right or wrong."""

    name: str
    pictures: Sequence[Picture | None]
    words: Sequence[str]
    tone: str = "plain"


class Block(NamedTuple):
    """Strips that belong together, picture below picture."""

    title: str
    strips: Sequence[Strip]


def reconstructions(blocks: Sequence[Block], *, dark: bool = False) -> Figure:
    pictures = [picture for block in blocks for strip in block.strips for picture in strip.pictures]
    shapes = [picture.shape for picture in pictures if picture is not None]
    if not shapes:
        raise ValueError("there are no reconstructions to show")
    colours = theme(dark)
    tones = {"plain": colours.muted, "right": colours.right, "wrong": colours.wrong}
    columns = max(len(strip.pictures) for block in blocks for strip in block.strips)
    cell = (WIDTH - LEFT - 0.1) / max(columns, columns_for(*shapes[0][:2]))
    wide = cell - GAP
    high = wide * max(shape[0] / shape[1] for shape in shapes)
    height = sum(HEAD + len(block.strips) * (high + LINE) for block in blocks) + FOOT
    with drawing(height, dark) as figure:
        axes, y = sheet(figure), 0.0
        for block in blocks:
            axes.text(0.1, y + 0.21, block.title, fontsize=9.5, weight="bold")
            y += HEAD
            for strip in block.strips:
                axes.text(0.1, y + high / 2, strip.name, fontsize=7.5, color=colours.muted, va="center")
                for column, (picture, word) in enumerate(zip(strip.pictures, strip.words, strict=True)):
                    if picture is None:
                        continue
                    x = LEFT + column * cell
                    paste(axes, picture, x, y, wide, high)
                    if not word.startswith("("):
                        word = shortened(word, max(3, int(cell / 0.075)))
                    below = {"fontsize": 7.5, "color": tones[strip.tone], "ha": "center", "va": "top"}
                    axes.text(x + wide / 2, y + high + 0.025, word, **below)  # type: ignore[arg-type]
                y += high + LINE
    return figure


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """Of the numbers that `analysis.examples.reconstructions` gives."""
    return reconstructions([_block(block) for block in numbers["blocks"]], dark=dark)


def _block(block: Mapping[str, Any]) -> Block:
    strips = []
    for each in block["strips"]:
        pictures = [unpacked(text) if text else None for text in each["pictures"]]
        strips.append(Strip(each["name"], pictures, each["words"], each["tone"]))
    return Block(block["title"], strips)
