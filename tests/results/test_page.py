"""RESULTS.md: rendered from the lines of runs, with what a person wrote in between left alone."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.recipes import with_overrides
from torchcaps.results import Result, append, from_line, read
from torchcaps.results.again import commands, in_full
from torchcaps.results.notes import in_short, remarks
from torchcaps.results.page import not_run, render_page
from torchcaps.results.plan import GROUPS
from torchcaps.results.readme import render_readme_section
from torchcaps.results.tables import disagreement, render
from torchcaps.shorten import shortened

ROOT = Path(__file__).parents[2]


def result(name, error=0.0026, seed=0, epochs=None, changes=None, **values):
    table, _, row = name.partition(":")
    whole = recipes.find(name)
    recipe = with_overrides(whole if epochs is None else shortened(whole, min(epochs, whole.epochs)), changes or {})
    epochs = recipe.epochs if epochs is None else epochs
    test = {"error": error, "accuracy": 1 - error, "standard_error": 0.0005, "images": 10_000}
    known = {
        "table": table,
        "row": row,
        "recipe": recipe.to_dict(),
        "seed": seed,
        "test": test,
        "epochs": epochs,
        "planned": recipes.find(name).epochs,
        "device": "NVIDIA H200",
        "seconds": 90.0,
        "commit": "0123456789abcdef",
        "finished": f"2026-01-01T00:00:{seed:02d}+00:00",
    }
    return Result(**{**known, **values})


def rows(page, key):
    """The cells of a section's table."""
    section = page.split(f"<!-- reading {key}: begin -->")[0].rsplit("\n## ", 1)[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_row_is_there_and_not_run():
    page = render_page([])
    assert [int(group.key) for group in GROUPS] == list(range(1, 12))
    for group in GROUPS:
        found = rows(page, group.key)
        assert len(found) == len(group.entries)
        assert all(cells[3] == "not run" for cells in found)
        for entry, cells in zip(group.entries, found, strict=True):
            recipe = with_overrides(recipes.find(entry.row), entry.changes)
            assert cells[0].startswith(entry.label)
            assert cells[2] == (entry.printed or recipe.reported or "-")
    assert "Other rows that were run" not in page
    assert "best epoch on the test set" in rows(page, "1")[1][5]


@pytest.mark.parametrize(
    ("key", "printed"),
    [
        ("1", ["0.26", "0.26", "0.16"]),
        ("3", ["0.25", "0.25"]),
        ("4", ["5.1", "5.2", "7.5", "8.1"]),
        ("5", ["-", "94.73"]),
        ("6", ["99.46", "87.19", "88.61"]),
        ("7", ["9.83", "5.82", "4.55"]),
        ("8", ["0.39", "0.34", "0.29", "0.35", "0.48", "0.54", "0.4", "0.39"]),
        ("9", ["79", "91.6", "-", "66"]),
        (
            "ours",
            [
                *["0.26", "0.16"] * 2,
                *["0.26"] * 4,
                *["0.16", "0.26", "0.16"],
                *["0.26"] * 5,
                *["0.16", "-", "5.1", "5.2", "-", "-"],
                *["mean", "mean", "4.55", "4.55", "4.55"],
            ],
        ),
        ("11", ["92.65", "92.15", "87.10", "95.11", "85.74", "80.59", "83.39", "79.81"]),
    ],
)
def test_the_papers_figures(key, printed):
    assert [cells[2].split()[0] for cells in rows(render_page([]), key)] == printed


def test_seeds_make_a_mean_and_settings_a_line():
    errors = [0.0026, 0.0031, 0.0024]
    name = "mazzia2021_table2:efficient"
    runs = [result(name, error, seed, together=3) for seed, error in enumerate(errors)]
    runs.append(result(name, 0.004, 0, epochs=50))
    runs.append(result(name, 0.005, 0, changes={"batch_size": 64}, dirty=True))
    page = render_page(runs)
    plain, official = rows(page, "1")[:2]
    mean, spread = statistics.mean(errors) * 100, statistics.stdev(errors) * 100
    assert plain[1:5] == ["error %", "0.26 ± 0.0002", f"{mean:.3f} ± {spread:.3f}", "3"]
    assert plain[5] == "mazzia2021, best epoch on validation"
    assert plain[6:] == ["100", "90 s each, 3 at once on NVIDIA H200", "0123456"]
    assert official[3] == "not run"
    assert plain[0] == "Efficient-CapsNet (1) (2) (3) (4)"
    assert "1. assumed: schedule\\_args.floor = 5e-05" in page
    assert "4. also run: 0.400 (epochs 50 of 100, shortened, n = 1, 90 s on NVIDIA H200, 0123456)\n" in page
    changed = "with batch\\_size = 64, epochs 100, n = 1, 90 s on NVIDIA H200, 0123456\\*"
    assert f"3. also run: 0.500 ({changed}); run with changes that commit 0123456 does not have\n" in page


def test_what_most_rows_have_is_no_part_of_their_names():
    name = "mazzia2021_table2:efficient"
    run = result(name, epochs=30, changes={"precision": "bf16", "schedule_args.decay": 0.9349, "lr": 0.1})
    cells = rows(render_page([run]), "1")[0]
    assert cells[0].startswith("Efficient-CapsNet, with lr = 0.1 (1)")
    assert cells[6:8] == ["30 of 100, shortened", "90 s on NVIDIA H200 in bf16"]


def test_times_that_differ_much_are_a_span():
    runs = [result("li2018_table3:1-master", 0.1, seed, seconds=seconds) for seed, seconds in enumerate((60.0, 95.0))]
    assert rows(render_page(runs), "7")[0][7] == "60 s to 95 s on NVIDIA H200"
    runs = [replace(run, seconds=90.0 + run.seed) for run in runs]
    assert rows(render_page(runs), "7")[0][7] == "90 s on NVIDIA H200"


def test_curves_are_compared_at_equal_epochs():
    names = [f"tsai2020_figure4:dynamic-{n}" for n in (1, 2, 3)]
    runs = [result(name, 0.4, epochs=4) for name in names] + [result(names[1], 0.3, epochs=30)]
    first, second, third, fourth = rows(render_page(runs), "10")[20:24]
    assert [row[6] for row in (first, second, third, fourth)] == [*["4 of 350, shortened"] * 3, ""]
    assert "also run: 70.00 (epochs 30 of 350" in render_page(runs)
    runs += [result(name, 0.2, epochs=10) for name in names]
    assert [row[6] for row in rows(render_page(runs), "10")[20:23]] == ["10 of 350, shortened"] * 3
    assert rows(render_page([*runs, result(names[1], 0.1, epochs=350, defect="a bug")]), "10")[21][6].startswith("10 ")
    apart = [result(names[0], 0.4, epochs=4), result(names[1], 0.4, epochs=30)]
    assert [row[6].split()[0] for row in rows(render_page(apart), "10")[20:22]] == ["4", "30"]


def test_seeds_without_a_line_are_told():
    runs = [result("mazzia2021_table2:efficient", 0.003, seed, together=4) for seed in range(3)]
    assert "4 were trained at once, of which 3 have a line\n" in render_page(runs)
    assert "trained at once, of which" not in render_page([*runs, replace(runs[0], seed=3)])
    official = result("mazzia2021_table2:efficient-official", 0.003, together=8, selected="best", test_reads=31)
    official = replace(official, data={"validation": "x", "test": "x"})
    assert "8 were trained at once, of which 1 has a line\n" in render_page([official])
    assert "\ntorchcaps train mazzia2021_table2:efficient-official\n" in f"\n{commands([official])}"


def test_a_look_at_old_weights_is_no_further_run():
    run = result("ours:mnist-views", 0.003)
    alone = result("ours:mnist-views", 0.0032, changes={"data_args.crops": 1}, test_reads=2, look=True)
    page = render_page([run, alone])
    assert "looked at again: 0.320 (with data\\_args.crops = 1, n = 1); the test set was read more than once\n" in page
    assert "1 views" not in page
    told = commands([run, alone])
    train = "torchcaps train ours:mnist-views"
    assert told.startswith(f"{train}\n    # error 0.300")
    assert f"# torchcaps evaluate RUN... --crops 1, with the runs of {train}, seed 0\n    # error 0.320" in told
    curves = {"loss": [0.5] * 60}
    at_seven, at_nine = (
        result("ours:mnist-views", 0.007, look=True, epochs=epoch, curves=curves, recipe=run.recipe) for epoch in (7, 9)
    )
    kept = commands([replace(run, curves=curves), at_seven, at_nine, replace(at_nine, seed=1, epochs=60)])
    for seed, words in ((0, " --epoch 7"), (0, " --epoch 9"), (1, "")):
        assert f"# torchcaps evaluate RUN...{words}, with the runs of {train}, seed {seed}\n" in kept
    whole = result("ours:mnist-views-ensemble", members=("a", "b"))
    cropped = result("ours:mnist-views-ensemble", members=("a", "b"), look=True, changes={"data_args.crops": 1})
    both = commands([whole, cropped])
    row = "--row ours:mnist-views-ensemble"
    assert f"# torchcaps evaluate --ensemble {row}, with the folders of a, b\n" in both
    assert f"# torchcaps evaluate --ensemble --crops 1 {row}, with the folders of a, b\n" in both


def test_a_look_never_stands_before_the_run_itself():
    """Nor among trainings with the same settings, nor among what was shortened or is missing."""
    name, bf16 = "sabour2017_affnist:capsnet", {"precision": "bf16"}
    run = result(name, 0.1, epochs=12, changes={**bf16, "data": "affnist_generated"})
    look = result(name, 0.2, epochs=12, changes={**bf16, "data": "affnist_generated", "batch_size": 64}, look=True)
    for lines in ([run, look], [look, replace(run, finished="2026-02-01")]):
        cells, page = rows(render_page(lines), "9")[0], render_page(lines)
        assert cells[3] == "90.00"
        assert "looked at again: 80.00 (with batch\\_size = 64, n = 1); trained weights, tested on other data" in page
    assert rows(render_page([run, replace(look, recipe=run.recipe)]), "9")[0][3] == "90.00"
    assert name in [entry.row for _, entry in not_run([look])]
    assert rows(render_page([look]), "9")[0][3] == "not run"
    assert "CapsNet" not in render_readme_section([look])
    assert not in_full([look])
    official = result("mazzia2021_table2:efficient-official", test_reads=101, data={"validation": "a", "test": "a"})
    official = replace(official, selected="best")
    again = replace(official, look=True, test_reads=102, recipe={**official.recipe, "data_args": {"crops": 4}})
    assert commands([again]).startswith(
        "# torchcaps evaluate RUN... --crops 4, with the runs of torchcaps train mazzia2021_table2:"
    )
    assert remarks([official]) == ["the epoch was chosen on the test set, which was read after each"]
    assert remarks([again]) == ["the test set was read more than once"]


def test_a_reading_that_was_cut_short_makes_no_look_of_a_run():
    name = "ours:mnist-views"
    run, short = result(name, 0.003, test_reads=2), result(name, 0.005, epochs=30, test_reads=2)
    alone = result(name, 0.0032, changes={"data_args.crops": 1}, test_reads=3, look=True)
    page = render_page([run, short, alone])
    assert "also run: 0.500 (epochs 30 of 60, shortened, n = 1, 90 s on NVIDIA H200 in bf16, 0123456)\n" in page
    assert "looked at again: 0.320 (with data\\_args.crops = 1, n = 1)\n" in page


def test_looks_at_kept_epochs_are_told_apart():
    """The last epoch too, where a run selects another."""
    curves = {"loss": [0.5] * 100}
    run = result("mazzia2021_table2:efficient", selected="best", epoch=70, curves=curves)
    other = replace(run, look=True, recipe={**run.recipe, "data_args": {"crops": 4}}, test={**run.test, "error": 0.1})
    last, early = (replace(other, selected="last", epochs=n, test={**run.test, "error": n / 1000}) for n in (100, 9))
    assert [each.kept for each in (run, other, last, early)] == [None, None, 100, 9]
    page = render_page([run, other, last, early])
    for words in ("10.00 (with data\\_args.crops = 4, n", "10.00 (with data\\_args.crops = 4, epoch 100, n"):
        assert f"looked at again: {words} = 1)" in page
    assert "looked at again: 0.900 (with data\\_args.crops = 4, epoch 9, n = 1); the weights of another epoch" in page
    paused = replace(early, curves={"loss": [0.5] * 9})
    assert [each.kept for each in (paused, replace(paused, curves={"epoch": [1, 9], "loss": [1, 1]}))] == [9, 9]
    thin = {"epoch": [1, 100], "loss": [1, 1]}
    assert [replace(each, curves=thin).kept for each in (other, early)] == [None, 9]
    sheet = render("mazzia2021_table2", [run, other, last, replace(other, recipe=run.recipe), early])
    variants = [re.split(r" \(\d", line)[0].strip() for line in sheet.splitlines() if line.startswith("  ")]
    crops = "data_args.crops = 4"
    assert variants == [crops, f"{crops}, epoch 100", "tested anew", f"{crops}, 9 of 100 epochs, shortened"]
    told = commands([run, other, last, early])
    for words in ("--crops 4", "--crops 4 --epoch 100", "--crops 4 --epoch 9"):
        assert f"# torchcaps evaluate RUN... {words}, with the runs of torchcaps train mazzia2021" in told


def test_a_look_by_another_protocol_names_the_runs_as_they_were_trained():
    for data_args, crops in (({}, ""), ({"crops": 2}, " --crops 2")):
        recipe = replace(recipes.find("ours:mnist"), protocol="sabour2017", data_args=data_args)
        line, _ = commands([result("ours:mnist", look=True, recipe=recipe.to_dict())]).splitlines()
        runs = "with the runs of torchcaps train ours:mnist, seed 0"
        assert line == f"# torchcaps evaluate RUN... --protocol sabour2017{crops}, {runs}"


def test_looks_do_not_say_how_long_curves_are_compared():
    names = [f"tsai2020_figure4:dynamic-{n}" for n in (1, 2)]
    runs = [result(name, 0.4, epochs=epochs) for name, epochs in ((names[0], 4), (names[0], 10), (names[1], 4))]
    look = result(names[1], 0.4, epochs=10, look=True, changes={"data_args.crops": 2})
    assert [row[6] for row in rows(render_page([*runs, look]), "10")[20:22]] == ["4 of 350, shortened"] * 2


def test_a_test_on_other_data_is_a_row_of_its_own_and_no_training():
    name, changes = "ours:multimnist-resnet", {"data": "multimnist_relative"}
    look = result(name, 0.02, changes=changes, look=True)
    look.test.update(exact_match_error=0.02, per_digit_error=0.01)
    label = "multimnist-resnet, tested on relative shifts"
    found = {cells[0].partition(" (")[0]: cells for cells in rows(render_page([look]), "ours")}
    assert found[label][3] == "2.00; 1.00"
    assert found["multimnist-resnet"][3] == "not run"
    trained = replace(look, look=False)
    found = {cells[0].partition(" (")[0]: cells for cells in rows(render_page([trained]), "ours")}
    assert found[label][3] == "not run"
    left = [entry.label for _, entry in not_run([look])]
    assert label not in left
    assert "multimnist-resnet" in left


def test_images_an_epoch_are_told_where_the_row_has_no_number():
    run = result("mazzia2021_table2:efficient", changes={"samples": 600})
    assert rows(render_page([run]), "1")[0][0].startswith("Efficient-CapsNet, with samples = 600 (")


def test_a_run_without_a_time_has_none():
    run = result("li2018_table3:1-master", 0.1, changes={"precision": "bf16"}, seconds=None)
    assert rows(render_page([run]), "7")[0][7] == "in bf16"


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (["a/seed-0", "a/seed-2", "a/seed-1", "a/seed-9"], "a/seed-0 to 2 and 9"),
        (["runs/a", "runs/a1"], "runs/a, runs/a1"),
        (["seed-00", "seed-1", "seed-10"], "seed-00, seed-1 and 10"),
        (["a", "b"], "a, b"),
    ],
)
def test_members_in_short(members, told):
    assert in_short(members) == told


