"""A training step as a CUDA graph: its hundreds of kernels are launched in one call.

The first steps run as they are: they warm up libraries and optimiser, and they count. Then one is recorded, and every
full batch from there on is copied to where the recording reads it and replayed. A smaller last batch runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchcaps.data import Batch

Say: TypeAlias = Callable[[str], None]
WARM_UP = 3  # steps before the recording


class Captured:
    """An update, replayed for batches of `size` images. Where recording fails it runs as it is, and `say` hears why.

    Args:
        recorded: what there is to do between a recording, which runs nothing, and its first replay.
    """

    def __init__(
        self,
        update: Callable[[Batch], dict[str, Tensor]],
        size: int,
        say: Say,
        recorded: Callable[[], None] | None = None,
    ):
        self.update, self.size, self.say, self.recorded = update, size, say, recorded
        self.graph: torch.cuda.CUDAGraph | None = None
        self.before = WARM_UP  # steps before the recording; -1 once it has failed

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if len(batch.images) != self.size or self.before < 0:
            return self.update(batch)
        if self.graph is None:
            if self.before > 0:
                self.before -= 1
                return self.update(batch)
            try:
                self.graph = self.record(batch)
            except RuntimeError as error:
                self.before = -1
                renew_generator(batch.images.device)
                reason = str(error.__context__ or error).splitlines()[0]  # the end of a recording fails as well
                self.say(f"the step cannot be captured in a CUDA graph and runs without one: {reason}")
                return self.update(batch)
        for own, given in zip(self.batch, batch, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        self.graph.replay()
        return self.terms

    def record(self, batch: Batch) -> torch.cuda.CUDAGraph:
        targets = None if batch.targets is None else batch.targets.clone()
        self.batch = Batch(batch.images.clone(), batch.labels.clone(), targets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.terms = self.update(self.batch)
        if self.recorded is not None:
            self.recorded()
        return graph


class Compiled:
    """A function through torch.compile, for one size of batch. Where that fails it runs as it is; `say` hears why."""

    def __init__(self, function: Callable[..., dict[str, Tensor]], say: Say):
        self.function, self.say = function, say
        self.made: Callable[..., dict[str, Tensor]] | None = torch.compile(function, dynamic=False)

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        if self.made is not None:
            try:
                return self.made(*args)
            except RuntimeError as error:
                self.made = None
                reason = str(error).strip().splitlines()[0]
                self.say(f"the network cannot be compiled and runs as it is: {reason}")
        return self.function(*args)


def renew_generator(device: torch.device) -> None:
    """A recording that failed may leave the random numbers waiting for its end; they begin anew at this step's seed."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    fresh = torch.Generator(device)
    fresh.manual_seed(torch.initial_seed())
    generator.graphsafe_set_state(fresh)
