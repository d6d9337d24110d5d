"""The end of a run: figures against plain loops, the test set read once, and every break in between made good."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
import torch

import torchcaps.finish as ending
from torchcaps import recipes
from torchcaps.data import DataSet, load
from torchcaps.data.stronger import nudged
from torchcaps.finish import finish, load_predictions
from torchcaps.predictor import choose_threshold
from torchcaps.results import read, thinned
from torchcaps.runs import look, open_run
from torchcaps.train import checkpoint, train

CHANGES = {"epochs": "3", "samples": "160", "batch_size": "16", "select": "best", "ema": "0.5", "lr": "0.02"}
SPOILT = {"schedule": "steps", "schedule_args": '{"milestones": [2], "factor": 5}'}  # the last epoch is not the best


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = recipes.with_overrides(recipes.find("quick:digits"), {**CHANGES, **SPOILT})
    return train(recipe, out=tmp_path_factory.mktemp("trained") / "run", seed=1, device="cpu", log=None)


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "_report", lambda folder, say: None)
    return shutil.copytree(trained.folder, tmp_path / "run")


def ended(folder, **options):
    return finish(folder, table="quick", row="digits", results=folder.parent / "results.jsonl", device="cpu", **options)


@torch.inference_mode()
def wrong_of(model, split):
    """One image after the other."""
    wrong = 0
    for image, label, _ in split:
        scores = model(image[None].float() / 255).scores[0].tolist()
        wrong += max(range(10), key=scores.__getitem__) != int(label)
    return wrong


def test_figures_are_those_of_a_plain_loop(folder):
    line = ended(folder)
    opened, data = open_run(folder, device="cpu"), load("digits", validation=0.1)
    wrong = wrong_of(opened.model, data.test)
    assert line.test["error"] == pytest.approx(wrong / 360, abs=1e-12)
    wrong = wrong_of(opened.model, data.validation)
    assert line.validation["error"] == pytest.approx(wrong / len(data.validation), abs=1e-12)


def test_the_threshold_is_chosen_on_validation_and_kept(folder):
    ended(folder)
    opened, data = open_run(folder, device="cpu"), load("digits", validation=0.1)
    assert opened.threshold == choose_threshold(look(opened.model, data.validation, data, opened.recipe))
    assert opened.threshold > 0
    assert json.loads((folder / "test.json").read_text())["threshold"] == opened.threshold


def test_the_last_epoch_is_tested_too_where_another_was_chosen(folder, trained):
    assert trained.selected == 2
    line = ended(folder)
    opened, found = open_run(folder, device="cpu"), checkpoint.latest(folder / "checkpoints")
    opened.model.load_state_dict(found.state["ema"]["average"])
    wrong = wrong_of(opened.model, load("digits").test)
    assert line.test_last["error"] == pytest.approx(wrong / 360, abs=1e-12)
    assert (line.selected, line.epoch, line.epochs) == ("best", 2, 3)


def test_the_line_says_what_was_done(folder, trained):
    line = ended(folder)
    assert (line.table, line.row, line.seed, line.test_reads) == ("quick", "digits", 1, 1)
    assert line.recipe == trained.recipe.to_dict()
    assert line.curves["validation_error"] == [row["validation_error"] for row in trained.metrics]
    assert (line.device, line.seconds) == ("cpu", trained.seconds)
    assert sorted(line.data) == ["test", "train", "validation"]
    assert len(set(line.data.values())) == 3
    assert line.commit
    assert line.finished
    (stored,) = read(folder.parent / "results.jsonl")
    assert stored.line() == line.line() == (folder / "result.json").read_text().rstrip()


def test_predictions_are_kept(folder):
    line = ended(folder)
    kept = load_predictions(folder / "predictions.safetensors")
    assert kept.scores.shape == kept.probabilities.shape == (360, 10)
    assert torch.equal(kept.labels, load("digits").test.labels)
    assert float((kept.scores.argmax(dim=1) != kept.labels).double().mean()) == line.test["error"]


def test_a_test_of_no_images_is_no_reading(folder):
    with pytest.raises(ValueError, match="at least one image of the test set must be looked at, got 0"):
        ended(folder, images=0)
    assert ended(folder).test_reads == 1


def test_a_second_call_reads_nothing_and_appends_nothing(folder, monkeypatch):
    first = ended(folder)
    before = {path: path.read_bytes() for path in folder.parent.rglob("*.json*")}
    monkeypatch.setattr(ending, "look", None)
    monkeypatch.setattr(ending, "checksums", None)
    assert ended(folder).line() == first.line()
    assert {path: path.read_bytes() for path in folder.parent.rglob("*.json*")} == before


def test_a_result_that_was_removed_comes_back(folder):
    first = ended(folder)
    (folder.parent / "results.jsonl").unlink()
    assert ended(folder).line() == first.line()
    assert len(read(folder.parent / "results.jsonl")) == 1


@pytest.mark.parametrize("name", ["validation.json", "predictions.safetensors", "test.json", "result.json", "results"])
def test_killed_at_any_write_the_next_call_goes_on(folder, name, monkeypatch):
    class Killed(BaseException): ...

    looks = []
    write, append, own = checkpoint.write, ending.append, ending.look

    def dying_write(path, content):
        if path.name == name:
            raise Killed
        write(path, content)

    def dying_append(path, line):
        append(path, line)
        if name == "results":
            raise Killed

    def counted(model, split, *more):
        looks.append(len(split))
        return own(model, split, *more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", dying_write)
        patch.setattr(ending, "append", dying_append)
        with pytest.raises(Killed):
            ended(folder)
    monkeypatch.setattr(ending, "look", counted)
    line = ended(folder)
    (stored,) = read(folder.parent / "results.jsonl")
    assert stored.line() == line.line()
    assert (360 in looks) == (name in ("validation.json", "predictions.safetensors", "test.json"))
    assert line.test_reads == (
        2 if name in ("predictions.safetensors", "test.json") else 1
    )  # a reading cut short counts


def test_of_several_views_the_one_is_told_as_well(folder, monkeypatch):
    """Nine views, of which the line has the sum; the image alone is looked at in the same reading."""
    data = replace(load("digits"), test_transform=(nudged(),))
    opened = open_run(folder, device="cpu")
    opened = replace(opened, recipe=replace(opened.recipe, data_args={"crops": 9}))
    plain = []
    monkeypatch.setattr(ending, "load_data", lambda recipe: plain.append(recipe.data_args) or load("digits"))
    found = ending.read_test(opened, data, {"threshold": None})
    assert found["reads"] == 1
    assert plain == [{}]
    views = nudged()(data.test.images[:, None].float() / 255)
    with torch.inference_mode():
        several = sum(opened.model(view).probabilities for view in views.unbind(1)).argmax(dim=1)
    assert found["figures"]["error"] == pytest.approx(int((several != data.test.labels).sum()) / 360, abs=1e-12)
    assert found["figures"]["one_view"]["error"] == pytest.approx(wrong_of(opened.model, data.test) / 360, abs=1e-12)
    assert found["figures"]["one_view"]["error"] != found["figures"]["error"]


def test_reading_the_test_set_after_each_epoch_is_counted(folder):
    data = load("digits")
    opened = open_run(folder, device="cpu")
    assert ending.read_test(opened, replace(data, validation=data.test), {"threshold": None})["reads"] == 1 + 3
    assert json.loads((opened.folder / "reading.json").read_text()) == {"begun": 1, "epochs": 3}


def test_a_results_file_that_cannot_be_written(folder, monkeypatch):
    def full(path, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ending, "append", full)
    with pytest.raises(ValueError, match=r"could not be written to .*: No space left on device; the run is safe"):
        ended(folder)


def test_a_broken_line_in_the_results_stops_it_and_later_goes_on(folder):
    path = folder.parent / "results.jsonl"
    path.write_text("{\n")
    with pytest.raises(ValueError, match=r"line 1 is broken"):
        ended(folder)
    assert path.read_text() == "{\n"
    path.unlink()
    assert len(read(path)) == 0
    assert ended(folder).test_reads == 1


def test_a_run_as_train_gives_it_is_finished_on_its_own_data(folder, trained, monkeypatch):
    run = trained
    monkeypatch.setattr(run, "folder", folder)
    monkeypatch.setattr("torchcaps.runs.load_data", None)
    line = finish(run, table="quick", row="digits", results=folder.parent / "r.jsonl")
    assert line.test["images"] == 360


def test_fewer_images_are_a_sample_that_is_always_the_same(folder):
    line = ended(folder, images=100)
    assert (line.test["images"], line.test["sampled_from"]) == (100, 360)
    opened, data = open_run(folder, device="cpu"), load("digits")
    first, second = (look(opened.model, data.test, data, opened.recipe, 100) for _ in range(2))
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.scores, load_predictions(folder / "predictions.safetensors").scores)
    with pytest.raises(ValueError, match=r"at least one image of the test set must be looked at, got 0"):
        look(opened.model, data.test, data, opened.recipe, 0)


def test_of_generated_images_a_sample_is_enough(folder):
    opened, data = open_run(folder, device="cpu"), load("digits")
    data.test.base = None  # as generated sets have one
    assert len(look(opened.model, data.test, data, opened.recipe, most=50).labels) == 50
    assert len(look(opened.model, data.test, data, opened.recipe, images=360, most=50).labels) == 360


def test_without_validation_there_is_no_threshold(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "_report", lambda folder, say: None)
    recipe = recipes.with_overrides(
        recipes.find("quick:digits"), {"epochs": "1", "samples": "32", "validation": "none"}
    )
    run = train(recipe, out=tmp_path / "run", device="cpu", log=None)
    line = finish(run, table="quick", row="digits", results=tmp_path / "r.jsonl")
    assert line.validation is None
    assert open_run(tmp_path / "run").threshold is None


def test_the_familiar_viewpoints_are_tested_too(folder, monkeypatch):
    data = load("digits", validation=0.1)
    seen = DataSet("digits", data.train, data.test, data.validation, familiar=data.test.take(torch.arange(60)))
    monkeypatch.setattr("torchcaps.runs.load_data", lambda recipe: seen)
    assert ended(folder).test["familiar"]["images"] == 60


def test_without_matplotlib_a_sentence_says_how_to_get_it(folder, monkeypatch, trained):
    monkeypatch.undo()
    monkeypatch.setattr(ending, "find_spec", lambda name: None)
    said = []
    ended(folder, say=said.append)
    assert said == ["there is no report, as matplotlib is missing: pip install 'torchcaps[figures]'"]
    assert not (folder / "report.html").exists()


def test_a_line_has_thin_curves_and_counts_all_epochs(folder, trained, monkeypatch):
    monkeypatch.setattr(ending, "thinned", lambda curves: thinned(curves, 2))
    line = ended(folder)
    assert line.epochs == 3
    assert line.curves["epoch"] == [1, 3]
    assert line.curves["loss"] == [trained.metrics[k]["loss"] for k in (0, 2)]


def test_curves_are_the_columns_of_the_metrics(tmp_path):
    path = tmp_path / "metrics.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["epoch", "loss", "validation_error"], [1, 0.5, ""], [2, 0.25, 0.125]])
    assert ending.read_curves(path) == {"loss": [0.5, 0.25], "validation_error": [None, 0.125]}
