"""Networks that have been trained already, whose answers a student learns from beside the labels (Hinton et al. 2015).

They see what the student sees, as it is augmented and mixed, so an image that was bent beyond recognition comes with
the doubt that is due to it (Beyer et al. 2022). What they say of several classes is in the loss as mixup's labels are.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.data import DataSet, protocols
from torchcaps.functional import widen
from torchcaps.models.pretrained import find_pretrained
from torchcaps.recipes import Recipe, from_dict
from torchcaps.train.folder import load_saved

ABSENT, PRESENT = 0.1, 0.9  # the lengths from which on the margin loss asks for no less and no more


class Teacher(NamedTuple):
    """A network in evaluation mode, and how it came to be; `sha256` is that of its file."""

    network: nn.Module
    recipe: Recipe
    image: tuple[int, int, int]
    class_names: tuple[str, ...]
    sha256: str


class Teachers:
    """All of a recipe's teachers, of equal weight.

    Args:
        data: what the student is trained on, which the teachers must have been trained on too.
    """

    def __init__(self, recipe: Recipe, data: DataSet, device: torch.device):
        self.networks: list[nn.Module] = []
        self.lengths: list[bool] = []  # whether a teacher's probabilities are lengths that the margin loss has shaped
        self.sums: dict[str, str] = {}
        for name in recipe.teachers:
            teacher = open_teacher(name)
            check_teacher(name, teacher, recipe, data)
            network = teacher.network.to(device).requires_grad_(False)
            if isinstance(getattr(network, "decoder", None), nn.Module):
                network.decoder = None  # type: ignore[assignment]
            if device.type != "mps":
                network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.networks.append(network)
            self.lengths.append(teacher.recipe.loss == "margin")
            self.sums[name] = teacher.sha256

    def __len__(self) -> int:
        return len(self.networks)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """How present each class is, from 0 to 1, in the mean of all teachers.

        Shapes: images [b, c, h, w] -> [b, j]
        """
        said = []
        for network, lengths in zip(self.networks, self.lengths, strict=True):
            probabilities = widen(network(images).probabilities)
            said.append(((probabilities - ABSENT) / (PRESENT - ABSENT)).clamp(0, 1) if lengths else probabilities)
        return torch.stack(said).mean(dim=0)

    def check_same(self, before: dict[str, str]) -> None:
        """Refuses to go on with other teachers than a run began with."""
        for name, found in self.sums.items():
            if before.get(name, found) != found:
                raise ValueError(f"the teacher {name} is not the network any more that this run began with")


def open_teacher(name: str) -> Teacher:
    """The network of a finished run, of exported weights, or of the package by its name."""
    folder = Path(name)
    try:
        if (folder / "recipe.json").exists():
            if not (folder / "final.json").exists():
                raise ValueError("it has not finished its own training")
            path = folder / "weights.safetensors"
            network, recipe, _, _, image, class_names = load_saved(path)
            return Teacher(network, recipe, image, class_names, hashlib.sha256(path.read_bytes()).hexdigest())
        found = find_pretrained(name)
        recipe = from_dict(found.about["result"]["recipe"])
        return Teacher(found.load(), recipe, found.image, found.class_names, found.about["sha256"])
    except LookupError as error:
        raise ValueError(f"the teacher {name} does not say how it was trained: {error} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"the teacher {name} cannot be opened: {error}") from None


def check_teacher(name: str, teacher: Teacher, student: Recipe, data: DataSet) -> None:
    """Refuses one that knows other classes or images than the student, or may have seen what that is judged by."""
    own = teacher.recipe
    if teacher.class_names != tuple(data.class_names):
        known = ", ".join(teacher.class_names)
        raise ValueError(f"the teacher {name} knows other classes than {data.name} has: {known}")
    if teacher.image != tuple(data.image):
        sizes = [" x ".join(map(str, image)) for image in (teacher.image, data.image)]
        raise ValueError(f"the teacher {name} takes images of {sizes[0]}, and these are {sizes[1]}")
    theirs, mine = treatment(own), treatment(student)
    for word, value in mine.items():
        if (other := theirs[word]) != value:
            raise ValueError(f"the teacher {name} was trained with {word} {other!r}, which must be {value!r} as here")
    if own.select == "best" and theirs["validation"] == "test":
        raise ValueError(f"the teacher {name} was chosen on the test set, by which its student will be judged")
    if own.loss == "cross_entropy" and student.loss != "cross_entropy" and data.train[0].label.dim():
        raise ValueError(f"the teacher {name} shares one probability among an image's objects, where each has its own")


def treatment(recipe: Recipe) -> dict[str, Any]:
    """What decides which images a network is trained on and how it takes them: all but augmentation and views."""
    known = protocols.protocol_options(recipe.protocol) if recipe.protocol else ()
    options = {word: value for word, value in recipe.data_args.items() if word != "crops"}
    own = {word: options.pop(word) for word in list(options) if word in known}
    paper = protocols.find(recipe.protocol, recipe.data, **own) if recipe.protocol else None
    rule = (paper.validation if paper else 0) if recipe.validation is None else recipe.validation
    return {"data": recipe.data, "data_args": options, "preparation": paper.test if paper else (), "validation": rule}
