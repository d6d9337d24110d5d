"""What a network says of a set of images, and how well that fits: errors, calibration, confusion, ensembles.

All errors are fractions, all functions pure but `predict`. Of equal scores the class with the lower number comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.functional import check_labels, widen
from torchcaps.losses import multi_hot

Figures = dict[str, Any]  # plain values, as JSON keeps them

BINS = 15
THRESHOLD = 0.5  # from here on a class counts as present, where it is not known how many there are


class Predictions(NamedTuple):
    """Of a whole split, on the CPU.

    `scores` are what classes are ranked by: the network's own, or the mean probabilities of several crops or networks.

    Shapes: scores and probabilities [n, j], labels [n] or [n, k] padded with -1
    """

    scores: Tensor
    probabilities: Tensor
    labels: Tensor


class Bin(NamedTuple):
    """What came true of the predictions made with a confidence above `low` and up to `high`."""

    low: float
    high: float
    cases: int
    confidence: float  # the mean; 0 in an empty bin
    accuracy: float


def predict(model: nn.Module, batches: Iterable[Any]) -> Predictions:
    """Each image once, in evaluation mode; afterwards every module is in the mode it was in.

    Several crops of an image count by the sum of their probabilities, kept as their mean.

    Args:
        batches: of images [b, c, h, w], or [b, n, c, h, w] for n crops, and labels, as `Batches.epoch` gives them; of
            Batches itself, epoch 0.
    """
    device = next(model.parameters()).device
    scores, probabilities, labels = [], [], []
    with _evaluating(model), torch.inference_mode():
        for images, wanted, *_ in batches.epoch(0) if hasattr(batches, "epoch") else batches:
            if not len(images):
                continue
            crops = images.shape[1] if images.dim() == 5 else 0
            output = model((images.flatten(0, 1) if crops else images).to(device))
            own, likely = widen(output.scores), widen(output.probabilities)
            if crops:
                own = likely = likely.unflatten(0, (-1, crops)).sum(dim=1) / crops
            scores.append(own)
            probabilities.append(likely)
            labels.append(wanted)
        if not scores:
            raise ValueError("there are no images to evaluate; the split or its batches are empty")
        found = [torch.cat(parts).cpu() for parts in (scores, probabilities, labels)]
    return checked(Predictions(*(part.clone() for part in found)))  # clones are ordinary tensors again


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def checked(predictions: Predictions) -> Predictions:
    """The same, if they fit each other and every score is a number."""
    scores, probabilities, labels = predictions
    if scores.dim() != 2 or not len(scores) or scores.shape != probabilities.shape:
        raise ValueError(
            "scores and probabilities must both be [n, j] of at least one image, "
            f"got {list(scores.shape)} and {list(probabilities.shape)}"
        )
    check_labels(labels, len(scores), scores.shape[1])
    broken = (scores.isnan() | probabilities.isnan()).any(dim=1)
    if broken.any():
        raise ValueError(
            f"{int(broken.sum())} of {len(scores)} images have scores that are not numbers, "
            f"the first is image {int(broken.nonzero()[0])}; the network has diverged"
        )
    return predictions


def ranking(scores: Tensor) -> Tensor:
    """Classes from the highest score to the lowest.

    Shapes: [n, j] -> int64 [n, j]
    """
    return scores.argsort(dim=1, descending=True, stable=True)


def longest(scores: Tensor, counts: Tensor) -> Tensor:
    """The classes with the highest scores, as many for each image as `counts` says.

    Shapes: scores [n, j], counts [n] -> bool [n, j]
    """
    return ranking(scores).argsort(dim=1) < counts[:, None]


def error(scores: Tensor, labels: Tensor) -> float:
    """Top-1: the share of images whose highest score is not their label's.

    Shapes: scores [n, j], labels [n]
    """
    check_labels(labels, len(scores), scores.shape[1])
    if labels.dim() != 1:
        raise ValueError(f"the top-1 error is for one label an image, got labels {list(labels.shape)}")
    return float((ranking(scores)[:, 0] != labels).double().mean())


def exact_match_error(chosen: Tensor, present: Tensor) -> float:
    """The share of images whose chosen classes are not exactly those present.

    Shapes: both bool [n, j]
    """
    return float((chosen != present).any(dim=1).double().mean())


def per_digit_error(chosen: Tensor, present: Tensor) -> float:
    """The share of all labels that were not chosen (half credit for one of two).

    Shapes: both bool [n, j]
    """
    return int((present & ~chosen).sum()) / max(1, int(present.sum()))


def at_least_one_error(chosen: Tensor, present: Tensor) -> float:
    """The share of labelled images of which no label was chosen.

    Shapes: both bool [n, j]
    """
    labelled = present.any(dim=1)
    return int((labelled & ~(chosen & present).any(dim=1)).sum()) / max(1, int(labelled.sum()))


def confusion_matrix(scores: Tensor, labels: Tensor) -> Tensor:
    """Rows are labels, columns what was chosen instead; each row sums to the images that have the label.

    Of several labels the k longest are chosen, and one that is missed counts in equal parts for the wrong ones chosen.

    Shapes: scores [n, j], labels [n] or [n, k] -> float64 [j, j]
    """
    present = multi_hot(labels, scores.shape[1])
    chosen = longest(scores, present.sum(dim=1))
    missed, wrong = (present & ~chosen).double(), (chosen & ~present).double()
    shares = wrong / wrong.sum(dim=1, keepdim=True).clamp(min=1)
    return missed.T @ shares + torch.diag((present & chosen).sum(dim=0).double())


def reliability(confidences: Tensor, correct: Tensor, bins: int = BINS) -> list[Bin]:
    """How often predictions came true, by how sure they were, in bins of equal width; 0 belongs to the first.

    Shapes: both [n]
    """
    if bins < 1:
        raise ValueError(f"{bins} bins cannot hold anything; 15 are usual")
    if confidences.shape != correct.shape or confidences.dim() != 1:
        raise ValueError(f"both must be [n], got {list(confidences.shape)} and {list(correct.shape)}")
    confidences = confidences.double()
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError("confidences must lie between 0 and 1")
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    place = torch.bucketize(confidences, edges[1:])
    counts = torch.bincount(place, minlength=bins)
    sure = torch.bincount(place, confidences, minlength=bins) / counts.clamp(min=1)
    true = torch.bincount(place, correct.double(), minlength=bins) / counts.clamp(min=1)
    columns = (edges[:-1], edges[1:], counts, sure, true)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def expected_calibration_error(table: Sequence[Bin]) -> float:
    """The mean distance between confidence and accuracy, each bin by what it holds (Guo et al. 2017)."""
    total = sum(each.cases for each in table)
    return sum(each.cases * abs(each.confidence - each.accuracy) for each in table) / max(1, total)


def calibration(predictions: Predictions, bins: int = BINS) -> list[Bin]:
    """The reliability of the class named, or, of several labels, of every class's probability that it is present."""
    scores, probabilities, labels = predictions
    if labels.dim() == 2:
        return reliability(probabilities.flatten(), multi_hot(labels, scores.shape[1]).flatten(), bins)
    best = ranking(scores)[:, 0]
    return reliability(probabilities.gather(1, best[:, None])[:, 0], best == labels, bins)


