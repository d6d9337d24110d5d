"""One command's work on a recipe: training for one seed or several, and the end of each run."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchcaps.commands.train import CODES
from torchcaps.commands.words import Row, described, figure, headline, metric_name
from torchcaps.data import DataSet
from torchcaps.finish import finish, validate
from torchcaps.models import create_model
from torchcaps.recipes import differing
from torchcaps.results import Result, check_ledger
from torchcaps.runs import open_run, read_json, read_recipe
from torchcaps.train import checkpoint, train
from torchcaps.train.folder import Run, check_folder
from torchcaps.train.optim import create_optimizer, learning_rate
from torchcaps.train.prepare import check, create_fabric, load_data, training_batches
from torchcaps.train.teachers import Teachers

GO_ON = "the same command with --resume goes on"
PAUSES = (*CODES, "limit", "another rank")


@dataclass
class Job:
    """One command's work: a recipe for one seed or several."""

    row: Row
    folders: dict[int, Path]  # of each seed
    ledger: Path
    options: dict[str, Any]  # of `train`
    several: bool
    no_test: bool = False
    test_images: int | None = None

    def run(self, together: bool = False) -> int:
        recipe, options = self.row.recipe, {**self.options, "about": self.row.about()}
        check_ledger(self.ledger)
        check(recipe)
        world = options["devices"] * options["nodes"]
        if recipe.batch_size % world:
            raise ValueError(f"a batch of {recipe.batch_size} cannot be shared evenly by {world} processes")
        create_fabric(recipe, **{word: options[word] for word in ("device", "devices", "nodes", "strategy")})
        waiting = [seed for seed in self.folders if not self.trained(seed)]
        if not together:
            self.check_alone(waiting)
        data = self.load() if waiting else None
        if leads():
            print("\n".join([*described(self.row), *self.places(waiting)]), flush=True)
        figures: list[Result] = []
        failed: list[int] = []
        if together and waiting:
            from torchcaps.train.together import train_together

            with self.explained():
                runs = train_together(recipe, waiting, out=self.folders[waiting[0]].parent, data=data, **options)
            if (code := self.paused(runs)) is not None:
                return code
            failed = [run.seed for run in runs if not run.finished]
            waiting = []
        for seed, folder in self.folders.items():
            run: Run | None = None
            if seed in waiting:
                with self.explained():
                    run = train(recipe, out=folder, seed=seed, data=data, **options)
                if (code := self.paused([run])) is not None:
                    return code
            if leads() and seed not in failed:
                figures += self.end(seed, run)
        values = [value for line in figures if (value := figure(line, recipe)) is not None]
        if len(values) > 1:
            spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
            printed = f" (the paper: {recipe.reported})" if recipe.reported else ""
            print(f"{metric_name(recipe)} over {len(values)} seeds: {spread}{printed}")
        return 2 if failed else 0

    def load(self) -> DataSet:
        """The data, loaded and tried on the network before a folder is made."""
        data = load_data(self.row.recipe)
        build(self.row, data)
        recipe, world = self.row.recipe, self.options["devices"] * self.options["nodes"]
        batches = training_batches(recipe, data, 0, {"device": torch.device("cpu"), "rank": 0, "world": world})
        learning_rate(recipe, 0, len(batches))
        create_optimizer(recipe, [nn.Parameter(torch.zeros(1))])
        Teachers(recipe, data, torch.device("cpu"))
        return data

    def places(self, seeds: list[int]) -> list[str]:
        """Where the runs are, and, where they are to be resumed, whether there is anything to go on from."""
        begun = [s for s in seeds if checkpoint.steps(self.folders[s] / "checkpoints")]
        begun += [s for s in seeds if checkpoint.steps(self.folders[s].parent / "together" / "checkpoints")]
        new = ", from the start, as nothing was saved there yet" if self.options["resume"] and not begun else ""
        folders = [str(self.folders[s]) for s in seeds]
        return [f"  in {folders[0]}{f' to {folders[-1]}' if len(folders) > 1 else ''}{new}"] if folders else []

    def check_alone(self, seeds: list[int]) -> None:
        """Refuses to begin again, each by itself, seeds that have come some way together."""
        for seed in seeds:
            folder, common = self.folders[seed], self.folders[seed].parent / "together"
            members = (read_json(common / "recipe.json") or {}).get("seeds", [])
            begun = checkpoint.steps(common / "checkpoints") and not checkpoint.steps(folder / "checkpoints")
            if seed in members and begun:
                raise ValueError(f"seed {seed} is trained together with others in {common}; add --together")

    def trained(self, seed: int) -> bool:
        """Whether a seed needs no training any more; refuses folders that hold something else."""
        folder = self.folders[seed]
        done = (folder / "final.json").exists()
        if done and not self.holds(folder, seed):
            raise ValueError(f"{folder} holds a finished run of another recipe or seed; choose another folder by --out")
        if checkpoint.steps(folder / "checkpoints") and not (done and self.several):
            check_folder(folder, self.row.recipe, seed, self.options["resume"])
        return done

    def holds(self, folder: Path, seed: int) -> bool:
        recipe, own = read_recipe(folder)
        return own == seed and differing(self.row.recipe.to_dict(), recipe.to_dict()) is None

    def paused(self, runs: list[Run]) -> int | None:
        """The exit code where a signal or the limit ended these runs before their time, having said so."""
        paused = [run for run in runs if run.stopped in PAUSES]
        if leads():
            for run in runs:
                if not run.finished and run not in paused:
                    print(f"torchcaps: seed {run.seed} failed: {run.stopped}", file=sys.stderr, flush=True)
            if paused:
                print(f"saved at step {paused[0].step}; {GO_ON}", file=sys.stderr, flush=True)
        return CODES.get(paused[0].stopped, 0) if paused else None

    def end(self, seed: int, run: Run | None) -> list[Result]:
        """The test and what comes of it, told in one line."""
        folder, recipe = self.folders[seed], self.row.recipe
        which = f"seed {seed}: " if self.several else ""
        if self.no_test and not (folder / "test.json").exists():
            if not (folder / "validation.json").exists():
                validate(open_run(folder, device=self.options["device"]), run.data if run else load_data(recipe))
            print(f"{which}trained; torchcaps evaluate {folder} reads the test set")
            return []
        try:
            line = finish(
                run or folder,
                table=self.row.table,
                row=self.row.row,
                results=self.ledger,
                images=self.test_images,
                device=None if run else self.options["device"],
                say=print,
            )
        except KeyboardInterrupt:
            print(f"trained to the end, but the test was interrupted; {GO_ON}", file=sys.stderr)
            raise
        report = folder / "report.html"
        last = f"; report: {report}" if report.exists() else f"; run: {folder}"
        print(f"{which}{headline(line, recipe)}; result: {self.ledger}{last}", flush=True)
        return [line]

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            recipe = self.row.recipe
            raise ValueError(
                f"the device's memory cannot hold a batch of {recipe.batch_size}; "
                f"--accumulate {2 * recipe.accumulate} trains the same in smaller parts"
            ) from None


