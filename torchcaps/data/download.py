"""One file from one address: resumed where it broke off, and left for the next address where nothing arrives.

The request runs in a thread, so that nothing it may hang in (the name lookup, the handshake, headers that trickle) can
hold up the caller for longer than PATIENCE. A slow download goes on for as long as bytes keep coming.
"""

from __future__ import annotations

import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchcaps.data.errors import IN_CACHE, Unavailable, is_web_page, writing

PATIENCE = 6.0  # seconds without a single byte
CHUNK = 1 << 18

Advance = Callable[[int, int | None], None]


class Stalled(Unavailable):
    """The file began to come, then nothing more did."""


class Unreachable(Unavailable):
    """The whole host is silent or cannot be found, so that its other files need not be asked for."""


def download(
    address: str, part: Path, *, size: int | None = None, patience: float | None = None, advance: Advance | None = None
) -> None:
    """Brings `part` to its full length, from where it ends now if the server can; `size` is what is known of it."""
    have = part.stat().st_size if part.exists() else 0
    if have and have == size:
        return
    if size is not None and have > size:
        part.unlink()
        have = 0
    transfer = _Transfer(address, have, PATIENCE if patience is None else patience)
    try:
        status, headers = transfer.head()
        if status == 416:
            part.unlink(missing_ok=True)
            raise Unavailable(f"{address} cannot go on where the download broke off")
        start = have if status == 206 and (headers["Content-Range"] or "").startswith(f"bytes {have}-") else 0
        if status == 206 and start != have:
            raise Unavailable(f"{address} answered with another part of the file than was asked for")
        if headers.get_content_type() in ("text/html", "application/xhtml+xml"):
            raise Unavailable(f"{address} answered with a web page")
        length = headers["Content-Length"]
        total = start + int(length) if length and length.isdigit() else size
        if size is not None and total != size:
            raise Unavailable(f"{address} has {total:,} bytes where {size:,} are expected")
        done = _write(transfer, part, start, total, advance)
        if total is not None and done != total:
            raise Unavailable(f"{address} broke off after {done:,} of {total:,} bytes")
    finally:
        transfer.stop.set()


def _write(transfer: _Transfer, part: Path, start: int, total: int | None, advance: Advance | None) -> int:
    chunk = transfer.chunk()
    if not start and is_web_page(chunk):
        raise Unavailable(f"{transfer.address} answered with a web page")
    done = start
    with writing(part, IN_CACHE):
        file = part.open("ab" if start else "wb")
    try:
        while chunk:
            with writing(part, IN_CACHE):
                file.write(chunk)
            done += len(chunk)
            if advance:
                advance(done, total)
            if total is not None and done > total:
                break
            chunk = transfer.chunk()
    finally:
        with writing(part, IN_CACHE):
            file.close()
    return done


@contextmanager
def progress_bar(label: str) -> Iterator[Advance | None]:
    """On stderr, and on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Transfer:
    def __init__(self, address: str, start: int, patience: float):
        self.address, self.host, self.patience = address, urlsplit(address).netloc, patience
        self.stop = threading.Event()
        self.arrived: queue.Queue[Any] = queue.Queue(maxsize=32)
        self.answered = False
        threading.Thread(target=self._work, args=(start,), daemon=True).start()

    def head(self) -> tuple[int, Any]:
        return self._next()

    def chunk(self) -> bytes:
        return self._next()

    def _next(self) -> Any:
        try:
            item = self.arrived.get(timeout=self.patience)
        except queue.Empty:
            kind = Stalled if self.answered else Unreachable
            who = self.address if self.answered else self.host
            raise kind(f"{who} sent nothing for {self.patience:g} seconds") from None
        if isinstance(item, Exception):
            raise item
        return item

    def _work(self, start: int) -> None:
        headers = {"User-Agent": "torchcaps", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            request = urllib.request.Request(self.address, headers=headers)
            with urllib.request.urlopen(request, timeout=self.patience + 1) as response:
                self.answered = True
                self._put((response.status, response.headers))
                while not self.stop.is_set() and (chunk := response.read1(CHUNK)):
                    self._put(chunk)
                self._put(b"")
        except urllib.error.HTTPError as answer:
            with answer:
                if answer.code == 416:
                    self._put((416, answer.headers))
                else:
                    self._put(Unavailable(f"{self.address} answered {answer.code} {answer.reason}"))
        except (OSError, HTTPException, ValueError) as problem:
            reason = getattr(problem, "reason", problem)
            reason = getattr(reason, "strerror", None) or reason
            if self.answered:
                self._put(Unavailable(f"{self.address} broke off ({reason})"))
            else:
                self._put(Unreachable(f"{self.host} cannot be reached ({reason})"))

    def _put(self, item: Any) -> None:
        while not self.stop.is_set():
            try:
                return self.arrived.put(item, timeout=0.2)
            except queue.Full:
                pass
