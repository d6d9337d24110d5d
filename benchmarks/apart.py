"""What is measured in a process of its own: it gets ready beside others, and is timed alone when it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

READY = "ready\n"


def ready() -> None:
    """Called in that process: it is ready, and waits for its turn. Where nobody is left to tell it, it ends."""
    sys.stdout.write(READY)
    sys.stdout.flush()
    if not sys.stdin.readline():
        raise SystemExit("nobody waits for it any more")


class Apart:
    """A command that says when it is ready, and answers with a line of JSON.

    Args:
        more: variables of its environment.
    """

    def __init__(self, command: Sequence[str], more: Mapping[str, str]):
        self.began, self.failed = time.monotonic(), ""
        with tempfile.NamedTemporaryFile("w+", delete=False) as errors:
            self.errors = errors.name
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **more},
            )
        self.ready, self.heard = False, threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline() == READY
        self.heard.set()

    def wait(self, until: float) -> None:
        """Until it is ready; it is ended where it is not by then."""
        if not self.heard.wait(max(0.0, until - time.monotonic())):
            self.failed = f"over {time.monotonic() - self.began:.0f} s"
            self.end()

    def answer(self, limit: float) -> dict[str, Any]:
        """Its line of JSON, or why there is none under "failed"."""
        try:
            said, _ = self.process.communicate("now\n" if self.ready else None, limit)
        except subprocess.TimeoutExpired:
            self.failed, said = f"over {limit:.0f} s", ""
        lines = said.splitlines()
        self.end()
        if not self.failed and (self.process.returncode or not lines):
            with open(self.errors) as errors:
                words = errors.read().strip().splitlines()
            killed = self.process.returncode < 0 or not words
            self.failed = "it was killed" if killed else words[-1][:60]
        return {"failed": self.failed} if self.failed else json.loads(lines[-1])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        self.end()
        self.heard.wait()  # nobody reads any more
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        os.unlink(self.errors)


def groups(sizes: Sequence[float], room: float, most: int) -> list[list[int]]:
    """Numbers of those that fit side by side, in their order; what has no room with any other is alone."""
    found: list[list[int]] = []
    held = 0.0
    for number, size in enumerate(sizes):
        if not found or held + size > room or len(found[-1]) >= most:
            found.append([])
            held = 0.0
        found[-1].append(number)
        held += size
    return found
