"""Kernels compiled side by side, before they are launched.

Triton compiles a kernel when it is first launched, and the first training step launches dozens, one after the other. So
the first call with new shapes is rehearsed, forward and backward, on tensors without memory: there a launch only asks
for its kernel, which threads compile. A launch that comes before its kernel is ready waits for it. Nothing depends on a
rehearsal: what it leaves out or cannot do is compiled at the launch, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from torchcaps.ops.votes import Votes

try:
    from triton.runtime._async_compile import active_mode
except ImportError:  # another Triton
    active_mode = None

F = TypeVar("F", bound=Callable[..., Any])

ALIGNED = 16  # bytes; Triton compiles other code for an address that is no multiple of it

_met: set[Any] = set()


class launched:
    """A kernel that tensors without memory only compile."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(first: Tensor, *args: Any, **options: Any) -> None:
            if first.is_meta:
                self.kernel.warmup(first, *args, grid=grid, **options)
            else:
                self.kernel[grid](first, *args, **options)

        return launch


def rehearsed(function: F) -> F:
    """Has the kernels of a function, and of its gradients if these are wanted, compiled when shapes are first met.

    Its tensors come as such or in `Votes`; floats are taken to decide nothing about kernels.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        if active_mode is not None and not triton.knobs.runtime.interpret:
            key = (function, torch.is_grad_enabled(), _shapes(args))
            if key not in _met:
                _met.add(key)
                # modes and hooks that watch this thread, such as a checkpoint's, do not see another
                thread = threading.Thread(target=_rehearse, args=(function, args, torch.is_grad_enabled()))
                with suppress(RuntimeError):  # there is none to be had
                    thread.start()
                    thread.join()
        return function(*args)

    return run  # type: ignore[return-value]


def _shapes(x: Any) -> Any:
    """What kernels depend on, or nearly: this is asked at every call."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.requires_grad
    if isinstance(x, Votes):
        return _shapes(x.poses), _shapes(x.weight), _shapes(x.offset), x.window, x.products
    if isinstance(x, (list, tuple)):
        return tuple([_shapes(y) for y in x])
    return None if isinstance(x, float) else x


def _rehearse(function: Callable[..., Any], args: tuple[Any, ...], grad: bool) -> None:
    inputs: list[Tensor] = []
    device = -1  # leaves the current one as it is

    def without_memory(x: Any) -> Any:
        nonlocal device
        if isinstance(x, Votes):
            poses, weight, offset = map(without_memory, (x.poses, x.weight, x.offset))
            return Votes(poses, weight, x.window, offset, x.products)
        if not isinstance(x, Tensor):
            return x
        device = x.device.index if x.is_cuda else device
        begin = x.data_ptr() % ALIGNED // x.element_size()
        twin = torch.empty(2**48, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), begin)
        if grad and x.requires_grad:
            inputs.append(twin.requires_grad_())
        return twin

    with suppress(Exception):
        args = tuple(map(without_memory, args))
        active_mode.set(_Ahead())  # of this thread
        with torch.cuda.device(device):
            outputs = function(*args)
            outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
            if outputs:
                torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs], allow_unused=True)


class _Ahead:
    """Where Triton hands in what it would compile."""

    def submit(self, key: str, compiled: Callable[[], Any], keep: Callable[[Any], None], *more: Any) -> _Coming:
        return _Coming(compiled, keep)


class _Coming:
    """Stands in Triton's cache until the kernel is there."""

    def __init__(self, compiled: Callable[[], Any], keep: Callable[[Any], None]):
        self.compiled, self.keep = compiled, keep
        self.future = _threads().submit(self.build)
        keep(self)

    def build(self) -> Any:
        kernel = self.compiled()
        with suppress(Exception):  # the C code that launches it, which then lies compiled in the cache on disk
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def result(self) -> Any:
        try:
            kernel = self.future.result()
        except KeyboardInterrupt:
            _threads().shutdown(wait=False, cancel_futures=True)  # or they would all be compiled before the exit
            _threads.cache_clear()
            raise
        except Exception:
            kernel = self.compiled()  # fails as it would have without threads, if it does
        self.keep(kernel)
        return kernel

    def __getattr__(self, name: str) -> Any:
        """Later Tritons take what stands in their cache for the kernel itself."""
        return getattr(self.result(), name)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="triton")
