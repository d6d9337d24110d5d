"""A trained run put to use: which class an image is of, how sure that is, and "none of these" where nothing is.

>>> predictor = Predictor.open("runs/folder-photos-efficient_capsnet/seed-0")
>>> predictor("cat.jpg").label, predictor("cat.jpg").probability
>>> for file, answer in predictor.stream(predictor.files("holiday")): ...

An image is treated as the run's test images were: scaled, cropped, in grey or colour, normalised.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.data import protocols
from torchcaps.data.augment import apply
from torchcaps.data.batches import as_float
from torchcaps.data.errors import DataError
from torchcaps.data.images import THREADS, fit_image, pillow, read_image
from torchcaps.data.listing import files_in, is_image
from torchcaps.data.random import Draws
from torchcaps.evaluate import THRESHOLD, Predictions, checked, predict, ranking
from torchcaps.losses import multi_hot
from torchcaps.models.heads import ActivationHead, LengthHead
from torchcaps.recipes import Recipe, views
from torchcaps.runs import Opened, open_run

KEPT = 0.99  # of the images that are recognised, those that still are with the threshold
DEVIATIONS = 3  # below the mean, where too few images were recognised to leave any out
SIDES = {"mnist": 28, "fashion_mnist": 28, "cifar10": 32, "cifar100": 32, "svhn": 32, "smallnorb": 96}
ADVICE = "it was passed over"


class Named(NamedTuple):
    """A class, and how present it is: the length or activation of its capsule, or its share of a softmax."""

    label: str
    probability: float


class Prediction(NamedTuple):
    """What a network says of one image.

    `label` is None for "none of these", where the best class is below the threshold. `ranked` has all classes, the most
    probable first; `found` those that are named: one, or of networks for several objects as many as there are.
    """

    label: str | None
    probability: float
    runner_up: Named | None
    found: tuple[Named, ...]
    ranked: tuple[Named, ...]


def choose_threshold(predictions: Predictions, kept: float = KEPT) -> float:
    """The highest threshold with which 99 % of the correctly classified images of a validation set keep their class.

    What counts is the probability of the best class, where that is one of the image's labels. Fewer than a hundred such
    images do not tell what one in a hundred is like: then it is the lowest of them or, where that is lower, three
    deviations below their mean; of one or none it is 0, and everything gets a class. An image is "none of these" where
    its best class is *below* the threshold.

    For capsules the probability is a length or an activation, which each class has by itself: a strange picture can
    leave them all short. A softmax shares out 1 among the classes it knows, so there the threshold only finds pictures
    that look like several of them.
    """
    if not 0 < kept <= 1:
        raise ValueError(f"kept is the share of images that keep their class, above 0 and at most 1, got {kept}")
    scores, probabilities, labels = checked(predictions)
    best = ranking(scores)[:, :1]
    right = multi_hot(labels, scores.shape[1]).gather(1, best)[:, 0]
    sure = probabilities.gather(1, best)[:, 0][right].double().sort().values
    if len(sure) < 2:
        return 0.0
    below = int((1 - kept) * len(sure) + 1e-9)
    if below:
        return float(sure[below])
    spread = float(sure.std()) * math.sqrt(1 + 1 / len(sure))
    return max(0.0, min(float(sure[0]), float(sure.mean()) - DEVIATIONS * spread))


class Predictor:
    """Names images with the network of a run.

    Args:
        threshold: instead of the run's own; 0 gives every image a class.
        batch_size: images that go through the network at once.
    """

    def __init__(self, run: Opened, threshold: float | None = None, batch_size: int = 32):
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"the threshold is a probability from 0 to 1, got {threshold}")
        if batch_size < 1:
            raise ValueError(f"a batch has at least one image, got {batch_size}")
        self.run, self.batch_size = run, batch_size
        self.threshold = run.threshold if threshold is None else threshold
        self.steps = steps_of(run)
        self.raw = raw_image(run.recipe, self.steps, run.image)
        head = getattr(run.model, "head", None)
        self.word = "length" if isinstance(head, LengthHead) else "probability"
        self.word = "activation" if isinstance(head, ActivationHead) else self.word
        self.objects = int(getattr(run.model, "objects", 1))
        self.varying = self.objects > 1 and (run.recipe.data == "folder" or getattr(head, "several", False))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, device: str = "auto", **options: Any) -> Predictor:
        """Of a finished run's folder; the options are the predictor's own."""
        return cls(open_run(folder, device=device), **options)

    def __call__(self, images: Any) -> Any:
        """A Prediction of one image, or a list of them for a list or a batch of images.

        An image is a file's name, a Pillow image, or an array or tensor: [h, w], [h, w, c], [c, h, w] in the network's
        own size and channels, in bytes or as floats in [0, 1]; several may be stacked as [n, ...].
        """
        single = not isinstance(images, list | tuple) and not (hasattr(images, "ndim") and images.ndim == 4)
        pixels = [self.pixels(each) for each in ([images] if single else images)]
        parts = [pixels[at : at + self.batch_size] for at in range(0, len(pixels), self.batch_size)]
        named = [prediction for part in parts for prediction in self._name(torch.stack(part))]
        return named[0] if single else named

    def stream(self, files: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, Prediction | DataError]]:
        """Each file with what it shows, or with why it cannot be read; a batch at a time, so a folder may be large."""
        left = (os.fspath(file) for file in files)
        with ThreadPoolExecutor(THREADS) as pool:
            while part := list(islice(left, self.batch_size)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", pillow().DecompressionBombWarning)  # refused with a sentence
                    read = list(pool.map(self._try, part))
                pixels = [each for each in read if isinstance(each, Tensor)]
                named = iter(self._name(torch.stack(pixels)) if pixels else [])
                for file, each in zip(part, read, strict=True):
                    yield file, each if isinstance(each, DataError) else next(named)

    def files(self, *places: str | os.PathLike[str]) -> list[str]:
        """Files as they are named, and all images in folders and in the folders in these."""
        found: list[str] = []
        for place in places:
            if not os.path.isdir(place):
                found.append(os.fspath(place))
                continue
            inside = [file for file in files_in(place) if is_image(file)]
            if not inside:
                raise DataError(f"{os.fspath(place)} holds no image; name a folder that does, or files")
            found += inside
        return found

    def pixels(self, image: Any) -> Tensor:
        """Shapes: -> uint8 [c, h, w], as the run's data set holds its images"""
        if isinstance(image, str | os.PathLike):
            self._check_channels()
            return read_image(os.fspath(image), self.raw, ADVICE)
        if isinstance(image, np.ndarray | Tensor):
            image = torch.as_tensor(image).detach().cpu()
            if image.is_floating_point():
                if not bool(((image >= 0) & (image <= 1)).all()):
                    raise ValueError("an image of floats has pixels from 0 to 1; divide bytes by 255 first")
                image = (image * 255).round().to(torch.uint8)
            if image.dtype != torch.uint8:
                raise ValueError(f"an image has bytes or floats from 0 to 1, got {image.dtype}")
            if tuple(image.shape) == self.raw:
                return image
            image = self._drawn(image)
        self._check_channels()
        return fit_image(image, self.raw)

    def _drawn(self, image: Tensor) -> Any:
        """A Pillow image of bytes."""
        if image.dim() == 3 and image.shape[-1] not in (1, 3, 4) and image.shape[0] in (1, 3, 4):
            image = image.permute(1, 2, 0)
        if image.dim() not in (2, 3) or (image.dim() == 3 and image.shape[-1] not in (1, 3, 4)) or not image.numel():
            raise ValueError(
                f"an image is [h, w], [h, w, c] or {list(self.raw)} with 1, 3 or 4 channels, got {list(image.shape)}"
            )
        return pillow().fromarray((image[..., 0] if image.shape[-1] == 1 and image.dim() == 3 else image).numpy())

    def _check_channels(self) -> None:
        if self.raw[0] not in (1, 3):
            raise ValueError(
                f"{self.run.folder} was trained on images of {self.raw[0]} channels, which files do not have; "
                f"give arrays of {' x '.join(map(str, self.raw))}"
            )

    def _try(self, file: str) -> Tensor | DataError:
        try:
            return self.pixels(file)
        except DataError as error:
            return error

    def _name(self, images: Tensor) -> list[Prediction]:
        """Shapes: images uint8 [n, c, h, w]"""
        draws = Draws(0, 0, torch.arange(len(images), device=self.run.device))
        seen = apply(self.steps, as_float(images.to(self.run.device)), draws)
        scores, probabilities, _ = predict(self.run.model, [(seen, torch.zeros(len(images), dtype=torch.int64))])
        order = ranking(scores)
        rows = zip(order.tolist(), probabilities.gather(1, order).tolist(), strict=True)
        return [self._answer(classes, values) for classes, values in rows]

    def _answer(self, classes: Sequence[int], values: Sequence[float]) -> Prediction:
        ranked = tuple(Named(self.run.class_names[k], value) for k, value in zip(classes, values, strict=True))
        best, runner_up = ranked[0], ranked[1] if len(ranked) > 1 else None
        if best.probability < (self.threshold or 0):
            return Prediction(None, best.probability, runner_up, (), ranked)
        more = [each for each in ranked[1 : self.objects] if not self.varying or each.probability >= THRESHOLD]
        rest = ranked[1 + len(more) :]
        return Prediction(best.label, best.probability, rest[0] if rest else None, (best, *more), ranked)


