import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchcaps import losses
from torchcaps.data import Batch, DataSet, load
from torchcaps.data.augment import resize, shift
from torchcaps.recipes import Recipe
from torchcaps.train import checkpoint, power, prepare, progress, train
from torchcaps.train.checkpoint import fingerprint, latest, load_weights
from torchcaps.train.optim import create_optimizer
from torchcaps.train.prepare import RunError, seed_of
from torchcaps.train.progress import Lines
from torchcaps.train.sharded import Gathered, Whole
from torchcaps.train.step import cut, loss_terms
from torchcaps.types import Output

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("TORCHCAPS_KILLS", "10"))


class Tiny(nn.Module):
    """A convolution, batch norm, dropout, a decoder and a penalty over the batch, at a millisecond a step."""

    def __init__(self, image=(1, 8, 8), classes=10, dropout=0.3, weight=0.1):
        super().__init__()
        self.weight = weight
        self.gather = None
        self.features = nn.Sequential(
            nn.Conv2d(image[0], 8, 3, stride=2), nn.BatchNorm2d(8) if dropout else nn.Identity(), nn.ReLU()
        )
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.LazyLinear(classes))
        self.last(self.features(torch.zeros(2, *image)))
        self.decoder = nn.Sequential(nn.Linear(classes, 64), nn.Sigmoid(), nn.Unflatten(1, (1, *image)))

    def forward(self, images, labels=None):
        scores = self.last(self.features(images)).sigmoid()
        rows = scores if self.gather is None else self.gather(scores)
        penalty = self.weight * rows.var(dim=0).sum() if self.training else None
        return Output(scores, None, self.decoder(scores), penalty, scores)


RECIPE = Recipe(
    "tiny", "digits", reconstruction=0.01, epochs=5, batch_size=16, samples=128, ema=0.9, select="best", clip=1.0
)


def few_digits(count=256):
    digits = load("digits")
    return DataSet(
        "few",
        digits.train.take(torch.arange(count)),
        digits.test,
        digits.train.take(torch.arange(count, count + 64)),
        train_transform=(shift(1),),
    )


def tiny(recipe, out, **options):
    """Trains the tiny network on the CPU, in this process."""
    prepare.create_model = lambda name, **arguments: Tiny(**arguments)
    return train(recipe, **{"out": out, "data": few_digits(), "device": "cpu", "log": None, **options})


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outcome(folder):
    """Hashes of everything a run leaves that does not depend on the clock."""
    found = latest(Path(folder) / "checkpoints")
    state = {name: value for name, value in found.state.items() if name != "clock"}
    return {
        "step": found.step,
        "weights": fingerprint(found.weights),
        **{name: fingerprint(value) for name, value in state.items()},
        "metrics": (Path(folder) / "metrics.csv").read_text(),
        "used": fingerprint(load_weights(Path(folder) / "weights.safetensors")),
    }


BY_HEART = {
    "efficient_capsnet": (
        12,
        Recipe(
            "efficient_capsnet_mnist",
            "digits",
            reconstruction=0.392,
            reconstruction_reduction="mean",
            epochs=36,
            lr=2e-3,
        ),
    ),
    "capsnet": (
        8,
        Recipe(
            "capsnet_cifar10",
            "digits",
            model_args={"channels": 16, "types": 2, "dim": 4, "out_dim": 8, "leak": False},
            epochs=12,
            lr=5e-3,
        ),
    ),
    "cnn": (
        8,
        Recipe(
            "li_cnn6_cifar10",
            "digits",
            model_args={"width": 4},
            loss="cross_entropy",
            optimizer="sgd",
            optimizer_args={"momentum": 0.9, "nesterov": True},
            epochs=25,
            lr=2e-2,
        ),
    ),
}


@pytest.mark.parametrize("name", BY_HEART)
def test_32_images_are_learnt_by_heart(name, tmp_path):
    side, recipe = BY_HEART[name]
    few = load("digits").train.take(torch.arange(32))
    steps = () if side == 8 else (resize(side),)
    data = DataSet("few", few, few, few, train_transform=steps, test_transform=steps)
    run = train(replace(recipe, batch_size=16), out=tmp_path, data=data, device="cpu", log=None)
    assert run.finished
    assert run.metrics[-1]["validation_error"] == 0
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] / 10


