"""Half-precision copies of the weights: not a bit may differ from what autocast does."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Adam

from tests.train import test_together
from tests.train.test_train import RECIPE, few_digits, outcome, tiny
from torchcaps import create_model
from torchcaps.data import Batches
from torchcaps.data.augment import resize
from torchcaps.functional import squash
from torchcaps.layers import LinearCaps, PrimaryCaps
from torchcaps.recipes import Recipe
from torchcaps.routing import SelfAttentionRouting
from torchcaps.train import halves
from torchcaps.train.checkpoint import latest
from torchcaps.train.fabric import Fabric
from torchcaps.train.optim import create_optimizer
from torchcaps.train.replicas import ReplicaBatches, ReplicaStep
from torchcaps.train.stacked import Stack
from torchcaps.train.step import Step
from torchcaps.train.together import train_together

EFFICIENT = Recipe(
    "efficient_capsnet_mnist", "digits", reconstruction=0.392, reconstruction_reduction="mean", batch_size=8,
    precision="bf16",
)  # fmt: skip
CAST = ["stem.0", "stem.3", "stem.6", "stem.9", "primary.conv", "decoder.layers.0", "decoder.layers.2"]


class Loop(Adam):
    """Stands for the kernel that takes the copies' gradients and writes the copies."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.halves = {}

    def step(self):
        for weight, copy in self.halves.items():
            if copy.grad is not None:
                assert weight.grad is None
                weight.grad = copy.grad.float()
        super().step()
        for weight, copy in self.halves.items():
            weight.grad = None
            copy.data.copy_(weight)


def images():
    data = few_digits(40)
    return replace(data, train_transform=(resize(12),), test_transform=(resize(12),))


def network(seed=0):
    torch.manual_seed(seed)
    made = create_model("efficient_capsnet_mnist", image=(1, 12, 12))
    return made.to(memory_format=torch.channels_last)


def a_step(recipe, make=None):
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    own = network()
    optimizer = create_optimizer(recipe, own) if make is None else make(own.parameters(), recipe.lr)
    model, optimizer = fabric.setup(own, optimizer)
    return Step(recipe, 3, fabric, own, model, optimizer, 5)


def several(recipe):
    data = images()
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    stack = Stack([network(1), network(2)])
    step = ReplicaStep(recipe, [1, 2], fabric, stack, create_optimizer(recipe, stack.all), 5)
    return step, ReplicaBatches(recipe, data, [1, 2], torch.device("cpu"))


@pytest.fixture
def anywhere(monkeypatch):
    """Copies on a CPU too, on which autocast casts just the same."""
    return lambda: monkeypatch.setattr(halves, "DEVICES", ("cpu", "cuda"))


def followed(step, batches, between=lambda number, step: None):
    """The loss terms of five updates, and the network after each."""
    found = []
    for number, batch in enumerate(batches):
        terms = {name: value.clone() for name, value in step(batch, number).items()}
        found.append((terms, {name: value.clone() for name, value in step.network.state_dict().items()}))
        between(number, step)
    return found


def equal(one, two):
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.1, "optimizer": "adamw"},
        {"clip_value": 1e-3, "optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
        {"optimizer": "rmsprop_keras"},
        {"optimizer": "adam_keras", "ema": 0.9},
    ],
)
@pytest.mark.parametrize("make", [None, Loop])
def test_not_a_bit_differs_from_autocast(changes, make, anywhere):
    if make is not None and "optimizer" in changes:
        make = partial(make, weight_decay=0.1)
    recipe = replace(EFFICIENT, **changes)
    batches = list(Batches(images().train, 8, transform=images().train_transform, seed=0).epoch(0))
    plain = a_step(recipe, make)
    expected = followed(plain, batches)
    assert not plain.halves.copies
    anywhere()
    step = a_step(recipe, make)
    equal(followed(step, batches), expected)
    own = {id(p): name for name, p in step.network.named_parameters()}
    names = [f"{place}.{word}" for place in (*CAST, "decoder.layers.4") for word in ("weight", "bias")]
    assert sorted(own[id(w)] for w in step.halves.weights) == sorted(names)
    for weight, copy in zip(step.halves.weights, step.halves.copies, strict=True):
        assert weight.dtype == torch.float32
        assert copy.stride() == weight.stride()
        assert torch.equal(copy, weight.bfloat16())
        assert copy.grad.dtype == torch.bfloat16
        assert (weight.grad is None) == (make is not None and "clip" not in changes and "clip_value" not in changes)
    if plain.ema is not None:
        equal(step.ema.average, plain.ema.average)


