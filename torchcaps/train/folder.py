"""The folder of a run: what it holds, and how it is written so that nothing in it is ever half there.

recipe.json, row.json where it belongs to one, checkpoints/, metrics.csv, times.csv, routing.jsonl, epochs/,
weights.safetensors and final.json; of seeds trained together, last.safetensors where another epoch was selected.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchcaps.data import DataSet
from torchcaps.models import create_model
from torchcaps.recipes import DEFAULTS, Recipe, differing, from_dict
from torchcaps.train import checkpoint
from torchcaps.train.fabric import Fabric
from torchcaps.train.prepare import RunError, on_first_rank


@dataclass
class Progress:
    """How far a run has come: `batch` batches of `epoch` are done, counted from 0; then validation, then the next."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.csv
    routing: list[dict[str, Any]] = field(default_factory=list)  # lines of routing.jsonl
    best: dict[str, Any] | None = None  # epoch, error and weights
    times: list[dict[str, Any]] = field(default_factory=list)  # of times.csv
    seconds: float = 0.0  # spent on steps and validation
    epoch_seconds: float = 0.0  # on the steps of this epoch
    joules: float | None = 0.0  # None where nothing tells

    CLOCK = ("times", "seconds", "epoch_seconds", "joules")  # differ from run to run

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What is the same in every run, and what depends on the clock."""
        values = dict(vars(self))
        clock = {name: values.pop(name) for name in self.CLOCK}
        return {"progress": values, "clock": clock}


@dataclass
class Run:
    """What `train` gives back. A run that is not finished goes on with resume=True; `model` is then as it stands."""

    folder: Path
    recipe: Recipe
    seed: int
    model: nn.Module
    data: DataSet
    step: int
    finished: bool
    metrics: list[dict[str, Any]]
    seconds: float
    selected: int | None = None  # the epoch, from 1, that the weights are of
    stopped: str = ""  # by which signal, or "limit"
    reached: int | None = None  # the epoch, from 1, that met the recipe's stop_at
    joules: float | None = None  # that the device took, where its driver tells


class Folder:
    """Writes on the first rank; a full disk ends the run on all of them, with a sentence."""

    def __init__(self, path: Path, fabric: Fabric, recipe: Recipe, seed: int, data: DataSet):
        self.path, self.fabric, self.recipe, self.seed, self.data = path, fabric, recipe, seed, data
        self.checkpoints = path / "checkpoints"

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._guarded(step, lambda: checkpoint.save(self.checkpoints, step, weights, state))

    def write_tables(self, now: Progress) -> None:
        """All rows in one piece, so that a resumed run has each once."""
        files = {"metrics.csv": as_csv(now.rows), "times.csv": as_csv(now.times)}
        if now.routing:
            files["routing.jsonl"] = "".join(json.dumps(line) + "\n" for line in now.routing)
        for name, text in files.items():
            self._guarded(now.step, partial(checkpoint.write, self.path / name, text.encode()))

    def write_weights(self, name: str, step: int, weights: dict[str, Tensor], epoch: int) -> None:
        about = {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "epoch": epoch,
            "image": list(self.data.image),
            "class_names": list(self.data.class_names),
        }
        self._guarded(step, lambda: checkpoint.save_weights(self.path / name, weights, about))

    def write_final(self, step: int, final: dict[str, Any]) -> None:
        self._guarded(step, lambda: checkpoint.write(self.path / "final.json", as_json(final)))

    def intact(self) -> str:
        """The end of a sentence about what went wrong."""
        there = checkpoint.steps(self.checkpoints)
        return f"; the checkpoint of step {there[-1]} is intact" if there else "; there was no checkpoint yet"

    def _guarded(self, step: int, write: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                write()
            except OSError as error:
                reason = error.strerror or str(error)
                raise RunError(f"step {step} could not be saved: {reason}{self.intact()}") from error

        on_first_rank(self.fabric, attempt)


class Saved(NamedTuple):
    """A network with the weights of a file, in evaluation mode, and what `write_weights` said of them."""

    model: nn.Module
    recipe: Recipe
    seed: int
    epoch: int
    image: tuple[int, int, int]
    class_names: tuple[str, ...]


def load_saved(path: Path) -> Saved:
    """The network of a file that `write_weights` wrote, every bit of it checked."""
    try:
        weights, about = checkpoint.load_weights(path)
        recipe = from_dict(about["recipe"])
        channels, height, width = about["image"]
        image, class_names = (channels, height, width), tuple(about["class_names"])
        seed, epoch = int(about["seed"]), int(about["epoch"])
    except checkpoint.CheckpointError as error:
        raise ValueError(f"{path.parent} cannot be opened: {error}") from None
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} does not say what it holds: {error}") from None
    model = create_model(recipe.model, **{"image": image, "classes": len(class_names), **recipe.model_args})
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"the weights in {path} do not fit {recipe.model} as it is built now") from None
    return Saved(model.eval(), recipe, seed, epoch, image, class_names)


def check_folder(out: Path, recipe: Recipe, seed: int, resume: bool) -> None:
    """Refuses a folder that holds another run, or this one where it is not to be resumed."""
    begun = checkpoint.steps(out / "checkpoints")
    if not begun and not (out / "final.json").exists():
        return
    if not resume:
        raise ValueError(f"{out} holds a run already; {'resume it or ' if begun else ''}choose another folder")
    path, mine = out / "recipe.json", {"seed": seed, **recipe.to_dict()}
    try:
        content = json.loads(path.read_text())
        theirs = {"seed": content["seed"], **DEFAULTS, **content["recipe"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} cannot be read, so it is not known whose run this is: {error}") from None
    if (name := differing(mine, theirs)) is not None:
        raise ValueError(
            f"{out} holds a run of another recipe: {name} is {theirs.get(name)!r} there and {mine[name]!r} here"
        )


def check_checkpoints(out: Path) -> None:
    """Refuses a finished run that has no checkpoint, as of seeds trained together: it would begin again."""
    if (out / "final.json").exists() and not checkpoint.steps(out / "checkpoints"):
        raise ValueError(f"{out} holds a finished run, and there is no checkpoint to go on from; choose another folder")


def write_recipe(out: Path, recipe: Recipe, seed: int, about: dict[str, Any] | None, begins: bool) -> None:
    """recipe.json and row.json. Those of a run that goes on stay; it gets the latter where there is none.

    Where a run begins that another was killed in before its first checkpoint, the epochs that this one has kept go.
    """
    row = out / "row.json"
    if begins:
        if (out / "recipe.json").exists():
            for path in (*(out / "epochs").glob("epoch-*.safetensors"), out / "looks.json"):
                path.unlink(missing_ok=True)
        checkpoint.write(out / "recipe.json", as_json({"seed": seed, "recipe": recipe.to_dict()}))
        row.unlink(missing_ok=True)
    if about is not None and not row.exists():
        checkpoint.write(row, as_json(about))


def as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    if rows:
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
