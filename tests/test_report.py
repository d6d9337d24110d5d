"""The report of a run, made from run folders of every kind."""

import base64
import csv
import json
from html.parser import HTMLParser

import pytest
import torch

from torchcaps.data import DataSet, Stored, load
from torchcaps.evaluate import figures, predict
from torchcaps.models import create_model
from torchcaps.recipes import Recipe
from torchcaps.report import write_report
from torchcaps.results import Result
from torchcaps.train import checkpoint

SMALL = {"first_kernel": 2, "strides": [1, 1, 1, 1]}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("torchcaps.figures.style.DPI", 30)


@pytest.fixture
def unrendered(monkeypatch):
    """For tests of words and files: figures are made, but not turned into pixels."""
    monkeypatch.setattr("torchcaps.figures.png", lambda figure: b"\x89PNG" + repr(figure.get_size_inches()).encode())


class Seen(HTMLParser):
    """Tags that are open, the text, and everything a browser would fetch."""

    VOID = frozenset({"meta", "img", "source", "link", "br"})

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.sources, self.tags = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [(tag, value) for name, value in attributes if name in ("src", "srcset", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def make_data(channels=1, classes=3, several=False, images=40, side=8):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, channels, side, side), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, classes, (images,), generator=generator)
    if several:
        labels = torch.stack([labels, (labels + 1) % classes], dim=1)
    split = Stored(pixels, labels, tuple(f"<{k}>" for k in range(classes)))
    return DataSet("made", split, split)


