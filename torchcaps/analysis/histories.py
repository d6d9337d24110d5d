"""How runs went: what routing and losses did from epoch to epoch, read from the files of their folders."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchcaps.analysis.sample import take, whole
from torchcaps.analysis.settings import iterations_of, names_of, with_iterations
from torchcaps.runs import Opened, read_json
from torchcaps.train.routing_log import routing_log

PANELS = 4  # epochs that are shown
ITERATIONS = 5  # as far as Sabour's figure A.1 goes
SABOUR_CHANGES = {"2": 0.007, "5": 1e-5}  # by iteration, after 500 epochs on MNIST (A.1)
LI_DISSIMILAR = {"dynamic": 0.37, "em": 0.20}  # share of votes that disagree, at the end (figure 2)
LI_GAIN = {"EncapNet": 0.21, "ResNet": 0.04}  # of the error, by feedback (section 5.1)
KINDS = {"DynamicRouting": "dynamic", "EMRouting": "em"}


def metrics(run: Opened) -> list[dict[str, Any]]:
    """metrics.csv, a row an epoch, what is missing as None."""
    rows = _table(run.folder / "metrics.csv")
    if not rows:
        raise ValueError(f"{run.folder} has no metrics.csv, so nothing is known of its epochs")
    return rows


def routing_rows(run: Opened) -> list[dict[str, Any]]:
    """routing.jsonl, a row an epoch."""
    path = run.folder / "routing.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not rows or not rows[-1].get("layers"):
        raise ValueError(
            f"{run.folder} has no routing log: either nothing in its network routes votes, or none was kept"
        )
    return rows


def logit_changes(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Sabour's figure A.1: for each layer the mean change of a routing logit, by epoch and iteration.

    The log has as many iterations as the network; `further` are those of the trained network with five, on a few test
    images, and empty where these cannot be had.

    Options: `images`, how many these are.
    """
    (run,) = runs
    rows = routing_rows(run)
    further = _further_changes(run, whole(options, "images"))
    names = list(rows[-1]["layers"])
    layers = []
    for number, (name, last) in enumerate(rows[-1]["layers"].items(), 1):
        kept = [row for row in rows if row["layers"].get(name, {}).get("logits")]
        if kept:
            layers.append({
                "name": name,
                "place": [number, len(names)],
                "routing": last["routing"].removesuffix("Routing"),
                "epochs": [row["epoch"] for row in kept],
                "changes": [row["layers"][name]["logits"] for row in kept],
                "further": further.get(name, []),
            })  # fmt: skip
    if not layers:
        raise ValueError(f"{run.recipe.model} of {run.folder} routes without iterations, so no logit changes")
    dynamic = any(layer["routing"] == "Dynamic" for layer in layers)
    return {
        "model": run.recipe.model,
        "data": run.recipe.data,
        "images": rows[-1].get("images"),
        "layers": layers,
        "paper": SABOUR_CHANGES if dynamic and run.recipe.data == "mnist" else {},
    }


def _further_changes(run: Opened, images: int) -> dict[str, list[float | None]]:
    """By layer, the changes of the trained network's logits over five iterations."""
    try:
        network = with_iterations(run.model, ITERATIONS)
        log = routing_log(network, take(run, images).seen().to(run.device))
    except (ValueError, OSError):
        return {}
    return {name: layer["logits"] for name, layer in log["layers"].items()}