def build(row: Row, data: DataSet) -> None:
    """Builds the network without memory, to say what is wrong with its options before anything is written."""
    recipe = row.recipe
    sizes = {"image": data.image, "classes": data.classes}
    try:
        with torch.device("meta"):
            create_model(recipe.model, **{**sizes, **recipe.model_args})
    except TypeError as error:
        raise ValueError(f"{recipe.model} cannot be built with {recipe.model_args}: {error}") from None
    weights = recipe.class_weights
    if weights is not None and len(weights) != data.classes:
        raise ValueError(f"class_weights has {len(weights)} numbers, and {data.name} has {data.classes} classes")


def balanced(row: Row) -> Row:
    """The row with class weights counted from its training labels."""
    weights = balanced_weights(load_data(row.recipe))
    return replace(row, recipe=replace(row.recipe, class_weights=weights))


def balanced_weights(data: DataSet) -> tuple[float, ...]:
    """n / (j n_j) for each of j classes, so that each has the same say in the loss, however many images it has."""
    labels = getattr(data.train, "labels", None)
    if labels is None:
        raise ValueError(f"the images of {data.name} are made as they are needed, so their labels cannot be counted")
    counts = torch.bincount(labels[labels >= 0].flatten(), minlength=data.classes).tolist()
    for name, count in zip(data.class_names, counts, strict=True):
        if not count:
            raise ValueError(f"class {name} has no training image, so its weight cannot be balanced")
    return tuple(sum(counts) / (len(counts) * count) for count in counts)


def leads() -> bool:
    """Whether this process speaks for all that train one run."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"
