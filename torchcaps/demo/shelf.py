"""The networks that the page can choose from: runs that were named, and weights that come with the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from torchcaps import recipes
from torchcaps.data import Split
from torchcaps.data.cache import is_cached
from torchcaps.demo.reader import Reader
from torchcaps.models.pretrained import find_shipped, shipped
from torchcaps.predictor import Predictor
from torchcaps.runs import Opened, open_run

DIGITS = tuple("0123456789")  # which can be drawn, so networks that read them come first


class Shelf:
    """Opens the runs that were named at once, and the rest when it is asked for; a name twice gets a number."""

    def __init__(self, runs: Sequence[str | os.PathLike[str]] = ()):
        self._lock = Lock()
        self._opened: dict[str, Reader] = {}
        self._closed: dict[str, Callable[[], Reader]] = {}
        for folder in runs:
            reader = as_reader(open_run(folder, device="cpu"), _short(Path(folder)))
            count = sum(reader.name == name.split(" (")[0] for name in self._opened)
            reader.name += f" ({count + 1})" if count else ""
            self._opened[reader.name] = reader
        for name in sorted(shipped(), key=lambda name: find_shipped(name).class_names != DIGITS):
            self._closed[name if name not in self._opened else f"{name} (shipped)"] = partial(open_shipped, name)
        if not self.names:
            raise ValueError(
                "there are no trained weights to show; torchcaps quick trains a network in three minutes, and "
                "torchcaps demo RUN shows it"
            )

    @property
    def names(self) -> list[str]:
        return [*self._opened, *(name for name in self._closed if name not in self._opened)]

    def about(self, name: str) -> dict[str, Any]:
        """What the page must know of a network, and of the others."""
        several = [other for other in self.names if "multi" in other]
        choose = f"; {several[0]} tells two apart" if several else ""
        pairs = f" This network has learnt one at a time{choose}."
        return {"names": self.names, "pairs": pairs, **self[name].about()}

    def __getitem__(self, name: str) -> Reader:
        with self._lock:
            if name not in self._opened:
                if name not in self._closed:
                    raise ValueError(f"there is no network {name!r} here; there are {', '.join(self.names)}")
                reader = self._closed[name]()
                reader.name = name
                self._opened[name] = reader
            return self._opened[name]


def open_shipped(name: str) -> Reader:
    """Weights that come with the package, as if they were of a run."""
    found = find_shipped(name)
    try:
        recipe = recipes.from_dict(found.about["result"]["recipe"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"{found.path} does not say how it was trained: {error}") from None
    model = found.load().requires_grad_(False)
    run = Opened(found.path, recipe, 0, model, found.image, found.class_names, 0, None, torch.device("cpu"))
    return as_reader(run, name)


def as_reader(run: Opened, name: str) -> Reader:
    """The network of a run; its test set is looked for on this computer only."""
    predictor = Predictor(run)
    if predictor.raw[0] not in (1, 3):
        raise ValueError(f"{run.folder} takes images of {predictor.raw[0]} channels, which cannot be drawn or uploaded")
    return Reader(
        name=name or run.recipe.model,
        model=run.model,
        class_names=run.class_names,
        raw=predictor.raw,
        steps=predictor.steps,
        data=run.recipe.data,
        test=partial(_test, run),
    )


def _short(folder: Path) -> str:
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("seed-") else folder.name


def _test(run: Opened) -> Split:
    if run.recipe.data != "folder" and not is_cached(run.recipe.data):
        raise ValueError(f"{run.recipe.data} has not been fetched")
    return run.data().test
