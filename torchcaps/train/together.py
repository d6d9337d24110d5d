"""Several seeds of one recipe trained as one program, each to the result it would have alone.

Mazzia's tables need 30 runs of a network that fills a hundredth of a device. Here the replicas are one network with an
axis more (stacked.py), see their own images in their own order (replicas.py), and each ends with a run folder as
`train` writes it. A checkpoint holds all of them (seeds.py).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import DataSet, batches_for
from torchcaps.evaluate import Predictions, checked, headline_error
from torchcaps.functional import widen
from torchcaps.ops.stream import own_stream
from torchcaps.recipes import DEFAULTS, Recipe, differing
from torchcaps.train import checkpoint
from torchcaps.train.folder import Run, as_json, check_folder, write_recipe
from torchcaps.train.loop import CHECK_EVERY, Interrupted
from torchcaps.train.optim import learning_rate
from torchcaps.train.prepare import check, create_fabric, create_network, load_data, may_capture, numerics, signals
from torchcaps.train.progress import Log, Silent, for_terminal
from torchcaps.train.routing_log import routing_log
from torchcaps.train.seeds import ALONE, Seeds
from torchcaps.train.stacked import Stack


def train_together(
    recipe: Recipe,
    seeds: Sequence[int],
    *,
    out: str | os.PathLike[str],
    data: DataSet | None = None,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    strategy: str = "auto",
    precision: str | None = None,
    channels_last: bool | None = None,
    capture: bool | None = None,
    resume: bool = False,
    deterministic: bool = False,
    limit: int | None = None,
    save_every: float = 60.0,
    log: Log | str | None = "auto",
    about: dict[str, Any] | None = None,
) -> list[Run]:
    """Trains seed s into the folder out/seed-s, all seeds in one loop; checkpoints of all are in out/together.

    A seed whose loss is not finite takes no further part. Its run is not finished, `stopped` says why, and its last
    good checkpoint is in its own folder, where `train` could go on from it. Time and energy are shared out evenly.

    Args: as those of `train`.
    """
    recipe = replace(recipe, precision=precision or recipe.precision)
    check(recipe)
    seeds, out = list(seeds), Path(out)
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise ValueError(f"seeds must be different whole numbers from 0, at least one of them, got {seeds}")
    if devices * nodes > 1 or strategy != "auto" or "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(f"seeds share one device and one process when they are trained together; {ALONE}")
    if recipe.precision == "fp16":
        raise ValueError(f"fp16 scales the loss of each seed by what happened to it; use bf16, or {ALONE}")
    fabric = create_fabric(recipe, device)
    capture = may_capture(recipe, fabric, capture)
    fabric.launch()
    shown: Log = Silent() if log is None else for_terminal() if isinstance(log, str) else log
    with ExitStack() as context:
        context.enter_context(checkpoint.locked(out / "together"))
        new, asked = starts_anew(out, seeds), seeds
        seeds = check_together(out, recipe, seeds, new, resume)
        resume = resume and not new  # what others left is not gone on from
        for seed in seeds:
            context.enter_context(checkpoint.locked(out / f"seed-{seed}"))
            check_folder(out / f"seed-{seed}", recipe, seed, resume)
        context.enter_context(numerics(recipe.precision, deterministic))
        if capture:
            context.enter_context(own_stream(fabric.device))
        context.callback(shown.close)
        data = load_data(recipe) if data is None else data
        networks = []
        for seed in seeds:
            torch.manual_seed(seed)
            networks.append(create_network(recipe, data, fabric, channels_last).to(fabric.device))
        session = Together(recipe, seeds, out, fabric, Stack(networks), data, shown, capture)
        del networks
        if resume and (found := checkpoint.latest(session.common.checkpoints, notice=shown.say)) is not None:
            session.restore(found)
        write_recipes(out, recipe, seeds, about, new)
        session.stop = context.enter_context(signals())
        runs = session.finish(session.loop(limit, save_every))
        return [run for run in runs if run.seed in asked]


class Together(Seeds):
    """The loop over all seeds."""

    def loop(self, limit: int | None, save_every: float) -> str:
        """Gives "" when all epochs are done, else what stopped it, with everything saved."""
        now, recipe = self.now, self.recipe
        total = recipe.epochs * len(self.batches)
        self.write_tables()
        while now.epoch < recipe.epochs and self.active():
            self.stack.train()
            began = time.monotonic()
            for batch in self.batches.epoch(now.epoch, now.batch):
                self.step(batch, now.step)
                now.step, now.batch = now.step + 1, now.batch + 1
                if self.fabric.device.type == "cpu" or now.step % CHECK_EVERY == 0:
                    self.check_losses()
                began, before = time.monotonic(), began
                now.epoch_seconds += began - before
                self.shown.step(now.step, total, self.speed(), self.means)
                stopped = self.stop[0] if self.stop else "limit" if limit is not None and now.step >= limit else ""
                if stopped or time.monotonic() - self.saved_at >= save_every:
                    self.save()
                if stopped:
                    return stopped
            try:
                self.end_epoch()
            except Interrupted:
                self.save()
                return self.stop[0]
        self.save()
        return ""

    def end_epoch(self) -> None:
        """Validation, each seed's row of metrics, and what is kept of it."""
        now, recipe = self.now, self.recipe
        self.check_losses()
        began = time.monotonic()
        errors = self.validation_errors()
        terms, speed, mean = self.tally.every(), self.speed(), self.means()
        routing = {k: self.log_routing(k) for k in self.active()}
        lr = learning_rate(recipe, now.step - 1, len(self.batches))
        share = 1 / len(self.seeds)
        for k in self.active():
            each = self.each[k]
            row = {"epoch": now.epoch + 1, "step": now.step, "lr": lr, "loss": sum(terms[k].values()), **terms[k]}
            if k in errors:
                row["validation_error"] = error = errors[k]
                reached = recipe.stop_at is not None and 1 - error >= recipe.stop_at
                better = recipe.select == "best" and (each.best is None or error < each.best["error"])
                if better or (reached and recipe.select == "last"):
                    each.best = {"epoch": now.epoch + 1, "error": error, "weights": self.weights(k)}
                if reached:
                    self.over[k] = ""
            each.rows.append(row)
            if (line := routing[k]) is not None:
                each.routing.append(line)
            times = {"seconds": share * now.epoch_seconds, "images_per_second": speed}
            each.times.append({"epoch": now.epoch + 1, **times})
            each.step, each.epoch = now.step, now.epoch + 1
        now.seconds += now.epoch_seconds + time.monotonic() - began
        now.epoch, now.batch, now.epoch_seconds = now.epoch + 1, 0, 0.0
        self.tally.clear()
        self.write_tables()
        if now.epoch in recipe.keep_epochs:
            for k, each in enumerate(self.each):
                if each.epoch == now.epoch:
                    name = f"epochs/epoch-{now.epoch:04d}.safetensors"
                    self.folders[k].write_weights(name, now.step, self.weights(k), now.epoch)
        shown = {"epoch": now.epoch, "step": now.step, "lr": lr, "loss": sum(mean.values()), **mean}
        if errors:
            shown["validation_error"] = sum(errors.values()) / len(errors)
        self.shown.epoch(shown, recipe.epochs, speed)

    def validation_errors(self) -> dict[int, float]:
        """Each seed's top-1 or exact match, by the averaged weights where there are any."""
        if self.validation is None:
            return {}
        scores: list[Tensor] = []
        probabilities: list[Tensor] = []
        labels: list[Tensor] = []

        def work(network: Any, images: Tensor) -> tuple[Tensor, Tensor]:
            output = network(images)
            return widen(output.scores), widen(output.probabilities)

        self.stack.train(False)
        averaged = self.ema.in_place_of(self.stack.all) if self.ema else nullcontext()
        with averaged, self.fabric.autocast(), torch.no_grad():
            for batch in self.validation.epoch(0):
                if self.stop:
                    raise Interrupted
                crops = batch.images.shape[1] if batch.images.dim() == 5 else 0
                images = batch.images.flatten(0, 1) if crops else batch.images
                own, likely = self.stack(work, images, axis=None)
                if crops:
                    own = likely = likely.unflatten(1, (-1, crops)).mean(dim=2)
                scores.append(own)
                probabilities.append(likely)
                labels.append(batch.labels)
        wanted = torch.cat(labels).cpu()
        found = [torch.cat(parts, 1).cpu() for parts in (scores, probabilities)]
        errors = {}
        for k in self.active():
            try:
                errors[k] = headline_error(checked(Predictions(found[0][k], found[1][k], wanted)))
            except ValueError as error:
                self.fail(k, f"validation after step {self.now.step}: {error}")
        return errors

    def log_routing(self, k: int) -> dict[str, Any] | None:
        now, one = self.now, self.stack.one
        if self._few is None:
            split = self.batches.first.split if self.validation is None else self.validation.split
            count = min(64, len(split))
            options: dict[str, Any] = {"transform": self.data.test_transform, "shuffle": False, "samples": count}
            images = next(batches_for(split, count, workers=0, **options).epoch(0)).images
            self._few = images[:, 0] if images.dim() == 5 else images  # one crop of several
        one.load_state_dict(self.stack.weights(k))
        try:
            with self.fabric.autocast():
                log = routing_log(one, self._few)
            return {"epoch": now.epoch + 1, "step": now.step, **log} if log["layers"] else None
        except (RuntimeError, ValueError) as error:
            self.shown.say(f"routing.jsonl of seed {self.seeds[k]} leaves out epoch {now.epoch + 1}: {error}")
            return None


