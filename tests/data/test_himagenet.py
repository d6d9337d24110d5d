import json
import os

import numpy as np
import pytest

from tests.data.test_folder import noise, save
from torchcaps.data import himagenet, images
from torchcaps.data.errors import DataError
from torchcaps.data.folder import load_folder
from torchcaps.data.himagenet import Cutting, himagenet_classes, make_himagenet
from torchcaps.data.sets import load

Image = pytest.importorskip("PIL.Image")


def annotation(wnid, *boxes, width=200, height=100):
    things = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for name, (a, b, c, d) in boxes
    )
    return f"<annotation><size><width>{width}</width><height>{height}</height></size>{things}</annotation>"


@pytest.fixture
def ilsvrc(tmp_path):
    data, notes = tmp_path / "ILSVRC/Data/CLS-LOC", tmp_path / "ILSVRC/Annotations/CLS-LOC"
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[20:80, 40:120] = 255
    for wnid in ("n01", "n02", "n03"):
        for k in range(2):
            save(data / "train" / wnid / f"{wnid}_{k}.JPEG", pixels, format="JPEG", quality=100)
        save(data / "val" / wnid / f"{wnid}_val.JPEG", np.full((700, 900, 3), 99, np.uint8), format="JPEG")
    save(data / "train" / "n02" / "small.JPEG", noise(49, 300), format="JPEG")
    (notes / "train" / "n01").mkdir(parents=True)
    boxes = [("n01", (0, 0, 9, 9)), ("n01", (40, 20, 120, 80)), ("n09", (0, 0, 200, 100))]
    (notes / "train" / "n01" / "n01_0.xml").write_text(annotation("n01", *boxes))
    (notes / "train" / "n01" / "n01_1.xml").write_text(annotation("n01", ("n01", (0, 0, 30, 30))))
    (notes / "val").mkdir()
    (notes / "val" / "n02_val.xml").write_text(annotation("n02", ("n02", (0, 0, 225, 350)), width=450, height=350))
    return tmp_path


def size_of(path):
    with Image.open(path) as opened:
        return opened.size


def test_the_two_hundred_classes():
    assert len(set(himagenet_classes())) == 200
    assert all(len(wnid) == 9 and wnid.startswith("n") for wnid in himagenet_classes())


def test_make_himagenet(ilsvrc, tmp_path):
    out = tmp_path / "out"
    made = make_himagenet(ilsvrc, out, classes=("n01", "n02"), padding=0.1)
    assert (made.train, made.test, made.cut, made.dropped, made.skipped) == (3, 2, 2, 2, 0)
    assert not (out / "train" / "n03").exists()
    assert size_of(out / "train/n01/n01_0.jpg") == (96, 72)  # 80 x 60 and a tenth on each side
    edge = np.asarray(Image.open(out / "train/n01/n01_0.jpg"))
    assert edge[6:66, 8:88].min() > 200
    assert edge[:4].max() < 60
    assert size_of(out / "train/n02/n02_0.jpg") == (200, 100)
    assert size_of(out / "test/n01/n01_val.jpg") == (500, 389)  # 900 x 700 brought to 500
    assert size_of(out / "test/n02/n02_val.jpg") == (354, 500)  # the box in another size: 450 + 45 by 700
    assert json.loads((out / "himagenet.json").read_text())["images"]["train"] == 3
    data = load_folder(out)
    assert (len(data.train), len(data.test), data.class_names) == (3, 2, ("n01", "n02"))


def test_make_himagenet_goes_on(ilsvrc, tmp_path, monkeypatch):
    out, options = tmp_path / "out", dict(classes=("n01", "n02", "n03"), size=60)
    real, count = himagenet._written, 0

    def full_disk(goal, content):
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(28, "No space left on device")
        real(goal, content)

    monkeypatch.setattr(himagenet, "THREADS", 1)
    monkeypatch.setattr(himagenet, "_written", full_disk)
    with pytest.raises(OSError, match="No space left"):
        make_himagenet(ilsvrc, out, **options)
    monkeypatch.setattr(himagenet, "_written", real)
    done = {path: path.stat().st_mtime_ns for path in out.rglob("*.jpg")}
    assert len(done) == 2
    made = make_himagenet(ilsvrc, out, **options)
    assert (made.train, made.test, made.cut, made.dropped) == (5, 3, 2, 2)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert len(list(out.rglob("*.jpg"))) == 8
    assert not list(out.rglob("*.tmp"))
    assert size_of(out / "train/n03/n03_0.jpg") == (120, 60)
    with pytest.raises(
        DataError, match=r"was made with Cutting\(size=60.*not Cutting\(size=None.*choose another folder"
    ):
        make_himagenet(ilsvrc, out, classes=options["classes"])