def test_one_view_is_told_where_several_count():
    run = result("ours:cifar10", 0.05)
    run.test["one_view"] = {"accuracy": 0.94}
    assert "94.00 with one view of each test image\n" in render_page([run])
    assert "with one view" not in render_page([run, result("ours:cifar10", 0.05, 1)])


def test_fewer_images_an_epoch_are_short_as_well():
    name = "sabour2017_table1:routing3-multimnist"
    multi = [result(name, 0.1, epochs=epochs, changes={"samples": 100_000}) for epochs in (64, 17)]
    page = render_page(multi)
    assert rows(page, "4")[1][6] == "64, each of 100,000 images instead of 6,000,000, shortened"
    assert "epochs 17 of 64, each of 100,000 images instead of 6,000,000, shortened, n = 1" in page


def test_of_two_runs_with_one_seed_the_later_counts():
    name = "li2018_table3:1-master"
    runs = [result(name, 0.1, 0, finished="2026-01-02"), result(name, 0.2, 0, finished="2026-01-01")]
    assert rows(render_page(runs), "7")[0][3:5] == ["10.00", "1"]


def test_settings_of_an_entry_claim_their_runs():
    name = "tsai2020_table1:inverted-resnet-cifar10"
    runs = [
        result(name, 0.05),
        result(name, 0.06, changes={"model_args.iterations": 1}),
        result(name, 0.07, changes={"model_args.windows": "scrambled"}, seconds=600.0),
    ]
    page = render_page(runs)
    assert [cells[3] for cells in rows(page, "2")] == ["95.00", "not run"]
    scrambled, once = rows(page, "5")
    assert (scrambled[0].split(" (")[0], scrambled[3], scrambled[7]) == (
        "scrambled windows",
        "93.00",
        "10.0 min on NVIDIA H200",
    )
    assert (once[0].split(" (")[0], once[3]) == ("1 iteration", "94.00")


