"""What the files of run folders tell, on folders that were written by hand."""

import json
import math
from dataclasses import replace

import pytest
import torch

from torchcaps.analysis import compare, costs, histories, sample, settings
from torchcaps.data import DataSet, Stored, load
from torchcaps.evaluate import Predictions
from torchcaps.models import create_model
from torchcaps.models.measure import parameters, training_memory
from torchcaps.recipes import Recipe
from torchcaps.runs import Opened
from torchcaps.train import checkpoint
from torchcaps.train.routing_log import routing_log

SMALL = {"image": (1, 8, 8), "classes": 10, "backbone": "simple", "width": 4, "types": 2, "dim": 4, "convs": ((2, 1),)}
EDGES = {"cosine_edges": [-1.0, 0.0, 1.0], "length_edges": [0.1, 1.0, 10.0, 100.0]}


@pytest.fixture
def opened(tmp_path):
    """A run as `open_run` gives it, of a folder with these files."""

    def make(name="run", losses=(0.5, 0.25), errors=(0.2, 0.1), term="margin", test=None, routing=None, **recipe):
        folder = tmp_path / name
        folder.mkdir()
        lines = [f"epoch,step,lr,loss,{term},validation_error"]
        lines += [
            f"{k + 1},{10 * (k + 1)},0.1,{2 * loss},{loss},{error}"
            for k, (loss, error) in enumerate(zip(losses, errors, strict=True))
        ]
        (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
        (folder / "final.json").write_text('{"seconds": 12.5}')
        if test is not None:
            (folder / "test.json").write_text(json.dumps({"figures": {"error": test, "standard_error": 0.01}}))
        if routing is not None:
            (folder / "routing.jsonl").write_text("".join(json.dumps({**EDGES, **row}) + "\n" for row in routing))
        made = replace(Recipe(model="inverted_capsnet", data="digits", model_args=dict(SMALL)), **recipe)
        network = create_model(made.model, **made.model_args)
        network = network.eval().requires_grad_(False)
        names = tuple("0123456789")
        return Opened(folder, made, 0, network, (1, 8, 8), names, 2, None, torch.device("cpu"))

    return make


def layer(routing, logits=(), cosine=(1, 3), lengths=(0, 2, 2), along=(0.5, 2.0)):
    return {
        "routing": routing,
        "logits": list(logits),
        "cosine": list(cosine),
        "cosine_lengths": list(along),
        "lengths": list(lengths),
    }


def test_logit_changes(opened):
    rows = [
        {
            "epoch": 1,
            "images": 8,
            "layers": {"a": layer("DynamicRouting", [0.4, 0.1]), "b": layer("SelfAttentionRouting")},
        },
        {
            "epoch": 2,
            "images": 8,
            "layers": {"a": layer("DynamicRouting", [0.2, None]), "b": layer("SelfAttentionRouting")},
        },
    ]
    found = histories.logit_changes([opened(routing=rows)], {"images": 2})
    (only,) = found["layers"]
    changes = {"epochs": [1, 2], "changes": [[0.4, 0.1], [0.2, None]], "further": []}
    assert only == {"name": "a", "place": [1, 2], "routing": "Dynamic", **changes}
    assert found["paper"] == {}
    gone = opened("mnist", routing=rows, data="nowhere")
    gone.recipe = replace(gone.recipe, data="mnist")
    gone.data = lambda: load("nowhere")
    assert histories.logit_changes([gone], {"images": 2})["paper"] == {
        "2": 0.007,
        "5": 1e-5,
    }


def test_the_trained_network_is_asked_for_five_iterations(opened):
    run = opened(model="capsnet", model_args={"image": (1, 20, 20), "channels": 4, "types": 2, "decoder": False})
    split = Stored(torch.randint(0, 256, (6, 1, 20, 20), dtype=torch.uint8), torch.arange(6), tuple("0123456789"))
    run.data = lambda: DataSet("made", split, split)
    images = sample.take(run, 6).seen()
    log = routing_log(run.model, images)
    (run.folder / "routing.jsonl").write_text(json.dumps({"epoch": 1, **log}) + "\n")
    (only,) = histories.logit_changes([run], {"images": 6})["layers"]
    assert (len(only["changes"][0]), len(only["further"])) == (3, 5)
    assert only["further"][:3] == pytest.approx(only["changes"][0], rel=1e-6)
    assert settings.iterations_of(run.model) == 3


def test_no_iterations_and_no_log_are_said(opened):
    rows = [{"epoch": 1, "layers": {"b": layer("SelfAttentionRouting")}}]
    with pytest.raises(ValueError, match="routes without iterations, so no logit changes"):
        histories.logit_changes([opened(routing=rows)], {"images": 2})
    with pytest.raises(ValueError, match="has no routing log"):
        histories.agreement([opened("other")], {})


def test_agreement(opened):
    rows = [{"epoch": k, "layers": {"a": layer("EMRouting", cosine=(k, 10 - k))}} for k in range(1, 8)]
    (found,) = histories.agreement([opened(routing=rows)], {})["runs"]
    assert [panel["epoch"] for panel in found["panels"]] == [1, 3, 5, 7]
    assert found["panels"][0]["cosine"] == [0.1, 0.9]
    assert found["panels"][0]["lengths"] == [0.0, 0.5, 0.5]
    assert (found["dissimilar"], found["similar_length"], found["paper_dissimilar"]) == (0.7, 2.0, 0.2)
    with pytest.raises(ValueError, match="has no layer 'c'; it has a"):
        histories.agreement([opened("other", routing=rows)], {"layer": "c"})


def test_losses_are_ordered_by_iterations(opened):
    three = opened("three", model_args={**SMALL, "iterations": 3})
    one = opened("one", model_args={**SMALL, "iterations": 1}, losses=(0.75, 0.5))
    found = histories.losses([three, one], {})
    assert [each["iterations"] for each in found["series"]] == [1, 3]
    assert [each["name"] for each in found["series"]] == [
        "inverted_capsnet, iterations 1",
        "inverted_capsnet, iterations 3",
    ]
    assert found["series"][0]["loss"] == [1.5, 1.0]
    assert found["series"][0]["steps"] == [10, 20]
    assert found["data"] == "digits"


def test_names(opened):
    same = [opened("a"), opened("b")]
    assert settings.names_of(same) == ["a", "b"]
    faster = replace(same[1], recipe=replace(same[1].recipe, lr=0.5))
    assert settings.names_of([same[0], faster]) == ["inverted_capsnet, lr 0.001", "inverted_capsnet, lr 0.5"]
    assert settings.names_of([same[0], replace(same[1], seed=4)]) == [
        "inverted_capsnet, seed 0",
        "inverted_capsnet, seed 4",
    ]
    plain = opened("c", model_args={**SMALL, "iterations": 2})
    assert settings.iterations_of(plain.model) == 2
    other = opened("d", model="capsnet", model_args={"image": (1, 28, 28), "channels": 4, "types": 1, "decoder": False})
    assert settings.names_of([plain, other]) == ["inverted_capsnet", "capsnet"]


def test_gain_of_feedback(opened):
    runs = [
        opened("without", model="encapnet6_cifar10", model_args={}, test=0.0582, losses=(0.4, 0.2)),
        opened("with", model="encapnet6_cifar10", model_args={"feedback": "ot"}, test=0.0458, losses=(0.3, 0.1)),
    ]
    found = histories.feedback(runs, {})
    (gain,) = found["gains"]
    assert math.isclose(gain["gain"], (5.82 - 4.58) / 5.82)
    assert [each["loss"] for each in found["series"]] == [[0.4, 0.2], [0.3, 0.1]]  # the margin loss alone
    with pytest.raises(ValueError, match="all of these are without"):
        histories.feedback(runs[:1], {})


def test_trained_points_and_costs(opened):
    runs = [
        opened(f"{n}-{test}", model_args={**SMALL, "iterations": n}, test=test)
        for n, test in ((1, 0.3), (2, 0.2), (2, 0.1))
    ]
    found = costs.by_iteration(runs, {"images": 8, "batch": 16})
    (line,) = found["lines"]
    assert line["trained"]
    assert line["name"] == "inverted_capsnet"
    first, second = line["points"]
    assert (first["iterations"], first["accuracy"], first["spread"]) == (1, 0.7, None)
    assert math.isclose(second["accuracy"], 0.85)
    assert math.isclose(second["spread"], math.sqrt(0.005))
    longer = replace(runs[1], recipe=replace(runs[1].recipe, epochs=runs[1].recipe.epochs + 1))
    apart = costs.by_iteration([runs[0], longer], {"images": 8, "batch": 16})["lines"]
    assert [each["trained"] for each in apart] == [False, False]  # of different recipes, so no line goes through both
    assert len({each["name"] for each in apart}) == 2
    trainable = create_model("inverted_capsnet", **SMALL, iterations=1)
    assert first["memory"] == training_memory(trainable, 16) < second["memory"]
    assert costs.count_weights(runs[0].model) == parameters(trainable).network
    assert not any(p.requires_grad for p in runs[0].model.parameters())


def test_one_network_with_other_iterations(opened):
    run = opened(model_args={**SMALL, "iterations": 2})
    (line,) = costs.by_iteration([run], {"images": 32, "batch": 8})["lines"]
    assert not line["trained"]
    assert [point["iterations"] for point in line["points"]] == [1, 2, 3, 4, 5]
    assert run.model.body.iterations == 2
    assert all(0 <= point["accuracy"] <= 1 and point["milliseconds"] > 0 for point in line["points"])


@pytest.mark.parametrize(
    ("name", "options", "places"),
    [
        ("inverted_capsnet", SMALL, ["body"]),
        ("inverted_capsnet", {**SMALL, "concurrent": False}, ["body.layers.0.routing", "body.layers.1.routing"]),
        ("capsnet", {"image": (1, 28, 28), "channels": 4, "types": 1, "iterations": 1}, ["body.layers.0.routing"]),
    ],
)
def test_where_iterations_are_set(name, options, places):
    network = create_model(name, **options)
    changed = settings.with_iterations(network, 7)
    assert [n for n, m in changed.named_modules() if getattr(m, "iterations", None) == 7] == places
    assert not [n for n, m in network.named_modules() if getattr(m, "iterations", None) == 7]


def test_no_iterations_to_set():
    with pytest.raises(ValueError, match="routes without iterations"):
        settings.with_iterations(create_model("efficient_capsnet_mnist"), 2)


def test_convergence(opened):
    run = opened(test=0.05, reported="95.14")
    (found,) = costs.convergence([run], {"batch": 8})["series"]
    assert found["accuracy"] == [0.8, 0.9]
    assert (found["test"], found["paper"], found["parameters"]) == (0.95, "95.14", costs.count_weights(run.model))


def test_table_1():
    rows = {row["preset"]: row for row in costs.table_1([], {})["rows"]}
    capsnet, efficient = rows["capsnet_mnist"], rows["efficient_capsnet_mnist"]
    assert (efficient["parameters"], capsnet["parameters"]) == (161_824, 6_804_224)
    assert round(capsnet["operations"] / 1e9, 3) == 0.402
    assert round(efficient["operations"] / 1e9, 3) == 0.060
    assert round(100 * capsnet["gain"], 1) == 85.0
    assert math.isclose(capsnet["paper_gain"], 0.8504, abs_tol=1e-4)
    ar = rows["ar_capsnet_mnist"]
    assert round((ar["parameters"] + ar["decoder"]) / 1e6, 2) == 5.31


def test_p_values():
    assert compare.exact_p_value(0, 0) == 1
    assert compare.exact_p_value(5, 5) == 1
    assert compare.exact_p_value(1, 9) == 2 * (1 + 10) / 2**10
    assert compare.exact_p_value(9, 1) == compare.exact_p_value(1, 9)


def test_right_of_one_label_and_of_several():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.6, 0.9], [0.9, 0.1, 0.2]])
    assert sample.right(Predictions(scores, scores, torch.tensor([0, 1, 2]))).tolist() == [True, False, False]
    pairs = torch.tensor([[0, 1], [2, 1], [1, 2]])
    assert sample.right(Predictions(scores, scores, pairs)).tolist() == [True, True, False]
    varied = torch.tensor([[0, 1], [2, -1], [0, -1]])
    assert sample.right(Predictions(scores, scores, varied)).tolist() == [True, False, True]


