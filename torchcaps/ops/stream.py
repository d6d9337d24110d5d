"""A stream of its own, as recording a CUDA graph needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A graph is recorded on a stream other than the default; all that leads up to it stays on that one."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
