"""Training steps and what they cost: time, memory, arithmetic, and the ceilings of the machine they ran on."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plain import plain
from torchcaps.models import create_model
from torchcaps.models.measure import operations
from torchcaps.ops import vote_budget
from torchcaps.ops.stream import own_stream
from torchcaps.results import environment

try:
    from torchcaps.ops import backend
except ImportError:  # without kernels there is the reference alone

    def backend(name: str) -> Any:
        return nullcontext()


PATHS = ("ours", "captured", "reference", "plain", "compiled")


@dataclass(frozen=True)
class Case:
    """A network at one size on one path.

    Args:
        path: "ours"; "captured", the same step in a CUDA graph; "reference", our formulas in PyTorch with stored votes;
            "plain", the textbook (see plain.py); "compiled", torch.compile of the reference.
        precision: "32", "tf32" or "bf16" (autocast).
    """

    preset: str
    batch: int
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "ours"
    precision: str = "32"

    @property
    def name(self) -> str:
        given = [f"{key}={value}" for key, value in self.options.items()]
        given += [] if self.precision == "32" else [self.precision]
        return " ".join([self.preset, *given])

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Whether products and convolutions of float32 may go through TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class Training:
    """A network, its optimiser and one batch of noise; `step` is forward, backward and optimiser."""

    def __init__(self, case: Case, device: torch.device):
        torch.manual_seed(0)
        self.case, self.device = case, device
        network: Any = create_model(case.preset, **case.options).to(device)
        images = torch.rand(case.batch, *network.image, device=device)
        if case.path in ("ours", "captured") and device.type != "mps":
            network = network.to(memory_format=torch.channels_last)
            images = images.contiguous(memory_format=torch.channels_last)
        for stack in network.modules():
            if case.path == "plain" and hasattr(stack, "in_full"):
                stack.in_full = True  # the textbook steps every layer in every iteration
        self.network, self.images = network, images
        self.labels = torch.randint(0, network.classes, (case.batch,), device=device)
        many = {"capturable": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(network.parameters(), fused=True, **many)
        self.loss = torch.compile(self.eager_loss) if case.path == "compiled" else self.eager_loss

    def eager_loss(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.case.precision == "bf16"):
            output = self.network(images, self.labels)
            loss = F.cross_entropy(output.scores.float(), self.labels)
            if output.reconstruction is not None:
                loss = loss + (output.reconstruction.float() - images[:, None]).square().mean()
            return loss if output.penalty is None else loss + output.penalty

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.images).backward()
        self.optimizer.step()

    @contextmanager
    def on_path(self) -> Iterator[None]:
        """Its formulas and precision."""
        with ExitStack() as stack:
            stack.enter_context(products_in(self.case.precision))
            if self.case.path in ("reference", "compiled"):
                stack.enter_context(backend("torch"))
                stack.enter_context(vote_budget(2**62))
            elif self.case.path == "plain":
                stack.enter_context(plain())
            yield

    def at_rest(self) -> int:
        """Bytes of weights, buffers and moments."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in (*self.network.parameters(), *self.network.buffers(), *states))


