"""One dimension of a capsule moved at a time, and what the decoder makes of it (Sabour 4, Choi 3, Mazzia 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, answers, chosen_image, need_decoder, whole
from torchcaps.analysis.settings import names_of
from torchcaps.models.heads import LengthHead
from torchcaps.pictures import brightness, packed, picture
from torchcaps.runs import Opened
from torchcaps.types import Capsules

REACH, STEPS = 0.25, 5  # each way; of 0.05


def amounts(scale: float = 1.0) -> list[float]:
    """-0.25 to 0.25 in steps of 0.05, times the length that a capsule can have."""
    return [round(k * REACH / STEPS, 12) * scale for k in range(-STEPS, STEPS + 1)]


def perturbed(pose: Tensor, amounts: Sequence[float]) -> Tensor:
    """The pose with each amount added to each of its dimensions, one at a time.

    Shapes: pose [d], amounts of s -> [d, s, d]
    """
    by = torch.tensor(amounts, dtype=pose.dtype, device=pose.device)
    each = torch.eye(len(pose), dtype=pose.dtype, device=pose.device)
    return pose + by[None, :, None] * each[:, None, :]


def decoded(network: Any, poses: Tensor, target: int) -> Tensor:
    """The picture of one class's capsule in each of n sets of capsules.

    Shapes: poses [n, j, d] -> [n, c, h, w]
    """
    device = next(network.parameters()).device
    labels = torch.full((len(poses), 1), target, device=device)
    with torch.inference_mode():
        pictures: Tensor = network.reconstruct(Capsules(poses.to(device)), None, labels)
    return pictures[:, 0].cpu()


def scale_of(network: Any, pose: Tensor) -> tuple[float, str]:
    """What 1 is for the length of a capsule, and why: the most it can be, or else the length that it has.

    Choi's capsules reach sqrt(d); poses that no squashing bounds have no most.
    """
    head = getattr(network, "head", None)
    if not isinstance(head, LengthHead):
        return float(pose.norm()), "the capsule's length, as nothing bounds it"
    if head.longest == 1:
        return 1.0, "1, the most that a capsule can be long"
    return head.longest, f"√{len(pose)}, the most that a capsule can be long"


def perturbations(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """A block for each run; runs on the same data are shown with the image that is chosen for the first of them."""
    for run in runs:
        need_decoder(run)
    blocks: list[dict[str, Any]] = []
    chosen: dict[str, int] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        sample = chosen_image(run, {**options, "image": chosen.get(run.recipe.data, options["image"])})
        chosen[run.recipe.data] = int(sample.indices[0])
        blocks.append({"name": name, **_block(run, sample, whole(options, "dims"))})
    return {"runs": blocks}


def _block(run: Opened, sample: Sample, most: int) -> dict[str, Any]:
    """All dimensions of the capsule of an image's label, or of many those that change the picture most.

    `effect` is the mean absolute change of a pixel at both ends of each dimension.
    """
    image, target = sample.seen(), int(sample.first_labels()[0])
    poses = answers(run.model, image).poses
    if poses is None:
        raise ValueError(f"{run.recipe.model} of {run.folder} has no class capsules")
    row = target if poses.shape[1] > 1 else 0
    pose = poses[0, row]
    scale, why = scale_of(run.model, pose)
    by = amounts(scale)
    moved = perturbed(pose, by)
    many = poses.expand(moved.shape[0] * moved.shape[1], -1, -1).clone()
    many[:, row] = moved.flatten(0, 1)
    pictures = decoded(run.model, many, target).unflatten(0, moved.shape[:2])
    middle = pictures[:, STEPS : STEPS + 1]
    effect = (pictures - middle)[:, [0, -1]].abs().double().mean(dim=(1, 2, 3, 4))
    shown = effect.argsort(descending=True, stable=True)[:most].sort().values.tolist()
    span = brightness(image[0])
    return {
        "model": run.recipe.model,
        "class": run.class_names[target],
        "image": int(sample.indices[0]),
        "input": packed(picture(image[0], *span)),
        "scale": scale,
        "scale_is": why,
        "amounts": by,
        "effect": effect.tolist(),
        "shown": shown,
        "pictures": [[packed(picture(each, *span)) for each in pictures[k]] for k in shown],
    }
