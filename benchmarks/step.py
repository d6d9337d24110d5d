"""Whole training steps and inference on a GPU, beside their targets: python benchmarks/step.py [--rows tsai capsnet]

A training row is run as it is, captured in a CUDA graph and, for small networks, compiled as well: milliseconds a step
with sampling and augmentation; peak memory of the first three steps, in which cuDNN tries its algorithms, and of those
after them; seconds from nothing to the first step; and by how much the losses of 30 steps differ. Images are random, of
the data set's shape. On a CPU nothing is captured. It ends with 1 where losses differ by more than rounding (or three
times what two runs as they are differ by), or where a step that cannot be captured does not go on without.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps import create_model, recipes
from torchcaps.data import Batch, DataSet
from torchcaps.data.protocols import bind, find
from torchcaps.data.splits import Stored
from torchcaps.layers import conv_stem
from torchcaps.ops.stream import own_stream
from torchcaps.recipes import Recipe
from torchcaps.train.capture import WARM_UP, Captured
from torchcaps.train.optim import create_optimizer
from torchcaps.train.prepare import create_fabric, create_network, numerics, training_batches
from torchcaps.train.step import Step

STEPS = 30  # whose losses are compared
SAME = {"32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}  # of the loss, after so many steps of accumulated rounding
AT_ONCE = 1e-4  # at the first replay, where nothing has accumulated yet
SHAPES = {"mnist": (28, 28), "cifar10": (3, 32, 32), "large": (3, 227, 227)}
CLASSES = {"large": 196}


def large_network() -> nn.Module:
    """An 11 x 11 x 32 grid of capsules, from a strided stem on 227 x 227 pixels: 3,872 children, 196 parents."""
    stem = conv_stem(3, 256, kernel_size=9, stride=8, padding=4)
    return create_model("capsnet", image=(3, 227, 227), classes=196, backbone=stem, decoder=False)


@dataclass(frozen=True)
class Row:
    """What is trained. Targets: milliseconds for each precision, and GiB."""

    recipe: str
    targets: dict[str, float | None]
    gib: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] | None = None
    compiled: bool = False  # is tried too
    noisy: bool = True  # is run twice as it is

    def get(self, precision: str, batch_size: int | None) -> Recipe:
        recipe = recipes.find(self.recipe)
        changes = dict(self.changes)
        changes["model_args"] = {**recipe.model_args, **changes.get("model_args", {})}
        return replace(recipe, **changes, precision=precision, batch_size=batch_size or recipe.batch_size)


TSAI = "tsai2020_table1:inverted-resnet-cifar10"
CAPSNET = "sabour2017_table1:routing3"
LARGE = {"data": "large", "protocol": "", "reconstruction": 0.0}
ROWS = {
    "tsai": Row(TSAI, {"bf16": 5.0, "tf32": 9.0}, 1.0),
    "efficient": Row("mazzia2021_table2:efficient", {"tf32": 0.40, "bf16": 0.40}, compiled=True),
    "capsnet": Row(CAPSNET, {"bf16": 1.8, "tf32": 3.0}, 0.6),
    "tsai-3": Row(TSAI, {"bf16": 6.5}, changes={"model_args": {"iterations": 3}}, noisy=False),
    "em": Row("tsai2020_table1:em-simple-cifar10", {"bf16": 10.0, "tf32": 10.0}),
    "large": Row(CAPSNET, {"bf16": None}, 8.0, LARGE, large_network, noisy=False),
    "encap-master": Row("li2018_table3:1-master", {"bf16": None}, noisy=False),
    "encap-skips": Row("li2018_table3:7-skip-both", {"bf16": None}, noisy=False),
    "encap-ots": Row("li2018_table3:8-two-ots", {"bf16": None}, noisy=False),
    "ar": Row("choi2019_table1:ours-c10", {"bf16": None}, noisy=False),
}
INFERENCE: dict[str, tuple[str, dict[str, Any], dict[int, float | None]]] = {  # model, batches with targets in ms
    "inverted_cifar10": ("inverted_cifar10", {}, {1: None, 128: 1.5, 256: None}),
    "efficient_capsnet_mnist": ("efficient_capsnet_mnist", {"decoder": False}, {1: None, 256: None}),
    "capsnet_mnist": ("capsnet_mnist", {"decoder": False}, {1: None, 256: None}),
}


def random_images(recipe: Recipe, count: int = 8192) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    count = min(count, 512) if recipe.data == "large" else count
    classes = CLASSES.get(recipe.data, 10)
    images = torch.randint(0, 256, (count, *SHAPES[recipe.data]), dtype=torch.uint8, generator=generator)
    split = Stored(images, torch.arange(count) % classes, tuple(map(str, range(classes))))
    steps = bind(find(recipe.protocol, recipe.data).train, split, split) if recipe.protocol else ()
    return DataSet("random", split, split, None, train_transform=steps)


class Training:
    """A recipe's steps, one after the other."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataSet,
        device: str,
        capture: bool = False,
        compiled: bool = False,
        make: Callable[[], nn.Module] | None = None,
    ):
        fabric = create_fabric(recipe, device)
        torch.manual_seed(0)
        self.device = fabric.device
        network = create_network(recipe, data, fabric) if make is None else make()
        network = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        model, optimizer = fabric.setup(network, create_optimizer(recipe, network.parameters(), capture))
        model.train()
        self.batches = training_batches(recipe, data, 0, {"device": self.device, "rank": 0, "world": 1})
        self.said: list[str] = []
        self.step = Step(
            recipe,
            0,
            fabric,
            network,
            model,
            optimizer,
            len(self.batches),
            capture=capture,
            compiled=compiled,
            say=self.said.append,
        )
        self.number = 0
        self.source = self._endless()

    def take(self, steps: int) -> list[Tensor]:
        losses = []
        for _ in range(steps):
            terms = self.step(next(self.source), self.number)
            losses.append(torch.stack(list(terms.values())).sum())
            self.number += 1
        return losses

    def run(self, steps: int) -> None:
        """As `take`, for the clock: nothing but the steps."""
        for _ in range(steps):
            self.step(next(self.source), self.number)
            self.number += 1

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def captured(self) -> bool:
        return isinstance(self.step.run, Captured) and self.step.run.graph is not None

    def _endless(self) -> Iterator[Batch]:
        return (batch for _, _, batch in self.batches.steps() if len(batch.images) == self.step.recipe.batch_size)


