import hashlib
from pathlib import Path

import pytest

import torchcaps.finish
from torchcaps.cli import main
from torchcaps.export import weights as exporting
from torchcaps.models import pretrained

WORDS = ["--epochs", "2", "--samples", "96", "--batch-size", "16", "--keep-epochs", "1", "--device", "cpu"]


@pytest.fixture(scope="session")
def small():
    """The words that make quick:digits a matter of a second."""
    return WORDS


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Two finished runs in runs/, with their results beside them, to be copied or left as they are."""
    place = tmp_path_factory.mktemp("finished")
    patch = pytest.MonkeyPatch()
    patch.setattr(torchcaps.finish, "_report", lambda folder, say: None)
    patch.chdir(place)
    try:
        assert main(["train", "quick:digits", *WORDS, "--seeds", "2", "--out", "runs/two"]) == 0
    finally:
        patch.undo()
    return place


@pytest.fixture(scope="session")
def handed_on(finished, tmp_path_factory):
    """The weights of one of them, exported into a folder net, and as small_digits in a folder weights."""
    place = tmp_path_factory.mktemp("handed")
    patch = pytest.MonkeyPatch()
    for module in (pretrained, exporting):
        patch.setattr(module, "SHIPPED", place / "weights")
    run = str(finished / "runs" / "two" / "seed-0")
    try:
        assert main(["export", run, "--out", str(place / "net"), "--device", "cpu"]) == 0
        assert main(["export", run, "--ship", "--name", "small_digits", "--device", "cpu"]) == 0
    finally:
        patch.undo()
    return place


@pytest.fixture
def alone(handed_on, tmp_path, monkeypatch):
    """In an empty folder, with small_digits in the package."""
    monkeypatch.setattr(pretrained, "SHIPPED", handed_on / "weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_report(monkeypatch):
    monkeypatch.setattr(torchcaps.finish, "_report", lambda folder, say: None)


@pytest.fixture(scope="session")
def checksum():
    """Of all files below a folder but the locks."""

    def checksum(place):
        digest = hashlib.sha256()
        for path in sorted(Path(place).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                digest.update(f"{path.relative_to(place)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        return digest.hexdigest()

    return checksum
