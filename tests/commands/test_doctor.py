"""`torchcaps doctor` says what is there, and whether it works."""

import json
import platform

import torch

import torchcaps
import torchcaps.commands.doctor as examined
from torchcaps.cli import main
from torchcaps.data import load


def test_everything_is_said(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mnist").mkdir(parents=True)
    (tmp_path / "cache" / "mnist" / "file").write_bytes(bytes(3 << 20))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torchcaps {torchcaps.__version__} (commit " in out
    assert f"Python {platform.python_version()}" in out
    assert f"torch {torch.__version__}" in out
    assert "bf16; trains: yes" in out
    assert "matplotlib (curves, confusion matrix and the report of a run): " in out
    assert f"data in {tmp_path / 'cache'}" in out
    assert "  mnist: 3.0 MiB" in out


def test_as_json(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "not" / "yet"))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["device"] == "cpu"
    assert len(found["devices"]) == 1 + torch.cuda.device_count() + torch.backends.mps.is_available()
    assert found["devices"][0]["memory"] > 2**28
    assert found["cache"]["sets"] == {}
    assert found["cache"]["free"] > 0
    assert set(found["extras"]) == {"matplotlib", "PIL", "scipy", "tensorboard"}
    assert len(load("digits").test) == 360


def test_what_is_missing_and_what_does_not_work(capsys, monkeypatch):
    def broken(device):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(examined, "try_out", broken)
    monkeypatch.setattr(examined, "find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "trains: no: no kernel image\n" in out
    assert "  scipy (SVHN and affNIST): missing, pip install 'torchcaps[data]'" in out
    assert "triton is not there" in out