def test_weights_that_somebody_changes_are_copied_again(anywhere):
    """A checkpoint is loaded after the second update, averages stand in for the weights after the third."""
    other = network(7).state_dict()

    def between(number, step):
        if number == 1:
            step.network.load_state_dict(other)
        elif number == 2:
            with step.ema.in_place_of(step.network):
                pass
        elif number == 3:
            with torch.no_grad():
                step.network.get_parameter("decoder.layers.0.weight").mul_(0.5)

    recipe = replace(EFFICIENT, ema=0.9)
    batches = list(Batches(images().train, 8, transform=images().train_transform, seed=0).epoch(0))
    expected = followed(a_step(recipe, Loop), batches, between)
    anywhere()
    step = a_step(recipe, Loop)
    equal(followed(step, batches, between), expected)
    assert step.halves.copies


def test_seeds_together_have_copies_too(anywhere):
    step, batches = several(EFFICIENT)
    expected = followed(step, batches.epoch(0))
    assert not step.halves.copies
    anywhere()
    step, batches = several(EFFICIENT)
    equal(followed(step, batches.epoch(0)), expected)
    own = {id(p): name for name, p in step.network.named_parameters()}
    names = {own[id(w)] for w in step.halves.weights}
    assert {f"{place}.{word}" for place in CAST for word in ("weight", "bias")} <= names


class Odd(nn.Module):
    """Each way to use a weight that a copy could not stand in for, and one that it can."""

    def __init__(self):
        super().__init__()
        self.cast = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.penalised = nn.Linear(8, 8, bias=False)
        self.scaled = PrimaryCaps(1, 2, 4, 2, nonlinearity=squash, scale=0.3)
        self.caps = LinearCaps(2, 4, 2, 4, SelfAttentionRouting)
        self.norm = nn.LayerNorm(8)
        self.widened = nn.Parameter(torch.randn(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.frozen(self.cast(x))) + self.widened.double().float()
        x = x + x @ self.twice.weight + x @ self.twice.weight.bfloat16()
        x = self.penalised(x) + self.penalised.weight.square().sum()
        poses = self.scaled(x[:, None, None, :4].expand(-1, 1, 2, -1)[..., :2]).poses
        return self.caps(poses).poses.float().sum()


def test_only_what_is_cast_and_nothing_else_has_a_copy():
    own = Odd()
    with torch.autocast("cpu", torch.bfloat16):
        loss = own(torch.randn(3, 8))
    names = {id(p): name for name, p in own.named_parameters()}
    assert sorted(names[id(w)] for w in halves.only_cast(loss)) == ["cast.bias", "cast.weight", "scaled.conv.bias"]


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"precision": "32"}])
def test_where_copies_would_differ_there_are_none(changes, anywhere):
    anywhere()
    step = a_step(replace(EFFICIENT, **changes))
    followed(step, Batches(images().train, 8, transform=images().train_transform, seed=0).epoch(0))
    assert not step.halves.copies


def test_runs_and_checkpoints_are_as_without(anywhere, tmp_path):
    """Validation by averaged weights, the best epoch, and a pause in the middle."""
    recipe = replace(RECIPE, precision="bf16", epochs=2)
    tiny(recipe, tmp_path / "autocast")
    anywhere()
    tiny(recipe, tmp_path / "copies")
    tiny(recipe, tmp_path / "paused", limit=5)
    assert all(w.dtype != torch.bfloat16 for w in latest(tmp_path / "paused" / "checkpoints").weights.values())
    tiny(recipe, tmp_path / "paused", resume=True)
    assert outcome(tmp_path / "copies") == outcome(tmp_path / "paused") == outcome(tmp_path / "autocast")


def test_runs_of_several_seeds_are_as_without(anywhere, tmp_path):
    recipe = replace(EFFICIENT, epochs=2, ema=0.9, clip=1.0, model_args={"image": (1, 12, 12)})
    options = {"data": images(), "device": "cpu", "log": None}
    train_together(recipe, [4, 2], out=tmp_path / "autocast", **options)
    anywhere()
    train_together(recipe, [4, 2], out=tmp_path / "paused", limit=7, **options)
    train_together(recipe, [4, 2], out=tmp_path / "paused", resume=True, **options)
    assert test_together.outcome(tmp_path / "paused") == test_together.outcome(tmp_path / "autocast")
