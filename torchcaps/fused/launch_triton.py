"""Kernels that can be compiled before there is anything to launch them on; see `torchcaps.ops.ahead_triton`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    from triton.runtime._async_compile import active_mode
except ImportError:  # another Triton
    active_mode = None


class launched:
    """A kernel that tensors without memory only compile."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(first: Tensor, *args: Any, **options: Any) -> None:
            if first.is_meta:
                ahead = active_mode.get() if active_mode is not None else None
                if ahead is not None and hasattr(ahead, "length"):  # ours, which wants the longest compiled first
                    ahead.length = len(self.kernel.src)
                self.kernel.warmup(first, *args, grid=grid, **options)
            else:
                self.kernel[grid](first, *args, **options)

        return launch
