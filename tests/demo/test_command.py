"""`torchcaps demo` from the command line: what it refuses, and the folder for a model hub."""

import os
import runpy
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import torchcaps.demo
from torchcaps.cli import main
from torchcaps.demo.app import answered, free_port
from torchcaps.demo.space import APP, write_space
from torchcaps.runs import open_run


def refused(capsys, *words):
    """The one sentence on stderr."""
    assert main(["demo", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchcaps: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("torchcaps: ").strip()


def test_a_port_in_use_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused(capsys, "--port", str(port)) == (
            f"port {port} is in use; --port {port + 1} takes another, --port 0 any that is free"
        )


def test_ports_and_hosts_that_cannot_be(capsys):
    assert refused(capsys, "--port", "abc") == "a port is a number from 0 to 65535, got 'abc'"
    assert 0 < free_port("127.0.0.1", 0) < 65536
    with pytest.raises(ValueError, match="a port is a number from 0 to 65535, got 70000"):
        free_port("127.0.0.1", 70_000)
    with pytest.raises(ValueError, match=r"'192\.0\.2\.1' is no address of this computer"):
        free_port("192.0.2.1", 0)


def test_a_missing_or_old_gradio_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    needs = "the page needs Gradio 6.31 or newer: pip install 'torchcaps[demo]'"
    assert refused(capsys, "--port", "0") == needs
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(__version__="5.49.1"))
    assert refused(capsys, "--port", "0") == f"{needs}, as 5.49.1 is older"


def test_runs_that_cannot_be_shown(capsys, tmp_path, monkeypatch):
    assert refused(capsys, str(tmp_path / "none"), "--port", "0") == f"there is no run folder {tmp_path / 'none'}"
    assert refused(capsys, str(tmp_path), "--port", "0").startswith(f"{tmp_path} is no run folder")
    monkeypatch.setattr("torchcaps.demo.shelf.shipped", list)
    assert refused(capsys, "--port", "0").startswith("there are no trained weights to show; torchcaps quick trains")


def test_the_page_answers_mistakes_with_a_sentence():
    def wrong(error):
        raise error

    assert answered(lambda: {"found": 3})["found"] == 3
    assert answered(lambda: wrong(ValueError("the canvas is empty"))) == {"error": "the canvas is empty"}
    with pytest.raises(KeyError):  # a mistake of ours, which belongs in the log
        answered(lambda: wrong(KeyError("model")))


def test_the_page_is_for_this_computer_unless_it_is_shared(monkeypatch):
    calls = []
    monkeypatch.setattr(torchcaps.demo, "serve", lambda runs, **options: calls.append((runs, options)))
    assert main(["demo"]) == 0
    assert main(["demo", "here", "--share", "--host", "0.0.0.0", "--port", "80"]) == 0
    assert calls == [
        ((), {"host": "127.0.0.1", "port": 7860, "share": False}),
        (("here",), {"host": "0.0.0.0", "port": 80, "share": True}),
    ]


def test_a_space_is_one_file(tmp_path, capsys, monkeypatch):
    assert main(["demo", "--space", str(tmp_path / "space")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "space" / "app.py")
    assert [path.name for path in (tmp_path / "space").iterdir()] == ["app.py"]
    assert (tmp_path / "space" / "app.py").read_text() == APP
    calls = []
    monkeypatch.setattr("torchcaps.demo.serve", lambda *args, **options: calls.append((args, options)))
    monkeypatch.delenv("PORT", raising=False)
    runpy.run_path(str(tmp_path / "space" / "app.py"), run_name="__main__")
    (tmp_path / "space" / "run").mkdir()
    runpy.run_path(str(tmp_path / "space" / "app.py"), run_name="__main__")
    everyone = {"host": "0.0.0.0", "port": 7860}
    assert calls == [(([],), everyone), (([tmp_path / "space" / "run"],), everyone)]
    assert refused(capsys, "--space", str(tmp_path / "space")).endswith(
        "app.py is there already; name another folder, or remove it"
    )


PIP = """
import os, sys
from pathlib import Path

Path("asked.txt").write_text(" ".join(sys.argv[1:]))
package = Path(os.environ["PYTHONPATH"]) / "torchcaps" / "demo"
package.mkdir(parents=True)
(package / "__init__.py").write_text("def serve(runs, **options): print(runs, options)")
"""


@pytest.mark.parametrize("wheel", [None, "torchcaps-0.1-py3-none-any.whl"])
def test_a_space_installs_the_wheel_beside_it_or_the_package(tmp_path, wheel):
    """With a pip of our own, which writes down what it is asked for, and puts a package there."""
    space, packages = tmp_path / "space", tmp_path / "packages"
    write_space(space)
    packages.mkdir()
    (packages / "pip.py").write_text(PIP)
    if wheel:
        (space / wheel).touch()
        (space / "unrelated-2.0-py3-none-any.whl").touch()
    environment = {**os.environ, "PYTHONPATH": str(packages), "PORT": "7861"}
    words = [sys.executable, "-S", "app.py"]
    done = subprocess.run(words, cwd=space, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] {'host': '0.0.0.0', 'port': 7861}"
    package = str(space / wheel) if wheel else "torchcaps"
    assert (space / "asked.txt").read_text() == f"install --quiet {package}[demo]"


def test_a_space_takes_a_run_along(tmp_path, plain):
    write_space(tmp_path / "space", [plain])
    copy, run = open_run(tmp_path / "space" / "run", device="cpu"), open_run(plain, device="cpu")
    assert copy.class_names == run.class_names
    own, other = run.model.state_dict(), copy.model.state_dict()
    assert all(bool((own[name] == other[name]).all()) for name in own)
    with pytest.raises(ValueError, match="a space shows one run"):
        write_space(tmp_path / "two", [plain, plain])
    with pytest.raises(ValueError, match="efficient_capsnet_mnist comes with torchcaps, so a space shows it"):
        write_space(tmp_path / "three", ["efficient_capsnet_mnist"])
    with pytest.raises(ValueError, match="there is no run folder"):
        write_space(tmp_path / "three", [tmp_path / "none"])
    assert not (tmp_path / "three").exists()
