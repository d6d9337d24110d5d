"""Own images: what is made of a folder, and that every network takes two steps on it, in colour and in grey."""

import json
import zlib

import numpy as np
import pytest
import torch

from torchcaps import own_images, recipes
from torchcaps.data import Stored, load, protocols
from torchcaps.data.augment import flip
from torchcaps.data.errors import DataError
from torchcaps.data.splits import balanced, hold_out
from torchcaps.recipes import from_dict, with_overrides
from torchcaps.train import train
from torchcaps.train.prepare import load_data

Image = pytest.importorskip("PIL.Image")


def draw(path, height=40, width=40, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)


def fill(place, sizes=None, **kind):
    """So many images for each class."""
    for name, count in (sizes or {"cat": 10, "dog": 10}).items():
        for k in range(count):
            draw(place / name / f"{k}.png", seed=zlib.crc32(f"{name} {k}".encode()), **kind)
    return place


@pytest.mark.parametrize("model", own_images.MODELS)
@pytest.mark.parametrize("channels", [3, 1], ids=["colour", "grey"])
def test_every_network_takes_two_steps_on_a_folder(tmp_path, model, channels):
    recipe = own_images.recipe(fill(tmp_path / "own", channels=channels), model)
    recipe = with_overrides(recipe, {"batch_size": 2, "data_args.size": "32"})
    run = train(recipe, out=tmp_path / "run", device="cpu", limit=2, log=None)
    assert run.step == 2
    assert run.data.image == (channels, 32, 32)
    assert run.data.class_names == ("cat", "dog")
    assert [len(split) for split in (run.data.train, run.data.validation, run.data.test)] == [14, 2, 4]
    assert getattr(run.model, "decoder", None) is None
    assert all(value.isfinite().all() for value in run.model.state_dict().values())


def test_a_recipe_is_plain_values_and_no_table(tmp_path, monkeypatch):
    fill(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    recipe = own_images.recipe("own")
    assert recipe.data_args["path"] == str(tmp_path / "own"), "a run is opened from anywhere"
    assert from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "own_images" not in recipes.tables()
    assert own_images.recipe("own") == recipe


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([(40, 48)], (40, 48)),
        ([(400, 400), (300, 500)], (64, 64)),
        ([(3000, 4000)], (56, 72)),
        ([(300, 400), (600, 800)], (56, 72)),
        ([(4000, 3000)], (72, 56)),
        ([(100, 1000)], (44, 92)),
        ([(20, 20)], (32, 32)),
        ([(20, 20), (10, 30)], (32, 32)),
        ([(50, 80), (40, 40), (44, 60)], (44, 44)),
        ([], (64, 64)),
    ],
)
def test_the_size_follows_the_images(sizes, wanted):
    headers = [own_images.Header(height, width, False) for height, width in sizes]
    assert own_images._size(headers) == wanted


def test_grey_scans_are_not_mirrored(tmp_path):
    colour = own_images.recipe(fill(tmp_path / "a"))
    grey = own_images.recipe(fill(tmp_path / "b", channels=1))
    assert flip() in load_data(colour).train_transform
    assert flip() not in load_data(grey).train_transform
    assert load_data(grey).train_transform
    assert load_data(with_overrides(grey, {"data_args.augmentation": ""})).train_transform == ()
    assert load_data(colour).test_transform == load_data(grey).test_transform == ()
    with pytest.raises(ValueError, match="augmentation='strong' is not known"):
        load_data(with_overrides(colour, {"data_args.augmentation": "strong"}))
    assert protocols.protocol_names("folder") == ["own_images"]
    for name in ("own_images-official", "own_image"):
        with pytest.raises(ValueError, match="there is no protocol"):
            protocols.find(name, "folder")
    with pytest.raises(ValueError, match="sabour2017 has no protocol for folder; folder has own_images"):
        protocols.find("sabour2017", "folder")


def test_uneven_classes_are_balanced_by_repeating_the_rare(tmp_path):
    recipe = own_images.recipe(fill(tmp_path, {"many": 40, "few": 10, "rare": 2}))
    data = load_data(recipe)
    assert recipe.data_args["balance"] is True
    counts = torch.bincount(data.train.labels).tolist()
    assert data.class_names == ("few", "many", "rare")
    assert counts == [counts[1], counts[1], 10], "each image at most ten times"
    assert any("are repeated" in note for note in data.notes)
    even = own_images.recipe(fill(tmp_path / "even", {"a": 10, "b": 12}))
    assert "balance" not in even.data_args
    held = {split.images.flatten(1).numpy()[k].tobytes() for split in (data.validation, data.test) for k in range(2)}
    trained = {row.tobytes() for row in data.train.images.flatten(1).numpy()}
    assert not held & trained


