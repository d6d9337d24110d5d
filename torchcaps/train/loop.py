"""Training: one loop, which can be stopped at any moment and goes on as if it had not been.

Everything in it is a pure function of the recipe, the seed and the step: order and augmentation of the images, learning
rate, margin, and the random numbers of the network, for which torch is seeded anew at each step. So a checkpoint holds
weights, moments, averages and how far the run has come; on a CPU a resumed run ends with the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchcaps.data import Batch, Batches, DataSet
from torchcaps.evaluate import Predictions, headline_error, predict
from torchcaps.ops.stream import own_stream
from torchcaps.recipes import Recipe
from torchcaps.train import checkpoint
from torchcaps.train.folder import Folder, Run, check_checkpoints, check_folder, write_recipe
from torchcaps.train.optim import learning_rate
from torchcaps.train.prepare import (
    RunError,
    check,
    create_fabric,
    create_network,
    load_data,
    may_capture,
    numerics,
    on_first_rank,
    signals,
)
from torchcaps.train.progress import Board, Log, Silent, for_terminal
from torchcaps.train.ranks import Ranks
from torchcaps.train.routing_log import routing_log
from torchcaps.train.session import Session

CHECK_EVERY = 100  # steps after which an accelerator is asked whether all losses were finite


class Interrupted(Exception):
    """By which signal, while something was under way that can be done again."""


def train(
    recipe: Recipe,
    *,
    out: str | os.PathLike[str],
    seed: int = 0,
    data: DataSet | None = None,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    strategy: str = "auto",
    precision: str | None = None,
    channels_last: bool | None = None,
    capture: bool | None = None,
    compiled: bool = False,
    resume: bool = False,
    deterministic: bool = False,
    limit: int | None = None,
    save_every: float = 60.0,
    log: Log | str | None = "auto",
    tensorboard: bool | None = None,
    about: dict[str, Any] | None = None,
) -> Run:
    """Trains a recipe in a folder of its own: recipe.json, checkpoints, metrics.csv, weights.safetensors, final.json.

    The test set is not looked at.

    Args:
        data: instead of the recipe's.
        device: "auto", "cpu", "cuda", "cuda:1" or "mps". Under torchrun, `devices` and `nodes` are its.
        strategy: how several devices share the work: "ddp" or, each with a part of the weights, "fsdp" (CUDA only).
        channels_last: how images lie in memory; by default as is fastest. The results differ by rounding only.
        capture: full batches as one CUDA graph; by default where that can be done.
        compiled: network and loss through torch.compile; it takes seconds, and pays for small networks on a GPU.
        resume: goes on from the last checkpoint, or starts where there is none yet.
        deterministic: only algorithms that give the same bits each time.
        limit: the run pauses after this step.
        save_every: seconds between checkpoints; one is also written at the end and on SIGTERM and Ctrl-C.
        log: "auto" for a bar or lines on stderr, None for silence.
        tensorboard: scalars into the folder; by default where it is installed and `log` is not None.
        about: what row.json says of the run, such as the table it belongs to; a run that goes on keeps its own.
    """
    recipe = replace(recipe, precision=precision or recipe.precision)
    check(recipe)
    out = Path(out)
    fabric = create_fabric(recipe, device, devices, nodes, strategy)
    capture = may_capture(recipe, fabric, capture)
    fabric.launch()
    lead = fabric.global_rank == 0
    shown: Log = Silent() if log is None or not lead else for_terminal() if isinstance(log, str) else log
    ranks = Ranks(fabric, out)
    with ExitStack() as stack:
        on_first_rank(fabric, lambda: stack.enter_context(checkpoint.locked(out)))
        on_first_rank(fabric, lambda: check_folder(out, recipe, seed, resume))
        on_first_rank(fabric, lambda: check_checkpoints(out))
        stack.enter_context(numerics(recipe.precision, deterministic))
        if capture:
            stack.enter_context(own_stream(fabric.device))
        with fabric.rank_zero_first():
            data = load_data(recipe) if data is None else data
        torch.manual_seed(seed)
        network = create_network(recipe, data, fabric, channels_last)
        folder = Folder(out, fabric, recipe, seed, data)
        session = Session(recipe, seed, folder, fabric, ranks, network, data, shown, capture, compiled)
        if resume and (found := checkpoint.latest(folder.checkpoints, notice=shown.say)) is not None:
            session.restore(found)
        if lead and (tensorboard or (tensorboard is None and log is not None)):
            session.shown = Board.around(shown, out / "tensorboard", session.purge_step(), needed=bool(tensorboard))
        stack.callback(session.shown.close)
        on_first_rank(fabric, lambda: write_recipe(out, recipe, seed, about, begins=not session.now.step))
        session.stop = stack.enter_context(signals())
        with ranks.watched(lambda: f" at step {session.now.step}{folder.intact()}"):
            return session.finish(loop(session, limit, save_every))


def loop(session: Session, limit: int | None, save_every: float) -> str:
    """Gives "" when all epochs are done, else what stopped it, with everything saved."""
    now, recipe = session.now, session.recipe
    total = recipe.epochs * len(session.batches)
    session.folder.write_tables(now)
    while now.epoch < recipe.epochs and session.reached() is None:
        session.model.train()
        began = time.monotonic()
        for batch in session.batches.epoch(now.epoch, now.batch):
            session.step(batch, now.step)
            now.step, now.batch = now.step + 1, now.batch + 1
            if session.fabric.device.type == "cpu" or now.step % CHECK_EVERY == 0:
                session.check_losses()
            began, before = time.monotonic(), began
            now.epoch_seconds += began - before
            session.shown.step(now.step, total, session.speed(), session.tally.means)
            wish = session.stop[0] if session.stop else "limit" if limit is not None and now.step >= limit else ""
            stopped, due = session.ranks.agreed(wish, time.monotonic() - session.saved_at >= save_every)
            if stopped or due:
                session.save()
            if stopped:
                return stopped
        try:
            end_epoch(session)
        except Interrupted as stop:
            session.save()
            return str(stop)
    session.save()
    return ""


def end_epoch(session: Session) -> None:
    """Validation, the epoch's row of metrics, and what is kept of it."""
    now, recipe = session.now, session.recipe
    session.check_losses()
    session.ranks.average(session.tally.totals)
    began = time.monotonic()
    error = None if session.validation is None else validation_error(session, session.validation)
    terms, speed = session.tally.means(), session.speed()
    lr = learning_rate(recipe, now.step - 1, len(session.batches))
    row = {"epoch": now.epoch + 1, "step": now.step, "lr": lr, "loss": sum(terms.values()), **terms}
    if error is not None:
        row["validation_error"] = error
        if recipe.select == "best" and (now.best is None or error < now.best["error"]):
            now.best = {"epoch": now.epoch + 1, "error": error, "weights": session.weights()}
    log_routing(session)
    now.rows.append(row)
    now.times.append({"epoch": now.epoch + 1, "seconds": now.epoch_seconds, "images_per_second": speed})
    now.seconds += now.epoch_seconds + time.monotonic() - began
    now.epoch, now.batch, now.epoch_seconds = now.epoch + 1, 0, 0.0
    session.tally.clear()
    session.folder.write_tables(now)
    if now.epoch in recipe.keep_epochs:
        name = f"epochs/epoch-{now.epoch:04d}.safetensors"
        session.folder.write_weights(name, now.step, session.weights(), now.epoch)
    session.shown.epoch(row, recipe.epochs, speed)