def clean() -> int:
    """Gives back what earlier runs left, cuBLAS's workspace of each stream too; what remains is in nobody's peak."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure(
    training: Callable[[], Training], precision: str, device: str, steps: int, least: float, kernels: int, blame: int
) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    found: dict[str, Any] = {"peak": float("nan"), "first peak": float("nan"), "lines": []}
    with ExitStack() as stack:
        stack.enter_context(numerics(precision, False))
        before = 0
        if cuda:
            before = clean()
            stack.enter_context(own_stream(torch.device(device)))
        began = time.perf_counter()
        run = training()
        losses = run.take(1)
        run.wait()
        found["first"] = time.perf_counter() - began
        losses += run.take(2)
        run.wait()
        if cuda:
            found["first peak"] = (torch.cuda.max_memory_allocated() - before) / 2**30
            torch.cuda.reset_peak_memory_stats()
        losses += run.take(max(0, steps - 3))
        run.wait()
        if cuda:
            found["peak"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        found["losses"] = torch.stack(losses).tolist()
        count, took = 0, 0.0
        while took < least:
            run.wait()
            began = time.perf_counter()
            run.run(steps := 20 if count else 4)
            run.wait()
            took, count = took + time.perf_counter() - began, count + steps
        found["ms"] = 1000 * took / count if count else float("nan")
        found["captured"], found["said"] = run.captured(), run.said
        if cuda and blame and not run.captured():
            found["lines"] += largest_at_peak(run, blame)
        if cuda and kernels and run.captured():
            found["lines"] += kernels_of(run, kernels)
    return found


def largest_at_peak(run: Training, count: int) -> list[str]:
    """What was allocated within a step and alive when most was."""
    torch.cuda.memory._record_memory_history(max_entries=200_000, context="alloc", stacks="python")
    run.run(1)
    run.wait()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, Any] = {}
    total = peak = 0
    at_peak: list[Any] = []
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            total += event["size"]
            if total > peak:
                peak, at_peak = total, list(alive.values())
        elif event["action"] == "free_completed" and event["addr"] in alive:
            total -= alive.pop(event["addr"])["size"]
    sizes: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in at_peak:
        frames = [f for f in event.get("frames", ()) if "torchcaps" in f["filename"]] or event.get("frames", ())[:1]
        place = f"{frames[0]['filename'].rsplit('/', 1)[-1]}:{frames[0]['line']}" if frames else "the backward pass"
        sizes[place] += event["size"]
        times[place] += 1
    lines = [f"    a step adds {peak / 2**20:.0f} MiB to what stays; at that moment, by line:"]
    return lines + [f"    {size / 2**20:9.1f} MiB in {times[at]:3} from {at}" for at, size in sizes.most_common(count)]


def kernels_of(run: Training, count: int) -> list[str]:
    """The kernels of captured steps, by time."""
    from torch.profiler import ProfilerActivity, profile

    run.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run.run(10)
        run.wait()
    events = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events) / 10_000
    lines = [f"    {total:.3f} ms of device time a step, {sum(event.count for event in events) / 10:.0f} kernels"]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:count]:
        lines.append(f"    {event.self_device_time_total / 10_000:8.4f} ms {event.count / 10:6.1f}x  {event.key[:110]}")
    return lines


def compared(plain: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The largest relative difference of all losses, and the one at the first replay."""
    differences = [abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain, other, strict=True)]
    return max(differences), differences[min(WARM_UP, len(differences) - 1)]


