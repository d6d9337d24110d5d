"""Master and aide with the coefficients that mix them: one kernel forward, four backward.

The coefficients are 3 x 3 convolutions with one output for each capsule: nine products of rows, for which a matrix
product over all channels, with zeros between the capsules, reads and multiplies far more than there is. Maps lie in
memory with their channels last, so blocks are pixels by channels, loaded in pieces of eight or sixteen bytes, and seen
as capsules only where these are summed. Weights are few but scattered: threads hold those of their channels over many
blocks. Backward, the gradients of the coefficients come first, for each pixel needs those of its neighbours; then those
of the votes; then each program's sums for the weights; then these are added up.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchcaps.fused.launch_triton import launched
from torchcaps.fused.rows_triton import in_capsules, laid_out_as, load_rows, takes, times

WIDE = 64  # channels of a block
NUMBERS = 4096  # in a block of pixels
HELD = 2048  # where threads hold a vote's weights, or their sums, for all nine pixels: eight numbers for each
PROGRAMS = 264  # that share a map there, two for each multiprocessor of an H200
SUMS = tl.constexpr(10)  # that each vote has: of the nine weights and the bias


@triton.jit
def _block(number, CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """A block's pixels, where its numbers lie, and where its coefficients lie. Shapes: [P], [P, C], [P, C / D]"""
    pixel, column = number * P + tl.arange(0, P), tl.program_id(1)
    at = pixel[:, None] * (CAPS * D) + column * C + tl.arange(0, C)[None, :]
    return pixel, at, pixel[:, None] * (2 * CAPS) + column * (C // D) + tl.arange(0, C // D)[None, :]


@triton.jit
def _inside(pixel, pixels, down, right, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Whether the map has a pixel so far from this one. Shapes: [P, 1]"""
    y, x = pixel // WIDTH % HEIGHT + down, pixel % WIDTH + right
    return ((pixel < pixels) & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None]


@triton.jit
def _weights(
    weight, tap, TO_CAPSULE: tl.constexpr, TO_ENTRY: tl.constexpr, TO_TAP: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Shapes: [1, C]"""
    channel = tl.program_id(1) * C + tl.arange(0, C)
    at = channel // D * TO_CAPSULE + channel % D * TO_ENTRY + tap * TO_TAP
    return tl.load(weight + at).to(tl.float32)[None, :]


@triton.jit
def _all_weights(
    weight, TO_CAPSULE: tl.constexpr, TO_ENTRY: tl.constexpr, TO_TAP: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Shapes: nine of [P, C]"""
    weights = ()
    for tap in tl.static_range(9):
        weights += (tl.broadcast_to(_weights(weight, tap, TO_CAPSULE, TO_ENTRY, TO_TAP, D, C), (P, C)),)
    return weights


@triton.jit
def _levels(bias, D: tl.constexpr, C: tl.constexpr):
    """Shapes: [1, C / D]"""
    return tl.load(bias + tl.program_id(1) * (C // D) + tl.arange(0, C // D)).to(tl.float32)[None, :]


@triton.jit
def _coefficients(
    vote, weights, level, at, pixel, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Shapes: [P, C / D]"""
    total = tl.zeros((P, C), tl.float32)
    for tap in tl.static_range(9):
        inside = _inside(pixel, pixels, tap // 3 - 1, tap % 3 - 1, HEIGHT, WIDTH)
        beside = at + ((tap // 3 - 1) * WIDTH + tap % 3 - 1) * (CAPS * D)
        total += load_rows(vote, beside, inside) * weights[tap]
    return in_capsules(total, D) + level


@launched
@triton.jit
def mixture_forward(
    master, aide, of_master, master_bias, of_aide, aide_bias, y, m, pixels, per_program,
    TO_CAPSULE: tl.constexpr, TO_ENTRY: tl.constexpr, TO_TAP: tl.constexpr,
    CROSS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    on_master = _all_weights(of_master, TO_CAPSULE, TO_ENTRY, TO_TAP, D, C, P)
    on_aide = _all_weights(of_aide, TO_CAPSULE, TO_ENTRY, TO_TAP, D, C, P)
    master_level, aide_level = _levels(master_bias, D, C), _levels(aide_bias, D, C)
    for k in range(per_program):
        pixel, at, at_m = _block(tl.program_id(0) * per_program + k, CAPS, D, C, P)
        first = _coefficients(master, on_master, master_level, at, pixel, pixels, HEIGHT, WIDTH, CAPS, D, C, P)
        second = _coefficients(aide, on_aide, aide_level, at, pixel, pixels, HEIGHT, WIDTH, CAPS, D, C, P)
        if CROSS:
            first, second = second, first
        there = (pixel < pixels)[:, None]
        tl.store(m + at_m, first.to(m.dtype.element_ty), mask=there)
        tl.store(m + at_m + CAPS, second.to(m.dtype.element_ty), mask=there)
        mixed = times(load_rows(master, at, there), first, D) + times(load_rows(aide, at, there), second, D)
        tl.store(y + at, mixed.to(y.dtype.element_ty), mask=there)


@launched
@triton.jit
def mixture_slopes(
    master, aide, d_y, d_m, pixels, CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr
):
    """The gradients of the coefficients."""
    pixel, at, at_m = _block(tl.program_id(0), CAPS, D, C, P)
    there = (pixel < pixels)[:, None]
    above = load_rows(d_y, at, there)
    to_first = in_capsules(above * load_rows(master, at, there), D)
    to_second = in_capsules(above * load_rows(aide, at, there), D)
    tl.store(d_m + at_m, to_first.to(d_m.dtype.element_ty), mask=there)
    tl.store(d_m + at_m + CAPS, to_second.to(d_m.dtype.element_ty), mask=there)


@triton.jit
def _slope(d_m, at_m, pixel, pixels, tap, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CAPS: tl.constexpr):
    """The gradients of the coefficients that read this pixel there. Shapes: [P, C / D]"""
    inside = _inside(pixel, pixels, 1 - tap // 3, 1 - tap % 3, HEIGHT, WIDTH)
    return load_rows(d_m, at_m - ((tap // 3 - 1) * WIDTH + tap % 3 - 1) * (2 * CAPS), inside)


@triton.jit
def _to_vote(
    weight, m, d_y, d_m, d_vote, pixels, per_program,
    TO_CAPSULE: tl.constexpr, TO_ENTRY: tl.constexpr, TO_TAP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    weights = _all_weights(weight, TO_CAPSULE, TO_ENTRY, TO_TAP, D, C, P)
    for k in range(per_program):
        pixel, at, at_m = _block(tl.program_id(0) * per_program + k, CAPS, D, C, P)
        there = (pixel < pixels)[:, None]
        total = times(load_rows(d_y, at, there), load_rows(m, at_m, there), D)
        for tap in tl.static_range(9):
            total += times(weights[tap], _slope(d_m, at_m, pixel, pixels, tap, HEIGHT, WIDTH, CAPS), D)
        tl.store(d_vote + at, total.to(d_vote.dtype.element_ty), mask=there)


@launched
@triton.jit
def mixture_backward(
    of_master, of_aide, m, d_y, d_m, d_master, d_aide, pixels, per_program,
    TO_CAPSULE: tl.constexpr, TO_ENTRY: tl.constexpr, TO_TAP: tl.constexpr,
    CROSS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The gradients of the votes, by programs of their own."""
    first = CAPS if CROSS else 0  # where the coefficient lies that is read off the master
    if tl.program_id(2) == 0:
        _to_vote(
            of_master, m, d_y, d_m + first, d_master, pixels, per_program, TO_CAPSULE, TO_ENTRY, TO_TAP,
            HEIGHT, WIDTH, CAPS, D, C, P,
        )  # fmt: skip
    else:
        _to_vote(
            of_aide, m + CAPS, d_y, d_m + (CAPS - first), d_aide, pixels, per_program, TO_CAPSULE, TO_ENTRY, TO_TAP,
            HEIGHT, WIDTH, CAPS, D, C, P,
        )  # fmt: skip


@triton.jit
def _to_weights(
    vote, d_m, parts, pixels, per_program,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Shapes: parts [SUMS, CAPS, D], of which that of the bias is for the first entry alone"""
    zero, level = tl.zeros((P, C), tl.float32), tl.zeros((P, C // D), tl.float32)
    totals = (zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for k in range(per_program):
        pixel, at, at_m = _block(tl.program_id(0) * per_program + k, CAPS, D, C, P)
        value, further = load_rows(vote, at, (pixel < pixels)[:, None]), ()
        for tap in tl.static_range(9):
            slope = _slope(d_m, at_m, pixel, pixels, tap, HEIGHT, WIDTH, CAPS)
            further += (totals[tap] + times(value, slope, D),)
            if tap == 4:
                level += slope
        totals = further
    own = parts + tl.program_id(1) * C
    for tap in tl.static_range(9):
        tl.store(own + tap * (CAPS * D) + tl.arange(0, C), tl.sum(totals[tap], 0))
    tl.store(own + 9 * (CAPS * D) + tl.arange(0, C // D) * D, tl.sum(level, 0))


@launched
@triton.jit
def mixture_weights(
    master, aide, d_m, parts, pixels, per_program,
    CROSS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CAPS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Each program's sums for the weights of one vote. Shapes: parts [programs, 2, SUMS, CAPS, D]"""
    first = CAPS if CROSS else 0
    own = parts + tl.program_id(0) * (2 * SUMS * CAPS * D)
    if tl.program_id(2) == 0:
        _to_weights(master, d_m + first, own, pixels, per_program, HEIGHT, WIDTH, CAPS, D, C, P)
    else:
        own += SUMS * CAPS * D
        _to_weights(aide, d_m + (CAPS - first), own, pixels, per_program, HEIGHT, WIDTH, CAPS, D, C, P)


@launched
@triton.jit
def mixture_sums(
    parts, of_master, master_bias, of_aide, aide_bias, rows, to_capsule, to_entry, to_tap,
    CHANNELS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Adds up all programs' sums, of one weight or bias of some channels."""
    which, channel = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W)
    row, total = tl.arange(0, R)[:, None], tl.zeros((R, W), tl.float32)
    capsule, entry, tap = channel // D, channel % D, tl.zeros((W,), tl.int32) + which % SUMS
    there, once = (channel < CHANNELS) & (tap < 9), (channel < CHANNELS) & (tap == 9) & (entry == 0)
    for start in range(0, rows, R):
        at = ((start + row) * (2 * SUMS) + which) * CHANNELS + channel[None, :]
        total += tl.load(parts + at, mask=(start + row < rows) & (there | once)[None, :], other=0.0)
    found = tl.sum(total, 0)
    at = capsule * to_capsule + entry * to_entry + tap * to_tap
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
        and dim & (dim - 1) == 0
        and all(_pixel_by_pixel(vote) for vote in (master, aide))
        and all(_reads_coefficients(conv, caps, dim) for conv in (m1, m2))
        and m1.weight.stride() == m2.weight.stride()
    )


def _reads_coefficients(conv: nn.Module, caps: int, dim: int) -> bool:
    return (
        isinstance(conv, nn.Conv2d)
        and conv.weight.shape == (caps, dim, 3, 3)
        and conv.groups == caps
        and conv.stride == conv.padding == conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and any(conv.weight.is_contiguous(memory_format=f) for f in (torch.contiguous_format, torch.channels_last))
        and conv.bias is not None
        and conv.bias.is_contiguous()
    )


def _pixel_by_pixel(votes: Tensor) -> bool:
    return votes.permute(0, 2, 3, 1, 4).is_contiguous()


def mixture(
    master: Tensor, aide: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, cross: bool
) -> tuple[Tensor, Tensor]:
    """The mixture, and the coefficients.

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
        (blocks, columns), pixels, block = _cut(master, HELD // 2)  # threads hold the weights of both votes
        per_program = triton.cdiv(blocks, max(1, PROGRAMS // columns))
        mixture_forward[(triton.cdiv(blocks, per_program), columns)](
            master, aide, of_master, master_bias, of_aide, aide_bias, y, m, pixels, per_program, *_steps(of_master),
            **block, CROSS=cross, HEIGHT=h, WIDTH=w, num_warps=8, maxnreg=128,
        )  # fmt: skip
        ctx.save_for_backward(master, aide, of_master, master_bias, of_aide, aide_bias, m)
        ctx.cross = cross
        ctx.set_materialize_grads(False)
        return y, m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor | None, to_m: Tensor | None) -> Any:
        master, aide, of_master, _, of_aide, _, m = ctx.saved_tensors
        _, caps, h, w, dim = master.shape
        d_y = torch.zeros_like(master) if d_y is None else laid_out_as(master, d_y)
        d_m = torch.empty_like(m)
        grid, pixels, block = _cut(master, NUMBERS)
        mixture_slopes[grid](master, aide, d_y, d_m, pixels, **block, num_warps=8)
        if to_m is not None:
            d_m += to_m
        d_master, d_aide, *rest = (torch.empty_like(x) for x in ctx.saved_tensors[:-1])
        (blocks, columns), _, block = _cut(master, HELD)
        block |= {"CROSS": ctx.cross, "HEIGHT": h, "WIDTH": w, "num_warps": 8}
        per_program = triton.cdiv(blocks, max(1, PROGRAMS // (2 * columns)))
        grid = triton.cdiv(blocks, per_program), columns, 2
        mixture_backward[grid](
            of_master, of_aide, m, d_y, d_m, d_master, d_aide, pixels, per_program, *_steps(of_master), **block
        )
        parts = torch.empty(grid[0], 2 * SUMS.value, caps * dim, dtype=torch.float32, device=m.device)
        mixture_weights[grid](master, aide, d_m, parts, pixels, per_program, **block)
        mixture_sums[(2 * SUMS.value, triton.cdiv(caps * dim, 32))](
            parts, *rest, grid[0], *_steps(of_master), CHANNELS=caps * dim, D=dim, R=64, W=32
        )
        return d_master, d_aide, *rest, None


def _steps(weight: Tensor) -> tuple[int, int, int]:
    """From one capsule's weights to the next, from one entry's and from one pixel's."""
    return weight.stride(0), weight.stride(1), weight.stride(3)


def _cut(votes: Tensor, numbers: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid over blocks of pixels and of channels, how many pixels there are, and the sizes of a block."""
    caps, dim = votes.shape[1], votes.shape[-1]
    wide = max(dim, min(WIDE, caps * dim))
    high, pixels = numbers // wide, votes.numel() // (caps * dim)
    return (triton.cdiv(pixels, high), caps * dim // wide), pixels, {"CAPS": caps, "D": dim, "C": wide, "P": high}
