"""Figures by the command line, from a small run to files and back."""

import builtins
import json
import shutil

import pytest

from torchcaps.cli import main
from torchcaps.train import checkpoint


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A finished run of two epochs, to be written into, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "runs" / "two" / "seed-0", "run")
    return tmp_path / "run"


@pytest.mark.parametrize("words", [["perturbations", "--set", "digit=3", "--set", "dims=2"], ["mistakes"]],
                         ids=lambda words: words[0])  # fmt: skip
def test_a_figure_is_three_files_and_is_drawn_again_from_one(run, words, capsys):
    name, *options = words
    assert main(["figure", name, "run", *options]) == 0
    assert capsys.readouterr().out.split() == [f"run/figures/{name}.{end}" for end in ("png", "svg", "json")]
    shutil.rmtree("elsewhere", ignore_errors=True)
    assert main(["figure", f"run/figures/{name}.json", "--out", "elsewhere"]) == 0
    for end in ("png", "svg", "json"):
        first, second = (run.parent / place / f"{name}.{end}" for place in ("run/figures", "elsewhere"))
        assert first.read_bytes() == second.read_bytes()
    about = json.loads((run / "figures" / f"{name}.json").read_text())
    assert (about["figure"], about["runs"]) == (name, ["run"])
    assert (run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list((run / "figures").glob(".*"))


@pytest.mark.parametrize("name", ["mistakes", "reconstructions"])
@pytest.mark.parametrize("place", ["net", "small_digits"])
def test_weights_without_a_run_are_tested_for_a_figure(name, place, handed_on, alone, finished, capsys, checksum):
    before = checksum(handed_on)
    which = str(handed_on / "net") if place == "net" else place
    for _ in range(2):  # the folder that the first time makes does not hide the weights of that name
        assert main(["figure", name, which, "--device", "cpu"]) == 0
        assert capsys.readouterr().out.split() == [f"{place}/figures/{name}.{end}" for end in ("png", "svg", "json")]
    assert checksum(handed_on) == before
    assert [path.name for path in alone.iterdir()] == [place]
    assert len(list((alone / place / "figures").iterdir())) == 3
    assert main(["figure", name, str(finished / "runs" / "two" / "seed-0"), "--out", "own"]) == 0
    own, mine = (json.loads((alone / folder / f"{name}.json").read_text()) for folder in ("own", f"{place}/figures"))
    assert mine["numbers"]["images"] == own["numbers"]["images"] == 360
    if place == "net":
        assert mine["numbers"] == own["numbers"]


def test_weights_whose_data_cannot_be_had(alone, monkeypatch, capsys):
    def missing(recipe):
        raise ValueError("digits is not in the cache, and cannot be fetched")

    monkeypatch.setattr("torchcaps.runs.load_data", missing)
    assert main(["figure", "mistakes", "small_digits"]) == 2
    assert capsys.readouterr().err == "torchcaps: digits is not in the cache, and cannot be fetched\n"
    assert list(alone.iterdir()) == []


def test_what_an_option_asks_for_is_what_the_numbers_have(run):
    words = ["--set", "digit=3", "--set", "dims=2", "--set", "image=None", "--dark"]
    assert main(["figure", "perturbations", "run", *words]) == 0
    about = json.loads((run / "figures" / "perturbations.json").read_text())
    (block,) = about["numbers"]["runs"]
    assert block["class"] == "3"
    assert len(block["pictures"]) == 2
    assert about["options"] == {"image": None, "digit": 3, "dims": 2}


def test_several_runs_share_a_plot(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [str(finished / "runs" / "two" / f"seed-{k}") for k in (0, 1)]
    assert main(["figure", "robustness", *runs, "--set", "images=8"]) == 0
    assert capsys.readouterr().out.split()[0] == "figures/robustness.png"
    about = json.loads((tmp_path / "figures" / "robustness.json").read_text())
    names = [line["name"] for line in about["numbers"]["lines"]]
    assert names == ["efficient_capsnet, seed 0", "efficient_capsnet, seed 1"]


def test_all_figures_are_listed(capsys):
    assert main(["figure"]) == 0
    out = capsys.readouterr().out
    for name in ("perturbations", "segments", "alignment-cosines", "variance", "robustness", "Sabour 2017"):
        assert name in out


def no_matplotlib(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["perturbation", "run"], "there is no figure 'perturbation'; did you mean perturbations"),
        (["perturbations"], "the figure perturbations takes one run or more, got 0"),
        (["alignment", "run", "run"], "the figure alignment takes one run, got 2"),
        (["operations", "run"], "the figure operations takes no run, got 1"),
        (["perturbations", "nowhere"], "there is no run folder nowhere"),
        (["perturbations", "run", "--set", "colour=red"], "the figure perturbations has no option 'colour'; it has"),
        (["perturbations", "run", "--set", "digit"], "an option is KEY=VALUE, got 'digit'"),
        (["perturbations", "run", "--set", "digit=x"], "run knows no class 'x'; it has 0, 1, 2"),
        (["perturbations", "run", "--set", "dims=0"], "dims is a whole number from 1, got 0"),
        (["perturbations", "run", "--out", "run/recipe.json"], "run/recipe.json is no folder"),
        (["alignment", "run", "--set", "images=0"], "images is a whole number from 1, got 0"),
        (["segments", "run"], "run was trained on digits, whose images do not show two digits each"),
        (["nothing.json"], "nothing.json cannot be read: No such file or directory"),
        (["run/recipe.json"], "run/recipe.json holds no figure"),
        (["run/recipe.json", "run"], "run/recipe.json is drawn from its numbers alone"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, words, sentence, capsys, checksum):
    before = checksum(run)
    assert main(["figure", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"torchcaps: {sentence}")
    assert err.count("\n") == 1
    assert checksum(run) == before


def test_numbers_of_another_figure_are_refused(run, capsys):
    about = {"figure": "perturbations", "runs": [], "options": {}, "numbers": {"amounts": []}}
    (run / "odd.json").write_text(json.dumps(about))
    assert main(["figure", "run/odd.json"]) == 2
    assert "the numbers in run/odd.json are not those of perturbations" in capsys.readouterr().err
    assert not (run / "perturbations.png").exists()


def test_a_missing_extra_is_named(run, monkeypatch, capsys, checksum):
    before = checksum(run)
    no_matplotlib(monkeypatch)
    for words in (["figure", "perturbations", "run"], ["report", "run"]):
        assert main(words) == 2
        assert capsys.readouterr().err == "torchcaps: figures need matplotlib: pip install 'torchcaps[figures]'\n"
    assert checksum(run) == before


def test_a_run_without_decoder(run, capsys):
    weights, about = checkpoint.load_weights(run / "weights.safetensors")
    about["recipe"]["model_args"]["decoder"] = False
    kept = {name: weight for name, weight in weights.items() if not name.startswith("decoder.")}
    checkpoint.save_weights(run / "weights.safetensors", kept, about)
    for name in ("perturbations", "reconstructions", "segments"):
        assert main(["figure", name, "run"]) == 2
        assert capsys.readouterr().err.startswith("torchcaps: run has no decoder to draw with")
    assert not (run / "figures").exists()
