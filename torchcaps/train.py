"""Training: one loop, which can be stopped at any moment and goes on as if it had not been.

Everything in it is a pure function of the recipe, the seed and the step: order and augmentation of the images, learning
rate, margin, and the random numbers of the network, for which torch is seeded anew at each step. So a checkpoint holds
weights, moments, averages and how far the run has come; on a CPU a resumed run ends with the same bits.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps import checkpoint, losses
from torchcaps.data import Batch, Batches, DataSet
from torchcaps.evaluate import Predictions, headline_error, predict
from torchcaps.fabric import Fabric
from torchcaps.optim import EMA, create_optimizer, learning_rate, set_rates
from torchcaps.prepare import (
    RunError,
    check,
    create_fabric,
    create_network,
    device_name,
    load_data,
    numerics,
    on_first_rank,
    seed_of,
    signals,
    training_batches,
    validation_batches,
)
from torchcaps.progress import Log, Silent, for_terminal
from torchcaps.recipes import Recipe
from torchcaps.types import Output

CHECK_EVERY = 100  # steps after which an accelerator is asked whether all losses were finite


class Interrupted(Exception):
    """A signal came while something was under way that can be done again."""


@dataclass
class Progress:
    """How far a run has come: `batch` batches of `epoch` are done, counted from 0; then validation, then the next."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    images: int = 0  # of this epoch
    totals: dict[str, Tensor] = field(default_factory=dict)  # sums over these of each loss term
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.csv
    best: dict[str, Any] | None = None  # epoch, error and weights
    times: list[dict[str, Any]] = field(default_factory=list)  # of times.csv
    seconds: float = 0.0  # spent on steps and validation
    epoch_seconds: float = 0.0  # on the steps of this epoch

    def means(self) -> dict[str, float]:
        return {name: float(total) / max(1, self.images) for name, total in self.totals.items()}

    def speed(self) -> float:
        return self.images / max(self.epoch_seconds, 1e-9)


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


def train(
    recipe: Recipe,
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    data: DataSet | None = None,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    precision: str | None = None,
    resume: bool = False,
    deterministic: bool = False,
    limit: int | None = None,
    save_every: float = 60.0,
    log: Log | str | None = "auto",
) -> Run:
    """Trains a recipe in a folder of its own: recipe.json, checkpoints, metrics.csv, weights.safetensors, final.json.

    The test set is not looked at.

    Args:
        data: instead of the recipe's.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps". Under torchrun, `devices` and `nodes` are its.
        resume: goes on from the last checkpoint, or starts where there is none yet.
        deterministic: only algorithms that give the same bits each time.
        limit: the run pauses after this step.
        save_every: seconds between checkpoints; one is also written at the end and on SIGTERM and Ctrl-C.
        log: "auto" for a bar or lines on stderr, None for silence.
    """
    recipe = replace(recipe, precision=precision or recipe.precision)
    check(recipe)
    out = Path(out)
    fabric = create_fabric(recipe, device, devices, nodes)
    fabric.launch()
    lead = fabric.global_rank == 0
    shown: Log = Silent() if log is None or not lead else for_terminal() if isinstance(log, str) else log
    with ExitStack() as stack:
        on_first_rank(fabric, lambda: stack.enter_context(checkpoint.locked(out)))
        on_first_rank(fabric, lambda: open_folder(out, recipe, seed, resume))
        stack.enter_context(numerics(recipe.precision, deterministic))
        stack.callback(shown.close)
        with fabric.rank_zero_first():
            data = load_data(recipe) if data is None else data
        torch.manual_seed(seed)
        network = create_network(recipe, data, fabric)
        session = Session(recipe, seed, out, fabric, network, data, shown)
        if resume and (found := checkpoint.latest(out / "checkpoints", notice=shown.say)) is not None:
            session.restore(found)
        session.stop = stack.enter_context(signals())
        try:
            return session.finish(session.run(limit, save_every))
        except RuntimeError as error:
            if fabric.world_size > 1 and "peer" in str(error):
                step = f"lost another rank at step {session.progress.step}"
                raise RunError(f"rank {fabric.global_rank} {step}{session.intact()}") from error
            raise


