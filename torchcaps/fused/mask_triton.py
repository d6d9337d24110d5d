"""The capsules of each target, all others set to 0, in one kernel each way.

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

BLOCK = 1024


@triton.jit
def mask_forward(
    poses, targets, out, count, objects, on_r, on_b, on_k, J: tl.constexpr, D: tl.constexpr, B: tl.constexpr
):
    """Shapes: poses [r, b, J, D], targets [r, b, k] with strides -> out [r, b, k, J, D], `count` numbers a replica"""
    replica = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    copy, entry = at // (J * D), at % (J * D)
    image, own = copy // objects, copy % objects
    target = tl.load(targets + replica * on_r + image * on_b + own * on_k, mask=at < count, other=-1)
    chosen = (at < count) & (target == entry // D)
    value = tl.load(poses + replica * (count // objects) + image * (J * D) + entry, mask=chosen, other=0.0)
    tl.store(out + replica * count + at, value, mask=at < count)


@triton.jit
def mask_backward(
    d_out, targets, d_poses, count, objects, on_r, on_b, on_k, J: tl.constexpr, D: tl.constexpr, B: tl.constexpr
):
    """Shapes: as forward, but for `count`, the numbers of d_poses"""
    replica = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    image, entry = at // (J * D), at % (J * D)
    total = tl.zeros((B,), tl.float32)
    for k in range(objects):
        target = tl.load(targets + replica * on_r + image * on_b + k * on_k, mask=at < count, other=-1)
        chosen = (at < count) & (target == entry // D)
        places = d_out + replica * count * objects + (image * objects + k) * (J * D) + entry
        total += tl.load(places, mask=chosen, other=0.0).to(tl.float32)
    tl.store(d_poses + replica * count + at, total.to(d_poses.dtype.element_ty), mask=at < count)


def takes(poses: Tensor, targets: Tensor) -> bool:
    return (
        poses.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and targets.dim() == 2
        and len(targets) == len(poses)
        and 0 < poses.numel() * targets.shape[1] < 2**31
        and (poses.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
    )


def masked(poses: Tensor, targets: Tensor) -> Tensor:
    """Shapes: poses [b, j, d], targets [b, k] -> [b, k, j, d]"""
    out: Tensor = _Mask.apply(poses, targets)
    return out


class _Mask(torch.autograd.Function):
    """Shapes: as `masked`, or all with an axis over the replicas in front"""

    @staticmethod
    def forward(poses: Tensor, targets: Tensor) -> Tensor:
        out = torch.empty(*targets.shape, *poses.shape[-2:], dtype=poses.dtype, device=poses.device)
        _launch(mask_forward, poses.contiguous(), targets, out, out.shape[-4:].numel())
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        (targets,) = ctx.saved_tensors
        d_poses = torch.empty(*targets.shape[:-1], *d_out.shape[-2:], dtype=d_out.dtype, device=d_out.device)
        _launch(mask_backward, d_out.contiguous(), targets, d_poses, d_poses.shape[-3:].numel())
        return d_poses, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Tensor) -> Any:
        return _Mask.apply(*fronted(info, in_dims, inputs)), 0


def _launch(kernel: Any, source: Tensor, targets: Tensor, result: Tensor, count: int) -> None:
    lead = targets.shape[:-2]
    kernel[(triton.cdiv(count, BLOCK), lead.numel())](
        source, targets, result, count, targets.shape[-1], *strides_of(targets, len(lead)),
        J=result.shape[-2], D=result.shape[-1], B=BLOCK,
    )  # fmt: skip