def train(name: str, arguments: argparse.Namespace) -> bool:
    row, fine = ROWS[name], True
    cuda = arguments.device.startswith("cuda")
    for precision, target in row.targets.items():
        if arguments.precisions and precision not in arguments.precisions:
            continue
        recipe = row.get(precision, arguments.batch_size)
        data = random_images(recipe, arguments.images)
        variants = [(False, False)] + [(False, False)] * row.noisy + [(True, False)] * cuda
        if cuda and arguments.captured:
            variants = [(True, False)]
        variants += [(cuda, True)] * (row.compiled and not arguments.plain and not arguments.captured)
        plain: list[float] = []
        noise = noise_at_once = 0.0
        for number, (capture, compiled) in enumerate(variants):
            twice = row.noisy and number == 1
            make = partial(Training, recipe, data, arguments.device, capture, compiled, row.make)
            least = 0.0 if twice else arguments.least
            blame = arguments.blame if not twice else 0
            found = measure(make, precision, arguments.device, arguments.steps, least, arguments.kernels, blame)
            plain = plain or found["losses"]
            differs, at_once = compared(plain, found["losses"])
            if twice:
                noise, noise_at_once = differs, at_once
            words = "captured" if found["captured"] else "as it is"
            words += ", compiled" * compiled + ", again" * twice
            print_line(f"{name} {precision} {words}", found, target if capture else None, row.gib, differs, at_once)
            allowed = max(SAME[precision], 3 * noise), max(AT_ONCE, SAME[precision] / 10, 3 * noise_at_once)
            if not twice and (row.noisy or capture) and not (differs <= allowed[0] and at_once <= allowed[1]):
                fine = False
                print(f"    NOT fine: losses may differ by {allowed[0]:.1e}, and by {allowed[1]:.1e} at once")
            fine &= found["captured"] or not capture
    return fine


def print_line(
    words: str, found: dict[str, Any], target: float | None, gib: float | None, differs: float, at_once: float
) -> None:
    wish = "" if target is None else f"{target:.2f}"
    room = "" if gib is None else f"{gib:.1f}"
    numbers = f"{found['ms']:9.3f} {wish:>6} {found['peak']:8.2f} {room:>5} {found['first peak']:8.2f}"
    print(f"{words:34} {numbers} {found['first']:8.2f} {differs:9.1e} {at_once:9.1e}", flush=True)
    for sentence in found["said"]:
        print(f"    {sentence}")
    for line in found["lines"]:
        print(line)


