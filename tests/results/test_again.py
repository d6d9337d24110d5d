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
from torchcaps.results import Result, append, read
from torchcaps.results.again import commands, in_full, missing, words
from torchcaps.results.plan import GROUPS, TESTED_ON_OTHERS
from torchcaps.shorten import shortened

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
    again = [*runs, replace(runs[0], finished="later", test={"error": 0.009})]
    assert "    # error 0.633 ± 0.252 %, commit 0123456" in commands(again).splitlines()
    apart = commands([runs[0], replace(runs[1], defect="weights too small")])
    assert "    # error 0.400 %, with weights too small, commit 0123456" in apart.splitlines()
    together = [replace(run, together=4) for run in runs[:2]]
    assert "--seeds 2 --together\n" in commands(together)


def test_a_run_that_stopped_where_it_should_is_told_by_the_epochs_that_were_asked_for():
    recipe = recipes.find("sabour2017_affnist:capsnet")
    stopped = replace(result(), table="sabour2017_affnist", row="capsnet", recipe=recipe.to_dict(), epochs=17)
    assert words(stopped) == ["train", "sabour2017_affnist:capsnet"]


def test_words_with_blanks_are_quoted_and_what_a_row_has_more_is_left_out():
    (line, _) = commands([result(**{"schedule_args": {"decay": 0.5}})]).splitlines()
    assert shlex.split(line)[3:] == ["--schedule-args", '{"decay": 0.5}']


def test_what_is_missing_can_be_trained(capsys, monkeypatch):
    """Each row of the page has a command; those with results have none, and the commands are the rows."""
    entries = [entry for group in GROUPS for entry in group.entries]
    lines = [line for line in missing([]).splitlines() if not line.startswith(" ")]
    assert len(lines) == len(entries) + len(recipes.tables()["ours"].ROWS) + len(TESTED_ON_OTHERS)
    assert "# torchcaps evaluate RUN... --data multimnist_relative, with runs of ours:multimnist-resnet" in lines
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


def test_what_was_shortened_can_be_trained_in_full():
    runs = [result(seed=seed, precision="bf16", epochs=25) for seed in (0, 1, 3)]
    timed = [replace(run, seconds=seconds, device="GPU") for run, seconds in zip(runs, (40.0, 30.0, 90.0), strict=True)]
    assert in_full(timed).splitlines() == [
        "torchcaps train mazzia2021_table2:efficient --precision bf16 --seeds 2",
        "torchcaps train mazzia2021_table2:efficient --precision bf16 --seed 3",
        "    # Efficient-CapsNet on MNIST (Mazzia, tables 2 and 3): Efficient-CapsNet; was 25 % of it, in full about "
        "2.0 min a run on GPU",
    ]
    assert in_full(runs).endswith("; was 25 % of it")
    assert in_full([replace(runs[0], together=4), replace(runs[1], together=4)]).splitlines()[0].endswith("--together")
    assert in_full([*timed, result()]) == ""
    assert in_full([replace(run, defect="weights too small") for run in timed]) == ""
    mixed = [replace(timed[0], device="cpu"), *timed[1:]]
    assert in_full(mixed).endswith("in full about 2.0 min a run on GPU")


def test_a_shortened_ensemble_is_of_members_that_are_trained_in_full():
    changes = {"row": "mnist-ensemble", "table": "ours", "recipe": recipes.find("ours:mnist-ensemble").to_dict()}
    run = replace(result(), **changes, epochs=20, planned=80, members=("mnist/seed-0", "mnist/seed-1"), seconds=60.0)
    command, said = in_full([replace(run, device="GPU")]).splitlines()
    assert command == "# torchcaps evaluate --ensemble RUN... --row ours:mnist-ensemble"
    assert said.endswith("mnist-ensemble; was 25 % of it, in full about 4.0 min for all members on GPU")


def test_other_rows_that_were_shortened_are_listed_too():
    recipe = recipes.find("li2018_table3:3-v2")
    run = Result(table="li2018_table3", row="3-v2", recipe=recipe.to_dict(), epochs=150, planned=600, seed=0, test={})
    assert in_full([run]).splitlines()[0] == "torchcaps train li2018_table3:3-v2"


def test_fewer_images_are_a_smaller_share():
    name = "mazzia2021_multimnist:efficient"
    recipe = recipes.find(name)
    ran = replace(recipe, samples=recipe.samples // 6, epochs=recipe.epochs // 2)
    test = {"per_digit_error": 0.1, "exact_match_error": 0.2}
    known = {"epochs": ran.epochs, "planned": recipe.epochs, "recipe": ran.to_dict(), "seconds": 10.0, "device": "GPU"}
    command, said = in_full(
        [Result(table=name.partition(":")[0], row="efficient", seed=0, test=test, **known)]
    ).splitlines()
    assert command == f"torchcaps train {name}"
    assert said == "    # MultiMNIST: Efficient-CapsNet; was 8.3 % of it, in full about 2.0 min a run on GPU"


def test_the_command_lists_what_was_shortened(capsys, monkeypatch, tmp_path):
    row = recipes.find("choi2019_table1:ours-affnist")
    ran = replace(shortened(row, 12), data="affnist_generated", precision="bf16").to_dict()
    append(tmp_path / "some.jsonl", replace(result(epochs=12), table="choi2019_table1", row="ours-affnist", recipe=ran))
    assert main(["table", "--shortened", "--results", str(tmp_path)]) == 0
    words = ["train", "choi2019_table1:ours-affnist", "--data", "affnist_generated", "--precision", "bf16"]
    assert read_plan(capsys.readouterr().out) == [words]
    monkeypatch.chdir(ROOT)
    assert main(["table", "--shortened"]) == 0
    plan = read_plan(capsys.readouterr().out)
    assert plan
    assert all(words[0] == "train" and recipes.find(words[1]) for words in plan)
    assert main(["table", "--shortened", "--missing"]) == 2
    assert "--missing and --shortened print different things; ask for one of them" in capsys.readouterr().err
    assert main(["table", "mazzia2021_table2", "--shortened"]) == 2
    assert "--shortened is for all tables; leave NAME out" in capsys.readouterr().err


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