def losses(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Sabour's figure A.2: the training loss of runs with different numbers of iterations."""
    series: list[dict[str, Any]] = []
    for run, name in zip(runs, names_of(runs), strict=True):
        rows = metrics(run)
        series.append({
            "name": name,
            "iterations": iterations_of(run.model),
            "steps": [row.get("step") for row in rows],
            "epochs": [row["epoch"] for row in rows],
            "loss": [row.get("loss") for row in rows],
        })  # fmt: skip
    series.sort(key=lambda each: each["iterations"])
    return {"data": _one_of([run.recipe.data for run in runs]), "batch": _one_of_int(runs), "series": series}


def agreement(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Li's figure 2: at several epochs, how many votes have which cosine with their parent, and how long they are.

    Options: `layer`, by its name in the routing log; the last one if not given.
    """
    found: list[dict[str, Any]] = []
    edges: dict[str, Any] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        rows = routing_rows(run)
        layers = list(rows[-1]["layers"])
        layer = options.get("layer") or layers[-1]
        if layer not in layers:
            raise ValueError(f"the routing log of {run.folder} has no layer {layer!r}; it has {', '.join(layers)}")
        edges = {"cosine_edges": rows[-1]["cosine_edges"], "length_edges": rows[-1]["length_edges"]}
        chosen = sorted({round(k * (len(rows) - 1) / (PANELS - 1)) for k in range(PANELS)})
        panels = []
        for row in (rows[k] for k in chosen):
            seen = row["layers"][layer]
            panels.append({
                "epoch": row["epoch"],
                "cosine": _shares(seen["cosine"]),
                "cosine_lengths": seen["cosine_lengths"],
                "lengths": _shares(seen["lengths"]),
            })  # fmt: skip
        kind = rows[-1]["layers"][layer]["routing"]
        last = panels[-1]
        found.append({
            "name": name,
            "layer": layer,
            "place": [layers.index(layer) + 1, len(layers)],
            "routing": kind.removesuffix("Routing"),
            "panels": panels,
            "dissimilar": last["cosine"][0],
            "similar_length": last["cosine_lengths"][-1],
            "paper_dissimilar": LI_DISSIMILAR.get(KINDS.get(kind, "")),
        })  # fmt: skip
    return {**edges, "runs": found}


def feedback(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Li's figure 4: the training loss with feedback and without, and how much of the error it takes away.

    The loss is that of classification alone, so that the curves compare.
    """
    series: list[dict[str, Any]] = []
    errors: dict[str, dict[str, list[float | None]]] = {}
    for run in runs:
        rows = metrics(run)
        kind = run.recipe.model_args.get("feedback")
        own = next(
            (term for term in ("margin", "cross_entropy", "spread", "binary_cross_entropy") if term in rows[0]), "loss"
        )
        error = (read_json(run.folder / "test.json") or {}).get("figures", {}).get("error")
        error = rows[-1].get("validation_error") if error is None else error
        errors.setdefault(run.recipe.model, {}).setdefault("none" if kind is None else kind, []).append(error)
        series.append({
            "network": run.recipe.model,
            "feedback": kind,
            "seed": run.seed,
            "term": own,
            "epochs": [row["epoch"] for row in rows],
            "loss": [row.get(own) for row in rows],
            "error": error,
        })  # fmt: skip
    if len({each["feedback"] is None for each in series}) < 2:
        there = "without" if series[0]["feedback"] is None else "with"
        raise ValueError(
            f"losses with and without feedback need a run of either kind, and all of these are {there}; "
            "--model-args.feedback ot trains one with it"
        )
    gains = []
    for network, kinds in errors.items():
        plain = _mean(kinds.get("none", []))
        for kind, values in kinds.items():
            with_it = _mean(values)
            if kind != "none" and plain and with_it is not None:
                gain = {"network": network, "feedback": kind, "without": plain, "with": with_it}
                gains.append({**gain, "gain": (plain - with_it) / plain})
    return {"series": series, "gains": gains, "paper": LI_GAIN}


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _one_of(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ", ".join(dict.fromkeys(values))


def _one_of_int(runs: Sequence[Opened]) -> int | None:
    sizes = {run.recipe.batch_size for run in runs}
    return sizes.pop() if len(sizes) == 1 else None


def _table(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="") as file:
            rows = [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return [{**row, "epoch": int(row["epoch"] or 0)} for row in rows]


def _number(text: str | None) -> float | None:
    value = float(text) if text else None
    return value if value is not None and math.isfinite(value) else None