def test_an_ensemble_stands_in_its_own_row():
    members = tuple(f"efficient/seed-{k}" for k in range(30))
    run = result("mazzia2021_table2:efficient", 0.0016, members=members, chosen_from=40)
    page = render_page([run])
    found = rows(page, "1")
    assert [cells[3] for cells in found] == ["not run", "not run", "0.160"]
    assert found[2][0].startswith("ensemble (")
    assert "members, chosen on validation: efficient/seed-0" in page
    ours = [result("ours:mnist", 0.0031), result("ours:mnist", 0.0019, members=tuple("abcdefghijklmnop"))]
    found = {cells[0].split(" (")[0]: cells[3:5] for cells in rows(render_page(ours), "ours")}
    assert found["mnist"] == ["0.310", "1"]
    assert found["mnist-ensemble"] == ["0.190", "1"]


def test_both_figures_of_overlapping_digits():
    run = result("sabour2017_table1:routing3-multimnist", 0.052)
    run.test.update(exact_match_error=0.052, per_digit_error=0.027, sampled_from=10_000_000)
    cells = rows(render_page([run]), "4")[1]
    assert cells[1] == "exact match error and per digit error %"
    assert cells[3] == "5.20; 2.70"
    assert "tested on 10,000 of 10,000,000 images" in render_page([run])


