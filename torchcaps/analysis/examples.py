"""Test images one by one: the worst mistakes, and what the decoder makes of recognised and of mistaken images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, need_decoder, take, whole
from torchcaps.data import Split
from torchcaps.data.batches import Order
from torchcaps.evaluate import THRESHOLD, Predictions, longest
from torchcaps.figures.mistakes import worst_mistakes
from torchcaps.figures.pictures import brightness, packed, picture
from torchcaps.figures.reconstructions import columns_for
from torchcaps.losses import multi_hot
from torchcaps.models.heads import ActivationHead, LengthHead
from torchcaps.runs import Opened
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


def told(run: Opened) -> Told:
    """From the run's folder; the test set is not read again, but for a few labels that tell whether it is the same."""
    path = run.folder / "predictions.safetensors"
    if not path.exists():
        raise ValueError(f"{run.folder} has not been tested yet; torchcaps evaluate {run.folder} does it")
    predictions = Predictions(**checkpoint.load_weights(path)[0])
    values, measure = lengths(run, predictions)
    test = run.data().test.to("cpu")
    length = len(predictions.scores)
    if length > len(test):
        raise ValueError("the test set has changed since the run was tested")
    _, indices = next(Order(len(test), length, shuffle=length < len(test), samples=length).shares(0))
    right = multi_hot(predictions.labels, len(run.class_names))
    return Told(chosen(predictions), right, values, measure, indices, predictions.labels)


def chosen(predictions: Predictions) -> Tensor:
    """What was said of each image: the k longest where every image has k labels, else those from the threshold on.

    Shapes: -> bool [n, j]
    """
    counts = multi_hot(predictions.labels, predictions.scores.shape[1]).sum(dim=1)
    if predictions.labels.dim() == 1 or bool((counts == counts[0]).all()):
        return longest(predictions.scores, counts)
    return predictions.probabilities >= THRESHOLD


def lengths(opened: Opened, predictions: Predictions) -> tuple[Tensor, str]:
    """What the bars show, and its name: lengths or activations where the network ranks classes by them."""
    head = getattr(opened.model, "head", None)
    if isinstance(head, LengthHead):
        return predictions.scores, "capsule length"
    return predictions.probabilities, "activation" if isinstance(head, ActivationHead) else "probability"


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

    Below a picture stand (label, prediction, target), where the names are short, or else the target.
    """
    (run,) = runs
    need_decoder(run)
    found = told(run)
    _check_same(run.data().test.to("cpu"), found, [])
    one = take(run, 1, [0])
    shape = picture(one.seen()[0]).shape
    columns = columns_for(shape[0], shape[1])
    good = _spread((found.said == found.right).all(dim=1), found.right, columns)
    worst = worst_mistakes(found.values, found.right, found.said, columns)
    blocks = []
    for title, rows, ways in (
        ("Recognised", good, [("reconstruction", found.said, "right")]),
        ("Mistaken", worst, [("as predicted", found.said, "wrong"), ("as labelled", found.right, "right")]),
    ):
        if rows:
            sample = take(run, 1, found.indices[rows].tolist())
            blocks.append({"title": title, "strips": _strips(run, sample, found, rows, ways)})
    return {"names": list(run.class_names), "images": len(found.right), "blocks": blocks}


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
