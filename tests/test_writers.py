"""The study of rows on writers held out, on the digits in the package."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import writers
from torchcaps import recipes
from torchcaps.data import load
from torchcaps.evaluate import Predictions

SHORT = "quick:digits epochs=1 samples=64 lr=0.001"


@pytest.fixture
def in_this_process(monkeypatch):
    """In place of a pool, whose processes would import torch for seconds."""

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def map(self, function, jobs):
            return map(function, jobs)

    monkeypatch.setattr(writers, "ProcessPoolExecutor", Pool)


def test_every_image_is_judged_once_and_a_finished_part_is_passed_over(in_this_process, tmp_path, capsys, monkeypatch):
    seen = []
    trained: list[tuple] = []
    monkeypatch.setattr(writers, "ensemble", lambda members: seen.append(members) or members[0])
    train = writers.train
    monkeypatch.setattr(
        writers, "train", lambda recipe, **more: trained.append((recipe, more)) or train(recipe, **more)
    )
    call = partial(writers.main, [SHORT, f"{SHORT} seed=2", "--parts", "2", "--out", str(tmp_path)])
    assert call() == 0
    first = capsys.readouterr().out
    whole = load("digits", validation=0).train
    assert [recipe.validation for recipe, _ in trained] == ["part-1-of-2", "part-2-of-2"] * 2
    assert [more["seed"] for _, more in trained] == [0, 0, 2, 2]
    assert all(torch.equal(member.labels, whole.labels) for member in seen[0])
    table = first[first.index(" wrong ") :].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == [SHORT, f"{SHORT} seed=2", "all together", "wrong for every one"]
    parts = [int(n) for n in re.findall(r": (\d+) of 7\d\d wrong", first)]
    wrong, _, even, odd = table[0].split()[-4:]
    assert int(wrong) == sum(parts[:2]) == int(even) + int(odd)
    assert call() == 0
    assert len(trained) == 4
    assert capsys.readouterr().out == first
    monkeypatch.setitem(recipes.tables()["quick"].ROWS, "digits", replace(recipes.find("quick:digits"), clip=1.0))
    assert call() == 2
    assert "was trained with another clip" in capsys.readouterr().err


def test_a_training_that_is_stopped_ends_with_a_sentence(in_this_process, tmp_path, capsys, monkeypatch):
    train = writers.train
    monkeypatch.setattr(writers, "train", lambda recipe, **more: train(recipe, limit=1, **more))
    assert writers.main([SHORT, "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err.endswith("was stopped by limit; the same command goes on\n")


def test_mistakes_are_told_by_the_place_of_a_digit():
    scores = torch.eye(10)[torch.tensor([0, 1, 2, 3, 4])]
    labels = torch.tensor([1, 1, 3, 4, 5])
    missed = writers.wrong(Predictions(scores, scores, labels))
    assert writers.told("name", missed).split() == ["name", "4", "80.000", "3", "1"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["quick:digit"], "did you mean digits"),
        (["quick:digits lr=much"], "lr"),
        (["quick:digits lr"], "lr is no change"),
        (["quick:digits seed=x"], "seed must be"),
        (["quick:digits model_args.backbone=plane5"], "plain5"),
        (["quick:digits", "--parts", "1"], "--parts must be at least 2"),
        (["quick:digits", "--at-once", "0"], "--at-once at least 1"),
        ([], "name a row"),
    ],
)
def test_a_wrong_row_is_one_sentence(words, sentence, tmp_path, capsys):
    assert writers.main([*words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_order_tells_digits_of_one_writer_from_others(monkeypatch, capsys):
    """Six pens in turn of two, each for some digits."""
    digits = load("digits", validation=0).train
    images = torch.zeros(600, 28, 28, dtype=torch.uint8)
    for k in range(600):
        pen = [1, 4, 2, 5, 1, 5][k // 200 + 3 * (k % 2)]
        images[k, 4:24, 8 : 10 + 2 * pen] = 255
    split = type(digits)(images, torch.arange(600) // 2 % 10, digits.class_names)
    monkeypatch.setattr(writers, "load", lambda *_, **__: type("Data", (), {"train": split}))
    assert writers.main(["--order"]) == 0
    lags, _, thickness = (line.split() for line in capsys.readouterr().out.splitlines())
    found = dict(zip(map(int, lags[1:]), map(float, thickness[1:]), strict=True))
    assert all((found[lag] > 0.5) == (lag % 2 == 0) for lag in (1, 2, 3, 4, 9, 10, 49, 50))
