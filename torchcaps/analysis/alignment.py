"""Whether a transformation of the image moves its capsule along one line (Choi 2019, table 3 and figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.analysis.sample import Sample, class_poses, take, whole
from torchcaps.analysis.transform import moved
from torchcaps.runs import Opened

STEPS = 5  # transformations of each kind: 5 to 25 degrees, 1 to 5 pixels
WAYS = {  # y+ is down
    "Rot+": ("degrees", 5.0),
    "Rot-": ("degrees", -5.0),
    "x+": ("right", 1.0),
    "x-": ("right", -1.0),
    "y+": ("down", 1.0),
    "y-": ("down", -1.0),
}
PRINTED = {"Rot+": 0.88, "Rot-": 0.83, "x+": 0.86, "x-": 0.83, "y+": 0.84, "y-": 0.84}  # all digits of MNIST
PRINTED_RANDOM = (0.311, 0.262)  # which does not follow from Eq. 15
PRINTED_DIM = 32
TRIALS = 20_000
BINS = 40


def align_vectors(differences: Tensor) -> Tensor:
    """The first right-singular vector of some differences, not centred, pointing to where they do by and large.

    Eq. 13 and 14, and footnote 5 for the direction: where not all differences point the same way, their sum decides.

    Shapes: [..., n, d] -> [..., d]
    """
    vectors = torch.linalg.svd(differences.double(), full_matrices=False).Vh[..., 0, :]
    side = (differences.double() @ vectors[..., None])[..., 0].sum(-1, keepdim=True)
    return torch.where(side < 0, -vectors, vectors)


def alignment_ratios(differences: Tensor) -> Tensor:
    """Eq. 15, |v_i . v| / |v_i|: 1 where all differences lie on one line. NaN where a difference is 0.

    Shapes: [..., n, d] -> [..., n]
    """
    along = (differences.double() @ align_vectors(differences)[..., None])[..., 0].abs()
    return along / differences.double().norm(dim=-1)


def random_ratios(dim: int, vectors: int = STEPS, trials: int = TRIALS, seed: int = 0) -> tuple[float, float]:
    """Mean and deviation of the ratios of standard normal vectors: 0.463 and 0.269 for five of 32 dimensions."""
    generator = torch.Generator().manual_seed(seed)
    ratios = alignment_ratios(torch.randn(trials, vectors, dim, generator=generator, dtype=torch.float64))
    return float(ratios.mean()), float(ratios.std())


def differences(run: Opened, sample: Sample, way: str, still: Tensor) -> Tensor:
    """How far each of five transformations moves the capsule of an image's label away from where it is.

    Shapes: still [n, d] -> [n, 5, d]
    """
    word, step = WAYS[way]
    labels = sample.first_labels()
    changed = [
        class_poses(run, sample.seen(moved(sample.images, **{word: step * (k + 1)})), labels)  # type: ignore[arg-type]
        for k in range(STEPS)
    ]
    return torch.stack(changed, dim=1) - still[:, None]


def alignment(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Mean ratios for each class and transformation, for all, and of random vectors by Eq. 15 and as printed."""
    (run,) = runs
    sample = take(run, whole(options, "images"))
    labels = sample.first_labels()
    means: dict[str, list[float | None]] = {}
    total: dict[str, float | None] = {}
    still = class_poses(run, sample.seen(), labels)
    dim = still.shape[1]
    for way in WAYS:
        ratios = alignment_ratios(differences(run, sample, way, still))
        means[way] = [_mean(ratios[labels == k]) for k in range(len(run.class_names))]
        total[way] = _mean(ratios)
    random = {str(each): random_ratios(each) for each in sorted({dim, PRINTED_DIM})}
    return {
        "model": run.recipe.model,
        "data": run.recipe.data,
        "images": len(sample),
        "dim": dim,
        "names": list(run.class_names),
        "ways": list(WAYS),
        "ratios": means,
        "all": total,
        "random": {each: {"mean": mean, "deviation": spread} for each, (mean, spread) in random.items()},
        "printed": {"all": PRINTED, "random": {"mean": PRINTED_RANDOM[0], "deviation": PRINTED_RANDOM[1]}},
    }


def cosines(runs: Sequence[Opened], options: dict[str, Any]) -> dict[str, Any]:
    """Cosines of the align vectors of a transformation and its opposite: -1 for one line, 1 for one that turns back."""
    (run,) = runs
    sample = take(run, whole(options, "images"))
    still = class_poses(run, sample.seen(), sample.first_labels())
    edges = torch.arange(-BINS, BINS + 1, 2, dtype=torch.float64) / BINS
    counts, shares = {}, {}
    for word in ("Rot", "x", "y"):
        plus, minus = (align_vectors(differences(run, sample, f"{word}{sign}", still)) for sign in "+-")
        found = (plus * minus).sum(dim=-1).clamp(-1, 1)
        counts[word] = torch.histogram(found, edges).hist.int().tolist()
        shares[word] = {"below": float((found < -0.5).double().mean()), "above": float((found > 0.5).double().mean())}
    return {
        "model": run.recipe.model,
        "data": run.recipe.data,
        "images": len(sample),
        "edges": edges.tolist(),
        "counts": counts,
        "shares": shares,
    }


def _mean(ratios: Tensor) -> float | None:
    known = ratios[ratios.isfinite()]
    return float(known.mean()) if len(known) else None
