"""Commands that train finished runs again."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rows import read_plan
from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.commands.train import train_row
from torchcaps.commands.words import choose, in_fewer_epochs, overrides, with_fields
from torchcaps.results import Result, read
from torchcaps.results.again import commands, missing, words
from torchcaps.results.plan import GROUPS

ROOT = Path(__file__).parents[2]
PUBLISHED = [result for result in read(ROOT / "results") if not result.members]


def recipe_of(command):
    """What a command line trains."""
    _, row, *options = command
    shorten = None
    if "--shorten" in options:
        at = options.index("--shorten")
        shorten = int(options[at + 1])
        del options[at : at + 2]
    settings = [word for word in with_fields(options, train_row) if word != "--set"]
    chosen = choose(row, overrides(settings))
    return (chosen if shorten is None else in_fewer_epochs(chosen, shorten)).recipe


@pytest.mark.parametrize("result", PUBLISHED, ids=lambda result: f"{result.table}:{result.row}-{result.seed}")
def test_every_published_run_has_a_command_that_trains_just_that(result):
    assert recipes.differing(recipe_of(words(result)).to_dict(), result.recipe) is None


def result(row="efficient", seed=0, **changes):
    recipe = recipes.with_overrides(recipes.find(f"mazzia2021_table2:{row}"), changes)
    test = {"error": 0.003 + 0.001 * seed}
    known = {"epochs": recipe.epochs, "planned": 100, "recipe": recipe.to_dict(), "commit": "0123456789"}
    return Result(table="mazzia2021_table2", row=row, seed=seed, test=test, **known)


def test_seeds_are_told_together_and_gaps_are_none():
    runs = [result(seed=seed) for seed in (0, 1, 3)]
    assert commands(runs).splitlines() == [
        "torchcaps train mazzia2021_table2:efficient --seeds 2",
        "torchcaps train mazzia2021_table2:efficient --seed 3",
        "    # error 0.433 ± 0.153 %, commit 0123456",
    ]
    apart = commands([runs[0], replace(runs[1], defect="weights too small")])
    assert "    # error 0.400 %, with weights too small, commit 0123456" in apart.splitlines()
    together = [replace(run, together=4) for run in runs[:2]]
    assert "--seeds 2 --together\n" in commands(together)


def test_words_with_blanks_are_quoted_and_what_a_row_has_more_is_left_out():
    (line, _) = commands([result(**{"schedule_args": {"decay": 0.5}})]).splitlines()
    assert shlex.split(line)[3:] == ["--schedule-args", '{"decay": 0.5}']


def test_what_is_missing_can_be_trained(capsys, monkeypatch):
    """Each row of the page has a command; those with results have none, and the commands are the rows."""
    entries = [entry for group in GROUPS for entry in group.entries]
    lines = [line for line in missing([]).splitlines() if not line.startswith(" ")]
    assert len(lines) == len(entries) + len(recipes.tables()["ours"].ROWS)
    assert sum(line.startswith("# torchcaps evaluate --ensemble") for line in lines) == 6
    assert "torchcaps train tsai2020_table1:inverted-resnet-cifar10 --model-args.iterations 1" in lines
    run = result()
    assert f"train {run.table}:{run.row}\n" not in missing([run])
    for verb, row, *_ in read_plan(missing([])):
        assert verb == "train"
        recipes.find(row)
    monkeypatch.chdir(ROOT)
    assert main(["table", "--missing"]) == 0
    left = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert set(left) <= {*lines, "# every row of the page has a result"}
    assert main(["table", "mazzia2021_table2", "--missing"]) == 2
    assert "leave NAME out" in capsys.readouterr().err


def test_an_ensemble_names_its_members():
    run = replace(result(), members=("efficient/seed-0", "efficient/seed-1"))
    line, _ = commands([run]).splitlines()
    assert line == "# torchcaps evaluate --ensemble, with the folders of efficient/seed-0, efficient/seed-1"


def test_rows_that_are_no_more_are_left_out_and_the_command_prints_all(capsys, monkeypatch):
    assert commands([replace(result(), row="gone")]) == ""
    monkeypatch.chdir(ROOT)
    assert main(["table", "li2018_table3", "--commands"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torchcaps train li2018_table3:1-master --shorten 60 --precision bf16\n    # error 39.04 %")
    assert "mazzia" not in out
    assert main(["table", "--commands"]) == 0
    out = capsys.readouterr().out
    assert "torchcaps train ours:cifar10 --seeds 3\n" in out
    assert all(words[0] == "train" for words in read_plan(out))
    assert main(["table", "li2018_table5", "--commands"]) == 2
    assert "there is no table 'li2018_table5'; did you mean li2018_table4" in capsys.readouterr().err
    assert main(["table", "li2018_table4", "--commands"]) == 2
    assert "there are no results of li2018_table4" in capsys.readouterr().err
