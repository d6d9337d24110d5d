"""Master and aide with the coefficients that mix them: one kernel forward, three backward.

The coefficients are 3 x 3 convolutions with one output for each capsule: nine products of rows, for which a matrix
product over all channels, with zeros between the capsules, reads and multiplies far more than there is. Maps lie in
memory with their channels last. Backward, the gradients of the coefficients come first, for each pixel needs those of
its neighbours; then those of the votes, with each program's sums for the weights; then these are added up.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchcaps.fused.rows_triton import laid_out_as, load_rows, takes

NUMBERS = 2048  # in a block of pixels
NUMBERS_BACK = 4096  # where each block leaves sums
WIDE = 64  # channels of a block
SUMS = tl.constexpr(10)  # that each vote has: of the nine weights and the bias


@triton.jit
def _block(pixels, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """Where a block's numbers lie, which entries are there, its pixels, and where its coefficients lie.

    Shapes: [P, C, DP], [1, 1, DP], [P], [P, C]
    """
    pixel, capsule = tl.program_id(0) * P + tl.arange(0, P), tl.program_id(1) * C + tl.arange(0, C)
    entry = tl.arange(0, DP)[None, None, :]
    at = (pixel[:, None] * CAPS + capsule[None, :])[:, :, None] * D + entry
    return at, entry < D, pixel, pixel[:, None] * (2 * CAPS) + capsule[None, :]


@triton.jit
def _inside(pixel, pixels, height, width, down, right):
    """Whether the map has a pixel so far from this one. Shapes: [P]"""
    y, x = pixel // width % height + down, pixel % width + right
    return (pixel < pixels) & (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def _weights(weight, tap, to_capsule, to_entry, to_tap, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr):
    """Shapes: [1, C, DP]"""
    capsule, entry = tl.program_id(1) * C + tl.arange(0, C)[None, :, None], tl.arange(0, DP)[None, None, :]
    at = capsule * to_capsule + entry * to_entry + tap * to_tap
    return tl.load(weight + at, mask=entry < D, other=0.0).to(tl.float32)


@triton.jit
def _biases(bias, C: tl.constexpr):
    """Shapes: [1, C]"""
    return tl.load(bias + tl.program_id(1) * C + tl.arange(0, C)).to(tl.float32)[None, :]


@triton.jit
def mixture_forward(
    master, aide, of_master, master_bias, of_aide, aide_bias, y, m, pixels, height, width, to_capsule, to_entry, to_tap,
    CROSS: tl.constexpr, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    at, entries, pixel, at_m = _block(pixels, CAPS, D, DP, C, P)
    from_master, from_aide = tl.zeros((P, C, DP), tl.float32), tl.zeros((P, C, DP), tl.float32)
    for tap in tl.static_range(9):
        there = _inside(pixel, pixels, height, width, tap // 3 - 1, tap % 3 - 1)[:, None, None] & entries
        beside = at + ((tap // 3 - 1) * width + tap % 3 - 1) * CAPS * D
        from_master += load_rows(master, beside, there) * _weights(
            of_master, tap, to_capsule, to_entry, to_tap, D, DP, C
        )
        from_aide += load_rows(aide, beside, there) * _weights(of_aide, tap, to_capsule, to_entry, to_tap, D, DP, C)
    first = tl.sum(from_master, 2) + _biases(master_bias, C)
    second = tl.sum(from_aide, 2) + _biases(aide_bias, C)
    if CROSS:
        first, second = second, first
    here = (pixel < pixels)[:, None]
    tl.store(m + at_m, first.to(m.dtype.element_ty), mask=here)
    tl.store(m + at_m + CAPS, second.to(m.dtype.element_ty), mask=here)
    there = here[:, :, None] & entries
    mixed = first[:, :, None] * load_rows(master, at, there) + second[:, :, None] * load_rows(aide, at, there)
    tl.store(y + at, mixed.to(y.dtype.element_ty), mask=there)


@triton.jit
def mixture_slopes(
    master, aide, d_y, d_m, pixels,
    CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The gradients of the coefficients."""
    at, entries, pixel, at_m = _block(pixels, CAPS, D, DP, C, P)
    here = (pixel < pixels)[:, None]
    there = here[:, :, None] & entries
    above = load_rows(d_y, at, there)
    tl.store(d_m + at_m, tl.sum(above * load_rows(master, at, there), 2).to(d_m.dtype.element_ty), mask=here)
    tl.store(d_m + at_m + CAPS, tl.sum(above * load_rows(aide, at, there), 2).to(d_m.dtype.element_ty), mask=here)


