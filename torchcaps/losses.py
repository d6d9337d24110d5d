"""The papers' losses, means over the batch where nothing else is said, in float32 at least, whatever autocast says.

Labels are int64, [b] for one object in each image or [b, k] for several; -1 pads images with fewer than k. Margin loss
and cross entropies also take how present each class is, [b, j] in floating point, as teachers say it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.functional import check_labels, widen
from torchcaps.fused import has_triton, wanted


def margin_loss(
    lengths: Tensor,
    labels: Tensor,
    *,
    m_plus: float = 0.9,
    m_minus: float = 0.1,
    down_weight: float = 0.5,
    scale: Literal["paper", "official"] = "paper",
    class_weights: Tensor | None = None,
) -> Tensor:
    """Sabour's Eq. 4: the sum over classes of T max(0, m+ - |v|)^2 + down_weight (1 - T) max(0, |v| - m-)^2.

    T is 1 for every class present, however often its label is repeated, or what soft labels say.

    Args:
        scale: "official" is what the authors ran, half the *mean* over classes: the paper's loss / 20 for ten classes.
        class_weights: a factor on each class's term.

    Shapes: lengths [b, j], labels [b] or [b, k], class_weights [j] -> []
    """
    _check_one_of("scale", scale, "paper", "official")
    _check_scores("lengths", lengths, labels, class_weights, soft=True)
    if not labels.is_floating_point() and wanted(lengths.device, replicas=True) and has_triton():
        from torchcaps.fused import losses_triton

        if losses_triton.takes_margin(lengths):
            over = 1 / len(lengths) if scale == "paper" else 0.5 / lengths.numel()
            margins = (m_plus, m_minus, down_weight)
            return losses_triton.margin_loss(lengths, labels, margins, over, class_weights)
    lengths = widen(lengths)
    present = presence(labels, lengths)
    too_short, too_long = F.relu(m_plus - lengths), F.relu(lengths - m_minus)
    losses = present * too_short.square() + down_weight * (1 - present) * too_long.square()
    if class_weights is not None:
        losses = losses * class_weights
    return losses.sum(dim=1).mean() if scale == "paper" else 0.5 * losses.mean()


def spread_loss(
    activations: Tensor, labels: Tensor, margin: float, *, reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """Hinton's (2018) spread loss: the sum over wrong classes i of max(0, margin - (a_t - a_i))^2.

    Several labels: so for every class t present, over the classes i that are absent.

    Args:
        margin: grows in training, see `spread_margin`.
        reduction: over the classes; "mean" is the released code's, which counts the target's 0 as well.

    Shapes: activations [b, j], labels [b] or [b, k] -> []
    """
    _check_one_of("reduction", reduction, "sum", "mean")
    _check_scores("activations", activations, labels)
    activations = widen(activations)
    labels = labels[:, None] if labels.dim() == 1 else labels
    absent = ~multi_hot(labels, activations.shape[1])
    repeated = (labels[:, :, None] == labels[:, None, :]).tril(-1).any(dim=2)
    targets = activations.gather(1, labels.clamp(min=0))
    counts = ((labels >= 0) & ~repeated)[:, :, None] & absent[:, None]  # [b, k, j]
    gaps = F.relu(margin - (targets[:, :, None] - activations[:, None])).square()
    losses = torch.where(counts, gaps, 0).sum(dim=1)
    return losses.sum(dim=1).mean() if reduction == "sum" else losses.mean()


def spread_margin(step: int, every: int = 50_000) -> float:
    """The margin after `step` updates, from 0.2 to 0.99: 0.2 + 0.79 sigmoid(min(10, step / every - 4))."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    return 0.2 + 0.79 / (1 + math.exp(-min(10, step / every - 4)))


