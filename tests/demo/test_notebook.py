"""The notebook: ten cells that were run, and that run."""

import json
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "torchcaps.ipynb"


def figures(notebook):
    return [
        cell["id"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def said(cells):
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_it_was_run_from_top_to_bottom_and_says_nothing_of_the_machine():
    notebook = json.loads(NOTEBOOK.read_text())
    assert len(notebook["cells"]) == 10
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, 10))
    assert len(figures(notebook)) == 5
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook["cells"]])
    words = re.sub(r'"image/png": "[^"]*"', "", outputs)
    assert "Traceback" not in words
    assert not re.search(r"/(home|root|tmp|work|Users)/", words)


@pytest.mark.filterwarnings("ignore")  # of the kernel's own sockets
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=240, kernel_name="python3", resources=resources).execute()
    assert figures(fresh) == figures(stored)
    before, after = (said(notebook.cells[:4]) for notebook in (stored, fresh))
    assert before == after
    assert "60 of 60 read" in after
