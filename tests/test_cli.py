"""The command line, within this process and as users start it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import torchcaps
import torchcaps.cli
from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.models import list_models
from torchcaps.recipes import Recipe

ROOT = Path(__file__).parents[1]


def start(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "torchcaps", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, **options
    )


def test_list_prints_whole_names_and_both_figures_when_piped(capsys):
    assert main(["list", "efficient_capsnet_m*"]) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()
    assert header.split()[:2] == ["preset", "paper"]
    assert rows[0].split()[0] == "efficient_capsnet_mnist"
    assert rows[1].split()[0] == "efficient_capsnet_multimnist"
    for figure in ("Mazzia et al. 2021", "1x28x28", "161,824", "1,411,344", "161K", "0.060", "0.060G"):
        assert figure in rows[0]
    assert not err


def test_a_part_of_a_name_is_a_pattern(capsys):
    assert main(["list", "svhn", "--json"]) == 0
    assert [row["preset"] for row in json.loads(capsys.readouterr().out)] == list_models("*svhn*")


def test_json(capsys):
    assert main(["list", "capsnet_mnist", "--json", "--batch", "64"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["preset"] == "capsnet_mnist")
    memory = row.pop("memory")
    assert 4 * 4 * 8_215_568 < memory < 1e9
    assert row == {
        "preset": "capsnet_mnist",
        "paper": "Sabour et al. 2017",
        "image": [1, 28, 28],
        "classes": 10,
        "parameters": 6_804_224,
        "decoder": 1_411_344,
        "printed": "6.8M, 8.2M with decoder",
        "operations": 401_743_872,
        "operations_printed": "0.401G",
        "pretrained": False,
    }


def test_run_builds_for_real(capsys):
    assert main(["list", "mazzia_cnn_mnist", "--run"]) == 0
    assert "ok, 0." in capsys.readouterr().out


def test_run_tells_of_a_network_that_fails(capsys, monkeypatch):
    broken = torchcaps.create_model("mazzia_cnn_mnist")
    broken.classifier[-1].weight.data.fill_(float("nan"))
    monkeypatch.setattr(torchcaps.cli, "create_model", lambda name: broken)
    assert main(["list", "mazzia_cnn_mnist", "--run"]) == 2
    assert capsys.readouterr().err == "torchcaps: mazzia_cnn_mnist gives probabilities outside [0, 1]\n"


def test_summary_follows_image_classes_and_options(capsys):
    words = "summary capsnet_mnist --image 3 32 32 --classes 7 --option routing=self_attention decoder=false"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "images 3 x 32 x 32 and 7 classes" in out
    assert "LinearCaps (SelfAttentionRouting)  7 x 16" in out
    assert "32 x 8 x 8 x 8" in out
    assert "Decoder" not in out


def test_options_add_up_over_several_flags(capsys):
    assert (
        main(["summary", "capsnet_mnist", "--option", "form=official", "--option", "decoder=False", "iterations=1"])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("capsnet_mnist (Sabour et al. 2017) for images 1 x 28 x 28 and 10 classes\n")
    assert "6,804,384 parameters; 0.402 G operations" in out
    assert "iterations=1" in " ".join(out.splitlines()[-3:])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("lst", "there is no command 'lst'; did you mean list?"),
        ("fly", "there is no command 'fly'; there are recipes, train, evaluate, predict, "),
        ("tran quick:digits", "there is no command 'tran'; did you mean train?"),
        ("--verbose", "unrecognized options: --verbose; torchcaps --help tells more"),
        ("list --colour red", "unrecognized options: --colour, red; torchcaps list --help tells more"),
        ("list --batch many", "error parsing --batch: invalid literal for int() with base 10: 'many'; "),
        ("list --batch 0 capsnet_mnist", "batch must be 1 or more, got 0"),
        ("list nothing_like_it", "there is no preset 'nothing_like_it'; "),
        ("summary", "missing from torchcaps summary: NAME "),
        ("summary capsnt_mnist", "there is no preset 'capsnt_mnist'; did you mean capsnet_mnist, "),
        ("summary capsnet_mnist --image 1 28", "image must be three positive integers (channels, height, width), "),
        ("summary capsnet_mnist --image 1 12 12", "capsnet_mnist cannot take image 1 x 12 x 12"),
        ("summary capsnet_mnist --classes some", "classes must be a whole number, got 'some'"),
        ("summary capsnet_mnist --option iterations", "an option is KEY=VALUE, got 'iterations'"),
        ("summary capsnet_mnist --option iterations=few", "iterations must be a whole number from 1, got 'few'"),
        ("summary capsnet_mnist --option iterations=0", "iterations must be "),
        ("summary capsnet_mnist --option decoder=1", "decoder must be True or False, got 1"),
        ("summary capsnet_mnist --option form=new", 'form must be "paper" or "official", got \'new\''),
        ("summary capsnet_mnist --option shape=3", "capsnet_mnist has no option 'shape'; "),
        ("summary encapnet --option layers=3", "layers must be 4 numbers from 0, one for each module, got 3"),
    ],
)
def test_bad_input_gives_one_sentence_and_code_2(words, sentence, capsys):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"torchcaps: {sentence}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize("words", [[], ["--help"], ["list", "--help"], ["summary", "--help"]])
def test_help(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: torchcaps")
    assert "preset" in out


@pytest.mark.parametrize("command", list(torchcaps.cli.COMMANDS))
def test_every_command_is_named_and_helps(command, capsys):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: torchcaps {command} ")
    assert f"torchcaps {command} " in torchcaps.cli.DESCRIPTION


def test_the_help_of_train_names_every_field_and_gives_examples(capsys):
    assert main(["train", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for each in fields(Recipe):
        assert f"--{each.name.replace('_', '-')}" in out
    for example in re.findall(r"torchcaps train (\S+:\S+)", torchcaps.cli.TRAIN):
        recipes.find(example)
    assert "runs/TABLE-ROW/seed-S if not given" in out


def test_the_system_s_own_complaints_are_a_sentence(capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "runs")

    monkeypatch.setattr(torchcaps.cli, "_measure", refuse)
    assert main(["list", "svhn"]) == 2
    assert capsys.readouterr().err == "torchcaps: runs: Permission denied\n"


def test_interruption_is_quiet(capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torchcaps.cli, "_measure", stop)
    assert main(["list", "svhn"]) == 130
    assert not any(capsys.readouterr())


def test_as_users_start_it():
    version, wrong = start("--version"), start("list", "--colour", env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert (version.returncode, version.stdout) == (0, f"torchcaps {torchcaps.__version__}\n")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "torchcaps: unrecognized options: --colour; torchcaps list --help tells more\n"


@pytest.mark.parametrize("words", [["list", "mazzia_cnn_mnist", "--json"], ["summary", "capsnet_mnist"]])
def test_a_closed_pipe_is_silent(words):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        run = subprocess.run(
            [sys.executable, "-m", "torchcaps", *words], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert run.stderr == ""


def test_narrow_terminals_lose_columns_not_names(capsys, monkeypatch):
    monkeypatch.setattr(torchcaps.cli, "WIDE", 80)
    assert main(["list", "efficient"]) == 0
    out = capsys.readouterr().out
    assert "efficient_capsnet_multimnist" in out
    assert "161,824" in out
    assert "paper" in out.splitlines()[-1]
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_plain_terminals_get_plain_letters():
    run = start("summary", "capsnet_mnist", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0, run.stderr
    assert "6,804,224 parameters" in run.stdout