def reconstruction_loss(
    reconstruction: Tensor,
    target: Tensor,
    *,
    reduction: Literal["sum", "mean"],
    labels: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Squared error of each object's picture, summed over the objects. The papers differ in `reduction`: none is usual.

    Args:
        reduction: over the pixels of a picture; Sabour weighs a "sum" with 0.0005, Mazzia a "mean" with 0.392.
        labels: where given, the pictures of a label of -1 take no part.
        weight: a factor on the loss.

    Shapes: reconstruction [b, k, c, h, w], target [b, c, h, w] (one for all objects) or [b, k, c, h, w],
        labels [b] or [b, k] -> []
    """
    _check_one_of("reduction", reduction, "sum", "mean")
    shape = list(reconstruction.shape)
    if len(shape) != 5:
        raise ValueError(f"reconstruction must be [b, k, c, h, w], got {shape}")
    if list(target.shape) not in (shape, shape[:1] + shape[2:]):
        raise ValueError(f"target must be {shape[:1] + shape[2:]} or {shape}, got {list(target.shape)}")
    if labels is not None:
        check_labels(labels, shape[0])
        labels = labels[:, None] if labels.dim() == 1 else labels
        if labels.shape[1] != shape[1]:
            raise ValueError(f"labels must be {shape[:2]}, one for each picture, got {list(labels.shape)}")
    if wanted(reconstruction.device, replicas=True) and has_triton():
        from torchcaps.fused import losses_triton

        if losses_triton.takes_reconstruction(reconstruction, target):
            over = weight / (shape[0] * (1 if reduction == "sum" else math.prod(shape[2:])))
            return losses_triton.reconstruction_loss(reconstruction, target, labels, over)
    errors = widen(reconstruction) - widen(target if target.dim() == 5 else target[:, None])
    if labels is not None:
        errors = torch.where(labels[..., None, None, None] >= 0, errors, 0)
    pictures = errors.square().flatten(2)
    return weight * (pictures.sum(dim=2) if reduction == "sum" else pictures.mean(dim=2)).sum(dim=1).mean()


def sinkhorn_divergence(
    x: Tensor,
    y: Tensor,
    *,
    cost: Literal["cosine", "l2"] = "cosine",
    epsilon: float = 1.0,
    iterations: int = 10,
    bias_fix: bool = True,
    through_plan: bool = False,
) -> Tensor:
    """Li's Eq. 11, 2 W(x, y) - W(x, x) - W(y, y), where W = <P, Q> is what the plan P pays at the cost Q.

    Args:
        cost: "cosine" is 1 - x . y / (|x| |y|), and 1 with gradient 0 where either has no direction;
            "l2" is the distance |x - y|, not its square, as the paper speaks of the l2 norm.
        bias_fix: without it, W(x, y) alone (Table 3, d1).
        through_plan: whether the gradient takes in how P depends on Q (Table 3, d2).

    Shapes: x [..., n, f], y [..., m, f] -> [...]
    """
    _check_one_of("cost", cost, "cosine", "l2")
    if x.dim() < 2 or x.dim() != y.dim() or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ValueError(f"x and y must be [..., n, f] and [..., m, f], got {list(x.shape)} and {list(y.shape)}")

    if cost == "cosine":
        x, y, distances = _directions(x), _directions(y), _cosine_distances
    else:
        x, y, distances = widen(x), widen(y), _euclidean_distances

    def transport(costs: Tensor) -> Tensor:
        plan = transport_plan(costs if through_plan else costs.detach(), epsilon=epsilon, iterations=iterations)
        return (plan * costs).sum(dim=(-2, -1))

    if not bias_fix:
        return transport(distances(x, y))
    costs = distances(x, y), distances(x, x), distances(y, y)
    if x.shape == y.shape:  # all three at once
        between, of_x, of_y = transport(torch.stack(costs))
    else:
        between, of_x, of_y = map(transport, costs)
    return 2 * between - of_x - of_y


def transport_plan(costs: Tensor, *, epsilon: float = 1.0, iterations: int = 10) -> Tensor:
    """Li's Eq. 9 and 10: P = diag(a) K diag(b) with K = exp(-Q / epsilon), between uniform weights 1/n and 1/m.

    b starts at 1/m; then a = (1/n) / (K b), b = (1/m) / (K^T a) in turn, each from the other's newest value (both from
    old ones, as Eq. 9 is printed, would not move unit mass). That is to make the rows of K, then its columns, sum to
    one again and again. It is done in logarithms, so no epsilon is too small.

    Shapes: costs [..., n, m] -> [..., n, m]
    """
    if costs.dim() < 2 or 0 in costs.shape[-2:]:
        raise ValueError(f"costs must be [..., n, m] with n and m at least 1, got {list(costs.shape)}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    log_plan = -widen(costs) / epsilon
    for _ in range(iterations - 1):
        log_plan = log_plan.log_softmax(dim=-1).log_softmax(dim=-2)
    return log_plan.log_softmax(dim=-1).softmax(dim=-2) / costs.shape[-1]  # each column's sum is 1/m


def kl_divergence(x: Tensor, y: Tensor) -> Tensor:
    """KL(softmax x || softmax y), the alternative to `sinkhorn_divergence` in Li's Table 3 (b).

    Shapes: x and y [n, f] -> []
    """
    if x.dim() != 2 or x.shape != y.shape:
        raise ValueError(f"x and y must both be [n, f], got {list(x.shape)} and {list(y.shape)}")
    log_p, log_q = widen(x).log_softmax(dim=1), widen(y).log_softmax(dim=1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, class_weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Softmax cross entropy; an image's present classes share its probability equally, images without any do not count.

    Soft labels that add up to less than 1 make an image count less. As in torch with labels, class weights make it a
    weighted mean over the images.

    Shapes: logits [b, j], labels [b] or [b, k], class_weights [j] -> []
    """
    _check_scores("logits", logits, labels, class_weights, soft=True)
    _check_smoothing(label_smoothing)
    log_p = widen(logits).log_softmax(dim=1)
    present = presence(labels, log_p)
    total = present.sum(dim=1, keepdim=True)
    labelled = total.clamp(max=1)
    weights = torch.ones_like(log_p[0]) if class_weights is None else class_weights.to(log_p.dtype)
    targets = present / total.clamp(min=1)
    smooth = (1 - label_smoothing) * targets + label_smoothing / logits.shape[1] * labelled
    heft = (weights * targets).sum()
    return -(weights * smooth * log_p).sum() / torch.where(heft > 0, heft, 1)


