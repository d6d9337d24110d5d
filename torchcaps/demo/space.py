"""The page for a model hub: one file, and the run that it shows, if that is one's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from torchcaps.models.pretrained import CONFIG, WEIGHTS
from torchcaps.runs import open_run
from torchcaps.train.checkpoint import write

APP = '''"""A page to look into capsule networks, by torchcaps.

This file is the whole space. A wheel beside it is installed instead of what the package index has, and a run in the
folder "run" beside it is shown first.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("torchcaps") is None:
    package = next(iter(sorted(map(str, Path(__file__).resolve().parent.glob("*.whl")))), "torchcaps")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{package}[demo]"], check=True)
    importlib.invalidate_caches()

from torchcaps.demo import serve

if __name__ == "__main__":
    run = Path(__file__).with_name("run")
    serve([run] if run.is_dir() else [], host="0.0.0.0", port=int(os.environ.get("PORT", 7860)))
'''
KEPT = ("weights.safetensors", "recipe.json", "final.json", "row.json", "validation.json", "test.json", CONFIG, WEIGHTS)


def write_space(folder: str | os.PathLike[str], runs: Sequence[str | os.PathLike[str]] = ()) -> Path:
    """Writes app.py, and what a network needs of the run, if there is one; nothing that is there is overwritten."""
    folder = Path(folder)
    if len(runs) > 1:
        raise ValueError(f"a space shows one run beside the networks that come with torchcaps, got {len(runs)}")
    app, copy = folder / "app.py", folder / "run"
    for path in (app, *([copy] if runs else [])):
        if path.exists():
            raise ValueError(f"{path} is there already; name another folder, or remove it")
    for run in runs:
        open_run(run, device="cpu")
        if not Path(run).is_dir():
            raise ValueError(f"{run} comes with torchcaps, so a space shows it in any case; leave it out")
        part = folder / ".run"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for name in KEPT:
            if (Path(run) / name).exists():
                shutil.copyfile(Path(run) / name, part / name)
        part.rename(copy)
    folder.mkdir(parents=True, exist_ok=True)
    write(app, APP.encode())
    return app
