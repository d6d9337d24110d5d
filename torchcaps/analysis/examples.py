"""Test images one by one: the worst mistakes, and what the decoder makes of recognised and of mistaken images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, chosen, need_decoder, take, whole
from torchcaps.analysis.settings import names_of
from torchcaps.data import Split
from torchcaps.data.batches import Order
from torchcaps.evaluate import Predictions
from torchcaps.losses import multi_hot
from torchcaps.models.heads import ActivationHead, LengthHead
from torchcaps.pictures import brightness, columns_for, packed, picture
from torchcaps.runs import Opened, is_exported, read_json
from torchcaps.train import checkpoint

SEARCHED = 5000  # right answers among which a spread of classes is looked for
SHORT = 2  # letters of a class name up to which label, prediction and target stand below a picture


class Told(NamedTuple):
    """What a run said of its test images when it was tested.

    `values` are lengths, activations or probabilities, as `measure` says; `indices` are places in the test set.

    Shapes: said and right bool [n, j], values [n, j], indices [n]
    """

    said: Tensor
    right: Tensor
    values: Tensor
    measure: str
    indices: Tensor
    labels: Tensor


def kept(run: Opened) -> Predictions | None:
    """What the run said of its test images when it was tested, or None where it was not.

    Weights that were handed on have left that behind with their run, so they are asked anew.
    """
    if is_exported(run.folder):
        return run.look()
    path = run.folder / "predictions.safetensors"
    if read_json(run.folder / "test.json") is None or not path.exists():
        return None
    return Predictions(**checkpoint.load_weights(path)[0])


def places(run: Opened, count: int) -> Tensor:
    """Where in the test set the images are of which a run has kept predictions.

    Shapes: -> [count]
    """
    test = len(run.data().test)
    if count > test:
        raise ValueError("the test set has changed since the run was tested")
    _, indices = next(Order(test, count, shuffle=count < test, samples=count).shares(0))
    return indices


def told(run: Opened) -> Told:
    """From the run's folder; the test set is not read again, but for a few labels that tell whether it is the same."""
    predictions = kept(run)
    if predictions is None:
        raise ValueError(f"{run.folder} has not been tested yet; torchcaps evaluate {run.folder} does it")
    values, measure = lengths(run, predictions)
    indices = places(run, len(predictions.scores))
    right = multi_hot(predictions.labels, len(run.class_names))
    return Told(chosen(predictions), right, values, measure, indices, predictions.labels)


def lengths(opened: Opened, predictions: Predictions) -> tuple[Tensor, str]:
    """What the bars show, and its name: lengths or activations where the network ranks classes by them."""
    head = getattr(opened.model, "head", None)
    if isinstance(head, LengthHead):
        return predictions.scores, "capsule length"
    return predictions.probabilities, "activation" if isinstance(head, ActivationHead) else "probability"


def worst_mistakes(values: Any, present: Any, chosen: Any, most: int = 12) -> list[int]:
    """The images wrongly classified with the largest margin of the longest wrong capsule over the shortest right one.

    Of equal margins the earlier image comes first. Where nothing is right, or nothing wrong, 0.5 stands for it.

    Shapes: values [n, j], present and chosen bool [n, j]
    """
    values, present, chosen = np.asarray(values, dtype=np.float64), np.asarray(present), np.asarray(chosen)
    wrong = np.where(present, -np.inf, values).max(axis=1)
    right = np.where(present, values, np.inf).min(axis=1)
    margins = np.where(np.isfinite(wrong), wrong, 0.5) - np.where(np.isfinite(right), right, 0.5)
    mistaken = np.nonzero((present != chosen).any(axis=1))[0]
    order = np.argsort(-margins[mistaken], kind="stable")[:most]
    return [int(index) for index in mistaken[order]]


