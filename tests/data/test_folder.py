import os
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch

from torchcaps.data.augment import flip, random_crop, shift, standardise
from torchcaps.data.batches import Batches
from torchcaps.data.errors import DataError
from torchcaps.data.folder import load_folder
from torchcaps.data.images import look, read_image
from torchcaps.data.splits import Stored, hold_out
from torchcaps.data.stream import Streamed, StreamedBatches, batches_for

Image = pytest.importorskip("PIL.Image")

STEPS = (random_crop(12, padding=2), shift(1), flip(), standardise())


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(12, 12) if pixels is None else pixels).save(path, **options)
    return path


@pytest.fixture
def animals(tmp_path):
    """Three classes with 10, 5 and 2 images of one size, each its own."""
    for name, count in [("ant", 10), ("bee", 5), ("cat", 2)]:
        for k in range(count):
            save(tmp_path / name / f"{k}.png", noise(12, 12, seed=ord(name[0]) * 100 + k))
    return tmp_path


@pytest.fixture
def tiny(tmp_path):
    """Two classes with two small images each, to spoil."""
    for name in ("ant", "bee"):
        for k in range(2):
            save(tmp_path / name / f"{k}.png")
    return tmp_path


def same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def all_read(data):
    """The number of images that come, and what StreamedBatches had to skip."""
    batches = [batches_for(split, 4, workers=0) for split in (data.train, data.test)]
    count = sum(len(batch.images) for each in batches for batch in each.epoch(0))
    return count, {path: why for each in batches for path, why in getattr(each, "skipped", {}).items()}


def all_pixels(*splits):
    return sorted(split[i].image.numpy().tobytes() for split in splits for i in range(len(split)))


# one image


def test_rgb_and_grey_are_kept_to_the_bit(tmp_path):
    pixels = noise(7, 9)
    path = save(tmp_path / "a.png", pixels)
    assert torch.equal(read_image(str(path), (3, 7, 9)), torch.from_numpy(pixels).permute(2, 0, 1))
    assert look(str(path)) == (7, 9, False)
    path = save(tmp_path / "b.png", pixels[..., 0])
    assert torch.equal(read_image(str(path), (1, 7, 9))[0], torch.from_numpy(pixels[..., 0]))
    assert torch.equal(read_image(str(path), (3, 7, 9)), torch.from_numpy(pixels[..., 0]).expand(3, 7, 9))
    assert look(str(path)) == (7, 9, True)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    eight = noise(6, 5, 1)
    path = save(tmp_path / "a.png", eight.astype(np.uint16) * 257)
    assert look(str(path)).grey
    assert torch.equal(read_image(str(path), (1, 6, 5))[0], torch.from_numpy(eight))
    path = save(tmp_path / "c.png", np.array([[0, 128, 129, 65406, 65407, 65535]], np.uint16))  # to the nearest
    assert read_image(str(path), (1, 1, 6)).flatten().tolist() == [0, 0, 1, 254, 255, 255]
    path = save(tmp_path / "a.tif", eight.astype(np.uint16) * 257)
    assert torch.equal(read_image(str(path), (3, 6, 5))[2], torch.from_numpy(eight))
    Image.fromarray(eight.astype(np.int32) * 257).save(tmp_path / "b.tif")
    assert torch.equal(read_image(str(tmp_path / "b.tif"), (1, 6, 5))[0], torch.from_numpy(eight))


def test_transparency_is_laid_on_white(tmp_path):
    pixels = noise(4, 4, 4)
    pixels[..., 3] = [[0, 255, 128, 255]] * 4
    path = save(tmp_path / "a.png", pixels)
    alpha = pixels[..., 3:] / 255
    expected = torch.from_numpy(pixels[..., :3] * alpha + 255 * (1 - alpha)).permute(2, 0, 1)
    read = read_image(str(path), (3, 4, 4))
    assert (read - expected).abs().max() <= 1
    assert (read[:, :, 0] == 255).all()
    Image.fromarray(pixels[..., :1].squeeze()).convert("LA").save(tmp_path / "b.png")
    assert look(str(tmp_path / "b.png")).grey
    assert torch.equal(read_image(str(tmp_path / "b.png"), (1, 4, 4))[0], torch.from_numpy(pixels[..., 0]))


