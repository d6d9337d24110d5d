"""The small functions the papers share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchcaps.fused import autocasted, has_triton, wanted, watched


def length(poses: Tensor, dim: int = -1) -> Tensor:
    """|v|, with gradient 0 where v is 0.

    Shapes: poses [..., d] -> [...]
    """
    if has_torch_function_unary(poses):
        return handle_torch_function(length, (poses,), poses, dim=dim)
    if _fuses(rows := poses.movedim(dim, -1)):
        return _fused(rows, "length")
    return torch.linalg.vector_norm(widen(poses), dim=dim).to(poses.dtype)


def squash(poses: Tensor, dim: int = -1) -> Tensor:
    """Sabour's Eq. 1: |s|^2 / (1 + |s|^2) s / |s|, written s |s| / (1 + |s|^2) so that nothing is divided by |s|.

    Shapes: poses [..., d] -> [..., d]
    """
    if has_torch_function_unary(poses):
        return handle_torch_function(squash, (poses,), poses, dim=dim)
    if _fuses(rows := poses.movedim(dim, -1)):
        return _fused(rows, "squash").movedim(-1, dim)
    s = widen(poses)
    norm = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    return (s * (norm / (1 + norm * norm))).to(poses.dtype)


def norm_relu_squash(features: Tensor, norm: nn.Module, caps: int, bias: Tensor | None = None) -> Tensor:
    """Batch norm over the channels, ReLU, and the squash of each capsule among them.

    Args:
        bias: what a convolution before it has not added yet, see `leaves_bias`.

    Shapes: features [b, (c d), h, w], bias [(c d)] -> [b, c, d, h, w]
    """
    if wanted(features.device) and has_triton():
        from torchcaps.fused import norm_triton

        dim = features.shape[1] // caps
        fits = norm_triton.takes_capsules(features, bias, norm, dim) and not watched(norm)
        if fits and isinstance(norm, nn.BatchNorm2d):
            return norm_triton.norm_with_relu(features, bias, norm, False, squashed=dim).unflatten(1, (caps, -1))
    if bias is not None:
        features = features + bias.to(features.dtype)[:, None, None]
    return squash(F.relu(norm(features)).unflatten(1, (caps, -1)), dim=2)


def leaves_bias(features: Tensor, conv: nn.Module, norm: nn.Module) -> bool:
    """Whether a convolution of these features leaves its bias to `norm_relu_squash`.

    The batch norm of a training step takes out what a bias adds, which only the running mean needs to hear of.
    """
    return norm.training and wanted(features.device) and has_triton() and not watched(conv) and not watched(norm)


def whole_map_capsules(
    features: Tensor, weight: Tensor, bias: Tensor | None, dim: int, nonlinearity: Callable[..., Tensor] | None
) -> Tensor | None:
    """The squashed sums of each channel by itself, over the whole map; None where there is no kernel for them.

    Shapes: features [b, (c d), h, w], weight [(c d), 1, y, x], bias [(c d)] -> [b, c, d]
    """
    kind = "squash" if nonlinearity is squash else "squash_exp" if nonlinearity is squash_exp else None
    if kind is not None and wanted(features.device, replicas=True) and has_triton():
        from torchcaps.fused import window_triton

        features, weight = autocasted(features, weight)
        if window_triton.takes(features, weight, bias, dim):
            return window_triton.capsules(features, weight, bias, dim, kind)
    return None


def gated(first: Tensor, second: Tensor, m1: Tensor, m2: Tensor) -> Tensor:
    """m1 s1 + m2 s2, with a coefficient for each capsule.

    Shapes: first and second [b, c, d, h, w], m1 and m2 [b, c, h, w] -> [b, c, d, h, w]
    """
    if wanted(first.device) and has_triton():
        from torchcaps.fused import gate_triton

        rows = first.movedim(2, -1), second.movedim(2, -1), m1, m2
        if gate_triton.takes_gate(*rows):
            return gate_triton.gate(*rows).movedim(-1, 2)
    return m1.unsqueeze(2) * first + m2.unsqueeze(2) * second


def gated_by(first: Tensor, second: Tensor, m1: nn.Conv2d, m2: nn.Conv2d, cross: bool) -> tuple[Tensor, Tensor] | None:
    """As `gated`, with 3 x 3 convolutions that read m1 and m2 off the votes; None where there is no kernel for it.

    Args:
        cross: m1 is read off the second vote and m2 off the first.

    Shapes: first and second [b, c, d, h, w] -> [b, c, d, h, w], and m1 and m2 [b, 2, c, h, w]
    """
    if not wanted(first.device) or not has_triton() or watched(m1) or watched(m2):
        return None
    from torchcaps.fused import mixture_triton

    rows = first.movedim(2, -1), second.movedim(2, -1)
    if not mixture_triton.takes_mixture(*rows, m1, m2):
        return None
    weight1, bias1, weight2, bias2 = autocasted(m1.weight, m1.bias, m2.weight, m2.bias)
    mixture, coefficients = mixture_triton.mixture(*rows, weight1, bias1, weight2, bias2, cross)
    return mixture.movedim(-1, 2), coefficients


def squash_exp(poses: Tensor, dim: int = -1) -> Tensor:
    """Mazzia's squash, (1 - exp(-|s|)) s / |s|; the factor (1 - exp(-|s|)) / |s| tends to 1 at 0.

    Shapes: poses [..., d] -> [..., d]
    """
    if has_torch_function_unary(poses):
        return handle_torch_function(squash_exp, (poses,), poses, dim=dim)
    if _fuses(rows := poses.movedim(dim, -1)):
        return _fused(rows, "squash_exp").movedim(-1, dim)
    s = widen(poses)
    norm = torch.linalg.vector_norm(s, dim=dim, keepdim=True)
    safe = norm.clamp(min=1e-30)  # where the factor is 1, and constant
    return (s * (torch.expm1(-safe) / -safe)).to(poses.dtype)


def layer_norm(
    poses: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> Tensor:
    """Layer norm over each pose, in float32 at least.

    Args:
        dtype: of the result; that of the poses by default.

    Shapes: poses [..., d], weight and bias [d] -> [..., d]
    """
    dtype = poses.dtype if dtype is None else dtype
    if _fuses(poses):
        from torchcaps.fused.rows_triton import layer_norm as fused

        return fused(poses, weight, bias, eps, dtype)
    return F.layer_norm(widen(poses), poses.shape[-1:], widen(weight), widen(bias), eps).to(dtype)


def _fuses(rows: Tensor) -> bool:
    """Whether there is a kernel for these short rows here."""
    if not wanted(rows.device) or not has_triton():
        return False
    from torchcaps.fused.rows_triton import takes

    return takes(rows)


def _fused(rows: Tensor, kind: str) -> Tensor:
    from torchcaps.fused.rows_triton import squashed

    return squashed(rows, kind)


def widen(x: Tensor) -> Tensor:
    """float32 for half precision, which has too few exponents for squares: 256^2 is infinite in float16."""
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
    if wanted(poses.device, replicas=True) and has_triton():
        from torchcaps.fused import mask_triton

        if mask_triton.takes(poses, targets):
            return mask_triton.masked(poses, targets)
    others = targets[..., None] != torch.arange(poses.shape[1], device=poses.device)  # [b, k, j]
    return poses[:, None].masked_fill(others[..., None], 0)


def glorot_uniform_(tensor: Tensor, fan_in: int, fan_out: int) -> Tensor:
    """Keras's default start."""
    limit = math.sqrt(6 / (fan_in + fan_out))
    return nn.init.uniform_(tensor, -limit, limit)


def check_labels(labels: Tensor, batch: int, classes: int | None = None) -> None:
    """Labels are int64, [b] or [b, k] padded with -1. Values are looked at only where that waits for no device."""
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if labels.dim() not in (1, 2) or len(labels) != batch:
        raise ValueError(f"labels must be [{batch}] or [{batch}, k], got {list(labels.shape)}")
    inside = torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(labels)  # have no values to look at
    if classes is None or inside or labels.device.type != "cpu" or not labels.numel():
        return
    least = -1 if labels.dim() == 2 else 0
    low, high = int(labels.min()), int(labels.max())
    if low < least or high >= classes:
        raise ValueError(f"labels must lie between {least} and {classes - 1}, got {low} to {high}")


def check_count(what: str, value: int, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be a whole number from {least}, got {value!r}")


def side_of(dim: int) -> int:
    """The side of a square matrix with `dim` entries."""
    side = math.isqrt(max(dim, 0))
    if dim < 1 or side * side != dim:
        near = f"{side**2} and {(side + 1) ** 2}" if side else "1 and 4"
        raise ValueError(f"a matrix pose needs a square number of entries, got {dim}; the nearest that fit are {near}")
    return side
