"""A card says what its network was tested with, by which recipe, and what the recipe's other seeds have."""

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchcaps import recipes
from torchcaps.export import renew_card
from torchcaps.export.card import model_card
from torchcaps.export.folder import card_of
from torchcaps.export.record import seeds_of
from torchcaps.models import load_pretrained
from torchcaps.results import Result, append, read

ROOT = Path(__file__).parents[2]
HUB = sorted(path for path in (ROOT / "hub").glob("*") if path.is_dir())
RENEW = "python -c 'from torchcaps.export import renew_card; renew_card(\"{}\")' writes it anew"


def result(full="ours:mnist", *, error=0.004, **values):
    table, _, row = full.partition(":")
    recipe = recipes.find(full)
    test = {"error": error, "standard_error": 0.001, "images": 10_000}
    return Result(
        **{
            "table": table, "row": row, "recipe": recipe.to_dict(), "seed": 0, "test": test, "epochs": recipe.epochs,
            "planned": recipe.epochs, "finished": "2026-11-15T09:00:00+00:00", "commit": "0123456789abcdef", **values,
        }
    )  # fmt: skip


def card(line, seeds=(), files=(), **changes):
    about = {
        "preset": line.recipe["model"], "options": {}, "data": line.recipe["data"], "image": [1, 28, 28], "classes": 10,
        "class_names": list("0123456789"), "parameters": 154_656, "decoder_parameters": 0, "dtype": "float32",
        "input": ["pixels / 255"], "threshold": None, "licence": "apache-2.0", "citation": "nobody", **changes,
    }  # fmt: skip
    return model_card("net", about, line, files, seeds)


def test_two_digits_without_validation():
    """The exact match is told apart from single digits, and a share of the time from the whole."""
    test = {"error": 0.1186, "standard_error": 0.001, "images": 100_000, "per_digit_error": 0.0608}
    line = result("ours:multimnist", seed=1, test=test, epoch=50, seconds=96.0, device="GPU", together=2)
    text = card(line, image=[1, 36, 36])
    for words in (
        "metrics: [{type: exact_match, value: 0.8814}]",
        "| split | images | exact match error % | standard error |",
        "| test | 100,000 | 11.86 | 0.10 |\n\nAn exact match has both digits right; per digit the error is 6.08 %.",
        "Pairs share digits, so they are not independent: the standard error, which takes them for that, is too small.",
        "trained for 50 epochs in 96 s on GPU, its share of 2 seeds at once.",
        "answer.found]  # the 2 highest are the answer",
    ):
        assert words in text
    for words in ("| validation |", "model.onnx", "accuracy", "float16", "of this recipe"):
        assert words not in text
    assert "`model.onnx` takes `images`" in card(line, files=["model.onnx"])


def test_the_seeds_of_a_recipe_are_those_of_its_line_in_the_table(tmp_path):
    """Not ensembles, other settings, other rows or a replaced run; nothing where the line itself is not found."""
    line = result(seed=2, error=0.0031)
    longer = {**line.recipe, "lr": 0.5}
    others = [
        result(error=0.9),
        result(error=0.0034, finished="2026-11-16T09:00:00+00:00"),
        result(seed=1, error=0.0037),
        result(seed=3, recipe=longer),
        result(seed=4, epochs=3),
        result(seed=5, members=("a", "b")),
        result(seed=7, look=True),
        result("ours:mnist-plain5", seed=6),
    ]
    for each in others:
        append(tmp_path / "ours.jsonl", each)
    assert seeds_of(line, tmp_path, tmp_path / "nowhere") == []
    append(tmp_path / "ours.jsonl", line)
    seeds = seeds_of(line, tmp_path / "nowhere", tmp_path)
    assert [(each.seed, each.test["error"]) for each in seeds] == [(0, 0.0034), (1, 0.0037), (2, 0.0031)]
    told = "The 3 seeds of this recipe have a test error of 0.340 ± 0.030 % (mean ± standard deviation): 0.34, 0.37"
    assert f"{told} and 0.31. This seed has the lowest;" in card(line, seeds)
    assert "lowest" not in card(seeds[0], seeds)
    assert seeds_of(others[0], tmp_path)[0] == others[0]  # the run itself, though another has replaced it


def test_training_is_told_as_it_was():
    line = result("ours:cifar10", seed=1)
    text = card(line, input=["pixels / 255", "normalise(mean=(0.5,), std=(0.2,))", "mirrored()"])
    for words in (
        "| augmentation (`data_args`) | padding 4, mirror true, cutout 8 |",
        "| learning rate | 0.1, schedule cosine (warmup 5) |",
        "| precision | bf16 |",
        "| held out | 0.02 of the training images |",
        "torchcaps train ours:cifar10 --seed 1  # trains it, in a clone of the repository\n"
        "torchcaps evaluate net  # tests this folder, from the one above it\n"
        "torchcaps evaluate net --images 1000  # on a part, which takes less time",
        'metrics: [{type: accuracy, name: "accuracy with 2 views of an image", value: 0.',
        "then `mirrored()`. So the image and its mirror image count, by the sum of their probabilities.",
        "pip install '.[data]'",
    ):
        assert words in text
    views = replace(line, recipe={**line.recipe, "data_args": {"crops": 9}})
    assert "So 9 views of the image count" in card(views)
    assert "with one view the error is" not in card(views)
    told = card(replace(views, test={**line.test, "one_view": {"error": 0.0525}}))
    assert "the sum over 9 views of it; with one view the error is 5.25 %." in told
    protocol = card(result("sabour2017_table1:routing3"))
    assert "| augmentation (`data_args`) | `shift(pixels=2)`, the protocol's |\n| held out | nothing |" in protocol


