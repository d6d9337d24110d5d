"""32 images are learnt by heart by every preset small enough, in the smallest image it takes.

What is small is a rule, no list: at most so many weights, operations and vote entries for an image. A preset that is
larger is taken with fewer types, channels, layers and iterations where it has options for that, and EM with the inverse
temperature that goes with a few children, for Hinton's goes with hundreds; of presets that are then one network only
the first is trained. Decoder and dropout are left out, and the averages of batch norm follow within a few updates.
"""

from functools import cache
from math import prod

import pytest
import torch

from torchcaps import create_model, list_models
from torchcaps.data import DataSet, Stored, load
from torchcaps.data.augment import resize
from torchcaps.models.heads import ActivationHead, LengthHead, LinearHead
from torchcaps.models.measure import operations
from torchcaps.models.registry import find_preset
from torchcaps.ops import Votes
from torchcaps.recipes import Recipe
from torchcaps.train import train
from torchcaps.types import ImageTooSmall

MOST = {"weights": 7_000_000, "operations": 130_000_000, "votes": 200_000}
FEWER = {"types": 4, "channels": 32, "width": 64, "depth": 6, "iterations": 2}
PLAIN = {"decoder": False, "dropout": 0.0, "norm_momentum": 0.1}
CLASSES = 10


def votes_of(network):
    """Entries of all votes that one image makes, in all its iterations across layers."""
    made = []

    def count(module, args):
        if isinstance(args[0], Votes):
            made.append(prod(args[0].lead) * args[0].in_caps * args[0].parents * args[0].dim)

    hooks = [module.register_forward_pre_hook(count) for module in network.modules() if module is not network]
    network(torch.empty(1, *network.image, device="meta"))
    for hook in hooks:
        hook.remove()
    return sum(made)


def smallest(name, options):
    """The options with the smallest image, from 8 x 8 pixels on, that the preset takes with them, and what it needs."""
    preset = find_preset(name)
    for side in range(8, 65):
        options = {**options, "image": (preset.options["image"][0], side, side), "classes": CLASSES}
        try:
            with torch.device("meta"):
                network = preset.build(**options).eval()
                needs = {"weights": sum(weight.numel() for weight in network.parameters()), "votes": votes_of(network)}
        except ImageTooSmall:
            continue
        return options, {**needs, "operations": operations(name, **options)}
    raise AssertionError(f"{name} takes no image of up to 64 x 64 pixels")


def is_small(needs):
    return all(needs[word] <= most for word, most in MOST.items())


def fewer(name):
    """Options that make a preset smaller."""
    less = {}
    for word, default in find_preset(name).options.items():
        if word == "backbone" and default == "resnet":
            less[word] = "simple"
        elif word == "temperature":
            less[word] = (1.0, 0.95)
        elif word in FEWER and isinstance(default, tuple):
            less[word] = (FEWER[word],) * len(default)
        elif word in FEWER and default is not None:
            less[word] = min(default, FEWER[word])
    return less


@cache
def chosen(name):
    """The options with which a preset is small, and what it needs; what is not small is said of it as it is."""
    known = find_preset(name).options
    plain = {word: value for word, value in PLAIN.items() if word in known}
    whole = smallest(name, plain)
    if is_small(whole[1]):
        return whole
    slim = smallest(name, {**plain, **fewer(name)})
    return slim if is_small(slim[1]) else whole


def twin(name):
    """The first preset that is the same network here; only those are looked at that have the same other options."""

    def others(name):
        options = find_preset(name).options
        sizes = {"image": options["image"][0], "classes": 0, "objects": 0, "largest": 0, **fewer(name)}
        return {**options, **{word: size for word, size in sizes.items() if word in options}}

    for other in list_models():
        if other == name or (others(other) == others(name) and needs_of(other) == needs_of(name)):
            return other
    return name


def needs_of(name):
    options, needs = chosen(name)
    return options["image"], needs


def loss_for(head):
    if isinstance(head, LengthHead):
        return "margin"
    if isinstance(head, ActivationHead):
        return "spread"
    return "binary_cross_entropy" if isinstance(head, LinearHead) and head.several else "cross_entropy"


@pytest.mark.parametrize("name", list_models())
def test_32_images_are_learnt_by_heart(name, tmp_path, monkeypatch):
    options, needs = chosen(name)
    if not is_small(needs):
        pytest.skip(f"is too large: {needs}")
    if (other := twin(name)) != name:
        pytest.skip(f"is {other} here")
    monkeypatch.setattr("torchcaps.train.loop.routing_log", lambda network, images: {"layers": {}})  # as long as a step
    channels, side, _ = options["image"]
    digits = load("digits").train
    few = Stored(digits.images[:32, None].repeat(1, channels, 1, 1), digits.labels[:32], digits.class_names)
    steps = (resize(side),)
    data = DataSet("few", few, few, few, train_transform=steps, test_transform=steps)
    loss = loss_for(create_model(name, **options).head)
    lr = 5e-3 if loss == "spread" else 3e-3
    recipe = Recipe(name, "digits", options, loss=loss, lr=lr, epochs=60, batch_size=32, samples=128, stop_at=1.0)
    run = train(recipe, out=tmp_path, data=data, device="cpu", log=None)
    assert run.metrics[-1]["validation_error"] == 0, [row["validation_error"] for row in run.metrics]


@pytest.mark.parametrize(
    "name", ["capsnet", "encapnet14_cifar10", "ar_capsnet", "inverted_capsnet", "efficient_capsnet", "em_capsnet"]
)
def test_each_system_is_small_enough_somewhere(name):
    assert is_small(chosen(name)[1])
