"""Rows that are trained side by side: which begins when, what time and failures do to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import rows
from torchcaps.results import read

FAKE = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print("saved"), sys.exit(143)))
name, seconds, code = sys.argv[2:5]
with open("events", "a") as events:
    events.write(json.dumps(["begun", name, sys.argv[5:]]) + "\\n")
time.sleep(float(seconds))
with open("events", "a") as events:
    events.write(json.dumps(["done", name, []]) + "\\n")
print("first\\rlast words of", name)
sys.exit(int(code))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    Path(tmp_path, "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows, "PROGRAM", (sys.executable, "fake.py"))


def call(monkeypatch, plan, *options):
    Path("plan").write_text(plan)
    monkeypatch.setattr(sys, "argv", ["rows", "plan", *options])
    return rows.main()


def events():
    return [tuple(json.loads(line)[:2]) for line in Path("events").read_text().splitlines()]


def test_so_many_at_once_and_evaluations_after_all_before_them(fake, monkeypatch, capsys):
    plan = "torchcaps train a 0.6 0  # quick\n\n# no command\ntrain b 0.1 0\nevaluate c 0.1 0\ntrain d 0.1 0\n"
    assert call(monkeypatch, plan, "--at-once", "2") == 0
    found = events()
    assert {found[0], found[1]} == {("begun", "a"), ("begun", "b")}
    assert found.index(("begun", "c")) > max(found.index(("done", "a")), found.index(("done", "b")))
    assert found.index(("begun", "d")) < found.index(("begun", "c"))
    out = capsys.readouterr().out
    assert "done after" in out
    assert "last words of a" in out
    assert out.endswith("4 of 4 done\n")
    given = {json.loads(line)[1]: json.loads(line)[2] for line in Path("events").read_text().splitlines()[::-1]}
    assert (given["a"], given["c"]) == (["--resume"], [])


def test_a_failure_is_told_and_keeps_nobody_from_working(fake, monkeypatch, capsys):
    assert call(monkeypatch, "train a 0 7\ntrain b 0 0\n") == 1
    out = capsys.readouterr().out
    assert "FAILED after" in out
    assert out.endswith("1 of 2 done, 1 failed\n")


def test_when_time_is_up_all_are_asked_to_save_themselves(fake, monkeypatch, capsys):
    assert call(monkeypatch, "train a 60 0\ntrain b 0 0\n", "--minutes", "0.02") == 3
    out = capsys.readouterr().out
    assert "stopped: 1. train a 60 0\n    saved\n" in out
    assert out.endswith("0 of 2 done\n")


def test_asked_to_end_it_asks_all_of_them_also_in_the_background(fake, tmp_path):
    """Where a shell without a terminal has put it, Ctrl-C is ignored; SIGTERM is not."""
    Path("plan").write_text("train a 60 0\ntrain b 60 0\n")
    program = f"import sys; from benchmarks import rows; rows.PROGRAM = {rows.PROGRAM!r}; sys.exit(rows.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "plan", "--at-once", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(rows.__file__).parents[1])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        until = time.monotonic() + 30
        while not (Path("events").exists() and len(events()) == 2) and time.monotonic() < until:
            time.sleep(0.05)
        for _ in range(2):  # the second while they save themselves
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 3
    assert "stopped: 1. train a 60 0\n    saved\nstopped: 2. train b 60 0\n    saved\n" in out


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("", "the plan has no command; torchcaps table --commands prints some"),
        ("rm -r runs", "line 1 must be torchcaps train or torchcaps evaluate, got 'rm -r runs'"),
        ("train 'a", "No closing quotation"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(fake, monkeypatch, capsys, plan, sentence):
    assert call(monkeypatch, plan) == 2
    assert sentence in capsys.readouterr().err


def test_a_row_is_trained_once_however_often_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = "torchcaps train quick:digits --epochs 1 --samples 64 --out run --results all.jsonl --device cpu\n"
    assert [call(monkeypatch, plan) for _ in range(2)] == [0, 0]
    assert len(read("all.jsonl")) == 1
    assert "test accuracy" in capsys.readouterr().out
