"""What every routing asks of its arguments."""

from __future__ import annotations


def check_iterations(iterations: int) -> None:
    if not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations!r}")
