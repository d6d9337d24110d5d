"""Own images: a folder with one sub-folder a class, or a CSV of paths and labels."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.errors import DataError
from torchcaps.data.images import THREADS, Header, check_on_error, each, look, read_image
from torchcaps.data.listing import Found, in_folders, in_table
from torchcaps.data.random import permuted
from torchcaps.data.splits import DataSet, Stored
from torchcaps.data.stream import Streamed

SIDE = 64
BUDGET = 4 << 30

log = logging.getLogger(__name__)


def load_folder(
    path: str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
    classes: Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    test: float = 0.2,
    seed: int = 0,
    on_error: str = "stop",
    memory_budget: int = BUDGET,
) -> DataSet:
    """A data set of one's own images, of any size and colour.

    Sub-folders are classes, images deeper inside count too; a level of train/, test/ and perhaps validation/ above them
    gives the split. A CSV has a line of column names, then a line for each image: `path` (from the CSV's folder),
    `label` or `label1`, `label2`, ... or several labels in one cell with ";" between, and perhaps `split`. Several
    labels give labels [n, k], filled up with -1.

    Images of one common size keep it; others are scaled to cover `size` and cropped to its centre. They are grey if all
    files are, else RGB; transparency is laid on white. What fits into the budget is decoded once into a Stored split,
    what does not is Streamed from disk: `batches_for` serves both.

    Args:
        path: the folder, or the CSV itself.
        csv: the CSV, if its paths start from another folder than its own: from `path`.
        classes: all class names in order, if not those found, sorted; a CSV may then label by number, too.
        size: the side of a square, or height and width; 64 if files differ and nothing is given.
        channels: 1 or 3.
        test: the share of each class that is held out by `seed` where no test part is given; with several labels, the
            share of all images.
        on_error: "stop" at a file that is no still image, or "skip" it: the set's notes say how many, which and why.
        memory_budget: bytes that decoded images may take.
    """
    check_on_error(on_error)
    sides = _sides(size)
    if channels not in (None, 1, 3):
        raise ValueError(f"images have 1 channel or 3, not {channels}")
    if not isinstance(test, (int, float)) or not 0 < test < 1:
        raise ValueError(f"test is the share to hold out, between 0 and 1, not {test!r}")
    root, table = Path(path), None
    if csv is not None:
        table = root / csv if (root / csv).exists() else Path(csv)
    elif root.suffix.lower() == ".csv" and not root.is_dir():
        root, table = root.parent, root
    if not root.is_dir():
        raise DataError(f"{root} is no folder; give one that holds the images, or a CSV file")
    found, notes = in_folders(root) if table is None else (in_table(table, root), [])
    names = tuple(classes) if classes is not None else _names(found, table or root)
    labels = _numbers(found, names, by_number=table is not None and classes is not None)

    headers, failures = each(_look, found, "looking at images", on_error, THREADS)
    kept = [row for row, header in enumerate(headers) if header is not None]
    image = _shape([headers[row] for row in kept], sides, channels)
    parts = _parts([found[row] for row in kept], [labels[row] for row in kept], test, seed, notes)
    streams = len(kept) * image[0] * image[1] * image[2] > memory_budget
    splits: dict[str, Stored | Streamed] = {}
    for part in dict.fromkeys(("train", "test", *parts)):
        rows = [row for row, of in zip(kept, parts, strict=True) if of == part]
        wanted = _padded([labels[row] for row in rows], max(map(len, labels)))
        paths = [found[row].path for row in rows]
        if streams:
            splits[part] = Streamed(paths, wanted, names, image, on_error=on_error)
        else:
            splits[part], more = _stored(paths, wanted, names, image, on_error, part)
            failures += more
        _all_there(splits[part], part, root)
    if failures:
        notes += [f"{len(failures)} of {len(found)} files were skipped", *failures]
        log.warning("%d of %d files were skipped; the first: %s", len(failures), len(found), failures[0])
    return DataSet("folder", splits["train"], splits["test"], splits.get("validation"), notes=tuple(notes))


def _names(found: list[Found], where: Path) -> tuple[str, ...]:
    """Sorted, as numbers where all of them are."""
    names = {label for item in found for label in item.labels}
    folded: dict[str, str] = {}
    for name in sorted(names):
        if name.casefold() in folded:
            raise DataError(f"{where} has classes {folded[name.casefold()]!r} and {name!r}; give them one spelling")
        folded[name.casefold()] = name
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        return tuple(sorted(names))
    for item in found:
        if any(int(label) < 0 for label in item.labels):
            raise DataError(f"{item.where} has the label {min(item.labels, key=int)}, out of range; labels start at 0")
    return tuple(sorted(names, key=int))


def _numbers(found: list[Found], names: tuple[str, ...], by_number: bool) -> list[tuple[int, ...]]:
    known = {name: number for number, name in enumerate(names)}
    if by_number:
        known = {str(number): number for number in range(len(names))} | known
    for item in found:
        for label in item.labels:
            if label not in known:
                few = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                allowed = f"{few}, or 0 to {len(names) - 1}" if by_number else few
                raise DataError(f"{item.where} has the label {label!r}, which is out of range; there are {allowed}")
    return [tuple(known[label] for label in item.labels) for item in found]


def _look(item: Found) -> Header:
    try:
        return look(item.path)
    except DataError as error:
        raise DataError(f"{item.where}: {error}" if item.line else str(error)) from None


def _sides(size: Any) -> tuple[int, int] | None:
    """Height and width, where they are given."""
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(f"size={size!r} is neither the side of a square nor height and width, in whole pixels from 1")
    return sides[0], sides[1]


def _shape(headers: list[Header], sides: tuple[int, int] | None, channels: int | None) -> tuple[int, int, int]:
    if not headers:
        raise DataError("every image was skipped; load with on_error='stop' to see why")
    sizes = {(header.height, header.width) for header in headers}
    height, width = sides or (sizes.pop() if len(sizes) == 1 else (SIDE, SIDE))
    return (channels or (1 if all(header.grey for header in headers) else 3), height, width)


def _parts(found: list[Found], labels: list[tuple[int, ...]], test: float, seed: int, notes: list[str]) -> list[str]:
    """The part of each image; what has none, or all of train where no test is given, is divided by `seed`."""
    parts = [item.part or "train" for item in found]
    if "test" in parts:
        return parts
    rows = [row for row, part in enumerate(parts) if part == "train"]
    groups: dict[tuple[int, ...], list[int]] = {}
    several = any(len(label) > 1 for label in labels)
    for row in rows:
        groups.setdefault(() if several else labels[row], []).append(row)
    for number, group in sorted(groups.items()):
        count = min(len(group) - 1, max(1, round(test * len(group))))
        if count > 0:
            places = torch.arange(count)
            for place in permuted(places, len(group), seed, number[0] if number else 0).tolist():
                parts[group[place]] = "test"
    if "test" not in parts:
        raise DataError(f"no image of {len(rows)} can be held out for the test; each class needs two at least")
    notes.append(f"{parts.count('test')} of {len(rows)} images were held out for the test by seed {seed}")
    return parts


def _padded(labels: list[tuple[int, ...]], most: int) -> Tensor:
    """Shapes: [n], or [n, k] filled up with -1 where an image has several"""
    filled = [[*label, *[-1] * (most - len(label))] for label in labels]
    numbers = torch.tensor(filled, dtype=torch.int64).view(len(labels), most)
    return numbers[:, 0] if most == 1 else numbers


def _stored(
    paths: list[str], labels: Tensor, names: tuple[str, ...], image: tuple[int, int, int], on_error: str, part: str
) -> tuple[Stored, list[str]]:
    images = torch.empty((len(paths), *image), dtype=torch.uint8)

    def read(row: int) -> bool:
        images[row] = read_image(paths[row], image)
        return True

    done, failures = each(read, range(len(paths)), f"reading {part} images", on_error, threads=THREADS)
    if failures:
        kept = torch.tensor([row for row, read in enumerate(done) if read], dtype=torch.int64)
        images, labels = images[kept], labels[kept]
    return Stored(images.squeeze(1) if image[0] == 1 else images, labels, names), failures


def _all_there(split: Stored | Streamed, part: str, root: Path) -> None:
    missing = sorted(set(range(split.classes)) - set(split.labels.flatten().tolist()))
    if len(split) == 0:
        raise DataError(f"{root} has no {part} images that can be read; add some")
    if part == "train" and missing:
        names = ", ".join(split.class_names[k] for k in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(f"{root} has no {part} images of {names}; add some or remove these classes")
