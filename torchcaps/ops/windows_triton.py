"""Children that stand in several windows: what these say of them, added up or shared out, in small kernels."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.fused.launch_triton import launched
from torchcaps.ops.plan_triton import Plan, summed
from torchcaps.ops.votes_triton import unknown
from torchcaps.ops.windows import Window

LEAST = tl.constexpr(-1e38)  # stands for the log of 0


@triton.jit
def window_over(y, x, tap, there, S, KS: tl.constexpr, STRIDE: tl.constexpr):
    """The site whose window has a place in its tap-th entry, and whether there is one."""
    row, col = y - tap // KS, x - tap % KS
    seen = there & (row >= 0) & (col >= 0) & (row % STRIDE == 0) & (col % STRIDE == 0)
    row, col = row // STRIDE, col // STRIDE
    return row * S.X + col, seen & (row < S.Y) & (col < S.X)


@launched
@triton.jit
def fold(windows, poses, blocks, H, W, CAPS, S, T: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up what each child got from all blocks of parents in all its windows.

    Shapes: windows [blocks, n, (c k k), p] -> poses [b, h, w, c, p]
    """
    P: tl.constexpr = T.M * T.A
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p, c, x, y = at % P, at // P % CAPS, at // (P * CAPS) % W, at // (P * CAPS * W)
    windows += image * (S.Y * S.X * S.I * P)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        for tap in tl.static_range(T.KS * T.KS):
            site, seen = window_over(y, x, unknown(tap), y < H, S, T.KS, STRIDE)
            entry = p
            if T.SCRAMBLED:
                flat = p * (S.Y * S.X) + site
                site, entry = flat // P, flat % P
            source = (site * S.I + c * (T.KS * T.KS) + tap) * P + entry
            total += tl.load(windows + source, mask=seen, other=0.0).to(tl.float32)
        windows += tl.cast(S.N, tl.int64) * S.I * P
    tl.store(poses + image * (H * W * CAPS * P) + at, total.to(poses.dtype.element_ty), mask=y < H)


@launched
@triton.jit
def over_windows(
    x, factor, out, blocks, S, KS: tl.constexpr, STRIDE: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of x times a factor, or with LOG the log of the sum of exp(x), over all windows a child stands in.

    Shapes: x [blocks, n, (c k k)], factor [n, (c k k)] -> out [n, (c k k)], for each of these windows
    """
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    child, site = at % S.I, at // S.I
    sites = S.Y * S.X
    there = site < sites
    x += image * (sites * S.I)
    factor += image * (sites * S.I)
    down, right = site // S.X * STRIDE + child // KS % KS, site % S.X * STRIDE + child % KS
    top = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        for tap in range(KS * KS):
            source, seen = window_over(down, right, tap, there, S, KS, STRIDE)
            source = source * S.I + child // (KS * KS) * (KS * KS) + tap
            if LOG:
                value = tl.load(x + source, mask=seen, other=LEAST)
                new = tl.maximum(top, value)
                total = total * tl.exp(top - new) + tl.exp(value - new)
                top = new
            else:
                weight = tl.load(factor + source, mask=seen, other=0.0)
                total += tl.load(x + source, mask=seen, other=0.0) * weight
        x += tl.cast(S.N, tl.int64) * S.I
    if LOG:
        total = top + tl.log(total)
    tl.store(out + image * (sites * S.I) + at, total, mask=there)


@launched
@triton.jit(do_not_specialize=["blocks"])
def even_shares(x, out, blocks, S, KS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Divides what belongs to children, summed over blocks, by the parents in all windows that compete for them.

    Shapes: x [blocks, n, (c k k)] -> out [n, (c k k)]
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.cast(S.N, tl.int64) * S.I
    child, site = (at % S.I).to(tl.int32), (at // S.I % (S.Y * S.X)).to(tl.int32)
    down, right = site // S.X * STRIDE + child // KS % KS, site % S.X * STRIDE + child % KS
    rows = tl.minimum(down // STRIDE, S.Y - 1) - tl.maximum(down - KS + STRIDE, 0) // STRIDE + 1
    columns = tl.minimum(right // STRIDE, S.X - 1) - tl.maximum(right - KS + STRIDE, 0) // STRIDE + 1
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(blocks):
        total += tl.load(x + at, mask=at < size, other=0.0)
        x += size
    tl.store(out + at, total / (rows * columns * S.J).to(tl.float32), mask=at < size)


def fold_windows(windows: Tensor, poses: Tensor, plan: Plan, window: Window | None) -> Tensor:
    """The gradient of the poses from that of each window's.

    Shapes: windows [blocks of parents, n, i, p], poses [b, i, p] or [b, c, p, h, w] -> as poses
    """
    if poses.dim() == 3:
        return summed(windows)
    assert window is not None
    b, c, p, h, w = poses.shape
    folded = torch.empty(b, h, w, c, p, dtype=windows.dtype, device=poses.device)
    block = 512
    grid = (b, triton.cdiv(h * w * c * p, block))
    fold[grid](windows, folded, len(windows), h, w, c, plan.space, plan.tile, window.stride, block)
    return folded.permute(0, 3, 4, 1, 2)


def sum_over_windows(x: Tensor, plan: Plan, window: Window | None, factor: Tensor | None = None) -> Tensor:
    """The sum of x times a factor, without one the log of the sum of exp(x).

    Shapes: x [blocks, n, i], factor [n, i] -> [n, i]
    """
    window = window or Window(1)
    out = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    block = 512
    sites = plan.space.Y * plan.space.X
    grid = (plan.space.N // sites, triton.cdiv(sites * plan.space.I, block))
    log, factor = factor is None, x if factor is None else factor
    over_windows[grid](x, factor, out, len(x), plan.space, window.kernel_size, window.stride, log, block)
    return out


def shared_evenly(x: Tensor, plan: Plan, competing: Window | None) -> Tensor:
    """Shapes: x [blocks, n, i] -> [n, i]"""
    window = competing or Window(1)
    out = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device)
    block = 512
    grid = (triton.cdiv(out.numel(), block),)
    even_shares[grid](x, out, len(x), plan.space, window.kernel_size, window.stride, block)
    return out
