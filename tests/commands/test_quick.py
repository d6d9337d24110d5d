"""`torchcaps quick` on digits, as `make run` calls it where MNIST cannot be had."""

from dataclasses import replace

import pytest

import torchcaps.train as engine
from torchcaps import cli
from torchcaps.commands import quick
from torchcaps.data import DataError
from torchcaps.data.errors import NotWritten
from torchcaps.recipes import quick as table
from torchcaps.train import prepare


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Two epochs of four steps; MNIST is out of reach."""
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)
    for name, row in table.ROWS.items():
        monkeypatch.setitem(table.ROWS, name, replace(row, epochs=2, samples=128))
    real = prepare.load_data

    def refuse(recipe):
        if recipe.data == "mnist":
            raise DataError("there is no network")
        return real(recipe)

    monkeypatch.setattr(prepare, "load_data", refuse)


def test_from_nothing_to_the_report_and_once_more(tmp_path, capsys, monkeypatch):
    assert cli.main(["quick", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = tmp_path / "quick-digits" / "seed-0" / "report.html"
    assert lines[0] == quick.WHY
    assert lines[-2].startswith("test accuracy ")
    assert lines[-1] == f"report: {report}"
    assert report.exists()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def never(*args, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr(engine, "train", never)
    assert cli.main(["quick", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[0], *lines[-2:]]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_goes_on(tmp_path, capsys, monkeypatch):
    real = engine.train

    def until(step):
        return lambda *args, **options: real(*args, **options, limit=step)

    monkeypatch.setattr(engine, "train", until(3))
    assert cli.main(["quick", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "saved at step 3; the same command goes on" in told.err
    assert "report" not in told.out
    monkeypatch.setattr(engine, "train", real)
    assert cli.main(["quick", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "goes on from step 3" in told.err
    assert told.out.splitlines()[-1].endswith("report.html")


def test_a_run_that_ended_halfway_says_how_it_goes_on(tmp_path, capsys, monkeypatch):
    def interrupt(session):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchcaps.train.loop.end_epoch", interrupt)
    assert cli.main(["quick", "--out", str(tmp_path)]) == 130
    folder = tmp_path / "quick-digits" / "seed-0"
    assert cli.main(["evaluate", str(folder)]) == 2
    assert f"torchcaps train quick:digits --resume --out {folder} goes on" in capsys.readouterr().err


def test_a_full_disk_is_no_reason_for_other_data(tmp_path, capsys, monkeypatch):
    def full(recipe):
        raise NotWritten("the disk is full")

    monkeypatch.setattr(prepare, "load_data", full)
    assert cli.main(["quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "torchcaps: the disk is full\n"
    assert not list(tmp_path.iterdir())