def binary_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross entropy of each class by itself (Tsai, for several objects), the mean over classes as over images.

    Args:
        label_smoothing: a class that is present counts as 1 - label_smoothing / 2, another as label_smoothing / 2.

    Shapes: logits [b, j], labels [b] or [b, k] -> []
    """
    _check_scores("logits", logits, labels, soft=True)
    _check_smoothing(label_smoothing)
    logits = widen(logits)
    present = presence(labels, logits)
    return F.binary_cross_entropy_with_logits(logits, (1 - label_smoothing) * present + label_smoothing / 2)


def multi_hot(labels: Tensor, classes: int) -> Tensor:
    """Which classes are present.

    Shapes: labels [b] or [b, k] -> bool [b, j]
    """
    check_labels(labels, len(labels), classes)
    labels = labels[:, None] if labels.dim() == 1 else labels
    nowhere = torch.zeros(len(labels), 1 + classes, dtype=torch.bool, device=labels.device)
    return nowhere.scatter(1, 1 + labels, True)[:, 1:]  # column 0 takes the padding


def presence(labels: Tensor, scores: Tensor) -> Tensor:
    """How present each class is: 1 or 0 by its label, or as soft labels have it, in the scores' dtype.

    Shapes: labels [b], [b, k] or floating [b, j], scores [b, j] -> [b, j]
    """
    present = labels if labels.is_floating_point() else multi_hot(labels, scores.shape[1])
    return present.to(scores.dtype)


def _directions(x: Tensor) -> Tensor:
    """x / |x|, and 0 with gradient 0 where x is too short for the gradient, which grows as 1 / |x|, to be finite."""
    shortest = 1e-4 if x.dtype == torch.float16 else 1e-12
    x = widen(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm > shortest, norm, torch.inf)


def _cosine_distances(x: Tensor, y: Tensor) -> Tensor:
    device = x.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        return 1 - x @ y.mT


def _euclidean_distances(x: Tensor, y: Tensor) -> Tensor:
    """From the differences, not from a matrix product: exact, and with gradient 0, where points coincide."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _check_one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie between 0 and 1, got {label_smoothing}")


def _check_scores(
    name: str, scores: Tensor, labels: Tensor, class_weights: Tensor | None = None, soft: bool = False
) -> None:
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(f"{name} must be floating point of shape [b, j], got {scores.dtype} {list(scores.shape)}")
    if not (soft and isinstance(labels, Tensor) and labels.is_floating_point() and labels.dim() == 2):
        check_labels(labels, len(scores), scores.shape[1])
    elif labels.shape != scores.shape:
        raise ValueError(f"soft labels must be {list(scores.shape)} like {name}, got {list(labels.shape)}")
    if class_weights is not None and class_weights.shape != scores.shape[1:]:
        raise ValueError(f"class_weights must be [{scores.shape[1]}], got {list(class_weights.shape)}")
