"""Kernels compiled side by side, before they are launched.

Triton compiles a kernel when it is first launched, and the first training step launches dozens, one after the other. So
the first call with new shapes is rehearsed, forward and backward, on tensors without memory: there a launch only asks
for its kernel, which threads compile. A launch that comes before its kernel is ready waits for it; so layers one after
another are rehearsed together. Nothing depends on a rehearsal: what it leaves out or cannot do is compiled at the
launch, as ever.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode

from torchcaps.fused.launch_triton import active_mode
from torchcaps.fused.switch import standing_for, watched
from torchcaps.ops.votes import Votes

F = TypeVar("F", bound=Callable[..., Any])

ALIGNED = 16  # bytes; Triton compiles other code for an address that is no multiple of it

FEW = 8  # threads: the first half of compiling is Python, and a long kernel should not share that with all others

_met: set[Any] = set()
_met_by: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def rehearsed(function: F) -> F:
    """Has the kernels of a function, and of its gradients if these are wanted, compiled when shapes are first met.

    Its tensors come as such or in `Votes`; floats are taken to decide nothing about kernels.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        if _possible():
            key = (function, torch.is_grad_enabled(), _shapes(args))
            ahead = active_mode.get()
            if isinstance(ahead, _Ahead):  # of more than this
                ahead.met.add(key)
            elif key not in _met:
                _met.add(key)
                _in_a_thread(function, args)
        return function(*args)

    return run  # type: ignore[return-value]


def rehearse(method: Callable[..., Any], first: Tensor, *rest: Tensor | None) -> None:
    """Has the kernels of a module's method compiled when shapes are first met; it launches none but by `launched`."""
    module: nn.Module = method.__self__  # type: ignore[attr-defined]
    device = first.device.type
    asked = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    key = (method.__name__, module.training, torch.is_grad_enabled(), asked, _shapes((first, rest)))
    met = _met_by.setdefault(module, set())
    if key in met or not _possible():
        return
    met.add(key)
    if any(map(watched, module.modules())):
        return
    own = [*module.parameters(), *module.buffers()]

    def run(*twins: Any) -> Any:
        twin = copy.deepcopy(module, {id(x): y for x, y in zip(own, twins, strict=False)})
        with torch.autocast(device, asked[1], asked[0]):
            return getattr(twin, method.__name__)(*twins[len(own) :])

    _in_a_thread(run, (*own, first, *rest))


def _possible() -> bool:
    return active_mode is not None and not triton.knobs.runtime.interpret


def _in_a_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Modes and hooks that watch this thread, such as a checkpoint's, do not see another."""
    thread = threading.Thread(target=_rehearse, args=(function, args, torch.is_grad_enabled()))
    with suppress(RuntimeError):  # there is none to be had
        thread.start()
        thread.join()


def _shapes(x: Any) -> Any:
    """What kernels depend on, or nearly: this is asked at every call."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.requires_grad
    if isinstance(x, Votes):
        return _shapes(x.poses), _shapes(x.weight), _shapes(x.offset), x.window, x.products
    if isinstance(x, (list, tuple)):
        return tuple([_shapes(y) for y in x])
    return None if isinstance(x, float) else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from _tensors(y)


def _rehearse(function: Callable[..., Any], args: tuple[Any, ...], grad: bool) -> None:
    inputs: list[Tensor] = []
    device = torch.device("cpu")

    def without_memory(x: Any) -> Any:
        nonlocal device
        if isinstance(x, Votes):
            poses, weight, offset = map(without_memory, (x.poses, x.weight, x.offset))
            return Votes(poses, weight, x.window, offset, x.products)
        if not isinstance(x, Tensor):
            return x
        device = x.device if x.is_cuda else device
        begin = x.data_ptr() % ALIGNED // x.element_size()
        twin = torch.empty(2**48, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), begin)
        if grad and x.requires_grad:
            inputs.append(twin.requires_grad_())
        return twin

    ahead = _Ahead()
    with suppress(Exception):
        args = tuple(map(without_memory, args))
        active_mode.set(ahead)  # of this thread
        current = torch.cuda.device(device.index if device.index is not None else -1)  # -1: as it is
        with current, standing_for(device), _AsThere(device.type):
            outputs = function(*args)
            outputs = [x for x in _tensors(outputs) if x.requires_grad]
            if outputs:
                torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs], allow_unused=True)
        _met.update(ahead.met)
    with suppress(RuntimeError):
        ahead.start()


class _AsThere(TorchFunctionMode):
    """Convolutions and einsum come out as on the device, in autocast's dtype and the layout of their input.

    Tensors without memory know neither.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        convolves = function in (torch.conv2d, torch.conv_transpose2d)
        if (convolves or function is torch.einsum) and torch.is_autocast_enabled(self.device):
            dtype = torch.get_autocast_dtype(self.device)
            args = tuple(x.to(dtype) if isinstance(x, Tensor) else x for x in args)
        made = function(*args, **(kwargs or {}))
        if convolves and torch.channels_last in map(suggest_memory_format, args[:2]):
            made = made.contiguous(memory_format=torch.channels_last)
        return made


class _Ahead:
    """Where Triton hands in what it would compile."""

    def __init__(self) -> None:
        self.met: set[Any] = set()
        self.coming: list[_Coming] = []
        self.length = 0  # of the source of the kernel that is asked for

    def submit(self, key: str, compiled: Callable[[], Any], keep: Callable[[Any], None], *more: Any) -> _Coming:
        self.coming.append(_Coming(compiled, keep, self.length))
        return self.coming[-1]

    def start(self) -> None:
        """The longest first, which the others would have to wait for."""
        for coming in sorted(self.coming, key=lambda coming: -coming.length):
            coming.start()


class _Coming:
    """Stands in Triton's cache until the kernel is there."""

    def __init__(self, compiled: Callable[[], Any], keep: Callable[[Any], None], length: int):
        self.compiled, self.keep, self.length = compiled, keep, length
        self.future: Future[Any] | None = None
        keep(self)

    def start(self) -> None:
        self.future = _threads().submit(self.build)

    def build(self) -> Any:
        kernel = self.compiled()
        with suppress(Exception):  # the C code that launches it, which then lies compiled in the cache on disk
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    def result(self) -> Any:
        try:
            kernel = self.compiled() if self.future is None else self.future.result()
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
    return ThreadPoolExecutor(min(FEW, os.cpu_count() or 1), thread_name_prefix="triton")
