"""Lines that survive, and tables made from them."""

import errno
import html
import json
import math
import os
import subprocess
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from torchcaps import recipes
from torchcaps.data import load
from torchcaps.data.generated import MultiMNIST
from torchcaps.evaluate import Predictions, figures
from torchcaps.recipes import Recipe
from torchcaps.results import Result, append, checksums, from_line, ledger, read, thinned
from torchcaps.results.notes import assumed, held_out, remarks
from torchcaps.results.tables import disagreement, render, variation
from torchcaps.shorten import shortened

BASE = Recipe(
    "capsnet_mnist", "mnist", epochs=10, reported="0.25 ± 0.005", assumed=("lr", "schedule_args.decay", "luck")
)
FIRST = SimpleNamespace(
    __name__="fakes.first_table1",
    TITLE="First 2017, table 1: test error (%)",
    ROWS={"three": BASE, "one": replace(BASE, reported="0.29", note="trained | for <long>")},
    CITED={"Others, 2016": "0.31"},
)
SECOND = SimpleNamespace(
    __name__="fakes.second_table2",
    TITLE="Second <2020> & others: accuracy_*",
    ROWS={
        "alone": Recipe("a", "b", metric="accuracy", epochs=5, select="best", reported="95.14"),
        "pair": Recipe("a", "b", metric="ensemble_accuracy", epochs=5, seeds=2, reported="96.0"),
        "curve": Recipe("a", "b", metric="loss", epochs=5),
    },
)


def result(row="three", error=0.0025, seed=0, table="first_table1", recipe=BASE, **values):
    test = {"error": error, "accuracy": 1 - error, "standard_error": 0.0005}
    known = {"epochs": recipe.epochs, "planned": recipe.epochs, "recipe": recipe.to_dict()}
    return Result(**{"table": table, "row": row, "seed": seed, "test": test, **known, **values})


FIRST_RESULTS = [
    result(seed=0, error=0.0024, dirty=True, commit="abcdef012345", seconds=73.0, device="cpu"),
    result(seed=1, error=0.0028, finished="2026-01-02", seconds=77.0, device="cpu"),
    result(seed=1, error=0.5, finished="2026-01-01"),
    result(seed=0, error=0.0044, epochs=3, seconds=9000.0),
    result(seed=0, error=0.0055, recipe=replace(BASE, lr=0.5, model_args={"r": 1}), test_reads=2),
    result("gone"),
]
alone, pair, curve = SECOND.ROWS.values()
TOOK = {"seconds": 5.5, "together": 2}
SECOND_RESULTS = [
    result("alone", 0.06, 0, "second_table2", alone, selected="best", epoch=3, test_last={"accuracy": 0.93}, **TOOK),
    result("alone", 0.05, 1, "second_table2", alone, selected="best", epoch=5, test_last={"accuracy": 0.92}, **TOOK),
    result(
        "pair", 0.04, 0, "second_table2", pair, members=("alone seed 0", "alone seed 1"), chosen_from=3, seconds=11.0
    ),
    result("pair", 0.05, 0, "second_table2", pair),
    result("curve", 0.05, 0, "second_table2", curve, curves={"loss": [0.5, 0.125]}, seconds=600.0),
]

FIRST_TEXT = """\
First 2017, table 1: test error (%)

row                               metric          paper           ours  n  standard error  epoch          a run took
---------------------------------------------------------------------------------------------------------------------
three (1) (2) (3)                 error %  0.25 ± 0.005  0.260 ± 0.028  2            0.05  last 10 of 10  75 s on cpu
  3 of 10 epochs, shortened                                      0.440  1            0.05  last 3 of 3    2.5 h
  lr = 0.5, model_args.r = 1 (4)                                 0.550  1            0.05  last 10 of 10
one (1) (5)                       error %          0.29        not run
Others, 2016                                       0.31          cited

(1) assumed: lr = 0.001, schedule_args.decay, luck
(2) run with changes that commit abcdef0 does not have
(3) an earlier run of seed 1 had 50.00
(4) the test set was read more than once
(5) trained | for <long>
(6) there are results of rows that this table does not have: gone

Ours: mean ± standard deviation over n seeds; the standard error is that of a share, for one run's test set.
"""
SECOND_MARKDOWN = """\
### Second \\<2020\\> & others: accuracy\\_\\*

| row | metric | paper | ours | n | standard error | epoch | a run took |
| --- | --- | ---: | ---: | ---: | ---: | --- | --- |
| alone | accuracy % | 95.14 | 94.50 ± 0.71 | 2 | 0.05 | best 3 to 5 of 5, last 92.50 ± 0.71 | 5.5 s each, 2 at once |
| pair (1) | ensemble accuracy % | 96.0 | 96.00 | 1 | 0.05 | each its last | 11 s for all members |
| with members alone |  |  | 95.00 | 1 | 0.05 | last 5 of 5 |  |
| curve | loss |  | 0.125 | 1 |  | last 5 of 5 | 10.0 min |

1. members, chosen on validation: alone seed 0 to 1

Ours: mean ± standard deviation over n seeds; the standard error is that of a share, for one run's test set.
"""


