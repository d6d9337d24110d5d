"""`torchcaps train`: what it makes, how it goes on, and what it refuses."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchcaps.commands.job as job
from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.commands.job import balanced_weights
from torchcaps.commands.train import train_row
from torchcaps.commands.words import Row, choose, headline, results_file, run_folder, with_fields
from torchcaps.data import DataSet, Stored
from torchcaps.results import Result, read
from torchcaps.train import checkpoint, train
from torchcaps.train.folder import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, no_report):
    monkeypatch.chdir(tmp_path)


def test_a_run_is_trained_tested_once_and_told_in_one_line(small, capsys):
    assert main(["train", "quick:digits", *small]) == 0
    out = capsys.readouterr().out.splitlines()
    folder = next(Path("runs").iterdir()) / "seed-0"
    (line,) = read(folder.parent / "quick.jsonl")
    assert out[0].startswith("quick:digits: efficient_capsnet (image=[1, 8, 8], ")
    assert out[2] == "  2 epochs of 96 images in batches of 16, validation 0.1"
    assert out[3] == f"  in {folder}"
    assert out[-1] == (
        f"test accuracy {100 * line.test['accuracy']:.2f} % ± {100 * line.test['standard_error']:.2f}; "
        f"result: {folder.parent}/quick.jsonl; run: {folder}"
    )
    assert (line.table, line.row, line.seed, line.test_reads) == ("quick", "digits", 0, 1)
    assert line.test["images"] == 360
    assert line.recipe["samples"] == 96
    assert len(line.curves["loss"]) == 2
    assert sorted(line.data) == ["test", "train", "validation"]
    assert (folder / "epochs" / "epoch-0001.safetensors").exists()


def test_limit_pauses_and_resume_goes_on_to_the_same_weights(small, capsys):
    words = ["train", "quick:digits", *small]
    assert main([*words, "--limit", "7"]) == 0
    assert "saved at step 7; the same command with --resume goes on\n" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "goes on from step 7" in capsys.readouterr().err
    assert main([*words, "--out", "straight"]) == 0
    folder = next(Path("runs").iterdir()) / "seed-0"
    assert (folder / "weights.safetensors").read_bytes() == Path("straight/weights.safetensors").read_bytes()
    assert (folder / "metrics.csv").read_bytes() == Path("straight/metrics.csv").read_bytes()
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    assert [row["epoch"] for row in rows] == ["1", "2"]


def test_a_finished_run_is_shown_again_and_nothing_is_done_twice(finished, small, tmp_path, capsys, checksum):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    before = checksum(tmp_path)
    assert main(["train", "quick:digits", *small, "--seeds", "2", "--out", "runs/two"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out[-3:]] == ["seed 0", "seed 1", "accuracy over 2 seeds"]
    assert main(["train", "quick:digits", *small, "--seed", "1", "--out", "runs/two/seed-1", "--resume"]) == 0
    assert checksum(tmp_path) == before


def test_more_seeds_add_to_those_that_are_there(finished, small, tmp_path, capsys):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    assert main(["train", "quick:digits", *small, "--seeds", "3", "--out", "runs/two"]) == 0
    values = [100 * line.test["accuracy"] for line in read("runs/two/quick.jsonl")]
    assert [line.seed for line in read("runs/two/quick.jsonl")] == [0, 1, 2]
    mean = sum(values) / 3
    spread = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert capsys.readouterr().out.splitlines()[-1] == f"accuracy over 3 seeds: {mean:.2f} ± {spread:.2f}"


def test_without_a_test_the_test_set_stays_unread(small, capsys):
    assert main(["train", "quick:digits", *small, "--no-test", "--out", "blind", "--results", "r.jsonl"]) == 0
    assert capsys.readouterr().out.endswith("trained; torchcaps evaluate blind reads the test set\n")
    assert not Path("blind/test.json").exists()
    assert json.loads(Path("blind/validation.json").read_text())["threshold"] >= 0
    assert not Path("r.jsonl").exists()
    assert main(["evaluate", "blind", "--results", "r.jsonl"]) == 0
    assert "(the test set has been read once for this)" in capsys.readouterr().out
    assert [line.row for line in read("r.jsonl")] == ["digits"]


@pytest.mark.parametrize(("stop", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("limit", 0)])
def test_the_exit_code_says_what_stopped_it(stop, code, small, capsys, monkeypatch):
    def stopped(recipe, *, out, seed, data, **options):
        assert options["about"]["name"] == "quick:digits"
        return Run(out, recipe, seed, None, data, 7, False, [], 1.0, stopped=stop)

    monkeypatch.setattr(job, "train", stopped)
    assert main(["train", "quick:digits", *small]) == code
    assert capsys.readouterr().err == "saved at step 7; the same command with --resume goes on\n"


def test_seeds_together_are_each_finished_and_one_that_fails_is_named(small, capsys, monkeypatch):
    def one_by_one(recipe, seeds, *, out, **options):
        runs = [train(recipe, out=out / f"seed-{seed}", seed=seed, log=None, **options) for seed in seeds]
        runs[1].finished, runs[1].stopped = False, "the loss is not finite at step 3"
        return runs

    monkeypatch.setattr("torchcaps.train.together.train_together", one_by_one)
    words = ["train", "quick:digits", *small, "--out", "many", "--seeds", "2", "--together"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err == "torchcaps: seed 1 failed: the loss is not finite at step 3\n"
    assert out.splitlines()[-1].startswith("seed 0: test accuracy ")
    assert [line.seed for line in read("many/quick.jsonl")] == [0]


def test_seeds_together_are_tested_at_their_last_epoch_too(small, capsys):
    words = ["train", "quick:digits", *small, "--out", "many", "--together", "--select", "best", "--lr", "1e-9"]
    assert main([*words, "--seeds", "2", "--limit", "5"]) == 0
    capsys.readouterr()
    alone = [word for word in words if word != "--together"]
    assert main([*alone, "--seeds", "2", "--resume"]) == 2
    assert (
        capsys.readouterr().err
        == "torchcaps: seed 0 is trained together with others in many/together; add --together\n"
    )
    assert main([*words, "--seeds", "2", "--resume"]) == 0
    lines = read("many/quick.jsonl")
    assert [(line.seed, line.epoch, line.epochs) for line in lines] == [(0, 1, 2), (1, 1, 2)]
    assert all(line.test_last["images"] == 360 for line in lines)
    assert main([*words, "--seeds", "3"]) == 0
    assert [line.seed for line in read("many/quick.jsonl")] == [0, 1, 2]


def test_memory_that_is_too_small_is_told(small, capsys, monkeypatch):
    def full(*words, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(job, "train", full)
    assert main(["train", "quick:digits", *small]) == 2
    assert "cannot hold a batch of 16; --accumulate 2 trains the same in smaller parts" in capsys.readouterr().err


def test_fields_become_settings():
    words = "train a:b --lr 1e-3 --model-args.iterations=1 --keep-epochs 1,2 --seed 3 --resume --seeds 2 --help"
    assert with_fields(words.split(), train_row) == [
        "train", "a:b", "--set", "lr=1e-3", "--set", "model-args.iterations=1", "--set", "keep-epochs=1,2",
        "--seed", "3", "--resume", "--seeds", "2", "--help",
    ]  # fmt: skip


def test_every_field_of_a_recipe_is_an_option():
    values = recipes.find("quick:digits").to_dict()
    words = [f"--{name.replace('_', '-')}" for name in values if name != "seeds"]
    assert len(with_fields([each for word in words for each in (word, "1")], train_row)) == 2 * len(words)


def test_variants_do_not_collide_and_settings_as_in_the_row_change_nothing():
    def folder(**changes):
        return str(run_folder(choose("quick:digits", changes)))

    assert folder() == folder(epochs="30") == folder(lr="0.002") == "runs/quick-digits"
    assert folder(epochs="5") == "runs/quick-digits-epochs-5"
    assert folder(lr="1e-3") == folder(lr="0.001") == "runs/quick-digits-lr-0.001"
    assert folder(**{"model_args.first_kernel": "3"}) == "runs/quick-digits-model_args-first_kernel-3"
    long = {"note": "a" * 60}
    assert folder(**long)[:-7] == folder(note="a" * 61)[:-7]
    assert folder(**long) != folder(note="a" * 61)
    assert len(Path(folder(**long)).name) <= len("quick-digits-") + 40
    assert folder(note="../../up") == "runs/quick-digits-note-..-..-up"


def test_results_are_beside_the_run_so_that_none_is_published_by_chance(monkeypatch):
    assert results_file("quick", Path("runs/a/seed-0")) == Path("runs/a/quick.jsonl")
    monkeypatch.chdir(ROOT)
    assert results_file("quick", Path("runs/a/seed-0")) == Path("runs/a/quick.jsonl")


def test_the_headline_has_the_papers_number_beside_ours():
    recipe = replace(recipes.find("quick:digits"), metric="error", reported="0.25")
    result = Result(
        table="t", row="r", recipe={}, seed=0, test={"error": 0.0123, "standard_error": 0.001}, epochs=1, planned=1
    )
    assert headline(result, recipe) == "test error 1.23 % ± 0.10 (the paper: 0.25)"
    digits = replace(recipe, metric="per_digit_error", reported="")
    assert headline(result, digits) == "no per digit error"
    both = replace(result, test={**result.test, "per_digit_error": 0.01})
    assert headline(both, digits) == "test per digit error 1.00 %"  # the standard error is of another figure
    curves = replace(result, curves={"loss": [2.0, 0.5]})
    assert headline(curves, replace(recipe, metric="loss", reported="")) == "loss 0.5000"


def data_with(labels, classes=3):
    split = Stored(torch.zeros(len(labels), 8, 8, dtype=torch.uint8), torch.tensor(labels), tuple("abc"[:classes]))
    return DataSet("few", split, split)


def test_balanced_weights_give_each_class_the_same_say():
    assert balanced_weights(data_with([0, 0, 0, 1, 1, 2])) == (6 / 9, 6 / 6, 6 / 3)
    assert balanced_weights(data_with([[0, 1], [0, 2], [0, -1], [1, 0]])) == (7 / 12, 7 / 6, 7 / 3)
    with pytest.raises(ValueError, match="class c has no training image"):
        balanced_weights(data_with([0, 1]))


def test_class_weights_are_counted_and_recorded(small):
    assert main(["train", "quick:digits", *small, "--class-weights", "balanced", "--out", "run"]) == 0
    weights = json.loads(Path("run/recipe.json").read_text())["recipe"]["class_weights"]
    assert len(weights) == 10
    assert all(0.9 < weight < 1.1 for weight in weights)
    assert main(["train", "quick:digits", *small, "--class-weights", "balanced", "--out", "run", "--resume"]) == 0


def test_a_shortened_run_has_its_schedule_in_its_recipe(capsys):
    words = ["train", "quick:digits", "--samples", "64", "--schedule", "steps"]
    words += ["--schedule-args", '{"milestones": [10, 20]}']
    assert main([*words, "--shorten", "3", "--out", "run"]) == 0
    found = json.loads(Path("run/recipe.json").read_text())["recipe"]
    assert (found["epochs"], found["samples"], found["schedule_args"]) == (3, 64, {"milestones": [1, 2]})
    assert main([*words, "--shorten", "3", "--out", "run", "--resume"]) == 0
    capsys.readouterr()
    assert main(["table", "quick", "--results", "quick.jsonl"]) == 0
    assert "3 of 30 epochs, shortened" in capsys.readouterr().out


BAD = [
    ("quick:digit", "quick has no row 'digit'; did you mean digits"),
    ("quik:digits", "there is no recipe 'quik:digits'; did you mean quick:digits"),
    ("quick:digits --epoch 3", "there is no option --epoch; did you mean --epochs"),
    ("quick:digits --zzz 3", "there is no option --zzz; torchcaps train --help has them all"),
    ("quick:digits --lr", "--lr needs a value"),
    ("quick:digits --lr --resume", "--lr needs a value"),
    ("quick:digits --shorten 31", "30 epochs can be shortened to 1 and more of them, not to 31"),
    ("quick:digits --shorten 5 --epochs 5", "--shorten says how many epochs there are, so leave --epochs out"),
    ("quick:digits --epochs many", "epochs must be a whole number, got 'many'"),
    ("quick:digits --lr fast", "lr must be a number, got 'fast'"),
    ("quick:digits --seed x", "error parsing --seed: invalid literal for int()"),
    ("quick:digits --set lr", "a field is set by FIELD=VALUE, got 'lr'"),
    ("quick:digits --set rate=3", "a recipe has no field 'rate'"),
    ("quick:digits --loss hinge", "loss must be one of margin, spread, "),
    ("quick:digits --model-args.iteration 2", "efficient_capsnet has no option 'iteration'; "),
    ("quick:digits --model-args.first-kernel big", "first_kernel must be "),
    ("quick:digits --model capsnt", "there is no preset 'capsnt'; did you mean capsnet"),
    ("quick:digits --data digitz", "there is no data set 'digitz'; did you mean digits?"),
    ("quick:digits --data-args.path here", "digits has no option 'path'; it has none"),
    ("quick:mnist --data-args.offline true --data-args.root nowhere", "mnist is not in "),
    ("quick:digits --device gpu", "device 'gpu' is not known; it is auto, cpu, cuda, cuda:N or mps"),
    ("quick:digits --device cuda:97", "1 x cuda:97 is not there; this machine has "),
    ("quick:digits --device cpu --devices 5", "a batch of 32 cannot be shared evenly by 5 processes"),
    ("quick:digits --device cpu --devices 2 --samples 1", "the 1 images of an epoch cannot be shared evenly by 2 "),
    ("quick:digits --class-weights 1,2", "class_weights has 2 numbers, and digits has 10 classes"),
    ("quick:digits --optimizer-args.rho 1", "the optimizer adam has no 'rho'; "),
    ("quick:digits --schedule-args.every 1", "the schedule cosine has no 'every'; "),
    ("quick:digits --device cpu --devices 4 --batch-size 2", "a batch of 2 cannot be shared evenly by 4 processes"),
    ("quick:digits --device cpu --devices 512 --batch-size 512", "512 x cpu is not there; this machine has "),
    (
        "quick:digits --strategy pipeline",
        "invalid choice 'pipeline' for argument '--strategy'. Expected one of ('auto', ",
    ),
    ("quick:digits --together", "--together needs --seeds N"),
    ("quick:digits --limit 0", "--limit pauses after a step, counted from 1, got 0"),
    ("quick:digits --test-images 0", "--test-images takes one image at least, got 0; --no-test leaves the test out"),
    ("quick:digits --seeds 0", "seeds count from 0 and there is at least one"),
    ("folder=nowhere", "{place}/nowhere is no folder"),
    ("", "missing from torchcaps train: ROW"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_bad_input_gives_one_sentence_and_makes_nothing(words, sentence, capsys, tmp_path):
    assert main(["train", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"torchcaps: {sentence.replace('{place}', str(tmp_path))}"), err
    assert err.count("\n") == 1
    assert not out
    assert not list(tmp_path.rglob("*.json"))


def test_another_recipe_seed_or_no_resume_is_refused_and_the_run_stays(finished, small, tmp_path, capsys, checksum):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    paused = [*small, "--out", "paused"]
    assert main(["train", "quick:digits", *paused, "--limit", "3"]) == 0
    before = checksum(tmp_path)
    capsys.readouterr()
    for words, sentence in [
        ([*paused], "paused holds a run already; resume it or choose another folder"),
        ([*paused, "--resume", "--lr", "0.1"], "paused holds a run of another recipe: lr is 0.002 there and 0.1 here"),
        ([*paused, "--resume", "--seed", "5"], "paused holds a run of another recipe: seed is 0 there and 5 here"),
        ([*small, "--out", "runs/two/seed-0"], "runs/two/seed-0 holds a run already; "),
        (
            [*small, "--out", "runs/two/seed-0", "--resume", "--lr", "0.1"],
            "runs/two/seed-0 holds a finished run of another recipe or seed",
        ),
        ([*small, "--out", "runs/two", "--seeds", "2", "--lr", "0.1"], "runs/two/seed-0 holds a finished run of "),
    ]:
        assert main(["train", "quick:digits", *words]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"torchcaps: {sentence}"), err
        assert err.count("\n") == 1
        assert not out
    assert checksum(tmp_path) == before


def test_a_refused_command_leaves_what_a_folder_says_of_its_row(small, tmp_path, capsys, checksum):
    words = ["train", "quick:digits", *small]
    together = [*words, "--seeds", "2", "--together", "--out", "many"]
    assert main([*together, "--limit", "3"]) == 0
    Path("race").mkdir()
    for name in ("row.json", "recipe.json"):  # all there is before the first checkpoint
        shutil.copy(Path("many", "seed-0", name), "race")
    before = checksum(tmp_path)
    capsys.readouterr()
    with checkpoint.locked(Path("race")):
        assert main([*words, "--lr", "0.5", "--out", "race", "--resume"]) == 2
    assert capsys.readouterr().err.startswith("torchcaps: another process is at work in race; ")
    assert main([*together, "--lr", "0.5", "--resume"]) == 2
    assert capsys.readouterr().err.startswith("torchcaps: many holds runs of another recipe: lr is ")
    assert main([*words, "--seeds", "2", "--together", "--strategy", "ddp", "--out", "new/runs"]) == 2
    assert not Path("new").exists()
    assert checksum(tmp_path) == before


def test_a_run_that_goes_on_says_what_it_said_of_its_row(small):
    words = ["train", "quick:digits", *small, "--out", "run"]
    assert main([*words, "--limit", "3"]) == 0
    before = Path("run/row.json").read_text()
    assert main([*words, "--resume", "--lr", "2e-3"]) == 0
    assert Path("run/row.json").read_text() == before


@pytest.mark.parametrize(("module", "words"), [("loop", []), ("together", ["--seeds", "2", "--together"])])
def test_a_run_that_is_interrupted_before_it_begins_leaves_nothing(module, words, small, tmp_path, monkeypatch):
    def interrupt(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"torchcaps.train.{module}.create_network", interrupt)
    assert main(["train", "quick:digits", *small, *words, "--out", "new/run"]) == 130
    assert not list(tmp_path.iterdir())


def test_a_tampered_checkpoint_is_passed_over_and_without_another_refused(small, capsys, tmp_path, checksum):
    words = ["train", "quick:digits", *small, "--out", "run"]
    assert main([*words, "--limit", "3"]) == 0
    for path in Path("run/checkpoints").glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    before = checksum(tmp_path)
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    *notices, last = capsys.readouterr().err.splitlines()
    assert last.startswith("torchcaps: no checkpoint in run/checkpoints is whole: step-00000003.state.safetensors is ")
    assert all("is passed over" in notice for notice in notices)
    assert checksum(tmp_path) == before


def test_a_broken_line_of_results_is_found_before_any_work(small, capsys, tmp_path, checksum):
    Path("r.jsonl").write_text('{"table": "quick"\n')
    before = checksum(tmp_path)
    assert main(["train", "quick:digits", *small, "--results", "r.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert err == (
        "torchcaps: r.jsonl, line 1 is broken: it is cut short or no JSON; "
        "repair or remove that line, nothing was changed\n"
    )
    assert not out
    assert checksum(tmp_path) == before


def test_a_row_can_be_left_out_where_there_is_one(monkeypatch):
    plain = recipes.find("quick:digits")
    monkeypatch.setattr(recipes.tables()["quick"], "ROWS", {"digits": plain})
    assert choose("quick", {}) == Row("quick:digits", "quick", "digits", plain, plain)
