import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from torchcaps import create_model
from torchcaps.data import Batches, DataSet, load
from torchcaps.data.augment import flip, shift
from torchcaps.data.generated import MultiMNIST
from torchcaps.functional import squash_exp
from torchcaps.layers import CapsuleStack, Decoder, LinearCaps, PrimaryCaps
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.ops.votes import vote_budget
from torchcaps.recipes import Recipe
from torchcaps.routing import DynamicRouting, EMRouting, SelfAttentionRouting
from torchcaps.train import checkpoint, prepare, train
from torchcaps.train.checkpoint import fingerprint, latest, load_weights
from torchcaps.train.prepare import RunError, seed_of
from torchcaps.train.replicas import ReplicaBatches, ReplicaStep, clip_norms
from torchcaps.train.seeds import part
from torchcaps.train.stacked import Stack
from torchcaps.train.together import train_together
from torchcaps.types import Output

ROOT = Path(__file__).parents[2]


class Small(nn.Module):
    """Convolution, batch norm, dropout, a decoder and a penalty over the batch, in float64."""

    def __init__(self, image=(1, 8, 8), classes=10, dropout=0.3, draws=False, asks=False):
        super().__init__()
        self.draws, self.asks = draws, asks
        self.features = nn.Sequential(nn.Conv2d(image[0], 6, 3, stride=2), nn.ReLU(), nn.BatchNorm2d(6))
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(54, classes))
        self.decoder = nn.Sequential(nn.Linear(classes, 64), nn.Sigmoid(), nn.Unflatten(1, (1, *image)))
        self.double()

    def forward(self, images, labels=None):
        features = self.features(images.double())
        if self.draws and self.training:
            features = features + 0.1 * torch.randn(features.shape, dtype=torch.float64)
        if self.asks and features.sum().item() > 0:
            features = 2 * features
        scores = self.last(features).sigmoid()
        penalty = 0.1 * scores.var(dim=0).sum() if self.training else None
        return Output(scores, None, self.decoder(scores), penalty, scores)


class Capsules(nn.Module):
    """Efficient-CapsNet, a hundredth as large: convolutions with batch norm, depthwise primary, routing, decoder."""

    def __init__(self, image, classes, dtype):
        super().__init__()
        stem = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), *(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.BatchNorm2d(8))
        )
        primary = PrimaryCaps(8, 2, 4, 3, nonlinearity=squash_exp, depthwise=True)
        body = CapsuleStack(LinearCaps(8, 4, 10, 4, SelfAttentionRouting))
        decoder = Decoder(40, (8,), image=image)
        self.network = CapsNet(stem, primary, body, LengthHead(), decoder, image=image, classes=classes).to(dtype)
        self.dtype = dtype

    def forward(self, images, labels=None):
        return self.network(images.to(self.dtype), labels)


RECIPE = Recipe(
    "small", "digits", reconstruction=0.01, epochs=3, batch_size=16, samples=120, ema=0.9, select="best", clip=1.0
)
CAPSULES = Recipe(
    "capsules",
    "digits",
    reconstruction=0.392,
    reconstruction_reduction="mean",
    optimizer_args={"eps": 1e-7},
    schedule="cosine",
    epochs=3,
    batch_size=16,
    samples=360,
    ema=0.9,
    clip=0.5,
)


def few_digits(count=200):
    digits = load("digits")
    own = digits.train.take(torch.arange(count)), digits.test, digits.train.take(torch.arange(count, count + 64))
    return DataSet("few", *own, train_transform=(shift(1),))


OPTIONS = {"data": few_digits(), "device": "cpu", "log": None}


def small(recipe, seeds, out, **options):
    prepare.create_model = lambda name, **arguments: Small(**arguments)
    return train_together(recipe, seeds, out=out, **{**OPTIONS, **options})


def alone(recipe, seed, out, **options):
    prepare.create_model = lambda name, **arguments: Small(**arguments)
    return train(recipe, seed=seed, out=out, **{**OPTIONS, **options})


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flat(value, path=""):
    """Every leaf of nested dicts and lists by its path."""
    if not isinstance(value, dict | list):
        return {path: value}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: leaf for key, each in entries for name, leaf in flat(each, f"{path}/{key}").items()}


def content(weights, state):
    """All of a checkpoint but the clock; and but histograms, which jump with the last bit."""
    progress = {name: value for name, value in state["progress"].items() if name != "routing"}
    return flat({"weights": weights, **state, "progress": progress, "clock": None})