def standard_error(fraction: float, images: int) -> float:
    """Of a share seen in so many images, as for a binomial."""
    if not 0 <= fraction <= 1 or images < 1:
        raise ValueError(f"a share between 0 and 1 of at least one image is needed, got {fraction} of {images}")
    return math.sqrt(fraction * (1 - fraction) / images)


def ensemble(members: Sequence[Predictions]) -> Predictions:
    """Networks together, by the sum of their probabilities (of capsules: their lengths), kept as the mean."""
    if not members:
        raise ValueError("an ensemble needs at least one member, got none")
    first = members[0]
    for number, other in enumerate(members[1:], 2):
        if other.probabilities.shape != first.probabilities.shape or not torch.equal(other.labels, first.labels):
            raise ValueError(f"member {number} was evaluated on other images or classes than the first")
    if len(members) == 1:
        return first
    mean = torch.stack([each.probabilities.double() for each in members]).sum(dim=0) / len(members)
    return Predictions(mean, mean, first.labels)


def choose_members(validation: Mapping[str, Predictions], size: int) -> tuple[str, ...]:
    """The names of an ensemble's members: each is the one that helps those before it most, on the validation set.

    Equal errors are told apart by the squared error of the probabilities, then by order.
    """
    if not 1 <= size <= len(validation):
        raise ValueError(f"an ensemble of {size} cannot be chosen from {len(validation)} networks")
    (first, own), *others = validation.items()
    for name, other in others:
        if not torch.equal(own.labels, other.labels):
            raise ValueError(f"{name} held out other images than {first}, so which is better cannot be told by them")
    chosen: list[str] = []
    for _ in range(size):
        left = [name for name in validation if name not in chosen]
        together = {name: ensemble([validation[each] for each in (*chosen, name)]) for name in left}
        chosen.append(min(left, key=lambda name: _quality(together[name])))
    return tuple(chosen)


def _quality(predictions: Predictions) -> tuple[float, float]:
    """Lower is better."""
    present = multi_hot(predictions.labels, predictions.scores.shape[1])
    squares = (predictions.probabilities.double() - present.double()).square().sum(dim=1).mean()
    return headline_error(predictions), float(squares)


def headline_error(predictions: Predictions) -> float:
    """Top-1 or, for several labels, exact match: what networks are selected by."""
    scores, _, labels = predictions
    if labels.dim() == 1:
        return error(scores, labels)
    return exact_match_error(_chosen(predictions)[0], multi_hot(labels, scores.shape[1]))


def _chosen(predictions: Predictions) -> tuple[Tensor, str]:
    """The k longest where every image has k labels; where their number varies, those from the threshold on."""
    scores, probabilities, labels = predictions
    counts = multi_hot(labels, scores.shape[1]).sum(dim=1)
    if bool((counts == counts[0]).all()):
        return longest(scores, counts), "longest"
    return probabilities >= THRESHOLD, "threshold"


def figures(predictions: Predictions, bins: int = BINS) -> Figures:
    """The errors and the calibration, as plain values.

    `error` is the top-1 error or, for several labels, that of the exact match: of the k longest where every image has k
    labels, else of those with a probability from 0.5 on; `chosen_by` says which. Both are there by name as well.
    """
    scores, probabilities, labels = checked(predictions)
    wrong = headline_error(predictions)
    table = calibration(predictions, bins)
    found: Figures = {
        "images": len(scores),
        "error": wrong,
        "accuracy": 1 - wrong,
        "standard_error": standard_error(wrong, len(scores)),
        "calibration_error": expected_calibration_error(table),
        "reliability": [each._asdict() for each in table],
    }
    if labels.dim() == 2:
        present = multi_hot(labels, scores.shape[1])
        chosen, by = _chosen(predictions)
        most = longest(scores, present.sum(dim=1))
        found |= {
            "chosen_by": by,
            "exact_match_error": wrong,
            "exact_match_accuracy": 1 - wrong,
            "exact_match_error_longest": exact_match_error(most, present),
            "exact_match_error_threshold": exact_match_error(probabilities >= THRESHOLD, present),
            "per_digit_error": per_digit_error(chosen, present),
            "at_least_one_error": at_least_one_error(chosen, present),
        }
    return found
