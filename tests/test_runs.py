"""Runs opened again: the same network, or a sentence."""

import json
import shutil

import pytest
import torch

from torchcaps import recipes
from torchcaps.data import batches_for
from torchcaps.evaluate import headline_error, predict
from torchcaps.runs import look, open_run, pick_device, read_recipe, read_threshold
from torchcaps.train import checkpoint, train

CHANGES = {"epochs": "2", "samples": "64", "batch_size": "16", "keep_epochs": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = recipes.with_overrides(recipes.find("quick:digits"), CHANGES)
    return train(recipe, out=tmp_path_factory.mktemp("runs") / "run", seed=3, device="cpu", log=None)


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run.folder, tmp_path / "run")


def test_what_is_opened_is_what_was_trained(run):
    opened = open_run(run.folder, device="cpu")
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(opened.model(images).scores, run.model.eval()(images).scores.detach())
    assert checkpoint.fingerprint(opened.model.state_dict()) == checkpoint.fingerprint(run.model.state_dict())
    assert (opened.recipe, opened.seed, opened.epoch) == (run.recipe, 3, 2)
    assert opened.image == (1, 8, 8)
    assert opened.class_names == tuple("0123456789")
    assert opened.threshold is None
    assert not opened.model.training
    assert not any(weight.requires_grad for weight in opened.model.parameters())


def test_its_data_give_the_validation_error_of_the_run(run):
    opened = open_run(run.folder, device="cpu")
    data = opened.data()
    batches = batches_for(data.validation, 50, transform=data.test_transform, shuffle=False)
    assert headline_error(predict(opened.model, batches.epoch(0))) == run.metrics[-1]["validation_error"]


def test_images_are_looked_at_in_float32(run, monkeypatch):
    """On a GPU convolutions would take TF32, if nobody forbade it."""
    seen = []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    opened = open_run(run.folder, device="cpu")
    opened.model.register_forward_pre_hook(
        lambda *_: seen.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
    )
    data = opened.data()
    look(opened.model, data.test, data, opened.recipe, images=4)
    assert seen == [(False, "highest")]
    assert torch.backends.cudnn.allow_tf32


def test_a_kept_epoch(run, folder):
    first, last = (open_run(run.folder, device="cpu", epoch=epoch) for epoch in (1, None))
    assert (first.epoch, last.epoch) == (1, 2)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), last.model.parameters(), strict=True))
    (folder / "final.json").unlink()
    assert open_run(folder, epoch=1).epoch == 1
    with pytest.raises(ValueError, match=r"epoch 7 of .*run was not kept; the kept ones are 1$"):
        open_run(folder, epoch=7)


def test_the_threshold_is_read_where_there_is_one(folder):
    (folder / "test.json").write_text('{"threshold": 0.25}')
    assert read_threshold(folder) == 0.25
    (folder / "validation.json").write_text('{"threshold": 0.5}')
    assert open_run(folder).threshold == 0.5


def test_a_folder_that_is_no_run(folder, tmp_path):
    with pytest.raises(ValueError, match=r"there is no run folder .*nothing$"):
        open_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is no run folder, as it has no recipe.json; did you mean .*run\?"):
        open_run(tmp_path)
    with pytest.raises(ValueError, match=r"is no run folder, as it has no recipe.json; torchcaps train makes them"):
        open_run(folder / "epochs")


def test_a_run_that_has_not_finished(folder):
    (folder / "final.json").unlink()
    with pytest.raises(
        ValueError, match=r"run has not finished; torchcaps train ROW --resume --out .*run --seed 3 goes on$"
    ):
        open_run(folder)
    (folder / "row.json").write_text(json.dumps({"name": "quick:digits", "settings": ["model_args.a=b c", "lr=1"]}))
    with pytest.raises(
        ValueError,
        match=r"run has not finished; torchcaps train quick:digits --resume --out .* --model-args.a 'b c' --lr 1 goes",
    ):
        open_run(folder)


def test_broken_files(folder):
    path = folder / "weights.safetensors"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", bytes([*whole[:-1], whole[-1] ^ 1])):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"run cannot be opened: weights.safetensors is (cut short|damaged)"):
            open_run(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"run cannot be opened: weights.safetensors is missing"):
        open_run(folder)
    checkpoint.save_weights(path, {"a": torch.zeros(1)}, {"seed": 0})
    with pytest.raises(ValueError, match=r"weights.safetensors does not say what it holds: 'recipe'"):
        open_run(folder)
    path.write_bytes(whole)
    weights, about = checkpoint.load_weights(path)
    del weights[next(name for name in weights if name.endswith(".weight"))]
    checkpoint.save_weights(path, weights, about)
    with pytest.raises(ValueError, match=r"do not fit efficient_capsnet as it is built now"):
        open_run(folder)


def test_what_cannot_be_read_is_named(folder):
    assert read_recipe(folder)[1] == 3
    (folder / "recipe.json").write_text('{"seed": 1')
    with pytest.raises(ValueError, match=r"recipe.json cannot be read: "):
        read_recipe(folder)
    (folder / "test.json").write_text("[]")
    with pytest.raises(ValueError, match=r"test.json cannot be read: it holds no names with values"):
        read_threshold(folder)


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match=r"device 'gpu' is not known; it is auto, cpu, cuda, cuda:N or mps"):
        pick_device("gpu")
    with pytest.raises(ValueError, match=r"device cuda:97 is not there; this machine has \d+ of cuda"):
        pick_device("cuda:97")