def test_a_run_leaves_its_folder_complete(tmp_path):
    run = tiny(replace(RECIPE, keep_epochs=(1, 3)), tmp_path, seed=4)
    assert json.loads((tmp_path / "recipe.json").read_text()) == {"seed": 4, "recipe": run.recipe.to_dict()}
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "epoch,step,lr,loss,margin,reconstruction,penalty,validation_error"
    assert [line.split(",")[:2] for line in lines[1:]] == [[str(k), str(8 * k)] for k in range(1, 6)]
    assert len((tmp_path / "times.csv").read_text().splitlines()) == 6
    final = json.loads((tmp_path / "final.json").read_text())
    assert final["validation_error"] == min(row["validation_error"] for row in run.metrics)
    assert final["selected_epoch"] == run.selected
    weights, about = load_weights(tmp_path / "weights.safetensors")
    assert about["recipe"] == run.recipe.to_dict()
    assert about["class_names"] == list("0123456789")
    assert fingerprint(weights) == fingerprint(run.model.state_dict())
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == [
        "epoch-0001.safetensors",
        "epoch-0003.safetensors",
    ]


def test_the_best_on_validation_is_chosen_with_averaged_weights(tmp_path):
    best = tiny(RECIPE, tmp_path / "best")
    errors = [row["validation_error"] for row in best.metrics]
    assert best.selected == 1 + errors.index(min(errors))
    last = tiny(replace(RECIPE, select="last", keep_epochs=(5,)), tmp_path / "last")
    assert last.selected == 5
    kept, _ = load_weights(tmp_path / "last" / "epochs" / "epoch-0005.safetensors")
    found = latest(tmp_path / "last" / "checkpoints")
    assert fingerprint(kept) == fingerprint(found.state["ema"]["average"]) != fingerprint(found.weights)


@pytest.mark.parametrize("at", [1, 7, 8, 9, 39])
def test_pausing_changes_nothing(at, tmp_path):
    tiny(RECIPE, tmp_path / "whole")
    paused = tiny(RECIPE, tmp_path / "paused", limit=at)
    assert (paused.finished, paused.stopped, paused.step) == (False, "limit", at)
    assert tiny(RECIPE, tmp_path / "paused", resume=True).finished
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "rmsprop_keras", "optimizer_args": {"decay": 1e-2}, "ema": 0.0, "select": "last"},
        {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "schedule": "cosine", "accumulate": 3},
        {"optimizer": "adamw", "clip": None, "clip_value": 0.01, "precision": "bf16"},
        {"schedule": "exponential_steps", "schedule_args": {"decay": 0.5, "every": 7}, "loss": "spread"},
    ],
    ids=["rmsprop", "sgd", "adamw", "spread"],
)
def test_pausing_changes_nothing_whatever_the_recipe(changes, tmp_path):
    recipe = replace(RECIPE, epochs=2, **changes)
    tiny(recipe, tmp_path / "whole")
    tiny(recipe, tmp_path / "paused", limit=11)
    tiny(recipe, tmp_path / "paused", resume=True)
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    tiny(RECIPE, tmp_path)
    before = outcome(tmp_path)
    assert tiny(RECIPE, tmp_path, resume=True).finished
    assert outcome(tmp_path) == before


