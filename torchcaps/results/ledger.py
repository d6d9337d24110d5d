"""One line of JSON for each finished run. Figures are fractions here; `tables` turns them to per cent.

>>> append("results/mnist.jsonl", Result.now(table="mazzia2021_table2", row="efficient", ...))
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from torchcaps import recipes

log = logging.getLogger("torchcaps")

PACKAGE = Path(__file__).parents[1]
MOST_POINTS = 100  # of a curve


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run. `test` is of the epoch that the recipe selects, `test_last` of the last where that is another.

    `planned` are the epochs that the table's row asks for, `energy` joules, `curves` a value an epoch for each word,
    but see `thinned`, `data` a checksum for each split, `members` the runs of an ensemble, `chosen_from` among how many
    they were chosen on validation, None where they were not. `together` says how many seeds were trained at once:
    `seconds` and `energy` are then a share of the whole. `teachers` has the checksum of each. A `look` is a further
    test of weights that have a line, perhaps on other data; `test_reads` counts how often its test set has been read
    for them. `defect` is written by hand into the line of a run that did something else than its row says.
    """

    table: str
    row: str
    recipe: dict[str, Any]
    seed: int
    test: dict[str, Any]
    epochs: int
    planned: int
    selected: str = "last"
    epoch: int | None = None
    test_last: dict[str, Any] | None = None
    test_reads: int = 1
    validation: dict[str, Any] | None = None
    curves: dict[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    chosen_from: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    commit: str = "unknown"
    dirty: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    seconds: float | None = None
    steps: int | None = None
    together: int = 1
    energy: float | None = None
    teachers: dict[str, str] = field(default_factory=dict)
    look: bool = False
    defect: str = ""
    finished: str = ""

    @property
    def reached(self) -> bool:
        """Whether training ended where the recipe's `stop_at` says, rather than after all epochs."""
        wanted, errors = self.recipe.get("stop_at"), self.curves.get("validation_error")
        return bool(wanted and errors and errors[-1] is not None and 1 - errors[-1] >= wanted)

    @property
    def shortened(self) -> bool:
        return self.epochs < self.planned and not self.reached

    @property
    def kept(self) -> int | None:
        """The epoch that a look was at, where it was another than the run's own."""
        trained = self.curves["epoch"][-1] if self.curves.get("epoch") else len(next(iter(self.curves.values()), []))
        went_on = not self.reached and self.epochs != self.recipe.get("epochs", self.epochs)
        other = self.epochs != trained or went_on or self.selected != self.recipe.get("select", self.selected)
        return self.epochs if self.look and trained and other else None

    @classmethod
    def now(cls, **values: Any) -> Result:
        """With the commit, the environment, the time, and the epochs planned, unless they are given."""
        return cls(**{**moment(), "planned": _planned(values), **values})

    def line(self) -> str:
        """Numbers that are none become null."""
        return json.dumps(_plain({**asdict(self), "shortened": self.shortened}), ensure_ascii=False, allow_nan=False)


def moment() -> dict[str, Any]:
    """What a line has of the moment it is made at."""
    commit, dirty = source()
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"commit": commit, "dirty": dirty, "environment": environment(), "finished": now}


def thinned(curves: dict[str, Any], most: int = MOST_POINTS) -> dict[str, Any]:
    """Of curves with a value an epoch, so many at most, evenly, from the first to the last; `epoch` says which.

    The run's own folder has all of them.
    """
    length = len(next(iter(curves.values()), []))
    if length <= most:
        return curves
    kept = [round(k * (length - 1) / (most - 1)) for k in range(most)]
    return {"epoch": [1 + k for k in kept], **{word: [values[k] for k in kept] for word, values in curves.items()}}


KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a word"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "dict": ((dict,), "names with values"),
    "tuple": ((list, tuple), "a list"),
}


