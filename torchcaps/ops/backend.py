"""Whether these votes go through fused kernels, and a word where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchcaps.fused import backend, has_triton, switch, wanted
from torchcaps.ops.votes import StoredVotes, Votes

__all__ = [
    "attends_fused",
    "attends_itself_fused",
    "backend",
    "convolves_fused",
    "rehearse",
    "runs_fused",
    "runs_in_cache",
]

_log = logging.getLogger(__name__)
_said: set[str] = set()


def runs_fused(votes: Votes) -> bool:
    if isinstance(votes, StoredVotes) or not wanted(votes.device):
        return False
    if not has_triton():
        _say_once("Triton is not installed")
        return False
    from torchcaps.ops.plan_triton import why_not

    reason = why_not(votes)
    if reason is not None:
        _say_once(reason)
    return reason is None


def attends_fused(votes: Tensor, kernel: Tensor) -> bool:
    """Whether there is a kernel for attention routing over these votes."""
    if not wanted(votes.device) or not has_triton():
        return False
    from torchcaps.ops.attention_triton import takes

    return takes(votes, kernel)


def attends_itself_fused(votes: Votes) -> bool:
    """Whether there is a kernel for the whole of self-attention routing of these votes."""
    if isinstance(votes, StoredVotes) or not wanted(votes.device, replicas=True) or not has_triton():
        return False
    from torchcaps.ops.self_attention_triton import takes

    return takes(votes)


def convolves_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution by groups is one of ours. Shapes: x [b, (g p), h, w], weight [g, d, p, y, x]"""
    if not wanted(x.device) or not has_triton():
        return False
    from torchcaps.ops.replica_conv import suits

    return suits(x.unflatten(1, (len(weight), -1)), weight)


def runs_in_cache(votes: Votes) -> bool:
    """Whether votes on a CPU are made piece by piece, each of which stays in the cache."""
    from torchcaps.ops.votes_cpu import fits

    return switch._backend == "auto" and fits(votes)


def rehearse(method: Callable[..., Any], first: Tensor, *rest: Tensor | None) -> None:
    """Has the kernels of a module's method, where it has some, compiled together before the first of them is needed."""
    if not first.is_meta and wanted(first.device) and has_triton():
        from torchcaps.ops import ahead_triton

        ahead_triton.rehearse(method, first, *rest)


def _say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        _log.warning("votes are routed in plain PyTorch: %s", reason)