def test_palettes(tmp_path):
    index = np.arange(16, dtype=np.uint8).reshape(4, 4) % 3
    for name, colours, grey in [
        ("colour", [255, 0, 0, 0, 9, 0, 0, 0, 7], False),
        ("grey", [5, 5, 5, 8, 8, 8, 9, 9, 9], True),
    ]:
        still = Image.fromarray(index)
        still.putpalette(colours)
        still.save(tmp_path / f"{name}.png")
        assert look(str(tmp_path / f"{name}.png")) == (4, 4, grey)
        expected = torch.tensor(colours, dtype=torch.uint8).view(3, 3)[torch.from_numpy(index).long()].permute(2, 0, 1)
        assert torch.equal(read_image(str(tmp_path / f"{name}.png"), (3, 4, 4)), expected)
        still.save(tmp_path / "clear.png", transparency=0)
        read = read_image(str(tmp_path / "clear.png"), (3, 4, 4))
        assert (read[:, torch.from_numpy(index == 0)] == 255).all()
        assert torch.equal(read[:, torch.from_numpy(index == 1)], expected[:, torch.from_numpy(index == 1)])


def test_bilevel_and_cmyk(tmp_path):
    Image.fromarray(noise(8, 8, 1)).convert("1").save(tmp_path / "a.png")
    assert set(read_image(str(tmp_path / "a.png"), (1, 8, 8)).unique().tolist()) == {0, 255}
    Image.new("RGB", (8, 8), (200, 30, 60)).convert("CMYK").save(tmp_path / "b.jpg", quality=100)
    colour = read_image(str(tmp_path / "b.jpg"), (3, 8, 8)).float().mean((1, 2))
    torch.testing.assert_close(colour, torch.tensor([200.0, 30.0, 60.0]), atol=3, rtol=0)
    assert not look(str(tmp_path / "b.jpg")).grey


@pytest.mark.parametrize("ending", ["png", "tif", "jpg"])
def test_exif_turns_the_image(tmp_path, ending):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 250  # the left half is bright; turned a quarter to the right it is the upper half
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / f"a.{ending}", pixels, exif=exif)
    assert look(str(path))[:2] == (16, 8)
    read = read_image(str(path), (3, 16, 8)).float()
    assert read[:, :8].min() > 230
    assert read[:, 8:].max() < 20


def test_scaled_to_cover_and_cropped_to_the_centre(tmp_path):
    pixels = np.zeros((20, 60), np.uint8)
    pixels[:, 20:40] = 255
    read = read_image(str(save(tmp_path / "a.png", pixels)), (1, 10, 10))
    assert (read[0, :, 1:-1] == 255).all()
    assert read_image(str(save(tmp_path / "b.png", noise(1, 50))), (3, 8, 4)).shape == (3, 8, 4)
    big = np.kron(noise(4, 4), np.ones((100, 100, 1), np.uint8))  # decoded at a fraction of its size
    read = read_image(str(save(tmp_path / "c.jpg", big, quality=98)), (3, 20, 20)).float()
    middles = read[:, 2::5, 2::5].permute(1, 2, 0)
    torch.testing.assert_close(middles, torch.from_numpy(noise(4, 4)).float(), atol=8, rtol=0)


# folders


def test_held_out_by_class(animals):
    data = load_folder(animals)
    assert data.class_names == ("ant", "bee", "cat")
    assert (len(data.train), len(data.test), data.validation) == (13, 4, None)
    assert data.train.labels.bincount().tolist() == [8, 4, 1]
    assert data.test.labels.bincount().tolist() == [2, 1, 1]
    assert data.train.images.shape == (13, 3, 12, 12)
    assert data.train.image == (3, 12, 12)
    files = [animals / name / f"{k}.png" for name, n in [("ant", 10), ("bee", 5), ("cat", 2)] for k in range(n)]
    assert all_pixels(data.train, data.test) == sorted(read_image(str(f), (3, 12, 12)).numpy().tobytes() for f in files)
    for split in (data.train, data.test):
        for image, label, _ in split:
            own = sorted((animals / data.class_names[label]).iterdir())
            assert any(torch.equal(image, read_image(str(file), (3, 12, 12))) for file in own)
    assert "4 of 17 images were held out for the test by seed 0" in data.notes


def test_held_out_by_seed(animals):
    one, again, other = (load_folder(animals, seed=seed, test=0.5) for seed in (1, 1, 2))
    assert all_pixels(one.test) == all_pixels(again.test)
    assert all_pixels(one.test) != all_pixels(other.test)
    assert one.test.labels.bincount().tolist() == [5, 2, 1]


