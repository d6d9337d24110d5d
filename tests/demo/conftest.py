"""A server in a process of its own, which may reach nobody but this computer, and Debian's Chromium to look at it."""

import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

import torchcaps.finish
from tests.helpers import lacking
from torchcaps.cli import main
from torchcaps.demo import sixty_digits

ROOT = Path(__file__).parents[2]
NETWORK = "efficient_capsnet_mnist"
GUARD = """
import os, socket, sys, threading, time
from pathlib import Path

def live_as_long_as(pid):
    try:
        while True:
            os.kill(pid, 0)
            time.sleep(0.5)
    except OSError:
        os._exit(0)

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

threading.Thread(target=live_as_long_as, args=[int(sys.argv[2])], daemon=True).start()

from torchcaps.cli import main
sys.exit(main(["demo", *sys.argv[3:]]))
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
def shared(tmp_path_factory):
    """A folder that all workers of pytest-xdist have in common; what is dear is made there once, behind a lock."""
    place = tmp_path_factory.getbasetemp()
    place = (place.parent if "PYTEST_XDIST_WORKER" in os.environ else place) / "demo"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="session")
def plain(shared):
    """A run without decoder on the digits in the package."""
    place = shared / "no-decoder"
    with FileLock(shared / "no-decoder.lock"):
        return place if place.exists() else make_run(place, "--model-args.decoder", "False", "--reconstruction", "0")


@pytest.fixture(scope="session")
def digits():
    """The digits of the test set that the page offers: uint8 [60, 28, 28], and their labels."""
    images, labels = sixty_digits()
    return images[:, 0], labels.tolist()


@pytest.fixture(scope="session")
def server(shared, plain):
    """The address of `torchcaps demo`, as the command prints it. It is one for all, and ends when pytest does."""
    if find_spec("gradio") is None:
        lacking("the page needs Gradio")
    place = shared / "server"
    with FileLock(shared / "server.lock"):
        if not place.exists():
            place.mkdir()
            start_server(place, NETWORK, str(plain), "--port", "0")
    log, reached = place / "log.txt", place / "reached.txt"
    assert "the page is at " in log.read_text(), log.read_text()
    yield log.read_text().split("the page is at ")[1].split()[0]
    assert not reached.exists(), f"the server asked for {reached.read_text()}"
    assert "Traceback" not in log.read_text()


def start_server(place, *words):
    pytests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    words = [sys.executable, "-W", "ignore", "-c", GUARD, str(place / "reached.txt"), str(pytests), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHCAPS_DATA": str(place), "PYTHONUNBUFFERED": "1"}
    log = (os.POSIX_SPAWN_OPEN, 1, str(place / "log.txt"), os.O_WRONLY | os.O_CREAT, 0o644)
    process = os.posix_spawn(sys.executable, words, environment, file_actions=[log, (os.POSIX_SPAWN_DUP2, 1, 2)])
    end = time.monotonic() + 90
    while "http://" not in (text := (place / "log.txt").read_text()):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), text
        assert time.monotonic() < end, f"no page after a minute and a half: {text}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def browser():
    if find_spec("playwright") is None:
        lacking("the tests of the page need playwright")
    from playwright import sync_api

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        lacking("there is no Chromium; apt-get install chromium, as make browser does, needs root or sudo")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