def from_line(line: str) -> Result:
    """The result that a line holds. Fields that are not known, from a newer version, are left out."""
    values = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(values, dict):
        raise ValueError("it holds no fields")
    known: dict[str, Any] = {}
    for each in fields(Result):
        kind, _, optional = str(each.type).partition(" | ")
        if each.name in values:
            value = values[each.name]
            types, word = KINDS[kind.partition("[")[0]]
            whole = not isinstance(value, bool) or bool in types
            if not (isinstance(value, types) and whole) and not (optional and value is None):
                raise ValueError(f"its {each.name} must be {word}, got {json.dumps(value)[:40]}")
            known[each.name] = tuple(values[each.name]) if types == (list, tuple) else value
    missing = [name for name in ("table", "row", "recipe", "seed", "test", "epochs", "planned") if name not in known]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return Result(**known)


def append(path: str | os.PathLike[str], result: Result) -> None:
    """Adds a line at the end, whole or not at all, and on the disk when this returns. What is there stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = result.line().encode() + b"\n"
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=60):
        new = not path.exists()
        with path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end and file.read(1) != b"\n"  # a line that was cut short must not take this one with it
            try:
                _write_all(file.fileno(), b"\n" + line if torn else line)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        if new:
            _sync_folder(path.parent)


def read(where: str | os.PathLike[str], *, broken: str = "refuse") -> list[Result]:
    """All results of a file, or of a folder's *.jsonl in the order of their names; none where there is no such place.

    Args:
        broken: "refuse" raises for a line that is none, "skip" says so in the log and goes on.
    """
    if broken not in ("refuse", "skip"):
        raise ValueError(f"broken must be 'refuse' or 'skip', got {broken!r}")
    where = Path(where)
    found = []
    for path in sorted(where.glob("*.jsonl")) if where.is_dir() else [where] if where.exists() else []:
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                found.append(from_line(line.decode()))
            except (ValueError, RecursionError) as problem:
                what = "it is cut short or no JSON" if isinstance(problem, UNREADABLE) else problem
                sentence = f"{path}, line {number} is broken: {what}"
                if broken == "refuse":
                    raise ValueError(f"{sentence}; repair or remove that line, nothing was changed") from None
                log.warning("%s; it is skipped", sentence)
    return found


UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, RecursionError)


def check_ledger(path: str | os.PathLike[str]) -> None:
    """Refuses a place that no line can be added to, before there is one."""
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; lines are added to a file, such as {Path(path) / 'results.jsonl'}")
    read(path)


def source() -> tuple[str, bool]:
    """The commit of this package and whether its files differ from it; "unknown" where it is not in a checkout.

    Where the files came without git, TORCHCAPS_COMMIT may name it.
    """
    if named := os.environ.get("TORCHCAPS_COMMIT"):
        return named, False
    tracked, commit = _git("ls-files", "--error-unmatch", "__init__.py"), _git("rev-parse", "HEAD")
    if not tracked or not commit:
        return "unknown", False
    return commit, bool(_git("status", "--porcelain", "--", "."))


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def checksums(splits: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each split's images and labels; of what is generated, its base and options; of files, their names."""
    return {word: _checksum(split) for word, split in splits.items()}


def _checksum(split: Any) -> str:
    digest = hashlib.sha256()
    about: list[Any] = [type(split).__name__, len(split), list(split.image), list(split.class_names)]
    if hasattr(split, "base"):
        about += [_checksum(split.base), split.options]
    elif hasattr(split, "paths"):
        common = os.path.commonpath([os.path.dirname(path) for path in split.paths])
        about += [[os.path.relpath(path, common), os.path.getsize(path)] for path in split.paths]
    digest.update(json.dumps(_plain(about)).encode())
    for word in ("images", "labels"):
        if (values := getattr(split, word, None)) is not None and not hasattr(split, "base"):
            digest.update(values.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _planned(values: Mapping[str, Any]) -> int:
    table = recipes.tables().get(values["table"])
    row = table.ROWS.get(values["row"]) if table else None
    return values["recipe"]["epochs"] if row is None else row.epochs


def _plain(value: Any) -> Any:
    """As JSON has it: numbers that are none become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _git(*words: str) -> str:
    """What git says of the package's folder; empty where there is no git or no checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
