"""Margin loss and reconstruction loss in one kernel each way, where plain PyTorch has dozens for a few numbers.

Replicas under vmap are an axis of the grid.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.switch import fronted, strides_of

MOST = 2**14  # numbers, which one program goes through
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def positive_part(x):
    """As ReLU has it: what is not a number stays so."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def margin(
    lengths, labels, weights, loss, d_lengths, count, classes, objects, on_r, on_b, on_k, weights_on_r,
    m_plus, m_minus, down_weight, scale, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss and, as it is known by then, its gradient; a program for each replica.

    Shapes: lengths, d_lengths [r, b, j], labels [r, b, k] with strides, weights [r, j]
    """
    replica = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < count
        image, own = at // classes, at % classes
        length = tl.load(lengths + replica * count + at, mask=there, other=0.0).to(tl.float32)
        found = tl.zeros((BLOCK,), dtype=tl.int32)
        for k in range(objects):
            label = tl.load(labels + replica * on_r + image * on_b + k * on_k, mask=there, other=-1)
            found += (label == own).to(tl.int32)
        present = found > 0
        too_short, too_long = positive_part(m_plus - length), positive_part(length - m_minus)
        term = tl.where(present, too_short * too_short, down_weight * (too_long * too_long))
        slope = tl.where(present, -2 * too_short, 2 * down_weight * too_long)
        if WEIGHTED:
            weight = tl.load(weights + replica * weights_on_r + own, mask=there, other=0.0).to(tl.float32)
            term, slope = term * weight, slope * weight
        tl.store(d_lengths + replica * count + at, slope * scale, mask=there)
        total += tl.where(there, term, 0.0)
    tl.store(loss + replica, tl.sum(total, 0) * scale)


@triton.jit
def errors_of(
    pictures, target, labels, at, end, count, size, objects, target_on_r, target_on_b, target_on_k, on_r, on_b, on_k,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Of some pixels of this replica's pictures; 0 where there are none, or where a picture has no label."""
    replica = tl.program_id(1).to(tl.int64)
    there = at < end
    picture, pixel = at // size, at % size
    image, own = picture // objects, picture % objects
    if MASKED:
        there = there & (tl.load(labels + replica * on_r + image * on_b + own * on_k, mask=there, other=-1) >= 0)
    aim = target + replica * target_on_r + image * target_on_b + own * target_on_k + pixel
    made = tl.load(pictures + replica * count + at, mask=there, other=0.0).to(tl.float32)
    return made - tl.load(aim, mask=there, other=0.0).to(tl.float32)


