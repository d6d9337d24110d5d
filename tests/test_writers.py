"""The study of rows on writers held out, on the digits in the package."""

import re
from functools import partial

import pytest
import torch

from benchmarks import writers
from torchcaps.data import load
from torchcaps.evaluate import Predictions

SHORT = "quick:digits epochs=1 samples=64 lr=0.001"


@pytest.fixture
def in_this_process(monkeypatch):
    """In place of a pool, whose processes would import torch for seconds."""

    class Pool:
        def __init__(self, processes):
            self.processes = processes

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def map(self, function, jobs, chunksize):
            return [function(job) for job in jobs]

    monkeypatch.setattr(writers.multiprocessing, "get_context", lambda _: type("Context", (), {"Pool": Pool}))


def test_every_image_is_judged_once_and_a_finished_part_is_passed_over(in_this_process, tmp_path, capsys, monkeypatch):
    seen = []
    trained = []
    monkeypatch.setattr(writers, "ensemble", lambda members: seen.append(members) or members[0])
    train = writers.train
    monkeypatch.setattr(writers, "train", lambda recipe, **more: trained.append(recipe) or train(recipe, **more))
    call = partial(writers.main, [SHORT, f"{SHORT} seeds=2", "--parts", "2", "--out", str(tmp_path)])
    assert call() == 0
    first = capsys.readouterr().out
    whole = load("digits", validation=0).train
    assert [recipe.validation for recipe in trained] == ["part-1-of-2", "part-2-of-2"] * 2
    assert all(torch.equal(member.labels, whole.labels) for member in seen[0])
    table = first[first.index(" wrong ") :].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == [SHORT, f"{SHORT} seeds=2", "all together"]
    parts = [int(n) for n in re.findall(r": (\d+) of 7\d\d wrong", first)]
    wrong, _, even, odd = table[0].split()[-4:]
    assert int(wrong) == sum(parts[:2]) == int(even) + int(odd)
    assert call() == 0
    assert len(trained) == 4
    assert capsys.readouterr().out == first


def test_mistakes_are_told_by_the_place_of_a_digit():
    scores = torch.eye(10)[torch.tensor([0, 1, 2, 3, 4])]
    labels = torch.tensor([1, 1, 3, 4, 5])
    assert writers.told("name", Predictions(scores, scores, labels)).split() == ["name", "4", "80.000", "3", "1"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["ours:mnist-plane5"], "mnist-plain5"), (["quick:digits lr=much"], "lr"), (["quick:digits lr"], "lr")],
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
        pen = k // 200 + 3 * (k % 2)
        images[k, 4:24, 8 : 10 + 2 * pen] = 255
    split = type(digits)(images, torch.arange(600) // 2 % 10, digits.class_names)
    monkeypatch.setattr(writers, "load", lambda *_, **__: type("Data", (), {"train": split}))
    assert writers.main(["--order"]) == 0
    lags, _, thickness = (line.split() for line in capsys.readouterr().out.splitlines())
    found = dict(zip(map(int, lags[1:]), map(float, thickness[1:]), strict=True))
    assert all((found[lag] > 0.5) == (lag % 2 == 0) for lag in (1, 2, 3, 4, 9, 10, 49, 50))
