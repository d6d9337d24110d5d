"""Own images: a folder with one sub-folder a class, or a CSV of paths and labels; and h-ImageNet, made from ILSVRC."""

from __future__ import annotations

import csv as tables
import io
import json
import logging
import os
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.errors import DataError
from torchcaps.data.random import permuted
from torchcaps.data.splits import DataSet, Stored
from torchcaps.data.stream import Header, Streamed, look, pillow, read_image, track

PARTS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
}
ENDINGS = re.compile(r"\.(png|jpe?g|jpe|jfif|bmp|dib|gif|tiff?|webp|avif|jp2|mpo|p[bgpn]m|pcx|tga)", re.IGNORECASE)
UNSEEN = ("thumbs.db", "desktop.ini", "__macosx")  # left by file managers; names that begin with a dot are unseen too
SIDE = 64
BUDGET = 4 << 30
THREADS = min(8, os.cpu_count() or 1)

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """A file, its labels by name, the part it was given to ("" if none), and where this is said."""

    path: str
    labels: tuple[str, ...]
    part: str
    where: str


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
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error is 'stop' or 'skip', not {on_error!r}")
    if channels not in (None, 1, 3):
        raise ValueError(f"images have 1 channel or 3, not {channels}")
    if not 0 < test < 1:
        raise ValueError(f"test is the share to hold out, between 0 and 1, not {test}")
    root, table = Path(path), None
    if csv is not None:
        table = root / csv if (root / csv).exists() else Path(csv)
    elif root.suffix.lower() == ".csv" and not root.is_dir():
        root, table = root.parent, root
    if not root.is_dir():
        raise DataError(f"{root} is no folder; give one that holds the images, or a CSV file")
    found, notes = _in_folders(root) if table is None else (_in_table(table, root), [])
    names = tuple(classes) if classes is not None else _names(found, table or root)
    labels = _numbers(found, names, by_number=table is not None and classes is not None)

    headers, failures = _each(look, [item.path for item in found], "looking at images", on_error)
    kept = [row for row, header in enumerate(headers) if header is not None]
    image = _shape([headers[row] for row in kept], size, channels)
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


def _in_folders(root: Path) -> tuple[list[Found], list[str]]:
    folders = _folders(root)
    given = bool(folders) and all(folder.name.lower() in PARTS for folder in folders)
    given = given and any(PARTS[folder.name.lower()] == "train" for folder in folders)
    found, others = [], Counter[str]()
    for part, folder in [(PARTS[folder.name.lower()], folder) for folder in folders] if given else [("", root)]:
        for class_folder in _folders(folder):
            files = list(_files(class_folder, (os.path.realpath(class_folder),)))
            images = [file for file in files if _is_image(file)]
            strange = Counter(Path(file).suffix.lower() or "no ending" for file in files if not _is_image(file))
            if not images:
                instead = f", only {', '.join(sorted(strange))} files" if strange else ""
                raise DataError(f"{class_folder} holds no image{instead}; add some or remove this class folder")
            found += [Found(file, (class_folder.name,), part, str(class_folder)) for file in images]
            others += strange
    if not found:
        raise DataError(f"{root} has no class folders with images; put each class into a sub-folder, or give a csv")
    return found, [f"{count} files ({ending}) are no images and were left out" for ending, count in others.items()]


def _is_image(file: str) -> bool:
    return ENDINGS.fullmatch(Path(file).suffix) is not None


