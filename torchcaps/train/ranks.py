"""Several processes in one run: what they agree on, and which of them was lost.

Each rank holds a lock in the run folder, which the system takes back however its process ends, and leaves a word when
it ends by itself. So the others can tell which rank was lost, where they share the folder. One of them may wait for
the lost one for ever, so a thread looks out for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from torchcaps.train.fabric import Fabric
from torchcaps.train.prepare import RunError, on_first_rank

LOOK_EVERY = 2.0  # seconds
PATIENCE = 10.0  # seconds after which a process that waits for a lost rank is ended


class Ranks:
    """This process among the others. Alone, it has nothing to ask and nothing to watch."""

    def __init__(self, fabric: Fabric, out: Path):
        self.fabric, self.number, self.world = fabric, fabric.global_rank, fabric.world_size
        self.folder = out
        self.ended = threading.Event()
        self.told = False  # whether the locks tell who is there

    def agreed(self, stop: str, save: bool) -> tuple[str, bool]:
        """What stops the run, and whether to save, the same on all ranks."""
        if self.world > 1:
            flags = torch.tensor([bool(stop), save], dtype=torch.int32, device=self.fabric.device)
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            stops, save = flags.bool().tolist()
            stop = (stop or "another rank") if stops else ""
        return stop, save

    def average(self, totals: Tensor) -> None:
        """Makes every rank's the mean of all, so that any of them can be saved."""
        if self.world > 1 and totals.numel():
            torch.distributed.all_reduce(totals)
            totals /= self.world

    def gathered(self, share: Any) -> list[Any]:
        shares: list[Any] = [share] * self.world
        if self.world > 1:
            torch.distributed.all_gather_object(shares, share)
        return shares

    @contextmanager
    def watched(self, describe: Callable[[], str]) -> Iterator[None]:
        """Inside, the loss of another rank ends this one with a sentence that names it; `describe` gives its end."""
        if self.world == 1:
            yield
            return
        self._arrive()
        watcher = threading.Thread(target=self._watch, args=(describe,), daemon=True)
        watcher.start()
        reason = ""
        try:
            yield
        except RuntimeError as error:
            sentence = self._why()
            if sentence is None and "peer" in str(error):
                sentence = "another rank was lost"
            if sentence is None:
                reason = str(error)
                raise
            raise RunError(f"{sentence}{describe()}") from error
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            self.ended.set()
            self._leave(reason)

    def lost(self) -> list[int]:
        """The ranks that are not there any more and left no word."""
        return [rank for rank in self._others() if self._word(rank) is None and not self._held(rank)]

    def _arrive(self) -> None:
        if self.number == 0:
            for old in self.folder.glob(".ranks-*"):
                shutil.rmtree(old, ignore_errors=True)
        token = self.fabric.broadcast(uuid.uuid4().hex)
        self.folder = self.folder / f".ranks-{token}"
        on_first_rank(self.fabric, lambda: self.folder.mkdir(parents=True, exist_ok=True))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / f"{self.number}.lock")
        self.lock.acquire(timeout=0)
        (self.folder / str(self.number)).touch()
        self.fabric.barrier()
        self.told = not self.lost()  # some file systems lock for one machine only
        self.fabric.barrier()

    def _leave(self, reason: str) -> None:
        try:
            (self.folder / f"{self.number}.left").write_text(reason)
            self.lock.release()
            if not reason and all(self._word(rank) == "" for rank in self._others()):
                shutil.rmtree(self.folder, ignore_errors=True)
        except OSError:
            pass

    def _watch(self, describe: Callable[[], str]) -> None:
        while not self.ended.wait(LOOK_EVERY):
            if self.told and (lost := self.lost()) and not self.ended.wait(PATIENCE):
                sentence = f"{_named(lost)} lost{describe()}"
                print(f"torchcaps: rank {self.number}: {sentence}", file=sys.stderr, flush=True)
                self._leave(sentence)
                os._exit(2)

    def _why(self) -> str | None:
        """Who was lost or stopped, asked for a while, as locks and words may come a little later than the failure."""
        until = time.monotonic() + 3
        while self.told and time.monotonic() < until:
            if lost := self.lost():
                return f"{_named(lost)} lost"
            for rank in self._others():
                if word := self._word(rank):
                    return f"rank {rank} stopped: {word}"
            time.sleep(0.05)
        return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.number and (self.folder / str(rank)).exists()]

    def _word(self, rank: int) -> str | None:
        try:
            return (self.folder / f"{rank}.left").read_text()
        except OSError:
            return None

    def _held(self, rank: int) -> bool:
        try:
            with FileLock(self.folder / f"{rank}.lock", timeout=0):
                return False
        except (Timeout, OSError):
            return True


def _named(ranks: list[int]) -> str:
    words = ", ".join(map(str, ranks))
    return f"rank {words} was" if len(ranks) == 1 else f"ranks {words} were"