class Session:
    """One process's part in a run: the loop, and what it changes."""

    def __init__(
        self, recipe: Recipe, seed: int, out: Path, fabric: Fabric, network: nn.Module, data: DataSet, shown: Log
    ):
        self.recipe, self.seed, self.out, self.fabric, self.shown, self.data = recipe, seed, out, fabric, shown, data
        self.network = network
        self.model, self.optimizer = fabric.setup(network, create_optimizer(recipe, network.parameters()))
        self.ema = EMA(network, recipe.ema) if recipe.ema else None
        shared: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank, "world": fabric.world_size}
        self.batches = training_batches(recipe, data, seed, shared)
        self.validation = None if data.validation is None else validation_batches(recipe, data, shared)
        if recipe.select == "best" and self.validation is None:
            raise ValueError("select='best' needs a validation set; validation=0.1 holds out a tenth of the images")
        learning_rate(recipe, 0, len(self.batches))  # says what is wrong with a schedule before any work is done
        self.progress = Progress()
        self.first_bad: dict[str, Tensor] = {}  # the step at which each term first was not finite, else -1
        self.stop: list[str] = []  # the names of signals that came
        self.saved_at = time.monotonic()
        self.class_weights = (
            None if recipe.class_weights is None else torch.tensor(recipe.class_weights, device=fabric.device)
        )

    def run(self, limit: int | None, save_every: float) -> str:
        """The loop. Gives "" when all epochs are done, else what stopped it, with everything saved."""
        now, recipe = self.progress, self.recipe
        self.write_metrics()
        while now.epoch < recipe.epochs:
            self.model.train()
            began = time.monotonic()
            for batch in self.batches.epoch(now.epoch, now.batch):
                self.account(self.update(batch), len(batch.images) * self.fabric.world_size)
                began = self.clock(began)
                self.shown.step(now.step, recipe.epochs * len(self.batches), now.speed(), now.means)
                wish = self.stop[0] if self.stop else "limit" if limit is not None and now.step >= limit else ""
                stopped, due = self.agreed(wish, time.monotonic() - self.saved_at >= save_every)
                if stopped or due:
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

    def clock(self, began: float) -> float:
        """Counts the time since `began` for the epoch, and gives the time it is."""
        now = time.monotonic()
        self.progress.epoch_seconds += now - began
        return now

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of the optimiser on one batch, cut into `accumulate` parts whose gradients add up to its own."""
        recipe, step, fabric = self.recipe, self.progress.step, self.fabric
        torch.manual_seed(seed_of(self.seed, step, fabric.global_rank))
        set_rates(self.optimizer, recipe, step, len(self.batches))
        self.optimizer.zero_grad()
        values: dict[str, Tensor] = {}
        parts = list(cut(batch, recipe.accumulate))
        for number, part in enumerate(parts, 1):
            share = len(part.images) / len(batch.images)
            last = number == len(parts)
            with nullcontext() if last or fabric.world_size == 1 else fabric.no_backward_sync(self.model):
                output = self.model(part.images, part.labels)
                terms = loss_terms(recipe, output, part, step, self.class_weights)
                fabric.backward(share * torch.stack(list(terms.values())).sum())
            for name, value in terms.items():
                values[name] = values.get(name, 0) + share * value.detach()
        if recipe.clip is not None:
            fabric.clip_gradients(self.model, self.optimizer, max_norm=recipe.clip, error_if_nonfinite=False)
        elif recipe.clip_value is not None:
            fabric.clip_gradients(self.model, self.optimizer, clip_val=recipe.clip_value)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.network)
        return values

    def account(self, values: dict[str, Tensor], images: int) -> None:
        """Adds a step to the epoch's sums, and notes losses that are not finite, without a wait for the device."""
        now = self.progress
        for name, value in values.items():
            value = value if value.device.type == "mps" else value.double()
            now.totals[name] = now.totals.get(name, torch.zeros_like(value)) + images * value
            bad = self.first_bad.get(name, torch.full_like(value, -1))
            self.first_bad[name] = torch.where((bad < 0) & ~value.isfinite(), now.step, bad)
        now.step, now.batch, now.images = now.step + 1, now.batch + 1, now.images + images
        if self.fabric.device.type == "cpu" or now.step % CHECK_EVERY == 0:
            self.check_losses()

    def end_epoch(self) -> None:
        """Validation, the epoch's row of metrics, and what is kept of it."""
        now, recipe = self.progress, self.recipe
        self.check_losses()
        self.share_totals()
        began = time.monotonic()
        error = None if self.validation is None else self.validation_error(self.validation)
        terms, speed = now.means(), now.speed()
        lr = learning_rate(recipe, now.step - 1, len(self.batches))
        row = {"epoch": now.epoch + 1, "step": now.step, "lr": lr, "loss": sum(terms.values()), **terms}
        if error is not None:
            row["validation_error"] = error
            if recipe.select == "best" and (now.best is None or error < now.best["error"]):
                now.best = {"epoch": now.epoch + 1, "error": error, "weights": self.weights()}
        now.rows.append(row)
        now.times.append({"epoch": now.epoch + 1, "seconds": now.epoch_seconds, "images_per_second": speed})
        now.seconds += now.epoch_seconds + time.monotonic() - began
        now.epoch, now.batch, now.images, now.totals, now.epoch_seconds = now.epoch + 1, 0, 0, {}, 0.0
        self.write_metrics()
        if now.epoch in recipe.keep_epochs:
            self.write_weights(self.out / "epochs" / f"epoch-{now.epoch:04d}.safetensors", self.weights(), now.epoch)
        self.shown.epoch(row, recipe.epochs, speed)

    def share_totals(self) -> None:
        """Makes every rank's sums the mean of all, so that any of them can be saved."""
        if self.fabric.world_size > 1:
            for total in self.progress.totals.values():
                torch.distributed.all_reduce(total)
                total /= self.fabric.world_size

    def validation_error(self, batches: Batches) -> float:
        """Top-1 or exact match, by the averaged weights where there are any."""

        def until_stopped() -> Iterator[Batch]:
            for batch in batches.epoch(0):
                if self.stop and self.fabric.world_size == 1:
                    raise Interrupted
                yield batch

        try:
            with self.ema.in_place_of(self.network) if self.ema else nullcontext(), self.fabric.autocast():
                predictions = predict(self.network, until_stopped())
        except ValueError as error:
            raise RunError(f"validation after step {self.progress.step}: {error}{self.intact()}") from error
        if self.fabric.world_size > 1:
            shares: list[Any] = [None] * self.fabric.world_size
            torch.distributed.all_gather_object(shares, tuple(predictions))
            predictions = Predictions(*(torch.cat(part) for part in zip(*shares, strict=True)))
        return headline_error(predictions)

    def weights(self) -> dict[str, Tensor]:
        """A copy of those to be used: the averaged ones where there are any."""
        source = self.network.state_dict() if self.ema is None else self.ema.average
        return {name: value.detach().cpu().clone() for name, value in source.items()}

    def check_losses(self) -> None:
        bad = {name: int(step) for name, step in self.first_bad.items() if step >= 0}
        if bad:
            name = min(bad, key=lambda name: bad[name])
            raise RunError(
                f"the loss is not finite at step {bad[name]}, in the term {name}{self.bad_layer()}{self.intact()}"
            )

    def bad_layer(self) -> str:
        for name, value in self.network.state_dict().items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return f", with weights that are not finite in {name}"
        return ""

    def intact(self) -> str:
        there = checkpoint.steps(self.out / "checkpoints")
        return f"; the checkpoint of step {there[-1]} is intact" if there else "; there was no checkpoint yet"

    def agreed(self, stop: str, save: bool) -> tuple[str, bool]:
        """What stops the run, and whether to save, the same on all ranks."""
        if self.fabric.world_size > 1:
            flags = torch.tensor([bool(stop), save], dtype=torch.int32, device=self.fabric.device)
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            stops, save = flags.bool().tolist()
            stop = (stop or "another rank") if stops else ""
        return stop, save

    def save(self) -> None:
        self.check_losses()
        if layer := self.bad_layer():
            raise RunError(f"step {self.progress.step - 1} left the network{layer}{self.intact()}")
        self.share_totals()
        state = self.state()
        self.guarded(
            lambda: checkpoint.save(self.out / "checkpoints", self.progress.step, self.network.state_dict(), state)
        )
        self.saved_at = time.monotonic()

    def state(self) -> dict[str, Any]:
        """All there is besides the weights. What depends on the clock is apart: the rest is the same in every run."""
        now = dict(vars(self.progress))
        clock = {name: now.pop(name) for name in ("times", "seconds", "epoch_seconds")}
        return {
            "seed": self.seed,
            "recipe": self.recipe.to_dict(),
            "progress": now,
            "optimizer": self.optimizer.state_dict()["state"],
            "ema": None if self.ema is None else self.ema.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "clock": clock,
        }

    def restore(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        self.network.load_state_dict(found.weights)
        plain = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": plain["param_groups"]})
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"], **state["clock"])
        self.progress.totals = {name: total.to(self.fabric.device) for name, total in self.progress.totals.items()}
        self.shown.say(f"goes on from step {found.step}")

    def guarded(self, write: Callable[[], None]) -> None:
        """Writes on the first rank; a full disk ends the run on all of them, with a sentence."""

        def attempt() -> None:
            try:
                write()
            except OSError as error:
                reason = error.strerror or str(error)
                raise RunError(f"step {self.progress.step} could not be saved: {reason}{self.intact()}") from error

        on_first_rank(self.fabric, attempt)

    def write_metrics(self) -> None:
        now = self.progress
        self.guarded(lambda: write_table(self.out / "metrics.csv", now.rows))
        self.guarded(lambda: write_table(self.out / "times.csv", now.times))

    def write_weights(self, path: Path, weights: dict[str, Tensor], epoch: int) -> None:
        about = {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "epoch": epoch,
            "image": list(self.data.image),
            "class_names": list(self.data.class_names),
        }
        self.guarded(lambda: checkpoint.save_weights(path, weights, about))

    def finish(self, stopped: str) -> Run:
        now = self.progress
        seconds = now.seconds + now.epoch_seconds
        run = Run(self.out, self.recipe, self.seed, self.network, self.data, now.step, not stopped, now.rows, seconds)
        if stopped:
            run.stopped = stopped
            self.shown.say(f"stopped by {stopped} at step {now.step}, which is saved")
            return run
        run.selected = now.epoch if now.best is None else now.best["epoch"]
        weights = self.weights() if now.best is None else now.best["weights"]
        self.network.load_state_dict(weights)
        self.write_weights(self.out / "weights.safetensors", weights, run.selected)
        final = {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "step": now.step,
            "selected_epoch": run.selected,
            "last": now.rows[-1],
            "seconds": seconds,
            "device": device_name(self.fabric.device),
            "ranks": self.fabric.world_size,
        }
        if now.rows[-1].get("validation_error") is not None:
            final["validation_error"] = now.rows[run.selected - 1]["validation_error"]
        self.guarded(lambda: checkpoint.write(self.out / "final.json", json.dumps(final, indent=2).encode() + b"\n"))
        return run


def loss_terms(
    recipe: Recipe, output: Output, batch: Batch, step: int, class_weights: Tensor | None = None
) -> dict[str, Tensor]:
    """What is minimised, each term by name and weighted. A pure function, of one replica or of many under vmap."""
    terms: dict[str, Tensor] = {}
    if recipe.loss == "margin":
        terms["margin"] = losses.margin_loss(
            output.scores,
            batch.labels,
            scale=recipe.loss_scale,  # type: ignore[arg-type]
            class_weights=class_weights,
        )
    elif recipe.loss == "spread":
        terms["spread"] = losses.spread_loss(output.scores, batch.labels, losses.spread_margin(step))
    elif recipe.loss == "cross_entropy":
        terms["cross_entropy"] = losses.cross_entropy(
            output.scores, batch.labels, class_weights=class_weights, label_smoothing=recipe.label_smoothing
        )
    else:
        terms["binary_cross_entropy"] = losses.binary_cross_entropy(output.scores, batch.labels)
    if recipe.reconstruction:
        if output.reconstruction is None:
            raise ValueError(
                f"{recipe.model} reconstructs nothing; reconstruction must be 0, got {recipe.reconstruction}"
            )
        target = batch.images if batch.targets is None else batch.targets
        error = losses.reconstruction_loss(
            output.reconstruction,
            target,
            reduction=recipe.reconstruction_reduction,  # type: ignore[arg-type]
            labels=batch.labels,
        )
        terms["reconstruction"] = recipe.reconstruction * error
    if output.penalty is not None:
        terms["penalty"] = output.penalty
    return terms


def cut(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch in so many parts of nearly one size, or as many as it has images."""
    if parts == 1:
        yield batch
        return
    targets: Iterable[Tensor | None] = [None] * parts if batch.targets is None else batch.targets.tensor_split(parts)
    for images, labels, own in zip(
        batch.images.tensor_split(parts), batch.labels.tensor_split(parts), targets, strict=True
    ):
        if len(images):
            yield Batch(images, labels, own)


def open_folder(out: Path, recipe: Recipe, seed: int, resume: bool) -> None:
    """Refuses a folder that holds another run, or this one where it is not to be resumed."""
    mine = {"seed": seed, **recipe.to_dict()}
    content = {"seed": seed, "recipe": recipe.to_dict()}
    path = out / "recipe.json"
    if checkpoint.steps(out / "checkpoints"):
        if not resume:
            raise ValueError(f"{out} holds a run already; resume it or choose another folder")
        try:
            content = json.loads(path.read_text())
            theirs = {"seed": content["seed"], **content["recipe"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read, so it is not known whose checkpoints these are: {error}"
            ) from None
        for name in mine:
            if theirs.get(name) != mine[name]:
                raise ValueError(
                    f"{out} holds a run of another recipe: {name} is {theirs.get(name)!r} there and {mine[name]!r} here"
                )
        return
    checkpoint.write(path, json.dumps(content, indent=2).encode() + b"\n")


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """A CSV file of all rows, in one piece, so that a resumed run has each once."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    if rows:
        writer.writeheader()
        writer.writerows(rows)
    checkpoint.write(path, text.getvalue().encode())