def _folders(folder: Path) -> list[Path]:
    return [Path(entry) for entry in _entries(folder) if _is_folder(entry)]


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name.lower() not in UNSEEN]
    except OSError as error:
        raise DataError(f"{os.fspath(folder)} cannot be opened ({error.strerror}); check its permissions") from error
    return sorted(seen, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        raise DataError(f"{entry.path} is a link that leads nowhere ({error.strerror}); remove it") from error


def _files(folder: str | os.PathLike[str], above: tuple[str, ...]) -> Iterable[str]:
    for entry in _entries(folder):
        if not _is_folder(entry):
            yield entry.path
            continue
        real = os.path.realpath(entry.path)
        if real in above:
            raise DataError(f"{entry.path} is a link to a folder that holds it, a loop without end; remove it")
        yield from _files(entry.path, (*above, real))


def _in_table(table: Path, root: Path) -> list[Found]:
    try:
        text = table.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{table} is not UTF-8 from byte {error.start} on; save it with that encoding") from error
    except OSError as error:
        raise DataError(f"{table} cannot be opened ({error.strerror}); give the CSV with the labels") from error
    found: list[Found] = []
    lines: dict[str, int] = {}
    reader = tables.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        columns = [k for k, name in enumerate(header) if re.fullmatch(r"labels?\d*", name)]
        if "path" not in header or not columns:
            raise DataError(f"{table} must begin with a line of names, such as path,label; it has {','.join(header)!r}")
        for row in reader:
            where = f"line {reader.line_num} of {table}"
            if not any(row):
                continue
            if len(row) != len(header):
                raise DataError(f"{where} has {len(row)} columns, not the {len(header)} that line 1 names; correct it")
            file = os.path.join(root, row[header.index("path")].strip())
            labels = tuple(word.strip() for k in columns for word in row[k].split(";") if word.strip())
            part = row[header.index("split")].strip().lower() if "split" in header else ""
            if "split" in header and part not in PARTS:
                raise DataError(f"{where} puts {file} into the split {part!r}; write train, test or validation")
            if not labels or len(set(labels)) < len(labels):
                raise DataError(f"{where} gives {file} {'a label twice' if labels else 'no label'}; correct the line")
            if file in lines:
                raise DataError(f"{where} lists {file}, as line {lines[file]} does; leave one of them out")
            lines[file] = reader.line_num
            found.append(Found(file, labels, PARTS.get(part, ""), where))
    except tables.Error as error:
        raise DataError(f"line {reader.line_num} of {table} is no CSV ({error}); correct it") from error
    if not found:
        raise DataError(f"{table} lists no images; add a line with path and label for each")
    return found


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


def _each(
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


def _shape(headers: list[Header], size: int | tuple[int, int] | None, channels: int | None) -> tuple[int, int, int]:
    if not headers:
        raise DataError("every image was skipped; load with on_error='stop' to see why")
    sizes = {(header.height, header.width) for header in headers}
    if size is None:
        size = sizes.pop() if len(sizes) == 1 else SIDE
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ValueError(f"size {height} x {width} has no pixels; give a side of at least 1")
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

    done, failures = _each(read, range(len(paths)), f"reading {part} images", on_error, threads=THREADS)
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


def himagenet_classes() -> tuple[str, ...]:
    """The WordNet ids of the 200 classes that were hardest for ResNet-18 (Li et al. 2018)."""
    return tuple(Path(__file__).with_name("himagenet_200_classes.txt").read_text("utf-8").split())


class NotWritten(DataError):
    """A file that could not be written; no choice to skip helps."""


@dataclass(frozen=True)
class Cutting:
    """How objects are cut out: see `make_himagenet`."""

    size: int | None = None
    padding: float = 0.15
    smallest: int = 50
    largest: int = 500


@dataclass
class Made:
    """How many images h-ImageNet has got: those cut to a box, those too small, and those that could not be read."""

    train: int = 0
    test: int = 0
    cut: int = 0
    dropped: int = 0
    skipped: int = 0


def make_himagenet(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int | None = None,
    padding: float = 0.15,
    smallest: int = 50,
    largest: int = 500,
    on_error: str = "stop",
    classes: Sequence[str] | None = None,
) -> Made:
    """Writes h-ImageNet as train/ and test/ from one's own copy of ILSVRC 2012; `load_folder(out)` then reads it.

    The object is cut out with some padding where Annotations/ has its bounding box (the largest of its class if there
    are several), the whole image is taken where not: how the authors cut those by hand is lost. ILSVRC's validation
    images become the test part. A call that was interrupted goes on where it stopped: files appear whole or not at all.

    Args:
        source: holds train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, itself or in ILSVRC/Data/CLS-LOC or Data/CLS-LOC.
        size: what the shorter side is scaled down to; the papers' networks take crops of 128 from 156 and 224 from 256.
        padding: added on each side of a box, as a share of its width and height.
        smallest: objects with a shorter side are dropped.
        largest: what the longer side is scaled down to.
        on_error: "stop" at a file that cannot be read, or "skip" and count it.
        classes: other WordNet ids than the 200.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error is 'stop' or 'skip', not {on_error!r}")
    images, notes = _ilsvrc(Path(source))
    wanted = tuple(classes) if classes is not None else himagenet_classes()
    target = Path(out)
    cutting = Cutting(size, padding, smallest, largest)
    _same_options(target, cutting)
    made = Made()
    for part, below in (("train", "train"), ("test", "val")):
        files = _class_files(images / below, wanted)
        cut = partial(_cut, notes=notes, target=target / part, cutting=cutting)
        done, failures = _each(cut, files, f"making {part} images", on_error, THREADS)
        setattr(made, part, sum(outcome in ("cut", "whole") for outcome in done))
        made.cut += done.count("cut")
        made.dropped += done.count("small")
        made.skipped += len(failures)
    _written(target / "himagenet.json", json.dumps({"options": asdict(cutting), "images": asdict(made)}).encode())
    return made


def _ilsvrc(source: Path) -> tuple[Path, Path | None]:
    """Where the images and the annotations are."""
    for top in (source / "ILSVRC", source):
        for images in (top / "Data" / "CLS-LOC", top):
            if (images / "train").is_dir() and (images / "val").is_dir():
                boxes = [top / "Annotations" / "CLS-LOC", top / "Annotations"]
                return images, next((folder for folder in boxes if folder.is_dir()), None)
    raise DataError(f"{source} has no train and val folders; give the folder of ILSVRC 2012, which is not downloaded")


def _class_files(folder: Path, wanted: tuple[str, ...]) -> list[str]:
    missing = [wnid for wnid in wanted if not (folder / wnid).is_dir()]
    if missing:
        few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"{folder} lacks {len(missing)} of {len(wanted)} class folders ({few}); restore them")
    files = []
    for wnid in wanted:
        images = [entry.path for entry in _entries(folder / wnid) if _is_image(entry.name)]
        if not images:
            raise DataError(f"{folder / wnid} holds no image; restore this class of ILSVRC")
        files += images
    return files


def _cut(file: str, *, notes: Path | None, target: Path, cutting: Cutting) -> str:
    """Writes one image: "cut" to its box, "whole", or not at all because it is "small"."""
    path = Path(file)
    wnid, part = path.parent.name, path.parent.parent.name
    box = None if notes is None else _box(notes, part, wnid, path.stem)
    goal, outcome = target / wnid / f"{path.stem}.jpg", "whole" if box is None else "cut"
    if goal.exists():
        return outcome
    height, width, _ = look(file)
    left, top, right, bottom = (0.0, 0.0, 1.0, 1.0) if box is None else box
    across, down = (right - left) * cutting.padding, (bottom - top) * cutting.padding
    left, right = (round(width * min(1.0, max(0.0, edge))) for edge in (left - across, right + across))
    top, bottom = (round(height * min(1.0, max(0.0, edge))) for edge in (top - down, bottom + down))
    across, down = right - left, bottom - top
    if min(across, down) < cutting.smallest:
        return "small"
    scale = min(1.0, cutting.largest / max(across, down), (cutting.size or min(across, down)) / min(across, down))
    pixels = read_image(file, (3, height, width))[:, top:bottom, left:right].permute(1, 2, 0).contiguous()
    still = pillow().fromarray(pixels.numpy())
    still = still.resize((max(1, round(across * scale)), max(1, round(down * scale))), pillow().Resampling.BICUBIC)
    encoded = io.BytesIO()
    still.save(encoded, "JPEG", quality=95)
    _written(goal, encoded.getvalue())
    return outcome


def _box(notes: Path, part: str, wnid: str, stem: str) -> tuple[float, float, float, float] | None:
    """The largest object of the class: left, top, right, bottom as shares of width and height."""
    places = [notes / part / wnid, notes / part, notes / wnid]
    file = next((place / f"{stem}.xml" for place in places if (place / f"{stem}.xml").is_file()), None)
    if file is None:
        return None
    try:
        tree = ElementTree.parse(file)
        width, height = (float(tree.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes = []
        for thing in tree.iterfind("object"):
            across = [float(thing.findtext(f"bndbox/{edge}", "")) / width for edge in ("xmin", "xmax")]
            down = [float(thing.findtext(f"bndbox/{edge}", "")) / height for edge in ("ymin", "ymax")]
            if thing.findtext("name") == wnid:
                left, right, top, bottom = (min(1.0, max(0.0, edge)) for edge in (*across, *down))
                boxes.append((left, top, right, bottom))
    except (ElementTree.ParseError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{file} is no annotation of bounding boxes ({error}); restore or remove it") from error
    return max(boxes, key=lambda box: (box[2] - box[0]) * (box[3] - box[1]), default=None)


def _same_options(target: Path, cutting: Cutting) -> None:
    """Refuses to mix images that were cut in different ways."""
    made = target / "himagenet.json"
    try:
        before = Cutting(**json.loads(made.read_text("utf-8"))["options"]) if made.exists() else cutting
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{made} is damaged ({error}); remove {target} and make it anew") from error
    if before != cutting:
        raise DataError(f"{target} was made with {before}, not {cutting}; choose another folder or remove it")
    _written(made, json.dumps({"options": asdict(cutting)}).encode())


def _written(goal: Path, content: bytes) -> None:
    """Whole or not at all."""
    part = goal.with_name(f".{goal.name}.{os.getpid()}.part")
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, goal)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise NotWritten(f"{goal} cannot be written ({error.strerror}); see to it and call again to go on") from error
