"""Whether the fast path learns as well: the program runs, and says no where means are too far apart."""

import sys

import pytest

from benchmarks import accuracy
from torchcaps import recipes


@pytest.fixture
def called(monkeypatch, capsys):
    def call(*options):
        monkeypatch.setattr(sys, "argv", ["accuracy.py", "--device", "cpu", *options])
        return accuracy.main(), capsys.readouterr().out

    return call


def test_both_ways_are_trained_and_compared(called, monkeypatch):
    monkeypatch.setattr(accuracy, "ROWS", {"digits": ("quick:digits", {"epochs": 1})})
    code, out = called("--seeds", "2", "--samples", "64")
    assert code == 0
    row = out.splitlines()[-1]
    assert row.startswith("digits ")
    assert row.endswith("std. errors")


@pytest.mark.parametrize(("fast", "code"), [((1.1, 0.9, 1.0), 0), ((2.1, 1.9, 2.0), 1)])
def test_means_too_far_apart(called, monkeypatch, fast, code):
    def found(recipe, seeds, device, reference):
        return list((1.0, 1.1, 0.9) if reference else fast), 1.0

    monkeypatch.setattr(accuracy, "errors", found)
    assert called("--rows", "capsnet", "--seeds", "3")[0] == code


@pytest.mark.parametrize("row", accuracy.ROWS)
def test_rows_are_recipes_that_hold_images_out(row):
    recipe = accuracy.short(row)
    assert (recipe.validation, recipe.select) == (0.1, "last")
    assert recipe.epochs < recipes.find(accuracy.ROWS[row][0]).epochs
