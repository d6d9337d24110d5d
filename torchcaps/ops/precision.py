"""Routing stays in float32 where half precision would hurt: softmaxes, norms, variances, sums over many children."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcaps.functional import widen
from torchcaps.ops.votes import Votes
from torchcaps.types import Capsules

R = TypeVar("R", bound=Callable[..., Capsules])


def in_full_precision(routing: R) -> R:
    """Runs a routing outside autocast and at least in float32; what it returns has the votes' dtype again."""

    @wraps(routing)
    def run(votes: Votes | Tensor, *args: Any, **options: Any) -> Capsules:
        votes = Votes.of(votes)
        dtype = votes.dtype
        device = votes.device.type
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            wide = votes.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
            args = tuple(_widen(x) for x in args)
            options = {name: _widen(x) for name, x in options.items()}
            poses, activations, coupling = routing(wide, *args, **options)
            return Capsules(
                poses.to(dtype),
                None if activations is None else activations.to(dtype),
                None if coupling is None else coupling.to(dtype),
            )

    return run  # type: ignore[return-value]


def _widen(x: Any) -> Any:
    return widen(x) if isinstance(x, Tensor) else x
