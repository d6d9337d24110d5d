"""`torchcaps doctor`: what this machine has, and whether it works."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import torchcaps
from torchcaps.data import CATALOG, fetch
from torchcaps.losses import margin_loss
from torchcaps.models import create_model
from torchcaps.results import source

EXTRAS = {
    "matplotlib": ("figures", "curves, confusion matrix and the report of a run"),
    "PIL": ("data", "your own images"),
    "scipy": ("data", "SVHN and affNIST"),
    "tensorboard": ("tensorboard", "watching a run in the browser"),
}


def doctor(*, json: bool = False) -> int:
    """Print what is installed, the devices and whether each can train, and the cache of data sets.

    The exit code is 1 if a device that is there cannot train.

    Args:
        json: print JSON instead of lines.
    """
    found = examine()
    if json:
        _print_json(found)
    else:
        print("\n".join(_lines(found)))
    return 0 if all(each["trains"] == "yes" for each in found["devices"]) else 1


def examine() -> dict[str, Any]:
    """Everything, as plain values."""
    commit, dirty = source()
    folder = fetch.cache_folder(None)
    above = next(place for place in (folder, *folder.parents) if place.exists())
    return {
        "torchcaps": torchcaps.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "devices": [_device(name) for name in _devices()],
        "extras": {
            name: {"version": _version(name), "for": purpose, "install": f"pip install 'torchcaps[{extra}]'"}
            for name, (extra, purpose) in EXTRAS.items()
        },
        "cache": {
            "folder": str(folder),
            "free": shutil.disk_usage(above).free,
            "sets": {name: size for name in CATALOG if (size := _size(folder / name))},
        },
    }


def try_out(device: str) -> None:
    """One step of a small capsule network; raises what goes wrong."""
    torch.manual_seed(0)
    model = create_model("efficient_capsnet_mnist").to(device)
    labels = torch.tensor([3, 5], device=device)
    loss = margin_loss(model(torch.rand(2, 1, 28, 28, device=device), labels).scores, labels)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
        raise RuntimeError("gradients are not finite")


def _devices() -> list[str]:
    found = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _device(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"device": name, "name": platform.machine(), "memory": _memory(), "bf16": True}
    if name.startswith("cuda"):
        properties = torch.cuda.get_device_properties(name)
        with torch.cuda.device(name):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        found |= {"name": properties.name, "memory": properties.total_memory, "bf16": bf16}
    elif name == "cpu":
        found["name"] = f"{platform.machine()}, {os.cpu_count()} cores"
    try:
        try_out(name)
        found["trains"] = "yes"
    except Exception as error:
        found["trains"] = f"no: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return found


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _version(module: str) -> str | None:
    """Of what can be imported; "installed" where no version is known."""
    if find_spec(module) is None:
        return None
    try:
        return version({"PIL": "pillow"}.get(module, module))
    except PackageNotFoundError:
        return "installed"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _lines(found: dict[str, Any]) -> list[str]:
    changed = ", with changes" if found["dirty"] else ""
    cuda = f", CUDA {found['cuda']}" if found["cuda"] else ", without CUDA"
    lines = [
        f"torchcaps {found['torchcaps']} (commit {found['commit'][:12]}{changed})",
        f"Python {found['python']} in {sys.prefix}, {found['system']}",
        f"torch {found['torch']}{cuda}, {found['threads']} threads",
        f"triton {found['triton']}: the fused kernels can run on CUDA"
        if found["triton"]
        else "triton is not there; everything runs, the fused kernels do not",
        "",
        "devices:",
    ]
    for each in found["devices"]:
        memory = f", {each['memory'] / 2**30:.1f} GiB" if each["memory"] else ""
        bf16 = "bf16" if each["bf16"] else "no bf16"
        lines.append(f"  {each['device']}: {each['name']}{memory}, {bf16}; trains: {each['trains']}")
    lines += ["", "extras:"]
    for name, each in found["extras"].items():
        state = each["version"] or f"missing, {each['install']}"
        lines.append(f"  {name} ({each['for']}): {state}")
    cache = found["cache"]
    lines += ["", f"data in {cache['folder']}, {cache['free'] / 2**30:.1f} GiB free:"]
    lines += [f"  {name}: {size / 2**20:,.1f} MiB" for name, size in cache["sets"].items()] or ["  nothing yet"]
    return lines


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2))
