"""Two overlaid digits taken apart: what the capsules of each explain of the image (Sabour, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, answers, need_decoder, need_two_labels, take, whole
from torchcaps.evaluate import longest
from torchcaps.losses import multi_hot
from torchcaps.pictures import brightness, packed, picture
from torchcaps.runs import Opened

ON = 0.5  # from here on a pixel belongs to a digit
MARKS = {"label": "", "P": "P", "*": "*"}


def overlap(reconstruction: Tensor, target: Tensor, on: float = ON) -> Tensor:
    """Pixels of a digit that are found, over those that are found or are there.

    Shapes: both [..., c, h, w] -> [...]
    """
    ours, theirs = (pixels.amax(dim=-3) >= on for pixels in (reconstruction, target))
    both = (ours & theirs).sum(dim=(-2, -1)).double()
    return both / (ours | theirs).sum(dim=(-2, -1)).clamp(min=1)


def segments(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Pairs that are recognised, pairs that are not (from the labels and from the prediction, marked P), and
    reconstructions of a digit that is neither (marked *).

    `overlap` is the mean over the digits of recognised images, where the data has them one by one.
    """
    (run,) = runs
    need_decoder(run)
    count = whole(options, "images")
    sample = take(run, count)
    need_two_labels(run, sample)
    found = answers(run.model, sample.seen())
    present = multi_hot(sample.labels, len(run.class_names))
    chosen = longest(found.scores, present.sum(dim=1))
    two = present.sum(dim=1) == 2
    right = (two & (present == chosen).all(dim=1)).nonzero()[:, 0].tolist()
    wrong = (two & (present & chosen).any(dim=1) & (present != chosen).any(dim=1)).nonzero()[:, 0].tolist()
    columns: list[dict[str, Any]] = []
    for row in right[: whole(options, "recognised")]:
        columns.append(_column(run, sample, row, sample.labels[row].tolist(), "label"))
    for row in wrong[: whole(options, "mistaken", 0)]:
        labels = sample.labels[row].tolist()
        kept = [k for k in labels if chosen[row, k]]
        said = [k for k in chosen[row].nonzero()[:, 0].tolist() if k not in labels]
        columns.append(_column(run, sample, row, labels, "label"))
        predicted = [k if k in kept else said[0] for k in labels]
        columns.append(_column(run, sample, row, predicted, "P"))
    for row in right[-whole(options, "neither", 0) or len(right) :]:
        scores = found.scores[row].masked_fill(present[row] | chosen[row], -1)
        columns.append(_column(run, sample, row, [int(sample.labels[row, 0]), int(scores.argmax())], "*"))
    return {
        "model": run.recipe.model,
        "names": list(run.class_names),
        "images": len(sample),
        "recognised": len(right),
        "overlap": _mean_overlap(run, sample, right[:200]),
        "columns": columns,
    }


def _column(run: Opened, sample: Sample, row: int, classes: Sequence[int], why: str) -> dict[str, Any]:
    """One image with the pictures of two classes; `ours` may name classes that the image does not show."""
    image = sample.seen(sample.images[row : row + 1])
    pictures = _reconstructed(run, image, torch.tensor([classes]))[0]
    span = brightness(image[0])
    shown: dict[str, Any] = {
        "image": int(sample.indices[row]),
        "labels": sample.labels[row].tolist(),
        "reconstructed": list(classes),
        "mark": MARKS[why],
        "input": packed(picture(image[0], *span)),
        "ours": [packed(picture(each, *span)) for each in pictures],
        "theirs": None,
    }
    if sample.targets is not None:
        theirs = sample.seen(sample.targets[row])
        shown["theirs"] = [packed(picture(each, *span)) for each in theirs]
    return shown


def _reconstructed(run: Opened, images: Tensor, classes: Tensor) -> Tensor:
    """Shapes: images [n, c, h, w], classes [n, k] -> [n, k, c, h, w]"""
    with torch.inference_mode():
        pictures: Tensor = run.model(images.to(run.device), classes.to(run.device)).reconstruction
    return pictures.cpu()


def _mean_overlap(run: Opened, sample: Sample, rows: Sequence[int]) -> float | None:
    if sample.targets is None or not rows:
        return None
    ours = _reconstructed(run, sample.seen(sample.images[rows]), sample.labels[rows])
    theirs = sample.seen(sample.targets[rows].flatten(0, 1)).unflatten(0, (len(rows), 2))
    return float(overlap(ours, theirs).mean())
