"""What several seeds trained together have in common, what each has of its own, and how all of it is saved.

A seed that fails is put aside: what the last checkpoint has of it becomes one in the seed's own folder.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.data import DataSet
from torchcaps.recipes import Recipe
from torchcaps.train import checkpoint
from torchcaps.train.fabric import Fabric
from torchcaps.train.folder import Folder, Progress, Run
from torchcaps.train.optim import create_optimizer, learning_rate, load_moments
from torchcaps.train.power import Counter
from torchcaps.train.prepare import RunError, device_name, validation_batches
from torchcaps.train.progress import Log
from torchcaps.train.replicas import ReplicaBatches, ReplicaStep
from torchcaps.train.session import bad_layer
from torchcaps.train.stacked import Stack
from torchcaps.train.teachers import Teachers

ALONE = "train these seeds one after the other, without --together"


class Seeds:
    """All seeds of a run, and how they are saved and come back."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: list[int],
        out: Path,
        fabric: Fabric,
        stack: Stack,
        data: DataSet,
        shown: Log,
        capture: bool,
    ):
        self.recipe, self.seeds, self.fabric, self.stack = recipe, seeds, fabric, stack
        self.data, self.shown = data, shown
        self.common = Folder(out / "together", fabric, recipe, seeds[0], data)
        self.folders = [Folder(out / f"seed-{seed}", fabric, recipe, seed, data) for seed in seeds]
        self.batches = ReplicaBatches(recipe, data, seeds, fabric.device)
        shared: dict[str, Any] = {"device": fabric.device, "rank": 0, "world": 1}
        self.validation = None if data.validation is None else validation_batches(recipe, data, shared)
        if self.validation is None and (recipe.select == "best" or recipe.stop_at is not None):
            words = "select='best'" if recipe.stop_at is None else "stop_at"
            raise ValueError(f"{words} needs a validation set; validation=0.1 holds out a tenth of the images")
        learning_rate(recipe, 0, len(self.batches))
        stack.train()
        self.teachers = Teachers(recipe, data, fabric.device)
        self.try_out(shown)
        self.optimizer = create_optimizer(recipe, stack.all, capture and not stack.drew)
        self.step = ReplicaStep(
            recipe,
            seeds,
            fabric,
            stack,
            self.optimizer,
            len(self.batches),
            teachers=self.teachers,
            capture=capture and not stack.drew,
            say=shown.say,
        )
        self.ema, self.tally = self.step.ema, self.step.tally
        self.now = Progress()
        self.each = [Progress() for _ in seeds]
        self.over: dict[int, str] = {}  # replicas that take no further part, with the reason; "" is stop_at
        self.stop: list[str] = []
        self.saved_at = time.monotonic()
        self.counter = Counter(fabric.device)
        self._few: Tensor | None = None

    def try_out(self, shown: Log) -> None:
        """One pass forward and back that leaves no trace, for a network that cannot be stacked to say so at once."""
        stack, buffers = self.stack, {name: b.clone() for name, b in self.stack.all.named_buffers()}
        steps, teachers = len(self.batches), self.teachers
        trial = ReplicaStep(self.recipe, self.seeds, self.fabric, stack, None, steps, teachers=teachers, say=shown.say)  # type: ignore[arg-type]
        batch = next(iter(self.batches.epoch(0)))
        try:
            trial.terms(batch._replace(images=batch.images.detach())).sum().backward()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self.recipe.model} cannot be stacked ({reason}); {ALONE}") from error
        for name, buffer in stack.all.named_buffers():
            buffer.copy_(buffers[name])
        stack.all.zero_grad()

    def active(self) -> list[int]:
        return [k for k in range(len(self.seeds)) if k not in self.over]

    def speed(self) -> float:
        return len(self.seeds) * self.tally.images / max(self.now.epoch_seconds, 1e-9)

    def means(self) -> dict[str, float]:
        """Over the seeds."""
        rows = [row for k, row in enumerate(self.tally.every()) if k not in self.over]
        return {name: sum(row[name] for row in rows) / len(rows) for name in self.tally.names} if rows else {}

    def weights(self, k: int) -> dict[str, Tensor]:
        """A copy of those to be used: the averaged ones where there are any."""
        return self.stack.weights(k, None if self.ema is None else self.ema.average)

    def check_losses(self) -> None:
        for k, (ago, name) in self.tally.bad().items():
            if k not in self.over:
                layer = bad_layer(self.stack.weights(k))
                self.fail(k, f"the loss is not finite at step {self.now.step - ago}, in the term {name}{layer}")

    def fail(self, k: int, reason: str) -> None:
        """Puts a seed aside. What the last checkpoint has of it becomes one in its own folder."""
        seed, folder = self.seeds[k], self.folders[k]
        found = checkpoint.latest(self.common.checkpoints, notice=self.shown.say)
        last = max(checkpoint.steps(folder.checkpoints), default=-1)
        if found is not None and found.state["seeds"] == self.seeds and found.step > last:
            folder.save(found.step, *part(found, k))
        self.over[k] = f"seed {seed}: {reason}{folder.intact()}"
        self.shown.say(f"{self.over[k]}; the other seeds go on" if self.active() else self.over[k])

    def save(self) -> None:
        self.check_losses()
        weights = self.stack.all.state_dict()
        for k in self.active():
            if layer := bad_layer(self.stack.weights(k)):
                self.fail(k, f"step {self.now.step - 1} left the network{layer}")
        spent = self.counter.since()
        self.now.joules = None if spent is None or self.now.joules is None else self.now.joules + spent
        share = 1 / len(self.seeds)
        for k, each in enumerate(self.each):
            if k not in self.over:
                each.step, each.epoch, each.batch = self.now.step, self.now.epoch, self.now.batch
                each.seconds, each.epoch_seconds = share * self.now.seconds, share * self.now.epoch_seconds
                each.joules = None if self.now.joules is None else share * self.now.joules
        state = {
            "seeds": self.seeds,
            "recipe": self.recipe.to_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "ema": None if self.ema is None else self.ema.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "tally": self.tally.state_dict(),
            "teachers": self.teachers.sums,
            "over": self.over,
            "each": [each.state_dict() for each in self.each],
            **self.now.state_dict(),
        }
        self.common.save(self.now.step, weights, state)
        self.saved_at = time.monotonic()

    def restore(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        if state["seeds"] != self.seeds:
            place, theirs = self.common.checkpoints, state["seeds"]
            raise ValueError(f"{place} is of the seeds {theirs}, not of {self.seeds}; delete it to begin again")
        self.teachers.check_same(state.get("teachers", {}))
        self.stack.all.load_state_dict(found.weights)
        load_moments(self.optimizer, state["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.tally.load_state_dict(state["tally"])
        self.now = Progress(**state["progress"], **state["clock"])
        self.each = [Progress(**each["progress"], **each["clock"]) for each in state["each"]]
        self.over = dict(state["over"])
        self.shown.say(f"goes on from step {found.step}")

    def write_tables(self) -> None:
        for k, each in enumerate(self.each):
            if k not in self.over or each.epoch == self.now.epoch:
                self.folders[k].write_tables(each)

    def finish(self, stopped: str) -> list[Run]:
        failures = [reason for reason in self.over.values() if reason]
        if len(failures) == len(self.seeds):
            raise RunError(failures[0])
        if stopped:
            self.shown.say(f"stopped by {stopped} at step {self.now.step}, which is saved")
        return [self.finish_one(k, self.over.get(k, "") or stopped) for k in range(len(self.seeds))]

    def finish_one(self, k: int, stopped: str) -> Run:
        each, seed, folder, recipe = self.each[k], self.seeds[k], self.folders[k], self.recipe
        network = copy.deepcopy(self.stack.one)
        network.load_state_dict(self.stack.weights(k))
        seconds = each.seconds + each.epoch_seconds
        run = Run(folder.path, recipe, seed, network, self.data, each.step, not stopped, each.rows, seconds)
        run.joules = each.joules
        if stopped:
            run.stopped = stopped
            return run
        run.reached = each.epoch if k in self.over else None
        run.selected = each.epoch if each.best is None else each.best["epoch"]
        weights = self.weights(k) if each.best is None else each.best["weights"]
        network.load_state_dict(weights)
        if run.selected != each.epoch:  # which is tested too, and its folder has no checkpoint of its own
            folder.write_weights("last.safetensors", each.step, self.weights(k), each.epoch)
        folder.write_weights("weights.safetensors", each.step, weights, run.selected)
        final = {
            "recipe": recipe.to_dict(),
            "seed": seed,
            "step": each.step,
            "epochs": each.epoch,
            "reached_stop_at": run.reached,
            "selected_epoch": run.selected,
            "last": each.rows[-1],
            "seconds": seconds,
            "joules": run.joules,
            "device": device_name(self.fabric.device),
            "ranks": 1,
            "together": self.seeds,
            "teachers": self.teachers.sums,
        }
        if each.rows[-1].get("validation_error") is not None:
            final["validation_error"] = each.rows[run.selected - 1]["validation_error"]
        folder.write_final(each.step, final)
        return run


def part(found: checkpoint.Checkpoint, k: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint of all has of one replica, as `train` would have saved it."""

    def own(values: dict[Any, Any]) -> dict[Any, Any]:
        stacked = {name: isinstance(value, Tensor) and value.dim() > 0 for name, value in values.items()}
        return {name: value[k] if stacked[name] else value for name, value in values.items()}

    state = found.state
    ema, tally = state["ema"], state["tally"]
    return own(found.weights), {
        "seed": state["seeds"][k],
        "recipe": state["recipe"],
        "optimizer": {number: own(moments) for number, moments in state["optimizer"].items()},
        "ema": None if ema is None else {"updates": ema["updates"], "average": own(ema["average"])},
        "scaler": state["scaler"],
        "tally": {"totals": own(tally["totals"]), "images": tally["images"]},
        "teachers": state.get("teachers", {}),
        **state["each"][k],
    }
