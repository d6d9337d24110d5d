"""How much of a capsule's way under a transformation its first principal components hold (Mazzia 2021, table 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, class_poses, take, whole
from torchcaps.analysis.transform import moved
from torchcaps.runs import Opened

WAYS = {"x": ("right", 5), "y": ("down", 5), "rotation": ("degrees", 25)}  # -5 to 5 pixels, -25 to 25 degrees, by 1
PRINTED = {
    "random": {"x": 25.57, "y": 25.54, "rotation": 13.49},
    "CapsNet": {"x": 83.78, "y": 79.82, "rotation": 88.01},
    "Efficient-CapsNet": {"x": 89.69, "y": 87.28, "rotation": 88.75},
}
TRIALS = 10_000


def variance_shares(poses: Tensor) -> Tensor:
    """Eigenvalues of the covariance of some poses over their sum, the largest first (Eq. 8 to 11).

    Poses that do not move at all give NaN.

    Shapes: [..., n, d] -> [..., min(n, d)]
    """
    centred = poses.double() - poses.double().mean(dim=-2, keepdim=True)
    values = torch.linalg.svdvals(centred).square()
    return values / values.sum(dim=-1, keepdim=True)


def random_variance(vectors: int, dim: int, trials: int = TRIALS, seed: int = 0) -> Tensor:
    """Shares of vectors with uniform entries: for 16 dimensions the first holds 25.5 % of 11 vectors, 13.5 % of 51.

    Shapes: -> [trials, min(vectors, dim)]
    """
    generator = torch.Generator().manual_seed(seed)
    return variance_shares(torch.rand(trials, vectors, dim, generator=generator, dtype=torch.float64))


def poses_on_the_way(run: Opened, sample: Sample, way: str) -> Tensor:
    """The capsule of each image's label under all transformations of a kind, from the most negative on.

    Shapes: -> [n, k, d]
    """
    word, reach = WAYS[way]
    labels = sample.first_labels()
    found = [
        class_poses(run, sample.seen(moved(sample.images, **{word: float(k)})), labels)  # type: ignore[arg-type]
        for k in range(-reach, reach + 1)
    ]
    return torch.stack(found, dim=1)


def variance(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Shares in per cent: of the first component with its deviation over images, and cumulated, ours and random."""
    (run,) = runs
    sample = take(run, whole(options, "images"))
    ways: dict[str, Any] = {}
    dim = 0
    for way in WAYS:
        poses = poses_on_the_way(run, sample, way)
        dim = poses.shape[-1]
        ways[way] = {
            "transformations": poses.shape[1],
            "ours": _summary(variance_shares(poses)),
            "random": _summary(random_variance(poses.shape[1], dim)),
        }
    return {
        "model": run.recipe.model,
        "data": run.recipe.data,
        "images": len(sample),
        "dim": dim,
        "ways": ways,
        "printed": PRINTED,
    }


def _summary(shares: Tensor) -> dict[str, Any]:
    """Shapes: [n, components]"""
    known = 100 * shares[shares.isfinite().all(dim=1)]
    if not len(known):
        raise ValueError("the capsules do not move at all under these transformations, so there is no variance")
    return {
        "first": float(known[:, 0].mean()),
        "deviation": float(known[:, 0].std()) if len(known) > 1 else 0.0,
        "cumulated": known.cumsum(dim=1).mean(dim=0).tolist(),
    }
