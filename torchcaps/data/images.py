"""One image file after the other: what its header says, its pixels, and what to do with one that cannot be read."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.errors import DataError, NotWritten

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # 8192 x 8192; what claims to be larger is more likely a bomb than a picture
GREY = ("1", "L", "LA", "I")  # and I;16 in its byte orders
THREADS = min(8, os.cpu_count() or 1)
SKIP = "replace or remove it, or leave such files out with on_error='skip' (--on-error skip)"
ORIENTATION = 0x0112  # the EXIF tag; from 5 on the sides change places


class Header(NamedTuple):
    """What a file says of its image before it is decoded."""

    height: int
    width: int
    grey: bool


def look(path: str) -> Header:
    """Size as seen (EXIF turns it) and colour of a still image of bearable size; a DataError for anything else."""
    return _reading(path, _header)


def read_image(path: str, image: tuple[int, int, int], advice: str = SKIP) -> Tensor:
    """The pixels of a file, see `fit_image`; `advice` ends the sentence of the DataError where it cannot be read.

    Shapes: image (c, h, w) with c = 1 or 3 -> uint8 [c, h, w]
    """
    return _reading(path, lambda opened: fit_image(opened, image), advice)


def check_on_error(on_error: str) -> None:
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error is 'stop' or 'skip', not {on_error!r}")


def each(
    what: Callable[[Any], Any], items: Sequence[Any], doing: str, on_error: str, threads: int = 1
) -> tuple[list[Any], list[str]]:
    """What each item gives, None where it cannot be read under "skip"; and the failures, a sentence each."""
    failures: list[str] = []

    def attempt(item: Any) -> Any:
        try:
            return what(item)
        except DataError as error:
            if on_error != "skip" or isinstance(error, NotWritten):
                raise
            failures.append(str(error))
            return None

    with ThreadPoolExecutor(threads) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", pillow().DecompressionBombWarning)  # refused anyway, with a sentence
        try:
            results = map(attempt, items) if threads == 1 else pool.map(attempt, items)
            return list(track(results, doing, len(items))), sorted(failures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError("reading images needs Pillow: pip install 'torchcaps[data]'") from error
    return PIL.Image


def track(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """`items` under a progress bar, where there is a terminal to show it."""
    from rich.console import Console
    from rich.progress import Progress

    console, to_terminal = Console(stderr=True), sys.stdout.isatty()
    if not console.is_terminal:
        yield from items
        return
    with Progress(console=console, transient=True, redirect_stdout=to_terminal) as bar:
        yield from bar.track(items, total, description=what)


def _reading(path: str, what: Callable[[Image], Any], advice: str = SKIP) -> Any:
    try:
        with pillow().open(path) as opened:
            return what(opened)
    except DataError as error:
        reason = str(error)
    except FileNotFoundError:
        reason = "is not there"
    except Exception as error:  # Pillow's decoders raise SyntaxError, struct.error, EOFError and more
        reason = f"cannot be read as an image ({error})"
    raise DataError(f"{path} {reason}; {advice}")


def _header(opened: Image) -> Header:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise DataError(f"claims {width} x {height} pixels, more than the {MOST_PIXELS:,} that are read")
    frames = getattr(opened, "n_frames", 1)
    if frames > 1 and opened.format != "MPO":  # cameras keep a second view or a preview in an MPO
        raise DataError(f"holds {frames} frames, not one still image")
    # a TIFF tells its turned size already; asking a PNG for EXIF it has not met yet would decode it
    ask = opened.format not in ("TIFF", "PNG") or (opened.format == "PNG" and "exif" in opened.info)
    if ask and opened.getexif().get(ORIENTATION, 1) >= 5:
        width, height = height, width
    palette = opened.getpalette() if opened.mode == "P" else None
    grey = opened.mode.split(";")[0] in GREY or (palette is not None and palette[::3] == palette[1::3] == palette[2::3])
    return Header(height, width, grey)


def fit_image(opened: Image, image: tuple[int, int, int]) -> Tensor:
    """Turned as EXIF says, laid on white where transparent, scaled to cover the size asked for, cropped to its centre.

    Shapes: image (c, h, w) with c = 1 or 3 -> uint8 [c, h, w]
    """
    import numpy as np
    from PIL import ImageOps

    _header(opened)
    channels, height, width = image
    side = 2 * max(height, width)
    opened.draft(None, (side, side))  # a large JPEG is decoded at a half, a quarter or an eighth of its size
    still = _coloured(ImageOps.exif_transpose(opened), channels)
    if still.size != (width, height):
        still = ImageOps.fit(still, (width, height), pillow().Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(still)).view(height, width, channels)
    return pixels.permute(2, 0, 1).contiguous()


def _coloured(still: Image, channels: int) -> Image:
    import numpy as np

    if still.mode == "F":
        raise DataError("holds floating-point pixels, whose range nobody knows; save it with 8 or 16 bits")
    if still.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        values = np.asarray(still).astype(np.int64).clip(0, 65535)
        still = pillow().fromarray(((values + 128) // 257).astype(np.uint8))
    elif still.mode in ("RGBA", "LA", "PA") or "transparency" in still.info:
        colours = still.convert("RGBA")
        still = pillow().alpha_composite(pillow().new("RGBA", still.size, "white"), colours)
    return still.convert("L" if channels == 1 else "RGB")
