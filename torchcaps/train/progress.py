"""How a run is shown while it goes on: a bar on a terminal, elsewhere a line for each epoch, and TensorBoard."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
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


class Board:
    """TensorBoard beside another log: the loss every hundred steps, and every column of metrics.csv at each epoch."""

    def __init__(self, log: Log, folder: Path, purge_step: int | None = None, every: int = 100):
        from torch.utils.tensorboard import SummaryWriter

        self.log, self.every = log, every
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    @classmethod
    def around(cls, log: Log, folder: Path, purge_step: int | None = None, needed: bool = False) -> Log:
        """The log itself where TensorBoard is not installed, unless it is needed.

        Args:
            purge_step: of a run that goes on: what stands there from this step on will be written again.
        """
        if find_spec("tensorboard") is not None:
            return cls(log, folder, purge_step)
        if needed:
            raise ValueError("TensorBoard is not installed; pip install tensorboard")
        return log

    def step(self, step: int, total: int, speed: float, terms: Callable[[], Mapping[str, float]]) -> None:
        self.log.step(step, total, speed, terms)
        if step % self.every == 0:
            self._write("step", step, {"loss": sum((values := terms()).values()), **values})

    def epoch(self, row: Mapping[str, Any], epochs: int, speed: float) -> None:
        self.log.epoch(row, epochs, speed)
        columns = {name: value for name, value in row.items() if name not in ("epoch", "step")}
        self._write("epoch", row["step"], {**columns, "images_per_second": speed})

    def say(self, sentence: str) -> None:
        self.log.say(sentence)

    def close(self) -> None:
        self.log.close()
        self.writer.close()

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)
        self.writer.flush()


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
