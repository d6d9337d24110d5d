"""Two runs side by side: settings, curves, costs, and the images on which they disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torchcaps import pictures
from torchcaps.analysis.costs import count_weights
from torchcaps.analysis.examples import kept, places
from torchcaps.analysis.histories import metrics
from torchcaps.analysis.sample import right, take, whole
from torchcaps.analysis.settings import UNSAID, names_of, options_of
from torchcaps.evaluate import Predictions, ranking
from torchcaps.models.measure import operations
from torchcaps.runs import Opened, read_json


def side_by_side(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """How two runs went, where they differ, and which test images only one of them recognises.

    Options: `images`, how many of these are shown for either run.
    """
    first, second = runs
    names = names_of(runs)
    return {
        "runs": [_facts(run, name) for run, name in zip(runs, names, strict=True)],
        "differences": differences(first, second),
        "test": _tested(first, second, whole(options, "images", 0)),
    }


def differences(first: Opened, second: Opened) -> list[dict[str, str]]:
    """The settings in which two runs differ, those of model and data one by one."""
    flat = [{**_flat(asdict(run.recipe)), "seed": run.seed} for run in (first, second)]
    if first.recipe.model == second.recipe.model:
        for run, each in zip((first, second), flat, strict=True):
            each.update(_flat({"model_args": options_of(run)}))
    fields = ["seed", *asdict(first.recipe)]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if key.split(".")[0] not in UNSAID]
    keys.sort(key=lambda key: fields.index(key.split(".")[0]))
    pairs = [(key, _word(flat[0].get(key)), _word(flat[1].get(key))) for key in keys]
    return [{"setting": key, "first": one, "second": other} for key, one, other in pairs if one != other]


def exact_p_value(only_first: int, only_second: int) -> float:
    """McNemar's test, exact: how likely so uneven a split of the images that one run alone recognises is by chance."""
    n, k = only_first + only_second, min(only_first, only_second)
    tail: float = sum(math.comb(n, m) for m in range(k + 1)) / 2**n
    return min(1.0, 2 * tail)


def _facts(run: Opened, name: str) -> dict[str, Any]:
    rows = metrics(run)
    final, tested = read_json(run.folder / "final.json") or {}, read_json(run.folder / "test.json") or {}
    figures = tested.get("figures", {})
    return {
        "name": name,
        "model": run.recipe.model,
        "parameters": count_weights(run.model),
        "operations": operations(run.model),
        "epochs": [row["epoch"] for row in rows],
        "loss": [row.get("loss") for row in rows],
        "validation_error": [row.get("validation_error") for row in rows],
        "test_error": figures.get("exact_match_error", figures.get("error")),
        "standard_error": figures.get("standard_error"),
        "seconds": final.get("seconds"),
    }


def _tested(first: Opened, second: Opened, most: int) -> dict[str, Any] | None:
    """None where the two were not tested on the same images."""
    found = [kept(run) for run in (first, second)]
    if found[0] is None or found[1] is None:
        return None
    one, other = found[0], found[1]
    if one.labels.shape != other.labels.shape or not torch.equal(one.labels, other.labels):
        return None
    good, fine = (right(each) for each in (one, other))
    groups = {"only_first": good & ~fine, "only_second": fine & ~good}
    counts = {name: int(group.sum()) for name, group in groups.items()}
    shown = {}
    for name, group in groups.items():
        rows = group.nonzero()[:most, 0]
        shown[name] = _cases(first, one, other, rows) if len(rows) else []
    return {
        "images": len(good),
        "both": int((good & fine).sum()),
        "neither": int((~good & ~fine).sum()),
        **counts,
        "p_value": exact_p_value(*counts.values()),
        "cases": shown,
    }


def _cases(run: Opened, one: Predictions, other: Predictions, rows: Tensor) -> list[dict[str, Any]]:
    sample = take(run, len(rows), places(run, len(one.labels))[rows].tolist())
    if not torch.equal(sample.labels, one.labels[rows]):
        raise ValueError(f"the test set has changed since {run.folder} was tested")
    names, cases = run.class_names, []
    for image, row, place in zip(sample.images, rows.tolist(), sample.indices.tolist(), strict=True):
        labels = [int(k) for k in one.labels[row].reshape(-1) if k >= 0]
        said = [ranking(each.scores[row][None])[0, : len(labels)].tolist() for each in (one, other)]
        cases.append({
            "number": place,
            "picture": pictures.packed(pictures.picture(image)),
            "labels": [names[k] for k in labels],
            "first": [names[k] for k in said[0]],
            "second": [names[k] for k in said[1]],
        })  # fmt: skip
    return cases


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update({f"{key}.{inner}": each for inner, each in value.items()})
        else:
            found[key] = value
    return found


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