def test_balanced_repeats_as_loops_do():
    labels = torch.tensor([0, 1, 0, 2, 0, 0, 1])
    split = Stored(torch.arange(7, dtype=torch.uint8)[:, None, None].expand(7, 2, 2), labels, ("a", "b", "c"))
    assert balanced(split).images[:, 0, 0].tolist() == [0, 2, 4, 5, 1, 6, 1, 6, 3, 3, 3, 3]
    assert balanced(split, most=2).images[:, 0, 0].tolist() == [0, 2, 4, 5, 1, 6, 1, 6, 3, 3]
    several = Stored(split.images, labels[:, None].expand(7, 2), ("a", "b", "c"))
    assert balanced(several) is several


@pytest.mark.parametrize("seed", range(5))
def test_a_class_with_one_image_keeps_it_to_train_on(seed):
    labels = torch.tensor([0] * 9 + [1, 2, 3])
    split = Stored(torch.zeros(12, 1, 1, dtype=torch.uint8), labels, tuple("abcd"))
    for count in range(1, 9):
        left, held = hold_out(split, count, seed)
        assert len(held) == count
        assert set(left.labels.tolist()) == {0, 1, 2, 3}
    assert len(hold_out(split, 10, seed)[1]) == 10, "more than that cannot be helped"


def test_tiny_folders(tmp_path):
    two_each = own_images.recipe(fill(tmp_path / "two", {"a": 2, "b": 2}))
    assert (two_each.validation, two_each.epochs) == (0.0, own_images.MOST)
    data = load_data(two_each)
    assert (len(data.train), len(data.test), data.validation) == (2, 2, None)
    with pytest.raises(DataError, match="only the class 'a', and a network learns to tell classes apart"):
        own_images.recipe(fill(tmp_path / "one", {"a": 5}))
    single = own_images.recipe(fill(tmp_path / "single", {"a": 1, "b": 1}))
    with pytest.raises(DataError, match="each class needs two at least"):
        load_data(single)


def test_parts_of_the_folders_own_are_kept(tmp_path):
    for part, count in (("train", 8), ("val", 3), ("test", 2)):
        fill(tmp_path / part, {"a": count, "b": count})
    recipe = own_images.recipe(tmp_path)
    assert (recipe.validation, "test" in recipe.data_args) == (None, False)
    data = load_data(recipe)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [16, 6, 4]


def test_what_cannot_be_read_is_left_out_with_a_warning(tmp_path, caplog):
    fill(tmp_path)
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"no image")
    frames = [Image.new("RGB", (9, 9), shade) for shade in ("red", "blue")]
    frames[0].save(tmp_path / "cat" / "moving.gif", save_all=True, append_images=frames[1:])
    data = load_data(own_images.recipe(tmp_path))
    assert len(data.train) + len(data.validation) + len(data.test) == 20
    assert "2 of 22 files were skipped" in caplog.text


@pytest.mark.parametrize("model", [name for name in own_images.MODELS if name not in ("em_capsnet", "encapnet")])
def test_a_csv_with_several_labels(tmp_path, model):
    lines = ["path,label"]
    for k in range(20):
        draw(tmp_path / f"{k}.png", seed=k)
        lines.append(f"{k}.png,{'cat;dog' if k % 2 else 'cat' if k % 4 else 'bird'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    recipe = own_images.recipe(tmp_path / "labels.csv", model)
    recipe = with_overrides(recipe, {"batch_size": 2, "data_args.size": "32"})
    run = train(recipe, out=tmp_path / "run", device="cpu", limit=2, log=None)
    assert (run.model.objects, recipe.metric) == (2, "exact_match_accuracy")
    for other in ("em_capsnet", "encapnet"):
        with pytest.raises(ValueError, match=f"{other} finds one class in an image, and some of these have 2; choose"):
            own_images.recipe(tmp_path / "labels.csv", other)


def test_bad_input_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="did you mean efficient_capsnet"):
        own_images.recipe(fill(tmp_path / "own"), "eficient_capsnet")
    with pytest.raises(ValueError, match="'capsnet_mnist' is none; did you mean capsnet"):
        own_images.recipe(tmp_path / "own", "capsnet_mnist")
    with pytest.raises(DataError, match="gone is no folder; give one with a sub-folder for each class, or a CSV"):
        own_images.recipe(tmp_path / "gone")
    with pytest.raises(ValueError, match="folder has no option 'mirrored'"):
        load("folder", protocol="own_images", path=tmp_path / "own", mirrored=True)
