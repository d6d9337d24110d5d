"""Margin loss and reconstruction loss in one kernel each way, where plain PyTorch has dozens for a few numbers."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST = 2**14  # scores, which one program goes through
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def positive_part(x):
    """As ReLU has it: what is not a number stays so."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def margin(
    lengths, labels, weights, loss, d_lengths, count, classes, objects, m_plus, m_minus, down_weight, scale,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss and, as it is known by then, its gradient. Shapes: lengths, d_lengths [b, j], labels [b, k]"""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < count
        image, own = at // classes, at % classes
        length = tl.load(lengths + at, mask=there, other=0.0).to(tl.float32)
        found = tl.zeros((BLOCK,), dtype=tl.int32)
        for k in range(objects):
            label = tl.load(labels + image * objects + k, mask=there, other=-1)
            found += (label == own).to(tl.int32)
        present = found > 0
        too_short, too_long = positive_part(m_plus - length), positive_part(length - m_minus)
        term = tl.where(present, too_short * too_short, down_weight * (too_long * too_long))
        slope = tl.where(present, -2 * too_short, 2 * down_weight * too_long)
        if WEIGHTED:
            weight = tl.load(weights + own, mask=there, other=0.0).to(tl.float32)
            term, slope = term * weight, slope * weight
        tl.store(d_lengths + at, slope * scale, mask=there)
        total += tl.where(there, term, 0.0)
    tl.store(loss, tl.sum(total, 0) * scale)


@triton.jit
def errors_of(pictures, target, labels, picture, at, size, objects, MASKED: tl.constexpr, SHARED: tl.constexpr):
    """Of part of a picture; 0 where there is none. `SHARED` pictures have one target for all objects of an image."""
    end = size
    if MASKED:
        end = tl.where(tl.load(labels + picture) >= 0, size, 0)
    there = at < end
    aim = picture // objects if SHARED else picture
    made = tl.load(pictures + picture.to(tl.int64) * size + at, mask=there, other=0.0).to(tl.float32)
    return made - tl.load(target + aim.to(tl.int64) * size + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def squared_errors(
    pictures, target, labels, sums, size, objects, scale, MASKED: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each picture. Shapes: pictures [(b k), (c h w)], labels [b, k] -> sums [(b k)]"""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        error = errors_of(pictures, target, labels, tl.program_id(0), at, size, objects, MASKED, SHARED)
        total += error * error
    tl.store(sums + tl.program_id(0), tl.sum(total, 0) * scale)


@triton.jit
def squared_errors_backward(
    pictures, target, labels, d_loss, d_pictures, size, objects, scale, MASKED: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    picture = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    error = errors_of(pictures, target, labels, picture, at, size, objects, MASKED, SHARED)
    grad = error * (2 * scale * tl.load(d_loss).to(tl.float32))
    own = d_pictures + picture.to(tl.int64) * size + at
    tl.store(own, grad.to(d_pictures.dtype.element_ty), mask=at < size)


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
    return _takes(pictures) and _takes(target) and pictures.numel() > 0 and not target.requires_grad


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
    loss: Tensor = _Margin.apply(lengths, labels, margins, scale, class_weights)
    return loss


def reconstruction_loss(pictures: Tensor, target: Tensor, labels: Tensor | None, scale: float) -> Tensor:
    """The squared errors of all pictures that have a label, summed and times `scale`."""
    loss: Tensor = _Reconstruction.apply(pictures, target, labels, scale)
    return loss


class _Margin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lengths: Tensor,
        labels: Tensor,
        margins: tuple[float, float, float],
        scale: float,
        weights: Tensor | None,
    ) -> Tensor:
        loss = torch.empty((), dtype=torch.float32, device=lengths.device)
        d_lengths = torch.empty(lengths.shape, dtype=torch.float32, device=lengths.device)
        objects = 1 if labels.dim() == 1 else labels.shape[1]
        block = min(1024, triton.next_power_of_2(lengths.numel()))
        margin[(1,)](
            lengths.contiguous(), labels.contiguous(), loss if weights is None else weights.contiguous(), loss,
            d_lengths, lengths.numel(), lengths.shape[1], objects, *margins, scale, weights is not None, block,
        )  # fmt: skip
        ctx.save_for_backward(d_lengths)
        ctx.dtype = lengths.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        (d_lengths,) = ctx.saved_tensors
        scaled = torch.mul(d_lengths, d_loss, out=torch.empty_like(d_lengths, dtype=ctx.dtype))
        return scaled, None, None, None, None


class _Reconstruction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pictures: Tensor, target: Tensor, labels: Tensor | None, scale: float) -> Tensor:
        pictures, target = pictures.contiguous(), target.contiguous()
        labels = None if labels is None else labels.contiguous()
        ctx.save_for_backward(pictures, target, labels)
        ctx.scale = scale
        count, size, cut = _cut(pictures, target, labels)
        sums = torch.empty(count, dtype=torch.float32, device=pictures.device)
        squared_errors[(count,)](pictures, target, _or(labels, sums), sums, size, pictures.shape[1], scale, **cut)
        return sums.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        pictures, target, labels = ctx.saved_tensors
        count, size, cut = _cut(pictures, target, labels)
        d_pictures = torch.empty_like(pictures)
        squared_errors_backward[(count, triton.cdiv(size, cut["BLOCK"]))](
            pictures, target, _or(labels, d_loss), d_loss, d_pictures, size, pictures.shape[1], ctx.scale, **cut
        )
        return d_pictures, None, None, None


def _cut(pictures: Tensor, target: Tensor, labels: Tensor | None) -> tuple[int, int, dict[str, int]]:
    count, size = pictures.shape[0] * pictures.shape[1], pictures[0, 0].numel()
    block = min(1024, triton.next_power_of_2(size))
    return count, size, {"MASKED": labels is not None, "SHARED": target.dim() == 4, "BLOCK": block}


def _or(x: Tensor | None, unused: Tensor) -> Tensor:
    return unused if x is None else x