def test_runs_with_a_defect_come_last_and_are_to_be_run_again():
    name = "tsai2020_figure5:dynamic-vector"
    broken = result(name, 1.0, epochs=5, defect="weights that started too small")
    assert [entry.row for _, entry in not_run([broken])].count(name) == 1
    label = "DiverseMultiMNIST, dynamic"
    (cells,) = [cells for cells in rows(render_page([broken]), "11") if cells[0].startswith(label)]
    assert cells[0].startswith(f"{label}, with weights that started too small (")
    mended = result(name, 0.5, epochs=4)
    assert name not in [entry.row for _, entry in not_run([broken, mended])]
    page = render_page([broken, mended])
    (cells,) = [cells for cells in rows(page, "11") if cells[0].startswith(label)]
    assert cells[0].startswith(f"{label} (")
    assert "also run: " in page
    assert "(with weights that started too small, epochs 5 of 350" in page


def test_a_run_that_stops_where_it_should_is_not_shortened():
    name = "sabour2017_affnist:capsnet"
    changes = {"data": "affnist_generated"}
    runs = [
        result(name, 0.2, seed, epochs=7 + seed, changes=changes, curves={"validation_error": [0.02, 0.0077]})
        for seed in range(2)
    ]
    assert all(run.reached and not run.shortened for run in runs)
    cells = rows(render_page(runs), "9")[0]
    assert cells[3:5] == ["80.00 ± 0.00", "2"]
    assert cells[6] == "7 to 8, at 99.23 % on validation"
    plain = [replace(run, recipe=recipes.find(name).to_dict()) for run in runs]
    assert "  80.00 ± 0.00  2" in render("sabour2017_affnist", plain)
    late = replace(runs[0], curves={"validation_error": [0.0078]})
    assert late.shortened
    assert not late.reached


