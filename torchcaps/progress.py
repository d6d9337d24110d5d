"""How a run is shown while it goes on: a bar on a terminal, a line for each epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Column


class Log(Protocol):
    """What `train` tells of itself. `terms` reads the means so far from the device, so it is not free."""

    def step(self, step: int, total: int, speed: float, terms: Callable[[], Mapping[str, float]]) -> None: ...

    def epoch(self, row: Mapping[str, Any], epochs: int, speed: float) -> None: ...

    def say(self, sentence: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    def step(self, step: int, total: int, speed: float, terms: Callable[[], Mapping[str, float]]) -> None: ...

    def epoch(self, row: Mapping[str, Any], epochs: int, speed: float) -> None: ...

    def say(self, sentence: str) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """One line for each epoch."""

    def __init__(self, file: TextIO | None = None):
        self.file = file or sys.stderr

    def epoch(self, row: Mapping[str, Any], epochs: int, speed: float) -> None:
        self.say(f"epoch {row['epoch']}/{epochs}: {described(row)}, {speed:,.0f} images/s")

    def say(self, sentence: str) -> None:
        print(sentence, file=self.file, flush=True)


class Bar(Lines):
    """The time left, images a second, the last validation error and the loss terms, twice a second."""

    def __init__(self, every: float = 0.5):
        super().__init__()
        self.every, self.shown = every, 0.0
        self.validation: list[str] = []
        self.console = Console(stderr=True, highlight=False, markup=False)
        column = Column(no_wrap=True, overflow="ellipsis")
        self.bar = Progress(TextColumn("{task.description}", table_column=column), console=self.console, transient=True)
        self.began: tuple[float, int] | None = None  # when, and at which step
        self.task = TaskID(0)

    def step(self, step: int, total: int, speed: float, terms: Callable[[], Mapping[str, float]]) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        if self.began is None:
            self.began = now, step
            self.task = self.bar.add_task("")
            self.bar.start()
        left = (now - self.began[0]) / max(1, step - self.began[1]) * (total - step)
        words = [f"step {step:,}/{total:,}", f"{timedelta(seconds=round(left))} left", f"{speed:,.0f} images/s"]
        words += [*self.validation, *(f"{name} {value:.4f}" for name, value in terms().items())]
        self.bar.update(self.task, description=", ".join(words))

    def epoch(self, row: Mapping[str, Any], epochs: int, speed: float) -> None:
        if row.get("validation_error") is not None:
            self.validation = [f"validation error {row['validation_error']:.2%}"]
        super().epoch(row, epochs, speed)

    def say(self, sentence: str) -> None:
        self.console.print(sentence)

    def close(self) -> None:
        self.bar.stop()


def for_terminal() -> Log:
    return Bar() if sys.stderr.isatty() else Lines()


def described(row: Mapping[str, Any]) -> str:
    """A row of metrics in words."""
    words = [
        f"{name} {value:.4f}" for name, value in row.items() if name not in ("epoch", "step", "lr", "validation_error")
    ]
    if row.get("validation_error") is not None:
        words.append(f"validation error {row['validation_error']:.2%}")
    return ", ".join(words)
