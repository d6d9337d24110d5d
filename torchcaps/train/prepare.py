"""What a run needs before its first step: devices and precision, data, the network, and word of signals."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchcaps.data import Batches, DataSet, batches_for, load
from torchcaps.models import create_model
from torchcaps.recipes import Recipe
from torchcaps.train.fabric import Fabric

STRATEGIES = ("auto", "ddp", "fsdp")
PRECISIONS = {"32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class RunError(ValueError):
    """Why a run stopped by itself; its last good checkpoint is intact."""


def check(recipe: Recipe) -> None:
    """Refuses what would be silently ignored."""
    if recipe.class_weights is not None and recipe.loss not in ("margin", "cross_entropy"):
        raise ValueError(f"class_weights go with the losses margin and cross_entropy, not with {recipe.loss}")
    if recipe.label_smoothing and recipe.loss not in ("cross_entropy", "binary_cross_entropy"):
        raise ValueError(
            f"label_smoothing goes with the losses cross_entropy and binary_cross_entropy, not with {recipe.loss}"
        )
    if recipe.mixup and recipe.loss == "spread":
        raise ValueError("mixup goes with every loss but spread, which is about one class's distance from the others")
    if recipe.mixup and recipe.reconstruction:
        raise ValueError("mixup leaves no single picture to reconstruct; reconstruction must be 0 with it")
    if bool(recipe.teachers) != bool(recipe.distillation):
        given = "teachers" if recipe.teachers else f"a distillation of {recipe.distillation}"
        wanted = "distillation, the share of the loss that they decide" if recipe.teachers else "teachers"
        raise ValueError(f"{given} without {wanted}; give both or neither")
    if recipe.teachers and recipe.loss == "spread":
        raise ValueError("teachers go with every loss but spread, which is about one class's distance from the others")
    if recipe.clip is not None and recipe.clip_value is not None:
        raise ValueError("clip and clip_value are both given; gradients are clipped by their norm or by value")


def create_fabric(
    recipe: Recipe, device: str = "auto", devices: int = 1, nodes: int = 1, strategy: str = "auto"
) -> Fabric:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    kind, _, number = device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    there = {
        "cpu": os.cpu_count() or 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if kind not in there or (number and not number.isdecimal()):
        raise ValueError(f"device {device!r} is not known; it is auto, cpu, cuda, cuda:N or mps")
    if there[kind] < max(devices, int(number or 0) + 1):
        raise ValueError(f"{devices} x {device} is not there; this machine has {there[kind]} of {kind}")
    if kind != "cuda" and recipe.precision == "fp16":
        raise ValueError(f"fp16 needs a CUDA device and this run is on {kind}; bf16 has no such need")
    several = devices * nodes > 1
    check_strategy(strategy, recipe, kind, several)
    which: Any = [int(number)] if number and kind == "cuda" else devices
    return Fabric(
        accelerator=kind,
        devices=which,
        num_nodes=nodes,
        strategy=("ddp" if strategy == "auto" else strategy) if several else "auto",
        precision=PRECISIONS[recipe.precision],  # type: ignore[arg-type]
    )


def check_strategy(strategy: str, recipe: Recipe, kind: str, several: bool) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy != "fsdp":
        return
    problem = (
        f"this run is on {kind}, and it needs CUDA devices"
        if kind != "cuda"
        else "this run has one device only"
        if not several
        else "its weights are nowhere whole, which ema needs"
        if recipe.ema
        else "it clips gradients by their norm, not by value"
        if recipe.clip_value is not None
        else ""
    )
    if problem:
        raise ValueError(f"fsdp cannot be used: {problem}; strategy='ddp' goes with everything")


def may_capture(recipe: Recipe, fabric: Fabric, wish: bool | None) -> bool:
    """Whether a step can be a CUDA graph. None asks for it where it can; True, where it cannot, is an error."""
    problem = (
        f"this run is on {fabric.device.type}, not on a CUDA device"
        if fabric.device.type != "cuda"
        else "several processes have to wait for each other"
        if fabric.world_size > 1
        else "fp16 asks the device at each step whether its scale was too large"
        if recipe.precision == "fp16"
        else ""
    )
    if wish and problem:
        raise ValueError(f"the step cannot be captured in a CUDA graph: {problem}; leave capture out")
    return wish is not False and not problem


def load_data(recipe: Recipe) -> DataSet:
    return load(recipe.data, validation=recipe.validation, protocol=recipe.protocol, **recipe.data_args)


def create_network(recipe: Recipe, data: DataSet, fabric: Fabric, channels_last: bool | None = None) -> nn.Module:
    """On several GPUs batch norm is over all of them; what a network compares over its batch is over all ranks."""
    sizes = {"image": data.image, "classes": data.classes}
    network = create_model(recipe.model, **{**sizes, **recipe.model_args})
    if not recipe.reconstruction and isinstance(getattr(network, "decoder", None), nn.Module):
        network.decoder.requires_grad_(False)
    if fabric.world_size > 1:
        if fabric.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        for name, module in network.named_modules():
            if hasattr(module, "gather"):
                if type(fabric.strategy).__name__ == "FSDPStrategy":
                    raise ValueError(f"fsdp cannot be used: {name} compares over the whole batch; strategy='ddp' can")
                module.gather = partial(gather_rows, fabric)  # type: ignore[assignment]
    if fabric.device.type != "mps" if channels_last is None else channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def gather_rows(fabric: Fabric, rows: Tensor) -> Tensor:
    """The rows of all ranks, through which gradients flow; each rank has as many.

    Shapes: [b, ...] -> [ranks * b, ...]
    """
    return cast(Tensor, fabric.all_gather(rows, sync_grads=True)).flatten(0, 1)


def training_batches(recipe: Recipe, data: DataSet, seed: int, shared: dict[str, Any]) -> Batches:
    """Every rank has as many images of a batch as any other; a last batch that cannot be shared so is left out."""
    world = shared["world"]
    if recipe.batch_size % world:
        raise ValueError(f"a batch of {recipe.batch_size} cannot be shared evenly by {world} processes")
    images = recipe.samples or len(data.train)
    left_over = images % recipe.batch_size
    if images < recipe.batch_size and left_over % world:
        raise ValueError(f"the {images} images of an epoch cannot be shared evenly by {world} processes; use fewer")
    return batches_for(
        data.train,
        recipe.batch_size,
        transform=data.train_transform,
        seed=seed,
        samples=recipe.samples,
        drop_last=left_over % world > 0,
        together=drawn_together(recipe, data) if shared["device"].type == "cuda" else 1,
        **shared,
    )


def drawn_together(recipe: Recipe, data: DataSet) -> int:
    """Batches drawn in one call on a fast device: up to 256, if they take no more than 32 MiB."""
    return max(1, min(256, (32 << 20) // (4 * recipe.batch_size * math.prod(data.train.image))))


def validation_batches(recipe: Recipe, data: DataSet, shared: dict[str, Any]) -> Batches:
    """All of the validation set; of more than 100,000 images, as generated sets have, always the same 10,000."""
    assert data.validation is not None
    large = len(data.validation) > 100_000
    return batches_for(
        data.validation,
        max(128, recipe.batch_size),
        transform=data.test_transform,
        shuffle=large,
        samples=10_000 if large else None,
        **shared,
    )


def seed_of(seed: int, step: int, rank: int) -> int:
    """Of the random numbers that a network draws in one step, well mixed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little")


def on_first_rank(fabric: Fabric, action: Callable[[], Any]) -> None:
    """What goes wrong there ends the run on all ranks, rather than leave the others waiting."""
    problem: Exception | None = None
    if fabric.global_rank == 0:
        try:
            action()
        except Exception as error:
            problem = error
    if fabric.world_size > 1:
        sentence = fabric.broadcast(None if problem is None else str(problem))
        if sentence is not None and problem is None:
            raise RunError(f"rank 0 stopped: {sentence}")
    if problem is not None:
        raise problem


@contextmanager
def signals() -> Iterator[list[str]]:
    """SIGTERM and Ctrl-C put their names into a list; a second one ends the process as usual."""
    came: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: Any) -> None:
        if came:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        came.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def numerics(precision: str, deterministic: bool) -> Iterator[None]:
    """TF32, determinism and, without it, a search for the fastest convolutions, for the time of a run.

    With half precision too, what stays in float32 is multiplied in TF32: its factors keep more digits than bf16's.
    """
    matmul, always = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    conv, search = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest" if precision == "32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "32"
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = conv, search
        torch.use_deterministic_algorithms(always)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
