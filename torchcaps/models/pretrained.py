"""Trained weights: those that come with the package, by name, and those in a folder that `torchcaps export` wrote.

>>> create_model("efficient_capsnet_mnist", pretrained=True)
>>> load_pretrained("folder")

Either is a file of safetensors and a JSON file that says what they are: preset, options, class names, what is done to
an image before the network sees it, the checksum of the weights, and the line of results that they were tested with.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from torch import nn

from torchcaps.models.registry import create_model, find_preset

SHIPPED = Path(__file__).parents[1] / "weights"
LIMIT = 12_000_000  # bytes of weights that may come with the package
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # in a folder
NEEDED = {
    "preset": str,
    "options": dict,
    "image": list,
    "class_names": list,
    "sha256": str,
    "result": dict,
}


@dataclass(frozen=True)
class Pretrained:
    """Weights on the disk; `about` is all that is known of them."""

    name: str
    path: Path
    about: dict[str, Any]

    @property
    def preset(self) -> str:
        return self.about["preset"]

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.about["class_names"])

    @property
    def image(self) -> tuple[int, int, int]:
        channels, height, width = self.about["image"]
        return channels, height, width

    @property
    def options(self) -> dict[str, Any]:
        """All that the preset must be built with."""
        return {**self.about["options"], "image": self.image, "classes": len(self.class_names)}

    def load(self, **options: Any) -> nn.Module:
        """The network in evaluation mode, every bit of its weights checked. Options that do not fit are refused."""
        for word, value in options.items():
            given = tuple(value) if isinstance(value, list) else value
            own = self.options.get(word, find_preset(self.preset).options.get(word, given))
            if given != (tuple(own) if isinstance(own, list) else own):
                raise ValueError(
                    f"the weights of {self.name} are for {word}={own!r}, not {value!r}; leave {word} out, or pretrained"
                )
        content = self.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.about["sha256"]:
            raise ValueError(f"{self.path} is damaged: its content does not match the checksum; get it anew")
        try:
            weights = tensors_from_bytes(content)
        except SafetensorError as error:
            raise ValueError(f"{self.path} holds no weights: {error}") from None
        network = create_model(self.preset, **{**self.options, **options})
        try:
            network.load_state_dict(weights)
        except RuntimeError:
            raise ValueError(f"the weights in {self.path} do not fit {self.preset} as it is built now") from None
        return network.eval()


def shipped() -> list[str]:
    """Names of the weights that come with the package, in order."""
    return sorted(path.stem for path in SHIPPED.glob("*.json") if path.with_suffix(".safetensors").exists())


def find_pretrained(where: str | os.PathLike[str]) -> Pretrained:
    """Weights by the name they are shipped under, or in a folder that `torchcaps export` wrote.

    A folder of such a name that holds no weights, but figures of them perhaps, does not hide those of the package.
    """
    folder = Path(where)
    if (folder / CONFIG).is_file():
        return _read(folder.resolve().name, folder / CONFIG, folder / WEIGHTS)
    other = folder.is_dir() and (folder.name not in shipped() or (folder / WEIGHTS).exists())
    if len(folder.parts) > 1 or other:
        raise ValueError(f"{folder} is no folder that torchcaps export wrote, as it has no {CONFIG}")
    return find_shipped(os.fspath(where))


def find_shipped(name: str) -> Pretrained:
    """Weights that come with the package."""
    if name not in shipped():
        known = f"those that come with the package are {', '.join(shipped())}" if shipped() else "none come along yet"
        raise ValueError(f"there are no weights for {name}; {known}")
    return _read(name, SHIPPED / f"{name}.json", SHIPPED / f"{name}.safetensors")


def load_pretrained(where: str | os.PathLike[str], **options: Any) -> nn.Module:
    """A trained network, in evaluation mode, from a folder that `torchcaps export` wrote or by a shipped name."""
    return find_pretrained(where).load(**options)


def _read(name: str, path: Path, weights: Path) -> Pretrained:
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for word, kind in NEEDED.items():
        if not isinstance(about, dict) or not isinstance(about.get(word), kind):
            raise ValueError(f"{path} does not say what the weights are: its {word} is missing or of another kind")
    if len(about["image"]) != 3 or not weights.is_file():
        reason = f"{weights.name} is not beside it" if not weights.is_file() else "its image has not three sizes"
        raise ValueError(f"{path} cannot be used, as {reason}")
    return Pretrained(name, weights, about)
