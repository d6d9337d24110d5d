"""Training that is killed, cut short and refused the disk, many times over: python -m benchmarks.soak

TORCHCAPS_KILLS (200) processes are killed at random moments and TORCHCAPS_SAVE_KILLS (50) inside a save; each run goes
on until it ends by itself and must then be the run that nobody disturbed: weights, optimiser, average, schedule, random
state, log and order of the images, by hash. TORCHCAPS_BITS (1000) flipped bits, a cut at every byte of the headers and
every failing call of the system must be noticed, with the checkpoint before still there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.train.test_checkpoint import Failing
from tests.train.test_train import RECIPE, few_digits, outcome, tiny
from torchcaps.train import checkpoint
from torchcaps.train.checkpoint import CheckpointError, fingerprint, latest

KILLS, SAVE_KILLS, BITS = (
    int(os.environ.get(f"TORCHCAPS_{word}", usual))
    for word, usual in (("KILLS", 200), ("SAVE_KILLS", 50), ("BITS", 1000))
)
IMAGES = 256
LONG = replace(RECIPE, epochs=6, samples=None, keep_epochs=(2, 4))
CALLS = ("open", "write", "fsync", "replace", "close")


def numbered(notes: Path) -> Any:
    """Digits that carry their number in a corner, and a first step that notes the numbers of each batch it is given."""
    data = few_digits(IMAGES)
    data.train.images[:, 0, 0] = torch.arange(IMAGES, dtype=torch.uint8)  # type: ignore[attr-defined]

    def note(images: torch.Tensor, draws: Any = None) -> torch.Tensor:
        numbers = images[:, 0, 0, 0].mul(255).round().int().tolist()
        with open(notes, "ab", buffering=0) as file:
            file.write(f"{int(draws.epoch)} {int(draws.positions[0])} {numbers}\n".encode())
        return images

    return replace(data, train_transform=(note, *data.train_transform))


def go(folder: Path) -> None:
    tiny(LONG, folder, data=numbered(folder.with_suffix(".notes")), resume=True, save_every=0)


def order(folder: Path) -> dict[tuple[str, str], str]:
    """The images of every batch, in order. A batch that a kill undid comes twice, and must be the same both times."""
    found: dict[tuple[str, str], str] = {}
    for line in folder.with_suffix(".notes").read_text().splitlines():
        epoch, place, numbers = line.split(" ", 2)
        assert found.setdefault((epoch, place), numbers) == numbers, f"{folder}: epoch {epoch} has another order"
    for epoch in range(LONG.epochs):
        seen = [number for key, numbers in found.items() if key[0] == str(epoch) for number in json.loads(numbers)]
        assert sorted(seen) == list(range(IMAGES)), f"{folder}: epoch {epoch} has not every image once"
    return found


def left(folder: Path) -> dict[str, Any]:
    """Everything a run leaves, but what depends on the clock."""
    files = sorted(path for path in folder.rglob("*") if path.name == "routing.jsonl" or path.parent.name == "epochs")
    return {
        **outcome(folder),
        **{str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "order": order(folder),
    }


class Deadly:
    """The os module, whose k-th call that a save makes kills the process, a write after half its bytes."""

    def __init__(self, k: int):
        self.k = k

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in CALLS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.k -= 1
            if self.k <= 0:
                if name == "write":
                    found(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*args, **options)

        return call


def child(folder: Path, inside: int | None) -> int:
    """A process that trains; `inside` says at which call of a save it dies."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        if inside is not None:
            checkpoint.os = Deadly(inside)  # type: ignore[attr-defined]
        go(folder)
        code = 0
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def kill(folder: Path, expected: dict[str, Any], kills: int, inside: bool, chance: random.Random, span: float) -> None:
    """Runs, one after the other, until so many processes were killed."""
    hits = runs = 0
    word = "inside a save" if inside else "at random moments"
    while hits < kills:
        run = folder / f"{'inside' if inside else 'random'}{runs}"
        while True:
            dies = hits < kills
            process = child(run, chance.randint(1, 60) if inside and dies else None)
            if dies and not inside:
                time.sleep(chance.uniform(0, span))
                os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, f"{run} ended with {os.WEXITSTATUS(status)}"
                break
            hits += 1
            if hits % 10 == 0:
                said = latest(run / "checkpoints", lambda notice: None)
                say(f"{hits} of {kills} killed {word}; run {runs + 1} is at step {said.step if said else 0}")
        found = left(run)
        wrong = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
        assert not wrong, f"{run}: {', '.join(wrong)} differ"
        shutil.rmtree(run)
        runs += 1
    say(f"{hits} killed {word}, {runs} runs, all as the one that nobody disturbed")