def assert_as_alone(folder, own, k, rtol, atol):
    """Weights, moments, averages, sums of losses, rows, best weights."""
    found = latest(own / "checkpoints")
    expected = content(found.weights, found.state)
    together = content(*part(latest(folder / "together" / "checkpoints"), k))
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                together[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name} {m}"
            )
        else:
            close = pytest.approx(value, rel=rtol, abs=atol) if isinstance(value, float) else value
            assert together[name] == close, name


@pytest.mark.parametrize(
    ("dtype", "count", "rtol", "atol"), [(torch.float64, 16, 1e-8, 1e-11), (torch.float32, 4, 1e-3, 1e-4)]
)
def test_seed_3_of_16_is_seed_3_alone_after_50_steps(dtype, count, rtol, atol, tmp_path):
    prepare.create_model = lambda name, **options: Capsules(**options, dtype=dtype)
    train_together(CAPSULES, range(count), out=tmp_path / "all", limit=20, **OPTIONS)
    runs = train_together(CAPSULES, range(count), out=tmp_path / "all", limit=50, resume=True, **OPTIONS)
    assert [(run.seed, run.step, run.stopped) for run in runs] == [(seed, 50, "limit") for seed in range(count)]
    train(CAPSULES, seed=3, out=tmp_path / "alone", limit=50, **OPTIONS)
    assert_as_alone(tmp_path / "all", tmp_path / "alone", 3, rtol, atol)


VARIANTS = {
    "adam": {},
    "keras": {"optimizer": "rmsprop_keras", "optimizer_args": {"decay": 1e-2}, "loss": "spread", "ema": 0.0},
    "parts": {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "accumulate": 3, "select": "last"},
    "adamw": {"optimizer": "adamw", "clip": None, "clip_value": 0.01, "loss": "cross_entropy", "label_smoothing": 0.1},
    "weighted": {"class_weights": tuple(range(1, 11)), "reconstruction": 0.0, "clip": None},
    "noise": {"model_args": {"draws": True}, "clip": 0.01},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_seed_has_the_result_it_would_have_alone(name, tmp_path):
    recipe = replace(RECIPE, keep_epochs=(1, 3), **VARIANTS[name])
    runs = small(recipe, [5, 0], tmp_path / "all")
    for k, run in enumerate(runs):
        own = alone(recipe, run.seed, tmp_path / f"alone-{run.seed}")
        assert (run.folder, run.finished) == (tmp_path / "all" / f"seed-{run.seed}", True)
        assert (run.selected, run.step, len(run.metrics)) == (own.selected, own.step, 3)
        for mine, theirs in zip(run.metrics, own.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-8)
        assert_as_alone(tmp_path / "all", own.folder, k, 1e-7, 1e-10)
        for file in ("weights.safetensors", "epochs/epoch-0001.safetensors", "epochs/epoch-0003.safetensors"):
            (mine, about), (theirs, expected) = (load_weights(each.folder / file) for each in (run, own))
            assert about == expected
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)
        names = {path.relative_to(own.folder) for path in own.folder.rglob("*") if "checkpoint" not in str(path)}
        if run.selected != 3:  # its own folder has no checkpoint from which the last epoch could be tested
            names.add(Path("last.safetensors"))
            mine, found = load_weights(run.folder / "last.safetensors")[0], latest(own.folder / "checkpoints")
            theirs = found.state["ema"]["average"] if found.state["ema"] else found.weights
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)
        assert names == {path.relative_to(run.folder) for path in run.folder.rglob("*")}
        mine, theirs = (json.loads((each.folder / "final.json").read_text()) for each in (run, own))
        assert mine.keys() == {*theirs, "together"}
        assert mine["together"] == [5, 0]
        assert (run.folder / "recipe.json").read_text() == (own.folder / "recipe.json").read_text()


def test_half_precision_is_as_alone(tmp_path):
    prepare.create_model = lambda name, **options: Capsules(**options, dtype=torch.float32)
    recipe = replace(CAPSULES, precision="bf16", epochs=1)
    (run,) = train_together(recipe, [2], out=tmp_path / "all", **OPTIONS)
    own = train(recipe, seed=2, out=tmp_path / "alone", **OPTIONS)
    assert run.metrics[0] == pytest.approx(own.metrics[0], rel=2e-2, abs=0.05)