def test_the_last_epoch_is_told_where_another_was_selected():
    run = result("mazzia2021_table2:efficient-official", 0.0026, selected="best", epoch=90)
    page = render_page([replace(run, test_last={"error": 0.003})])
    assert "\n3. 0.300 with the last epoch instead" in page
    assert "with the last epoch instead" not in render_page([run])


def test_rows_that_nobody_asked_for_are_shown_too():
    page = render_page([result("mazzia2021_table2:capsnet", 0.0036)])
    assert rows(page, "others")[0][2:4] == ["0.36 ± 0.04", "0.360"]


def test_what_a_person_wrote_stays():
    page = render_page([])
    page = page.replace(
        "<!-- reading 4: begin -->\n", "<!-- reading 4: begin -->\n### Reading\n\nTwo digits *overlap*.\n\n"
    )
    again = render_page([result("li2018_table3:1-master", 0.1)], page)
    assert "### Reading\n\nTwo digits *overlap*.\n\n<!-- reading 4: end -->" in again
    assert render_page([result("li2018_table3:1-master", 0.1)], again) == again
    assert render_page([], page) == page
    assert "but the results give '| master" in disagreement(page, again)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda page: page.replace("<!-- reading 4: end -->", ""), "has lost its other end"),
        (lambda page: page + "<!-- reading 4: begin -->\nx\n<!-- reading 4: end -->\n", "has two readings '4'"),
        (
            lambda page: page + "<!-- reading x: begin -->\nx\n<!-- reading x: end -->\n",
            "a reading 'x', but no such section",
        ),
    ],
)
def test_nothing_that_was_written_is_lost(spoil, sentence):
    with pytest.raises(ValueError, match=sentence):
        render_page([], spoil(render_page([])))


