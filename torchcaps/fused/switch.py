"""Which code runs: fused kernels where they can, plain PyTorch elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

BACKENDS = ("auto", "torch", "triton")

_backend = "auto"
_rehearsal = threading.local()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within it, routings run on that backend.

    Args:
        name: "auto" is Triton on CUDA, pieces that stay in the cache on a CPU, and the formulas in PyTorch elsewhere;
            "torch" is these formulas, which also return the coupling; "triton" runs on a CPU too where
            TRITON_INTERPRET=1. Votes that cannot run fused run on PyTorch, which is logged once.
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    before, _backend = _backend, name
    try:
        yield
    finally:
        _backend = before


def current_backend() -> str:
    return _backend


def wanted(device: torch.device, replicas: bool = False) -> bool:
    """Whether kernels are asked for there, and nothing that needs the formula (torch.compile, vmap) looks on.

    Args:
        replicas: whether these kernels know what to do under one vmap over the replicas of a network.
    """
    if _backend == "torch" or torch.compiler.is_compiling():
        return False
    device = stands_for(device)
    if _backend == "auto" and (device.type != "cuda" or device.index not in (None, torch.cuda.current_device())):
        return False  # Triton launches on the current device
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return not transforms or (replicas and [t.key() for t in transforms] == [torch._C._functorch.TransformType.Vmap])


@contextmanager
def standing_for(device: torch.device) -> Iterator[None]:
    """Within it, in this thread, tensors without memory take the way of those on that device."""
    _rehearsal.device = device
    try:
        yield
    finally:
        del _rehearsal.device


def stands_for(device: torch.device) -> torch.device:
    return getattr(_rehearsal, "device", device) if device.type == "meta" else device


def fronted(info: Any, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Within a function's vmap: the replicas' axis first; what they share is repeated without a copy."""
    return [
        None if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=False)
    ]


def strides_of(x: Tensor, replicas: int) -> tuple[int, ...]:
    """With that of the replicas first, which is 0 where there is no such axis."""
    return x.stride() if replicas else (0, *x.stride())


def autocasted(*tensors: Tensor | None) -> Any:
    """In the dtype that autocast asks for here, as it would for a convolution; it leaves float64 alone."""
    device = stands_for(next(t for t in tensors if t is not None).device).type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def watched(module: nn.Module) -> bool:
    """Whether a hook waits for what goes into or comes out of this module, which kernels would pass by."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or nn.modules.module._has_any_global_hook()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
