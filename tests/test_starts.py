"""What new networks answer, as a table."""

from dataclasses import replace

import pytest
import torch

from benchmarks import starts
from torchcaps.train.prepare import load_data


def test_a_line_for_each_row(capsys):
    assert starts.main(["quick:digits", "--images", "8"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "length", "score", "spread"]
    name, length, score, spread = line.split()
    assert name == "quick:digits"
    assert 0 < float(spread) < float(length) < 1
    assert float(length) == float(score)
    assert starts.named("tsai2020_figure4")[:2] == ["tsai2020_figure4:inverted-1", "tsai2020_figure4:inverted-2"]


def test_images_come_as_they_do_in_training(monkeypatch, capsys):
    def blank(images, generator):
        return torch.zeros_like(images)

    plain = starts.start(starts.recipes.find("quick:digits"), 8)
    monkeypatch.setattr(starts, "load_data", lambda recipe: replace(load_data(recipe), train_transform=(blank,)))
    assert starts.start(starts.recipes.find("quick:digits"), 8)[2] < plain[2] / 100


def test_a_network_without_class_capsules_is_passed_over(monkeypatch, capsys):
    capsules = starts.recipes.find("quick:digits")
    found = {"quick:cnn": replace(capsules, model="cnn_mnist", model_args={}), "quick:digits": capsules}
    monkeypatch.setattr(starts.recipes, "find", found.__getitem__)
    data = load_data(capsules)
    monkeypatch.setattr(starts, "load_data", lambda recipe: data)
    assert starts.main([*found]) == 0
    _, without, behind = capsys.readouterr().out.splitlines()
    assert without.split() == ["quick:cnn", "no", "class", "capsules"]
    assert len(behind.split()) == 4


@pytest.mark.parametrize(("row", "said"), [("nobody", "there is no recipe"), ("quick:nobody", "quick has no row")])
def test_what_there_is_not_is_one_sentence(row, said, capsys):
    assert starts.main(["quick:digits", row]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"starts: {said} 'nobody'")
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_one_image_has_no_spread(capsys):
    assert starts.main(["quick:digits", "--images", "1"]) == 2
    assert capsys.readouterr() == ("", "starts: scores spread over two images or more, got --images 1\n")