@triton.jit
def squared_errors(
    pictures, target, labels, sums, count, size, objects, target_on_r, target_on_b, target_on_k, on_r, on_b, on_k,
    each, scale, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for `each` pixels of a replica. Shapes: pictures [r, (b k c h w)], labels [r, b, k] -> sums [r, s]"""
    begin = tl.program_id(0) * each
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, each, BLOCK):
        error = errors_of(
            pictures, target, labels, begin + start + tl.arange(0, BLOCK), begin + each, count, size, objects,
            target_on_r, target_on_b, target_on_k, on_r, on_b, on_k, MASKED,
        )  # fmt: skip
        total += error * error
    tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0) * scale)


@triton.jit
def squared_errors_backward(
    pictures, target, labels, d_loss, d_pictures, count, size, objects, target_on_r, target_on_b, target_on_k, on_r,
    on_b, on_k, loss_on_r, scale, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    error = errors_of(
        pictures, target, labels, at, count, count, size, objects,
        target_on_r, target_on_b, target_on_k, on_r, on_b, on_k, MASKED,
    )  # fmt: skip
    grad = error * (2 * scale * tl.load(d_loss + tl.program_id(1) * loss_on_r).to(tl.float32))
    own = d_pictures + tl.program_id(1).to(tl.int64) * count + at
    tl.store(own, grad.to(d_pictures.dtype.element_ty), mask=at < count)


@triton.jit
def add_to_tally(totals, good, values, images, count, BLOCK: tl.constexpr):
    """Adds values of so many images to float64 totals, and 1 to `good` for each total that is finite."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    total = tl.load(totals + at, mask=there, other=0.0)
    total += tl.load(values + at, mask=there, other=0.0).to(tl.float64) * images
    tl.store(totals + at, total, mask=there)
    finite = (tl.abs(total) < float("inf")).to(tl.int64)
    tl.store(good + at, tl.load(good + at, mask=there, other=0) + finite, mask=there)


def takes_margin(lengths: Tensor) -> bool:
    return _takes(lengths) and 0 < lengths.numel() <= MOST


def takes_reconstruction(pictures: Tensor, target: Tensor) -> bool:
    return _takes(pictures) and _takes(target) and 0 < pictures.numel() < 2**30 and not target.requires_grad


def tally(totals: Tensor, good: Tensor, values: Tensor, images: int) -> bool:
    """Whether it was done; shapes are the same for all.

    Shapes: totals, good and values [t] or [t, r]
    """
    alike = totals.stride() == good.stride() == values.stride() and totals.dtype == torch.float64
    if alike and _takes(values):
        count = values.numel()
        add_to_tally[(triton.cdiv(count, 128),)](totals, good, values, images, count, BLOCK=128, num_warps=1)
        return True
    return False


def _takes(x: Tensor) -> bool:
    return x.dtype in DTYPES and (x.device.type == "cuda" or bool(triton.knobs.runtime.interpret))


def margin_loss(
    lengths: Tensor, labels: Tensor, margins: tuple[float, float, float], scale: float, class_weights: Tensor | None
) -> Tensor:
    """The terms of all classes and images, summed and times `scale`.

    Args: margins: m_plus, m_minus and the weight of the absent classes.
    """
    labels = labels[:, None] if labels.dim() == 1 else labels
    loss, _ = _Margin.apply(lengths, labels, class_weights, margins, scale)
    return loss


def reconstruction_loss(pictures: Tensor, target: Tensor, labels: Tensor | None, scale: float) -> Tensor:
    """The squared errors of all pictures that have a label, summed and times `scale`."""
    loss: Tensor = _Reconstruction.apply(pictures, target, labels, scale)
    return loss


class _Margin(torch.autograd.Function):
    """Shapes: lengths [b, j], labels [b, k], weights [j] -> []; or all with an axis over the replicas in front"""

    @staticmethod
    def forward(
        lengths: Tensor, labels: Tensor, weights: Tensor | None, margins: tuple[float, float, float], scale: float
    ) -> tuple[Tensor, Tensor]:
        lengths = lengths.contiguous()
        *replicas, images, classes = lengths.shape
        loss = torch.empty(replicas, dtype=torch.float32, device=lengths.device)
        d_lengths = torch.empty(lengths.shape, dtype=torch.float32, device=lengths.device)
        weights = None if weights is None else weights.contiguous()
        count = images * classes
        margin[(loss.numel(),)](
            lengths, labels, _or(weights, loss), loss, d_lengths, count, classes, labels.shape[-1],
            *strides_of(labels, len(replicas)), strides_of(_or(weights, loss), len(replicas))[0], *margins, scale,
            WEIGHTED=weights is not None, BLOCK=min(1024, triton.next_power_of_2(count)),
        )  # fmt: skip
        return loss, d_lengths

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor | None, _: Any) -> Any:
        if d_loss is None:
            return (None,) * 5
        (d_lengths,) = ctx.saved_tensors
        scaled = torch.empty_like(d_lengths, dtype=ctx.dtype)
        return torch.mul(d_lengths, d_loss[..., None, None], out=scaled), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _Margin.apply(*fronted(info, in_dims, inputs[:3]), *inputs[3:]), (0, 0)


class _Reconstruction(torch.autograd.Function):
    """Shapes: pictures [b, k, c, h, w], target [b, c, h, w] or the same, labels [b, k] -> []; or all as for _Margin"""

    @staticmethod
    def forward(pictures: Tensor, target: Tensor, labels: Tensor | None, scale: float) -> Tensor:
        given, count, size, masked = _numbers(pictures, target, labels)
        each = count if count <= MOST else size
        replicas = pictures.shape[:-5]
        sums = torch.empty(*replicas, count // each, dtype=torch.float32, device=pictures.device)
        block = min(1024 if each == size else 4096, triton.next_power_of_2(each))
        squared_errors[(count // each, replicas.numel())](
            *given[:2], _or(given[2], sums), sums, count, *given[3:], each, scale, MASKED=masked, BLOCK=block
        )
        return sums.squeeze(-1) if each == count else sums.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.scale = inputs[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        pictures, *rest = ctx.saved_tensors
        given, count, size, masked = _numbers(pictures, *rest)
        d_pictures = torch.empty(pictures.shape, dtype=pictures.dtype, device=pictures.device)
        block = min(1024, triton.next_power_of_2(size))
        squared_errors_backward[(triton.cdiv(count, block), d_loss.numel())](
            *given[:2], _or(given[2], d_loss), d_loss, d_pictures, count, *given[3:], sum(d_loss.stride()), ctx.scale,
            MASKED=masked, BLOCK=block,
        )  # fmt: skip
        return d_pictures, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _Reconstruction.apply(*fronted(info, in_dims, inputs[:3]), inputs[3]), 0


def _numbers(pictures: Tensor, target: Tensor, labels: Tensor | None) -> tuple[list[Any], int, int, bool]:
    """What the kernels are given besides their results; pixels of a replica and of a picture; whether labels count."""
    *replicas, images, objects = pictures.shape[:-3]
    size = pictures.shape[-3:].numel()
    target = target if target[(0,) * (target.dim() - 3)].is_contiguous() else target.contiguous()
    shared = target.dim() < pictures.dim()  # one target for all objects of an image
    aims = strides_of(target, len(replicas))[: 2 if shared else 3] + (0,) * shared
    places = (0, 0, 0) if labels is None else strides_of(labels, len(replicas))
    given = [pictures.contiguous(), target, labels, size, objects, *aims, *places]
    return given, images * objects * size, size, labels is not None


def _or(x: Tensor | None, unused: Tensor) -> Tensor:
    return unused if x is None else x