def test_a_line_comes_back_as_it_went(tmp_path):
    path = tmp_path / "new" / "mnist.jsonl"
    probabilities = torch.rand(20, 4)
    told = figures(Predictions(probabilities, probabilities, torch.randint(0, 4, (20,))))
    mine = Result.now(
        table="first_table1", row="three", recipe=BASE.to_dict(), seed=3, test=told, epochs=7, members=("a", "b"),
        curves={"loss": [1.5, 0.5]}, seconds=12.5, device="cpu", data={"test": "00ff"}, energy=None,
    )  # fmt: skip
    append(path, mine)
    append(path, replace(mine, seed=4))
    assert read(path) == read(path.parent) == [mine, replace(mine, seed=4)]
    assert mine.shortened
    assert mine.test_reads == 1
    line = json.loads(path.read_text().splitlines()[0])
    assert line["shortened"] is True
    assert {"python", "torch", "cpu"} <= line["environment"].keys()
    assert recipes.from_dict(line["recipe"]) == BASE
    assert read(tmp_path / "nowhere") == []


def test_tensors_and_missing_numbers_become_plain():
    line = json.loads(result(curves={"loss": torch.tensor([0.5, math.inf]), "error": [math.nan, 0.1]}).line())
    assert line["curves"] == {"loss": [0.5, None], "error": [None, 0.1]}


def test_planned_epochs_are_those_of_the_table():
    name = recipes.names()[0]
    table, _, row = name.partition(":")
    recipe = recipes.find(name)
    values = {"seed": 0, "test": {}, "epochs": 1, "recipe": replace(recipe, epochs=1).to_dict()}
    assert Result.now(table=table, row=row, **values).planned == recipe.epochs
    assert Result.now(table="", row="", **values).planned == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"table": "first', "cut short or no JSON"),
        ("[1, 2]", "holds no fields"),
        ("\udcff", "cut short or no JSON"),
        ("[" * 100_000, "cut short or no JSON"),
        ('{"table": "a", "row": "b"}', "no recipe and no seed"),
        (result().line().replace('"seed": 0', '"seed": "0"'), 'its seed must be a whole number, got "0"'),
        (result().line().replace('"seed": 0', '"seed": true'), "its seed must be a whole number, got true"),
        (result().line().replace('"seed": 0', '"seed": NaN'), "NaN is no number"),
        (result().line().replace('"test": {', '"test": null, "x": {'), "its test must be names with values"),
    ],
    ids=["cut", "list", "bytes", "deep", "few", "word", "bool", "nan", "null"],
)
def test_a_broken_line_is_named_and_nothing_changes(tmp_path, caplog, line, why):
    path = tmp_path / "a.jsonl"
    append(path, result(seed=1))
    with path.open("ab") as file:
        file.write(b"\n" + line.encode(errors="surrogateescape") + b"\n")
    append(path, result(seed=2))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 is broken: ") as caught:
        read(tmp_path)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [each.seed for each in read(tmp_path, broken="skip")] == [1, 2]
    assert "line 3 is broken" in caplog.text
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="'refuse' or 'skip'"):
        read(tmp_path, broken="mend")


def test_fields_of_a_newer_version_are_left_out():
    line = result().line()
    assert from_line(line[:-1] + ', "weather": "rain"}') == result()


