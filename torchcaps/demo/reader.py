"""A network that answers the page: what it sees in a picture, what it draws of it, and where its pose goes.

Nothing is kept from one request to the next, so several people may ask at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchcaps.analysis.coupling import coupling_map
from torchcaps.analysis.perturb import REACH, decoded, scale_of
from torchcaps.analysis.trajectory import principal
from torchcaps.analysis.transform import moved
from torchcaps.data import Split
from torchcaps.data.augment import apply
from torchcaps.data.batches import as_float
from torchcaps.data.random import Draws
from torchcaps.demo.ink import BOX, Unreadable, as_digit, decode, open_ink, open_picture
from torchcaps.demo.paint import grey_or_colour, heat, thumbnails, two_colours
from torchcaps.demo.request import APART, check, number, place
from torchcaps.types import Image

SAMPLES = Path(__file__).parent / "samples" / "mnist.npz"
EACH = 6  # test images of each class to choose from
PRESENT = 0.5  # a second object is one from this length on
TURNS, SHIFTS = range(-60, 61, 6), range(-6, 7)  # degrees and pixels of a pose's paths


@dataclass
class Reader:
    """`raw` is the size of the data set's own images, on which `steps` work before the network sees them.

    `test` gets the test set, or says with a ValueError why it is not there. A picture whose longest class is below
    `threshold` is none of these. `undrawn` is the sentence that says why the decoder cannot be used, where it cannot.
    """

    name: str
    model: nn.Module
    class_names: tuple[str, ...]
    raw: Image
    steps: tuple[Any, ...]
    data: str
    test: Callable[[], Split]
    threshold: float | None = None
    undrawn: str = ""

    @property
    def digits(self) -> bool:
        """Whether a drawing is brought to the form of MNIST's digits, or of the small ones in the package."""
        return self.data == "digits" or "affnist" in self.data or ("mnist" in self.data and "fashion" not in self.data)

    @property
    def objects(self) -> int:
        return int(getattr(self.model, "objects", 1))

    @property
    def decoder(self) -> bool:
        return not self.undrawn and getattr(self.model, "decoder", None) is not None

    @cached_property
    def dim(self) -> int:
        """Size of a class capsule's pose, 0 where there are no capsules."""
        capsules = self.ask(torch.zeros(1, *self.raw)).capsules
        return 0 if capsules is None else int(capsules.poses.shape[-1])

    @cached_property
    def samples(self) -> tuple[Tensor, list[int]]:
        """Test images to choose from, and their labels; none where the data set is not on this computer.

        Shapes: uint8 [n, c, h, w]
        """
        if self.digits and self.data != "digits":
            images, labels = sixty_digits()
            return _padded(images, self.raw), labels.tolist()
        try:
            test = self.test()
            labels = test.labels if test.labels.dim() == 1 else test.labels[:, 0]  # type: ignore[attr-defined]
            rows = torch.cat([(labels == k).nonzero()[:EACH, 0] for k in range(len(self.class_names))])
            images = test.gather(rows).images
            return images.view(len(rows), *self.raw), labels[rows].tolist()
        except (ValueError, OSError):
            return torch.zeros(0, *self.raw, dtype=torch.uint8), []

    def about(self) -> dict[str, Any]:
        """What the page must know of a network before it asks."""
        images, labels = self.samples
        notes = []
        dim = self.dim
        if not dim:
            notes.append(f"{self.name} has no capsules, so there is no pose to bend and no coupling to show.")
        elif not self.decoder:
            notes.append(f"{self.undrawn}.")
        if not labels:
            notes.append(
                f"The test set of {self.data} is not on this computer; torchcaps data get {self.data} fetches it."
            )
        return {
            "name": self.name,
            "classes": list(self.class_names),
            "dim": dim,
            "decoder": self.decoder,
            "data": self.data,
            "digits": self.digits,
            "objects": self.objects,
            "labels": labels,
            "samples": thumbnails(images) if labels else "",
            "note": " ".join(notes),
        }

    def warm_up(self) -> None:
        """Does everything once, so that the first who asks need not wait for what is done only once."""
        about = self.about()
        source = {"kind": "sample", "index": 0}
        if about["labels"]:
            answer = self.answer({"source": source})
            if answer["pose"]:
                self.path({"source": source, "capsule": answer["capsule"]})

    def ask(self, pictures: Tensor) -> Any:
        """Shapes: pictures [n, c, h, w] in [0, 1] -> Output"""
        with torch.no_grad():
            return self.model(self.seen(pictures))

    def seen(self, pictures: Tensor) -> Tensor:
        """What the network is given. Shapes: [n, c, h, w] -> [n, c', h', w']"""
        return apply(self.steps, pictures, Draws(0, 0, torch.arange(len(pictures))))

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Class lengths, found classes, and pictures of input, reconstruction, bent capsule and coupling."""
        asked = check(request, len(self.class_names))
        still, several = self.picture(asked.source)
        picture = moved(still[None], degrees=asked.turn, right=asked.right, down=asked.down)
        output = self.ask(picture)
        lengths = output.probabilities[0]
        found = self.found(lengths, 2 if several else self.objects)
        capsule = found[0] if asked.capsule is None else asked.capsule
        if several and found[-1] == self.samples[1][asked.source["first"]]:
            found.reverse()  # each in the colour in which it was chosen
        answer: dict[str, Any] = {
            "input": grey_or_colour(picture[0]),
            "lengths": [round(float(value), 4) for value in lengths],
            "found": found,
            "none": bool(lengths.max() < (self.threshold or 0)),
            "capsule": capsule,
            "pose": None,
            "reconstruction": None,
            "bent": None,
            "coupling": None,
        }
        if output.capsules is None:
            return answer
        poses = output.capsules.poses
        row = capsule if poses.shape[1] > 1 else 0
        answer["pose"] = [round(float(value), 5) for value in poses[0, row]]
        if self.decoder:
            drawn = torch.cat([decoded(self.model, poses, k) for k in found])
            answer["reconstruction"] = two_colours(drawn) if len(found) == 2 else grey_or_colour(drawn[0])
            bent = poses.clone()
            bent[0, row] += self.offsets(asked.bend, poses[0, row])
            answer["bent"] = grey_or_colour(decoded(self.model, bent, capsule)[0])
        answer["coupling"] = self.coupling(picture, capsule)
        return answer

    def found(self, lengths: Tensor, objects: int) -> list[int]:
        """The longest class and, of those that may be there besides, the ones that are long enough."""
        best = lengths.topk(min(objects, len(lengths)))
        return [int(k) for n, (k, v) in enumerate(zip(best.indices, best.values, strict=True)) if not n or v >= PRESENT]

    def coupling(self, picture: Tensor, capsule: int) -> str | None:
        """The part of the picture that votes for a class, or None where routing keeps no record of it."""
        seen = self.seen(picture)
        try:
            return heat(coupling_map(self.model, seen[0], capsule), seen[0])
        except ValueError:
            return None

    def path(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Where turning and shifting lead a capsule's pose, in the first two principal components of these paths.

        The page projects every later pose itself: (pose - mean) @ axes.
        """
        asked = check(request, len(self.class_names))
        still, _ = self.picture(asked.source)
        if asked.capsule is None:
            raise ValueError("a path is that of one capsule; choose which")
        capsule = asked.capsule
        zeros = torch.zeros
        turns, shifts = torch.tensor([*TURNS]), torch.tensor([*SHIFTS])
        parts = [len(turns), len(shifts), len(shifts)]
        degrees = torch.cat([turns, zeros(2 * len(shifts))])
        right = torch.cat([zeros(len(turns)), shifts, zeros(len(shifts))])
        down = torch.cat([zeros(len(turns) + len(shifts)), shifts])
        images = moved(still[None].expand(len(degrees), -1, -1, -1), degrees=degrees, right=right, down=down)
        capsules = self.ask(images).capsules
        if capsules is None:
            raise ValueError(f"{self.name} has no capsules, so no pose goes anywhere")
        poses = capsules.poses[:, capsule if capsules.poses.shape[1] > 1 else 0]
        mean, axes, shares = principal(poses)
        ways = ((poses.double() - mean) @ axes).split(parts)
        return {
            "capsule": capsule,
            "mean": mean.tolist(),
            "axes": axes.tolist(),
            "shares": shares.nan_to_num(0).tolist(),
            "ways": [
                {"name": name, "steps": list(steps), "points": points.tolist()}
                for name, steps, points in zip(("turn", "right", "down"), (TURNS, SHIFTS, SHIFTS), ways, strict=True)
            ],
        }

    def picture(self, source: Mapping[str, Any]) -> tuple[Tensor, bool]:
        """The picture asked for, and whether two were laid over each other. Shapes: -> [c, h, w] in [0, 1]"""
        kind = source.get("kind")
        if kind == "sample":
            return self.sample(source.get("index")), False
        if kind == "overlay":
            apart = number(source.get("apart") or 0, "apart", APART) / 2
            both = torch.stack([self.sample(source.get("first")), self.sample(source.get("second"))])
            return moved(both, right=torch.tensor([-apart, apart])).amax(0), True
        if kind not in ("drawing", "upload"):
            raise Unreadable("there is no picture yet; draw one, choose one or upload one")
        content = decode(source.get("picture", ""))
        if self.digits:
            box = min(self.raw[1:]) if self.data == "digits" else BOX
            return as_float(as_digit(open_ink(content), self.raw, box)[None])[0], False
        if kind == "drawing" and not bool(open_ink(content).any()):
            raise Unreadable("the canvas is empty; draw on it")
        return as_float(open_picture(content, self.raw)[None])[0], False

    def sample(self, index: Any) -> Tensor:
        images, labels = self.samples
        return as_float(images[place(index, len(labels), "test image")][None])[0]

    def offsets(self, bend: Sequence[float], pose: Tensor) -> Tensor:
        """What the sliders, from -1 to 1, add to a pose: up to a quarter of its longest, as in the papers.

        Shapes: pose [d] -> [d]
        """
        reach = REACH * scale_of(self.model, pose)[0]
        return reach * torch.tensor([*bend, *[0.0] * len(pose)][: len(pose)])


def sixty_digits() -> tuple[Tensor, Tensor]:
    """The first six of each class in MNIST's test set, which come with the package.

    Shapes: -> uint8 [60, 1, 28, 28], int64 [60]
    """
    with np.load(SAMPLES, allow_pickle=False) as content:
        return torch.from_numpy(content["images"])[:, None], torch.from_numpy(content["labels"]).long()


def _padded(images: Tensor, raw: Image) -> Tensor:
    """Shapes: [n, 1, h, w] -> [n, c, h', w']"""
    down, right = (raw[1] - images.shape[2]) // 2, (raw[2] - images.shape[3]) // 2
    field = torch.zeros(len(images), *raw, dtype=images.dtype)
    field[:, :, down : down + images.shape[2], right : right + images.shape[3]] = images
    return field