def infer(name: str, arguments: argparse.Namespace) -> None:
    """Milliseconds from a call to its result, medians; captured ones copy their images in first."""
    model, options, batches = INFERENCE[name]
    cuda = arguments.device.startswith("cuda")
    network: Any = create_model(model, **options).eval()
    network = network.to(arguments.device, memory_format=torch.channels_last)
    for precision in arguments.precisions or ("tf32", "bf16"):
        with numerics(precision, False), torch.inference_mode():
            for batch, target in batches.items():
                images = torch.randn(batch, *network.image, device=arguments.device)
                half = torch.autocast(arguments.device.split(":")[0], torch.bfloat16)

                def call(images: Tensor = images, half: Any = half) -> Tensor:
                    with half if precision == "bf16" else nullcontext():  # noqa: B023
                        scores: Tensor = network(images).scores
                        return scores

                plain, expected = latency(call, arguments.device, arguments.least / 4)
                words = f"{name} {precision}, batch {batch}"
                if not cuda:
                    print(f"{words:44} as it is {plain:8.3f} ms", flush=True)
                    continue
                clean()
                graph, result = recorded(call)
                fresh = images.clone()

                def replay(images: Tensor = images, fresh: Tensor = fresh) -> Tensor:
                    images.copy_(fresh)
                    graph.replay()  # noqa: B023
                    return result  # noqa: B023

                quick, found = latency(replay, arguments.device, arguments.least / 4)
                error = float((found - expected).abs().max() / expected.abs().max())
                wish = "" if target is None else f", target {target:.2f}"
                print(f"{words:44} as it is {plain:8.3f} ms, captured {quick:8.3f} ms{wish} (differ by {error:.0e})")


def recorded(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def latency(call: Callable[[], Tensor], device: str, least: float) -> tuple[float, Tensor]:
    cuda = device.startswith("cuda")
    times: list[float] = []
    for _ in range(3):
        result = call()
    while sum(times) < 1000 * least or len(times) < 5:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times), result.float().clone()


def goes_on_without(device: torch.device) -> bool:
    """A step that asks the device something in the middle cannot be captured, and must run all the same."""
    said: list[str] = []

    def update(batch: Batch) -> dict[str, Tensor]:
        loss = F.dropout(batch.images).sum()
        return {"loss": loss * float(loss > -1e9)}

    with own_stream(device):
        captured = Captured(update, 4, said.append)
        batch = Batch(torch.ones(4, 64, device=device), torch.zeros(4, device=device))
        found = []
        for _ in range(WARM_UP + 4):
            torch.manual_seed(1)
            found.append(float(captured(batch)["loss"]))
    print(f"a step that cannot be captured says: {' / '.join(said)}")
    return len(said) == 1 and len(set(found)) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="+", default=(*ROWS, "inference"), choices=(*ROWS, "inference"))
    parser.add_argument("--precisions", nargs="+", choices=tuple(SAME), help="of those a row has")
    parser.add_argument("--batch-size", type=int, help="instead of the recipe's")
    parser.add_argument("--images", type=int, default=8192, help="to draw from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--least", type=float, default=0.4, help="seconds to spend on each time")
    parser.add_argument("--plain", action="store_true", help="leave out torch.compile")
    parser.add_argument("--captured", action="store_true", help="captured steps alone, compared with nothing")
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each captured step, by time")
    parser.add_argument("--blame", type=int, default=0, help="so many lines that hold memory when most is allocated")
    parser.add_argument("--seconds", type=float, default=110, help="after which no further row is begun")
    arguments = parser.parse_args()
    cuda = arguments.device.startswith("cuda")
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}")
    heads = f"{'ms':>9} {'target':>6} {'peak GiB':>8} {'goal':>5} {'at first':>8} {'first, s':>8}"
    print(f"{'training':34} {heads} {'differs':>9} {'at once':>9}")
    began, fine = time.perf_counter(), True
    for row in arguments.rows:
        if time.perf_counter() - began > arguments.seconds:
            print(f"{row} is left out: {arguments.seconds:.0f} s are over")
            continue
        try:
            if row == "inference":
                for name in INFERENCE:
                    infer(name, arguments)
            else:
                fine &= train(row, arguments)
        except Exception as error:
            fine = False
            print(f"{row} FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    if cuda:
        fine &= goes_on_without(torch.device(arguments.device))
    print(f"\n{'fine' if fine else 'NOT fine'}, after {time.perf_counter() - began:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