@pytest.mark.parametrize("validation", [None, "val", "validation"])
def test_given_split(tmp_path, validation):
    sizes = {"train": 3, "test": 2} | ({} if validation is None else {validation: 1})
    for part, count in sizes.items():
        for name in ("10", "9"):
            for k in range(count):
                save(tmp_path / part / name / "deeper" / f"{k}.png", noise(6, 6, 1, seed=k))
    data = load_folder(tmp_path)
    assert data.class_names == ("9", "10")
    assert (len(data.train), len(data.test)) == (6, 4)
    assert (data.validation is None) == (validation is None)
    assert validation is None or len(data.validation) == 2
    assert data.train.images.shape == (6, 6, 6)


def test_a_folder_beside_train_and_test_is_named(tiny):
    for part in ("train", "Test"):
        save(tiny / "split" / part / "ant" / "0.png")
        save(tiny / "split" / part / "bee" / "0.png")
    assert load_folder(tiny / "split").class_names == ("ant", "bee")
    save(tiny / "split" / "extra" / "ant" / "0.png")
    (tiny / "split" / "backup").mkdir()
    with pytest.raises(DataError, match="split has backup, extra beside its folders for test and train; move them"):
        load_folder(tiny / "split")


def test_a_class_may_be_called_train(tiny):
    for k in range(2):
        save(tiny / "train" / f"{k}.png")
    assert load_folder(tiny).class_names == ("ant", "bee", "train")


def test_train_and_val_alone_leave_a_test_to_hold_out(tmp_path):
    for part, count in [("train", 4), ("val", 2)]:
        for k in range(count):
            save(tmp_path / part / "ant" / f"{k}.png")
    data = load_folder(tmp_path, test=0.25)
    assert (len(data.train), len(data.test), len(data.validation)) == (3, 1, 2)


def test_size_and_colour(tiny):
    assert load_folder(tiny).image == (3, 12, 12)
    assert load_folder(tiny, channels=1).train.images.shape == (2, 12, 12)
    assert load_folder(tiny, size=9).image == (3, 9, 9)
    assert load_folder(tiny, size=(5, 7), channels=1).image == (1, 5, 7)
    save(tiny / "bee" / "wide.jpg", noise(30, 50))
    assert load_folder(tiny).image == (3, 64, 64)


def test_other_files_are_not_images(tiny):
    for name in (".DS_Store", "._0.png", "Thumbs.db", "desktop.ini"):
        (tiny / "ant" / name).write_bytes(b"?")
    (tiny / ".git").mkdir()
    (tiny / "__MACOSX").mkdir()
    (tiny / "bee" / "notes.txt").write_text("?")
    (tiny / "README.md").write_text("?")
    data = load_folder(tiny)
    assert len(data.train) + len(data.test) == 4
    assert data.class_names == ("ant", "bee")
    assert "1 files (.txt) are no images and were left out" in data.notes


# CSV