def test_own_images_have_no_row_and_keep_their_path():
    recipe = {**recipes.find("quick:digits").to_dict(), "data": "folder", "protocol": None}
    line = result("quick:digits", table="folder", row="photos", recipe={**recipe, "data_args": {"path": "/home/me"}})
    text = card(line)
    assert "/home/me" not in text
    assert "torchcaps train" not in text
    assert "torchcaps evaluate" not in text


@pytest.mark.parametrize(
    ("row", "validation", "words"),
    [
        ("ours:mnist", {"error": 0.004, "standard_error": 0.001, "images": 3000}, "on held-out images."),
        ("sabour2017_table1:routing3", None, "on training images, as the recipe holds none out."),
        ("mazzia2021_table2:efficient-official", None, "on test images, on which the recipe validates."),
    ],
)
def test_which_images_half_precision_was_tried_on(row, validation, words):
    text = card(result(row, validation=validation, selected="best"), dtype="float16")
    assert f"before they were rounded to float16, which changed no prediction {words}" in text
    assert f"the best on the {'test' if 'test images' in words else 'validation'} set;" in text


@pytest.mark.parametrize("folder", HUB, ids=lambda folder: folder.name)
def test_cards_of_the_hub_are_as_the_results_have_them(folder):
    assert (folder / "README.md").read_text() == card_of(folder, ROOT / "results"), RENEW.format(f"hub/{folder.name}")


@pytest.mark.parametrize("folder", HUB, ids=lambda folder: folder.name)
def test_the_code_of_a_card_gives_what_the_test_gives(folder, tmp_path, monkeypatch):
    """The steps of its protocol are done by hand here."""
    (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    network = load_pretrained(folder)
    pixels = torch.randint(256, network.image, dtype=torch.uint8)
    drawn = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    pytest.importorskip("PIL.Image").fromarray(drawn.numpy()).save("image.png")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    scope = {}
    exec(compile(code, "card", "exec"), scope)
    images = pixels[None] / 255
    if "cifar10" in folder.name:
        mean, deviation = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]])[:, :, None, None]
        images = (images - mean) / deviation
    if folder.name == "encapnet18_cifar10":
        images = torch.cat([images, images.flip(3)])
    with torch.no_grad():
        wanted = network(images).probabilities.mean(0).topk(2 if "multimnist" in folder.name else 1)
    found = scope["answer"].found
    assert [each.label for each in found] == [scope["predictor"].run.class_names[k] for k in wanted.indices]
    torch.testing.assert_close(torch.tensor([each.probability for each in found]), wanted.values, rtol=1e-4, atol=1e-5)


def test_a_card_is_written_anew_and_nothing_else(tmp_path):
    folder = Path(shutil.copytree(HUB[0], tmp_path / HUB[0].name))
    (line,) = read(folder / "results.jsonl")
    append(tmp_path / "results" / "some.jsonl", line)
    append(tmp_path / "results" / "some.jsonl", replace(line, seed=9))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "The 2 seeds of this recipe" in renew_card(folder, tmp_path / "results").read_text()
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"README.md", "SHA256SUMS"}
    assert before.keys() == after.keys()
    sums = dict(reversed(each.split("  ")) for each in after.pop("SHA256SUMS").decode().splitlines())
    assert sums == {name: hashlib.sha256(content).hexdigest() for name, content in after.items()}
    append(folder / "results.jsonl", line)
    with pytest.raises(ValueError, match=r"results\.jsonl must have the one line of its run, but it has 2"):
        renew_card(folder)


def test_ways_of_training_from_other_papers_are_cited():
    plain = result()
    assert "Hinton, O. Vinyals" not in card(plain)
    assert "TrivialAugment: " not in card(plain)
    told = card(result(recipe={**plain.recipe, "teachers": ["hub/one"], "data_args": {"trivial": True}}))
    assert "\n\nLearning from teachers: G. Hinton, O. Vinyals, J. Dean. " in told
    assert "\n\nAugmentation: S. Müller, F. Hutter. TrivialAugment: " in told


def test_a_backbone_of_another_paper_is_cited():
    told = card(result(), options={"backbone": "plain5"})
    assert "\n\nnobody\n\nThe backbone is from another paper: S. An, " in told
    assert "another paper" not in card(result(), options={"backbone": "simple"})
    tsai = (
        "Y.-H. H. Tsai, N. Srivastava, H. Goh, R. Salakhutdinov. Capsules with inverted dot-product attention routing."
    )
    assert "another paper" not in card(result(), options={"backbone": "resnet"}, citation=f"{tsai} ICLR 2020.")