def test_another_seed_is_another_run(tmp_path):
    one, two = (tiny(replace(RECIPE, epochs=1), tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert one.metrics != two.metrics


def killed(folder, kills, seed):
    """Trains in children that are killed at random moments, until one of them ends by itself; run in a fresh process.

    Each step is saved, so that most of the time is spent inside the save.
    """
    torch.set_num_threads(1)
    chance = random.Random(seed)
    hits = 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                tiny(replace(RECIPE, epochs=8), folder, resume=True, save_every=0)
            finally:
                os._exit(0 if (Path(folder) / "final.json").exists() else 1)
        if hits < kills:
            time.sleep(chance.uniform(0.02, 0.25))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hits += os.WIFSIGNALED(status)
        if os.WIFEXITED(status):
            print(json.dumps({"kills": hits, "code": os.WEXITSTATUS(status)}))
            return


def test_kill_9_at_random_moments_changes_nothing(tmp_path):
    tiny(replace(RECIPE, epochs=8), tmp_path / "whole")
    hits, run = 0, 0
    while hits < KILLS:  # a quick machine ends a run after a few; then another begins
        folder = tmp_path / f"killed{run}"
        call = f"from tests.train.test_train import killed; killed({str(folder)!r}, {KILLS - hits}, {run})"
        done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["code"] == 0, done.stderr
        assert outcome(folder) == outcome(tmp_path / "whole")
        hits, run = hits + said["kills"], run + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["step", "validation", "save"])
def test_a_signal_saves_and_ends(number, phase, tmp_path, monkeypatch):
    tiny(RECIPE, tmp_path / "whole")

    def signalled(function, after):
        calls = []

        def call(*args, **options):
            calls.append(1)
            if len(calls) == after:
                os.kill(os.getpid(), number)
            return function(*args, **options)

        return call

    where = {
        "step": ("torchcaps.train.step.set_rates", 11),
        "validation": ("torchcaps.train.loop.predict", 2),
        "save": ("torchcaps.train.checkpoint.seal", 3),
    }
    path, after = where[phase]
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        module, name = path.rsplit(".", 1)
        patch.setattr(path, signalled(getattr(sys.modules[module], name), after))
        began = time.monotonic()
        run = tiny(RECIPE, tmp_path / "paused", save_every=0 if phase == "save" else 60)
        assert time.monotonic() - began < 10
    assert run.stopped == signal.Signals(number).name
    assert run.step == {"step": 11, "validation": 16, "save": 3}[phase]
    assert latest(tmp_path / "paused" / "checkpoints").step == run.step
    assert signal.getsignal(number) is before
    tiny(RECIPE, tmp_path / "paused", resume=True)
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    def poisoned(*args, **options):
        loss = losses_before(*args, **options)
        calls.append(1)
        return loss * float("nan") if len(calls) == 11 else loss

    calls, losses_before = [], losses.reconstruction_loss
    monkeypatch.setattr(losses, "reconstruction_loss", poisoned)
    with pytest.raises(
        RunError, match=r"not finite at step 10, in the term reconstruction, with weights that"
    ) as error:
        tiny(RECIPE, tmp_path, save_every=0)
    assert "the checkpoint of step 10 is intact" in str(error.value)
    monkeypatch.setattr(losses, "reconstruction_loss", losses_before)
    assert latest(tmp_path / "checkpoints").step == 10
    assert tiny(RECIPE, tmp_path, resume=True).finished


def test_a_network_that_fails_in_validation_stops_the_run(tmp_path, monkeypatch):
    forward = Tiny.forward

    def poisoned(self, images, labels=None):
        output = forward(self, images)
        return output if self.training else output._replace(scores=output.scores * float("nan"))

    monkeypatch.setattr(Tiny, "forward", poisoned)
    with pytest.raises(RunError, match=r"validation after step 8: 64 of 64 images have scores that are not numbers"):
        tiny(RECIPE, tmp_path, save_every=0)
    assert latest(tmp_path / "checkpoints").step == 8


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    forward = Tiny.forward

    def poisoned(self, images, labels=None):
        return forward(self, Poison.apply(images * self.features[0].bias.sum().mul(0).add(1)), labels)

    monkeypatch.setattr(Tiny, "forward", poisoned)
    with pytest.raises(RunError, match=r"step 0 left the network, with weights that are not finite in features\.0"):
        tiny(replace(RECIPE, clip=None), tmp_path, save_every=0)
    assert latest(tmp_path / "checkpoints") is None


def test_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    tiny(RECIPE, tmp_path, limit=5)
    written = []

    def full(path, content, write=checkpoint.write):
        written.append(path)
        if len(written) > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", full)
        with pytest.raises(
            RunError, match=r"step \d+ could not be saved: No space left on device; the checkpoint"
        ) as e:
            tiny(RECIPE, tmp_path, resume=True, save_every=0)
    found = latest(tmp_path / "checkpoints")
    assert f"of step {found.step} is intact" in str(e.value)
    assert tiny(RECIPE, tmp_path, resume=True).finished


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    tiny(RECIPE, tmp_path / "whole")
    tiny(RECIPE, tmp_path / "run", limit=5)
    tiny(RECIPE, tmp_path / "run", resume=True, limit=9)
    (tmp_path / "run" / "checkpoints" / "step-00000009.state.safetensors").write_bytes(b"oh")
    said = io.StringIO()
    tiny(RECIPE, tmp_path / "run", resume=True, log=Lines(said))
    assert "the checkpoint of step 9 is passed over" in said.getvalue()
    assert "goes on from step 5" in said.getvalue()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_what_is_told_of_a_row_may_change_before_it_is_resumed(tmp_path):
    tiny(RECIPE, tmp_path / "run", limit=3)
    tiny(replace(RECIPE, note="in other words", reported="0.1", seeds=9), tmp_path / "run", resume=True)
    tiny(RECIPE, tmp_path / "whole")
    resumed, whole = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert {name for name in whole if resumed[name] != whole[name]} == {"recipe", "used"}  # whose files name the recipe


def test_recipe_and_row_stay_where_a_run_goes_on(tmp_path):
    def told():
        return [json.loads((tmp_path / name).read_text()) for name in ("recipe.json", "row.json")]

    (tmp_path / "row.json").write_text("of a run that never came to its first checkpoint")
    (tmp_path / "epochs").mkdir()
    for name in ("epochs/epoch-0001.safetensors", "epochs/notes.txt", "looks.json", "recipe.json"):
        (tmp_path / name).write_text("its own")
    tiny(RECIPE, tmp_path, limit=3)
    for name in ("row.json", "epochs/epoch-0001.safetensors", "looks.json"):
        assert not (tmp_path / name).exists()
    assert (tmp_path / "epochs" / "notes.txt").exists()
    tiny(RECIPE, tmp_path, limit=4, resume=True, about={"name": "one"})
    assert told() == [{"seed": 0, "recipe": RECIPE.to_dict()}, {"name": "one"}]
    tiny(replace(RECIPE, note="in other words"), tmp_path, limit=5, resume=True, about={"name": "two"})
    assert told() == [{"seed": 0, "recipe": RECIPE.to_dict()}, {"name": "one"}]


def test_what_is_in_a_folder_without_a_run_stays(tmp_path):
    (tmp_path / "epochs").mkdir()
    for name in ("epochs/epoch-0001.safetensors", "looks.json"):
        (tmp_path / name).write_text("of something else")
    tiny(RECIPE, tmp_path, limit=3)
    for name in ("epochs/epoch-0001.safetensors", "looks.json"):
        assert (tmp_path / name).read_text() == "of something else"


def test_a_folder_of_another_run_is_refused(tmp_path):
    tiny(RECIPE, tmp_path, limit=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="holds a run already; resume it"):
        tiny(RECIPE, tmp_path)
    with pytest.raises(ValueError, match=r"another recipe: lr is 0.001 there and 0.01 here"):
        tiny(replace(RECIPE, lr=0.01), tmp_path, resume=True)
    with pytest.raises(ValueError, match="seed is 0 there and 1 here"):
        tiny(RECIPE, tmp_path, resume=True, seed=1)
    with checkpoint.locked(tmp_path), pytest.raises(ValueError, match="another process is at work in"):
        tiny(RECIPE, tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"loss": "spread", "class_weights": (1.0,) * 10}, {}, "class_weights go with"),
        ({"label_smoothing": 0.1}, {}, "label_smoothing goes with"),
        ({"clip_value": 1.0}, {}, "clip and clip_value are both given"),
        ({"schedule": "steps"}, {}, "needs 'milestones'"),
        ({}, {"device": "cuda:7"}, "1 x cuda:7 is not there"),
        ({}, {"device": "tpu"}, "device 'tpu' is not known"),
        ({"precision": "fp16"}, {}, "fp16 needs a CUDA device"),
        ({}, {"data": replace(few_digits(), validation=None)}, "select='best' needs a validation set"),
        ({"stop_at": 0.9}, {"data": replace(few_digits(), validation=None)}, "stop_at needs a validation set"),
        ({}, {"strategy": "pipeline"}, "strategy must be one of auto, ddp, fsdp, got 'pipeline'"),
        ({}, {"strategy": "fsdp"}, "this run is on cpu, and it needs CUDA devices; strategy='ddp' goes with"),
        ({}, {"capture": True}, "cannot be captured in a CUDA graph: this run is on cpu"),
    ],
)
def test_what_cannot_be_done_is_said(changes, options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        tiny(replace(RECIPE, **changes), tmp_path, **options)


def test_a_run_ends_when_it_is_good_enough(tmp_path):
    recipe = replace(RECIPE, lr=1e-2, ema=0.0, epochs=12, stop_at=0.5)
    run = tiny(recipe, tmp_path / "whole")
    accuracies = [1 - row["validation_error"] for row in run.metrics]
    assert run.reached == len(accuracies) < 12
    assert accuracies[-1] >= 0.5 > max(accuracies[:-1])
    final = json.loads((tmp_path / "whole" / "final.json").read_text())
    assert (final["reached_stop_at"], final["epochs"], final["step"]) == (run.reached, run.reached, 8 * run.reached)
    tiny(recipe, tmp_path / "paused", limit=8 * run.reached)
    assert tiny(recipe, tmp_path / "paused", resume=True).finished
    assert tiny(recipe, tmp_path / "paused", resume=True).reached == run.reached
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")
    assert tiny(replace(RECIPE, epochs=1, stop_at=1.0), tmp_path / "never").reached is None


def test_fsdp_goes_to_fabric_where_it_can(monkeypatch):
    given = {}
    monkeypatch.setattr(prepare, "Fabric", lambda **options: given.update(options))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    plain = replace(RECIPE, ema=0.0)
    prepare.create_fabric(replace(plain, precision="bf16"), "cuda", devices=2, nodes=3, strategy="fsdp")
    assert given == {
        "accelerator": "cuda",
        "devices": 2,
        "num_nodes": 3,
        "strategy": "fsdp",
        "precision": "bf16-mixed",
    }
    for strategy, used in (("auto", "ddp"), ("ddp", "ddp")):
        prepare.create_fabric(plain, "cuda", devices=2, strategy=strategy)
        assert given["strategy"] == used
    prepare.create_fabric(plain, "cuda", strategy="ddp")
    assert given["strategy"] == "auto"
    for recipe, devices, sentence in (
        (plain, 1, "this run has one device only"),
        (RECIPE, 2, "which ema needs"),
        (replace(plain, clip=None, clip_value=1.0), 2, "clips gradients by their norm"),
    ):
        with pytest.raises(ValueError, match=f"fsdp cannot be used: .*{sentence}"):
            prepare.create_fabric(recipe, "cuda", devices=devices, strategy="fsdp")


def test_fsdp_cannot_compare_over_the_batch(monkeypatch):
    class FSDPStrategy: ...

    fabric = type("Two", (), {"world_size": 2, "device": torch.device("cpu"), "strategy": FSDPStrategy()})()
    monkeypatch.setattr(prepare, "create_model", lambda name, **arguments: nn.Sequential(Tiny()))
    with pytest.raises(ValueError, match="fsdp cannot be used: 0 compares over the whole batch"):
        prepare.create_network(RECIPE, few_digits(), fabric)


def test_gathered_state_is_that_of_one_process():
    torch.manual_seed(0)
    network, other = Tiny(), Tiny()
    network.decoder.requires_grad_(False)
    other.decoder.requires_grad_(False)
    names = [name for name, weight in network.named_parameters() if weight.requires_grad]
    optimizers = [create_optimizer(RECIPE, each.parameters()) for each in (network, other)]
    network(torch.rand(4, 1, 8, 8)).scores.sum().backward()
    optimizers[0].step()
    whole, gathered = Whole(network, optimizers[0]), Gathered(network, optimizers[0], names)
    assert fingerprint(gathered.weights()) == fingerprint(whole.weights())
    assert fingerprint(gathered.moments()) == fingerprint(whole.moments())
    Gathered(other, optimizers[1], names).load(whole.weights(), whole.moments())
    assert fingerprint(Whole(other, optimizers[1]).moments()) == fingerprint(whole.moments())
    assert fingerprint(other.state_dict()) == fingerprint(network.state_dict())


def test_bf16_on_a_cpu_needs_nothing_set(tmp_path):
    """On CPUs that advertise AMX it may end the process, unless oneDNN is told before it does anything."""
    call = (
        "import torch, pathlib, torchcaps, tests.train.test_train as t\n"
        f"run = t.tiny(t.replace(t.RECIPE, epochs=1), pathlib.Path({str(tmp_path)!r}), precision='bf16')\n"
        "assert run.finished"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_routing_does_is_logged_and_survives_a_pause(tmp_path):
    recipe = replace(BY_HEART["efficient_capsnet"][1], epochs=2, batch_size=16)
    few = load("digits").train.take(torch.arange(32))
    data = DataSet("few", few, few, few, train_transform=(resize(12),), test_transform=(resize(12),))
    options = {"data": data, "device": "cpu", "log": None}
    train(recipe, out=tmp_path / "whole", **options)
    train(recipe, out=tmp_path / "paused", limit=3, **options)
    train(recipe, out=tmp_path / "paused", resume=True, **options)
    text = (tmp_path / "whole" / "routing.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["epoch"], line["step"], line["images"]) for line in lines] == [(1, 2, 32), (2, 4, 32)]
    assert lines[0]["layers"] != lines[1]["layers"]
    assert (tmp_path / "paused" / "routing.jsonl").read_text() == text
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


def test_a_log_of_routing_that_fails_does_not_end_a_run(tmp_path, monkeypatch):
    def fail(network, images):
        raise RuntimeError("it has no room")

    monkeypatch.setattr(sys.modules["torchcaps.train.loop"], "routing_log", fail)
    said = io.StringIO()
    assert tiny(replace(RECIPE, epochs=1), tmp_path, log=Lines(said), tensorboard=False).finished
    assert "routing.jsonl leaves out epoch 1: it has no room" in said.getvalue()


def test_channels_last_changes_roundings_alone(tmp_path):
    plain = replace(RECIPE, epochs=1, model_args={"dropout": 0.0})
    one, two = (tiny(plain, tmp_path / str(layout), channels_last=layout) for layout in (False, True))
    assert one.metrics[0] == pytest.approx(two.metrics[0], rel=1e-5)
    assert one.model.features[0].weight.is_contiguous()
    assert two.model.features[0].weight.is_contiguous(memory_format=torch.channels_last)


def points(folder):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_each_point_once(tmp_path):
    pytest.importorskip("tensorboard")
    recipe = replace(RECIPE, epochs=26)
    run = tiny(recipe, tmp_path / "whole", tensorboard=True)
    whole = points(tmp_path / "whole")
    assert [step for step, _ in whole["step/loss"]] == [100, 200]
    assert whole["epoch/margin"] == [(row["step"], pytest.approx(row["margin"])) for row in run.metrics]
    assert {"epoch/validation_error", "epoch/lr", "epoch/images_per_second", "step/penalty"} <= whole.keys()
    for limit in (60, 100, 104, 105, None, None):
        tiny(recipe, tmp_path / "paused", tensorboard=True, resume=True, limit=limit)
        time.sleep(1.1)  # TensorBoard puts its files in order by the second in which each was opened
    paused = points(tmp_path / "paused")
    for found in (paused, whole):
        found.pop("epoch/images_per_second")
    assert paused == whole


def test_tensorboard_is_left_out_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    tiny(replace(RECIPE, epochs=1), tmp_path / "without", log=Lines(io.StringIO()))
    assert not (tmp_path / "without" / "tensorboard").exists()
    with pytest.raises(ValueError, match="TensorBoard is not installed"):
        tiny(replace(RECIPE, epochs=1), tmp_path / "needed", tensorboard=True)


def test_energy_is_counted_where_the_kernel_tells(tmp_path, monkeypatch):
    zones = {"intel-rapl:0": 999_000_000, "intel-rapl:1": 5_000_000, "intel-rapl:0:0": 7}

    def tell(**counters):
        for zone, count in zones.items():
            (tmp_path / zone).mkdir(exist_ok=True)
            (tmp_path / zone / "energy_uj").write_text(f"{counters.get(zone[-1], count)}\n")
            (tmp_path / zone / "max_energy_range_uj").write_text("1000000000\n")

    monkeypatch.setattr(power, "POWERCAP", tmp_path)
    cpu = torch.device("cpu")
    assert power.Counter(cpu).since() is None
    tell()
    counter, second = power.Counter(cpu), power.Counter(cpu, local_rank=1)
    zones.update({"intel-rapl:0": 2_000_000, "intel-rapl:1": 7_500_000})  # the first went around
    tell()
    assert counter.since() == pytest.approx(3 + 2.5)
    assert counter.since() == 0
    assert second.since() == 0
    run = tiny(replace(RECIPE, epochs=1), tmp_path / "run")
    assert run.joules == 0
    assert json.loads((tmp_path / "run" / "final.json").read_text())["joules"] == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert counter.since() is None


def test_without_reconstruction_the_decoder_is_left_alone(tmp_path):
    run = tiny(replace(RECIPE, reconstruction=0.0, epochs=1), tmp_path)
    assert "reconstruction" not in run.metrics[0]
    assert not any(weight.requires_grad for weight in run.model.decoder.parameters())


def test_parts_of_a_batch_add_up_to_it(tmp_path):
    plain = replace(RECIPE, model_args={"dropout": 0.0, "weight": 0.0}, epochs=2, batch_size=20, samples=130)
    whole = tiny(plain, tmp_path / "whole")
    parts = tiny(replace(plain, accumulate=3), tmp_path / "parts")
    for ours, theirs in zip(parts.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert [len(part.images) for part in cut(Batch(torch.zeros(2, 1), torch.zeros(2)), 3)] == [1, 1]


def test_the_terms_of_the_loss():
    scores, labels = torch.rand(4, 10), torch.tensor([[1, 2], [3, 3], [4, -1], [0, 9]])
    pictures, targets = torch.rand(4, 2, 1, 8, 8), torch.rand(4, 2, 1, 8, 8)
    output = Output(scores, None, pictures, torch.tensor(3.0), scores)
    batch = Batch(torch.rand(4, 1, 8, 8), labels, targets)
    terms = loss_terms(replace(RECIPE, loss="spread", reconstruction=0.5), output, batch, margin=0.7)
    assert list(terms) == ["spread", "reconstruction", "penalty"]
    assert terms["spread"] == losses.spread_loss(scores, labels, 0.7)
    expected = 0.5 * losses.reconstruction_loss(pictures, targets, reduction="sum", labels=labels)
    assert terms["reconstruction"] == expected
    for loss in ("margin", "cross_entropy", "binary_cross_entropy"):
        assert next(iter(loss_terms(replace(RECIPE, loss=loss, reconstruction=0.0), output, batch))) == loss
    with pytest.raises(ValueError, match="reconstructs nothing"):
        loss_terms(RECIPE, output._replace(reconstruction=None), batch)


def test_a_huge_validation_set_is_sampled():
    class Huge:
        image, classes = (1, 8, 8), 10

        def __len__(self):
            return 3_000_000

    shared = {"rank": 0, "world": 1}
    huge = prepare.validation_batches(RECIPE, replace(few_digits(), validation=Huge()), shared).order
    (_, first), *others = huge.shares(0)
    assert 1 + len(others) == len(huge) == 79
    assert first.max() > 1_000_000
    small = prepare.validation_batches(RECIPE, few_digits(), shared).order
    assert [indices.tolist() for _, indices in small.shares(0)] == [list(range(64))]


def test_seeds_are_all_different():
    seeds = {seed_of(seed, step, rank) & 0xFFFFFFFF for seed in range(5) for step in range(200) for rank in range(3)}
    assert len(seeds) == 3000


def in_two_ranks(folder):
    """Pauses, goes on and ends; then rank 1 of another run is killed."""
    torch.set_num_threads(1)
    recipe = replace(RECIPE, model_args={"dropout": 0.0}, epochs=2)
    tiny(recipe, folder / "two", limit=11)
    tiny(recipe, folder / "two", resume=True)
    if os.environ["RANK"] == "1":
        sys.modules["torchcaps.train.step"].set_rates = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    tiny(recipe, folder / "dead")


def test_two_processes_give_the_curve_of_one_and_end_together(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    call = f"import pathlib, tests.train.test_train as t; t.in_two_ranks(pathlib.Path({str(tmp_path)!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, sys.executable, "-c", call]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=60)
    assert "rank      : 1" in done.stderr.partition("Root Cause")[2], done.stderr
    one = tiny(replace(RECIPE, model_args={"dropout": 0.0}, epochs=2), tmp_path / "one")
    two = latest(tmp_path / "two" / "checkpoints").state["progress"]["rows"]
    for ours, theirs in zip(two, one.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
