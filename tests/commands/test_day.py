"""A day in the life of a new user, in processes of its own: look, train, Ctrl-C, resume, evaluate, print the table."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchcaps.results import read

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
TRAIN = ["train", "quick:digits", "--epochs", "4", "--samples", "320", "--device", "cpu"]


def start(place, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "torchcaps", *words],
        cwd=place,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(place, *words):
    process = start(place, *words)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_day(tmp_path):
    process = start(tmp_path, *TRAIN)
    first = process.stderr.readline()
    assert first.startswith("epoch 1/4: loss "), first
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert out.startswith("quick:digits: efficient_capsnet ")
    assert err.splitlines()[-1].startswith("saved at step ")
    assert err.splitlines()[-1].endswith("; the same command with --resume goes on")
    code, out, err = run(tmp_path, *TRAIN, "--resume")
    assert code == 0, err
    assert "goes on from step " in err
    folder = tmp_path / "runs" / "quick-digits-epochs-4-samples-320" / "seed-0"
    report = folder.relative_to(tmp_path) / "report.html"
    assert out.splitlines()[-1].startswith("test accuracy ")
    assert out.splitlines()[-1].endswith(f"; report: {report}")
    page = (tmp_path / report).read_text()
    assert page.count("data:image/png;base64,") >= 3
    assert {"curves.png", "confusion.png", "recipe.json", "metrics.csv"} <= {path.name for path in folder.iterdir()}
    (line,) = read(folder.parent / "quick.jsonl")
    code, out, err = run(tmp_path, "evaluate", str(folder.relative_to(tmp_path)))
    assert code == 0, err
    assert f"test error {100 * line.test['error']:.2f} %" in out
    assert "(as stored; the test set has been read once for this)" in out
    code, out, err = run(tmp_path, "table", "quick")
    assert code == 0, err
    assert f"{100 * line.test['accuracy']:.2f}  1" in out
