"""The way of a digit's capsule while the digit turns, seen in its first two principal components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import answers, chosen_image, whole
from torchcaps.analysis.transform import moved
from torchcaps.pictures import brightness, packed, picture
from torchcaps.runs import Opened

PICTURES = 9  # of the digit on its way


def principal(poses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, the first two principal directions, and the shares of the variance that these hold.

    Shapes: [n, d] -> [d], [d, 2], [2]
    """
    mean = poses.double().mean(dim=0)
    _, values, axes = torch.linalg.svd(poses.double() - mean, full_matrices=False)
    if len(axes) < 2:
        raise ValueError(f"two principal components need two poses of two dimensions, got {list(poses.shape)}")
    return mean, axes[:2].T, values[:2].square() / values.square().sum()


def principal_path(poses: Tensor) -> Tensor:
    """Poses in their first two principal components, centred. The last lies to the right of the first.

    Shapes: [n, d] -> [n, 2]
    """
    mean, axes, _ = principal(poses)
    path = (poses.double() - mean) @ axes
    sides = torch.where(path[-1] < path[0], -1.0, 1.0)
    return path * torch.stack([sides[0], sides[1]])


def trajectory(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    (run,) = runs
    reach, step = whole(options, "degrees"), whole(options, "step")
    if reach % step or reach < 2 * step:
        raise ValueError(f"degrees={reach} is no multiple of step={step}, from twice on")
    sample = chosen_image(run, options)
    label = int(sample.first_labels()[0])
    angles = torch.arange(-reach, reach + 1, step)
    turned = moved(sample.images.expand(len(angles), -1, -1, -1), degrees=angles)
    seen = sample.seen(turned)
    found = answers(run.model, seen)
    if found.poses is None:
        raise ValueError(f"{run.recipe.model} of {run.folder} has no class capsules")
    poses = found.poses[:, label if found.poses.shape[1] > 1 else 0]
    _, _, shares = principal(poses)
    labels = [k for k in sample.labels.flatten().tolist() if k >= 0]
    rivals = found.probabilities.clone()
    rivals[:, labels] = -1
    rival = int(rivals.amax(dim=0).argmax())
    span = brightness(seen)
    shown = torch.linspace(0, len(angles) - 1, PICTURES).round().long()
    return {
        "model": run.recipe.model,
        "class": run.class_names[label],
        "image": int(sample.indices[0]),
        "angles": angles.tolist(),
        "path": principal_path(poses).tolist(),
        "shares": [float(share) if share.isfinite() else None for share in shares],
        "length": found.probabilities[:, label].tolist(),
        "rival": run.class_names[rival],
        "rival_length": found.probabilities[:, rival].tolist(),
        "pictures": [{"angle": int(angles[k]), "picture": packed(picture(seen[k], *span))} for k in shown],
    }
