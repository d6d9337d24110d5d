"""What a network weighs, computes and needs for training, found on the meta device, where only shapes pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchcaps.ops.votes as vote_settings
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.registry import create_model
from torchcaps.ops.votes import StoredVotes, Votes, vote_budget
from torchcaps.types import Capsules, Image

OPENED = (nn.Sequential, nn.ModuleList, nn.ModuleDict, CapsuleStack)  # a summary shows what is inside
FEW = 4  # images from which the memory of a batch is told; with fewer, votes in pieces would seem too large


class Parameters(NamedTuple):
    """Trainable parameters; most papers count those of the network alone."""

    network: int
    decoder: int
    feedback: int


class Layer(NamedTuple):
    """One row of a summary. `shape` leaves out the batch; it is None for a part that only training calls."""

    name: str
    kind: str
    shape: tuple[int, ...] | None
    parameters: int


def parameters(model: nn.Module) -> Parameters:
    """How many there are: without decoder and feedback, under `decoder.`, under `feedback.`."""
    counts = {"": 0, "decoder": 0, "feedback": 0}
    for name, p in model.named_parameters():
        part = name.split(".")[0]
        counts[part if part in counts else ""] += p.numel() if p.requires_grad else 0
    return Parameters(*counts.values())


def operations(model: str | nn.Module, image: Image | None = None, **options: Any) -> int:
    """Two for each multiply-add of one image's forward pass, without decoder.

    As in Mazzia's Table 1 every vote is formed once, and the sums of a routing are not counted. A stack that routes
    concurrently forms new votes in each iteration.

    Args:
        model: the name of a preset, which takes options, or any network.
        image: channels, height, width; a network of ours knows its own.
    """
    model = _find(model, image, options)
    counter = FlopCounterMode(display=False)
    starts: list[int] = []
    difference = 0

    def counted_apart(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        return module is getattr(model, "decoder", None) or (bool(inputs) and _makes_votes(inputs[0]))

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if counted_apart(module, inputs):
            starts.append(counter.get_total_flops())

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal difference
        if counted_apart(module, inputs):
            start = starts.pop()
            if not starts:
                ours = 2 * _multiply_adds(inputs[0]) if _makes_votes(inputs[0]) else 0
                difference += ours - (counter.get_total_flops() - start)

    run, _ = _on_meta(model, 1, image, training=False)
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after))
        with vote_budget(2**62), torch.no_grad(), counter:  # votes in pieces would only take time
            run()
    return counter.get_total_flops() + difference


def _makes_votes(x: Any) -> bool:
    return isinstance(x, Votes) and not isinstance(x, StoredVotes)


def _multiply_adds(votes: Votes) -> int:
    return votes.weight.numel() * votes.rows * votes.sharing * prod(votes.lead)


def training_memory(model: str | nn.Module, batch: int = 128, image: Image | None = None, **options: Any) -> int:
    """Bytes that training takes, estimated.

    These are weights, gradients, Adam's two moments, and the most that the forward pass holds, or else what it leaves
    for the backward pass and two of its largest tensors again, for their gradients. A few images tell for all: what
    comes from them is scaled up to the batch, and the budget for votes down to the few.

    Args:
        model, image, options: as for `operations`.
    """
    if batch < 1:
        raise ValueError(f"batch must be 1 or more, got {batch}")
    model = _find(model, image, options)
    weights = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())
    run, images = _on_meta(model, FEW, image, training=True)
    with vote_budget(vote_settings._budget * FEW // batch), LiveBytes(images, batch) as live:
        output = run()
        left = live.now
        del output
    return weights + max(live.peak, left + 2 * live.largest)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made within it for as long as anybody holds them, autograd and checkpoints too.

    Args:
        images: whatever is computed from them grows with the batch.
        batch: the size for which to count.
    """

    def __init__(self, images: Tensor, batch: int):
        super().__init__()
        self.now = self.peak = images.nbytes * batch // len(images)
        self.largest = 0
        self._growth = batch / len(images)
        self._growing = {images.untyped_storage()._cdata}
        self._held: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        grows = any(x.untyped_storage()._cdata in self._growing for x in _tensors(args))
        for tensor in _tensors(out if isinstance(out, tuple | list) else (out,)):
            self._hold(tensor.untyped_storage(), grows)
        return out

    def _hold(self, storage: torch.UntypedStorage, grows: bool) -> None:
        key = storage._cdata
        if key in self._held:
            return
        size = round(storage.nbytes() * self._growth) if grows else storage.nbytes()

        def release(_: weakref.ref) -> None:
            del self._held[key]
            self._growing.discard(key)
            self.now -= size

        self._held[key] = weakref.ref(storage, release)
        if grows:
            self._growing.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


def layers(model: str | nn.Module, image: Image | None = None, **options: Any) -> list[Layer]:
    """The blocks of a network, in the order in which an image passes them.

    Containers are opened. Blocks without parameters are listed where they change the shape.

    Args:
        model, image, options: as for `operations`.
    """
    model = _find(model, image, options)
    shapes: dict[nn.Module, tuple[int, ...] | None] = {}

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        poses = output.poses if isinstance(output, Capsules) else output
        shapes.setdefault(module, tuple(poses.shape[1:]) if isinstance(poses, Tensor) else None)

    run, _ = _on_meta(model, 1, image, training=False)
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_hook(after))
        with vote_budget(2**62), torch.no_grad():
            run()

    called = list(shapes)
    blocks = sorted(_blocks(model, "", shapes), key=lambda block: called.index(block[1]) if block[1] in shapes else 1e9)
    rows: list[Layer] = []
    for name, module in blocks:
        row = Layer(name, _kind(module), shapes.get(module), sum(p.numel() for p in module.parameters()))
        if row.parameters or (row.shape and (not rows or row.shape != rows[-1].shape)):
            rows.append(row)
    return rows


def _blocks(parent: nn.Module, prefix: str, shapes: dict[nn.Module, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in parent.named_children():
        gives_neither = module in shapes and shapes[module] is None
        if isinstance(module, OPENED) or gives_neither:
            yield from _blocks(module, f"{prefix}{name}.", shapes)
        else:
            yield prefix + name, module


def _kind(module: nn.Module) -> str:
    routing = getattr(module, "routing", None)
    return type(module).__name__ + (f" ({type(routing).__name__})" if isinstance(routing, nn.Module) else "")


def _find(model: str | nn.Module, image: Image | None, options: dict[str, Any]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if image is not None:
        options = {**options, "image": image}
    with torch.device("meta"):
        return create_model(model, **options)


def _on_meta(model: nn.Module, batch: int, image: Image | None, training: bool) -> tuple[Callable[[], object], Tensor]:
    """A forward pass with copies of all tensors that have no values, and its images; the network stays as it is."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    copies = {name: torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for name, t in tensors}
    dtype = next((t.dtype for _, t in tensors if t.is_floating_point()), torch.get_default_dtype())
    shape = model.image if image is None else image
    images = torch.empty(batch, *shape, dtype=dtype, device="meta")  # type: ignore[misc]

    def run() -> object:
        modes = {module: module.training for module in model.modules()}
        model.train(training)
        try:
            return functional_call(model, copies, (images,))
        finally:
            for module, mode in modes.items():
                module.training = mode

    return run, images
