from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch

from torchcaps.data.augment import Step, apply, flip, normalise, standardise
from torchcaps.data.protocols import (
    PAPERS,
    bind,
    find,
    image_after,
    protocol_names,
    standardise_split,
    standardised_crops,
    statistics,
)
from torchcaps.data.random import Draws
from torchcaps.data.splits import Stored
from torchcaps.models import create_model

RAW = {
    **dict.fromkeys(("mnist",), (1, 28, 28)),
    **dict.fromkeys(("multimnist", "diverse_multimnist"), (1, 36, 36)),
    **dict.fromkeys(("affnist", "affnist_generated", "mnist40"), (1, 40, 40)),
    **dict.fromkeys(("cifar10", "cifar100", "svhn"), (3, 32, 32)),
    "smallnorb": (2, 96, 96),
    "himagenet": (3, 156, 156),
}
SEEN = [  # paper, data, what the network sees, validation of the paper's form and of the official one
    ("sabour2017", "mnist", (1, 28, 28), 0, 0),
    ("sabour2017", "multimnist", (1, 36, 36), 0, 0),
    ("sabour2017", "affnist", (1, 40, 40), 0, 0),
    ("sabour2017", "affnist_generated", (1, 40, 40), 0, 0),
    ("sabour2017", "mnist40", (1, 40, 40), 0, 0),
    ("sabour2017", "cifar10", (3, 24, 24), 0, 0),
    ("sabour2017", "smallnorb", (2, 32, 32), 0, 0),
    ("sabour2017", "svhn", (3, 32, 32), 0, 0),
    ("li2018", "mnist", (1, 32, 32), 0, "test"),
    ("li2018", "cifar10", (3, 32, 32), 0, "test"),
    ("li2018", "cifar100", (3, 32, 32), 0, "test"),
    ("li2018", "svhn", (3, 32, 32), 0, "test"),
    ("li2018", "himagenet", (3, 128, 128), 0, "test"),
    ("choi2019", "mnist", (1, 28, 28), 0.1, 0.1),
    ("choi2019", "affnist", (1, 40, 40), "affnist", "affnist"),
    ("choi2019", "affnist_generated", (1, 40, 40), "affnist", "affnist"),
    ("choi2019", "mnist40", (1, 40, 40), 0.1, 0.1),
    ("choi2019", "cifar10", (3, 32, 32), 0.1, 0.1),
    ("tsai2020", "cifar10", (3, 32, 32), 0, "test"),
    ("tsai2020", "cifar100", (3, 32, 32), 0, "test"),
    ("tsai2020", "diverse_multimnist", (1, 36, 36), 0, 0),
    ("mazzia2021", "mnist", (1, 28, 28), 0.05, "test"),
    ("mazzia2021", "smallnorb", (2, 48, 48), 0.2, "test"),
    ("mazzia2021", "multimnist", (1, 36, 36), 0.05, "test"),
]
MODELS = {
    ("sabour2017", "mnist"): "capsnet_mnist",
    ("sabour2017", "multimnist"): "capsnet_multimnist",
    ("sabour2017", "affnist"): "capsnet_affnist",
    ("sabour2017", "cifar10"): "capsnet_cifar10",
    ("sabour2017", "smallnorb"): "capsnet_smallnorb",
    ("sabour2017", "svhn"): "capsnet_svhn",
    ("li2018", "cifar10"): "encapnet18_cifar10",
    ("choi2019", "mnist"): "ar_capsnet_mnist",
    ("choi2019", "affnist"): "ar_capsnet_affnist",
    ("choi2019", "cifar10"): "ar_capsnet_cifar10",
    ("tsai2020", "cifar10"): "inverted_cifar10",
    ("tsai2020", "diverse_multimnist"): "inverted_diverse_multimnist",
    ("mazzia2021", "mnist"): "efficient_capsnet_mnist",
    ("mazzia2021", "smallnorb"): "efficient_capsnet_smallnorb",
    ("mazzia2021", "multimnist"): "efficient_capsnet_multimnist",
}


def batch(data, b=3):
    return torch.rand(b, *RAW[data])


def draws(b=3, seed=0):
    return Draws(seed, 0, torch.arange(b))


def bound(protocol, images):
    """The steps with a split's numbers in, where they want them."""
    pixels = (images * 255).to(torch.uint8)
    split = Stored(pixels, torch.zeros(len(pixels), dtype=torch.int64), ("one",))
    return [
        None if steps is None else bind(steps, split, split)
        for steps in (protocol.train, protocol.test, protocol.crops)
    ]


def test_multimnist_of_the_released_code():
    assert dict(find("sabour2017-official", "multimnist").options) == {"shift": 6, "base_shift": "digit"}
    assert dict(find("mazzia2021-official", "multimnist").options) == {"shift": 6, "different": "image"}
    assert any("of one class" in note for note in find("mazzia2021-official", "multimnist").notes)
    for paper in ("sabour2017", "mazzia2021"):
        assert dict(find(paper, "multimnist").options) == {"shift": 4}
    assert protocol_names("multimnist_shift6") == ["sabour2017-official", "mazzia2021-official"]


