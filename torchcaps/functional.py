"""The small functions the papers share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def length(poses: Tensor, dim: int = -1) -> Tensor:
    """|v|, with gradient 0 where v is 0.

    Shapes: poses [..., d] -> [...]
    """
    return torch.linalg.vector_norm(_widen(poses), dim=dim).to(poses.dtype)


def squash(poses: Tensor, dim: int = -1) -> Tensor:
    """Sabour's Eq. 1: |s|^2 / (1 + |s|^2) s / |s|, written s |s| / (1 + |s|^2) so that nothing is divided by |s|.

    Shapes: poses [..., d] -> [..., d]
    """
    s = _widen(poses)
    norm = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    return (s * (norm / (1 + norm * norm))).to(poses.dtype)


def squash_exp(poses: Tensor, dim: int = -1) -> Tensor:
    """Mazzia's squash, (1 - exp(-|s|)) s / |s|; the factor (1 - exp(-|s|)) / |s| tends to 1 at 0.

    Shapes: poses [..., d] -> [..., d]
    """
    s = _widen(poses)
    norm = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    somewhere = norm > 0
    safe = torch.where(somewhere, norm, 1)
    return (s * torch.where(somewhere, -torch.expm1(-safe) / safe, 1)).to(poses.dtype)


def _widen(x: Tensor) -> Tensor:
    """Half precision has too few exponents for squares: 256^2 is infinite in float16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def flatten_capsules(poses: Tensor) -> Tensor:
    """Spatial capsules as a list, ordered by type, then row, then column.

    Shapes: poses [b, c, d, h, w] -> [b, (c h w), d]; flat poses pass through
    """
    return poses.permute(0, 1, 3, 4, 2).flatten(1, 3) if poses.dim() == 5 else poses


def mask_capsules(poses: Tensor, targets: Tensor) -> Tensor:
    """One copy of the capsules for each target, all but the target's set to 0; a target of -1 leaves none.

    Shapes: poses [b, j, d], targets [b, k] -> [b, k, j, d]
    """
    chosen = F.one_hot(targets.clamp(min=0), poses.shape[1]) * (targets >= 0)[..., None]
    return chosen[..., None].to(poses.dtype) * poses[:, None]


def side_of(dim: int, what: str = "pose dimension") -> int:
    """The side of a square matrix with `dim` entries."""
    side = round(dim**0.5)
    if side * side != dim:
        raise ValueError(
            f"a matrix pose needs a square {what}, got {dim}; the nearest that fit are {side**2} and {(side + 1) ** 2}"
            if side**2 < dim
            else f"a matrix pose needs a square {what}, got {dim}; the nearest that fit are {(side - 1) ** 2} and {side**2}"
        )
    return side
