"""A trained network, opened again from the folder of its run.

>>> run = open_run("runs/quick-digits/seed-0")
>>> run.model(images).probabilities, run.class_names
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchcaps import recipes
from torchcaps.data import DataSet, Split, batches_for
from torchcaps.evaluate import Predictions, predict
from torchcaps.models.pretrained import CONFIG, find_pretrained, shipped
from torchcaps.recipes import Recipe
from torchcaps.train import checkpoint
from torchcaps.train.folder import as_json, load_saved
from torchcaps.train.prepare import load_data, numerics

MOST = 100_000  # images of a generated test set, always the same ones, unless more are asked for
SOME = 10_000  # of these, where only figures are drawn of them


@dataclass
class Opened:
    """The weights that the recipe selects, or those of a kept epoch, in evaluation mode.

    `image` is what the network takes, after the protocol's transform; `threshold` is the probability below which it
    is better to say "none of these", where it has been chosen on the validation set.
    """

    folder: Path
    recipe: Recipe
    seed: int
    model: nn.Module
    image: tuple[int, int, int]
    class_names: tuple[str, ...]
    epoch: int
    threshold: float | None
    device: torch.device

    def data(self) -> DataSet:
        """The data set that it was trained and is tested on, by the recipe's protocol."""
        return load_data(self.recipe)

    def look(self) -> Predictions:
        """What the network says of its test images, asked anew; of a generated test set, of some of them."""
        data = self.data()
        return look(self.model, data.test, data, self.recipe, most=SOME)


