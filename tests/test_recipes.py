"""Every table is there with the paper's numbers, and every row builds the network it names for the images it names."""

import ast
import inspect
import json
from dataclasses import FrozenInstanceError, fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from torchcaps import recipes
from torchcaps.data import protocols
from torchcaps.data.sets import SETS
from torchcaps.models.registry import _check_options, find_preset
from torchcaps.recipes import Recipe, find, from_dict, with_overrides

TABLES = recipes.tables()
NAMES = recipes.names()
PAPERS = [name for name in NAMES if not name.startswith(("quick", "ours"))]
RAW = {  # channels, height, width before the protocol, and classes
    "mnist": ((1, 28, 28), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "mnist40": ((1, 40, 40), 10),
    "affnist": ((1, 40, 40), 10),
    "multimnist": ((1, 36, 36), 10),
    "multimnist_relative": ((1, 36, 36), 10),
    "diverse_multimnist": ((1, 36, 36), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "svhn": ((3, 32, 32), 10),
    "smallnorb": ((2, 96, 96), 5),
    "digits": ((1, 8, 8), 10),
}
ROWS_OF = {  # rows of each table without those of the official code and our own variants
    "sabour2017_table1": 8,
    "sabour2017_cifar10": 1,
    "sabour2017_smallnorb": 1,
    "sabour2017_svhn": 1,
    "sabour2017_affnist": 4,
    "sabour2017_figure_a2": 2,
    "li2018_table1": 12,
    "li2018_table3": 19,
    "li2018_table4": 14,
    "choi2019_table1": 11,
    "choi2019_table2": 20,
    "tsai2020_table1": 16,
    "tsai2020_figure4": 30,
    "tsai2020_figure5": 6,
    "mazzia2021_table2": 6,
    "mazzia2021_table3": 1,
    "mazzia2021_table4": 7,
    "mazzia2021_multimnist": 2,
}
OWN = {"sabour2017_cifar10:single", "mazzia2021_table2:efficient-child", "mazzia2021_table4:efficient-linear"}
PRINTED = {
    "sabour2017_table1": {
        "baseline": "0.39",
        "baseline-multimnist": "8.1",
        "routing1-plain": "0.34 ± 0.032",
        "routing1": "0.29 ± 0.011",
        "routing1-multimnist": "7.5",
        "routing3-plain": "0.35 ± 0.036",
        "routing3": "0.25 ± 0.005",
        "routing3-multimnist": "5.2",
    },
    "sabour2017_cifar10": {"ensemble7": "10.6"},
    "sabour2017_smallnorb": {"capsnet": "2.7"},
    "sabour2017_svhn": {"capsnet": "4.3"},
    "sabour2017_affnist": {"capsnet": "79", "cnn": "66", "capsnet-mnist40": "99.23", "cnn-mnist40": "99.22"},
    "li2018_table1": {
        "a-dynamic": "14.28",
        "a-dynamic-mnist": "0.37",
        "b-em": "12.66",
        "b-em-mnist": "0.31",
        "c-same-shape": "14.43",
        "c-same-shape-mnist": "0.38",
        "d-similar-param": "12.09",
        "d-similar-param-mnist": "0.33",
        "e-master": "13.87",
        "e-master-mnist": "0.31",
        "f-master-aide": "11.93",
        "f-master-aide-mnist": "0.25",
    },
    "li2018_table3": {
        "1-master": "9.83",
        "2-v1": "8.05",
        "3-v2": "9.11",
        "4-v3": "7.41",
        "5-skip-type1": "6.81",
        "6-skip-type2": "6.75",
        "7-skip-both": "5.82",
        "8-two-ots": "4.55",
        "a-baseline": "5.82",
        "a-baseline-resnet": "8.03",
        "b-kl": "5.31",
        "b-kl-resnet": "7.72",
        "c-ot": "4.58",
        "c-ot-resnet": "7.67",
        "d1-no-bias-fix": "4.71",
        "d2-through-plan": "4.77",
        "d3-no-extractor": "5.79",
        "d4-vanilla-generator": "5.01",
        "d5-l2": "4.90",
    },
    "li2018_table4": {
        "encapnet-cifar10": "4.55",
        "encapnet-cifar100": "26.77",
        "encapnet-svhn": "2.01",
        "encapnet+-cifar10": "3.13",
        "encapnet+-cifar100": "24.01 (24.85 ± 0.11)",
        "encapnet+-svhn": "1.64",
        "encapnet++-cifar10": "3.10 (3.56 ± 0.12)",
        "encapnet++-cifar100": "24.18",
        "encapnet++-svhn": "1.52 (1.87 ± 0.11)",
        "v1-himagenet": "48.23",
        "v2-himagenet": "43.15",
        "v3-himagenet": "42.76",
        "v3+-himagenet": "40.18",
        "v3++-himagenet": "40.05",
    },
    "choi2019_table1": {
        "ours-mnist": "99.46",
        "ours-mnist+": "99.46",
        "ours-affnist": "91.6",
        "ours-c10": "87.19",
        "ours-c10+": "88.61",
        "ensemble7-c10": "88.94",
        "ensemble7-c10+": "90.11",
        "capsulenet-mnist": "99.45",
        "capsulenet-mnist+": "99.52",
        "capsulenet-c10": "63.1",
        "capsulenet-c10+": "69.6",
    },
    "choi2019_table2": {
        "layers0-dim16-c10": "77.51",
        "layers0-dim32-c10+": "81.97",
        "layers1-dim16-c10+": "82.83",
        "layers1-dim32-c10": "82.39",
        "layers2-dim32-c10": "85.46",
        "layers2-dim32-c10+": "87.01",
        "layers3-dim16-c10": "85.56",
        "layers4-dim16-c10": "86.37",
        "layers4-dim32-c10": "87.19",
        "layers4-dim32-c10+": "88.61",
    },
    "tsai2020_table1": {
        "dynamic-simple-cifar10": "84.08",
        "dynamic-simple-cifar100": "56.96",
        "em-simple-cifar10": "82.19",
        "em-simple-cifar100": "37.73",
        "inverted-simple-cifar10": "85.17",
        "inverted-simple-cifar100": "57.32",
        "dynamic-resnet-cifar10": "92.65",
        "dynamic-resnet-cifar100": "71.70",
        "em-resnet-cifar10": "92.15",
        "em-resnet-cifar100": "58.08",
        "inverted-resnet-cifar10": "95.14",
        "inverted-resnet-cifar100": "78.02",
        "cnn-cifar10": "87.10",
        "cnn-cifar100": "62.30",
        "resnet18-cifar10": "95.11",
        "resnet18-cifar100": "77.92",
    },
    "tsai2020_figure4": {"inverted-a-5": "uniform"},
    "tsai2020_figure5": {
        "dynamic-vector": "83.39",
        "inverted-vector": "85.74",
        "inverted-matrix": "80.59",
        "inverted-matrix-42m": "91.17",
        "cnn": "79.81",
        "cnn-dense": "84.84",
    },
    "mazzia2021_table2": {
        "baseline-plain": "0.48",
        "base-capsnet-plain": "0.54",
        "baseline": "0.4",
        "base-capsnet": "0.39",
        "efficient": "0.26 ± 0.0002",
        "capsnet": "0.36 ± 0.04",
    },
    "mazzia2021_table3": {"efficient": "0.16"},
    "mazzia2021_table4": {
        "baseline-plain": "5.9",
        "base-capsnet-plain": "4.58",
        "baseline": "4.59",
        "base-capsnet": "4.33",
        "efficient": "2.54 ± 0.003",
        "ensemble2": "1.23",
        "em": "4.4 ± 0.004",
    },
    "mazzia2021_multimnist": {"efficient": "5.1 ± 0.005", "ensemble3": "3.8"},
}
SOME = Recipe(model="capsnet_mnist", data="mnist")


@cache
def network_of(name):
    """On the meta device, from a row's options as they stand."""
    recipe = find(name)
    preset = find_preset(recipe.model)
    _check_options(preset, dict(recipe.model_args))
    with torch.device("meta"):
        return preset.build(**recipe.model_args)


def protocol_of(recipe):
    known = protocols.protocol_options(recipe.protocol)
    own = {word: value for word, value in recipe.data_args.items() if word in known}
    return protocols.find(recipe.protocol, recipe.data, **own)


def seen_by_the_network(recipe, part):
    """Image and classes after the protocol's steps for `part`."""
    if recipe.data == "himagenet":
        side, classes = protocol_of(recipe).options["size"], 200
        image = (3, side, side)
    else:
        image, classes = RAW[recipe.data]
    steps = getattr(protocol_of(recipe), part) if recipe.protocol else ()
    return protocols.image_after(steps, image), classes


def test_every_table_of_the_five_papers_is_there():
    assert set(TABLES) == {*ROWS_OF, "quick", "ours"}
    for name, module in TABLES.items():
        assert module.__doc__, name
        assert isinstance(module.TITLE, str), name
        assert all(isinstance(heading, str) for heading in module.COLUMNS), name
        assert all(isinstance(recipe, Recipe) for recipe in module.ROWS.values()), name
        assert all(isinstance(value, str) for pair in module.CITED.items() for value in pair), name


@pytest.mark.parametrize("table", ROWS_OF)
def test_a_table_has_as_many_rows_as_the_paper(table):
    rows = [row for row in TABLES[table].ROWS if not row.endswith("-official") and f"{table}:{row}" not in OWN]
    assert len(rows) == ROWS_OF[table]


@pytest.mark.parametrize("table", PRINTED)
def test_numbers_are_as_printed(table):
    rows = TABLES[table].ROWS
    assert {row: rows[row].reported for row in PRINTED[table]} == PRINTED[table]
    for row in PRINTED[table]:
        if f"{row}-official" in rows:
            assert rows[f"{row}-official"].reported == rows[row].reported


def test_table_2_of_choi_is_all_numbers():
    numbers = TABLES["choi2019_table2"].NUMBERS
    assert list(numbers) == [(depth, dim) for depth in range(5) for dim in (16, 32)]
    assert [float(plain) for plain, _ in numbers.values()] == [
        77.51, 77.44, 81.96, 82.39, 84.48, 85.46, 85.56, 86.56, 86.37, 87.19,
    ]  # fmt: skip
    assert [float(plus) for _, plus in numbers.values()] == [
        81.89, 81.97, 82.83, 83.92, 84.77, 87.01, 86.93, 87.91, 87.21, 88.61,
    ]  # fmt: skip


def test_numbers_quoted_from_elsewhere():
    assert TABLES["li2018_table4"].CITED["WRN [31], h-ImageNet"] == "42.51"
    assert len(TABLES["li2018_table4"].CITED) == 20
    assert TABLES["mazzia2021_table2"].CITED["HFCs [20]"] == "0.25 ± 0.0002"
    assert len(TABLES["mazzia2021_table3"].CITED) == 4
    assert TABLES["mazzia2021_table4"].CITED["VB-Routing [16]"] == "1.6 ± 0.06"
    assert TABLES["choi2019_table1"].CITED["CapsuleNet+ensemble(7) [12], C10+"] == "89.4"


@pytest.mark.parametrize("name", NAMES)
def test_every_row_builds_for_the_images_it_is_trained_on(name):
    recipe = find(name)
    network = network_of(name)
    assert sum(p.numel() for p in network.parameters()) > 0
    for part in ("train", "test"):
        image, classes = seen_by_the_network(recipe, part)
        assert tuple(network.image) == image, part
        assert network.classes == classes
    decoder = getattr(network, "decoder", None) is not None
    assert decoder == (recipe.reconstruction > 0), "a decoder is trained, and only where there is one"


@pytest.mark.parametrize("name", NAMES)
def test_every_row_loads_from_a_set_that_knows_its_options(name):
    recipe = find(name)
    load = SETS[recipe.data]
    known = set(inspect.signature(load).parameters) - {"where"}
    if recipe.protocol:
        protocol = protocol_of(recipe)
        known |= {*protocols.protocol_options(recipe.protocol)}
        if "crops" in recipe.data_args:
            known.add("crops")
            assert protocol.crops is not None
        held_out = recipe.validation if recipe.validation is not None else protocol.validation
        assert (recipe.select == "best") <= (held_out != 0), "the best epoch needs a validation set"
        assert (held_out == "test") <= recipe.protocol.endswith("-official")
    assert set(recipe.data_args) <= known
    if recipe.data in ("multimnist", "diverse_multimnist"):
        assert recipe.samples is not None, "an epoch of a generated set says how long it is"


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_one_of_the_network_s_scores(name):
    recipe = find(name)
    head = type(network_of(name).head).__name__
    losses = {
        "LengthHead": {"margin", "spread"},
        "RoutedLengthHead": {"margin", "spread"},
        "ActivationHead": {"spread", "margin"},
        "LogitHead": {"cross_entropy", "binary_cross_entropy"},
        "LinearHead": {"cross_entropy", "binary_cross_entropy"},
    }
    assert head not in losses or recipe.loss in losses[head], head
    several = "multimnist" in recipe.data
    assert several == recipe.metric.startswith(("exact_match", "per_digit", "ensemble_per_digit"))
    assert not (several and recipe.loss == "cross_entropy")


@pytest.mark.parametrize("name", NAMES)
def test_json_gives_the_same_recipe_back(name):
    recipe = find(name)
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("name", PAPERS)
def test_assumed_names_fields_and_their_arguments(name):
    recipe = find(name)
    known = {each.name for each in fields(Recipe)}
    for each in recipe.assumed:
        field, _, argument = each.partition(".")
        assert field in known, each
        preset = find_preset(recipe.model)
        assert not argument or argument in getattr(recipe, field) or argument in preset.options, each
    assert len(set(recipe.assumed)) == len(recipe.assumed)
    assert recipe.reported or recipe.note, "a row without a number says why"


def test_values_of_the_papers():
    routing3 = find("sabour2017_table1:routing3")
    assert (routing3.optimizer, routing3.lr, routing3.reconstruction) == ("adam", 1e-3, 0.0005)
    assert routing3.schedule_args == {"decay": 0.96, "every": 2000, "floor": 1e-6}
    assert routing3.model_args["iterations"] == 3
    assert find("sabour2017_table1:routing3-multimnist").schedule_args["every"] == 20_000
    official = find("sabour2017_table1:routing3-official")
    assert (official.loss_scale, official.model_args["form"]) == ("official", "official")
    steps = -(-60_000 // routing3.batch_size) * routing3.epochs
    assert steps == pytest.approx(300_000, rel=0.01)
    steps = -(-50_000 // 128) * find("sabour2017_cifar10:ensemble7").epochs
    assert steps == pytest.approx(600_000, rel=0.01)
    assert find("sabour2017_cifar10:ensemble7").seeds == 7

    two_ots = find("li2018_table3:8-two-ots")
    assert (two_ots.lr, two_ots.epochs, two_ots.batch_size) == (1e-4, 600, 128)
    assert two_ots.schedule_args == {"milestones": (200, 300, 400), "factor": 0.1}
    assert two_ots.optimizer_args == {"weight_decay": 5e-4}

    ours = find("choi2019_table1:ours-c10+")
    assert (ours.optimizer, ours.lr, ours.batch_size, ours.epochs) == ("rmsprop_keras", 1e-3, 100, 200)
    assert ours.optimizer_args["rho"] == 0.9
    assert ours.optimizer_args["decay"] == 1e-4
    assert ours.reconstruction == 0.3
    assert find("choi2019_table1:ours-mnist").epochs == 20
    assert "kernel_start" not in ours.model_args
    released = find("choi2019_table1:ours-c10+-official")
    assert released.model_args == {"depth": 4, "dim": 32, "kernel_start": "whole"}
    assert released.optimizer_args == {"rho": 0.9, "decay": 1e-4, "eps": 1e-8}
    assert released.schedule_args == {"milestones": (51,), "factor": 0.5}
    assert "optimizer_args.eps" in ours.assumed
    assert released.assumed == ("seeds",)

    for name, optimizer, lr, loss in (
        ("inverted-resnet-cifar10", "sgd", 0.1, "cross_entropy"),
        ("dynamic-resnet-cifar100", "adam", 1e-3, "margin"),
        ("em-simple-cifar10", "adam", 1e-2, "spread"),
    ):
        recipe = find(f"tsai2020_table1:{name}")
        assert (recipe.optimizer, recipe.lr, recipe.loss, recipe.epochs) == (optimizer, lr, loss, 350)
    assert find("tsai2020_figure5:cnn").samples * find("tsai2020_figure5:cnn").epochs == 21_000_000

    efficient = find("mazzia2021_table2:efficient")
    assert (efficient.lr, efficient.epochs, efficient.batch_size, efficient.seeds) == (5e-4, 100, 16, 30)
    assert efficient.schedule_args == {"decay": 0.98, "floor": 5e-5}
    assert find("mazzia2021_table2:efficient-official").schedule_args["decay"] == 0.97
    assert find("mazzia2021_table4:efficient").epochs == 200
    assert find("mazzia2021_multimnist:efficient").samples == 10 * 60_000


def test_recipes_import_nothing_but_each_other():
    for path in Path(recipes.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("torchcaps"):
                assert node.module.startswith("torchcaps.recipes"), path


def test_a_recipe_is_frozen_and_its_lists_are_tuples():
    with pytest.raises(FrozenInstanceError):
        SOME.lr = 1.0
    recipe = replace(SOME, lr=1, keep_epochs=[1, 20], model_args={"convs": [[3, 2], [3, 1]]})
    assert isinstance(recipe.lr, float)
    assert recipe.keep_epochs == (1, 20)
    assert recipe.model_args == {"convs": ((3, 2), (3, 1))}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"lr": "1e-3"}, "lr", 1e-3),
        ({"lr": "1"}, "lr", 1.0),
        ({"epochs": "5"}, "epochs", 5),
        ({"keep-epochs": "1,20,80,200"}, "keep_epochs", (1, 20, 80, 200)),
        ({"keep_epochs": "7"}, "keep_epochs", (7,)),
        ({"keep_epochs": ""}, "keep_epochs", ()),
        ({"class_weights": "1,0.5"}, "class_weights", (1.0, 0.5)),
        ({"class_weights": "none"}, "class_weights", None),
        ({"clip": "none"}, "clip", None),
        ({"protocol": "None"}, "protocol", None),
        ({"protocol": "sabour2017"}, "protocol", "sabour2017"),
        ({"validation": "0.1"}, "validation", 0.1),
        ({"validation": "5000"}, "validation", 5000),
        ({"validation": "first-10000"}, "validation", "first-10000"),
        ({"precision": "32"}, "precision", "32"),
        ({"samples": "600"}, "samples", 600),
        ({"model_args": '{"iterations": 1}'}, "model_args", {"iterations": 1}),
        ({"model_args.iterations": "1"}, "model_args", {"decoder": False, "iterations": 1}),
        ({"model_args.decoder": "true"}, "model_args", {"decoder": True}),
        ({"model_args.form": "official"}, "model_args", {"decoder": False, "form": "official"}),
        ({"model_args.image": "[1, 32, 32]"}, "model_args", {"decoder": False, "image": (1, 32, 32)}),
        ({"schedule_args.milestones": "25,41"}, "schedule_args", {"milestones": (25, 41)}),
        ({"note": "12"}, "note", "12"),
        ({"lr": 0.5}, "lr", 0.5),
    ],
)
def test_overrides_are_read_as_the_field_s_kind(given, field, value):
    recipe = with_overrides(replace(SOME, clip=1.0, protocol="choi2019", model_args={"decoder": False}), given)
    assert getattr(recipe, field) == value
    assert type(getattr(recipe, field)) is type(value)


def test_overrides_leave_the_original_alone():
    recipe = replace(SOME, model_args={"iterations": 3})
    changed = with_overrides(recipe, {"model_args.iterations": "1", "model_args.leak": "true", "lr": "0.1"})
    assert recipe.model_args == {"iterations": 3}
    assert changed.model_args == {"iterations": 1, "leak": True}
    assert changed == replace(recipe, lr=0.1, model_args={"iterations": 1, "leak": True})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lrr": "1"}, "no field 'lrr'; did you mean lr"),
        ({"batchsize": "1"}, "did you mean batch_size"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"lr": "nan"}, "lr must be a finite number"),
        ({"lr": "0"}, "lr must be above 0"),
        ({"lr": "true"}, "lr must be a number, got True"),
        ({"epochs": "1.5"}, "epochs must be a whole number, got 1.5"),
        ({"epochs": "0"}, "epochs must be at least 1, got 0"),
        ({"epochs": "none"}, "epochs must be a whole number, got None"),
        ({"samples": "many"}, "samples must be a whole number, got 'many'"),
        ({"batch_size": "-4"}, "batch_size must be at least 1"),
        ({"loss": "margn"}, "loss must be one of margin, .* did you mean margin"),
        ({"precision": "8"}, "precision must be one of 32, tf32, bf16, fp16"),
        ({"ema": "1"}, "ema must be at least 0 and below 1"),
        ({"reconstruction": "-1"}, "reconstruction must be at least 0"),
        ({"keep_epochs": "1,two"}, "keep_epochs must be a whole number, got 'two'"),
        ({"model_args": "3"}, "model_args must be names with values"),
        ({"schedule_args.decy": "3"}, "schedule_args has no 'decy'; it takes decay"),
        ({"optimizer_args.beta": "3"}, "optimizer_args has no 'beta'; it takes betas"),
        ({"lr.decay": "3"}, "lr is a single value"),
        ({"note": None}, "note must be a word, got None"),
        ({"model_args": {1: 2}}, "model_args must be names with values"),
        ({"model_args": {"routing": object}}, "model_args takes plain values only"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(given, said):
    with pytest.raises(ValueError, match=said) as error:
        with_overrides(SOME, given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "capsnet_mnist"}, "a recipe needs data"),
        ({}, "a recipe needs model, but only nothing"),
        ({"model": "capsnet_mnist", "data": "mnist", "learning_rate": 1}, "no field 'learning_rate'"),
        ({"model": "capsnet_mnist", "data": 3}, "data must be a word, got 3"),
        ([1, 2], "a recipe is a set of fields with values"),
        ({"model": "capsnet_mnist", "data": "mnist", "epochs": "5"}, "epochs must be a whole number, got '5'"),
    ],
)
def test_a_dictionary_that_is_no_recipe_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        from_dict(given)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sabour2017_table1:routing2", "no row 'routing2'; did you mean routing"),
        ("sabour2017_tabel1:routing3", "did you mean sabour2017_table1:routing3"),
        ("sabour2017_tabel1", "did you mean sabour2017_table1"),
        ("sabour2017_table1", "sabour2017_table1 needs a row; its rows are baseline"),
        ("sabour2017_table1:zzzzzz", "its rows are baseline"),
        ("qqqqqqq", "the tables are choi2019_table1"),
        ("", "the tables are"),
        (3, "asked for by name, got 3"),
    ],
)
def test_an_unknown_row_names_the_nearest(name, said):
    with pytest.raises(ValueError, match=said):
        find(name)


def test_names_find_their_rows():
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        table, row = name.split(":")
        assert find(name) is TABLES[table].ROWS[row]
