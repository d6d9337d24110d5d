"""The folder that goes to a model hub: its files with their checksums, and its card, which can be written anew."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from torchcaps.export.card import model_card
from torchcaps.export.record import seeds_of
from torchcaps.models.pretrained import find_pretrained
from torchcaps.results import read
from torchcaps.train import checkpoint

CARD, LINE, SUMS = "README.md", "results.jsonl", "SHA256SUMS"


def renew_card(folder: str | os.PathLike[str], results: str | os.PathLike[str] = "results") -> Path:
    """Writes the card of an exported folder anew, and its checksum; every other file stays.

    >>> renew_card("hub/capsnet_mnist")

    Args:
        results: the file or folder that may have the recipe's other seeds.
    """
    folder = Path(folder)
    names = {path.name for path in folder.iterdir() if path.is_file()} - {SUMS}
    checkpoint.write(folder / CARD, card_of(folder, results).encode())
    checkpoint.write(folder / SUMS, checksums({name: (folder / name).read_bytes() for name in names}))
    return folder / CARD


def card_of(folder: str | os.PathLike[str], results: str | os.PathLike[str] = "results") -> str:
    """The card that an exported folder has by its config.json, its line and the results."""
    folder = Path(folder)
    about = find_pretrained(folder).about
    lines = read(folder / LINE)
    if len(lines) != 1:
        raise ValueError(f"{folder / LINE} must have the one line of its run, but it has {len(lines)}")
    files = [path.name for path in folder.iterdir()]
    return model_card(folder.resolve().name, about, lines[0], files, seeds_of(lines[0], results))


def checksums(files: Mapping[str, bytes]) -> bytes:
    """As sha256sum writes and reads them."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    return "".join(lines).encode()


def write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """Under another name first, so that the folder is there with all its files or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    part.mkdir(exist_ok=True)
    for left in part.iterdir():
        left.unlink()
    for name, content in {**files, SUMS: checksums(files)}.items():
        checkpoint.write(part / name, content)
    if out.is_dir():
        out.rmdir()
    os.replace(part, out)
