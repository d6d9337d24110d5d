import os
import sys

import pytest
import torch

from torchcaps.data import cli, fetch, sets
from torchcaps.data.catalog import CATALOG, Entry, File
from torchcaps.data.errors import DataError
from torchcaps.data.splits import DataSet, Stored


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A cached set of one file; the test may damage it."""
    files = (File("toy", "toy.bin", 4, "098f6bcd4621d373cade4e832627b4f6"),)
    monkeypatch.setitem(CATALOG, "toy", Entry("toy", "toys", "none at all", "here", files))
    path = tmp_path / "toy" / "toy.bin"
    path.parent.mkdir()
    path.write_bytes(b"test")
    return path


def test_list_tells_size_licence_origin_and_what_is_cached(toy, tmp_path, capsys):
    assert cli.list_sets(root=str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in CATALOG}
    assert set(rows) == set(CATALOG)
    assert "170.1 MB" in rows["cifar10"]
    assert "CC BY 4.0" in rows["digits"]
    assert "Alpaydin" in rows["digits"]
    assert "from mnist" in rows["multimnist"]
    assert rows["toy"].split()[-1] == rows["digits"].split()[-1] == "yes"
    assert rows["mnist"].rstrip().endswith("no")
    assert str(tmp_path) in lines[-1]


def test_get(toy, tmp_path, capsys):
    assert cli.get(("toy", "digits", "toy"), root=str(tmp_path), offline=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["toy", "digits"]
    assert "1 file, 4 bytes" in lines[0]


def test_get_fetches_the_rest_when_one_fails(toy, tmp_path, capsys):
    with pytest.raises(DataError, match=r"^svhn is not in \S+, and nothing may be fetched offline[^;]*$"):
        cli.get(("svhn", "toy"), root=str(tmp_path), offline=True)
    assert capsys.readouterr().out.startswith("toy: ")
    with pytest.raises(DataError, match=r"'tyo'; did you mean toy\?"):
        cli.get(("tyo",))
    with pytest.raises(DataError, match="name at least one data set"):
        cli.get(())
    with pytest.raises(DataError, match="there is no 'conda'"):
        cli.get(("toy",), sources=("conda",), root=str(tmp_path))


def test_verify(toy, tmp_path, capsys):
    assert cli.verify(root=str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == ["digits: digits.npz is right", "toy: toy.bin is right"]
    times = toy.stat()
    toy.write_bytes(b"tesT")
    os.utime(toy, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cli.verify(("toy",), root=str(tmp_path)) == 1
    assert "toy.bin is damaged: toy.bin has the MD5" in capsys.readouterr().out
    toy.unlink()
    assert cli.verify(("toy",), root=str(tmp_path)) == 1
    assert capsys.readouterr().out == "toy: toy.bin is missing: torchcaps data get toy\n"
    with pytest.raises(DataError, match="folder has no checksums"):
        cli.verify(("folder",))


def test_show_digits(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / "new" / "sheet.png"
    assert cli.show("digits", out=str(out), rows=2, columns=3, offline=True, split="test") == 0
    assert "digits, test: 6 of 360" in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["sheet.png"]
    with image.open(out) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width >= 3 * 72
        assert sheet.height >= 2 * 72
        pixels = torch.tensor(list(sheet.convert("L").tobytes())).view(sheet.height, sheet.width)
    first = sets.load("digits").test[0].image[0]
    corner = pixels[26 : 26 + 72 : 9, 6 : 6 + 72 : 9]
    assert corner.tolist() == first.tolist()
    below = pixels[26 + 72 : 26 + 72 + 14, 6 : 6 + 72]
    assert below.min() < 100  # the name of the class


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_show_several_labels_and_any_channels(channels, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    images = torch.randint(256, (5, channels, 10, 12), dtype=torch.uint8)
    labels = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0], [0, -1]])
    split = Stored(images, labels, ("a name far too long for such a small picture", "β"))
    steps = (lambda batch, draws: batch * 4 - 2,)
    data = DataSet("toy", split, split, train_transform=steps, test_transform=steps)
    monkeypatch.setattr(sets, "load", lambda name, **options: data)
    for protocol in ("", "some2017"):
        out = tmp_path / f"{protocol}.png"
        assert cli.show("toy", out=str(out), rows=9, columns=2, protocol=protocol) == 0
        with image.open(out) as sheet:
            assert sheet.height >= 3 * (80 + 14)
            assert sheet.width >= 2 * 12 * 8 * (2 if channels == 2 else 1)


def test_show_what_cannot_be_shown(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"digits has no split 'validation'; it has train, test"):
        cli.show("digits", split="validation", out=str(tmp_path / "x.png"))
    with pytest.raises(DataError, match="at least one row and one column, not 0 and 3"):
        cli.show("digits", rows=0, columns=3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"need Pillow: pip install 'torchcaps\[data\]'"):
        cli.show("digits", out=str(tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())


def test_make(tmp_path, monkeypatch, capsys):
    from torchcaps.data import himagenet

    asked = []

    def note(source, out, **options):
        asked.append((source, out, options))
        return himagenet.Made(7, 2)

    monkeypatch.setattr(himagenet, "make_himagenet", note)
    assert cli.make("himagenet", source=str(tmp_path), out=str(tmp_path / "out"), size=156, on_error="skip") == 0
    assert cli.make("himagenet", source=str(tmp_path), root=str(tmp_path)) == 0
    assert asked == [
        (tmp_path, tmp_path / "out", dict(size=156, on_error="skip")),
        (tmp_path, fetch.cache_folder(tmp_path) / "himagenet", dict(size=None, on_error="stop")),
    ]
    assert "7 train, 2 test" in capsys.readouterr().out
    with pytest.raises(DataError, match="only himagenet is made from a folder, not 'mnist'"):
        cli.make("mnist", source="a", out="b")


def test_show_folders(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    from torchcaps.cli import main

    assert main(["data", "show", "folder"]) == 2
    assert "folder needs path=, or --path" in capsys.readouterr().err
    for name in ("cat", "dog"):
        for k in range(3):
            (tmp_path / "mine" / name).mkdir(parents=True, exist_ok=True)
            image.new("RGB", (8, 8)).save(tmp_path / "mine" / name / f"{k}.png")
    (tmp_path / "mine" / "dog" / "bad.png").write_text("no image")
    words = ["data", "show", "folder", "--path", str(tmp_path / "mine"), "--out", str(tmp_path / "sheet.png")]
    assert main(words) == 2
    assert "bad.png cannot be read as an image" in capsys.readouterr().err
    assert main([*words, "--on-error", "skip"]) == 0
    assert "folder, train: 4 of 4" in capsys.readouterr().out
    with pytest.raises(ValueError, match="digits has no option 'on_error'"):
        cli.show("digits", on_error="skip")


def test_show_skips_what_turns_out_to_be_damaged(tmp_path):
    class Half:
        """Every second image is damaged behind its header, as a streamed split finds out when it reads it."""

        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index % 2:
                raise DataError(f"{index}.png cannot be read")
            return Stored(torch.zeros(10, 4, 4, dtype=torch.uint8), torch.arange(10) % 2, ("a", "b"))[index]

    assert len(cli._sample(Half(), 10, "skip")[0]) == 5
    with pytest.raises(DataError, match=r"1\.png cannot be read"):
        cli._sample(Half(), 10, "stop")