def validation_error(session: Session, batches: Batches) -> float:
    """Top-1 or exact match, by the averaged weights where there are any."""

    def until_stopped() -> Iterator[Batch]:
        for batch in batches.epoch(0):
            stopped, _ = session.ranks.agreed(session.stop[0] if session.stop else "", False)
            if stopped:
                raise Interrupted(stopped)
            yield batch

    network, ema = session.network, session.step.ema
    try:
        with ema.in_place_of(network) if ema else nullcontext(), session.fabric.autocast():
            predictions = predict(session.model if session.sharded else network, until_stopped())
    except ValueError as error:
        where = f"validation after step {session.now.step}"
        raise RunError(f"{where}: {error}{session.folder.intact()}") from error
    shares = session.ranks.gathered(tuple(predictions))
    return headline_error(Predictions(*(torch.cat(part) for part in zip(*shares, strict=True))))


def log_routing(session: Session) -> None:
    """A line on what routing does, for a few images that are always the same. A run does not end for the want of it."""
    now = session.now
    if session.sharded:
        return
    try:
        with session.fabric.autocast():
            log = routing_log(session.network, session.few_images())
    except (RuntimeError, ValueError) as error:
        session.shown.say(f"routing.jsonl leaves out epoch {now.epoch + 1}: {error}")
    else:
        if log["layers"]:
            now.routing.append({"epoch": now.epoch + 1, "step": now.step, **log})
