"""What is exported comes back as the same network, with everything that is known of it."""

import hashlib
import json
import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

import torchcaps.export.weights as exporting
import torchcaps.finish as ending
from torchcaps import load_pretrained, recipes
from torchcaps.cli import main
from torchcaps.commands import export as verb
from torchcaps.data import load
from torchcaps.evaluate import predict
from torchcaps.export import export_run, ship_run
from torchcaps.export.folder import card_of
from torchcaps.export.onnx import export_onnx
from torchcaps.finish import finish
from torchcaps.models import create_model, pretrained
from torchcaps.recipes import with_overrides
from torchcaps.results import read
from torchcaps.runs import open_run
from torchcaps.train import checkpoint, train
from torchcaps.types import Output

CHANGES = {"epochs": "3", "samples": "320", "batch_size": "16", "lr": "0.01"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(ending, "_report", lambda folder, say: None)
    recipe = with_overrides(recipes.find("quick:digits"), CHANGES)
    place = tmp_path_factory.mktemp("exported")
    train(recipe, out=place / "run", seed=4, device="cpu", log=None)
    finish(place / "run", table="quick", row="digits", results=place / "results.jsonl", device="cpu")
    patch.undo()
    return place / "run"


@pytest.fixture
def images():
    return torch.rand(5, 1, 8, 8)


def test_a_folder_comes_back_as_the_same_network(run, tmp_path, images):
    out = export_run(run, tmp_path / "digits-net", device="cpu")
    names = {"README.md", "SHA256SUMS", "config.json", "model.safetensors", "results.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    network, opened = load_pretrained(out), open_run(run, device="cpu")
    assert not network.training
    torch.testing.assert_close(network(images), opened.model(images), rtol=0, atol=0)
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
        names.discard(name)
    assert names == {"SHA256SUMS"}
    (line,) = read(out / "results.jsonl")
    (own,) = read(run.parent / "results.jsonl")
    assert line == own
    about = json.loads((out / "config.json").read_text())
    assert about["sha256"] == hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert about["test_error"] == own.test["error"]
    assert about["class_names"] == list("0123456789")
    assert about["threshold"] == opened.threshold
    assert about["options"] == {"first_kernel": 2, "strides": [1, 1, 1, 1]}
    assert about["input"] == ["pixels / 255"]
    again = open_run(out, device="cpu")
    assert (again.recipe, again.seed, again.epoch) == (opened.recipe, 4, opened.epoch)
    torch.testing.assert_close(again.model(images), opened.model(images), rtol=0, atol=0)


def test_the_card_says_what_is_so_and_its_code_runs(run, tmp_path, monkeypatch):
    export_run(run, tmp_path / "digits-net", results=run.parent / "results.jsonl", device="cpu")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl has no line of"):
        export_run(run, tmp_path / "another", results=tmp_path / "empty.jsonl", device="cpu")
    assert not (tmp_path / "another").exists()
    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "digits-net" / "README.md").read_text()
    (line,) = read(run.parent / "results.jsonl")
    for words in (
        f"| test | 360 | {100 * line.test['error']:.2f} |",
        "the test set was read once",
        "Row `quick:digits`, seed 4, trained for 3 epochs, shortened from 30",
        "on cpu",
        "The results have no other seed of this recipe.",
        "torchcaps train quick:digits --epochs 3 --batch-size 16 --lr 0.01 --samples 320 --seed 4  # trains it",
        "torchcaps evaluate digits-net  # tests this folder, from the one above it",
        "V. Mazzia, F. Salvetti, M. Chiaberge",
        "Apache-2.0",
        "## Intended use and limits",
    ):
        assert words in card
    assert card == card_of("digits-net", run.parent / "results.jsonl")
    digit = load("digits").test[0].image
    pytest.importorskip("PIL.Image").fromarray(digit[0].numpy()).save("image.png")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    scope = {}
    exec(compile(code, "card", "exec"), scope)
    scores = load_pretrained("digits-net")(digit[None] / 255).scores
    assert scope["answer"].label == str(int(scores.argmax()))
    header = card.split("---")[1]
    assert "license: apache-2.0" in header
    assert f"value: {json.dumps(round(1 - line.test['error'], 6))}" in header


def test_half_precision_keeps_every_class(run, tmp_path):
    said = []
    out = export_run(run, tmp_path / "half", half=True, device="cpu", say=said.append)
    held = load("digits", validation=0.1).validation
    assert said == [f"half precision changes the class of none of {len(held)} validation images"]
    tensors = load_file(out / "model.safetensors")
    assert {value.dtype for key, value in tensors.items() if "num_batches" not in key} == {torch.float16}
    batches = [(held.images[:, None].float() / 255, held.labels)]
    ours, theirs = predict(load_pretrained(out), batches), predict(open_run(run, device="cpu").model, batches)
    assert torch.equal(ours.scores.argmax(1), theirs.scores.argmax(1))
    assert not torch.equal(ours.scores, theirs.scores)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert "before they were rounded to float16, which changed no prediction on held" in (out / "README.md").read_text()


def test_weights_that_were_rounded_before_are_not_said_to_have_been_tried(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    weights, about = checkpoint.load_weights(run / "weights.safetensors")
    rounded = {
        name: value.half().to(value.dtype) if value.is_floating_point() else value for name, value in weights.items()
    }
    checkpoint.save_weights(copy / "weights.safetensors", rounded, about)
    said = []
    out = export_run(copy, tmp_path / "half", half=True, device="cpu", say=said.append)
    assert said == ["the weights are float16 numbers already"]
    assert all(value.dtype == torch.float16 for value in load_file(out / "model.safetensors").values() if value.dim())
    card = (out / "README.md").read_text()
    assert "They came here in float16, and the figures may be from before they were rounded to it." in card
    assert "changed no prediction" not in card


def test_half_precision_that_costs_something_is_refused(run, tmp_path, monkeypatch):
    """As if float16 had no digits at all."""
    monkeypatch.setattr(exporting, "_half", lambda value: value.sign() if value.is_floating_point() else value)
    with pytest.raises(ValueError, match=r"in half precision \d+ of \d+ validation images would get another class"):
        export_run(run, tmp_path / "half", half=True, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_what_float16_cannot_hold_stays():
    large = torch.tensor([1e5, 1.0])
    assert torch.equal(exporting._half(large), large)
    assert exporting._half(torch.tensor([6e4])).dtype == torch.float16
    assert exporting._half(torch.tensor(3)).dtype == torch.int64


def test_weights_go_into_the_package_by_name(run, tmp_path, monkeypatch, capsys, images):
    for module in (pretrained, exporting):
        monkeypatch.setattr(module, "SHIPPED", tmp_path / "weights")
    assert main(["export", str(run), "--ship", "--name", "small_digits", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "float16 changes the class of none of" in said
    assert "small_digits is in the package: 1.65 MB" in said
    assert pretrained.shipped() == ["small_digits"]
    network = create_model("small_digits", pretrained=True)
    torch.testing.assert_close(network(images).scores, open_run(run).model(images).scores, rtol=0, atol=2e-3)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "small_digits", "--device", "cpu"]) == 0
    (line,) = read(run.parent / "results.jsonl")
    assert capsys.readouterr().out.startswith(f"small_digits (epoch 3): test error {100 * line.test['error']:.2f} %")
    out = export_run("small_digits", tmp_path / "again", device="cpu")
    torch.testing.assert_close(load_pretrained(out)(images), network(images), rtol=0, atol=0)
    monkeypatch.setattr(exporting, "LIMIT", 1000)
    with pytest.raises(ValueError, match=r"the package's weights would take \d.\d MB, more than"):
        ship_run(run, "other", device="cpu")
    with pytest.raises(ValueError, match=r"a name such as efficient_capsnet_mnist, got '\.\./x'"):
        ship_run(run, "../x", device="cpu")
    assert pretrained.shipped() == ["small_digits"]


def test_only_the_decoder_goes_in_half_where_classes_would_change(run, tmp_path, monkeypatch, images):
    """As if float16 had no digits at all."""
    for module in (pretrained, exporting):
        monkeypatch.setattr(module, "SHIPPED", tmp_path)
    monkeypatch.setattr(exporting, "_half", lambda value: value.sign().half() if value.is_floating_point() else value)
    said = []
    tensors = load_file(ship_run(run, "small_digits", device="cpu", say=said.append))
    assert re.fullmatch(r"float32 but for the decoder, as \d+ of \d+ validation images would .* float16", *said)
    for key, value in tensors.items():
        if value.is_floating_point():
            assert value.dtype == (torch.float16 if key.startswith("decoder.") else torch.float32)
    assert pretrained.find_shipped("small_digits").about["dtype"] == "float32, the decoder's float16"
    scores = create_model("small_digits", pretrained=True)(images).scores
    torch.testing.assert_close(scores, open_run(run).model(images).scores, rtol=0, atol=0)


def test_what_cannot_be_exported_is_said(run, tmp_path, capsys):
    untested = shutil.copytree(run, tmp_path / "untested")
    (untested / "result.json").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, sentence in (
        ([str(untested), "--out", str(tmp_path / "a")], "has not been tested; torchcaps evaluate"),
        ([str(run)], "--out FOLDER says where the weights go"),
        ([str(run), "--out", str(tmp_path / "full")], "is not empty; name a folder that is not there yet"),
        ([str(tmp_path / "nowhere"), "--out", str(tmp_path / "a")], "there is no run folder"),
        ([str(run), "--out", "x", "--ship"], "--ship decides where and how"),
        ([str(run), "--out", "x", "--name", "y"], "--name goes with --ship"),
    ):
        assert main(["export", *words, "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert sentence in err
        assert err.count("\n") == 1
    assert not (tmp_path / "a").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_without_a_validation_set_half_is_tried_on_training_images(run, tmp_path, monkeypatch):
    opened = open_run(run, device="cpu")
    monkeypatch.setattr(type(opened), "data", lambda self: load("digits"))
    said = []
    export_run(run, tmp_path / "half", half=True, device="cpu", say=said.append)
    assert said == [f"half precision changes the class of none of {len(load('digits').train):,} training images"]


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs torchcaps[export]")
def test_onnx_gives_what_torch_gives_for_any_batch(run, tmp_path, capsys):
    import onnxruntime

    out = tmp_path / "net"
    assert main(["export", str(run), "--out", str(out), "--onnx", "--device", "cpu"]) == 0
    assert "model.onnx gives what torch gives, to " in capsys.readouterr().out
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["images"]
    assert session.get_inputs()[0].shape[1:] == [1, 8, 8]
    assert isinstance(session.get_inputs()[0].shape[0], str)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list("0123456789")
    network = load_pretrained(out)
    for size in (1, 2, 7):
        images = torch.rand(size, 1, 8, 8)
        scores, probabilities = session.run(None, {"images": images.numpy()})
        output = network(images)
        torch.testing.assert_close(torch.from_numpy(scores), output.scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(probabilities), output.probabilities, rtol=0, atol=1e-5)
    assert "model.onnx" in (out / "README.md").read_text()
    assert "  model.onnx\n" in (out / "SHA256SUMS").read_text()


def test_onnx_says_what_is_missing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torchcaps.export.onnx.find_spec", lambda name: None if name != "onnx" else object())
    assert main(["export", str(run), "--out", str(tmp_path / "net"), "--onnx", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "torchcaps: ONNX needs onnxscript and onnxruntime: pip install 'torchcaps[export]'\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs torchcaps[export]")
def test_an_onnx_file_that_differs_is_not_written(monkeypatch):
    monkeypatch.setattr("torchcaps.export.onnx.CLOSE", -1.0)

    class Plain(torch.nn.Linear):
        def forward(self, images):
            scores = super().forward(images.flatten(1))
            return Output(scores, None, None, None, scores.softmax(1))

    with pytest.raises(ValueError, match="off torch's; it is not written"):
        export_onnx(Plain(12, 3), (3, 2, 2))


def test_the_verb_reads_as_the_others(capsys):
    assert main(["export", "--help"]) == 0
    out = capsys.readouterr().out
    assert "ready for a model hub" in out
    assert verb.export_weights.__doc__.startswith("Write a folder")