def table(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_csv_with_one_label(animals):
    lines = [f"{name}/{k}.png,{name}" for name, n in [("ant", 10), ("bee", 5), ("cat", 2)] for k in range(n)]
    csv = table(animals / "labels.csv", "\ufeffpath,label", *lines, "")
    first, second = load_folder(csv), load_folder(animals, csv="labels.csv")
    assert first.class_names == ("ant", "bee", "cat")
    same([first.train.gather(torch.arange(13))], [second.train.gather(torch.arange(13))])
    assert first.test.labels.bincount().tolist() == [2, 1, 1]


def test_csv_with_several_labels_and_a_split(tiny):
    csv = table(
        tiny / "labels.csv",
        "id,Path,label1,label2,split",
        '7,"ant/0.png",red,small,train',
        "8,ant/1.png,,red,test",
        "9,bee/0.png,blue; small,,train",
        "1,bee/1.png,blue,,val",
    )
    data = load_folder(csv)
    assert data.class_names == ("blue", "red", "small")
    assert data.train.labels.tolist() == [[1, 2], [0, 2]]
    assert data.test.labels.tolist() == [[1, -1]]
    assert data.validation.labels.tolist() == [[0, -1]]
    without = table(tiny / "b.csv", "path,labels", "ant/0.png,a;b", "ant/1.png,b", "bee/0.png,a", "bee/1.png,b;a")
    data = load_folder(without, test=0.5)
    assert data.train.labels.shape == data.test.labels.shape == (2, 2)


def test_csv_of_numbers(tiny):
    lines = ["path,label", "ant/0.png,10", "ant/1.png,9", "bee/0.png,9", "bee/1.png,10"]
    assert load_folder(table(tiny / "a.csv", *lines)).class_names == ("9", "10")
    lines = ["path,label", "ant/0.png,0", "ant/1.png,1", "bee/0.png,moth", "bee/1.png,0"]
    data = load_folder(table(tiny / "b.csv", *lines), classes=("fly", "moth"))
    assert data.class_names == ("fly", "moth")
    assert torch.cat([data.train.labels, data.test.labels]).bincount().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["path,label", "ant/0.png,a", "ant/none.png,b"], r"none\.png is not there; .* on_error='skip'"),
        (["path,label", "ant/0.png,-1", "ant/1.png,2"], r"line 2 of .*x\.csv has the label -1, out of range"),
        (["path,label", "ant/0.png,a", "ant/0.png,b"], r"line 3 of .*x\.csv lists .*0\.png, as line 2 does"),
        (["path,label", "ant/0.png,a", "ant/1.png"], r"line 3 of .*x\.csv has 1 columns, not the 2 that line 1 names"),
        (["path,label", "ant/0.png, ;"], r"line 2 of .*x\.csv gives .*0\.png no label"),
        (["path,label", "ant/0.png,a;a"], r"line 2 of .*x\.csv gives .*0\.png a label twice"),
        (["path,label,split", "ant/0.png,a,holdout"], r"line 2 of .*into the split 'holdout'; write train, test"),
        (["path,label,split", "ant/0.png,a,"], r"line 2 of .*into the split ''; write train, test"),
        (["path,label,split", "ant/0.png,a,test"], r"no train images"),
        (["path,label,split", "ant/0.png,a,train", "bee/0.png,b,test"], r"no train images of b; add some"),
        (
            ["path,label", "ant/0.png,Cat", "ant/1.png,cat"],
            r"x\.csv has classes 'Cat' and 'cat'; give them one spelling",
        ),
        (["path,label"], r"x\.csv lists no images"),
        (["ant/0.png,a", "ant/1.png,b"], r"x\.csv must begin with a line of names, such as path,label; it has 'ant/0"),
        ([""], r"x\.csv must begin with a line of names"),
        (["path,label", '"ant/0.png,a'], r"line 2 of .*x\.csv is no CSV"),
        (["path,label", "ant,a", "bee/0.png,a"], r"ant cannot be read as an image"),
    ],
)
def test_bad_csv(tiny, lines, sentence):
    with pytest.raises(DataError, match=sentence):
        load_folder(table(tiny / "x.csv", *lines))


def test_csv_lines_without_a_file_are_named(tiny):
    table = tiny / "list.csv"
    table.write_text("path,label\nant/0.png,ant\nant/1.png,ant\nbee/0.png,bee\nbee/1.png,bee\nbee/9.png,bee\n")
    with pytest.raises(DataError, match=r"^line 6 of \S+list\.csv: \S+bee/9\.png is not there; "):
        load_folder(table)
    data = load_folder(table, on_error="skip")
    assert len(data.train) + len(data.test) == 4
    assert any(note.startswith("line 6 of") for note in data.notes)
    table.write_text("path,label\nant/0.png,ant\n ,ant\n")
    with pytest.raises(DataError, match=r"line 3 of \S+list\.csv names no file; fill in its path"):
        load_folder(table)


def test_csv_out_of_range_and_not_utf8(tiny):
    csv = table(tiny / "x.csv", "path,label", "ant/0.png,0", "ant/1.png,2")
    with pytest.raises(
        DataError, match=r"line 3 of .*x\.csv has the label '2', which is out of range; .* fly, or 0 to 0"
    ):
        load_folder(csv, classes=("fly",))
    csv.write_bytes("path,label\nant/0.png,gr\u00fcn\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.csv is not UTF-8 from byte 23 on"):
        load_folder(csv)
    with pytest.raises(DataError, match=r"y\.csv cannot be opened"):
        load_folder(tiny / "y.csv")


# bad images and folders


def truncated(path):
    save(path, noise(40, 40))
    path.write_bytes(path.read_bytes()[:900])