def measure(
    case: Case, device: torch.device, least: float = 1.0, ready: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Time, peak memory, arithmetic and traffic of a training step. Out of memory is a result, not an error."""
    (row,) = measure_by_turns([case], device, least, ready)
    return row


def measure_by_turns(
    cases: Sequence[Case], device: torch.device, least: float = 1.0, ready: Callable[[], Any] = lambda: None
) -> list[dict[str, Any]]:
    """As `measure` of each, a step of one after a step of the other, so that a busy minute befalls all of them.

    `ready` is called when the first steps are done, before the clock starts.
    """
    with own_stream(device) if any(case.path == "captured" for case in cases) else nullcontext():
        begun = [_begun(case, device) for case in cases]
        ready()
        runs = [run for run in begun if isinstance(run, Run)]
        while waiting := [run for run in runs if run.wants(least)]:
            for run in waiting:
                run.take()
        rows = [run.row() if isinstance(run, Run) else run for run in begun]
    del begun, runs
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _begun(case: Case, device: torch.device) -> Run | dict[str, Any]:
    try:
        return Run(case, device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "memory" not in str(error):
            raise
        return {**case.plain(), "name": case.name, "failed": "out of memory"}


class Run:
    """A training with its first step, its memory, and the times of further steps."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device, self.training = case, device, Training(case, device)
        self.times: list[float] = []
        with self.training.on_path():
            began = time.perf_counter()
            self.training.step()
            wait_for(device)
            self.first = time.perf_counter() - began
            self.peak = peak_memory(self.training)
            self.work = graph_of(self.training.step) if case.path == "captured" else self.training.step
            self.calls = 10 if timed(self.work, device) < 1e-3 else 1  # at once

    def wants(self, least: float) -> bool:
        return len(self.times) < 3 or (sum(self.times) * self.calls < least and len(self.times) < 200)

    def take(self) -> None:
        with self.training.on_path():
            self.times.append(timed(self.work, self.device, self.calls))

    def row(self) -> dict[str, Any]:
        case, seconds = self.case, sorted(self.times)[len(self.times) // 2]
        return {
            **case.plain(),
            "name": case.name,
            "ms": 1e3 * seconds,
            "images_per_second": case.batch / seconds,
            "peak_mib": self.peak / 2**20,
            "first_step_s": self.first,
            "tflops": 3 * case.batch * operations(case.preset, **case.options) / seconds / 1e12,
            "gbps": bytes_moved(self.training) / seconds / 1e9,
        }


def peak_memory(training: Training) -> int:
    """Bytes of weights, moments and the most that one step holds besides.

    On CUDA that is what torch allocated; on a CPU what the process got resident above its rest.
    """
    training.optimizer.zero_grad()
    return training.at_rest() + held_by(training.step, training.device)


def held_by(work: Callable[[], Any], device: torch.device) -> int:
    """Bytes that it holds at most above what is there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    rest = resident(trim=True)
    reset_peak()
    work()
    return max(0, resident("VmHWM") - rest)


def resident(what: str = "VmRSS", trim: bool = False) -> int:
    if trim:
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    """Linux forgets the highest resident size so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def bytes_moved(training: Training) -> int:
    """What a step must move at least: weights read twice and written, gradients, moments; blocks' outputs four times.

    An output is written once and read once, and so is its gradient.
    """
    outputs = 0

    def add(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal outputs
        for tensor in output if isinstance(output, tuple) else (output,):
            outputs += tensor.nbytes if isinstance(tensor, Tensor) and tensor.is_floating_point() else 0

    leaves = [m for m in training.network.modules() if not any(m.children()) or hasattr(m, "routing")]
    hooks = [leaf.register_forward_hook(add) for leaf in leaves]
    images = training.images[:1]
    with torch.no_grad(), training.on_path():
        modes = {m: m.training for m in training.network.modules()}
        training.network.eval()
        training.network(images)
        for module, mode in modes.items():
            module.training = mode
    for hook in hooks:
        hook.remove()
    weights = sum(p.nbytes for p in training.network.parameters())
    return 9 * weights + 4 * outputs * training.case.batch


def graph_of(work: Callable[[], Any]) -> Callable[[], None]:
    """The work as a CUDA graph, recorded after it has warmed up."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    return graph.replay


def median_time(work: Callable[[], Any], device: torch.device, least: float = 1.0) -> float:
    """Seconds of one call, the median over as many as take `least` seconds, and at least 3.

    One that is not counted comes first. Calls quicker than a millisecond are timed ten at once.
    """
    first = timed(work, device)
    if first < least:  # it may have had to warm up
        first = timed(work, device)
    calls = 10 if first < 1e-3 else 1
    times: list[float] = []
    while len(times) < 3 or (sum(times) * calls < least and len(times) < 200):
        times.append(timed(work, device, calls))
    return sorted(times)[len(times) // 2]


def timed(work: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Seconds of one call, of so many in a row."""
    began = time.perf_counter()
    for _ in range(calls):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / calls


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(device: torch.device, least: float = 1.0) -> dict[str, float]:
    """GB/s of a large copy, both directions counted, and TFLOP/s of large matrix products."""
    cuda = device.type == "cuda"
    source = torch.ones(2**28 if cuda else 2**26, device=device)
    seconds = median_time(partial(torch.empty_like(source).copy_, source), device, least)
    found = {"copy_gbps": 2 * source.nbytes / seconds / 1e9}
    del source
    side = 8192 if cuda else 2048
    kinds = {"matmul_tflops": (torch.float32, "highest")}
    if cuda:
        kinds |= {"matmul_tf32_tflops": (torch.float32, "high"), "matmul_bf16_tflops": (torch.bfloat16, "highest")}
    before = torch.get_float32_matmul_precision()
    for name, (dtype, precision) in kinds.items():
        torch.set_float32_matmul_precision(precision)
        a = torch.randn(side, side, device=device).to(dtype)
        out = torch.empty_like(a)
        seconds = median_time(partial(torch.mm, a, a, out=out), device, least)
        found[name] = 2 * side**3 / seconds / 1e12
    torch.set_float32_matmul_precision(before)
    return found


def slope(sizes: list[int], values: list[float]) -> float:
    """Of log value over log size, by least squares: 1 grows in proportion, 0 not at all."""
    x, y = ([math.log(v) for v in row] for row in (sizes, values))
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def machine(device: torch.device) -> str:
    cores = f"{os.cpu_count()} CPU cores ({environment()['cpu']})"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cores
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"
