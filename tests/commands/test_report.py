"""The report with every figure that a run can give."""

import json
import shutil

import pytest

from torchcaps.cli import main
from torchcaps.figures import catalog
from torchcaps.figures.kind import RUNS, Kind
from torchcaps.report import report
from torchcaps.report.drawn import take_numbers
from torchcaps.runs import open_run

SHOWN = ("perturbations", "segments", "robustness")
FEW = {"images": 6, "batch": 8, "dims": 2, "most": 3, "step": 30, "classes": 2}
ITERATED = ("logit-changes", "iterations")  # need a network whose routing has iterations
INVERTED = {"image": [1, 8, 8], "backbone": "simple", "width": 4, "types": 2, "dim": 4, "convs": [[2, 1]]}
UNFIT = {
    "segments": "whose images do not show two digits each",
    "feedback": "need a run of either kind, and all of these are without",
}


def note(self, name, draw, section, *words, **options):
    """Instead of drawing what every report has, which other tests look at."""
    self.sections.append(section)


@pytest.fixture(scope="module")
def opened(finished, small, tmp_path_factory):
    """Two runs, and two of a network that routes with two iterations or with one."""
    place = tmp_path_factory.mktemp("inverted")
    patch = pytest.MonkeyPatch()
    patch.setattr("torchcaps.finish._report", lambda folder, say: None)
    try:
        for n in (2, 1):
            options = json.dumps({**INVERTED, "iterations": n})
            words = ["--model", "inverted_capsnet", "--model-args", options, "--reconstruction", "0"]
            assert main(["train", "quick:digits", *small, *words, "--out", str(place / f"{n}")]) == 0
    finally:
        patch.undo()
    folders = [finished / "runs" / "two" / f"seed-{k}" for k in (0, 1)], [place / f"{n}" for n in (2, 1)]
    return [[open_run(folder, device="cpu") for folder in pair] for pair in folders]


@pytest.mark.parametrize("kind", catalog.KINDS, ids=lambda kind: kind.name)
def test_every_figure_of_the_catalogue(kind, opened):
    plain, iterated = opened
    runs = (iterated if kind.name in ITERATED else plain)[: RUNS[kind.runs][1]]
    given = {name: FEW[name] for name in kind.options if name in FEW}
    if kind.name in UNFIT:
        with pytest.raises(ValueError, match=UNFIT[kind.name]):
            take_numbers(kind, runs, given)
        return
    drawn = take_numbers(kind, runs, given)
    files = drawn.files()
    assert sorted(files) == sorted([".png", ".svg", ".json", *([".gif"] if kind.animate else [])])
    assert files[".png"].startswith(b"\x89PNG")
    assert b"<svg" in files[".svg"]
    about = json.loads(files[".json"])
    assert about["runs"] == [str(run.folder) for run in runs]
    assert about["numbers"] == drawn.numbers
    assert all(about["options"][name] == value for name, value in given.items())