def outcome(folder):
    found = latest(folder / "together" / "checkpoints")
    state = {name: value for name, value in found.state.items() if name != "clock"}
    state["each"] = [each["progress"] for each in state["each"]]
    seeds = [folder / f"seed-{seed}" for seed in state["seeds"]]
    return {
        "step": found.step,
        "weights": fingerprint(found.weights),
        **{name: fingerprint(value) for name, value in state.items()},
        "metrics": [(seed / "metrics.csv").read_text() for seed in seeds],
        "used": [fingerprint(load_weights(seed / "weights.safetensors")) for seed in seeds],
    }


@pytest.mark.parametrize("at", [8, 9])
def test_pausing_changes_nothing(at, tmp_path):
    small(RECIPE, [1, 2], tmp_path / "whole")
    paused = small(RECIPE, [1, 2], tmp_path / "paused", limit=at)
    assert [(run.finished, run.stopped, run.step) for run in paused] == [(False, "limit", at)] * 2
    assert all(run.finished for run in small(RECIPE, [2], tmp_path / "paused", resume=True))  # those asked for
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


SHORT = replace(RECIPE, epochs=2)


def killed(folder, kills, seed):
    """As in test_train: children killed at random moments, most of them inside a save."""
    torch.set_num_threads(1)
    chance, hits = random.Random(seed), 0
    while True:
        child = os.fork()
        if child == 0:
            done = False
            try:
                done = all(run.finished for run in small(SHORT, [1, 2], Path(folder), resume=True, save_every=0))
            finally:
                os._exit(0 if done else 1)
        if hits < kills:
            time.sleep(chance.uniform(0.05, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        hits += os.WIFSIGNALED(status)
        if os.WIFEXITED(status):
            print(json.dumps({"kills": hits, "code": os.WEXITSTATUS(status)}))
            return


def test_kill_9_changes_nothing(tmp_path):
    small(SHORT, [1, 2], tmp_path / "whole")
    call = f"from tests.train.test_together import killed; killed({str(tmp_path / 'killed')!r}, 3, 0)"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["code"] == 0, done.stderr
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(("phase", "after", "step"), [("step", 11, 11), ("validation", 2, 16)])
def test_a_signal_saves_and_ends(phase, after, step, tmp_path, monkeypatch):
    small(RECIPE, [1, 2], tmp_path / "whole")
    calls = []

    def signalled(function, *args, **options):
        calls.append(1)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **options)

    path = (
        "torchcaps.train.step.set_rates" if phase == "step" else "torchcaps.train.together.Together.validation_errors"
    )
    owner, name = path.rsplit(".", 1)
    place = sys.modules[owner] if phase == "step" else sys.modules["torchcaps.train.together"].Together
    before = getattr(place, name)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, lambda *args, **options: signalled(before, *args, **options))
        runs = small(RECIPE, [1, 2], tmp_path / "paused")
    assert [(run.stopped, run.step) for run in runs] == [("SIGTERM", step)] * 2
    small(RECIPE, [1, 2], tmp_path / "paused", resume=True)
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


def poison(monkeypatch, step, replica):
    """One replica's first weights become NaN just before a step."""
    call = ReplicaStep.__call__

    def poisoned(self, batch, number):
        if number == step:
            self.network.features[0].weight.data[replica] = float("nan")
        return call(self, batch, number)

    monkeypatch.setattr(ReplicaStep, "__call__", poisoned)


