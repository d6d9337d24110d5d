"""The report with every figure that a run can give."""

import shutil

import pytest

from torchcaps.cli import main
from torchcaps.figures import catalog
from torchcaps.figures.kind import Kind
from torchcaps.report import report

SHOWN = ("perturbations", "segments", "robustness")


def note(self, name, draw, section, *words, **options):
    """Instead of drawing what every report has, which other tests look at."""
    self.sections.append(section)


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
    assert files == [f"{name}.{end}" for name in ("perturbations", "robustness")
                     for end in ("json", "png", "svg")]  # fmt: skip


def test_other_runs_stand_beside_it(run, finished, monkeypatch):
    monkeypatch.setattr(report, "KINDS", [kind for kind in report.KINDS if kind.name == "robustness"])
    other = finished / "runs" / "two" / "seed-1"
    assert main(["report", "run", "--beside", str(other)]) == 0
    assert str(other) in (run / "figures" / "robustness.json").read_text()
    assert "Not for this run" not in (run / "report.html").read_text()


@pytest.mark.parametrize("words", [["nowhere"], ["run", "--beside", "nowhere"]])
def test_a_run_that_is_not_there(run, words, capsys, checksum):
    before = checksum(run)
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == "torchcaps: there is no run folder nowhere\n"
    assert checksum(run) == before