def test_side_by_side(opened):
    first, second = opened("first", test=0.2), opened("second", test=0.4, lr=0.5, model_args={**SMALL, "iterations": 3})
    labels = first.data().test.labels[: len(first.data().test)]
    wrong = (labels + 1) % 10
    said = [labels.clone(), labels.clone()]
    said[0][0], said[1][3], said[1][5], said[0][7], said[1][7] = wrong[0], wrong[3], wrong[5], wrong[7], wrong[7]
    for run, classes in zip((first, second), said, strict=True):
        scores = torch.nn.functional.one_hot(classes, 10).float()
        tensors = {"scores": scores, "probabilities": scores.clone(), "labels": labels}
        checkpoint.save_weights(run.folder / "predictions.safetensors", tensors, {})
    found = compare.side_by_side([first, second], {"images": 1})
    test = found["test"]
    assert (test["only_first"], test["only_second"], test["neither"]) == (2, 1, 1)
    assert test["both"] == test["images"] - 4
    (case,) = test["cases"]["only_first"]
    assert (case["number"], case["labels"]) == (3, [str(int(labels[3]))])
    assert (case["first"], case["second"]) == (case["labels"], [str(int(wrong[3]))])
    differing = {each["setting"]: (each["first"], each["second"]) for each in found["differences"]}
    assert differing == {"lr": ("0.001", "0.5"), "model_args.iterations": ("2", "3")}
    assert found["runs"][0]["test_error"] == 0.2
    json.dumps(found, allow_nan=False)


def test_side_by_side_of_runs_that_were_not_tested(opened):
    found = compare.side_by_side([opened("first"), opened("second")], {"images": 1})
    assert found["test"] is None
    assert found["runs"][0]["test_error"] is None
