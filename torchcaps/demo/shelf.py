"""The networks that the page can choose from: runs that were named, and weights that come with the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from torchcaps import recipes
from torchcaps.analysis.sample import need_decoder
from torchcaps.data import Split
from torchcaps.data.cache import is_cached
from torchcaps.demo.reader import Reader
from torchcaps.models.pretrained import find_shipped, shipped
from torchcaps.models.registry import find_preset
from torchcaps.predictor import Predictor
from torchcaps.runs import Opened, open_run

DIGITS = tuple("0123456789")  # which can be drawn, so networks that read them come first


class Shelf:
    """Opens the runs that were named at once, and the rest when it is asked for; a name twice gets a number."""

    def __init__(self, runs: Sequence[str | os.PathLike[str]] = ()):
        self._lock = Lock()
        self._opened: dict[str, Reader] = {}
        self._closed: dict[str, Callable[[], Reader]] = {}
        self._reads: dict[str, tuple[int, tuple[str, ...]]] = {}  # how many objects, of which classes
        for folder in runs:
            name = _short(Path(folder))
            count = sum(name == other.split(" (")[0] for other in self._opened)
            name += f" ({count + 1})" if count else ""
            reader = self._opened[name] = as_reader(open_run(folder, device="cpu"), name)
            self._reads[name] = reader.objects, reader.class_names
        for name in sorted(shipped(), key=lambda name: find_shipped(name).class_names != DIGITS):
            if name not in {str(run) for run in runs} or Path(name).is_dir():
                title = name if name not in self._opened else f"{name} (shipped)"
                self._closed[title] = partial(open_shipped, name, title)
                found = find_shipped(name)
                options = {**find_preset(found.preset).options, **found.options}
                self._reads[title] = options.get("objects", 1), found.class_names
        if not self.names:
            raise ValueError(
                "there are no trained weights to show; torchcaps quick trains a network in three minutes, and "
                "torchcaps demo RUN shows it"
            )

    @property
    def names(self) -> list[str]:
        return list(self._reads)

    def about(self, name: str) -> dict[str, Any]:
        """What the page must know of a network, and of the others."""
        own = self[name]
        others = [(other, seen) for other, (seen, classes) in self._reads.items() if classes == own.class_names]
        several = next((f"; {other} tells two apart" for other, seen in others if seen > 1), "")
        one = next((f"; {other} reads one" for other, seen in others if seen == 1), "")
        return {
            "names": self.names,
            "pairs": f" This network has learnt one at a time{several}.",
            "alone": f"This network has only ever seen two at a time{one}.",
            **own.about(),
        }

    def __getitem__(self, name: str) -> Reader:
        with self._lock:
            if name not in self._opened:
                if name not in self._closed:
                    raise ValueError(f"there is no network {name!r} here; there are {', '.join(self.names)}")
                self._opened[name] = self._closed[name]()
            return self._opened[name]


def open_shipped(name: str, title: str = "") -> Reader:
    """Weights that come with the package, as if they were of a run."""
    found = find_shipped(name)
    try:
        recipe, threshold = recipes.from_dict(found.about["result"]["recipe"]), found.about["threshold"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{found.path} does not say how it was trained: {error}") from None
    model = found.load().requires_grad_(False)
    run = Opened(found.path, recipe, 0, model, found.image, found.class_names, 0, threshold, torch.device("cpu"))
    return as_reader(run, title or name)


def as_reader(run: Opened, name: str) -> Reader:
    """The network of a run; its test set is looked for on this computer only."""
    predictor = Predictor(run)
    if predictor.raw[0] not in (1, 3):
        raise ValueError(f"{run.folder} takes images of {predictor.raw[0]} channels, which cannot be drawn or uploaded")
    name = name or run.recipe.model
    return Reader(
        name=name,
        model=run.model,
        class_names=run.class_names,
        raw=predictor.raw,
        steps=predictor.steps,
        data=run.recipe.data,
        test=partial(_test, run),
        threshold=run.threshold,
        undrawn=_undrawn(run, name),
    )


def _short(folder: Path) -> str:
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("seed-") else folder.name


def _undrawn(run: Opened, name: str) -> str:
    """Why nothing can be drawn from the capsules of a run, or nothing; the page need not know where its folder is."""
    try:
        need_decoder(replace(run, folder=Path(name)))
    except ValueError as error:
        sentence = str(error)
        return sentence if sentence.startswith(name) else sentence[0].upper() + sentence[1:]
    return ""


def _test(run: Opened) -> Split:
    if run.recipe.data != "folder" and not is_cached(run.recipe.data):
        raise ValueError(f"{run.recipe.data} has not been fetched")
    return run.data().test
