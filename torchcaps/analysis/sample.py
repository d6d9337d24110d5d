"""Images of a run's test set, and the class capsules that its network has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.augment import apply
from torchcaps.data.batches import Order, as_float
from torchcaps.evaluate import THRESHOLD, Predictions, longest
from torchcaps.losses import multi_hot
from torchcaps.runs import Opened

BATCH = 256  # images that go through a network at once


@dataclass(frozen=True)
class Sample:
    """Images in [0, 1], as they are before the protocol's transform; `seen` is what the network gets of them.

    `targets` are the objects of an image one by one, where the set has them; `indices` are places in the test set.

    Shapes: images [n, c, h, w], labels [n] or [n, k], targets [n, k, c, h, w], indices [n]
    """

    images: Tensor
    labels: Tensor
    targets: Tensor | None
    indices: Tensor
    steps: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def seen(self, images: Tensor | None = None) -> Tensor:
        """Shapes: [b, c, h, w] -> [b, c, h', w'], the first where the protocol has several crops of an image"""
        seen = apply(self.steps, self.images if images is None else images)
        return seen[:, 0] if seen.dim() == 5 else seen

    def first_labels(self) -> Tensor:
        """Shapes: -> [n]"""
        return self.labels if self.labels.dim() == 1 else self.labels[:, 0]


def take(run: Opened, count: int, places: Sequence[int] | None = None) -> Sample:
    """Some images of the test set: always the same ones of each, spread over it, or those at `places`."""
    if count < 1:
        raise ValueError(f"at least one image must be looked at, got {count}")
    data = run.data()
    test = data.test.to("cpu")
    if places is not None:
        outside = [place for place in places if not 0 <= place < len(test)]
        if outside:
            raise ValueError(f"the test set has images 0 to {len(test) - 1:,}, and no {outside[0]}")
        indices = torch.tensor(places, dtype=torch.int64)
    elif count >= len(test):
        indices = torch.arange(len(test))
    else:
        _, indices = next(Order(len(test), count, samples=count).shares(0))
        indices = indices.sort().values
    batch = test.gather(indices)
    targets = None if batch.targets is None else as_float(batch.targets)
    return Sample(as_float(batch.images), batch.labels, targets, indices, tuple(data.test_transform))


class Answers(NamedTuple):
    """What a network says of images. `poses` is None of one that has no capsules.

    Shapes: scores and probabilities [n, j], poses [n, j, d]
    """

    scores: Tensor
    probabilities: Tensor
    poses: Tensor | None


def answers(network: Any, images: Tensor) -> Answers:
    """A batch at a time on the network's device, nothing decoded; what comes back is on the CPU.

    Shapes: images [n, c, h, w]
    """
    device = next(network.parameters()).device
    scores: list[Tensor] = []
    poses: list[Tensor] = []
    with torch.inference_mode():
        for some in images.split(BATCH):
            capsules, found, _ = network.encode(some.to(device))
            scores.append(found.cpu())
            poses += [] if capsules is None else [capsules.poses.cpu()]
        together = torch.cat(scores)
        return Answers(together, network.head.probabilities(together), torch.cat(poses) if poses else None)


def chosen(predictions: Predictions) -> Tensor:
    """What was said of each image: the k longest where every image has k labels, else those from the threshold on.

    Shapes: -> bool [n, j]
    """
    counts = multi_hot(predictions.labels, predictions.scores.shape[1]).sum(dim=1)
    if bool((counts == counts[0]).all()):
        return longest(predictions.scores, counts)
    return predictions.probabilities >= THRESHOLD


def right(predictions: Predictions) -> Tensor:
    """Whether exactly the labels of an image are named.

    Shapes: -> bool [n]
    """
    present = multi_hot(predictions.labels, predictions.scores.shape[1])
    return (chosen(predictions) == present).all(dim=1)


def accuracy(network: Any, images: Tensor, labels: Tensor) -> float:
    """The share of images of which exactly the labels are named.

    Shapes: images [n, c, h, w], labels [n] or [n, k]
    """
    found = answers(network, images)
    return float(right(Predictions(found.scores, found.probabilities, labels)).double().mean())


def class_poses(run: Opened, images: Tensor, classes: Tensor) -> Tensor:
    """The capsule of one class for each image; of a network that has hidden features for all classes, these.

    Shapes: images [n, c, h, w], classes [n] -> [n, d]
    """
    poses = answers(run.model, images).poses
    if poses is None:
        raise ValueError(f"{run.recipe.model} of {run.folder} has no class capsules")
    rows = classes if poses.shape[1] > 1 else torch.zeros_like(classes)
    return poses[torch.arange(len(poses)), rows]


def need_decoder(run: Opened) -> None:
    """Refuses a network that has no decoder, or one that was not trained."""
    if getattr(run.model, "decoder", None) is None:
        raise ValueError(f"{run.folder} has no decoder to draw with; a preset built with decoder=True has one")
    if not run.recipe.reconstruction:
        raise ValueError(
            f"the decoder of {run.folder} was not trained, as its recipe has reconstruction 0; --reconstruction sets it"
        )


def need_two_labels(run: Opened, sample: Sample) -> None:
    if sample.labels.dim() != 2 or sample.labels.shape[1] != 2:
        raise ValueError(f"{run.folder} was trained on {run.recipe.data}, whose images do not show two digits each")


def chosen_image(run: Opened, options: Mapping[str, Any]) -> Sample:
    """The image that the options name by its place in the test set, or the first one of a class that is recognised."""
    if options.get("image") is not None:
        return take(run, 1, [whole(options, "image", 0)])
    names = list(run.class_names)
    wanted = options.get("digit")
    if wanted is not None and str(wanted) not in names:
        raise ValueError(f"{run.folder} knows no class {str(wanted)!r}; it has {', '.join(names)}")
    sample = take(run, 500)
    mine = torch.ones(len(sample), dtype=torch.bool)
    if wanted is not None:
        mine = sample.first_labels() == names.index(str(wanted))
        if not mine.any():
            raise ValueError(f"none of {len(sample)} test images shows {wanted}; image=N takes one by its place")
    best = answers(run.model, sample.seen()).scores.argmax(dim=1)
    good = (mine & (best == sample.first_labels())).nonzero()[:, 0]
    row = int(good[0] if len(good) else mine.nonzero()[0, 0])
    return take(run, 1, [int(sample.indices[row])])


def whole(options: Mapping[str, Any], name: str, least: int = 1) -> int:
    """An option that is a whole number."""
    value = options[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is a whole number from {least}, got {value!r}")
    return value
