"""Every row of every table takes two training steps, on random images in place of the files of its data set.

What reads files is replaced and nothing else: splits, generated sets, protocols, network, losses and the loop are the
row's own. Rows that share a network share a test, and rows that are trained in one way, to be counted in several, share
the steps. The batch is 2 images, 1 where routing iterates.

The networks in `SMALLER` take minutes in their own size. They see smaller images here, and of rows that then differ in
their augmentation alone only the first takes its steps, the others draw their batches; with TORCHCAPS_LARGE=1, as
`make soak` has it, all of them take their steps in full size.
"""

import gc
import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from torchcaps import recipes
from torchcaps.data import Stored, batches_for, formats, sets
from torchcaps.data.augment import resize
from torchcaps.train import checkpoint, prepare, train
from torchcaps.train.progress import Silent

SMALLER = {"capnet_dynamic_cifar10": 8, "capnet_em_cifar10": 8, "encapnet": 16}
if os.environ.get("TORCHCAPS_LARGE"):
    SMALLER = {}
ROWS = {name: recipes.find(name) for name in recipes.names()}


def sized(recipe):
    """The recipe for smaller images, where its network is one of the largest."""
    if recipe.model not in SMALLER:
        return recipe
    channels = recipe.model_args.get("image", (3,))[0]
    image = (channels, SMALLER[recipe.model], SMALLER[recipe.model])
    return replace(recipe, model_args={**recipe.model_args, "image": image})


def training(recipe):
    """All that training depends on."""
    plain = replace(recipe, seeds=1, metric="error", reported="", assumed=(), note="", keep_epochs=())
    return json.dumps(plain.to_dict(), sort_keys=True)


NETWORKS = defaultdict(list)
for name, recipe in ROWS.items():
    NETWORKS[json.dumps([recipe.model, recipe.data, sized(recipe).to_dict()["model_args"]])].append(name)


@cache
def pixels(count, *shape):
    return torch.randint(256, (count, *shape), dtype=torch.uint8)


def classes(count, of=10):
    return torch.arange(count) % of


class AnyFile(dict):
    def __missing__(self, key):
        return Path(key)


def himagenet(where, *, size=156):
    images = Stored(pixels(4, 3, size, size), classes(4), tuple(f"n{number:08d}" for number in range(200)))
    return where.part(images, images)


def read_smallnorb(dat, cat, info):
    about = {word: torch.arange(40) // 8 for word in ("instance", "elevation", "azimuth", "lighting")}
    return pixels(40, 2, 96, 96), classes(40, 5), about


@pytest.fixture(autouse=True)
def random_files(monkeypatch):
    files = sets.Where.files
    monkeypatch.setattr(
        sets.Where, "files", lambda self, name, *parts: files(self, name) if name == "digits" else AnyFile()
    )
    monkeypatch.setattr(formats, "read_idx_pair", lambda *paths: (pixels(10_400, 28, 28), classes(10_400)))
    monkeypatch.setattr(formats, "read_cifar", lambda path, classes=10: (pixels(20, 3, 32, 32), torch.arange(20) % 10))
    monkeypatch.setattr(formats, "read_svhn", lambda path: (pixels(20, 3, 32, 32), classes(20)))
    monkeypatch.setattr(formats, "read_affnist", lambda path: (pixels(20, 40, 40), classes(20)))
    monkeypatch.setattr(formats, "read_smallnorb", read_smallnorb)
    monkeypatch.setitem(sets.SETS, "himagenet", himagenet)


class Losses(Silent):
    """The loss terms of each step."""

    def __init__(self):
        self.steps = []

    def step(self, step, total, speed, terms):
        self.steps.append(terms())


def parts(network):
    """Weights by part: the blocks of a network, and each layer or stage where a block is a list of them."""
    found = defaultdict(list)
    for name, weight in network.named_parameters():
        words = name.split(".")
        found[".".join(words[: 3 if words[1] == "layers" else 2 if words[0] == "body" else 1])].append((name, weight))
    return found


@pytest.mark.parametrize("network", NETWORKS, ids=[names[0] for names in NETWORKS.values()])
def test_two_steps(network, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "save", lambda *args, **options: None)  # hundreds of megabytes of nothing new
    create, built = prepare.create_model, {}

    def create_once(name, **options):
        """One network for all rows, with the same weights at the start of each."""
        if not built:
            model = create(name, **options)
            built.update(model=model, options=options, start={k: v.clone() for k, v in model.state_dict().items()})
        assert options == built["options"]
        built["model"].load_state_dict(built["start"])
        return built["model"].requires_grad_(True)

    monkeypatch.setattr(prepare, "create_model", create_once)
    rows = {training(ROWS[name]): name for name in NETWORKS[network]}
    for number, name in enumerate(rows.values()):
        recipe, losses = sized(ROWS[name]), Losses()
        data = prepare.load_data(recipe)
        if recipe.model in SMALLER:
            smaller = (resize(SMALLER[recipe.model]),)
            transforms = {word: getattr(data, word) + smaller for word in ("train_transform", "test_transform")}
            data = replace(data, **transforms)
            if number:
                batch = next(batches_for(data.train, 2, transform=data.train_transform).epoch(0))
                assert batch.images.shape == (2, *recipe.model_args["image"])
                continue
        size = 1 if recipe.model_args.get("iterations", 1) > 1 else 2
        short = replace(recipe, batch_size=size, samples=2 * size, epochs=max(2, recipe.epochs))
        run = train(short, out=tmp_path / str(number), data=data, limit=2, device="cpu", log=losses, tensorboard=False)
        assert (run.step, run.stopped, len(losses.steps)) == (2, "limit", 2), name
        expected = [recipe.loss, *(["reconstruction"] if recipe.reconstruction else [])]
        for terms in losses.steps:
            assert list(terms)[: len(expected)] == expected, name
            assert all(math.isfinite(value) for value in terms.values()), (name, terms)
        for part, weights in parts(run.model).items():
            trained = [(own, weight) for own, weight in weights if weight.requires_grad]
            moved = [own for own, weight in trained if not torch.equal(weight, built["start"][own])]
            assert moved or not trained, f"{name}: nothing in {part} has moved"
            assert bool(trained) == (part != "decoder" or recipe.reconstruction > 0), (name, part)
    if sum(weight.numel() for weight in built.pop("model").parameters()) > 10e6:
        del run
        built.clear()
        gc.collect()


def test_every_row_is_there():
    assert sorted(name for names in NETWORKS.values() for name in names) == sorted(recipes.names())
