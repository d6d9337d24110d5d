"""`torchcaps predict`: from a folder of photographs through training to what an image is called."""

import json
import sys

import numpy as np
import pytest
import torch

from torchcaps import own_images
from torchcaps.cli import main
from torchcaps.commands.predict import predict_images
from torchcaps.finish import validate
from torchcaps.recipes import with_overrides
from torchcaps.runs import open_run
from torchcaps.train import train

Image = pytest.importorskip("PIL.Image")

SHADES = {"grass": (40, 160, 60), "sea": (30, 90, 190), "tomato": (210, 50, 40)}


def photograph(path, shade, seed, height=220, width=260):
    """A shade with the noise of a camera."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).normal(0, 20, (height, width, 3))
    Image.fromarray((np.array(shade) + noise).clip(0, 255).astype(np.uint8)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on three classes of photographs over 200 pixels, beside photographs it has not seen."""
    place = tmp_path_factory.mktemp("predict")
    for number, (name, shade) in enumerate(SHADES.items()):
        for k in range(12):
            photograph(place / "own" / name / f"{k}.jpg", shade, 100 * number + k, 201 + k, 300 - 5 * k)
        photograph(place / "new" / f"{name}.jpg", shade, 1000 + number)
    recipe = own_images.recipe(place / "own")
    recipe = with_overrides(recipe, {"epochs": 20, "batch_size": 8, "data_args.size": 32, "data_args.augmentation": ""})
    torch.manual_seed(0)
    run = train(recipe, out=place / "run", device="cpu", log=None)
    validate(open_run(place / "run", device="cpu"), run.data)
    return place


def test_new_photographs_get_the_class_of_their_folder(place, capsys):
    assert predict_images(str(place / "run"), (str(place / "new"),), device="cpu") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert len(lines) == 3
    for line, name in zip(lines, SHADES, strict=True):
        file, label, word, length, then, runner_up, shorter = line.split()
        assert (file, label, word, then) == (str(place / "new" / f"{name}.jpg"), name, "length", "then")
        assert runner_up in SHADES
        assert 0 <= float(shorter) < float(length) <= 1


def test_the_command_line_says_the_same(place, capsys):
    words = [str(place / "run"), str(place / "new")]
    assert predict_images(words[0], (words[1],), device="cpu") == 0
    wanted = capsys.readouterr().out
    assert main(["predict", *words, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == wanted
    assert main(["predict", words[0], "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "torchcaps: name at least one image, or a folder of them\n"


def test_json_says_the_same_with_plain_values(place, capsys):
    files = tuple(str(place / "new" / f"{name}.jpg") for name in SHADES)
    assert predict_images(str(place / "run"), files, json=True, device="cpu") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["file"] for each in found] == list(files)
    assert [each["class"] for each in found] == [each["classes"][0] for each in found] == list(SHADES)
    threshold = json.loads((place / "run" / "validation.json").read_text())["threshold"]
    for each in found:
        order = sorted(each["probabilities"].items(), key=lambda item: -item[1])
        assert (each["class"], each["probability"]) == order[0]
        assert (each["runner_up"], each["runner_up_probability"]) == order[1]
        assert each["threshold"] == threshold


def test_none_of_these_below_the_threshold(place, capsys):
    file = str(place / "new" / "sea.jpg")
    assert predict_images(str(place / "run"), (file,), threshold=1.0, device="cpu") == 0
    assert capsys.readouterr().out.split("  ", 1)[1].startswith("none of these  length 0.")
    assert predict_images(str(place / "run"), (file,), threshold=1.0, json=True, device="cpu") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["class"], entry["classes"], entry["threshold"]) == (None, [], 1.0)


@pytest.mark.parametrize("as_json", [False, True])
def test_broken_files_are_named_and_the_others_go_on(place, tmp_path, capsys, as_json):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes((place / "new" / "sea.jpg").read_bytes()[:500])
    files = (str(broken), str(place / "new" / "sea.jpg"), str(tmp_path / "gone.png"))
    assert predict_images(str(place / "run"), files, json=as_json, device="cpu") == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first.startswith(f"torchcaps: {broken} cannot be read as an image (")
    assert second == f"torchcaps: {tmp_path / 'gone.png'} is not there; it was passed over"
    if as_json:
        entries = json.loads(out)
        assert [entry.get("class", "error" in entry) for entry in entries] == [True, "sea", True]
    else:
        assert len(out.splitlines()) == 1


def test_without_a_threshold_every_image_gets_a_class_and_that_is_said(place, capsys):
    stored = place / "run" / "validation.json"
    content = stored.read_text()
    stored.write_text('{"figures": null, "threshold": null}')
    try:
        assert predict_images(str(place / "run"), (str(place / "new" / "sea.jpg"),), device="cpu") == 0
    finally:
        stored.write_text(content)
    out, err = capsys.readouterr()
    assert "  sea " in out
    assert "so every image gets a class; --threshold sets one" in err


def test_a_bar_keeps_out_of_what_is_printed(place, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert predict_images(str(place / "run"), (str(place / "new"),), json=True, device="cpu") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 3
    assert "looking at images" in err


@pytest.mark.parametrize(
    ("run", "images", "options", "words"),
    [
        ("run", (), {}, "name at least one image"),
        ("new", ("new",), {}, "is no run folder"),
        ("gone", ("new",), {}, "there is no run folder"),
        ("run", ("empty",), {}, "empty holds no image"),
        ("run", ("new",), {"threshold": 2.0}, "from 0 to 1, got 2.0"),
        ("run", ("new",), {"batch_size": 0}, "at least one image"),
        ("run", ("new",), {"device": "tpu"}, "device 'tpu' is not known"),
    ],
)
def test_bad_input_is_a_sentence(place, run, images, options, words):
    (place / "empty").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=words):
        predict_images(str(place / run), tuple(str(place / each) for each in images), **{"device": "cpu", **options})