def look(
    model: nn.Module, split: Split, data: DataSet, recipe: Recipe, images: int | None = None, most: int = MOST
) -> Predictions:
    """What a network says of a split as it is tested, in float32; of a huge one, of a sample that is always the same.

    Args:
        images: how many are looked at; of a split with more, a sample.
    """
    if images is not None and images < 1:
        raise ValueError(f"at least one image of the test set must be looked at, got {images}")
    wanted = min(len(split), images or (most if hasattr(split, "base") else len(split)))
    sample = wanted < len(split)
    device = next(model.parameters()).device
    batches = batches_for(
        split,
        max(1, max(128, recipe.batch_size) // recipes.views(recipe.data_args)),
        transform=data.test_transform,
        shuffle=sample,
        samples=wanted if sample else None,
        device=device,
    )
    with numerics("32", deterministic=False):  # else cuDNN convolves in TF32
        return predict(model, batches.epoch(0))


def open_run(folder: str | os.PathLike[str], *, device: str = "auto", epoch: int | None = None) -> Opened:
    """Loads the network of a finished run, every bit of its file checked.

    A folder that `torchcaps export` wrote, or the name of weights that come with the package, does as well.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1" or "mps".
        epoch: one of those that keep_epochs named, instead of the one that the recipe selects.
    """
    folder = Path(folder)
    if is_exported(folder):
        if epoch is not None:
            raise ValueError(f"{folder} has the weights of one epoch only; leave --epoch out")
        return _open_exported(folder, pick_device(device))
    check_run(folder)
    where = pick_device(device)
    if epoch is None:
        check_finished(folder)
    path = folder / "weights.safetensors" if epoch is None else _kept(folder, epoch)
    saved = load_saved(path)
    model = saved.model.to(where).requires_grad_(False)
    threshold = read_threshold(folder)
    return Opened(
        folder, saved.recipe, saved.seed, model, saved.image, saved.class_names, saved.epoch, threshold, where
    )


def is_exported(folder: Path) -> bool:
    """Whether it is no run's folder but one that `torchcaps export` wrote, or the name of weights in the package."""
    if (folder / CONFIG).exists() or next(_recipes(folder), None):
        return (folder / CONFIG).exists() and not (folder / "recipe.json").exists()
    return str(folder) in shipped()


def home(folder: Path) -> Path:
    """Where what is drawn of a run goes: into its folder; of weights without one, into a folder here of their name."""
    if not is_exported(folder):
        return folder
    name = folder.resolve().name
    taken = (Path(name) / CONFIG).exists() or next(_recipes(Path(name)), None)
    return Path(f"{name}-report" if taken else name)


def _recipes(folder: Path) -> Iterator[Path]:
    """Of the run itself, or of those that are in the folder."""
    own = folder / "recipe.json"
    yield from [own] if own.exists() else folder.glob("*/recipe.json")


def _open_exported(folder: Path, device: torch.device) -> Opened:
    found = find_pretrained(folder)
    about = found.about
    try:
        recipe, seed, epoch = recipes.from_dict(about["result"]["recipe"]), int(about["seed"]), int(about["epoch"])
        threshold = None if about["threshold"] is None else float(about["threshold"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not say how its weights were trained: {error}") from None
    model = found.load().to(device).requires_grad_(False)
    return Opened(folder, recipe, seed, model, found.image, found.class_names, epoch, threshold, device)


def pick_device(device: str = "auto") -> torch.device:
    """A device that is there; "auto" takes an accelerator before the CPU."""
    kind, _, number = device.partition(":")
    if device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in there or (number and not number.isdecimal()):
        raise ValueError(f"device {device!r} is not known; it is auto, cpu, cuda, cuda:N or mps")
    if there[kind] <= int(number or 0):
        raise ValueError(f"device {device} is not there; this machine has {there[kind]} of {kind}")
    return torch.device(kind, int(number)) if number else torch.device(kind)


def check_run(folder: Path) -> None:
    """Refuses a folder in which nothing has been trained."""
    if not folder.is_dir():
        deeper = [] if folder.is_absolute() else [place / folder for place in sorted(Path().iterdir())]
        near = [path for path in deeper if any(os.path.exists(path / name) for name in (CONFIG, "recipe.json"))]
        raise ValueError(f"there is no run folder {folder}{f'; did you mean {near[0]}?' if near else ''}")
    if not (folder / "recipe.json").exists():
        inner = sorted(path.parent for path in folder.glob("*/recipe.json"))
        hint = f"did you mean {inner[0]}?" if inner else "torchcaps train makes them"
        raise ValueError(f"{folder} is no run folder, as it has no recipe.json; {hint}")


def check_finished(folder: Path) -> None:
    if not (folder / "final.json").exists():
        about = read_json(folder / "row.json")
        row = about["name"] if about and isinstance(about.get("name"), str) else "ROW"
        _, seed = read_recipe(folder)
        if (folder.parent / "together" / "recipe.json").exists() and not checkpoint.steps(folder / "checkpoints"):
            raise ValueError(f"{folder} has not finished; the command that began it goes on with --resume")
        words = [row, "--resume", "--out", str(folder), *(["--seed", str(seed)] if seed else [])]
        for setting in (about or {}).get("settings", []):
            name, _, value = str(setting).partition("=")
            words += [f"--{name.replace('_', '-')}", value]
        raise ValueError(f"{folder} has not finished; torchcaps train {shlex.join(words)} goes on")


def read_recipe(folder: Path) -> tuple[Recipe, int]:
    """The recipe and the seed that a run folder was made for."""
    check_run(folder)
    try:
        content = json.loads((folder / "recipe.json").read_text())
        return recipes.from_dict(content["recipe"]), int(content["seed"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder / 'recipe.json'} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file of a run folder holds, or None where it is not there."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it holds no names with values")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    checkpoint.write(path, as_json(content))


def read_threshold(folder: Path) -> float | None:
    for name in ("validation.json", "test.json"):
        value = (read_json(folder / name) or {}).get("threshold")
        if isinstance(value, int | float):
            return float(value)
    return None


def _kept(folder: Path, epoch: int) -> Path:
    path = folder / "epochs" / f"epoch-{epoch:04d}.safetensors"
    if not path.exists():
        kept = sorted(int(each.stem.removeprefix("epoch-")) for each in path.parent.glob("epoch-*.safetensors"))
        there = f"the kept ones are {', '.join(map(str, kept))}" if kept else "--keep-epochs keeps them"
        raise ValueError(f"epoch {epoch} of {folder} was not kept; {there}")
    return path