def test_a_seed_that_fails_is_put_aside(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        poison(patch, 10, 1)
        good, bad, other = small(RECIPE, [4, 7, 9], tmp_path / "all", save_every=0)
    assert "seed 7: the loss is not finite at step 10, in the term margin, with weights that are not finite in" in (
        bad.stopped
    )
    assert bad.stopped.endswith("; the checkpoint of step 10 is intact")
    assert (bad.finished, good.finished, other.finished) == (False, True, True)
    assert not (bad.folder / "final.json").exists()
    own = alone(RECIPE, 9, tmp_path / "alone")
    assert_as_alone(tmp_path / "all", own.folder, 2, 1e-7, 1e-10)
    went_on = alone(RECIPE, 7, bad.folder, resume=True)  # without whatever spoilt it
    own = alone(RECIPE, 7, tmp_path / "alone-7")
    assert went_on.finished
    for mine, theirs in zip(went_on.metrics, own.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)
    finished = latest(bad.folder / "checkpoints").step
    small(RECIPE, [4, 7, 9], tmp_path / "all", resume=True)
    assert latest(bad.folder / "checkpoints").step == finished


def test_when_every_seed_fails_that_is_an_error(tmp_path, monkeypatch):
    poison(monkeypatch, 3, slice(None))
    with pytest.raises(RunError, match=r"seed 1: the loss is not finite at step 3.*there was no checkpoint yet"):
        small(RECIPE, [1, 2], tmp_path)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    call = ReplicaStep.__call__

    def poisoned(self, batch, number):
        values = call(self, batch, number)
        if number == 4:
            self.network.features[0].weight.data[0] = float("inf")
        return values

    monkeypatch.setattr(ReplicaStep, "__call__", poisoned)
    bad, good = small(RECIPE, [1, 2], tmp_path, save_every=0)
    assert "seed 1: step 4 left the network, with weights that are not finite in features.0.weight" in bad.stopped
    assert "of step 4 is intact" in bad.stopped
    assert good.finished


@pytest.mark.parametrize("select", ["best", "last"])
def test_a_seed_ends_when_it_is_good_enough(select, tmp_path):
    base = replace(RECIPE, epochs=6, lr=1e-2, select=select, ema=0.0)
    seen = [alone(base, seed, tmp_path / f"base-{seed}").metrics for seed in (0, 1)]
    best = [[1 - row["validation_error"] for row in rows] for rows in seen]
    level = next(a for a in best[0][1:4] if all(a > b for b in best[0][:1]))
    recipe = replace(base, stop_at=level)
    runs = small(recipe, [0, 1], tmp_path / "all", limit=30)
    runs = small(recipe, [0, 1], tmp_path / "all", resume=True)
    for run in runs:
        own = alone(recipe, run.seed, tmp_path / f"alone-{run.seed}")
        assert (run.reached, run.selected, run.step) == (own.reached, own.selected, own.step)
        assert len(run.metrics) == len(own.metrics)
        mine, theirs = (load_weights(each.folder / "weights.safetensors")[0] for each in (run, own))
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    assert runs[0].reached is not None


@pytest.mark.parametrize(
    ("changes", "seeds", "options", "sentence"),
    [
        ({}, [], {}, "at least one of them"),
        ({}, [1, 1], {}, "seeds must be different"),
        ({}, [1], {"devices": 2}, "one device and one process"),
        ({"precision": "fp16"}, [1], {}, "use bf16, or train these seeds one after the other, without --together"),
        ({"model_args": {"asks": True}}, [1], {}, r"small cannot be stacked \(.*\); train these seeds one after"),
        ({"label_smoothing": 0.1}, [1], {}, "label_smoothing goes with"),
        ({"schedule": "steps"}, [1], {}, "needs 'milestones'"),
        ({}, [1], {"data": replace(few_digits(), validation=None)}, "select='best' needs a validation set"),
    ],
)
def test_what_cannot_be_done_is_said(changes, seeds, options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        small(replace(RECIPE, **changes), seeds, tmp_path, **options)


def test_a_folder_of_other_runs_is_refused(tmp_path):
    small(RECIPE, [1, 2], tmp_path, limit=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="holds runs already; resume them"):
        small(RECIPE, [1, 2], tmp_path)
    with pytest.raises(ValueError, match=r"holds the seeds \[1, 2\], which are trained together; \[3\] are not"):
        small(RECIPE, [3], tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"another recipe: lr is 0.001 there and 0.01 here"):
        small(replace(RECIPE, lr=0.01), [1, 2], tmp_path, resume=True)
    with checkpoint.locked(tmp_path / "seed-2"), pytest.raises(ValueError, match="another process is at work in"):
        small(RECIPE, [1, 2], tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    alone(RECIPE, 5, tmp_path / "other" / "seed-5", limit=3)
    with pytest.raises(ValueError, match=r"seed-5 holds a run of its own; resume it without --together"):
        small(RECIPE, [4, 5], tmp_path / "other", resume=True)
    alone(replace(RECIPE, lr=0.01), 1, tmp_path / "seed-1", limit=3)
    with pytest.raises(ValueError, match=r"seed-1 holds a run of another recipe: lr is 0.01 there and 0.001 here"):
        small(RECIPE, [1, 2], tmp_path, resume=True)


ONCE = replace(RECIPE, epochs=1)


def test_finished_seeds_are_not_written_over(tmp_path):
    small(ONCE, [0, 1], tmp_path)
    small(ONCE, [2, 3], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other, own = replace(ONCE, lr=0.01), tmp_path / "seed-0"
    for recipe, resume in ((other, False), (ONCE, True)):
        with pytest.raises(ValueError, match=r"seed-0 holds a finished run; leave out seed 0 or choose another folder"):
            small(recipe, [0, 4], tmp_path, resume=resume)
    with pytest.raises(ValueError, match=r"seed-0 holds a run already; choose another folder"):
        alone(other, 0, own)
    with pytest.raises(ValueError, match=r"another recipe: lr is 0.001 there and 0.01 here"):
        alone(other, 0, own, resume=True)
    with pytest.raises(ValueError, match=r"seed-0 holds a finished run, and there is no checkpoint to go on from"):
        alone(ONCE, 0, own, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_seeds_that_follow_others_begin_with_no_checkpoint(tmp_path):
    small(ONCE, [0, 1], tmp_path)
    small(RECIPE, [2, 3], tmp_path, limit=20)
    assert checkpoint.steps(tmp_path / "together" / "checkpoints") == [20]


def test_seeds_take_over_nothing_of_others_whose_checkpoints_cannot_be_deleted(tmp_path, monkeypatch):
    small(ONCE, [0, 1], tmp_path)
    common = tmp_path / "together" / "checkpoints"
    shutil.copytree(common, tmp_path / "left")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        poison(patch, 2, 0)
        bad, good = small(RECIPE, [2, 3], tmp_path, resume=True, limit=4)
    assert (good.stopped, good.step) == ("limit", 4)
    assert bad.stopped.endswith("; there was no checkpoint yet")
    shutil.rmtree(common)
    shutil.move(tmp_path / "left", common)
    with pytest.raises(ValueError, match=r"checkpoints is of the seeds \[0, 1\], not of \[2, 3\]; delete it to begin"):
        small(RECIPE, [2, 3], tmp_path, resume=True)


def test_recipe_and_row_stay_where_seeds_go_on(tmp_path):
    small(RECIPE, [1, 2], tmp_path, limit=3, about={"name": "one"})
    (tmp_path / "seed-2" / "row.json").unlink()
    before = [path.read_text() for path in sorted(tmp_path.glob("*/recipe.json"))]
    small(replace(RECIPE, note="in other words"), [1, 2], tmp_path, limit=4, resume=True, about={"name": "two"})
    assert [path.read_text() for path in sorted(tmp_path.glob("*/recipe.json"))] == before
    rows = [json.loads((tmp_path / f"seed-{seed}" / "row.json").read_text()) for seed in (1, 2)]
    assert rows == [{"name": "one"}, {"name": "two"}]


@pytest.mark.parametrize("group", [1, 3, 64])
@pytest.mark.parametrize("kind", ["stored", "generated"])
def test_batches_are_those_of_each_seed(kind, group):
    data, samples = few_digits(70), 50
    if kind == "generated":
        data = replace(data, train=MultiMNIST(data.train, 400, shift=1, pad=1), train_transform=())
    else:
        data = replace(data, train_transform=(shift(1), flip()))
    recipe = replace(RECIPE, samples=samples, batch_size=8)
    seeds = [0, 7, 2**40]
    both = ReplicaBatches(recipe, data, seeds, torch.device("cpu"))
    both.together = group
    assert len(both) == 7
    for epoch, start in ((0, 0), (3, 4)):
        apart = [
            Batches(data.train, 8, transform=data.train_transform, seed=seed, samples=samples).epoch(epoch, start)
            for seed in seeds
        ]
        batches = list(both.epoch(epoch, start))
        assert len(batches) == 7 - start
        for batch, *own in zip(batches, *apart, strict=True):
            for k, expected in enumerate(own):
                assert torch.equal(batch.images[:, k], expected.images)
                assert torch.equal(batch.labels[:, k], expected.labels)
                assert (batch.targets is None) == (expected.targets is None) == (kind == "stored")
                if expected.targets is not None:
                    assert torch.equal(batch.targets[:, k], expected.targets)


def test_gradients_are_clipped_for_each_replica():
    shapes = [(3,), (3, 5), (3, 2, 4)]
    stacked = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for parameter in stacked:
        parameter.grad = torch.randn_like(parameter) * torch.tensor([0.01, 1, 100]).view(
            3, *[1] * (parameter.dim() - 1)
        )
    single = [[nn.Parameter(p[k].detach().clone()) for p in stacked] for k in range(3)]
    for k, own in enumerate(single):
        for parameter, source in zip(own, stacked, strict=True):
            parameter.grad = source.grad[k].clone()
        nn.utils.clip_grad_norm_(own, 1.0)
    clip_norms(stacked, 1.0)
    for k, own in enumerate(single):
        for parameter, source in zip(own, stacked, strict=True):
            torch.testing.assert_close(source.grad[k], parameter.grad, rtol=1e-12, atol=0)


class Routed(nn.Module):
    def __init__(self, routing):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, groups=1)
        self.caps = LinearCaps(18, 4, 3, 4, routing, pose="matrix" if "EM" in str(routing) else "vector")
        self.drop = nn.Dropout(0.5)

    def forward(self, images):
        maps = self.conv(images).movedim(1, -1)
        poses = self.drop(maps.movedim(-1, 1)).flatten(2).reshape(len(images), 18, 4)
        return self.caps(poses, torch.ones(len(images), 18, dtype=images.dtype)).poses


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [2**28, 64])
@pytest.mark.parametrize("routing", [partial(DynamicRouting, iterations=2), EMRouting], ids=["dynamic", "em"])
def test_a_stack_is_its_networks(routing, budget, shared):
    networks = [Routed(routing).double().to(memory_format=torch.channels_last) for _ in range(3)]
    stack = Stack(networks)
    images = torch.randn(*(() if shared else (3,)), 5, 1, 8, 8, dtype=torch.float64)
    stack.seed([seed_of(k, 0, 0) for k in range(3)])
    with vote_budget(budget):
        poses = stack(lambda network, x: network(x), images, axis=None if shared else 0)
        poses.square().sum().backward()
    assert stack.drew
    for k, network in enumerate(networks):
        torch.manual_seed(seed_of(k, 0, 0))
        own = network(images if shared else images[k])
        own.square().sum().backward()
        torch.testing.assert_close(poses[k], own, rtol=1e-10, atol=1e-12)
        for name, parameter in network.named_parameters():
            gradient = stack.all.get_parameter(name).grad[k]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-11)


ON_TRITON = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="needs a GPU, or TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("conv", ["grouped", pytest.param("triton", marks=ON_TRITON)])
def test_a_depthwise_window_as_large_as_the_map(conv, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    networks = [
        create_model("efficient_capsnet", image=(1, 10, 10), first_kernel=3, strides=(1, 1, 1, 2)) for _ in "ab"
    ]
    device = "cuda" if conv == "triton" and torch.cuda.is_available() else "cpu"
    stack = Stack([network.to(device) for network in networks], conv)
    images = torch.rand(3, 2, 1, 10, 10, device=device)
    scores = stack(lambda network, x: network(x).scores, images)
    for k, network in enumerate(networks):
        torch.testing.assert_close(scores[k], network(images[:, k]).scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("efficient_capsnet", {"norm": "instance", "decoder_layers": "conv"}),
        ("capsnet_cifar10", {"channels": 8, "types": 2, "dim": 4, "out_dim": 4}),
        ("li_cnn6_cifar10", {"width": 2}),
    ],
)
def test_presets_can_be_stacked(name, options):
    networks = [create_model(name, image=(1, 16, 16), classes=4, **options).double() for _ in range(2)]
    stack = Stack(networks)
    images, labels = torch.rand(3, 2, 1, 16, 16, dtype=torch.float64), torch.randint(0, 4, (3, 2))
    scores = stack(lambda network, x, y: network(x, y).scores, images, labels)
    scores.square().sum().backward()
    for k, network in enumerate(networks):
        own = network(images[:, k], labels[:, k]).scores
        own.square().sum().backward()
        torch.testing.assert_close(scores[k], own, rtol=1e-9, atol=1e-12)
        for key, buffer in network.named_buffers():
            torch.testing.assert_close(stack.all.get_buffer(key)[k], buffer)
        for key, parameter in network.named_parameters():
            gradient = stack.all.get_parameter(key).grad
            assert (gradient is None) == (parameter.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient[k], parameter.grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (3, 4)])
def test_linear_layers_of_all_replicas(lead, bias):
    networks = [nn.Linear(5, 6, bias=bias).double() for _ in range(2)]
    stack, x = Stack(networks), torch.randn(2, *lead, 5, dtype=torch.float64, requires_grad=True)
    found = stack(lambda network, x: network(x), x, axis=0)
    expected = torch.stack([network(own) for network, own in zip(networks, x, strict=True)])
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    (inputs,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(x.grad, inputs)
    expected.square().sum().backward()
    for name, parameter in stack.all.named_parameters():
        own = torch.stack([network.get_parameter(name).grad for network in networks])
        torch.testing.assert_close(parameter.grad, own)
        assert parameter.grad.stride() == parameter.stride()