def steps_of(run: Opened) -> tuple[Any, ...]:
    """What the run's protocol does to test images; the data set is loaded only where its statistics are needed."""
    protocol = protocol_of(run.recipe)
    if protocol is None:
        return ()
    several = views(run.recipe.data_args) > 1 and protocol.crops is not None
    steps = (protocol.crops or ()) if several else protocol.test
    if any(isinstance(step, protocols.standardise_split) for step in steps):
        data = run.data()
        return protocols.bind(steps, data.test, data.train)
    return steps


def protocol_of(recipe: Recipe) -> protocols.Protocol | None:
    """The recipe's protocol with those of its data_args that are the protocol's own."""
    if recipe.protocol is None:
        return None
    known = protocols.protocol_options(recipe.protocol)
    options = {word: value for word, value in recipe.data_args.items() if word in known}
    return protocols.find(recipe.protocol, recipe.data, **options)


def raw_image(recipe: Recipe, steps: Sequence[Any], image: tuple[int, int, int]) -> tuple[int, int, int]:
    """Channels, height and width before the steps: of the data set's own images."""
    if not any(getattr(step, "geometric", False) for step in steps):
        return image
    protocol = protocol_of(recipe)
    side = SIDES.get(recipe.data, protocol.options.get("size") if protocol else None)
    if not isinstance(side, int):
        raise ValueError(f"it is not known how large images of {recipe.data} are before {recipe.protocol} crops them")
    return image[0], side, side
