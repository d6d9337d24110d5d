"""Which images there are: sub-folders as classes, or the lines of a CSV."""

from __future__ import annotations

import csv as tables
import io
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torchcaps.data.errors import DataError

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


class Found(NamedTuple):
    """A file, its labels by name, the part it was given to ("" if none), and where this is said: a folder or a line."""

    path: str
    labels: tuple[str, ...]
    part: str
    where: str
    line: int = 0


def in_folders(root: Path) -> tuple[list[Found], list[str]]:
    folders = _folders(root)
    parts = {PARTS[folder.name.lower()] for folder in folders if folder.name.lower() in PARTS}
    odd = [folder.name for folder in folders if folder.name.lower() not in PARTS]
    if "train" in parts and len(parts) > 1 and odd:
        raise DataError(
            f"{root} has {', '.join(odd)} beside its folders for {' and '.join(sorted(parts))}; "
            "move them away, or put all classes side by side under other names"
        )
    given = "train" in parts and not odd
    found, others = [], Counter[str]()
    for part, folder in [(PARTS[folder.name.lower()], folder) for folder in folders] if given else [("", root)]:
        for class_folder in _folders(folder):
            files = list(files_in(class_folder))
            images = [file for file in files if is_image(file)]
            strange = Counter(Path(file).suffix.lower() or "no ending" for file in files if not is_image(file))
            if not images:
                instead = f", only {', '.join(sorted(strange))} files" if strange else ""
                raise DataError(f"{class_folder} holds no image{instead}; add some or remove this class folder")
            found += [Found(file, (class_folder.name,), part, str(class_folder)) for file in images]
            others += strange
    if not found:
        raise DataError(f"{root} has no class folders with images; put each class into a sub-folder, or give a csv")
    return found, [f"{count} files ({ending}) are no images and were left out" for ending, count in others.items()]


def is_image(file: str) -> bool:
    return ENDINGS.fullmatch(Path(file).suffix) is not None


def _folders(folder: Path) -> list[Path]:
    return [Path(entry) for entry in entries(folder) if _is_folder(entry)]


def entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
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


def files_in(folder: str | os.PathLike[str], above: tuple[str, ...] = ()) -> Iterable[str]:
    """All files, in sub-folders too, in order; `above` are the real paths of the folders that led here."""
    above = above or (os.path.realpath(folder),)
    for entry in entries(folder):
        if not _is_folder(entry):
            yield entry.path
            continue
        real = os.path.realpath(entry.path)
        if real in above:
            raise DataError(f"{entry.path} is a link to a folder that holds it, a loop without end; remove it")
        yield from files_in(entry.path, (*above, real))


def in_table(table: Path, root: Path) -> list[Found]:
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
            name = row[header.index("path")].strip()
            if not name:
                raise DataError(f"{where} names no file; fill in its path, or remove the line")
            file = os.path.join(root, name)
            labels = tuple(word.strip() for k in columns for word in row[k].split(";") if word.strip())
            part = row[header.index("split")].strip().lower() if "split" in header else ""
            if "split" in header and part not in PARTS:
                raise DataError(f"{where} puts {file} into the split {part!r}; write train, test or validation")
            if not labels or len(set(labels)) < len(labels):
                raise DataError(f"{where} gives {file} {'a label twice' if labels else 'no label'}; correct the line")
            if file in lines:
                raise DataError(f"{where} lists {file}, as line {lines[file]} does; leave one of them out")
            lines[file] = reader.line_num
            found.append(Found(file, labels, PARTS.get(part, ""), where, reader.line_num))
    except tables.Error as error:
        raise DataError(f"line {reader.line_num} of {table} is no CSV ({error}); correct it") from error
    if not found:
        raise DataError(f"{table} lists no images; add a line with path and label for each")
    return found