def starts_anew(out: Path, seeds: list[int]) -> bool:
    """Whether nothing has been trained together there, or others only, all of whom have finished."""
    path = out / "together" / "recipe.json"
    if not checkpoint.steps(path.parent / "checkpoints"):
        return True
    try:
        before = json.loads(path.read_text())["seeds"]
        return not set(seeds) & set(before) and all((out / f"seed-{s}" / "final.json").exists() for s in before)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def check_together(out: Path, recipe: Recipe, seeds: list[int], new: bool, resume: bool) -> list[int]:
    """The seeds that are trained in this folder. Refuses one with other seeds, with another recipe, or with runs."""
    if new:
        for seed in seeds:
            folder = out / f"seed-{seed}"
            if (folder / "final.json").exists():
                raise ValueError(f"{folder} holds a finished run; leave out seed {seed} or choose another folder")
            if checkpoint.steps(folder / "checkpoints"):
                raise ValueError(f"{folder} holds a run of its own; resume it without --together")
        return seeds
    if not resume:
        raise ValueError(f"{out} holds runs already; resume them or choose another folder")
    path = out / "together" / "recipe.json"
    try:
        content = json.loads(path.read_text())
        theirs, fields = list(content["seeds"]), {**DEFAULTS, **content["recipe"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} cannot be read, so it is not known whose runs these are: {error}") from None
    if not set(seeds) <= set(theirs):
        raise ValueError(f"{out} holds the seeds {theirs}, which are trained together; {seeds} are not among them")
    mine = recipe.to_dict()
    if (name := differing(mine, fields)) is not None:
        raise ValueError(
            f"{out} holds runs of another recipe: {name} is {fields.get(name)!r} there and {mine[name]!r} here"
        )
    return theirs


def write_recipes(out: Path, recipe: Recipe, seeds: list[int], about: dict[str, Any] | None, new: bool) -> None:
    """recipe.json of all, in place of that of seeds that were trained there before, and what each has of its own."""
    if new:
        shutil.rmtree(out / "together" / "checkpoints", ignore_errors=True)
        checkpoint.write(out / "together" / "recipe.json", as_json({"seeds": seeds, "recipe": recipe.to_dict()}))
    for seed in seeds:
        write_recipe(out / f"seed-{seed}", recipe, seed, about, begins=new)