def test_several_runs_reconstruct_the_same_images(opened):
    (first, second), _ = opened
    blocks = take_numbers(catalog.find("reconstructions"), [first, second]).numbers["blocks"]
    titles = [block["title"] for block in blocks]
    assert titles == [f"efficient_capsnet, seed {k}: {word}" for k in (0, 1) for word in ("Recognised", "Mistaken")]
    one, other = (block["strips"] for block in blocks[::2])
    assert one[0]["pictures"] == other[0]["pictures"]
    assert one[1]["pictures"] != other[1]["pictures"]
    alone = take_numbers(catalog.find("reconstructions"), [first]).numbers["blocks"]
    assert [block["title"] for block in alone] == ["Recognised", "Mistaken"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A part of the catalogue with few images, so that it is a matter of seconds."""
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)
    kinds = []
    for kind in catalog.KINDS:
        if kind.name in SHOWN:
            options = {**kind.options, "images": 8} if "images" in kind.options else kind.options
            kinds.append(Kind(**{**vars(kind), "options": options}))
    pair = Kind("pair", "A pair", "", "Two runs.", "a:b", "a:b", runs="two")
    monkeypatch.setattr(report, "KINDS", (*kinds, pair))
    monkeypatch.setattr(report.Report, "add", note)


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "runs" / "two" / "seed-0", "run")
    return tmp_path / "run"


def test_every_figure_is_in_one_file(run, capsys):
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == "run/report.html\n"
    page = (run / "report.html").read_text()
    for title in ("Curves", "Worst mistakes", "Reconstructions", "Dimension perturbations",
                  "Robustness", "Not for this run"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page
    assert "(Sabour 2017, figure 4; Choi 2019, figure 3; Mazzia 2021, figure 7.)" in page
    assert "whose images do not show two digits each" in page
    assert "it compares runs; --beside names another" in page
    assert "http" not in page.replace("http-equiv", "")
    files = sorted(path.name for path in (run / "figures").iterdir())
    assert files == [f"{name}.{end}" for name in ("mistakes", "perturbations", "reconstructions", "robustness")
                     for end in ("json", "png", "svg")]  # fmt: skip
    about = json.loads((run / "figures" / "mistakes.json").read_text())
    assert (about["figure"], about["runs"], about["options"]) == ("mistakes", ["run"], {"most": 12})


@pytest.mark.parametrize(("words", "place"), [((), "small_digits"), (("--out", "a/b"), "a/b")])
def test_weights_of_the_package_have_a_report_without_curves(words, place, handed_on, alone, capsys, checksum):
    before = checksum(handed_on)
    assert main(["report", "small_digits", "--device", "cpu", *words]) == 0
    assert capsys.readouterr().out == f"{place}/report.html\n"
    assert checksum(handed_on) == before
    page = (alone / place / "report.html").read_text()
    for title in ("Confusion", "Worst mistakes", "Reconstructions", "Calibration", "Dimension perturbations"):
        assert f"<h2>{title}</h2>" in page
    assert "<h2>Curves</h2>" not in page
    assert "There are no curves here, as these weights came without the folder of their run." in page
    assert "360 test images were looked at anew" in page
    line = json.loads((handed_on / "weights" / "small_digits.json").read_text())["result"]
    assert f"{100 * line['test']['accuracy']:.2f} ± " in page
    assert "<dt>epochs</dt><dd>2</dd>" in page
    assert [path.name for path in alone.iterdir()] == [place.partition("/")[0]]
    assert (alone / place / "figures" / "mistakes.svg").exists()


def test_an_exported_folder_gets_nothing_beside_its_weights(handed_on, alone, monkeypatch, capsys, checksum):
    monkeypatch.setattr(report, "KINDS", ())
    before = checksum(handed_on / "net")
    assert main(["report", str(handed_on / "net"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "net/report.html\n"
    shutil.rmtree("net")
    shutil.copytree(handed_on / "net", "net")
    assert main(["report", "net", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "net-report/report.html\n"
    assert checksum(handed_on / "net") == checksum("net") == before


def test_weights_whose_data_cannot_be_had_leave_a_sentence(alone, monkeypatch):
    asked = []

    def missing(recipe):
        asked.append(recipe)
        raise ValueError("digits cannot be fetched")

    monkeypatch.setattr("torchcaps.runs.load_data", missing)
    assert main(["report", "small_digits", "--device", "cpu"]) == 0
    page = (alone / "small_digits" / "report.html").read_text()
    assert "There are no pictures of test images here: digits cannot be fetched." in page
    assert "<h2>Not for this run</h2>" in page
    assert len(asked) <= 2


def test_a_file_is_no_folder_for_a_report(run, capsys, checksum):
    before = checksum(run)
    assert main(["report", "run", "--out", "run/recipe.json"]) == 2
    assert capsys.readouterr().err == "torchcaps: run/recipe.json is no folder; --out names one for the files\n"
    assert checksum(run) == before


def test_other_runs_stand_beside_it(run, finished, monkeypatch):
    monkeypatch.setattr(report, "KINDS", [kind for kind in report.KINDS if kind.name == "robustness"])
    other = finished / "runs" / "two" / "seed-1"
    assert main(["report", "run", "--beside", str(other)]) == 0
    assert str(other) in (run / "figures" / "robustness.json").read_text()
    assert "Not for this run" not in (run / "report.html").read_text()


def test_a_run_beside_it_that_lacks_something_takes_no_figure_away(run, opened, monkeypatch):
    monkeypatch.setattr(report, "KINDS", [kind for kind in report.KINDS if kind.name == "perturbations"])
    _, (bare, _) = opened
    assert main(["report", "run", "--beside", str(bare.folder)]) == 0
    about = json.loads((run / "figures" / "perturbations.json").read_text())
    assert about["runs"] == ["run"]
    assert "Not for this run" not in (run / "report.html").read_text()


@pytest.mark.parametrize("words", [["nowhere"], ["run", "--beside", "nowhere"]])
def test_a_run_that_is_not_there(run, words, capsys, checksum):
    before = checksum(run)
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == "torchcaps: there is no run folder nowhere\n"
    assert checksum(run) == before
