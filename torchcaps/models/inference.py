"""Inference as a CUDA graph: a network's many kernels in one launch, where each by itself would wait for Python.

>>> answer = torchcaps.Inference(torchcaps.create_model("inverted_cifar10").cuda().eval())
>>> answer(images).probabilities
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torchcaps.fused import watched
from torchcaps.fused.switch import current_backend
from torchcaps.ops.stream import own_stream
from torchcaps.types import Output

T = TypeVar("T")
Held: TypeAlias = list[tuple[Mapping[str, Any], str]]  # weights and modules, where others may be put in their place
WARM_UP = 3  # calls before a recording, which load libraries and choose algorithms

_log = logging.getLogger(__name__)


class Inference:
    """A network's answers without gradients; on a GPU each size of batch is recorded once and replayed from then on.

    Autocast, TF32 and the backend are those of the call. Weights may change in place: a replay reads them where they
    lie, and when they lie elsewhere the network is recorded anew. A replay calls no hooks, so that a network which has
    some when it would be recorded runs as it is, as every network does on a CPU.

    Args:
        network: in eval mode.
        sizes: so many recordings are kept, each with the memory of a batch; the one not used for longest goes first.
    """

    def __init__(self, network: nn.Module, sizes: int = 8):
        if sizes < 1:
            raise ValueError(f"sizes must be at least 1, got {sizes}")
        self.network, self.sizes = network, sizes
        self._recordings: OrderedDict[Any, Recording | None] = OrderedDict()
        self._held: Held = []
        self._modules: list[nn.Module] = []  # kept, so that no other has their places
        self._places: list[int] = []
        self._lock = Lock()  # a recording has one place for its images

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Output:
        """Shapes: images [b, c, h, w]"""
        if self.network.training:
            raise ValueError("the network must be in eval mode for inference: call its eval() first")
        if _recordable(images):
            with self._lock, torch.inference_mode(False):  # outside of which its tensors could not be written again
                recording = self._find(images)
                if recording is not None:
                    return recording(images)
        return self.network(images)  # type: ignore[no-any-return]

    def _find(self, images: Tensor) -> Recording | None:
        if not self._held or self._places != _places(self._held):
            self._forget(len(self._recordings), images.device)
            self._modules = list(self.network.modules())
            holders = [holder for m in self._modules for holder in (m._parameters, m._buffers, m._modules)]
            self._held = [(holder, name) for holder in holders for name in holder]
            self._places = _places(self._held)
        key = _circumstances(images)
        if key not in self._recordings:
            self._forget(len(self._recordings) + 1 - self.sizes, images.device)
            self._recordings[key] = self._record(images)
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _forget(self, count: int, device: torch.device) -> None:
        if count > 0 and device.type == "cuda":
            torch.cuda.synchronize(device)  # one of them may still run
        for _ in range(count):
            self._recordings.popitem(last=False)

    def _record(self, images: Tensor) -> Recording | None:
        if any(map(watched, self.network.modules())):
            return None
        self.network(images)  # says what is wrong with them
        try:
            return Recording(self.network, images)
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]  # the end of a recording fails as well
            _log.warning("inference cannot be captured in a CUDA graph and runs without one: %s", reason)
            return None


class Recording:
    """The answer to images of one size, replayed."""

    def __init__(self, network: nn.Module, images: Tensor):
        device, self.images = images.device, images.clone()
        asked = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        self.read = torch.cuda.Event()
        # what autocast would keep of the weights does not outlive it
        with torch.cuda.device(device), own_stream(device), torch.autocast(device.type, *asked, cache_enabled=False):
            for _ in range(WARM_UP):
                network(self.images)
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(device)
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(device)):
                self.output: Output = network(self.images)

    def __call__(self, images: Tensor) -> Output:
        self.read.wait()  # by a call on another stream
        self.images.copy_(images)
        self.graph.replay()
        output = _copied(self.output)
        self.read.record()
        return output


def _recordable(images: Tensor) -> bool:
    return isinstance(images, Tensor) and images.is_cuda and not torch.cuda.is_current_stream_capturing()


def _places(held: Held) -> list[int]:
    there = (holder.get(name) for holder, name in held)
    return [x.data_ptr() if isinstance(x, Tensor) else id(x) for x in there]


def _circumstances(images: Tensor) -> tuple[Any, ...]:
    """What a recording depends on besides weights."""
    device = images.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return images.device, images.shape, images.stride(), images.dtype, autocast, *precision, current_backend()


def _copied(x: T) -> T:
    """A tensor, or a named tuple of them, that the next replay leaves alone."""
    if isinstance(x, Tensor):
        return x.clone()  # type: ignore[return-value]
    return type(x)(*map(_copied, x)) if isinstance(x, tuple) else x
