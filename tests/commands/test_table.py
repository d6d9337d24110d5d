"""`torchcaps table` and `torchcaps recipes`, and the README against the results."""

import json
from pathlib import Path

import pytest

from torchcaps import recipes
from torchcaps.cli import main
from torchcaps.results import append, read
from torchcaps.results.readme import BEGIN, END, update_readme
from torchcaps.results.tables import disagreement

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(finished, monkeypatch):
    monkeypatch.chdir(finished)
    return finished


def test_the_readme_is_as_the_results_have_it():
    text = (ROOT / "README.md").read_text()
    assert disagreement(text, update_readme(text, read(ROOT / "results"))) == ""


def test_recipes_has_a_line_for_each_row(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == recipes.names()
    assert main(["recipes", "sabour2017_table1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "routing3 " in line)
    recipe = recipes.find("sabour2017_table1:" + row.split()[0].partition(":")[2])
    assert row.split()[1:4] == [recipe.model, recipe.data, str(recipe.epochs)]
    assert recipe.reported in row


def test_recipes_as_json(capsys):
    assert main(["recipes", "quick:*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {f"quick:{row}": recipes.find(f"quick:{row}").to_dict() for row in ("mnist", "digits")}


def test_a_pattern_that_nothing_matches(capsys):
    assert main(["recipes", "quick:mnits"]) == 2
    assert capsys.readouterr().err.startswith("torchcaps: quick has no row 'mnits'; did you mean mnist")


def test_tables_are_listed_with_what_has_been_run(capsys, place):
    assert main(["table"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(lines) == {name for name, table in recipes.tables().items() if table.ROWS}
    assert lines["quick"].endswith("2 results)")
    assert lines["sabour2017_table1"].endswith("no results)")


def test_a_table_finds_the_results_beside_the_runs(capsys, place):
    assert main(["table", "quick"]) == 0
    out = capsys.readouterr().out
    values = [100 * line.test["accuracy"] for line in read("runs/two/quick.jsonl")]
    spread = abs(values[0] - values[1]) / 2**0.5
    assert f"{sum(values) / 2:.2f} ± {spread:.2f}  2" in out
    assert "2 of 30 epochs" in out


@pytest.mark.parametrize(("format", "start"), [("markdown", "### Effici"), ("html", "<!doctype html>"), ("text", "Ef")])
def test_formats_and_files(format, start, capsys, place, tmp_path):
    path = tmp_path / "table"
    words = ["table", "quick", "--format", format, "--results", "runs/two"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(start)
    assert main([*words, "--out", str(path)]) == 0
    assert path.read_text() == shown


def test_own_images_have_a_table_too(capsys, place, tmp_path):
    line = read("runs/two/quick.jsonl")[0]
    append(tmp_path / "folder.jsonl", type(line)(**{**vars(line), "table": "folder", "row": "photos-capsnet"}))
    assert main(["table", "folder", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Images of one's own")
    assert "photos-capsnet" in out
    assert f"{100 * line.test['accuracy']:.2f}  1" in out


def test_the_readme_section_is_rendered_and_checked(capsys, place, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# A\n\n{BEGIN}\n{END}\n\nmore\n")
    words = ["table", "--readme", str(readme), "--results", "runs/two"]
    assert main([*words, "--check"]) == 2
    assert capsys.readouterr().err.startswith(f"torchcaps: {readme}, line 4 is ")
    assert main(words) == 0
    assert capsys.readouterr().out == f"{readme} has 2 results\n"
    text = readme.read_text()
    assert "| **Other rows that were run** |" in text
    assert "| quick:digits, with " in text
    assert text.endswith(f"{END}\n\nmore\n")
    assert main([*words, "--check"]) == 0
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("has 2 results, as before\n")
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("quik", "there is no table 'quik'; did you mean quick?"),
        ("quick --results nowhere", "there are no results in nowhere: no such file or folder"),
        ("quick --format pdf", "invalid choice 'pdf' for argument '--format'"),
        ("quick --out nowhere/table", "nowhere/table cannot be written, as its folder is not there"),
        ("--page nowhere/page.md", "nowhere/page.md cannot be written, as its folder is not there"),
        ("quick --check", "--check goes with --readme FILE"),
        ("--readme nowhere", "nowhere cannot be read: No such file or directory"),
    ],
)
def test_bad_input(words, sentence, capsys, place, checksum):
    before = checksum(place)
    assert main(["table", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"torchcaps: {sentence}"), err
    assert err.count("\n") == 1
    assert not out
    assert checksum(place) == before


def test_a_broken_line_is_named(capsys, tmp_path):
    (tmp_path / "r.jsonl").write_text("\n{\n")
    assert main(["table", "quick", "--results", str(tmp_path)]) == 2
    assert f"{tmp_path}/r.jsonl, line 2 is broken" in capsys.readouterr().err
    assert (tmp_path / "r.jsonl").read_text() == "\n{\n"