def animated(path):
    frames = [Image.fromarray(noise(8, 8, seed=k)) for k in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def bomb(path):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 9000, 11000, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


BAD = {
    "text": ("bad.png", lambda path: path.write_text("<html>not found</html>"), r"cannot be read as an image"),
    "empty": ("bad.jpg", lambda path: path.write_bytes(b""), r"cannot be read as an image"),
    "truncated": ("bad.png", truncated, r"cannot be read as an image"),
    "gif": ("bad.gif", animated, r"holds 3 frames, not one still image"),
    "apng": ("bad.png", animated, r"holds 3 frames"),
    "bomb": ("bad.png", bomb, r"claims 9000 x 11000 pixels, more than the 67,108,864 that are read"),
    "float": ("bad.tif", lambda path: Image.new("F", (4, 4)).save(path), r"holds floating-point pixels"),
    "link": ("bad.png", lambda path: path.symlink_to("nowhere.png"), r"is not there"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("streams", [False, True])
def test_bad_image(tiny, kind, streams):
    name, spoil, sentence = BAD[kind]
    spoil(tiny / "bee" / name)
    options = dict(size=12, memory_budget=0 if streams else 1 << 20)
    with pytest.raises(
        DataError, match=rf"bee/{name} {sentence}.*; replace or remove it, or .* on_error='skip'"
    ) as error:
        all_read(load_folder(tiny, **options))
    assert "\n" not in str(error.value)
    data = load_folder(tiny, on_error="skip", **options)
    count, late = all_read(data)
    assert count == 4
    if late:  # the header was whole, so that only reading it shows the fault
        assert kind in ("truncated", "float")
        assert list(late) == [str(tiny / "bee" / name)]
    else:
        assert "1 of 5 files were skipped" in data.notes
        assert any(f"bee/{name}" in note for note in data.notes)


def test_skipped_until_nothing_is_left(tiny):
    for file in (tiny / "bee").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"has no train images of bee; add some or remove"):
        load_folder(tiny, on_error="skip")
    for file in (tiny / "ant").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="every image was skipped"):
        load_folder(tiny, on_error="skip")


def test_bad_folders(tiny, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(DataError, match="has no class folders with images; put each class into a sub-folder"):
        load_folder(empty)
    save(empty / "0.png")
    with pytest.raises(DataError, match="has no class folders with images"):
        load_folder(empty)
    with pytest.raises(DataError, match="nowhere is no folder"):
        load_folder(tiny / "nowhere")
    (tiny / "cow").mkdir()
    with pytest.raises(DataError, match="cow holds no image; add some or remove this class folder"):
        load_folder(tiny)
    (tiny / "cow" / "0.heic").write_bytes(b"?")
    with pytest.raises(DataError, match=r"cow holds no image, only \.heic files"):
        load_folder(tiny)


def test_names_that_differ_by_case(tiny):
    save(tiny / "Bee" / "0.png")
    if len(os.listdir(tiny)) == 2:
        pytest.skip("this file system takes them for one")
    with pytest.raises(DataError, match="has classes 'Bee' and 'bee'; give them one spelling"):
        load_folder(tiny)


def test_links(tiny):
    (tiny / "bee" / "linked").symlink_to(tiny / "ant")
    assert len(load_folder(tiny).train) + len(load_folder(tiny).test) == 6
    (tiny / "bee" / "loop").symlink_to(tiny / "bee")
    with pytest.raises(DataError, match="bee/loop is a link to a folder that holds it"):
        load_folder(tiny)
    (tiny / "bee" / "loop").unlink()
    (tiny / "bee" / "self").symlink_to(tiny / "bee" / "self")
    with pytest.raises(DataError, match="bee/self is a link that leads nowhere"):
        load_folder(tiny)


def test_one_image_a_class_leaves_no_test(tmp_path):
    for name in "ab":
        save(tmp_path / name / "0.png")
    with pytest.raises(DataError, match="no image of 2 can be held out for the test"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(on_error="ignore"), "'stop' or 'skip', not 'ignore'"),
        (dict(channels=2), "1 channel or 3, not 2"),
        (dict(test=1.0), "between 0 and 1, not 1.0"),
        (dict(size=0), "size=0 is neither the side of a square nor height and width"),
        (dict(size="32"), "size='32' is neither"),
        (dict(size=(3, 4, 5)), r"size=\(3, 4, 5\) is neither"),
        (dict(size=(8, -1)), r"size=\(8, -1\) is neither"),
        (dict(size=8.0), "size=8.0 is neither"),
        (dict(test="half"), "between 0 and 1, not 'half'"),
        (dict(classes=("ant",)), "bee has the label 'bee', which is out of range; there are ant"),
        (dict(classes=("ant", "bee", "cow")), "no train images of cow"),
    ],
)
def test_bad_options(tiny, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_folder(tiny, **options)


# streaming


@pytest.fixture
def streamed(animals):
    """Sizes and colours that differ, so that reading does work."""
    for k in range(4):
        save(animals / "cat" / f"g{k}.jpg", noise(30 + k, 21, 1, seed=k))
    stored = load_folder(animals, size=14)
    streamed = load_folder(animals, size=14, memory_budget=14 * 14 * 3 * 21 - 1)
    assert isinstance(stored.train, Stored)
    assert isinstance(streamed.train, Streamed)
    return stored, streamed


def test_streamed_split_equals_stored(streamed):
    stored, streamed = streamed
    for word in ("train", "test"):
        one, other = getattr(stored, word), getattr(streamed, word)
        assert len(one) == len(other)
        assert (one.image, one.classes, one.class_names) == (other.image, other.classes, other.class_names)
        rows = torch.arange(len(one) - 1, -1, -1)
        same([one.gather(rows)], [other.gather(rows)])
        same([one.take(rows).gather(rows)], [other.to("cpu").take(rows).gather(rows)])
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.image, b.image)
            assert torch.equal(a.label, b.label)
    assert all_pixels(pickle.loads(pickle.dumps(streamed.test))) == all_pixels(stored.test)  # so workers may be spawned
    for one, other in zip(hold_out(stored.train, 0.3), hold_out(streamed.train, 0.3), strict=True):
        assert all_pixels(one) == all_pixels(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_equals_memory(streamed, workers):
    stored, streamed = streamed
    options = dict(transform=STEPS, seed=4)
    batches = batches_for(streamed.train, 4, workers=workers, **options)
    assert isinstance(batches, StreamedBatches)
    assert type(batches_for(stored.train, 4, workers=workers, **options)) is Batches
    whole = list(Batches(stored.train, 4, **options).epoch(1))
    state = torch.get_rng_state()
    same(batches.epoch(1), whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(batches) == len(whole)
    same(batches.epoch(1, 3), whole[3:])


@pytest.mark.parametrize("world", [2, 3])
def test_streaming_ranks(streamed, world):
    stored, streamed = streamed
    options = dict(transform=STEPS, seed=4, samples=9)  # a last batch of 1
    whole = list(Batches(stored.train, 4, **options).epoch(2))
    for rank in range(world):
        share = list(batches_for(streamed.train, 4, workers=0, rank=rank, world=world, **options).epoch(2))
        for batch, own in zip(whole, share, strict=True):
            assert torch.equal(batch.images[rank::world], own.images)
            assert torch.equal(batch.labels[rank::world], own.labels)


def test_resuming_reads_nothing_twice(streamed, monkeypatch):
    read = []
    real = read_image
    monkeypatch.setattr("torchcaps.data.stream.read_image", lambda path, image: read.append(path) or real(path, image))
    batches = batches_for(streamed[1].train, 4, workers=0)
    assert len(list(batches.epoch(0, 3))) == len(batches) - 3
    assert len(read) == len(streamed[1].train) - 12
    assert len(set(read)) == len(read)


def test_a_worker_says_what_is_wrong_in_one_sentence(streamed):
    split = streamed[1].train
    with open(split.paths[3], "wb") as file:
        file.write(b"")
    with pytest.raises(DataError, match=r"cannot be read as an image") as error:
        list(batches_for(split, 4, workers=1).epoch(0))
    assert str(error.value).startswith(split.paths[3])
    assert "Traceback" not in str(error.value)
    before = list(Batches(streamed[0].train, 4, transform=STEPS).epoch(0))
    split.on_error = "skip"
    batches = batches_for(split, 4, workers=1, transform=STEPS)
    place = [index for _, rows in batches.order.shares(0) for index in rows.tolist()].index(3)
    for number, (batch, full) in enumerate(zip(batches.epoch(0), before, strict=True)):
        rows = [row for row in range(len(full.images)) if 4 * number + row != place]
        assert torch.equal(batch.images, full.images[rows])  # the others keep their draws
    assert list(batches.skipped) == [split.paths[3]]