def test_a_full_disk_is_not_skipped(ilsvrc, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        DataError, match=r"the disk is full: \S+himagenet\.json could not be written; .* call again to go on"
    ):
        make_himagenet(ilsvrc, tmp_path / "out", classes=("n01",), on_error="skip")
    with pytest.raises(DataError, match=r"n01_0\.jpg could not be written"):
        images.each(
            lambda file: himagenet._cut(file, notes=None, target=tmp_path / "out", cutting=Cutting()),
            [str(ilsvrc / "ILSVRC/Data/CLS-LOC/train/n01/n01_0.JPEG")],
            "",
            "skip",
        )
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_bad_himagenet(ilsvrc, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="has no train and val folders; give the folder of ILSVRC 2012"):
        make_himagenet(tmp_path / "ILSVRC/Annotations", out)
    with pytest.raises(DataError, match=r"train lacks 200 of 200 class folders \(n04355933, "):
        make_himagenet(ilsvrc, out)
    bad = ilsvrc / "ILSVRC/Data/CLS-LOC/train/n01/n01_1.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    (ilsvrc / "ILSVRC/Annotations/CLS-LOC/train/n01/n01_1.xml").unlink()
    with pytest.raises(DataError, match=r"n01_1\.JPEG cannot be read as an image"):
        make_himagenet(ilsvrc, out, classes=("n01",))
    assert make_himagenet(ilsvrc, out, classes=("n01",), on_error="skip").skipped == 1
    (ilsvrc / "ILSVRC/Annotations/CLS-LOC/train/n01/n01_0.xml").write_text("<annotation>")
    with pytest.raises(DataError, match=r"n01_0\.xml is no annotation of bounding boxes"):
        make_himagenet(ilsvrc, out, classes=("n01",))
    with pytest.raises(ValueError, match="'stop' or 'skip'"):
        make_himagenet(ilsvrc, out, on_error="go")


def test_an_interrupted_himagenet_does_not_load(ilsvrc, tmp_path, monkeypatch):
    """Else a test set would be made up from what there is of train."""
    out, options = tmp_path / "out", dict(classes=("n01", "n02", "n03"))
    real = himagenet.each

    def interrupted(what, items, doing, *more):
        if "test" in doing:
            raise KeyboardInterrupt
        return real(what, items, doing, *more)

    monkeypatch.setattr(himagenet, "each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_himagenet(ilsvrc, out, **options)
    with pytest.raises(DataError, match=r"out is not finished; run torchcaps data make himagenet --from FOLDER again"):
        load("himagenet", path=out, **options)
    monkeypatch.setattr(himagenet, "each", real)
    make_himagenet(ilsvrc, out, **options)
    data = load("himagenet", path=out, size=40, **options)
    assert (len(data.train), len(data.test), data.image) == (5, 3, (3, 40, 40))
    (out / "test").rename(tmp_path / "gone")
    with pytest.raises(DataError, match="out has no folder test; run torchcaps data make himagenet"):
        load("himagenet", path=out, **options)
    for content in ("{", "7"):
        (out / "himagenet.json").write_text(content)
        with pytest.raises(DataError, match=r"himagenet\.json is damaged .* remove"):
            load("himagenet", path=out, **options)


def test_out_that_cannot_be_a_folder(ilsvrc, tmp_path):
    (tmp_path / "afile").write_text("")
    for out in (tmp_path / "afile", tmp_path / "afile" / "below"):
        with pytest.raises(DataError, match=r"himagenet\.json cannot be written .* call again to go on"):
            make_himagenet(ilsvrc, out, classes=("n01",))
    with pytest.raises(ValueError, match="size=-2 has no pixels"):
        make_himagenet(ilsvrc, tmp_path / "out", size=-2)