def make_run(folder, data, *, epochs=2, validation=True, tested=True, reconstruction=0.1, model="efficient_capsnet",
             routing=False, options=SMALL, **recipe):  # fmt: skip
    """A finished run as `train` and `finish` leave it, with a network that has learnt nothing."""
    folder.mkdir()
    recipe = {"reported": "0.26 ± 0.0002", "assumed": ("lr",), **recipe}
    row = Recipe(model=model, data="made", model_args=options, reconstruction=reconstruction, epochs=epochs, **recipe)
    network = create_model(model, **{"image": data.image, "classes": data.classes, **row.model_args})
    about = {"recipe": row.to_dict(), "seed": 3, "epoch": epochs, "image": list(data.image)}
    about["class_names"] = list(data.class_names)
    checkpoint.save_weights(folder / "weights.safetensors", network.state_dict(), about)
    final = {"seconds": 3725.0, "device": "cpu", "ranks": 1, "last": {}}
    metrics = [
        {"epoch": n + 1, "step": n + 4, "lr": 0.1, "loss": 1 / (n + 1), "margin": 1 / (n + 1)} for n in range(epochs)
    ]
    if validation:
        metrics = [{**each, "validation_error": 0.25} for each in metrics]
        final["validation_error"] = 0.25
    times = [{"epoch": n + 1, "seconds": 2.0, "images_per_second": 50.0} for n in range(epochs)]
    for name, rows in (("metrics", metrics), ("times", times)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    (folder / "recipe.json").write_text(json.dumps({"seed": 3, "recipe": row.to_dict()}))
    (folder / "final.json").write_text(json.dumps(final))
    if routing:
        layer = {"routing": "DynamicRouting", "logits": [0.2, 0.1], "cosine": [1, 2], "iterations": 2}
        lines = [{"epoch": n + 1, "cosine_edges": [-1, 0, 1], "layers": {"body.0": layer}} for n in range(epochs)]
        (folder / "routing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tested:
        batch = data.test.gather(torch.arange(len(data.test)))
        predictions = predict(network, [(batch.images / 255, batch.labels)])
        checkpoint.save_weights(folder / "predictions.safetensors", predictions._asdict(), {})
        found = figures(predictions)
        (folder / "test.json").write_text(json.dumps({"reads": 1, "figures": found, "threshold": 0.4}))
        result = Result.now(table="mazzia2021_table2", row="efficient", recipe=row.to_dict(), seed=3, test=found,
                            epochs=epochs, commit="abc1234", finished="2026-01-01T00:00:00+00:00")  # fmt: skip
        (folder / "result.json").write_text(result.line())
        return network, found
    return network, None


def check_page(path):
    """Nothing is fetched, every picture is inside and is the file beside it."""
    page = path.read_text()
    assert "http:" not in page
    assert "https:" not in page
    seen = Seen(page)
    pictures = [value for tag, value in seen.sources if tag == "img"]
    assert len(pictures) == seen.tags.count("img") == seen.tags.count("source")
    assert {tag for tag, _ in seen.sources} <= {"img", "source"}
    inside = set()
    for _, value in seen.sources:
        kind, _, content = value.partition(",")
        assert kind == "data:image/png;base64"
        png = base64.b64decode(content, validate=True)
        assert png.startswith(b"\x89PNG")
        inside.add(png)
    for file in path.parent.glob("*.png"):
        assert file.read_bytes() in inside
    assert "script" not in seen.tags
    assert not list(path.parent.glob(".*"))
    return " ".join(" ".join(seen.text).split())


def pictures(folder):
    return {path.stem for path in folder.glob("*.png")}


def test_all_of_it(tmp_path):
    data, folder = make_data(3), tmp_path / "run"
    _, found = make_run(folder, data, routing=True)
    path = write_report(folder, data=data)
    assert path == folder / "report.html"
    everything = {"curves", "confusion", "mistakes", "reconstructions", "calibration", "routing"}
    assert pictures(folder) == everything
    text = check_page(path)
    assert "mazzia2021_table2: efficient" in text
    assert f"{100 * found['error']:.2f} ± {100 * found['standard_error']:.2f} %" in text
    assert "0.26 ± 0.0002 %" in text
    assert "Mazzia et al. 2021" in text
    assert "abc1234" in text
    assert "1 h 02 min" in text
    assert "lr assumed, the row has 0.0005 0.001" in text
    assert f"{round(found['error'] * 40)} of 40" in text
    assert "2 of the row's" in text  # epochs


@pytest.mark.parametrize("channels", [2, 5])
def test_any_channels(tmp_path, channels, unrendered):
    data = make_data(channels)
    make_run(tmp_path / "run", data, epochs=1, validation=False)
    check_page(write_report(tmp_path / "run", data=data))
    assert "reconstructions" in pictures(tmp_path / "run")


def test_two_labels(tmp_path, unrendered):
    data = make_data(several=True)
    make_run(tmp_path / "run", data, options={**SMALL, "objects": 2}, metric="exact_match_error")
    text = check_page(write_report(tmp_path / "run", data=data))
    assert "test exact match error, 40 images" in text
    assert "per-digit error" in text
    assert "reconstructions" in pictures(tmp_path / "run")


def test_without_decoder_and_with_a_decoder_that_was_not_trained(tmp_path, unrendered):
    data = make_data()
    for name, options in (("none", {**SMALL, "decoder": False}), ("idle", SMALL)):
        make_run(tmp_path / name, data, options=options, reconstruction=0.0)
        check_page(write_report(tmp_path / name, data=data))
        assert pictures(tmp_path / name) == {"curves", "confusion", "mistakes", "calibration"}


def test_many_classes_have_a_list_of_the_most_confused(tmp_path, unrendered):
    data = make_data(classes=16)
    make_run(tmp_path / "run", data)
    text = check_page(write_report(tmp_path / "run", data=data))
    assert "how often" in text
    assert "<" in text  # class names are escaped, and read as they are


def test_not_tested_yet(tmp_path, unrendered):
    data = make_data()
    make_run(tmp_path / "run", data, tested=False)
    text = check_page(write_report(tmp_path / "run", data=data))
    assert "25.00 % validation error, not tested yet" in text
    assert "The test set has not been read." in text
    assert pictures(tmp_path / "run") == {"curves"}
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    write_report(tmp_path / "run", data=data)
    assert {file: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_images_that_are_gone_leave_a_sentence(tmp_path, unrendered):
    data = make_data()
    make_run(tmp_path / "run", data)
    text = check_page(write_report(tmp_path / "run"))
    assert "There are no pictures of test images here: there is no data set 'made'" in text
    assert pictures(tmp_path / "run") == {"curves", "confusion", "calibration"}
    other = DataSet("made", data.train, data.test.take(torch.arange(39, -1, -1)))
    text = check_page(write_report(tmp_path / "run", data=other))
    assert "the test set has changed since the run was tested" in text


def test_a_sample_is_found_again(tmp_path, unrendered):
    """What `finish` looks at of a huge test set are shuffled images; the pictures must be of the same."""
    data = make_data(images=60)
    network, _ = make_run(tmp_path / "run", data)
    from torchcaps.data import batches_for

    found = predict(network, batches_for(data.test, 7, shuffle=True, samples=25))
    checkpoint.save_weights(tmp_path / "run" / "predictions.safetensors", found._asdict(), {})
    write_report(tmp_path / "run", data=data)
    assert "mistakes" in pictures(tmp_path / "run")


def test_a_folder_that_is_no_finished_run(tmp_path):
    with pytest.raises(ValueError, match="there is no run folder"):
        write_report(tmp_path / "nothing")
    data = make_data()
    make_run(tmp_path / "run", data)
    (tmp_path / "run" / "final.json").unlink()
    with pytest.raises(ValueError, match="has not finished"):
        write_report(tmp_path / "run", data=data)
    assert not pictures(tmp_path / "run")


def test_the_first_mistake_shown_is_the_worst(tmp_path, monkeypatch, unrendered):
    data = load("digits")
    network, _ = make_run(tmp_path / "run", data)
    shown = []

    def note(cases, names, **options):
        shown.append(cases)
        return real(cases, names, **options)

    from torchcaps.report import report

    real = report.figures.mistakes
    monkeypatch.setattr(report.figures, "mistakes", note)
    write_report(tmp_path / "run", data=data)
    batch = data.test.gather(torch.arange(len(data.test)))
    with torch.no_grad():
        poses = network.eval()(batch.images / 255).capsules.poses
    worst, largest = 0, -9.0
    for n, each in enumerate(poses.norm(dim=-1).tolist()):
        label = int(batch.labels[n])
        margin = max(length for k, length in enumerate(each) if k != label) - each[label]
        if margin > largest:
            worst, largest = n, margin
    first = shown[0][0]
    assert (first.number, first.labels) == (worst, (int(batch.labels[worst]),))
    assert first.values == pytest.approx(poses[worst].norm(dim=-1).tolist(), abs=1e-5)
    assert first.picture[..., 0].tolist() == batch.images[worst, 0].tolist()
