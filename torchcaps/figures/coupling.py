"""Which parts of an image vote for which class: heat maps, their way through the iterations, and a parse tree."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.figures.style import WIDTH, drawing, paste, sheet, shortened, theme
from torchcaps.pictures import Picture, unpacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EDGE, GAP, LINE, HEAD = 0.1, 0.07, 0.17, 0.34  # inches
CELLS = 5  # pictures side by side
LETTERS = 15  # below each
LEVEL = 1.24  # from one level of a tree to the next
BETWEEN, STILL = 5, 3  # pictures of the animation between two iterations, and at each


def draw(numbers: Mapping[str, Any], *, dark: bool = False) -> Figure:
    """What `analysis.coupling.coupling_view` gives."""
    colours = theme(dark)
    picture, classes, trees = unpacked(numbers["picture"]), numbers["classes"], numbers["trees"]
    wide = (WIDTH - 2 * EDGE - (CELLS - 1) * GAP) / CELLS
    high = wide * picture.shape[0] / picture.shape[1]
    rows = -(-(len(classes) + 1) // CELLS)
    frames = _some(len(numbers["frames"]), CELLS)
    row = high + LINE + GAP
    tall = [_depth(tree) * LEVEL + 0.98 for tree in trees]
    height = HEAD + rows * row + HEAD + row + sum(HEAD + each for each in tall) + EDGE
    with drawing(height, dark) as figure:
        axes, y = sheet(figure), 0.0
        _head(axes, y, "Where the votes come from", dark)
        number = f"test image {numbers['number']:,}"
        axes.text(WIDTH - EDGE, y + 0.23, number, fontsize=7.5, color=colours.muted, ha="right")
        y += HEAD
        shown = [(picture, _named(numbers["labels"]), colours.muted)]
        for each in classes:
            word = f"{shortened(each['name'], 9)}  {each['probability']:.2f}"
            shown.append((_overlaid(picture, each["heat"][-1]), word, _tone(each, numbers, dark)))
        for k, (one, word, tone) in enumerate(shown):
            x = EDGE + k % CELLS * (wide + GAP)
            _cell(axes, one, x, y + k // CELLS * row, wide, high, word, tone)
        y += rows * row
        iterated = numbers["frames"][0] != "evenly"
        _head(axes, y, "From iteration to iteration" if iterated else "Spread evenly, and routed", dark)
        y += HEAD
        strip = [(each, frame) for each in classes[: max(1, CELLS // len(frames))] for frame in frames]
        for k, (each, frame) in enumerate(strip):
            one = _overlaid(picture, each["heat"][frame], float(np.max(each["heat"])))
            word = f"{shortened(each['name'], 7)}: {numbers['frames'][frame]}"
            _cell(axes, one, EDGE + k * (wide + GAP), y, wide, high, word, colours.muted)
        y += row
        for tree, room in zip(trees, tall, strict=True):
            _head(axes, y, f"What class {tree['name']} is made of", dark)
            y += HEAD
            _tree(axes, tree, picture, y, dark)
            y += room
    return figure


def animate(numbers: Mapping[str, Any], *, dark: bool = False) -> bytes:
    """The maps of the classes from iteration to iteration, as a GIF that goes on for ever."""
    from PIL import Image

    picture, classes = unpacked(numbers["picture"]), numbers["classes"][:3]
    pages: list[Any] = []
    for name, weights in _steps_between(numbers["frames"]):
        figure = _page(picture, classes, name, weights, dark)
        pages.append(Image.fromarray(_pixels(figure)))
    colours = pages[-1].quantize(255)
    pages = [page.quantize(palette=colours) for page in pages]
    buffer = io.BytesIO()
    times = [90] * (len(pages) - 1) + [1500]
    pages[0].save(buffer, "GIF", save_all=True, append_images=pages[1:], duration=times, loop=0, optimize=False)
    return buffer.getvalue()


def _pixels(figure: Figure) -> Any:
    """Shapes: -> uint8 [h, w, 3]"""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(110)
    canvas = FigureCanvasAgg(figure)
    with style.context("default"):
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _page(picture: Picture, classes: Sequence[Mapping[str, Any]], name: str, weights: Any, dark: bool) -> Figure:
    colours = theme(dark)
    wide = 1.5
    high = wide * picture.shape[0] / picture.shape[1]
    width = 2 * EDGE + len(classes) * wide + (len(classes) - 1) * GAP
    with drawing(HEAD + high + LINE + GAP, dark, width=width) as figure:
        axes = sheet(figure)
        _head(axes, 0.0, name, dark)
        for k, each in enumerate(classes):
            heats = np.asarray(each["heat"], dtype=np.float64)
            one = _overlaid(picture, np.tensordot(weights, heats, 1), float(heats.max()))
            word = f"{shortened(each['name'], 12)}  {each['probability']:.2f}"
            _cell(axes, one, EDGE + k * (wide + GAP), HEAD, wide, high, word, colours.ink)
    return figure


def _steps_between(frames: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The name of each picture of the animation, and how much of each frame is in it."""
    whole = np.eye(len(frames))
    for k, name in enumerate(frames):
        yield from [(name, whole[k])] * STILL
        if k + 1 < len(frames):
            for step in range(1, BETWEEN + 1):
                part = step / (BETWEEN + 1)
                yield name if part < 0.5 else frames[k + 1], (1 - part) * whole[k] + part * whole[k + 1]


