"""Networks that have been trained already, whose answers a student learns from beside the labels (Hinton et al. 2015).

They see what the student sees, as it is augmented and mixed, so an image that was bent beyond recognition comes with
the doubt that is due to it (Beyer et al. 2022). What they say of several classes is in the loss as mixup's labels are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps.data import DataSet
from torchcaps.functional import widen
from torchcaps.models.pretrained import find_pretrained
from torchcaps.recipes import Recipe, from_dict
from torchcaps.train.folder import load_saved

ABSENT, PRESENT = 0.1, 0.9  # the lengths from which on the margin loss asks for no less and no more


class Teachers:
    """All of a recipe's teachers, of equal weight.

    Args:
        data: what the student is trained on, by whose protocol the teachers must have been trained too.
    """

    def __init__(self, recipe: Recipe, data: DataSet, device: torch.device):
        self.networks: list[nn.Module] = []
        self.lengths: list[bool] = []  # whether a teacher's probabilities are lengths that the margin loss has shaped
        for name in recipe.teachers:
            network, own, class_names = open_teacher(name)
            check_teacher(name, own, class_names, recipe, data)
            network = network.to(device).eval().requires_grad_(False)
            self.networks.append(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
            self.lengths.append(own.loss == "margin")

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


def open_teacher(name: str) -> tuple[nn.Module, Recipe, tuple[str, ...]]:
    """The network of a finished run, of exported weights or of the package, with its recipe and the class names."""
    folder = Path(name)
    if (folder / "recipe.json").exists():
        if not (folder / "final.json").exists():
            raise ValueError(f"the teacher {name} has not finished its own training")
        saved = load_saved(folder / "weights.safetensors")
        return saved.model, saved.recipe, saved.class_names
    found = find_pretrained(name)
    try:
        recipe = from_dict(found.about["result"]["recipe"])
    except (LookupError, ValueError) as error:
        raise ValueError(f"the teacher {name} does not say how it was trained: {error}") from None
    return found.load(), recipe, found.class_names


def check_teacher(name: str, own: Recipe, class_names: tuple[str, ...], student: Recipe, data: DataSet) -> None:
    """Refuses one that knows other classes, sees images in another way, or has seen those that are held out here."""
    if class_names != tuple(data.class_names):
        raise ValueError(f"the teacher {name} knows other classes than {data.name} has: {', '.join(class_names)}")
    for word in ("data", "protocol"):
        if (theirs := getattr(own, word)) != (mine := getattr(student, word)):
            raise ValueError(f"the teacher {name} was trained with {word} {theirs!r}, which must be {mine!r} as here")
    if data.validation is not None and own.validation != student.validation:
        raise ValueError(
            f"the teacher {name} has seen images that are held out here: its validation is {own.validation}, "
            f"which must be {student.validation} as here"
        )