def mistakes(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Those with the largest margin of the longest wrong capsule over the shortest right one."""
    (run,) = runs
    found = told(run)
    worst = worst_mistakes(found.values, found.right, found.said, whole(options, "most"))
    test = run.data().test.to("cpu")
    _check_same(test, found, worst)
    images = test.gather(found.indices[worst]).images
    cases = [
        {
            "picture": packed(picture(image)),
            "labels": classes_of(found.right[k]),
            "chosen": classes_of(found.said[k]),
            "values": found.values[k].tolist(),
            "number": int(found.indices[k]),
        }
        for image, k in zip(images, worst, strict=True)
    ]
    wrong = int((found.said != found.right).any(dim=1).sum())
    names = list(run.class_names)
    return {"names": names, "measure": found.measure, "images": len(found.right), "wrong": wrong, "cases": cases}


def reconstructions(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Inputs, and below them the pictures of the capsules of the prediction and, where that is wrong, of the label.

    Below a picture stand (label, prediction, target), where the names are short, or else the target. Of several runs
    each has blocks of its own; the recognised images are the same where all of them are tested on the same.
    """
    blocks: list[dict[str, Any]] = []
    for run in runs:
        need_decoder(run)
    found = [told(run) for run in runs]
    good = _all_recognise(found)
    for run, name, each in zip(runs, names_of(runs), found, strict=True):
        head = f"{name}: " if len(runs) > 1 else ""
        blocks += [{**block, "title": f"{head}{block['title']}"} for block in _blocks(run, each, good)]
    return {"images": len(found[0].right), "blocks": blocks}


def _all_recognise(found: Sequence[Told]) -> Tensor | None:
    """The images that every run recognises; None where the runs are not tested on the same, or have none in common.

    Shapes: -> bool [n]
    """
    first = found[0].right
    if any(each.right.shape != first.shape or not torch.equal(each.right, first) for each in found):
        return None
    good = torch.stack([(each.said == each.right).all(dim=1) for each in found]).all(dim=0)
    return good if bool(good.any()) else None


def _blocks(run: Opened, found: Told, recognised: Tensor | None) -> list[dict[str, Any]]:
    _check_same(run.data().test.to("cpu"), found, [])
    one = take(run, 1, [0])
    shape = picture(one.seen()[0]).shape
    columns = columns_for(shape[0], shape[1])
    own = (found.said == found.right).all(dim=1)
    good = _spread(own if recognised is None else recognised, found.right, columns)
    worst = worst_mistakes(found.values, found.right, found.said, columns)
    blocks = []
    for title, rows, ways in (
        ("Recognised", good, [("reconstruction", found.said, "right")]),
        ("Mistaken", worst, [("as predicted", found.said, "wrong"), ("as labelled", found.right, "right")]),
    ):
        if rows:
            sample = take(run, 1, found.indices[rows].tolist())
            blocks.append({"title": title, "strips": _strips(run, sample, found, rows, ways)})
    return blocks


def classes_of(row: Tensor) -> list[int]:
    return [int(k) for k in row.nonzero()[:, 0]]


def _strips(
    run: Opened, sample: Sample, found: Told, rows: Sequence[int], ways: Sequence[tuple[str, Tensor, str]]
) -> list[dict[str, Any]]:
    """A strip of inputs, and one for each object of each way."""
    names, images = run.class_names, sample.seen()
    spans = [brightness(image) for image in images]
    labels = [classes_of(found.right[k]) for k in rows]
    said = [classes_of(found.said[k]) for k in rows]
    inputs = [packed(picture(image, *span)) for image, span in zip(images, spans, strict=True)]
    words = [", ".join(names[k] for k in each) or "nothing" for each in labels]
    strips: list[dict[str, Any]] = [{"name": "input", "pictures": inputs, "words": words, "tone": "plain"}]
    single = max(map(len, names)) <= SHORT and all(len(each) == 1 for each in (*labels, *said))
    for name, classes, tone in ways:
        targets = [classes_of(classes[k]) for k in rows]
        most = max(1, *map(len, targets))
        padded = torch.tensor([[*each, *[-1] * (most - len(each))] for each in targets])
        with torch.inference_mode():
            pictures = run.model(images.to(run.device), padded.to(run.device)).reconstruction.cpu()
        for k in range(most):
            some = [
                packed(picture(drawn[k], *span)) if k < len(each) else None
                for drawn, each, span in zip(pictures, targets, spans, strict=True)
            ]
            words = [names[each[k]] if k < len(each) else "" for each in targets]
            if single:
                triples = zip(labels, said, targets, strict=True)
                words = [f"({', '.join(names[each[0]] for each in triple)})" for triple in triples]
            strips.append({"name": "" if k else name, "pictures": some, "words": words, "tone": tone})
    return strips


def _spread(good: Tensor, right: Tensor, most: int) -> list[int]:
    """Images recognised, of as many different classes as there are."""
    rows = good.nonzero()[:SEARCHED, 0].tolist()
    first: dict[tuple[int, ...], int] = {}
    for row in rows:
        first.setdefault(tuple(classes_of(right[row])), row)
    different = [first[key] for key in sorted(first)][:most]
    return [*different, *(row for row in rows if row not in different)][:most]


def _check_same(test: Split, found: Told, some: Sequence[int]) -> None:
    """Refuses a test set that is not the one the predictions are of, as far as a few labels tell."""
    which = torch.tensor([*range(min(64, len(found.indices))), *some])
    if not torch.equal(test.gather(found.indices[which]).labels, found.labels[which]):
        raise ValueError("the test set has changed since the run was tested")
