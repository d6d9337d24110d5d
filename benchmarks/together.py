"""Seeds trained together: python benchmarks/together.py [--device cuda] [--seeds 1 4 16] [--budget 95]

Mazzia's Efficient-CapsNet with its augmentation, on random images of MNIST's shape. First whether seed 3 of four has
the losses it has alone over 30 steps; then seconds an epoch and seed, as it is and captured in a CUDA graph; then the
slowest layers of 16 replicas in several formulations, and where a step's time goes. What does not fit into the budget
of seconds is left out. It ends with 1 where losses differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps import recipes
from torchcaps.data import Batch, DataSet
from torchcaps.data.protocols import bind, find
from torchcaps.data.splits import Stored
from torchcaps.ops.stream import own_stream
from torchcaps.recipes import Recipe
from torchcaps.train.optim import create_optimizer
from torchcaps.train.prepare import create_fabric, create_network, numerics, training_batches
from torchcaps.train.replicas import ReplicaBatches, ReplicaStep
from torchcaps.train.stacked import Stack
from torchcaps.train.step import Step

ROW = recipes.find("mazzia2021_table2:efficient")
EPOCH = 3750  # steps of 16 images
TARGET = 0.35  # seconds an epoch and seed, 16 seeds together
SAME = {"32": 1e-3, "tf32": 2e-2, "bf16": 5e-2}  # of the loss, over 30 steps of accumulated rounding
LAYERS = {  # channels in and out, side, kernel, stride
    "conv1": (1, 32, 28, 5, 1),
    "conv2": (32, 64, 24, 3, 1),
    "conv3": (64, 64, 22, 3, 1),
    "conv4": (64, 128, 20, 3, 2),
}


def random_images(count: int) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(count, 28, 28, dtype=torch.uint8)
    images[:, 4:24, 4:24] = torch.randint(0, 256, (count, 20, 20), dtype=torch.uint8, generator=generator)
    split = Stored(images, torch.arange(count) % 10, tuple("0123456789"))
    assert ROW.protocol is not None
    return DataSet("random", split, split, None, train_transform=bind(find(ROW.protocol, "mnist").train, split, split))


class Training:
    """Steps of all seeds together, or of one seed alone."""

    def __init__(self, recipe: Recipe, data: DataSet, device: str, seeds: list[int], capture: bool, conv: str | None):
        fabric = create_fabric(recipe, device)
        self.device, self.seeds = fabric.device, seeds
        networks = []
        for seed in seeds:
            torch.manual_seed(seed)
            networks.append(create_network(recipe, data, fabric).to(self.device))
        self.said: list[str] = []
        self.batches: ReplicaBatches | object
        self.step: Step
        if conv is None:
            network = networks[0].train()
            model, optimizer = fabric.setup(network, create_optimizer(recipe, network.parameters(), capture))
            model.train()
            self.batches = training_batches(recipe, data, seeds[0], {"device": self.device, "rank": 0, "world": 1})
            self.step = Step(
                recipe, seeds[0], fabric, network, model, optimizer, EPOCH, capture=capture, say=self.said.append
            )
        else:
            stack = Stack(networks, conv)
            stack.train()
            self.batches = ReplicaBatches(recipe, data, seeds, self.device)
            optimizer = create_optimizer(recipe, stack.all.parameters(), capture)
            self.step = ReplicaStep(
                recipe, seeds, fabric, stack, optimizer, EPOCH, capture=capture, say=self.said.append
            )
        self.number = 0
        self.stream = self.images()

    def images(self) -> Iterator[Batch]:
        for epoch in range(10_000):
            yield from self.batches.epoch(epoch)  # type: ignore[attr-defined]

    def run(self, steps: int) -> list[Tensor]:
        losses = []
        for batch in islice(self.stream, steps):
            terms = self.step(batch, self.number)
            losses.append(sum(value.detach().clone() for value in terms.values()))
            self.number += 1
        return losses  # type: ignore[return-value]


@contextmanager
def set_up(precision: str, device: str, capture: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(numerics(precision, deterministic=False))
        if capture:
            stack.enter_context(own_stream(torch.device(device)))
        yield


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(data: DataSet, device: str, precision: str, conv: str, capture: bool, steps: int, alone: Tensor) -> bool:
    with set_up(precision, device, capture):
        both = Training(replace(ROW, precision=precision), data, device, [0, 7, 11, 3], capture, conv)
        losses = torch.stack(both.run(steps))[:, 3].double().cpu()
    error = ((losses - alone).abs() / alone).max().item()
    same = error <= SAME[precision]
    words = f"{conv}{', captured' if capture else ''}, {precision}"
    print(f"  {words:32} first {losses[0]:.6f} and {alone[0]:.6f}, largest relative difference {error:.1e}", end="")
    print("" if same else "  DIFFERENT", *both.said, flush=True)
    return same


def measure(
    data: DataSet, device: str, precision: str, conv: str | None, capture: bool, seeds: int, steps: int
) -> None:
    with set_up(precision, device, capture):
        began = time.perf_counter()
        training = Training(replace(ROW, precision=precision), data, device, list(range(seeds)), capture, conv)
        cuda = training.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        training.run(8 if cuda else 1)
        wait(training.device)
        ready = time.perf_counter() - began
        times = []
        for _ in range(3):
            began = time.perf_counter()
            training.run(steps)
            wait(training.device)
            times.append((time.perf_counter() - began) / steps)
    each = sorted(times)[1]
    epoch = each * EPOCH / seeds
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if cuda else ""
    form = f"{conv or 'alone'}{', captured' if capture else ''}"
    star = "*" if seeds == 16 and epoch <= TARGET else ""
    figures = f"{1000 * each:9.3f} {epoch:9.3f}{star:1} {ready:9.1f} {memory:>10}"
    print(f"{precision:5} {form:20} {seeds:5} {figures}", *training.said, flush=True)


def grouped(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    r = x.shape[1]
    maps = F.conv2d(x.flatten(1, 2), weight.flatten(0, 1), bias.flatten(), stride, groups=r)
    return maps.unflatten(1, (r, -1))


def patches(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Stored patches and one batched matrix product."""
    b, r = x.shape[:2]
    k = weight.shape[3]
    windows = x.unfold(3, k, stride).unfold(4, k, stride)  # [b, r, c, y, x, k, k]
    y, w = windows.shape[3:5]
    columns = windows.permute(1, 0, 3, 4, 5, 6, 2).reshape(r, b * y * w, -1)
    kernels = weight.permute(0, 3, 4, 2, 1).reshape(r, columns.shape[2], -1)
    return torch.baddbmm(bias[:, None], columns, kernels).view(r, b, y, w, -1).permute(1, 0, 4, 2, 3)