def test_their_own_steps_are_steps():
    assert isinstance(standardise_split(), Step)
    assert isinstance(standardised_crops(32), Step)
    assert (standardised_crops.random, standardised_crops.geometric, standardise_split.geometric) == (
        False,
        True,
        False,
    )


def test_the_table_is_complete():
    assert {(paper, data) for paper, data, *_ in SEEN} == {
        (paper, data) for paper, (_, sets) in PAPERS.items() for data in sets
    }


@pytest.mark.parametrize("form", ["", "-official"], ids=["paper", "official"])
@pytest.mark.parametrize(("paper", "data", "seen", "validation", "official"), SEEN)
def test_steps_run_and_give_what_the_network_takes(paper, data, seen, validation, official, form):
    protocol = find(paper + form, data)
    assert (protocol.name, protocol.data) == (paper + form, data)
    assert protocol.validation == (official if form else validation)
    images = batch(data)
    train, test, crops = bound(protocol, images)
    assert apply(train, images, draws()).shape == (3, *seen)
    assert apply(test, images, draws()).shape == (3, *seen)
    assert image_after(protocol.train, RAW[data]) == image_after(protocol.test, RAW[data]) == seen
    if crops is not None:
        assert apply(crops, images).shape[2:] == seen
        assert apply(crops, images).shape[1] == (10 if paper == "li2018" else 13)
    if not any(step.random for step in test):
        assert torch.equal(apply(test, images), apply(test, images, draws(seed=5)))
    else:
        assert (paper, form) == ("li2018", "-official")
    same = [apply(train, images, draws(seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(same[0], same[1])
    assert not any(step.random for step in train) or not torch.equal(same[0], same[2])


@pytest.mark.parametrize(("paper", "data"), MODELS, ids=str)
def test_sizes_are_those_of_the_presets(paper, data):
    with torch.device("meta"):
        model = create_model(MODELS[paper, data])
    assert image_after(find(paper, data).test, RAW[data]) == model.image


@pytest.mark.parametrize("name", protocol_names())
def test_protocols_are_plain_values(name):
    for data in PAPERS[name.partition("-")[0]][1]:
        protocol = find(name, data)
        assert pickle.loads(pickle.dumps(protocol)) == protocol
        with pytest.raises(FrozenInstanceError):
            protocol.name = "other"
        assert all(isinstance(text, str) for text in (*protocol.notes, *protocol.assumed))
        if data in ("multimnist", "diverse_multimnist"):
            assert not any(step.geometric for step in protocol.train), "images would part from their targets"


def shown(steps):
    return [repr(step) for step in steps]


def test_what_the_papers_say():
    assert shown(find("sabour2017", "mnist").train) == ["shift(pixels=2)"]
    assert shown(find("sabour2017", "affnist").train) == ["shift(pixels=6)"]
    assert shown(find("sabour2017", "cifar10").train) == [
        "random_crop(size=24, padding=0)",
        "flip()",
        f"brightness(delta={63 / 255})",
        "contrast(low=0.2, high=1.8)",
        "standardise()",
    ]
    assert shown(find("sabour2017", "smallnorb").test) == ["resize(size=48)", "centre_crop(size=32)", "standardise()"]
    assert [step.split("(")[0] for step in shown(find("sabour2017", "smallnorb").train)] == [
        "resize",
        "brightness",
        "contrast",
        "random_crop",
        "standardise",
    ]
    assert shown(find("tsai2020", "cifar100").train)[:2] == ["random_crop(size=32, padding=4)", "flip()"]
    assert find("tsai2020", "cifar100").test == (normalise((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),)
    assert shown(find("mazzia2021", "mnist").train) == [f"scale(factor={255 / 256})", "byerly()"]
    assert shown(find("mazzia2021", "mnist").test) == [f"scale(factor={255 / 256})"]
    assert find("tsai2020", "diverse_multimnist").train == find("tsai2020", "diverse_multimnist").test == ()
    assert [find(name, "multimnist").options["shift"] for name in ("sabour2017", "sabour2017-official")] == [4, 6]
    assert [find(name, "multimnist").options["shift"] for name in ("mazzia2021", "mazzia2021-official")] == [4, 6]


def test_choi_augmentation():
    assert find("choi2019", "mnist").train == find("choi2019", "cifar10").train == ()
    (step,) = find("choi2019", "mnist", augmentation="+").train
    assert (step.degrees, step.fraction, step.fill) == (0, 0.1, "nearest")
    (step,) = find("choi2019-official", "mnist", augmentation="+").train
    assert (step.degrees, step.fraction, step.fill) == (20, 0.1, "nearest")
    step, mirrored = find("choi2019", "cifar10", augmentation="+").train
    assert (step.degrees, step.fraction, mirrored) == (20, 0.1, flip())
    (step,) = find("choi2019", "affnist").train
    assert (step.degrees, step.fraction) == (0, 0.2)
    assert find("choi2019-official", "affnist").train == (step, flip())


@pytest.mark.parametrize(("augmentation", "larger", "jitter"), [("", 32, False), ("+", 34, False), ("++", 40, True)])
def test_li_augmentation(augmentation, larger, jitter):
    protocol = find("li2018", "cifar10", augmentation=augmentation)
    names = [step.split("(")[0] for step in shown(protocol.train)]
    assert names == ["resize"] * (larger > 32) + ["random_crop", "flip"] + ["colour_jitter"] * jitter
    crop = protocol.train[larger > 32]
    assert crop.padding == (4 if larger == 32 else 0)
    assert larger == 32 or protocol.train[0].size == protocol.test[0].size == larger
    assert (protocol.crops is None) == (larger == 32)
    assert apply(protocol.train, batch("cifar10"), draws()).shape == (3, 3, 32, 32)
    (said,) = protocol.assumed
    crops = "crops after padding by 4" if larger == 32 else f"crops from {larger} x {larger}"
    assert f"is taken as {crops} and mirror images" in said
    assert ("jittered colours" in said) == jitter
    assert find("li2018-official", "cifar10", augmentation=augmentation).assumed == ()
    assert flip() not in find("li2018", "svhn").train
    assert flip() in find("li2018-official", "svhn").train
    assert flip() not in find("li2018-official", "mnist").train


def test_li_himagenet():
    assert find("li2018", "himagenet").options == {"size": 156}
    large = find("li2018", "himagenet", size=224)
    assert large.options == {"size": 256}
    assert image_after(large.test, (3, 256, 256)) == image_after(large.train, (3, 256, 256)) == (3, 224, 224)


def test_mazzia_smallnorb():
    names = [step.split("(")[0] for step in shown(find("mazzia2021", "smallnorb").train)]
    assert names == ["standardise", "resize", "random_crop", "brightness", "contrast"]
    assert find("mazzia2021-official", "smallnorb").train[0] == standardise_split("own")
    assert find("mazzia2021-official", "smallnorb", statistics="train").test[0] == standardise_split("train")
    assert find("mazzia2021", "smallnorb", crops=40).crops[-1].n == 40


def test_statistics_and_bind():
    images = torch.randint(0, 256, (50, 2, 6, 5), dtype=torch.uint8)
    others = torch.randint(0, 99, (40, 2, 6, 5), dtype=torch.uint8)
    own, train = (Stored(x, torch.zeros(len(x), dtype=torch.int64), ("one",)) for x in (images, others))
    mean, std = statistics(own)
    pixels = images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), rel=1e-12)
    after = apply(bind((standardise_split(),), own, train), (images / 255).double())
    assert after.mean((0, 2, 3)).abs().max() < 1e-6
    assert (after.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-6
    assert bind((standardise_split("train"), flip()), own, train) == (normalise(*statistics(train)), flip())
    assert statistics(Stored(images[:, 0], own.labels, ("one",)))[0] == pytest.approx(mean[:1])
    with pytest.raises(ValueError, match="bind"):
        standardise_split()(images)
    with pytest.raises(ValueError, match="'own' or 'train'"):
        standardise_split("test")


def test_crops_are_standardised_one_by_one():
    images = torch.rand(2, 2, 48, 48)
    crops = standardised_crops(32)(images)
    assert crops.shape == (2, 13, 2, 32, 32)
    assert torch.allclose(crops[:, 0], standardise()(images[:, :, 8:40, 8:40]), atol=1e-6)
    assert crops.mean((2, 3, 4)).abs().max() < 1e-5
    assert (crops.std((2, 3, 4), correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "data", "options", "says"),
    [
        ("sabour2018", "mnist", {}, "there is no protocol 'sabour2018'; did you mean sabour2017"),
        ("hinton", "mnist", {}, "there are sabour2017, sabour2017-official, li2018"),
        ("tsai2020-legacy", "cifar10", {}, "there is no protocol 'tsai2020-legacy'"),
        (
            "tsai2020",
            "mnist",
            {},
            "tsai2020 has no protocol for mnist; mnist has sabour2017, li2018, choi2019, mazzia2021",
        ),
        ("tsai2020", "fashion_mnist", {}, "tsai2020 has no protocol for fashion_mnist; fashion_mnist has ours"),
        ("tsai2020", "digits", {}, "no paper here uses digits"),
        ("li2018", "cifar10", {"augmentation": "+++"}, "augmentation='[+]{3}' is not known; it is one of '', '[+]'"),
        ("li2018", "himagenet", {"size": 100}, "size=100 is not known; it is one of 128, 224"),
        ("choi2019", "mnist", {"augmentation": "++"}, "augmentation='[+][+]' is not known"),
        ("tsai2020", "cifar10", {"augmentation": "+"}, "tsai2020 has no option 'augmentation'; it has none"),
        ("mazzia2021", "mnist", {"crop": 3}, "mazzia2021 has no option 'crop'; it has crops, statistics"),
    ],
)
def test_what_does_not_exist(name, data, options, says):
    with pytest.raises(ValueError, match=says):
        find(name, data, **options)


def test_names_of_a_set():
    assert protocol_names("diverse_multimnist") == ["tsai2020", "tsai2020-official"]
    assert len(protocol_names()) == 10