def _tree(axes: Axes, tree: Mapping[str, Any], picture: Picture, y: float, dark: bool) -> None:
    """The class above, the first capsules below; a line is as wide as the child's share in its parent, by level."""
    colours = theme(dark)
    leaves = _leaves(tree)
    pitch = (WIDTH - 2 * EDGE) / leaves
    side = min(0.62, pitch - 0.04)
    high = side * picture.shape[0] / picture.shape[1]
    used = 0
    largest = _largest(tree)

    def place(node: Mapping[str, Any], depth: int) -> float:
        nonlocal used
        below = [place(child, depth + 1) for child in node["children"]]
        if not below:
            used += 1
        middle = EDGE + (used - 0.5) * pitch if not below else (below[0] + below[-1]) / 2
        top = y + depth * LEVEL
        for x, child in zip(below, node["children"], strict=True):
            bottom = y + (depth + 1) * LEVEL
            start = top + high + (0.34 if depth and node["site"] else 0.24 if depth else 0)
            _tie(
                axes, (middle, start), (x, bottom - 0.02), 0.4 + 5 * child["share"] / largest[depth + 1], colours.right
            )
        one = _overlaid(picture, unpacked(node["heat"])[..., 0])
        paste(axes, one, middle - side / 2, top, side, high)
        if depth:
            _outline(axes, node["box"], picture, (middle - side / 2, top, side, high), colours.right)
        small: dict[str, Any] = {"ha": "center", "va": "top", "clip_on": False}
        if depth:
            word = f"{100 * node['share']:.0f} %"
            axes.text(middle, top + high + 0.03, word, fontsize=6.5, weight="bold", **small)
            where = f"type {node['type']}" + ("" if node["site"] is None else "\n{}, {}".format(*node["site"]))
            axes.text(
                middle, top + high + 0.135, where, fontsize=5.5 if leaves > 9 else 6, color=colours.muted,
                linespacing=1.05, **small,
            )  # fmt: skip
        return middle

    place(tree, 0)


def _tie(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float, colour: str) -> None:
    """A line that leaves and arrives upright."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    half = (start[1] + end[1]) / 2
    curve = Path([start, (start[0], half), (end[0], half), end], [Path.MOVETO, *[Path.CURVE4] * 3])
    style = {"edgecolor": colour, "linewidth": width, "alpha": 0.35, "capstyle": "butt", "zorder": 0}
    axes.add_patch(PathPatch(curve, facecolor="none", **style))


def _outline(
    axes: Axes, box: Sequence[int], picture: Picture, at: tuple[float, float, float, float], colour: str
) -> None:
    from matplotlib.patches import Rectangle

    x, y, wide, high = at
    top, left, bottom, right = box
    rows, columns = picture.shape[:2]
    if (bottom - top) * (right - left) < 0.8 * rows * columns:
        corner = (x + wide * left / columns, y + high * top / rows)
        size = (wide * (right - left) / columns, high * (bottom - top) / rows)
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=0.7))


def _overlaid(picture: Picture, heat: Any, top: float | None = None) -> Picture:
    """The image in grey, glowing where the heat is; a stereo pair glows in both views.

    Shapes: picture [h, w, 3], heat [h, w] -> [h, w, 3]
    """
    from matplotlib import colormaps

    heat = np.asarray(heat, dtype=np.float64)
    heat = np.clip(heat / max(float(heat.max()) if top is None else top, 1e-30), 0, 1)
    heat = np.tile(heat, (1, picture.shape[1] // heat.shape[1]))
    grey = picture.mean(axis=2, keepdims=True) / 255
    glow = colormaps["inferno"](0.25 + 0.7 * heat)[..., :3]
    strength = (0.92 * heat**0.65)[..., None]
    mixed = (1 - strength) * 0.75 * grey + strength * (0.85 * glow + 0.15 * grey)
    return np.round(255 * np.clip(mixed, 0, 1)).astype(np.uint8)


def _cell(
    axes: Axes, picture: Picture, x: float, y: float, width: float, height: float, word: str, colour: str
) -> None:
    paste(axes, picture, x, y, width, height)
    axes.text(x + width / 2, y + height + 0.03, word, fontsize=7.5, color=colour, ha="center", va="top")


def _head(axes: Axes, y: float, text: str, dark: bool) -> None:
    axes.text(EDGE, y + 0.23, text, fontsize=9.5, weight="bold", color=theme(dark).ink)


def _tone(each: Mapping[str, Any], numbers: Mapping[str, Any], dark: bool) -> str:
    colours = theme(dark)
    if each["label"]:
        return colours.right
    return colours.wrong if each["name"] in numbers["predicted"] else colours.muted


def _some(count: int, most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    return (
        sorted({round(k * (count - 1) / (min(count, most) - 1)) for k in range(min(count, most))}) if count > 1 else [0]
    )


def _named(labels: Sequence[str]) -> str:
    """In the letters that fit below a picture."""
    room = max(2, (LETTERS + 5) // max(1, len(labels)) - 5)
    return shortened(" and ".join(shortened(each, room) for each in labels) or "nothing", LETTERS)


def _depth(node: Mapping[str, Any]) -> int:
    return 1 + max((_depth(child) for child in node["children"]), default=-1) if node["children"] else 0


def _largest(tree: Mapping[str, Any]) -> list[float]:
    """The largest share of a node, level by level."""
    found, level = [], [tree]
    while level:
        found.append(max(node["share"] for node in level))
        level = [child for node in level for child in node["children"]]
    return found


def _leaves(node: Mapping[str, Any]) -> int:
    return sum(map(_leaves, node["children"])) if node["children"] else 1