def test_the_command_renders_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append("results/x.jsonl", result("li2018_table3:1-master", 0.0983))
    assert main(["table", "--page", "RESULTS.md", "--check"]) == 2
    assert "RESULTS.md, line 1 is" in capsys.readouterr().err
    assert main(["table", "--page", "RESULTS.md"]) == 0
    assert capsys.readouterr().out == "RESULTS.md has 1 result\n"
    assert rows(Path("RESULTS.md").read_text(), "7")[0][3] == "9.83"
    assert main(["table", "--page", "RESULTS.md"]) == 0
    assert main(["table", "--page", "RESULTS.md", "--check"]) == 0
    append("results/x.jsonl", result("li2018_table3:7-skip-both", 0.06))
    assert main(["table", "--page", "RESULTS.md", "--check"]) == 2


def test_lines_from_before_these_fields_can_be_read():
    line = result("li2018_table3:1-master", 0.1, steps=12, together=4).line()
    assert (from_line(line).steps, from_line(line).together) == (12, 4)
    old = from_line(re.sub(r'"(steps|together)": \d+, ', "", line))
    assert (old.steps, old.together) == (None, 1)


def test_the_page_is_as_the_results_have_it():
    path = ROOT / "RESULTS.md"
    text = path.read_text()
    assert disagreement(text, render_page(read(ROOT / "results"), text)) == ""
