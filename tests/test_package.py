"""The package as others meet it: cheap to import, typed, with the metadata it should have."""

import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import torchcaps

ROOT = Path(__file__).parents[1]
CLOCK = (
    "import time; import torch; start = time.perf_counter(); import torchcaps; import sys; "
    "assert 'tyro' not in sys.modules and 'rich' not in sys.modules; print(time.perf_counter() - start)"
)


def test_import_costs_under_a_second_beyond_torch():
    def seconds():
        return float(subprocess.check_output([sys.executable, "-c", CLOCK], cwd=ROOT, text=True))

    assert statistics.median(seconds() for _ in range(3)) < 1.0


def test_public_names_exist():
    assert sorted(torchcaps.__all__) == list(torchcaps.__all__)
    assert all(hasattr(torchcaps, name) for name in torchcaps.__all__)


def test_typed():
    assert (Path(torchcaps.__file__).parent / "py.typed").exists()


def project():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_metadata():
    fields = project()["project"]
    assert fields["license"] == "Apache-2.0"
    assert all((ROOT / name).exists() for name in [*fields["license-files"], fields["readme"]])
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert fields["requires-python"] == ">=3.10"
    assert "torch>=2.10" in fields["dependencies"]
    assert fields["scripts"]["torchcaps"] == "torchcaps.cli:main"
    assert not any("==" in requirement for requirement in fields["dependencies"])


def test_torch_is_pinned_for_the_set_up_alone():
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert pinned in (ROOT / "Makefile").read_text()


def test_installed_version():
    try:
        installed = metadata.version("torchcaps")
    except metadata.PackageNotFoundError:
        pytest.skip("run from a folder, not installed")
    assert installed == torchcaps.__version__
    assert metadata.metadata("torchcaps")["License-Expression"] == "Apache-2.0"


def test_no_file_names_a_place():
    """No absolute path and no host in what a reader follows."""
    for name in ("README.md", "CONTRIBUTING.md", "Makefile", ".ci/run", "constraints.txt", "pyproject.toml"):
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "/home/" not in text, name
        assert "index-url" not in text, name
