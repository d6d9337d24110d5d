"""Routing stays in float32 where half precision would hurt: softmaxes, norms, variances, sums over many children."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcaps.functional import widen
from torchcaps.fused.switch import stands_for
from torchcaps.ops.backend import runs_fused
from torchcaps.ops.votes import Votes
from torchcaps.types import Capsules

R = TypeVar("R", bound=Callable[..., Capsules])


def in_full_precision(routing: R) -> R:
    """Runs a routing outside autocast and at least in float32; what it returns has the votes' dtype again.

    Kernels multiply in the poses' dtype, or autocast's, and add up in float32; the parents' poses are like these.
    """

    @wraps(routing)
    def run(votes: Votes | Tensor, *args: Any, **options: Any) -> Capsules:
        votes = Votes.of(votes)
        dtype = pose_dtype = votes.dtype
        device = votes.device.type
        if runs_fused(votes):
            pose_dtype = product_dtype(votes)
            votes = votes.with_products(pose_dtype)
        else:
            votes = votes.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            args = tuple(_widen(x) for x in args)
            options = {name: _widen(x) for name, x in options.items()}
            poses, activations, coupling = routing(votes, *args, **options)
            return Capsules(
                poses.to(pose_dtype),
                None if activations is None else activations.to(dtype),
                None if coupling is None else coupling.to(dtype),
            )

    return run  # type: ignore[return-value]


def product_dtype(votes: Votes) -> torch.dtype:
    """Autocast's, or that of the poses."""
    device = stands_for(votes.device).type
    asked = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if asked else votes.poses.dtype


def _widen(x: Any) -> Any:
    return widen(x) if isinstance(x, Tensor) else x