def damage(whole: Path, folder: Path, chance: random.Random) -> None:
    """Bits flipped and headers cut in the last checkpoint of a run; the one before is found each time."""
    shutil.copytree(whole / "checkpoints", folder)
    last = checkpoint.steps(folder)[-1]
    before = fingerprint(checkpoint.load(folder, checkpoint.steps(folder)[-2])._asdict())
    paths = sorted(folder.glob(f"step-{last:08d}*"))
    contents = {path: path.read_bytes() for path in paths}

    def unnoticed(path: Path, content: bytes) -> bool:
        path.write_bytes(content)
        try:
            checkpoint.load(folder, last)
            return True
        except CheckpointError:
            return False
        finally:
            path.write_bytes(contents[path])

    for number in range(BITS):
        path = chance.choices(paths, [len(contents[path]) for path in paths])[0]
        place = chance.randrange(8 * len(contents[path]))
        damaged = bytearray(contents[path])
        damaged[place // 8] ^= 1 << place % 8
        assert not unnoticed(path, bytes(damaged)), f"bit {place} of {path.name} was flipped unnoticed"
        if number % 250 == 249:
            path.write_bytes(bytes(damaged))
            found = latest(folder, lambda notice: None)
            assert found is not None
            assert fingerprint(found._asdict()) == before
            path.write_bytes(contents[path])
            say(f"{number + 1} of {BITS} flipped bits noticed")
    for path in paths:
        header = 8 + int.from_bytes(contents[path][:8], "little")
        for length in range(header + 1):
            assert not unnoticed(path, contents[path][:length]), f"{path.name} was cut at {length} unnoticed"
        say(f"{header + 1} cuts in the header of {path.name} noticed")


def refuse(whole: Path, folder: Path) -> None:
    """Each k-th call of the system fails, once or from there on; a checkpoint is there, and the next save succeeds."""
    found = latest(whole / "checkpoints")
    assert found is not None
    step, chunk, tries = found.step, checkpoint.CHUNK, 0
    checkpoint.CHUNK = 16_384
    for name, code, lasting in (
        (n, c, each) for n in CALLS for c in (errno.ENOSPC, errno.EIO) for each in (False, True)
    ):
        for k in range(1, 1000):
            shutil.rmtree(folder, ignore_errors=True)
            checkpoint.save(folder, step, found.weights, found.state)
            failing = Failing(name, k, code, lasting)
            with as_os(failing):
                try:
                    checkpoint.save(folder, step + 1, found.weights, found.state)
                except OSError:
                    assert failing.failed
                else:
                    assert not failing.failed
                    break
            kept = latest(folder)
            assert kept is not None
            assert fingerprint([kept.weights, kept.state]) == fingerprint([found.weights, found.state])
            checkpoint.save(folder, step + 1, found.weights, found.state)
            assert checkpoint.steps(folder) == [step, step + 1]
            tries += 1
        say(f"each failing {name} ({os.strerror(code)}{', lasting' if lasting else ''}) leaves a checkpoint")
    checkpoint.CHUNK = chunk
    say(f"{tries} failing calls in all")


class as_os:
    """Stands for the os module in checkpoint.py."""

    def __init__(self, other: Any):
        self.other = other

    def __enter__(self) -> None:
        checkpoint.os = self.other  # type: ignore[attr-defined]

    def __exit__(self, *error: Any) -> None:
        checkpoint.os = os  # type: ignore[attr-defined]


BEGAN = time.monotonic()


def say(sentence: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {sentence}", flush=True)


def timed(function: Callable[[], None]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began


def parts(folder: Path) -> Iterator[Callable[[], None]]:
    whole = folder / "whole"
    seconds = timed(lambda: go(whole))
    expected = left(whole)
    say(f"a run of {expected['step']} steps, each saved, takes {seconds:.1f} s")
    chance = random.Random(0)
    yield lambda: damage(whole, folder / "damaged", chance)
    yield lambda: refuse(whole, folder / "refused")
    yield lambda: kill(folder, expected, SAVE_KILLS, True, chance, seconds)
    yield lambda: kill(folder, expected, KILLS, False, chance, seconds / 3)


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        for part in parts(Path(folder)):
            part()
    say("all is well")


if __name__ == "__main__":
    main()
