"""What the README shows runs, and what it counts is so."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from torchcaps.cli import main
from torchcaps.models import create_model, list_models
from torchcaps.models.measure import parameters
from torchcaps.models.registry import find_preset

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [re.split(r"\s{3,}|\s#", line)[0] for _, text in BLOCKS for line in text.splitlines()
            if line.startswith("torchcaps ")]  # fmt: skip
SHAPE = re.compile(r"^(\w+(?:, \w+)*) = .*# (\[.*?\](?:, \[.*?\])*)", re.MULTILINE)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What a command writes to the current folder goes away with the test; its pictures are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which the README's training command has run, with a picture for `predict`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(next(each for each in COMMANDS if each.startswith("torchcaps train")))
    image = pytest.importorskip("PIL.Image")
    image.new("L", (28, 28)).save(folder / "digit.png")
    return folder


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.split("\n", 1)[0])
def test_python_runs_and_its_shapes_are_true(block):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    for left, shapes in SHAPE.findall(block):
        for name, shape in zip(left.split(", "), re.findall(r"\[.*?\]", shapes), strict=True):
            if "j" not in shape:
                assert list(names[name].shape) == [int(n) for n in shape.strip("[]").split(",")], name


@pytest.mark.parametrize("command", [c for c in dict.fromkeys(COMMANDS) if c != "torchcaps list"])
def test_command_runs(command, trained, tmp_path):
    if command.endswith("--onnx"):
        pytest.importorskip("onnxruntime")
    if command.split()[1] != "train":
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    out, err = run(command)
    assert len(out) > 10
    assert all(line.startswith("epoch ") for line in err.splitlines()), err


def run(command):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(shlex.split(command)[1:]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def test_there_is_something_to_run():
    assert len(PYTHON) == 6
    assert "torchcaps list" in COMMANDS
    assert len(COMMANDS) > 6


def test_table_has_every_preset_with_its_exact_count():
    rows = {cells[1]: cells for cells in re.findall(r"\| ([^|]*) \| `(\w+)` \| ([\d,]*) \|([^|]*)\|([^|]*)\|", README)}
    assert sorted(rows) == list_models()
    for name, (paper, _, network, decoder, printed) in rows.items():
        with torch.device("meta"):
            count = parameters(create_model(name))
        preset = find_preset(name)
        assert network == f"{count.network:,}", name
        assert decoder.strip() == (f"{count.decoder:,}" if count.decoder else ""), name
        assert paper == preset.paper
        assert preset.parameters in printed.strip(), name
        assert bool(preset.parameters) == bool(printed.strip()), name


def test_file_list_is_complete():
    listed = set(re.findall(r"^(torchcaps/\S+\.py)  ", README, re.MULTILINE))
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "torchcaps").rglob("*.py") if path.name[:2] != "__"}
    assert listed == {path for path in there if not path.startswith("torchcaps/recipes/")}  # named by their table
    assert "\ntorchcaps/recipes/  " in README


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    pages = README + (ROOT / "docs/speed.md").read_text() + (ROOT / ".ci/run").read_text()
    for target in re.findall(r"(?<!data )\bmake (\w+)", pages):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "RESULTS.md", "docs/speed.md"])
def test_links_lead_to_files(page):
    for path in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / path).exists(), f"{page} names {path}"
