"""The study of rows on writers held out, on the digits in the package."""

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import writers
from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.data import load
from torchcaps.evaluate import Predictions
from torchcaps.runs import read_recipe

SHORT = "quick:digits epochs=1 samples=64 lr=0.001"


@pytest.fixture
def trained(monkeypatch):
    """The commands that were worked off, here one after the other in this process."""
    words: list[list[str]] = []

    def run(plan, at_once, minutes, logs):
        words.extend(plan)
        return max(main(line) or 0 for line in plan)

    monkeypatch.setattr(writers.rows, "run", run)
    return words


def test_every_image_is_judged_once_and_a_finished_part_is_passed_over(trained, tmp_path, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(writers, "ensemble", lambda members: seen.append(members) or members[0])
    call = partial(writers.main, [SHORT, f"{SHORT} seed=2", "--parts", "2", "--out", str(tmp_path)])
    assert call() == 0
    first = capsys.readouterr().out
    runs = [read_recipe(Path(words[-1])) for words in trained]
    assert [recipe.validation for recipe, _ in runs] == ["part-1-of-2", "part-2-of-2"] * 2
    assert [seed for _, seed in runs] == [0, 0, 2, 2]
    assert all(recipe.samples == 64 for recipe, _ in runs)
    whole = load("digits", validation=0).train
    assert all(torch.equal(member.labels, whole.labels) for member in seen[0])
    assert not any((Path(words[-1]) / "test.json").exists() for words in trained)
    table = first[first.index(" wrong ") :].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == [SHORT, f"{SHORT} seed=2", "all together", "wrong for every one"]
    wrong, _, even, odd = map(float, table[0].split()[-4:])
    last = [
        list(csv.DictReader((Path(words[-1]) / "metrics.csv").read_text().splitlines()))[-1] for words in trained[:2]
    ]
    parts = [len(part.validation) for part in (load("digits", validation=f"part-{k}-of-2") for k in (1, 2))]
    assert wrong == even + odd
    assert wrong == pytest.approx(sum(float(row["validation_error"]) * n for row, n in zip(last, parts, strict=True)))
    assert call() == 0
    assert len(trained) == 4
    assert capsys.readouterr().out.endswith("\n".join(table) + "\n")
    monkeypatch.setitem(recipes.tables()["quick"].ROWS, "digits", replace(recipes.find("quick:digits"), clip=1.0))
    assert call() == 2
    assert "was trained with another clip" in capsys.readouterr().err


def test_what_is_not_finished_is_not_judged(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(writers.rows, "run", lambda *_: 3)
    assert writers.main([SHORT, "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().out == ""


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
