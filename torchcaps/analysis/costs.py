"""What routing costs, and what it brings: accuracy, memory and time by iteration, parameters and operations."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchcaps.analysis.histories import metrics
from torchcaps.analysis.sample import accuracy, right, take, whole
from torchcaps.analysis.settings import but_for_iterations, iterations_of, names_of, with_iterations
from torchcaps.models.measure import operations, parameters, training_memory
from torchcaps.models.registry import create_model
from torchcaps.runs import Opened, is_exported, read_json

ITERATIONS = 5
TIMED = 16  # images whose way through a network is timed
MAZZIA_TABLE_1 = (  # method, preset, whether the paper counts the decoder; its parameters and operations for one image
    ("CapsNet", "capsnet_mnist", False, 6_800_000, 0.401e9),
    ("AR-CapsNet", "ar_capsnet_mnist", True, 5_310_000, 0.098e9),
    ("Matrix-CapsNet (EM)", "em_smallnorb", False, 310_000, 0.086e9),
    ("Efficient-CapsNet", "efficient_capsnet_mnist", False, 161_000, 0.060e9),
)


def by_iteration(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Tsai's figure 4: test accuracy by number of iterations, with memory for training and time for an image.

    Runs that differ in their iterations and seeds alone make one line, each point a network trained so. A network of
    which there is but one number is tested with 1 to 5 iterations as it is, which the line says.

    Options: `images`, how many test images where a network is tested here; `batch`, for which memory is told.
    """
    groups: dict[str, list[Opened]] = {}
    for run in runs:
        groups.setdefault(but_for_iterations(run), []).append(run)
    heads = [group[0] for group in groups.values()]
    names = names_of(heads, apart=["iterations"])
    batch = whole(options, "batch")
    lines = []
    for name, group in zip(names, groups.values(), strict=True):
        counts = sorted({iterations_of(run.model) for run in group})
        if len(counts) > 1:
            points = [_trained([run for run in group if iterations_of(run.model) == n], n, batch) for n in counts]
        else:
            points = _as_it_is(group[0], whole(options, "images"), batch)
        lines.append({"name": name, "trained": len(counts) > 1, "own": counts[0], "points": points})
    return {"batch": batch, "device": str(runs[0].device), "lines": lines}


def _trained(runs: Sequence[Opened], iterations: int, batch: int) -> dict[str, Any]:
    accuracies = [_test_accuracy(run) for run in runs]
    known = [value for value in accuracies if value is not None]
    if not known:
        raise ValueError(f"{runs[0].folder} has not been tested; torchcaps evaluate does that")
    mean = sum(known) / len(known)
    spread = (sum((value - mean) ** 2 for value in known) / (len(known) - 1)) ** 0.5 if len(known) > 1 else None
    return {
        "iterations": iterations,
        "accuracy": mean,
        "spread": spread,
        "runs": len(known),
        **_costs(runs[0].model, batch),
    }


def _as_it_is(run: Opened, images: int, batch: int) -> list[dict[str, Any]]:
    sample = take(run, images)
    points = []
    for iterations in range(1, ITERATIONS + 1):
        network = with_iterations(run.model, iterations)
        share = accuracy(network, sample.seen(), sample.labels)
        points.append(
            {"iterations": iterations, "accuracy": share, "spread": None, "runs": 1, **_costs(network, batch)}
        )
    return points


def _costs(network: nn.Module, batch: int) -> dict[str, Any]:
    return {"memory": memory_of(network, batch), "milliseconds": _milliseconds(network)}


def memory_of(network: nn.Module, batch: int) -> int:
    """Bytes that training takes, of a network whose weights are fixed too."""
    return training_memory(copy.deepcopy(network).requires_grad_(), batch)


def count_weights(network: nn.Module) -> int:
    """Without decoder and feedback, whether they are fixed or not."""
    return parameters(copy.deepcopy(network).requires_grad_()).network


def _milliseconds(network: Any) -> float:
    """For one image of a small batch, the best of three times."""
    weight = next(network.parameters())
    images = torch.zeros(TIMED, *network.image, dtype=weight.dtype, device=weight.device)
    times = []
    with torch.inference_mode():
        for _ in range(3):
            _wait(images.device)
            start = time.perf_counter()
            network.encode(images)
            _wait(images.device)
            times.append(time.perf_counter() - start)
    return 1000 * min(times) / TIMED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _test_accuracy(run: Opened) -> float | None:
    if is_exported(run.folder):
        return float(right(run.look()).double().mean())
    figures = (read_json(run.folder / "test.json") or {}).get("figures", {})
    error = figures.get("exact_match_error", figures.get("error"))
    return None if error is None else 1 - float(error)


def convergence(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Tsai's figure 5: the accuracy on validation images by epoch, and a table of what each network takes.

    Options: `batch`, for which memory is told.
    """
    batch = whole(options, "batch")
    series = []
    for run, name in zip(runs, names_of(runs), strict=True):
        rows = metrics(run)
        errors = [row.get("validation_error") for row in rows]
        if all(error is None for error in errors):
            raise ValueError(f"{run.folder} was trained without validation, so its accuracy by epoch is not known")
        series.append({
            "name": name,
            "epochs": [row["epoch"] for row in rows],
            "accuracy": [None if error is None else 1 - error for error in errors],
            "test": _test_accuracy(run),
            "paper": run.recipe.reported,
            "parameters": count_weights(run.model),
            "memory": memory_of(run.model, batch),
            "milliseconds": _milliseconds(run.model),
        })  # fmt: skip
    return {"batch": batch, "device": str(runs[0].device), "series": series}


def table_1(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Mazzia's Table 1: trainable parameters and operations of one image, ours beside the paper's."""
    rows: list[dict[str, Any]] = []
    for method, preset, decoder, printed_parameters, printed_operations in MAZZIA_TABLE_1:
        with torch.device("meta"):
            network = create_model(preset)
        count = parameters(network)
        rows.append({
            "method": method,
            "preset": preset,
            "parameters": count.network,
            "decoder": count.decoder,
            "decoder_in_paper": decoder,
            "operations": operations(network),
            "paper_parameters": printed_parameters,
            "paper_operations": printed_operations,
        })  # fmt: skip
    best = rows[-1]
    for row in rows:
        row["gain"] = 1 - best["operations"] / row["operations"]
        row["paper_gain"] = 1 - best["paper_operations"] / row["paper_operations"]
    return {"rows": rows}
