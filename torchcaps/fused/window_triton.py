"""Primary capsules whose window is the whole map, each channel by itself: a weighted sum, a bias and a squash.

One kernel each way, over maps that lie in memory with their channels last. Backward, a program has all images of its
pixels and channels, so that the gradient to the weights is a sum it has at hand. Replicas under vmap are more channels.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.fused.rows_triton import factors
from torchcaps.fused.switch import fronted

CHANNELS = 16  # of a program, or as many as a capsule has
PIXELS = 128  # that are added up at a time
IMAGES, FEW_PIXELS = 16, 8  # the same backward
LONGEST = 32  # of the capsules, which a program has whole
MOST = 512  # images: backward, a program goes through all of them


@triton.jit
def window_forward(
    x, weight, bias, sums, y, pixels, channels,
    P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Shapes: x [b, p, c], weight [c, p], bias [c] -> sums and y [b, c]"""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros((P, C), tl.float32)
    for start in range(0, pixels, P):
        pixel = start + tl.arange(0, P)
        there = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + (image * pixels + pixel[:, None]) * channels + channel[None, :], mask=there, other=0.0)
        factor = tl.load(weight + channel[None, :] * pixels + pixel[:, None], mask=there, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)
    own = tl.sum(total, 0)
    if bias is not None:
        own += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    at = image * channels + channel
    tl.store(sums + at, own, mask=channel < channels)
    capsules = tl.reshape(own, (C // D, D))
    factor, _ = factors(tl.sqrt(tl.sum(capsules * capsules, 1)), KIND)
    squashed = tl.reshape(capsules * factor[:, None], (C,))
    tl.store(y + at, squashed.to(y.dtype.element_ty), mask=channel < channels)


@triton.jit
def window_backward(
    x, weight, sums, d_y, d_x, d_weight, d_bias, images, pixels, channels,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Some pixels of some channels, in all images. Shapes: as forward"""
    pixel, channel = tl.program_id(0) * P + tl.arange(0, P), tl.program_id(1) * C + tl.arange(0, C)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    places = channel[None, :] * pixels + pixel[:, None]
    gain = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    to_weight, to_bias = tl.zeros((P, C), tl.float32), tl.zeros((C,), tl.float32)
    for start in range(0, images, N):
        image = (start + tl.arange(0, N)).to(tl.int64)
        at = image[:, None] * channels + channel[None, :]
        there = (image < images)[:, None] & (channel < channels)[None, :]
        capsules = tl.reshape(tl.load(sums + at, mask=there, other=0.0), (N, C // D, D))
        above = tl.reshape(tl.load(d_y + at, mask=there, other=0.0).to(tl.float32), (N, C // D, D))
        norm = tl.sqrt(tl.sum(capsules * capsules, 2))[:, :, None]
        factor, slope = factors(norm, KIND)
        along = tl.sum(above * capsules, 2)[:, :, None] * slope
        grad = above * factor + capsules * tl.where(norm > 0, along / tl.where(norm > 0, norm, 1.0), 0.0)
        grad = tl.reshape(grad, (N, C))
        to_bias += tl.sum(grad, 0)
        at = (image[:, None, None] * pixels + pixel[None, :, None]) * channels + channel[None, None, :]
        there = (image < images)[:, None, None] & inside[None]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        to_weight += tl.sum(value * grad[:, None, :], 0)
        tl.store(d_x + at, (grad[:, None, :] * gain[None]).to(d_x.dtype.element_ty), mask=there)
    tl.store(d_weight + places, to_weight.to(d_weight.dtype.element_ty), mask=inside)
    if d_bias is not None:
        tl.store(d_bias + channel, to_bias, mask=channel < tl.where(tl.program_id(0) == 0, channels, 0))


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> bool:
    """Whether there is a kernel for capsules of that size, of one network or, under vmap, its replicas.

    Shapes: x [b, c, h, w], weight [c, 1, y, x], bias [c]
    """
    replicas = [torch._C._functorch.is_batchedtensor(t) for t in (x, weight, bias) if t is not None]
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and (bias is None or bias.dtype == torch.float32)
        and x.shape[1:] == (len(weight), *weight.shape[2:])
        and weight.shape[1] == 1
        and 0 < len(x) <= MOST
        and 0 < x.numel() < 2**31
        and dim == triton.next_power_of_2(dim) <= LONGEST
        and (x.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
        and (all(replicas) or (not any(replicas) and x.is_contiguous(memory_format=torch.channels_last)))
    )


def capsules(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, kind: str) -> Tensor:
    """ "squash" or "squash_exp" of each capsule. Shapes: x [b, (c d), h, w], weight [(c d), 1, h, w] -> [b, c, d]"""
    y, _ = _Window.apply(x, weight, bias, dim, kind)
    return y.unflatten(1, (-1, dim))


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, kind: str) -> tuple[Tensor, Tensor]:
        images, channels = x.shape[:2]
        y = torch.empty(images, channels, dtype=x.dtype, device=x.device)
        sums = torch.empty(images, channels, dtype=torch.float32, device=x.device)
        wide, pixels = max(CHANNELS, dim), weight[0].numel()
        high = min(PIXELS, triton.next_power_of_2(pixels))
        window_forward[(images, triton.cdiv(channels, wide))](
            x, weight.contiguous(), bias, sums, y, pixels, channels, P=high, C=wide, D=dim, KIND=kind
        )
        return y, sums

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, *ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])
        ctx.biased = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor | None, _: Any) -> Any:
        if d_y is None:
            return (None,) * 5
        x, weight, sums = ctx.saved_tensors
        dim, kind = ctx.options
        images, channels = sums.shape
        d_x, d_weight = torch.empty_like(x), torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
        d_bias = torch.empty(channels, dtype=torch.float32, device=x.device) if ctx.biased else None
        wide, pixels = max(CHANNELS, dim), weight[0].numel()
        window_backward[(triton.cdiv(pixels, FEW_PIXELS), triton.cdiv(channels, wide))](
            x, weight.contiguous(), sums, d_y.contiguous(), d_x, d_weight, d_bias, images, pixels, channels,
            N=IMAGES, P=FEW_PIXELS, C=wide, D=dim, KIND=kind,
        )  # fmt: skip
        return d_x, d_weight, d_bias, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        """The replicas' channels side by side. Shapes: x [r, b, c, h, w], weight [r, c, 1, h, w] -> [b, r, c]"""
        flat = x.movedim(in_dims[0], 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        others = fronted(info, in_dims[1:], (weight, bias))
        y, sums = _Window.apply(flat, *(None if t is None else t.flatten(0, 1) for t in others), *rest)
        return (y.unflatten(1, (info.batch_size, -1)), sums.unflatten(1, (info.batch_size, -1))), (1, 1)
