"""One process's part in a run: network, optimiser, data and progress, and how all of it is saved and comes back."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from torchcaps.data import DataSet, batches_for
from torchcaps.recipes import Recipe
from torchcaps.train import checkpoint
from torchcaps.train.fabric import Fabric
from torchcaps.train.folder import Folder, Progress, Run
from torchcaps.train.optim import create_optimizer, learning_rate, trained_names
from torchcaps.train.power import Counter
from torchcaps.train.prepare import (
    RunError,
    create_network,
    device_name,
    training_batches,
    validation_batches,
)
from torchcaps.train.progress import Log
from torchcaps.train.ranks import Ranks
from torchcaps.train.sharded import Gathered, Whole
from torchcaps.train.step import Step
from torchcaps.train.teachers import Teachers


class Session:
    """One process's part in a run: the loop, and what it changes."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        folder: Folder,
        fabric: Fabric,
        ranks: Ranks,
        network: nn.Module,
        data: DataSet,
        shown: Log,
        capture: bool,
        compiled: bool = False,
    ):
        self.recipe, self.seed, self.folder, self.fabric, self.ranks = recipe, seed, folder, fabric, ranks
        self.shown, self.data, self.network = shown, data, network
        network.to(fabric.device)
        trained = [name for part in trained_names(recipe, network) for name in part]
        self.model, optimizer = fabric.setup(network, create_optimizer(recipe, network, capture))
        self.sharded = type(fabric.strategy).__name__ == "FSDPStrategy"
        self.whole = (
            Gathered(self.model._forward_module, optimizer.optimizer, trained)
            if self.sharded
            else Whole(network, optimizer)
        )
        shared: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank, "world": fabric.world_size}
        self.batches = training_batches(recipe, data, seed, shared)
        self.validation = None if data.validation is None else validation_batches(recipe, data, shared)
        if self.validation is None and (recipe.select == "best" or recipe.stop_at is not None):
            words = "select='best'" if recipe.stop_at is None else "stop_at"
            raise ValueError(f"{words} needs a validation set; validation=0.1 holds out a tenth of the images")
        self.teachers = Teachers(recipe, data, fabric.device)
        learning_rate(recipe, 0, len(self.batches))  # says what is wrong with a schedule before any work is done
        self.step = Step(
            recipe,
            seed,
            fabric,
            network,
            self.model,
            optimizer,
            len(self.batches),
            teachers=self.teachers,
            capture=capture,
            compiled=compiled,
            say=shown.say,
        )
        self.ema, self.tally = self.step.ema, self.step.tally
        self.now = Progress()
        self.stop: list[str] = []  # the names of signals that came
        self.saved_at = time.monotonic()
        self.counter = Counter(fabric.device, fabric.local_rank)
        self._few: Tensor | None = None

    def speed(self) -> float:
        return self.tally.images / max(self.now.epoch_seconds, 1e-9)

    def reached(self) -> int | None:
        """The epoch after which the recipe's `stop_at` ends the run."""
        if self.recipe.stop_at is None or not self.now.rows:
            return None
        last = self.now.rows[-1]
        return last["epoch"] if 1 - last["validation_error"] >= self.recipe.stop_at else None

    def weights(self) -> dict[str, Tensor]:
        """A copy of those to be used: the averaged ones where there are any."""
        source = self.whole.weights() if self.ema is None else self.ema.average
        return {name: value.detach().cpu().clone() for name, value in source.items()}

    def few_images(self) -> Tensor:
        """At most 64 of the validation or else the training set, always the same, as they are evaluated."""
        if self._few is None:
            split = (self.validation or self.batches).split
            count = min(64, len(split))
            options: dict[str, Any] = {"transform": self.data.test_transform, "shuffle": False, "samples": count}
            images = next(batches_for(split, count, workers=0, **options).epoch(0)).images
            self._few = images[:, 0] if images.dim() == 5 else images  # one crop of several
        return self._few

    def check_losses(self) -> None:
        if bad := self.tally.first_bad():
            ago, name = bad
            layer = "" if self.sharded else bad_layer(self.whole.weights())
            where = f"at step {self.now.step - ago}, in the term {name}{layer}"
            raise RunError(f"the loss is not finite {where}{self.folder.intact()}")

    def save(self) -> None:
        self.check_losses()
        weights = self.whole.weights()
        if layer := bad_layer(weights):
            raise RunError(f"step {self.now.step - 1} left the network{layer}{self.folder.intact()}")
        self.ranks.average(self.tally.totals)
        spent = self.ranks.gathered(self.counter.since())
        if self.now.joules is not None:
            self.now.joules = None if None in spent else self.now.joules + sum(spent)
        state = {
            "seed": self.seed,
            "recipe": self.recipe.to_dict(),
            "optimizer": self.whole.moments(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "scaler": self.fabric.strategy.precision.state_dict(),
            "tally": self.tally.state_dict(),
            "teachers": self.teachers.sums,
            **self.now.state_dict(),
        }
        self.folder.save(self.now.step, weights, state)
        self.saved_at = time.monotonic()

    def restore(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        self.teachers.check_same(state.get("teachers", {}))
        self.whole.load(found.weights, state["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.fabric.strategy.precision.load_state_dict(state["scaler"])
        self.tally.load_state_dict(state["tally"])
        self.now = Progress(**state["progress"], **state["clock"])
        self.shown.say(f"goes on from step {found.step}")

    def purge_step(self) -> int | None:
        """From where on a resumed run's TensorBoard is written again; the end of an epoch may be still to come."""
        return self.now.step + (self.now.batch < len(self.batches)) if self.now.step else None

    def finish(self, stopped: str) -> Run:
        now = self.now
        seconds = now.seconds + now.epoch_seconds
        run = Run(
            self.folder.path, self.recipe, self.seed, self.network, self.data, now.step, not stopped, now.rows, seconds
        )
        run.joules = now.joules
        if stopped:
            run.stopped = stopped
            self.shown.say(f"stopped by {stopped} at step {now.step}, which is saved")
            return run
        run.reached = self.reached()
        run.selected = now.epoch if now.best is None else now.best["epoch"]
        weights = self.weights() if now.best is None else now.best["weights"]
        if self.sharded:
            run.model = create_network(self.recipe, self.data, self.fabric)
        run.model.load_state_dict(weights)
        self.folder.write_weights("weights.safetensors", now.step, weights, run.selected)
        final = {
            "recipe": self.recipe.to_dict(),
            "seed": self.seed,
            "step": now.step,
            "epochs": now.epoch,
            "reached_stop_at": run.reached,
            "selected_epoch": run.selected,
            "last": now.rows[-1],
            "seconds": seconds,
            "joules": run.joules,
            "device": device_name(self.fabric.device),
            "ranks": self.fabric.world_size,
            "teachers": self.teachers.sums,
        }
        if now.rows[-1].get("validation_error") is not None:
            final["validation_error"] = now.rows[run.selected - 1]["validation_error"]
        self.folder.write_final(now.step, final)
        return run


def bad_layer(weights: dict[str, Tensor]) -> str:
    for name, value in weights.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return f", with weights that are not finite in {name}"
    return ""
