"""Convolutions of several replicas, each with its own weights, in Triton.

Grouped convolutions of a few channels leave a GPU idle. Here every tile is a matrix product over the taps and channels
of one replica, whose patches are gathered on the way and never stored: forward, to the images (with the taps turned
round), and to the weights, split over the pixels and summed in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _patches(
    source, m, k, valid, replica, HS, WS, HO, WO, sb, sr, sc, sh, sw,
    KW: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """What tap and channel k see from output pixel m; BACK goes from pixels of the images to those of the maps."""
    image, rest = m // (HO * WO), m % (HO * WO)
    y, x = rest // WO, rest % WO
    tap, c = k // C, k % C
    i, j = tap // KW, tap % KW
    if BACK:
        ys, xs = y + PAD - i, x + PAD - j
        valid = valid & (ys >= 0) & (xs >= 0) & (ys % STRIDE == 0) & (xs % STRIDE == 0)
        ys, xs = ys // STRIDE, xs // STRIDE
    else:
        ys, xs = y * STRIDE + i - PAD, x * STRIDE + j - PAD
        valid = valid & (ys >= 0) & (xs >= 0)
    valid = valid & (ys < HS) & (xs < WS)
    return tl.load(source + replica * sr + image * sb + ys * sh + xs * sw + c * sc, mask=valid, other=0.0)


@triton.jit
def _convolve(
    source, weight, bias, out, M, N, HS, WS, HO, WO, sb, sr, sc, sh, sw, wr, wn, wc, wt, ob, on_r, oh, ow,
    K: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        valid = (m < M)[:, None] & (k < K)[None, :]
        patches = _patches(
            source, m[:, None], k[None, :], valid, replica, HS, WS, HO, WO, sb, sr, sc, sh, sw, KW, C, STRIDE, PAD, BACK
        )
        places = weight + replica * wr + (k // C * wt + k % C * wc)[:, None] + n[None, :] * wn
        kernel = tl.load(places, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(patches, kernel, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + replica * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    image, rest = m // (HO * WO), m % (HO * WO)
    places = out + replica * on_r + (image * ob + rest // WO * oh + rest % WO * ow)[:, None] + n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _to_weights(
    source, gradient, out, M, N, R, HS, WS, HO, WO, sb, sr, sc, sh, sw, gb, gr, gh, gw, each,
    K: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(K, BK)
    k = tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    n = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    replica, part = tl.program_id(1), tl.program_id(2)
    total = tl.zeros((BK, BN), tl.float32)
    for start in range(part * each, min(M, (part + 1) * each), BM):
        m = start + tl.arange(0, BM)
        ok = (k < K)[:, None] & (m < M)[None, :]
        patches = _patches(
            source, m[None, :], k[:, None], ok, replica, HS, WS, HO, WO, sb, sr, sc, sh, sw, KW, C, STRIDE, PAD, False
        )
        image, rest = m // (HO * WO), m % (HO * WO)
        places = gradient + replica * gr + (image * gb + rest // WO * gh + rest % WO * gw)[:, None] + n[None, :]
        tops = tl.load(places, mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(patches, tops, total, input_precision=PRECISION)
    places = out + ((part * R + replica) * N + n)[None, :] * K + k[:, None]
    tl.store(places, total, mask=(k < K)[:, None] & (n < N)[None, :])


@triton.jit
def _add_up(parts, out, count, size, B: tl.constexpr):
    """Shapes: parts [count, size] -> out [size]"""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for k in range(count):
        total += tl.load(parts + k * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


class ReplicaConv(torch.autograd.Function):
    """Shapes: images [b, r, c, h, w], weight [r, o, c, k, l], bias [r, o] or None -> [b, r, o, y, x]

    The maps lie in memory as [b, y, x, r, o], which is channels-last for all replicas' channels together.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        h, w = images.shape[3:]
        tall, wide = weight.shape[3:]
        size = ((h + 2 * padding - tall) // stride + 1, (w + 2 * padding - wide) // stride + 1)
        ctx.save_for_backward(images, weight)
        ctx.options = stride, padding, bias is not None
        kernel = weight.permute(0, 1, 3, 4, 2).contiguous()  # [r, o, (k l), c]; a view where it lies so already
        offsets = None if bias is None else bias.contiguous()
        return _run(images, kernel, offsets, size, stride, padding, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        images, weight = ctx.saved_tensors
        stride, padding, has_bias = ctx.options
        (tops,) = gradients
        tops = tops.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
        to_images = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            kernel = weight.permute(0, 1, 3, 4, 2).contiguous()
            size = (images.shape[3], images.shape[4])
            to_images = _run(tops, kernel, None, size, stride, padding, back=True)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_gradient(images, tops, weight, stride, padding)
        if has_bias and ctx.needs_input_grad[2]:
            to_bias = tops.sum((0, 3, 4))
        return to_images, to_weight, to_bias, None, None


def suits(images: Tensor, weight: Tensor) -> bool:
    """Whether the kernels know the type, and count the elements in 32 bits."""
    b, r, _, h, w = images.shape
    known = images.dtype == weight.dtype and images.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and b * r * h * w * max(weight.shape[1:3]) < 2**31


def precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _block(size: int, most: int = 64) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _run(
    source: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    size: tuple[int, int],
    stride: int,
    padding: int,
    back: bool,
) -> Tensor:
    """`kernel` [r, o, k, l, c] stands for channels that come in and out: o gives c going back."""
    b, r, c = source.shape[:3]
    _, o, tall, wide, _ = kernel.shape
    outs = kernel.shape[4] if back else o
    out = torch.empty(b, *size, r, outs, dtype=source.dtype, device=source.device)
    rows = b * size[0] * size[1]
    on_n, on_c = (kernel.stride(4), kernel.stride(1)) if back else (kernel.stride(1), kernel.stride(4))
    bn = _block(outs, 128)
    bm = 128 if r * rows >= 128 * 264 else 64
    grid = (triton.cdiv(rows, bm), r, triton.cdiv(outs, bn))
    _convolve[grid](
        source, kernel, bias, out, rows, outs, source.shape[3], source.shape[4], *size, *source.stride(),
        kernel.stride(0), on_n, on_c, kernel.stride(3), out.stride(0), out.stride(3), out.stride(1), out.stride(2),
        K=tall * wide * c, KW=wide, C=c, STRIDE=stride, PAD=padding, BACK=back, HAS_BIAS=bias is not None,
        PRECISION=precision(), BM=bm, BN=bn, BK=_block(tall * wide * c, 64 if source.element_size() == 2 else 32),
        num_warps=8 if bm * bn > 128 * 64 else 4, num_stages=3,
    )  # fmt: skip
    return out.permute(0, 3, 4, 1, 2)


def _weight_gradient(images: Tensor, tops: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    b, r, c, h, w = images.shape
    o, tall, wide = weight.shape[1], *weight.shape[3:]
    high, broad = tops.shape[3:]
    rows, k = b * high * broad, tall * wide * c
    bk, bn, bm = _block(k), _block(o), 64 if images.element_size() == 2 else 32
    tiles = triton.cdiv(k, bk) * triton.cdiv(o, bn)
    parts = max(1, min(triton.cdiv(rows, 8 * bm), 1056 // max(1, tiles * r)))
    each = triton.cdiv(triton.cdiv(rows, parts), bm) * bm
    out = torch.empty(parts, r, o, tall, wide, c, dtype=torch.float32, device=images.device)
    gb, gr, _, gh, gw = tops.stride()
    _to_weights[(tiles, r, parts)](
        images, tops, out, rows, o, r, h, w, high, broad, *images.stride(), gb, gr, gh, gw, each,
        K=k, KW=wide, C=c, STRIDE=stride, PAD=padding, PRECISION=precision(), BM=bm, BN=bn, BK=bk,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    whole = torch.empty(out.shape[1:], dtype=weight.dtype, device=images.device)
    _add_up[(triton.cdiv(whole.numel(), 1024),)](out, whole, parts, whole.numel(), B=1024)
    return whole.permute(0, 1, 4, 2, 3)
