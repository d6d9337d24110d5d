"""Rows trained side by side, for so many minutes: python -m benchmarks.rows PLAN [--at-once 4] [--minutes 25]

PLAN has a command a line, as `torchcaps table --commands` prints them. What is finished is passed over and what was
begun goes on, so the same call, given again, takes up where the last one ended: when time is up, at Ctrl-C
or SIGTERM, every run is asked to save itself. A line that evaluates waits for all before it. Each line's words go to a
file in --logs, and the last of them are shown as they come. Small networks cannot fill a GPU alone; several gain a
little under its multi-process service (nvidia-cuda-mps-control -d, docs/speed.md). Leave
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE unset: with 60 the losses of four networks were not finite on an H200, for a reason
that has not been found.

It ends with 0 if all is done, 1 if a command failed, 3 if time was too short.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-m", "torchcaps")
SAVING = 60.0  # seconds that a run may take to save itself
TOLD = 30.0  # seconds between two looks at the logs
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Job:
    """A line of the plan."""

    number: int
    words: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    code: int | None = None
    stopped: bool = False

    def start(self) -> None:
        more = ["--resume"] if self.words[0] == "train" and "--resume" not in self.words else []
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, *self.words, *more], stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> bool:
        if self.process is not None and self.code is None:
            self.code = self.process.poll()
        return self.code is not None

    def ask_to_stop(self) -> None:
        if self.process is not None and not self.ended():
            self.stopped = True
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        if self.process is not None and self.stopped:
            try:
                self.process.wait(SAVING)
            except subprocess.TimeoutExpired:
                self.process.kill()
            print(f"stopped: {self}\n    {self.last_words()}", flush=True)

    @property
    def failed(self) -> bool:
        return self.ended() and self.code != 0 and not self.stopped

    def last_words(self) -> str:
        """The end of the log, without what a terminal would have overwritten."""
        lines = self.log.read_bytes()[-2000:].decode(errors="replace").replace("\r", "\n").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def __str__(self) -> str:
        return f"{self.number}. {shlex.join(self.words)}"


def read_plan(text: str) -> list[list[str]]:
    """The words of each line behind `torchcaps`; what follows a # is left out."""
    plan = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if words[:1] == ["torchcaps"]:
            del words[0]
        if not words:
            continue
        if words[0] not in ("train", "evaluate"):
            raise ValueError(f"line {number} must be torchcaps train or torchcaps evaluate, got {line.strip()!r}")
        plan.append(words)
    if not plan:
        raise ValueError("the plan has no command; torchcaps table --commands prints some")
    return plan


def may_start(job: Job, jobs: list[Job]) -> bool:
    return job.words[0] == "train" or all(before.ended() for before in jobs if before.number < job.number)


def work(jobs: list[Job], at_once: int, until: float, told: float = TOLD) -> bool:
    """Runs them until the moment `until`; whether all came to their end."""
    look = time.monotonic() + told
    waiting, running = list(jobs), list[Job]()
    try:
        while waiting or running:
            if time.monotonic() >= until:
                return False
            for job in [job for job in waiting if may_start(job, jobs)][: at_once - len(running)]:
                waiting.remove(job)
                running.append(job)
                job.start()
                print(f"begun: {job}", flush=True)
            time.sleep(0.2)
            for job in [job for job in running if job.ended()]:
                running.remove(job)
                word, took = "FAILED" if job.failed else "done", time.monotonic() - job.began
                print(f"{word} after {took:.0f} s: {job}\n    {job.last_words()}", flush=True)
            if time.monotonic() >= look:
                look = time.monotonic() + told
                for job in running:
                    print(f"  {job.number}. {job.last_words()}", flush=True)
        return True
    finally:
        for number in SIGNALS:  # a second one would keep some from saving themselves
            signal.signal(number, signal.SIG_IGN)
        for job in jobs:
            job.ask_to_stop()
        for job in jobs:
            job.wait()


def run(plan: list[list[str]], at_once: int, minutes: float, logs: Path) -> int:
    """Works a plan off; what it gives is how the program ends."""
    jobs = [Job(number, words, logs / f"{number:02}.log") for number, words in enumerate(plan, 1)]
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        whole = work(jobs, at_once, time.monotonic() + 60 * minutes)
    except KeyboardInterrupt:
        whole = False
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = [job for job in jobs if job.failed]
    print(f"{sum(job.code == 0 for job in jobs)} of {len(jobs)} done" + f", {len(failed)} failed" * bool(failed))
    return 1 if failed else 0 if whole else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="a file with a command a line")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    arguments = parser.parse_args()
    try:
        plan = read_plan(arguments.plan.read_text())
        if arguments.at_once < 1:
            raise ValueError(f"--at-once must be at least 1, got {arguments.at_once}")
        arguments.logs.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"rows: {error}", file=sys.stderr)
        return 2
    return run(plan, arguments.at_once, arguments.minutes, arguments.logs)


if __name__ == "__main__":
    sys.exit(main())
