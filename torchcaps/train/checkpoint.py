"""Checkpoints that a crash, a full disk or a flipped bit cannot take away, in safetensors and JSON, without pickle.

A step has two files: `step-00000040.safetensors`, the weights alone, and `step-00000040.state.safetensors`, everything
else there is to a run. Each carries a SHA-256 over all its other bytes, and the state carries that of its weights, so
a pair counts only when every bit of both is as it was written. The state is written last: without it a step is not
there. Files appear under their names when they are complete and on the disk, and older steps go only after that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

log = logging.getLogger("torchcaps")

KEY = "torchcaps"  # of the header's metadata: the hash, a space, JSON
DIGITS = 64  # of the hash in hexadecimal
CHUNK = 1 << 26  # bytes handed to the disk in one call
STATE = re.compile(r"step-(\d{8,})\.state\.safetensors")


class CheckpointError(ValueError):
    """A file that is cut short, changed, or not ours."""


class Checkpoint(NamedTuple):
    step: int
    weights: dict[str, Tensor]
    state: Any


def save(folder: Path, step: int, weights: Mapping[str, Tensor], state: Any, keep: int = 2) -> None:
    """Writes a checkpoint and, once it is there, deletes all but it and the `keep` - 1 before it.

    Steps beyond it are deleted too: a run that is back there could not use them. An OSError leaves the checkpoints
    before it as they were.

    Args:
        state: dicts, lists and tuples of tensors and of what JSON knows, nested as you like; dicts may have any plain
            keys, as those of optimisers do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sealed = seal(weights, {"step": step})
    tensors, plain = pack(state)
    write(_weights_file(folder, step), sealed)
    write(_state_file(folder, step), seal(tensors, {"step": step, "weights": _hash_of(sealed), "state": plain}))
    with suppress(OSError):  # what is left over takes space, nothing else
        _prune(folder, step, keep)


def latest(folder: Path, notice: Callable[[str], None] = log.warning) -> Checkpoint | None:
    """The checkpoint with the highest step that is whole, or None where there has never been one.

    What is not whole is passed over with a notice; where nothing else is left, that is an error.
    """
    there = steps(folder)
    broken = []
    for step in reversed(there):
        try:
            return load(folder, step)
        except (CheckpointError, OSError) as error:
            broken.append(str(error))
            notice(f"the checkpoint of step {step} is passed over: {error}")
    if broken:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {broken[0]}")
    return None


def load(folder: Path, step: int) -> Checkpoint:
    """One checkpoint, every bit of it checked."""
    tensors, about, _ = unseal(_state_file(folder, step))
    weights, _, found = unseal(_weights_file(folder, step))
    if about.get("step") != step or about.get("weights") != found:
        raise CheckpointError(f"{_weights_file(folder, step).name} is not the one that its state was saved with")
    return Checkpoint(step, weights, unpack(about["state"], tensors))


def steps(folder: Path) -> list[int]:
    """The steps with a checkpoint, lowest first."""
    if not folder.is_dir():
        return []
    return sorted(int(found[1]) for path in folder.iterdir() if (found := STATE.fullmatch(path.name)))


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Any) -> None:
    """One sealed file of weights, and what JSON can say about them; any reader of safetensors can open it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, seal(weights, about))


def load_weights(path: Path) -> tuple[dict[str, Tensor], Any]:
    weights, about, _ = unseal(path)
    return weights, about


def seal(tensors: Mapping[str, Tensor], about: Any) -> bytes:
    """The bytes of a safetensors file whose metadata begins with the hash of all the rest."""
    flat = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = tensors_to_bytes(flat, {KEY: "0" * DIGITS + " " + json.dumps(about, ensure_ascii=True)})
    start = _place_of_hash(content)
    return b"".join((content[:start], hashlib.sha256(content).hexdigest().encode(), content[start + DIGITS :]))


def unseal(path: Path) -> tuple[dict[str, Tensor], Any, str]:
    """Tensors, what was said about them, and the hash, if the file is as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    start = _place_of_hash(content)
    if start < 0:
        raise CheckpointError(f"{path.name} is cut short, or is not one of ours")
    digest = hashlib.sha256(content[:start])
    digest.update(b"0" * DIGITS)
    digest.update(memoryview(content)[start + DIGITS :])
    found = _hash_of(content)
    if found != digest.hexdigest():
        raise CheckpointError(f"{path.name} is damaged: its content does not match its hash")
    about = json.loads(_header(content)["__metadata__"][KEY][DIGITS:])
    return {name: tensor.clone() for name, tensor in tensors_from_bytes(content).items()}, about, found


def write(path: Path, content: bytes) -> None:
    """All or nothing, and on the disk when it returns."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest[:CHUNK]) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Nested values as named tensors and JSON that says where each belongs."""
    tensors: dict[str, Tensor] = {}

    def flat(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            while name in tensors:  # two paths may read alike, as names have dots of their own
                name += "'"
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": [[key, flat(each, f"{name}.{key}" if name else str(key))] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [flat(each, f"{name}.{number}") for number, each in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint does not hold")

    return tensors, flat(value, "")


def unpack(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unpack(each, tensors) for key, each in content}
    entries = [unpack(each, tensors) for each in content]
    return entries if kind == "list" else tuple(entries)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time; the system takes the lock back when a process ends, however it does.

    Folders that are made for it go again where nothing has come into them.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is at work in {folder}; wait for it or choose another folder") from None
    try:
        yield
    finally:
        with suppress(OSError):
            if made and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                for path in made:
                    path.rmdir()
        lock.release()


def fingerprint(value: Any) -> str:
    """A hash of nested tensors and plain values, the same if they are to the bit; the order of dicts is free."""

    def ordered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: ordered(value[key]) for key in sorted(value, key=str)}
        return type(value)(map(ordered, value)) if isinstance(value, list | tuple) else value

    tensors, plain = pack(ordered(value))
    digest = hashlib.sha256(json.dumps(plain).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _header(content: bytes) -> dict[str, Any]:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _place_of_hash(content: bytes) -> int:
    opening = f'"__metadata__":{{"{KEY}":"'.encode()
    start = content.find(opening, 0, 64) + len(opening)
    return start if len(opening) <= start <= len(content) - DIGITS else -1


def _hash_of(content: bytes) -> str:
    start = _place_of_hash(content)
    return content[start : start + DIGITS].decode("ascii", "replace")


def _weights_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _state_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.state.safetensors"


def _prune(folder: Path, newest: int, keep: int) -> None:
    kept = [step for step in steps(folder) if step <= newest][-keep:]
    names = {file(folder, step).name for step in kept for file in (_weights_file, _state_file)}
    old = [path for path in folder.iterdir() if "step-" in path.name and path.name not in names]
    for path in sorted(old, key=lambda path: ".state." not in path.name):  # states first: no step is half there
        path.unlink()


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # has no such call
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
