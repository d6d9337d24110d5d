"""A server in a process of its own, which may reach nobody but this computer, and Debian's Chromium to look at it."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchcaps.finish
from torchcaps.cli import main
from torchcaps.demo import sixty_digits

ROOT = Path(__file__).parents[2]
GUARD = """
import socket, sys
from pathlib import Path

def refuse(address):
    host = address[0] if isinstance(address, tuple) else address
    if host not in ("127.0.0.1", "localhost", "::1", "0.0.0.0", None, ""):
        with Path(sys.argv[1]).open("a") as file:
            print(host, file=file)
        raise OSError("nobody may be reached from here")

connect, look_up = socket.socket.connect, socket.getaddrinfo
def guarded_connect(self, address):
    if self.family != socket.AF_UNIX:
        refuse(address)
    return connect(self, address)
def guarded_look_up(host, *rest, **more):
    refuse((host,))
    return look_up(host, *rest, **more)
socket.socket.connect, socket.getaddrinfo = guarded_connect, guarded_look_up

from torchcaps.cli import main
sys.exit(main(["demo", *sys.argv[2:]]))
"""


def make_run(place, *words):
    """A finished run of a second, under a name of its own."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torchcaps.finish, "_report", lambda folder, say: None)
    small = ["--epochs", "1", "--samples", "32", "--batch-size", "16", "--device", "cpu"]
    try:
        assert main(["train", "quick:digits", *small, *words, "--out", str(place)]) == 0
    finally:
        patch.undo()
    return place


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A run without decoder on the digits in the package."""
    place = tmp_path_factory.mktemp("demo") / "no-decoder"
    return make_run(place, "--model-args.decoder", "False", "--reconstruction", "0")


@pytest.fixture(scope="session")
def digits():
    """The digits of the test set that the page offers: uint8 [60, 28, 28], and their labels."""
    images, labels = sixty_digits()
    return images[:, 0], labels.tolist()


@pytest.fixture(scope="session")
def server(tmp_path_factory, plain):
    """The address of `torchcaps demo`, as the command prints it."""
    place = tmp_path_factory.mktemp("server")
    reached = place / "reached.txt"
    words = [sys.executable, "-W", "ignore", "-c", GUARD, str(reached), str(plain), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHCAPS_DATA": str(place), "PYTHONUNBUFFERED": "1"}
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=place)
    try:
        end = time.monotonic() + 60
        while "http://" not in (text := (place / "log.txt").read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < end, f"no page after a minute: {text}"
            time.sleep(0.1)
        yield text.split("the page is at ")[1].split()[0]
    finally:
        process.terminate()
        process.wait(20)
    assert not reached.exists(), f"the server asked for {reached.read_text()}"
    assert "Traceback" not in (place / "log.txt").read_text()


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium; apt-get install chromium, as make browser does, needs root or sudo")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