@triton.jit
def mixture_backward(
    master, aide, of_master, of_aide, m, d_y, d_m, d_master, d_aide, parts, pixels, height, width,
    to_capsule, to_entry, to_tap,
    CROSS: tl.constexpr, CAPS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Shapes: parts [programs, 2, SUMS, CAPS, D], the master's and the aide's; that of the bias for each entry"""
    at, entries, pixel, at_m = _block(pixels, CAPS, D, DP, C, P)
    here = (pixel < pixels)[:, None]
    there = here[:, :, None] & entries
    above, vote, other = load_rows(d_y, at, there), load_rows(master, at, there), load_rows(aide, at, there)
    to_master = above * load_rows(m, at_m, here)[:, :, None]
    to_aide = above * load_rows(m + CAPS, at_m, here)[:, :, None]
    own = tl.program_id(0) * (2 * SUMS * CAPS * D) + (tl.program_id(1) * C + tl.arange(0, C))[:, None] * D
    own += tl.arange(0, DP)[None, :]
    kept = tl.arange(0, DP)[None, :] < D
    first = CAPS if CROSS else 0  # the coefficient that is read off the master
    for tap in tl.static_range(9):
        beside = at_m - ((tap // 3 - 1) * width + tap % 3 - 1) * (2 * CAPS)
        inside = _inside(pixel, pixels, height, width, 1 - tap // 3, 1 - tap % 3)[:, None]
        slope = load_rows(d_m + first, beside, inside)[:, :, None]
        to_master += slope * _weights(of_master, tap, to_capsule, to_entry, to_tap, D, DP, C)
        tl.store(parts + own + tap * (CAPS * D), tl.sum(slope * vote, 0), mask=kept)
        slope = load_rows(d_m + (CAPS - first), beside, inside)[:, :, None]
        to_aide += slope * _weights(of_aide, tap, to_capsule, to_entry, to_tap, D, DP, C)
        tl.store(parts + own + (SUMS + tap) * (CAPS * D), tl.sum(slope * other, 0), mask=kept)
    every = tl.zeros((1, DP), tl.float32)
    slope = tl.sum(load_rows(d_m + first, at_m, here), 0)[:, None]
    tl.store(parts + own + 9 * (CAPS * D), slope + every, mask=kept)
    slope = tl.sum(load_rows(d_m + (CAPS - first), at_m, here), 0)[:, None]
    tl.store(parts + own + (SUMS + 9) * (CAPS * D), slope + every, mask=kept)
    tl.store(d_master + at, to_master.to(d_master.dtype.element_ty), mask=there)
    tl.store(d_aide + at, to_aide.to(d_aide.dtype.element_ty), mask=there)


@triton.jit
def mixture_sums(
    parts, of_master, master_bias, of_aide, aide_bias, rows, to_capsule, to_entry, to_tap,
    CHANNELS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds up all programs' sums, of one weight or bias of some channels."""
    which, channel = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    row, total = tl.arange(0, R)[:, None], tl.zeros((R, W), tl.float32)
    for start in range(0, rows, R):
        there = (start + row < rows) & (channel < CHANNELS)[None, :]
        at = ((start + row) * (2 * SUMS) + which) * CHANNELS + channel[None, :]
        total += tl.load(parts + at, mask=there, other=0.0)
    found, tap = tl.sum(total, 0), tl.zeros((W,), tl.int32) + which % SUMS
    capsule, entry = channel // D, channel % D
    at = capsule * to_capsule + entry * to_entry + tap * to_tap
    there, once = (channel < CHANNELS) & (tap < 9), (channel < CHANNELS) & (tap == 9) & (entry == 0)
    if which < SUMS:
        tl.store(of_master + at, found.to(of_master.dtype.element_ty), mask=there)
        tl.store(master_bias + capsule, found.to(master_bias.dtype.element_ty), mask=once)
    else:
        tl.store(of_aide + at, found.to(of_aide.dtype.element_ty), mask=there)
        tl.store(aide_bias + capsule, found.to(aide_bias.dtype.element_ty), mask=once)


def takes_mixture(master: Tensor, aide: Tensor, m1: nn.Conv2d, m2: nn.Conv2d) -> bool:
    """Whether votes [b, c, h, w, d] lie pixel by pixel, and these are the coefficients' convolutions as they should be.

    Shapes: weights [c, d, 3, 3]
    """
    caps, dim = master.shape[1], master.shape[-1]
    return (
        takes(master)
        and master.numel() < 2**30
        and master.shape == aide.shape
        and master.dtype == aide.dtype
        and caps & (caps - 1) == 0
        and all(_pixel_by_pixel(vote) for vote in (master, aide))
        and all(conv.weight.shape == (caps, dim, 3, 3) and conv.bias is not None for conv in (m1, m2))
        and m1.weight.stride() == m2.weight.stride()
        and m1.weight.stride(2) == 3 * m1.weight.stride(3)
        and all(conv.stride == (1, 1) and conv.padding == (1, 1) and conv.dilation == (1, 1) for conv in (m1, m2))
    )


def _pixel_by_pixel(votes: Tensor) -> bool:
    return votes.permute(0, 2, 3, 1, 4).is_contiguous()


def mixture(
    master: Tensor, aide: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, cross: bool
) -> tuple[Tensor, Tensor]:
    """The mixture, and the coefficients, which have no gradient.

    Args:
        cross: m1 is read off the aide and m2 off the master, rather than each off its own.

    Shapes: votes [b, c, h, w, d], weights [c, d, 3, 3], biases [c] -> [b, c, h, w, d], [b, 2, c, h, w]
    """
    own, other = ((weight2, bias2), (weight1, bias1)) if cross else ((weight1, bias1), (weight2, bias2))
    y, m = _Mixture.apply(master, aide, *own, *other, cross)
    return y, m.permute(0, 3, 4, 1, 2)


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master: Tensor, aide: Tensor, of_master: Tensor, master_bias: Tensor, of_aide: Tensor,
        aide_bias: Tensor, cross: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        b, c, h, w, _ = master.shape
        y, m = torch.empty_like(master), master.new_empty(b, h, w, 2, c)
        grid, block = _cut(master, NUMBERS)
        mixture_forward[grid](
            master, aide, of_master, master_bias, of_aide, aide_bias, y, m, b * h * w, h, w, *_steps(of_master),
            **block, CROSS=cross, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(master, aide, of_master, master_bias, of_aide, aide_bias, m)
        ctx.cross = cross
        ctx.mark_non_differentiable(m)
        ctx.set_materialize_grads(False)
        return y, m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, _: Any) -> Any:
        master, aide, of_master, _, of_aide, _, m = ctx.saved_tensors
        _, _, h, w, dim = master.shape
        pixels, channels = m.numel() // (2 * m.shape[-1]), m.shape[-1] * dim
        d_y, d_m = laid_out_as(master, d_y), torch.empty_like(m)
        grid, block = _cut(master, NUMBERS)
        mixture_slopes[grid](master, aide, d_y, d_m, pixels, **block)
        d_master, d_aide, *rest = (torch.empty_like(x) for x in ctx.saved_tensors[:-1])
        grid, block = _cut(master, NUMBERS_BACK)
        parts = torch.empty(grid[0], 2 * SUMS.value, channels, dtype=torch.float32, device=m.device)
        mixture_backward[grid](
            master, aide, of_master, of_aide, m, d_y, d_m, d_master, d_aide, parts, pixels, h, w, *_steps(of_master),
            **block, CROSS=ctx.cross, num_warps=16,
        )  # fmt: skip
        mixture_sums[(2 * SUMS.value, triton.cdiv(channels, 32))](
            parts, *rest, grid[0], *_steps(of_master), CHANNELS=channels, D=dim, R=64, W=32
        )
        return d_master, d_aide, *rest, None


def _steps(weight: Tensor) -> tuple[int, int, int]:
    """From one capsule's weights to the next, from one entry's and from one pixel's."""
    return weight.stride(0), weight.stride(1), weight.stride(3)


def _cut(votes: Tensor, numbers: int) -> tuple[tuple[int, int], dict[str, int]]:
    caps, dim = votes.shape[1], votes.shape[-1]
    padded = triton.next_power_of_2(dim)
    some = min(caps, max(1, WIDE // padded))
    high = max(1, numbers // (some * padded))
    pixels = votes.numel() // (caps * dim)
    block = {"CAPS": caps, "D": dim, "DP": padded, "C": some, "P": high}
    return (triton.cdiv(pixels, high), caps // some), block
