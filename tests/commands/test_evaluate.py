"""`torchcaps evaluate`: stored figures, further looks and ensembles, each look counted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchcaps.commands.ask as ask
import torchcaps.commands.ensembles as ensembles
import torchcaps.commands.looks as looks
from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.data import DataSet, Stored, load
from torchcaps.data.augment import Step
from torchcaps.finish import load_predictions
from torchcaps.results import checksums, read
from torchcaps.runs import open_run
from torchcaps.train import checkpoint


@pytest.fixture(autouse=True)
def place(finished, tmp_path, monkeypatch, no_report):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


A, B = "runs/two/seed-0", "runs/two/seed-1"
LEDGER = "runs/two/quick.jsonl"


def told(capsys, *words):
    assert main(["evaluate", *words, "--device", "cpu"]) == 0
    return capsys.readouterr().out


def asked(capsys, *words):
    return json.loads(told(capsys, *words, "--json"))


def test_stored_figures_are_looked_up(capsys, monkeypatch, place, checksum):
    before = checksum(place)
    monkeypatch.setattr("torchcaps.finish.look", None)
    monkeypatch.setattr(looks, "look", None)
    line = read(LEDGER)[0]
    assert told(capsys, A) == (
        f"{A} (epoch 2): test error {100 * line.test['error']:.2f} % ± {100 * line.test['standard_error']:.2f} %, "
        f"calibration error {100 * line.test['calibration_error']:.2f} %, of 360 images "
        "(as stored; the test set has been read once for this)\n"
    )
    (found,) = asked(capsys, A)
    assert found["figures"] == line.test
    assert (found["run"], found["split"], found["test_reads"], found["stored"]) == (A, "test", 1, True)
    assert checksum(place) == before


def test_figures_that_are_stored_add_no_line_anywhere(capsys, place, checksum):
    Path(LEDGER).rename("elsewhere.jsonl")
    before = checksum(place)
    told(capsys, A)
    assert checksum(place) == before


def test_several_runs_have_a_mean(capsys):
    first, second, last = told(capsys, A, B).splitlines()
    assert (first.split()[0], second.split()[0]) == (A, B)
    errors = [100 * line.test["error"] for line in read(LEDGER)]
    spread = abs(errors[0] - errors[1]) / 2**0.5
    assert last == f"over 2 runs: error {sum(errors) / 2:.2f} % ± {spread:.2f} %"


def test_validation_may_be_looked_at_freely(capsys, place, checksum):
    before = checksum(place)
    (stored,) = asked(capsys, A, "--split", "validation")
    assert stored["figures"] == json.loads(Path(A, "validation.json").read_text())["figures"]
    (kept,) = asked(capsys, A, "--split", "validation", "--epoch", "1")
    assert (kept["epoch"], kept["stored"], kept["test_reads"]) == (1, False, None)
    assert kept["figures"]["images"] == stored["figures"]["images"]
    assert checksum(place) == before


def test_a_kept_epoch_is_a_further_look_and_counted(capsys):
    (first,) = asked(capsys, A, "--epoch", "1")
    assert (first["epoch"], first["test_reads"], first["stored"]) == (1, 2, False)
    model, data = open_run(A, device="cpu", epoch=1).model, load("digits")
    scores = model(data.test.images[:, None].float() / 255).scores
    assert first["figures"]["error"] == float((scores.argmax(dim=1) != data.test.labels).double().mean())
    (again,) = asked(capsys, A, "--epoch", "1")
    assert (again["test_reads"], again["stored"]) == (2, True)
    assert "the test set has been read twice for this" in told(capsys, A)
    *_, line = read(LEDGER)
    assert len(read(LEDGER)) == 3
    assert (line.seed, line.test_reads, line.epoch, line.epochs, line.test) == (0, 2, 1, 1, first["figures"])


def test_fewer_images_are_no_result(capsys):
    (found,) = asked(capsys, A, "--images", "50")
    assert (found["figures"]["images"], found["test_reads"]) == (50, 2)
    (both,) = asked(capsys, A, "--ensemble", B, "--images", "50")
    assert (both["figures"]["images"], both["figures"]["sampled_from"]) == (50, 360)
    assert len(read(LEDGER)) == 2


class corners(Step, geometric=True):
    """Four crops, of which three are black."""

    def __call__(self, images, draws=None):
        return torch.stack([images, *[torch.zeros_like(images)] * 3], dim=1)


def test_crops_are_summed_and_a_line_of_their_own(capsys, monkeypatch):
    def with_crops(recipe):
        assert recipe.data_args == {"crops": 4}
        data = load("digits", validation=0.1)
        return DataSet("digits", data.train, data.test, data.validation, test_transform=(corners(),))

    monkeypatch.setattr(ask, "load_data", with_crops)
    (found,) = asked(capsys, A, "--crops", "4")
    model, data = open_run(A, device="cpu").model, load("digits")
    whole = model(data.test.images[:, None].float() / 255).probabilities.double()
    black = model(torch.zeros(1, 1, 8, 8)).probabilities.double()
    best = (whole + 3 * black).argmax(dim=1)
    assert found["figures"]["error"] == pytest.approx(float((best != data.test.labels).double().mean()), abs=1e-9)
    assert (found["crops"], found["test_reads"]) == (4, 2)
    assert read(LEDGER)[-1].recipe["data_args"] == {"crops": 4}
    assert main(["table", "quick"]) == 0
    assert "data_args.crops = 4" in capsys.readouterr().out


def test_other_data_with_the_same_classes(capsys, monkeypatch):
    digits = load("digits")

    def dark(recipe):
        held = load("digits", validation=0.1).validation
        share = {"digits": 1, "dark_digits": 2, "black_digits": 255}[recipe.data]
        test, held = (Stored(each.images // share, each.labels, digits.class_names) for each in (digits.test, held))
        return replace(digits, name=recipe.data, test=test, validation=held)

    monkeypatch.setattr(ask, "load_data", dark)
    (found,) = asked(capsys, A, "--data", "dark_digits")
    scores = open_run(A, device="cpu").model((digits.test.images // 2)[:, None].float() / 255).scores
    assert found["figures"]["error"] == float((scores.argmax(dim=1) != digits.test.labels).double().mean())
    assert (found["data"], found["test_reads"], found["stored"]) == ("dark_digits", 1, False)
    line = read(LEDGER)[-1]
    assert (line.recipe["data"], line.test_reads, line.look) == ("dark_digits", 1, True)
    assert line.data["test"] != read(LEDGER)[0].data["test"]
    again = told(capsys, A, "--data", "dark_digits")
    assert f"{A} (epoch 2, data dark_digits): test error" in again
    assert "(as stored; the test set has been read once for this)" in again
    assert len(read(LEDGER)) == 3
    (plain,) = asked(capsys, A)
    assert (plain["data"], plain["test_reads"]) == (None, 1)
    (seen,) = asked(capsys, A, "--data", "dark_digits", "--split", "validation")
    assert seen["figures"] != asked(capsys, A, "--split", "validation")[0]["figures"]
    (both,) = asked(capsys, A, "--ensemble", B, "--data", "dark_digits")
    dimmed = [open_run(run, device="cpu").model((digits.test.images // 2)[:, None].float() / 255) for run in (A, B)]
    best = sum(each.probabilities.double() for each in dimmed).argmax(dim=1)
    assert both["figures"]["error"] == pytest.approx(float((best != digits.test.labels).double().mean()), abs=1e-9)
    assert (both["test_reads"], read(LEDGER)[-1].look) == (1, True)
    (own,) = asked(capsys, A, "--ensemble", B, "--data", "digits")
    assert (own["test_reads"], own["data"], read(LEDGER)[-1].look) == (1, None, False)
    (other,) = asked(capsys, A, "--data", "black_digits")
    assert (other["stored"], other["figures"]["error"]) == (False, 0.9)


def test_data_with_other_classes_or_sizes_are_refused(capsys, monkeypatch):
    digits = load("digits")
    two = Stored(digits.test.images, digits.test.labels % 2, ("one", "two"))
    monkeypatch.setattr(ask, "load_data", lambda recipe: replace(digits, train=two, test=two))
    assert main(["evaluate", B, "--data", "two"]) == 2
    assert capsys.readouterr().err == f"torchcaps: {B} tells other classes apart than those of two\n"
    large = Stored(torch.zeros(10, 9, 8, dtype=torch.uint8), torch.arange(10), digits.class_names)
    monkeypatch.setattr(ask, "load_data", lambda recipe: replace(digits, train=large, test=large))
    assert main(["evaluate", B, "--data", "large"]) == 2
    sentence = f"torchcaps: {B} takes images of 1 x 8 x 8, and those of large have 1 x 9 x 8\n"
    assert capsys.readouterr().err == sentence
    monkeypatch.setattr(ask, "find", lambda protocol, data: None)
    assert main(["evaluate", B, "--protocol", "sabour2017"]) == 2
    sentence = f"torchcaps: {B} takes images of 1 x 8 x 8, and those of digits by sabour2017 have 1 x 9 x 8\n"
    assert capsys.readouterr().err == sentence


def test_what_is_the_runs_own_is_no_further_look(capsys, monkeypatch, place, checksum):
    assert main(["export", A, "--out", "net", "--device", "cpu"]) == 0
    capsys.readouterr()
    before = checksum(place)
    monkeypatch.setattr(looks, "look", None)
    for words in (["--data", "digits"], ["--crops", "1"]):
        (found,) = asked(capsys, A, *words)
        assert (found["stored"], found["test_reads"], found["data"], found["crops"]) == (True, 1, None, None)
        assert main(["evaluate", "net", *words, "--results", "looks.jsonl"]) == 2
        assert "net is no run, so there is no line to add to looks.jsonl" in capsys.readouterr().err
    assert checksum(place) == before


def test_another_protocol_is_not_asked_for_what_only_the_first_knows():
    trained = recipes.find("ours:mnist")
    two = replace(trained, data_args={**trained.data_args, "crops": 2})
    assert ask.Ask(protocol="sabour2017", crops=2).of(two).crops == 2
    assert ask.Ask(protocol="ours", crops=2).of(two).plain
    asked_for = ask.Ask(protocol="sabour2017", crops=2).recipe(trained)
    assert (asked_for.protocol, asked_for.data_args) == ("sabour2017", {"crops": 2})
    assert ask.Ask(data="fashion_mnist").recipe(trained).data_args == trained.data_args


def test_looks_before_a_runs_own_test_count_if_they_were_at_its_test_set(capsys):
    for name in ("test.json", "result.json", "reading.json"):
        Path(A, name).unlink()
    asks, figures = [{"data": "dark_digits"}, {"crops": 4}], read(LEDGER)[0].test
    Path(A, "looks.json").write_text(json.dumps({"looks": [{"ask": each, "figures": figures} for each in asks]}))
    told(capsys, A, "--results", "own.jsonl")
    assert read("own.jsonl")[0].test_reads == 2


def test_reading_after_each_epoch_counts(capsys):
    path = Path(A, "reading.json")
    path.write_text(json.dumps({"begun": 1, "epochs": 30}))
    assert asked(capsys, A)[0]["test_reads"] == 31


def test_exported_weights_get_a_line_where_a_file_is_named(capsys, place, monkeypatch):
    assert main(["export", A, "--out", "net", "--device", "cpu"]) == 0
    own = read(LEDGER)[0]
    monkeypatch.setattr(ask, "load_data", lambda recipe: replace(load("digits"), name=recipe.data))
    assert "test error" in told(capsys, "net", "--data", "dark_digits", "--results", "looks.jsonl")
    (line,) = read("looks.jsonl")
    assert (line.table, line.row, line.seed, line.epochs) == (own.table, own.row, own.seed, own.epochs)
    assert (line.recipe["data"], line.test_reads, line.test["error"]) == ("dark_digits", 1, own.test["error"])
    assert (line.look, line.validation, line.data) == (True, None, checksums(load("digits").splits()))
    assert line.finished > own.finished
    told(capsys, "net", "--data", "dark_digits", "--results", "looks.jsonl")
    data = ["--data", "dark_digits"]
    no_line = "net is no run, so there is no line to add to looks.jsonl"
    part = "a test of 5 images gets no line; leave --results or --images out"
    for words, why in (([], no_line), ([*data, "--images", "5"], part), ([*data, "--split", "validation"], no_line)):
        assert main(["evaluate", "net", *words, "--results", "looks.jsonl"]) == 2
        assert why in capsys.readouterr().err
    assert read("looks.jsonl") == [line]


def test_looks_at_exported_weights_are_counted_by_the_lines_that_a_file_has(capsys, place, monkeypatch):
    """Those at the same images; neither looks at a run's kept epoch nor those at other data."""
    assert main(["export", A, "--out", "net", "--device", "cpu"]) == 0
    digits = load("digits")

    def shaded(recipe):
        share = {"digits": 1, "dark_digits": 2, "dim_digits": 3}[recipe.data]
        test = Stored(digits.test.images // share, digits.test.labels, digits.class_names)
        crops = recipe.data_args.get("crops", 1)
        transform = (corners(),) if crops > 1 else digits.test_transform
        return replace(digits, name=recipe.data, test=test, test_transform=transform)

    monkeypatch.setattr(ask, "load_data", shaded)
    told(capsys, A, "--data", "dark_digits", "--epoch", "1", "--results", "looks.jsonl")
    for words in (["--data", "dark_digits"], ["--data", "dim_digits"], ["--data", "dark_digits", "--crops", "4"]):
        told(capsys, "net", *words, "--results", "looks.jsonl")
    _, dark, dim, cropped = read("looks.jsonl")
    assert [line.recipe["data"] for line in (dark, dim, cropped)] == ["dark_digits", "dim_digits", "dark_digits"]
    assert [line.test_reads for line in (dark, dim, cropped)] == [1, 1, 2]


def test_a_broken_ledger_of_a_named_row_is_refused_before_a_look(capsys, monkeypatch, place, checksum):
    row = replace(recipes.find("quick:digits"), metric="ensemble_error", seeds=2)
    monkeypatch.setitem(recipes.tables()["ours"].ROWS, "pairs", row)
    Path("runs/two/ours.jsonl").write_text("{half\n")
    before = checksum(place)
    assert main(["evaluate", A, "--ensemble", B, "--row", "ours:pairs", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("torchcaps: runs/two/ours.jsonl, line 1 is broken: ")
    assert checksum(place) == before


def test_one_view_is_looked_up_where_the_run_has_told_it(capsys, monkeypatch):
    monkeypatch.setattr(looks, "look", None)
    path = Path(A, "test.json")
    test = json.loads(path.read_text())
    alone = {**test["figures"], "error": 0.5}
    path.write_text(json.dumps({**test, "figures": {**test["figures"], "one_view": alone}}))
    about = json.loads(Path(A, "recipe.json").read_text())
    about["recipe"]["data_args"] = {"crops": 2}
    Path(A, "recipe.json").write_text(json.dumps(about))
    (found,) = asked(capsys, A, "--crops", "1")
    assert (found["figures"]["error"], found["stored"], found["test_reads"]) == (0.5, True, 1)


def test_an_ensemble_is_the_sum_of_lengths_and_names_its_members(capsys, monkeypatch):
    monkeypatch.setattr(looks, "look", None)
    (found,) = asked(capsys, A, "--ensemble", B)
    members = [load_predictions(Path(folder, "predictions.safetensors")) for folder in (A, B)]
    total = members[0].probabilities.double() + members[1].probabilities.double()
    pairs = zip(total.tolist(), members[0].labels.tolist(), strict=True)
    wrong = sum(max(range(10), key=row.__getitem__) != label for row, label in pairs)
    assert found["figures"]["error"] == pytest.approx(wrong / 360, abs=1e-12)
    assert found["members"] == ["two/seed-0", "two/seed-1"]
    assert found["test_reads"] == 1
    line = read(LEDGER)[-1]
    assert (line.members, line.test_reads, line.test) == (("two/seed-0", "two/seed-1"), 1, found["figures"])
    assert line.chosen_from is None
    ends = [json.loads(Path(folder, "final.json").read_text()) for folder in (A, B)]
    assert line.seconds == pytest.approx(sum(end["seconds"] for end in ends))
    assert (line.epoch, line.steps, line.curves) == (None, None, {})
    (again,) = asked(capsys, A, B, "--ensemble")
    assert (again["stored"], again["figures"]) == (True, found["figures"])
    assert len(read(LEDGER)) == 3
    assert "test set has been read twice" in told(capsys, A)


def test_members_are_chosen_on_validation(capsys):
    errors = {folder: json.loads(Path(folder, "validation.json").read_text())["figures"]["error"] for folder in (A, B)}
    assert errors[A] != errors[B]
    best = min(errors, key=lambda folder: errors[folder])
    (found,) = asked(capsys, "--ensemble", A, B, "--members", "2")
    assert (found["members"][0], found["test_reads"]) == (best.removeprefix("runs/"), 1)
    assert read(LEDGER)[-1].chosen_from == 2
    assert told(capsys, "--ensemble", A, B, "--members", "2").startswith(f"ensemble of {best.removeprefix('runs/')}, ")


@pytest.mark.parametrize("order", [(A, "--ensemble", B), (B, "--ensemble", A), ("--ensemble", B, A, "--members", "2")])
def test_an_ensemble_is_one_look_in_whatever_order_it_is_named(order, capsys):
    asked(capsys, A, "--ensemble", B)
    (found,) = asked(capsys, *order, "--results", LEDGER)
    assert (found["stored"], found["test_reads"], len(read(LEDGER))) == (True, 1, 3)


def test_members_of_one_name_are_told_apart_by_their_weights(capsys):
    asked(capsys, A, "--ensemble", B)
    other = Path(shutil.copytree("runs", "other"), "two", "seed-1")
    shutil.copy(Path(A, "weights.safetensors"), other / "weights.safetensors")
    (found,) = asked(capsys, A, "--ensemble", str(other))
    assert (found["members"], found["stored"], found["test_reads"]) == (["two/seed-0", "two/seed-1"], False, 2)
    for folder in (B, str(other)):
        assert asked(capsys, A, "--ensemble", folder)[0]["stored"]


def test_a_look_that_one_member_has_alone_is_shared(capsys):
    """As where a process ended between the two."""
    asked(capsys, A, "--ensemble", B)
    Path(B, "looks.json").unlink()
    (found,) = asked(capsys, A, "--ensemble", B)
    assert (found["stored"], found["test_reads"]) == (True, 1)
    assert Path(A, "looks.json").read_text() == Path(B, "looks.json").read_text()
    assert len(read(LEDGER)) == 3


def test_a_line_is_that_of_the_moment_of_its_look(capsys):
    """Also where the run has gone on since."""
    asked(capsys, A, "--epoch", "1")
    *_, line = read(LEDGER)
    metrics = Path(A, "metrics.csv")
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[-1].replace("2,", "3,", 1) + "\n")
    asked(capsys, A, "--epoch", "1", "--results", LEDGER)
    assert (len(read(LEDGER)), read(LEDGER)[-1]) == (3, line)


def test_two_looks_are_told_each_by_itself(capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("torchcaps.finish.append", full)
        for words in (["--epoch", "1"], ["--data", "dark_digits"]):
            broken.setattr(ask, "load_data", lambda recipe: load("digits", validation=0.1))
            assert main(["evaluate", A, *words, "--device", "cpu"]) == 2
    asked(capsys, A, "--data", "dark_digits")
    assert [each["told"] for each in json.loads(Path(A, "looks.json").read_text())["looks"]] == [False, True]
    asked(capsys, A, "--epoch", "1")
    assert [line.recipe["data"] for line in read(LEDGER)[2:]] == ["dark_digits", "digits"]


def test_an_ensemble_of_several_recipes_has_the_line_of_the_row_that_is_named(capsys, monkeypatch):
    def opened(folder, **options):
        found = open_run(folder, **options)
        return replace(found, recipe=replace(found.recipe, lr=0.1)) if folder == Path(B) else found

    monkeypatch.setattr(ensembles, "open_run", opened)
    asked(capsys, A, "--ensemble", B)
    assert not read(LEDGER)[-1].members
    assert main(["evaluate", A, "--ensemble", B, "--results", "some.jsonl", "--device", "cpu"]) == 2
    assert (
        "two/seed-0 and two/seed-1 differ in recipe, so their line needs a row; name it by" in capsys.readouterr().err
    )
    row = replace(recipes.find("quick:digits"), metric="ensemble_error", seeds=2)
    monkeypatch.setitem(recipes.tables()["quick"].ROWS, "pairs", row)
    for folder in (A, B):
        Path(folder, "looks.json").unlink()
    (found,) = asked(capsys, A, "--ensemble", B, "--row", "quick:pairs")
    line = read(LEDGER)[-1]
    assert (line.table, line.row, line.members) == ("quick", "pairs", ("two/seed-0", "two/seed-1"))
    assert (line.recipe, line.test) == (row.to_dict(), found["figures"])


@pytest.mark.parametrize(("second", "epochs", "planned"), [((9, 9), 9, 9), ((1, 1), 2, 2), ((3, 9), 3, 9)])
def test_an_ensemble_is_shortened_where_a_member_is(second, epochs, planned, tmp_path):
    for name, (ran, meant) in (("one", (2, 2)), ("two", second)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({"epochs": ran, "planned": meant}))
    assert ensembles._length([tmp_path / "one", tmp_path / "two"]) == {"epochs": epochs, "planned": planned}


def test_an_ensemble_of_one_recipe_says_how_its_members_were_trained(capsys, monkeypatch):
    row = replace(recipes.find("quick:digits"), metric="ensemble_error", seeds=2, reported="0.1", lr=0.7)
    monkeypatch.setitem(recipes.tables()["quick"].ROWS, "pairs", row)
    asked(capsys, A, "--ensemble", B, "--row", "quick:pairs", "--results", "pairs.jsonl")
    (line,) = read("pairs.jsonl")  # and none of the members, which have theirs
    own = open_run(A, device="cpu").recipe
    assert own.lr != 0.7
    assert line.recipe == replace(own, metric="ensemble_error", seeds=2, reported="0.1", note=row.note).to_dict()


def test_an_ensemble_is_not_counted_for_a_row_of_another_network(capsys, monkeypatch):
    row = replace(recipes.find("quick:digits"), metric="ensemble_error", model="capsnet")
    monkeypatch.setitem(recipes.tables()["quick"].ROWS, "pairs", row)
    assert main(["evaluate", A, "--ensemble", B, "--row", "quick:pairs", "--device", "cpu"]) == 2
    sentence = "torchcaps: quick:pairs is of capsnet, and two/seed-0 is of efficient_capsnet\n"
    assert capsys.readouterr().err == sentence
    assert not Path(A, "looks.json").exists()


def test_an_ensemble_that_is_known_gets_the_line_of_a_row_that_is_named_later(capsys, monkeypatch):
    """Once, in the file of the row's own table, with the moment of the look."""
    row = replace(recipes.find("quick:digits"), metric="ensemble_error", seeds=2)
    monkeypatch.setitem(recipes.tables()["ours"].ROWS, "pairs", row)
    asked(capsys, A, "--ensemble", B)
    *_, first = read(LEDGER)
    for _ in range(2):
        (found,) = asked(capsys, A, "--ensemble", B, "--row", "ours:pairs")
        assert (found["stored"], found["test_reads"]) == (True, 1)
    (line,) = read("runs/two/ours.jsonl")
    assert (line.table, line.row, line.members, line.test) == ("ours", "pairs", first.members, first.test)
    assert (line.finished, line.commit, line.test_reads) == (first.finished, first.commit, 1)
    assert len(read(LEDGER)) == 3


@pytest.mark.parametrize("words", [(A, "--epoch", "1"), (A, "--ensemble", B)])
def test_a_look_whose_line_could_not_be_written_gets_it_later(words, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("torchcaps.finish.append", full)
        assert main(["evaluate", *words, "--device", "cpu"]) == 2
    sentence = f"torchcaps: the result could not be written to {LEDGER}: No space left on device; the run is safe, and "
    assert capsys.readouterr().err == f"{sentence}torchcaps evaluate adds its line with --results\n"
    (look,) = json.loads(Path(A, "looks.json").read_text())["looks"]
    before = len(read(LEDGER))
    for _ in range(2):
        (found,) = asked(capsys, *words)
        assert (found["stored"], found["figures"]) == (True, look["figures"])
    *_, line = read(LEDGER)
    assert (len(read(LEDGER)), line.test, line.finished) == (before + 1, look["figures"], look["line"]["finished"])
    asked(capsys, *words, "--results", "named.jsonl")
    assert read("named.jsonl") == [line]


def test_members_are_locked_while_they_are_tested_together(capsys, place, checksum):
    before = checksum(place)
    with checkpoint.locked(Path(B)):
        assert main(["evaluate", A, "--ensemble", B, "--device", "cpu"]) == 2
    assert f"in {B}; wait for it" in capsys.readouterr().err
    assert checksum(place) == before


def test_the_epoch_that_a_run_selected_is_no_further_look(capsys, monkeypatch, place, checksum):
    before = checksum(place)
    monkeypatch.setattr(looks, "look", None)
    (found,) = asked(capsys, A, "--epoch", "2")
    assert (found["stored"], found["test_reads"], found["epoch"]) == (True, 1, 2)
    assert checksum(place) == before


@pytest.mark.parametrize(
    "broken", [3, [3], [{}], {"figures": {}}, {"figures": 3}, {"told": 3}, {"line": {}}, {"line": 3}]
)
def test_looks_that_are_none_are_told(broken, capsys):
    asked(capsys, A, "--epoch", "1")
    (look,) = json.loads(Path(A, "looks.json").read_text())["looks"]
    content = [{**look, **broken}] if isinstance(broken, dict) else broken
    Path(A, "looks.json").write_text(json.dumps({"looks": content}))
    assert main(["evaluate", A, "--epoch", "1", "--device", "cpu"]) == 2
    sentence = f"torchcaps: {A}/looks.json does not hold what has been asked of this run; repair it, or move it away\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("about", ["", '{"note": "mine"}'])
def test_a_run_that_another_program_trained_is_named_by_data_and_model(about, capsys):
    Path(A, "row.json").write_text(about) if about else Path(A, "row.json").unlink()
    Path(A, "result.json").unlink()
    assert told(capsys, A, "--results", "own.jsonl").startswith(A)
    (line,) = read("own.jsonl")
    assert (line.table, line.row) == ("digits", "efficient_capsnet")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "name at least one run folder, such as runs/quick-digits/seed-0"),
        ("nowhere", "there is no run folder nowhere\n"),
        ("two", "there is no run folder two\n"),
        ("seed-0 --data digitz", "there is no run folder seed-0\n"),
        ("two/seed-0", "there is no run folder two/seed-0; did you mean runs/two/seed-0?\n"),
        ("other/seed-0", "there is no run folder other/seed-0\n"),
        (f"{A} --data digitz", "there is no data set 'digitz'; did you mean digits?"),
        ("runs/two", "runs/two is no run folder, as it has no recipe.json; did you mean runs/two/seed-0?"),
        (f"{A} {A}", "a run is named twice"),
        (f"{A} --members 1", "--members goes with --ensemble, which names the runs to choose from"),
        (f"{A} --ensemble {B} --members 3", "an ensemble of 3 cannot be chosen from 2 networks"),
        (f"{A} --ensemble {B} --epoch 1", "--ensemble tests runs as their recipes select them; "),
        (f"{A} --ensemble {B} --row quick:digits", "--row names the row of an ensemble, such as ours:mnist-ensemble, "),
        (f"{A} --row ours:mnist-ensemble", "--row goes with --ensemble, which names the runs that are tested together"),
        (
            f"{A} --ensemble {B} --row ours:mnist-ensemble",
            "ours:mnist-ensemble is of mnist, and two/seed-0 is ",
        ),
        (
            f"{A} --ensemble {B} --row ours:mnist-ensemble --images 5",
            "a test of 5 images gets no line; leave --row ",
        ),
        (f"{A} --ensemble", "an ensemble is of two runs or more, not of 1"),
        (f"{A} --ensemble {B} --members 1", "an ensemble is of two runs or more, not of 1"),
        (f"{A} --split validation --results some.jsonl", "a look at held-out images gets no line; leave --results out"),
        (f"{A} --images 5 --results some.jsonl", "a test of 5 images gets no line; leave --results or --images out"),
        (f"{A} --epoch 1 --results runs", "runs is a folder; lines are added to a file, such as runs/results.jsonl"),
        (f"{A} --epoch 7", f"epoch 7 of {A} was not kept; the kept ones are 1"),
        (f"{A} --protocol sabour2017", "sabour2017 has no protocol for digits; "),
        (f"{A} --protocol sabor2017", "there is no protocol 'sabor2017'; did you mean sabour2017?"),
        (f"{A} --crops 40", "crops=40 needs a protocol that says how digits is cropped"),
        (f"{A} --split training", "invalid choice 'training' for argument '--split'"),
        (f"{A} --device cuda:97", "device cuda:97 is not there; "),
        (f"{A} --images 0", "at least one image of the test set must be looked at, got 0"),
    ],
)
def test_bad_input(words, sentence, capsys, place, checksum):
    before = checksum(place)
    assert main(["evaluate", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"torchcaps: {sentence}"), err
    assert err.count("\n") == 1
    assert not out
    assert checksum(place) == before


def test_broken_files_are_told_and_left(capsys, place, checksum):
    Path(A, "weights.safetensors").write_bytes(Path(A, "weights.safetensors").read_bytes()[:1000])
    Path(B, "final.json").unlink()
    before = checksum(place)
    assert main(["evaluate", A]) == 2
    assert capsys.readouterr().err.startswith(f"torchcaps: {A} cannot be opened: weights.safetensors is ")
    assert main(["evaluate", B]) == 2
    fields = "--epochs 2 --samples 96 --batch-size 16 --keep-epochs 1"
    words = f"train quick:digits --resume --out {B} --seed 1 {fields}"
    assert capsys.readouterr().err == f"torchcaps: {B} has not finished; torchcaps {words} goes on\n"
    assert checksum(place) == before
    assert main(words.split()) == 0


def test_a_broken_line_of_results_is_refused_before_the_test_set_is_read(capsys, place, checksum):
    with Path(LEDGER).open("a") as file:
        file.write("{half\n")
    before = checksum(place)
    assert main(["evaluate", A, "--epoch", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"torchcaps: {LEDGER}, line 3 is broken: it is cut short or no JSON; ")
    assert checksum(place) == before