def test_a_line_cut_short_does_not_take_the_next_with_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"table": "fi')
    append(path, result())
    assert path.read_text().startswith('{"table": "fi\n{')
    assert read(path, broken="skip") == [result()]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "a.jsonl"
    append(path, result())
    before, write = path.read_bytes(), os.write

    def full(descriptor, data=b""):
        if call == "write" and len(data) > 50:
            return write(descriptor, data[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, call, full)
        with pytest.raises(OSError, match="No space"):
            append(path, result(seed=1))
    assert path.read_bytes() == before
    append(path, result(seed=1))
    assert len(read(path)) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_four_processes_give_four_whole_lines(tmp_path, monkeypatch):
    """They start at once and write in small pieces, so that without the lock the lines would mix."""
    write, path = os.write, tmp_path / "all.jsonl"

    def in_pieces(descriptor, data):
        os.sched_yield()
        return write(descriptor, data[:1000])

    monkeypatch.setattr(ledger.os, "write", in_pieces)
    gate, opener = os.pipe()
    children = []
    for seed in range(4):
        children.append(os.fork())
        if not children[-1]:
            code = 1
            try:
                os.close(opener)
                os.read(gate, 1)  # returns once the parent has closed its end
                append(path, result(seed=seed, curves={"loss": [0.1] * 50_000}))
                code = 0
            finally:
                os._exit(code)
    os.close(opener)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    os.close(gate)
    assert sorted(each.seed for each in read(path)) == [0, 1, 2, 3]
    assert path.read_bytes().count(b"\n") == 4


def test_outside_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "PACKAGE", tmp_path)
    assert ledger.source() == ("unknown", False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "other").touch()
    for words in (["init", "-q"], ["add", "other"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    assert ledger.source() == ("unknown", False)  # someone else's checkout, in which the package is installed
    (tmp_path / "__init__.py").touch()
    for words in (["add", "."], ["commit", "-qm", "second"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    commit, dirty = ledger.source()
    assert len(commit) == 40
    assert not dirty
    (tmp_path / "routing.py").touch()
    assert ledger.source() == (commit, True)
    monkeypatch.setenv("PATH", "")
    assert ledger.source() == ("unknown", False)


def test_checksums_tell_data_apart():
    data = load("digits", validation=0.1)
    first = checksums(data.splits())
    assert set(first) == {"train", "validation", "test"}
    assert len(set(first.values())) == 3
    assert first == checksums(load("digits", validation=0.1).splits())
    data.test.images[0, 0, 0] += 1
    assert checksums(data.splits())["test"] != first["test"]
    made = [MultiMNIST(data.train, 50, seed=seed) for seed in (0, 0, 1)]
    sums = [checksums({"a": split})["a"] for split in made]
    assert sums[0] == sums[1] != sums[2]


def test_streamed_images_are_told_apart_by_name_and_size_wherever_they_lie(tmp_path):
    def split(folder):
        paths = [folder / "a" / "1.png", folder / "b" / "2.png"]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"12")
        return paths

    def summed(paths):
        labels = torch.tensor([0, 1])
        made = SimpleNamespace(paths=paths, labels=labels, class_names=("a", "b"), image=(1, 2, 2), __len__=None)
        made = type("Split", (SimpleNamespace,), {"__len__": lambda self: 2})(**vars(made))
        return checksums({"test": made})["test"]

    first, second = split(tmp_path / "x"), split(tmp_path / "y")
    assert summed(first) == summed(second)
    second[0].write_bytes(b"123")
    assert summed(first) != summed(second)


def test_the_text_of_a_table():
    assert render(FIRST, FIRST_RESULTS) == FIRST_TEXT


def test_the_markdown_of_a_table():
    assert render(SECOND, SECOND_RESULTS, "markdown") == SECOND_MARKDOWN
    assert "trained \\| for \\<long\\>" in render(FIRST, [], "markdown")


def test_html_is_escaped():
    page = render(SECOND, SECOND_RESULTS, "html")
    assert "<caption>Second &lt;2020&gt; &amp; others: accuracy_*</caption>" in page
    assert '<td class="number">94.50 ± 0.71</td>' in page
    evil = SimpleNamespace(
        __name__="evil", TITLE="<script>", ROWS={"<b>": replace(BASE, note="<i>'\"")}, CITED={"&": "<1"}
    )
    lines = [result("<b>", table="evil", seed=k, members=("<u>",)) for k in range(2)]
    page = render(evil, lines, "html")
    for text in ("<script>", "<b>", "<i>'\"", "<u>", "<1"):
        assert text not in page
        assert html.escape(text) in page


def test_members_a_sample_and_other_metrics_are_told_as_they_are():
    pair = replace(BASE, metric="ensemble_per_digit_error", seeds=2)
    test = {"per_digit_error": 0.25, "standard_error": 0.0005, "images": 1000, "sampled_from": 10000}
    line = result(recipe=pair, members=("one", "two"), test=test)
    text = render(SimpleNamespace(__name__="first_table1", TITLE="First", ROWS={"three": pair}), [line])
    row = next(each for each in text.splitlines() if each.startswith("three"))
    assert row.split()[-5:] == ["25.00", "1", "each", "its", "last"]  # no error of another figure
    assert ") members: one, two\n" in text
    assert ") tested on 1,000 of 10,000 images\n" in text


def test_an_ensemble_goes_to_the_row_that_counts_it():
    """Whichever row its members were trained as, in the same table or in another."""
    both = replace(BASE, metric="ensemble_error", seeds=2)
    first = SimpleNamespace(__name__="first_table1", TITLE="First", ROWS={"three": BASE, "together": both})
    other = SimpleNamespace(__name__="other", TITLE="Other", ROWS={"pair": both})
    lines = [result(seed=0), result(error=0.0011, members=("a", "b")), result(error=0.0012, members=("a", "b", "c"))]
    shown = [line.strip().split("  ")[0] for line in render(first, lines).splitlines()[4:7]]
    assert shown == ["three (1)", "together (1) (2)", "an ensemble of 3 (3)"]
    assert render(first, lines).count("0.110") == 1
    assert next(line for line in render(other, lines).splitlines() if line.startswith("pair")).split()[-6] == "0.110"
    changed = result(error=0.0011, members=("a", "b"), recipe=replace(BASE, lr=0.5))
    for table in (first, other):
        assert "lr = 0.5" in render(table, [changed])
        assert "an ensemble of 2" not in render(table, [changed])
    stranger = result(error=0.0011, members=("a", "b"), recipe=replace(BASE, data="cifar10"))
    assert "cifar10" not in render(other, [stranger])
    assert "data = cifar10, an ensemble of 2" in render(first, [stranger])


def test_the_last_epoch_is_told_where_one_run_at_least_chose_another():
    recipe = replace(BASE, select="best")
    runs = [
        result(error=0.004, recipe=recipe, selected="best", epoch=3, test_last={"error": 0.002}),
        result(error=0.006, recipe=recipe, selected="best", epoch=10, seed=1),
    ]
    table = SimpleNamespace(__name__="first_table1", TITLE="First", ROWS={"three": recipe})
    assert "best 3 to 10 of 10, last 0.400 ± 0.283" in render(table, runs)


def test_choosing_on_the_test_set_is_remarked():
    same = {"train": "a", "validation": "b", "test": "b"}
    said = "the epoch was chosen on the test set, which was read after each"
    assert remarks([result(selected="best", data=same)]) == [said]
    assert remarks([result(data=same)]) == []
    assert remarks([result(selected="best", data={**same, "validation": "c"})]) == []
    assert remarks([result(selected="best")]) == []


def test_what_is_held_out_is_told_where_the_recipe_leaves_it_to_the_protocol():
    recipe = recipes.find("mazzia2021_table2:efficient")
    assert (recipe.validation, held_out(recipe)) == (None, 0.05)
    assert "validation = 0.05" in assumed(recipe)
    assert held_out(recipes.find("mazzia2021_table2:efficient-official")) == "test"
    assert held_out(replace(BASE, validation=0.1)) == 0.1


def test_what_is_assumed_of_a_model_is_told_with_its_default_or_left_out_where_it_has_no_such_option():
    row = recipes.find("sabour2017_affnist:capsnet")
    assert assumed(row).endswith("model_args.iterations = 3")
    assert assumed(replace(row, assumed=("model_args.channels",))) == "assumed: model_args.channels = 256"
    assert "iterations" not in assumed(replace(row, model="efficient_capsnet_mnist", model_args={}))


def test_a_schedule_that_is_shortened_as_the_epochs_are_is_told_in_a_word():
    row = replace(BASE, epochs=100, schedule="exponential", schedule_args={"decay": 0.98})
    alike, left = "schedule shortened alike", "its schedule not shortened"
    for decay, told in ((0.9349, alike), (0.9, "schedule_args.decay = 0.9"), (0.98, left)):
        run = result(epochs=30, planned=100, recipe=replace(row, epochs=30, schedule_args={"decay": decay}))
        assert variation(row, run, epochs=False) == told
        assert variation(row, run) == f"{told}, 30 of 100 epochs"


def test_what_of_a_schedule_was_left_as_it_is_in_the_whole_recipe_is_told():
    row = recipes.find("tsai2020_figure4:em-2")
    short = shortened(row, 4)
    assert variation(row, result(epochs=4, recipe=short), epochs=False) == "schedule shortened alike"
    margin = result(epochs=4, planned=row.epochs, recipe=replace(short, spread_steps=row.spread_steps))
    assert variation(row, margin, epochs=False) == "schedule shortened alike, spread_steps not shortened"
    longer = result(epochs=5, planned=5, recipe=replace(row, epochs=5))
    assert variation(replace(row, epochs=4), longer) == "5 of 4 epochs"
    older = result(epochs=4, planned=4, recipe=replace(row, epochs=4))
    assert variation(row, older) == f"4 of {row.epochs} epochs"
    cosine = result(epochs=4, planned=row.epochs, recipe=replace(short, schedule="cosine", schedule_args={}))
    assert variation(row, cosine, epochs=False) == "schedule = cosine, schedule_args = {}, schedule shortened alike"
    fewer = recipes.find("sabour2017_table1:routing3-multimnist")
    run = result(epochs=64, recipe=replace(fewer, samples=100_000))
    assert variation(fewer, run) == "samples = 100000, its schedule not shortened"


def test_a_run_that_stopped_where_it_should_has_the_schedule_it_was_given():
    row = recipes.find("sabour2017_affnist:capsnet")
    curves = {"validation_error": [0.02, 0.0077]}
    whole = result(epochs=2, planned=50, recipe=row, curves=curves)
    short = result(epochs=2, planned=50, recipe=shortened(row, 12), curves=curves)
    assert whole.reached
    assert variation(row, whole) == ""
    assert variation(row, short) == "schedule shortened alike"


def test_a_defect_found_later_sets_a_run_apart():
    mended, broken = result(), result(seed=1, defect="weights that were too small")
    assert variation(BASE, broken) == broken.defect
    table = SimpleNamespace(__name__="first_table1", TITLE="First", ROWS={"three": BASE})
    lines = render(table, [mended, broken]).splitlines()
    assert lines[4].startswith("three (1)  ")
    assert broken.defect in lines[5]
    assert from_line(broken.line()) == broken


def test_a_field_that_a_line_is_too_old_to_have_is_at_its_default():
    old = result()
    del old.recipe["mixup"]
    table = SimpleNamespace(__name__="first_table1", TITLE="First", ROWS={"three": BASE})
    assert "mixup" not in render(table, [old])
    table.ROWS["three"] = replace(BASE, mixup=0.5)
    assert "  mixup = 0.0 " in render(table, [old])


@pytest.mark.parametrize("length", [1, 99, 100, 101, 350, 100_000])
def test_long_curves_keep_a_hundred_points_with_their_epochs(length):
    curves = {"loss": [k / 7 for k in range(length)], "validation_error": [None] * length}
    found = thinned(curves)
    if length <= 100:
        assert found is curves
        return
    assert list(found) == ["epoch", "loss", "validation_error"]
    assert {len(values) for values in found.values()} == {100}
    assert found["loss"] == [(epoch - 1) / 7 for epoch in found["epoch"]]
    assert (found["epoch"][0], found["epoch"][-1]) == (1, length)
    gaps = [after - before for before, after in pairwise(found["epoch"])]
    assert max(gaps) - min(gaps) <= 1 <= min(gaps)
    assert thinned(found) is found
    assert thinned({}) == {}


def test_a_figure_that_is_missing_is_not_made_up():
    lines = [result(seed=0), result(seed=1, test={"error": "0.1"}), result(seed=2, test={})]
    assert "not known for 2 of 3" in render(FIRST, lines)


@pytest.mark.parametrize("name", recipes.tables())
@pytest.mark.parametrize("format", ["text", "markdown", "html"])
def test_every_table_is_rendered_without_and_with_results(name, format):
    empty = render(name, [], format)
    assert "not run" in empty
    table = recipes.tables()[name]
    words = ("error", "accuracy", "exact_match_error", "exact_match_accuracy", "per_digit_error")
    lines = []
    for row, recipe in table.ROWS.items():
        together = tuple(map(str, range(recipe.seeds))) if recipe.metric.startswith("ensemble") else ()
        run = result(row, 0.05, 0, name, recipe, curves={"loss": [0.25]}, test=dict.fromkeys(words, 0.05))
        lines += [run, replace(run, members=together, seed=1)]
    full = render(name, lines, format)
    assert "not run" not in full
    assert "not known" not in full


def test_unknown_tables_and_formats_are_refused_with_what_there_is():
    name = next(iter(recipes.tables()))
    with pytest.raises(ValueError, match=f"did you mean .*{name}"):
        render(name + "x", [])
    with pytest.raises(ValueError, match="text, markdown or html"):
        render(FIRST, [], "pdf")


def test_where_two_texts_part():
    assert disagreement("a\nold\n", "a\nnew\n") == r"line 2 is 'old\n', but the results give 'new\n'"
    assert disagreement("a\nmore\n", "a\nmore") == r"line 2 is 'more\n', but the results give 'more'"
    assert disagreement("a\n", "a\n") == ""