def apart(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """One convolution after the other."""
    maps = [F.conv2d(x[:, k], weight[k], bias[k], stride) for k in range(x.shape[1])]
    return torch.stack(maps, 1)


def triton_conv(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    from torchcaps.ops.replica_conv import ReplicaConv

    return ReplicaConv.apply(x, weight, bias, stride, 0)  # type: ignore[return-value]


def graph_time(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Milliseconds of one call, without the time to launch it where there are CUDA graphs."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def layers(device: torch.device, dtype: torch.dtype, r: int, b: int, over: Callable[[], bool]) -> None:
    forms = ("grouped", "grouped-last", "apart", "patches", "triton")
    print(f"\n{f'{r} replicas, {dtype}':26}" + "".join(f"{form:>14}" for form in forms) + "  ms, there and back")
    for name, (c, o, side, k, stride) in LAYERS.items():
        row = []
        for form in forms:
            if over() or (form == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
                row.append(float("nan"))
                continue
            x = torch.randn(b, side, side, r, c, device=device, dtype=dtype).permute(0, 3, 4, 1, 2)
            weight = torch.randn(r, o, k, k, c, device=device, dtype=dtype).permute(0, 1, 4, 2, 3)
            if form == "grouped":
                x, weight = x.contiguous(), weight.contiguous()
            x.requires_grad_(c > 1)
            weight.requires_grad_()
            bias = torch.zeros(r, o, device=device, dtype=dtype, requires_grad=True)
            calls = {"patches": patches, "triton": triton_conv, "apart": apart}
            call = calls.get(form, grouped)
            inputs = [t for t in (x, weight, bias) if t.requires_grad]
            tops = torch.randn_like(call(x, weight, bias, stride))

            def work(call=call, x=x, weight=weight, bias=bias, stride=stride, tops=tops, inputs=inputs) -> object:
                return torch.autograd.grad(call(x, weight, bias, stride), inputs, tops)

            try:
                row.append(graph_time(work, device))
            except RuntimeError as error:
                print(f"  {name} {form}: {str(error).splitlines()[0]}")
                row.append(float("nan"))
        print(f"{name:26}" + "".join(f"{each:14.3f}" for each in row), flush=True)
    others(device, dtype, r, b)


def others(device: torch.device, dtype: torch.dtype, r: int, b: int) -> None:
    """Norm, decoder and augmentation, which have one formulation each."""
    x = torch.randn(b, 64 * r, 22, 22, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    mean, variance, scale, shift = (torch.ones(64 * r, device=device) for _ in range(4))
    scale.requires_grad_()
    shift.requires_grad_()
    tops = torch.randn_like(x)

    def norm() -> object:
        y = F.batch_norm(F.relu(x), mean, variance, scale, shift, True, 0.01, 1e-3)
        return torch.autograd.grad(y, (x, scale, shift), tops)

    print(f"{'ReLU and norm of conv2':26}{graph_time(norm, device):14.3f}")
    sizes = (160, 512, 1024, 784)
    weights = [torch.randn(r, i, o, device=device, dtype=dtype, requires_grad=True) for i, o in pairwise(sizes)]
    poses = torch.randn(r, b, 160, device=device, dtype=dtype, requires_grad=True)

    def decoder() -> object:
        y = poses
        for weight in weights:
            y = F.relu(y @ weight)
        return torch.autograd.grad(y.sum(), (poses, *weights))

    print(f"{'decoder':26}{graph_time(decoder, device):14.3f}", flush=True)


def profile(data: DataSet, device: str, precision: str, seeds: int) -> None:
    with set_up(precision, device, False):
        training = Training(replace(ROW, precision=precision), data, device, list(range(seeds)), False, "auto")
        training.run(5)
        wait(training.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            training.run(5)
            wait(training.device)
    found = [(e.device_time_total / 5, e.count // 5, e.key) for e in seen.key_averages()]
    print(f"\nwhere a step of {seeds} seeds goes, {precision}: {sum(t for t, _, _ in found) / 1000:.3f} ms of kernels")
    for micro, count, key in sorted(found, reverse=True)[:18]:
        print(f"  {micro:8.1f} us {count:5} x  {key[:100]}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--precision", nargs="+", default=["tf32", "bf16"])
    parser.add_argument("--steps", type=int, default=200, help="timed, three times over")
    parser.add_argument("--check", type=int, default=30, help="steps whose losses are compared, if any")
    parser.add_argument("--images", type=int, default=57_000)
    parser.add_argument("--budget", type=float, default=95.0, help="seconds")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"

    def over() -> bool:
        return time.monotonic() - began > arguments.budget

    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    print(f"{name}, torch {torch.__version__}")
    data = random_images(arguments.images)
    forms = ("triton", "grouped") if cuda else ("grouped",)
    captures = (True, False) if cuda else (False,)
    same = True
    if arguments.check:
        print(f"\nseed 3 of four together against seed 3 alone, {arguments.check} steps")
    for precision in ("32", *arguments.precision) if arguments.check else ():
        with set_up(precision, arguments.device, False):
            alone = Training(replace(ROW, precision=precision), data, arguments.device, [3], False, None)
            expected = torch.stack(alone.run(arguments.check)).double().cpu()
        for conv in forms if precision == "32" else forms[:1]:
            for capture in captures:
                same &= check(data, arguments.device, precision, conv, capture, arguments.check, expected)
    heads = f"{'ms/step':>9} {'s/epoch':>9}  {'ready s':>9} {'memory':>10}  (s an epoch and seed)"
    print(f"\n{'':26} {'seeds':>5} {heads}")
    for seeds in sorted(arguments.seeds, reverse=True):
        for precision in arguments.precision:
            for conv in forms:
                for capture in captures:
                    main_form = conv == forms[0] and capture == captures[0]
                    if not over() and (main_form or seeds == max(arguments.seeds)):
                        measure(data, arguments.device, precision, conv, capture, seeds, arguments.steps)
    if cuda and not over():
        profile(data, arguments.device, arguments.precision[0], max(arguments.seeds))
    with set_up("tf32", arguments.device, cuda):
        for dtype in (torch.float32, torch.bfloat16):
            if not over():
                layers(device, dtype, max(arguments.seeds), 16 if cuda else 2, over)
    print(f"\n{time.monotonic() - began:.0f} s in all")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
