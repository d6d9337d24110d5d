"""Dependence runs one way, by the import statements themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torchcaps"
MAY_IMPORT = {  # what each part may see of the others; its own files always
    "types": set(),
    "fused": set(),
    "functional": {"types", "fused"},
    "ops": {"types", "functional", "fused"},
    "losses": {"types", "functional", "ops", "fused"},
    "routing": {"types", "functional", "ops"},
    "layers": {"types", "functional", "ops"},
    "layers.chain": {"fused"},
    "layers.feedback": {"types", "functional", "ops", "losses"},
    "models": {"types", "functional", "ops", "losses", "routing", "layers"},
    "models.inference": {"types", "ops", "fused"},
    "data": {"types", "functional"},
    "recipes": set(),
    "shorten": {"recipes"},
    "own_images": {"data", "recipes"},
    "evaluate": {"types", "functional", "losses", "data"},
    "train": {"types", "functional", "ops", "fused", "losses", "routing", "models", "data", "recipes", "evaluate"},
    "train.checkpoint": set(),
    "train.progress": set(),
    "results": {"recipes", "shorten"},
    "results.notes": {"data", "models", "recipes"},
    "runs": {"recipes", "data", "models", "evaluate", "train"},
    "predictor": {"data", "evaluate", "losses", "models", "recipes", "runs"},
    "pictures": set(),
    "figures": {"pictures"},
    "analysis": {
        "types",
        "functional",
        "ops",
        "losses",
        "routing",
        "layers",
        "models",
        "data",
        "recipes",
        "evaluate",
        "train",
        "results",
        "runs",
        "pictures",
    },
    "report": {"train", "recipes", "results", "figures", "analysis", "data", "evaluate", "losses", "models", "runs"},
    "finish": {"train", "data", "evaluate", "predictor", "recipes", "report", "results", "runs"},
    "export": {
        "data",
        "evaluate",
        "finish",
        "models",
        "predictor",
        "results",
        "runs",
        "train",
    },
    "export.card": {"models", "results"},
    "export.record": {"recipes", "results"},
    "export.onnx": {"ops", "types"},
    "demo": {"analysis", "data", "models", "pictures", "predictor", "recipes", "runs", "train", "types"},
    "commands": {
        "",
        "data",
        "demo",
        "evaluate",
        "export",
        "figures",
        "finish",
        "losses",
        "models",
        "own_images",
        "predictor",
        "recipes",
        "report",
        "results",
        "runs",
        "shorten",
        "train",
    },
    "cli": {"", "models", "data", "types", "commands"},
    "__main__": {"cli"},
    "": {"types", "functional", "ops", "losses", "routing", "layers", "models", "data"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Names of the modules a file imports, except for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in typing for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "torchcaps":
                yield from (f"torchcaps.{alias.name}" for alias in node.names)
            else:
                yield node.module


def part_of(module):
    return module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_imports_to_the_right(path):
    module = module_of(path)
    assert part_of(module) in MAY_IMPORT, f"{module} is new: say above what it may import"
    allowed = MAY_IMPORT.get(module, MAY_IMPORT[part_of(module)]) | {part_of(module)}
    for name in imported(path):
        if name.split(".")[0] == "torchcaps":
            other = part_of(name.removeprefix("torchcaps").lstrip("."))
            assert other in allowed, f"{module or 'torchcaps'} may not import {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_libraries_stay_in_their_place(path):
    libraries = {name.split(".")[0] for name in imported(path)}
    assert not libraries & {"torchvision", "timm", "einops"}
    if module_of(path) != "cli":
        assert not libraries & {"tyro", "argparse"}
        assert part_of(module_of(path)) in ("data", "train", "commands") or "rich" not in libraries


def test_a_wrong_import_is_seen(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    from torchcaps.routing.em import EMRouting\n    from torchcaps import cli\n")
    assert list(imported(path)) == ["torchcaps.routing.em", "torchcaps.cli"]


LATE = """
import logging, sys
import torchcaps.cli
assert not {"lightning_fabric", "lightning", "matplotlib", "gradio"} & set(sys.modules), "imported too early"
from torchcaps.train.fabric import Fabric
Fabric(accelerator="cpu", devices=1)
assert logging.getLogger("lightning_fabric").level == logging.WARNING, "it would talk"
"""


def test_what_takes_long_is_imported_when_it_is_needed():
    done = subprocess.run([sys.executable, "-c", LATE], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
