"""Self-attention routing of few votes: from the children's poses to the parents' poses and lengths in one kernel.

A program has all votes of an image in registers. Backward it makes them again and leaves their gradient, which a second
kernel turns into that of the weights. Sums are in float32, whatever the poses are in. Replicas under vmap are an axis
of the grid.
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
from torchcaps.ops.votes import Votes

MOST = 2**12  # votes times their size of an image, padded: of more, too many are in registers at once
FEW = 2**21  # of all images
LONGEST = 16  # of the children's poses
IMAGES, COLUMNS = 16, 32  # of which a program adds up the weights' gradient at a time


@triton.jit
def _places(C: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr):
    """Where the votes of an image lie, and which there are; the same of pairs and of parents.

    Shapes: [CP, JP, DP], [CP, JP, 1], [1, JP, DP]
    """
    i, j, d = tl.arange(0, CP)[:, None, None], tl.arange(0, JP)[None, :, None], tl.arange(0, DP)[None, None, :]
    pairs, parents = i * J + j, j * D + d
    is_pair, is_parent = (i < C) & (j < J), (j < J) & (d < D)
    return pairs * D + d, is_pair & (d < D), pairs, is_pair, parents, is_parent


@triton.jit
def _weight(weight, a, at, there, A: tl.constexpr, J: tl.constexpr, D: tl.constexpr, CP: tl.constexpr):
    """Of entry a of the children's poses. Shapes: [CP, JP, DP]"""
    i = tl.arange(0, CP)[:, None, None]
    return tl.load(weight + at + ((A - 1) * i + a) * (J * D), mask=there, other=0.0)


@triton.jit
def _routed(
    poses, weight, prior, scale,
    C: tl.constexpr, A: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    CP: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Votes, their sum, the softmax of the agreement, the coupling, and the mixture with its norm.

    Shapes: [CP, JP, DP], [1, JP, DP], [CP, JP, 1], [CP, JP, 1], [1, JP, DP], [1, JP, 1]
    """
    at, there, pairs, is_pair, _, _ = _places(C, J, D, CP, JP, DP)
    i = tl.arange(0, CP)[:, None, None]
    votes = tl.zeros((CP, JP, DP), tl.float32)
    for a in tl.static_range(A):
        pose = tl.load(poses + i * A + a, mask=i < C, other=0.0).to(tl.float32)
        votes += pose * _weight(weight, a, at, there, A, J, D, CP)
    total = tl.sum(votes, 0)[None]
    agreement = tl.sum(votes * total, 2)[:, :, None] * scale
    agreement = tl.where(tl.arange(0, JP)[None, :, None] < J, agreement, -float("inf"))
    shares = tl.exp(agreement - tl.max(agreement, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    coupling = shares
    if prior is not None:
        coupling += tl.load(prior + pairs, mask=is_pair, other=0.0)
    mixture = tl.sum(coupling * votes, 0)[None]
    return votes, total, shares, coupling, mixture, tl.sqrt(tl.sum(mixture * mixture, 2))[:, :, None]


@triton.jit
def attend(
    poses, weight, prior, parents, lengths, scale, on_r, on_n,
    C: tl.constexpr, A: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    CP: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Shapes: poses [r, n, C, A], weight [r, C, A, J, D], prior [r, C, J] -> parents [r, n, J, D], lengths [r, n, J]"""
    image, replica = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    poses += replica * on_r + image * on_n
    weight += replica * (C * A * J * D)
    if prior is not None:
        prior += replica * (C * J)
    _, _, _, _, mixture, norm = _routed(poses, weight, prior, scale, C, A, J, D, CP, JP, DP)
    factor, _ = factors(norm, "squash_exp")
    own = (replica * tl.num_programs(0) + image) * J
    _, _, _, _, at, there = _places(C, J, D, CP, JP, DP)
    tl.store(parents + own * D + at, (mixture * factor).to(parents.dtype.element_ty), mask=there)
    j = tl.arange(0, JP)[None, :, None]
    tl.store(lengths + own + j, norm * factor, mask=j < J)


@triton.jit
def attend_backward(
    poses, weight, prior, d_parents, d_lengths, d_poses, d_votes, d_prior, scale, on_r, on_n,
    C: tl.constexpr, A: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    CP: tl.constexpr, AP: tl.constexpr, JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Shapes: d_votes [r, n, C, J, D], d_prior [r, n, C, J]"""
    image, replica = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    poses += replica * on_r + image * on_n
    weight += replica * (C * A * J * D)
    if prior is not None:
        prior += replica * (C * J)
    votes, total, shares, coupling, mixture, norm = _routed(poses, weight, prior, scale, C, A, J, D, CP, JP, DP)
    at, there, pairs, is_pair, rows, is_row = _places(C, J, D, CP, JP, DP)
    factor, slope = factors(norm, "squash_exp")
    own = replica * tl.num_programs(0) + image
    d_poses += own * (C * A)
    along = tl.zeros((1, JP, 1), tl.float32)
    d_mixture = tl.zeros((1, JP, DP), tl.float32)
    if d_lengths is not None:
        j = tl.arange(0, JP)[None, :, None]
        along += tl.load(d_lengths + own * J + j, mask=j < J, other=0.0) * (factor + norm * slope)
    if d_parents is not None:
        above = tl.load(d_parents + own * (J * D) + rows, mask=is_row, other=0.0).to(tl.float32)
        along += tl.sum(above * mixture, 2)[:, :, None] * slope
        d_mixture += above * factor
    d_mixture += mixture * tl.where(norm > 0, along / tl.where(norm > 0, norm, 1.0), 0.0)
    d_coupling = tl.sum(votes * d_mixture, 2)[:, :, None]
    if prior is not None:
        tl.store(d_prior + own * (C * J) + pairs, d_coupling, mask=is_pair)
    d_agreement = scale * shares * (d_coupling - tl.sum(shares * d_coupling, 1)[:, None])
    d_total = tl.sum(d_agreement * votes, 0)[None]
    grad = tl.where(there, coupling * d_mixture + d_agreement * total + d_total, 0.0)
    tl.store(d_votes + own * (C * J * D) + at, grad, mask=there)
    i, entry = tl.arange(0, CP)[:, None], tl.arange(0, AP)[None, :]
    to_poses = tl.zeros((CP, JP, AP), tl.float32)  # of each parent, so that they are added up once for all entries
    for a in tl.static_range(A):
        part = tl.sum(grad * _weight(weight, a, at, there, A, J, D, CP), 2)[:, :, None]
        to_poses = tl.where(entry[None] == a, part, to_poses)
    places = d_poses + i * A + entry
    tl.store(places, tl.sum(to_poses, 1).to(d_poses.dtype.element_ty), mask=(i < C) & (entry < A))


@triton.jit
def attend_to_weights(
    poses, d_votes, d_prior, d_weight, d_priors, images, on_r, on_n,
    C: tl.constexpr, A: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    AP: tl.constexpr, JP: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Of one child and some columns of its weights, over all images.

    Shapes: d_weight [r, C, A, J, D], d_priors [r, C, J]
    """
    i, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    a, j = tl.arange(0, AP), tl.arange(0, JP)
    to_weight, to_prior = tl.zeros((AP, W), tl.float32), tl.zeros((JP,), tl.float32)
    for start in range(0, images, N):
        n = start + tl.arange(0, N)
        child = (replica * images + n) * C + i
        pose = tl.load(
            poses + replica * on_r + (n * on_n)[None, :] + i * A + a[:, None],
            mask=(n < images)[None, :] & (a < A)[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        there = (n < images)[:, None] & (column < J * D)[None, :]
        grad = tl.load(d_votes + (child * (J * D))[:, None] + column[None, :], mask=there, other=0.0)
        if AP >= 16:  # the sum below would become a product too, but one in TF32
            to_weight = tl.dot(pose, grad, to_weight, input_precision="ieee")
        else:
            to_weight += tl.sum(pose[:, :, None] * grad[None], 1)
        if d_prior is not None:
            pairs = d_prior + (child * J)[:, None] + j[None, :]
            to_prior += tl.sum(tl.load(pairs, mask=(n < images)[:, None] & (j < J)[None, :], other=0.0), 0)
    own = replica * C + i
    places = d_weight + (own * A + a[:, None]) * (J * D) + column[None, :]
    tl.store(places, to_weight, mask=(a < A)[:, None] & (column < J * D)[None, :])
    if d_prior is not None:
        tl.store(d_priors + own * J + j, to_prior, mask=j < tl.where(tl.program_id(1) == 0, J, 0))


def takes(votes: Votes) -> bool:
    """Whether these are few votes of vectors, of one network or, under vmap, of its replicas."""
    poses, weight = votes.poses, votes.weight
    replicas = [torch._C._functorch.is_batchedtensor(x) for x in (poses, weight)]
    sizes = votes.in_caps, votes.parents, max(votes.dim, votes.child_dim)
    return (
        votes.window is None
        and votes.offset is None
        and votes.rows == votes.sharing == 1
        and 0 < votes.child_dim <= LONGEST
        and poses.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.dtype == torch.float32
        and 0 < _padded(*sizes) <= MOST
        and 0 < poses.shape[0] * votes.in_caps * votes.parents * votes.dim <= FEW
        and (poses.device.type == "cuda" or bool(triton.knobs.runtime.interpret))
        and all(replicas) == any(replicas)
    )


def _padded(*sizes: int) -> int:
    size = 1
    for each in sizes:
        size *= triton.next_power_of_2(each)
    return size


def self_attention(votes: Votes, prior: Tensor | None, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The parents' poses, squashed and in that dtype, and their lengths in float32.

    Shapes: prior [i, j] -> [b, j, d], [b, j]
    """
    poses, lengths = _SelfAttention.apply(votes.poses, votes.weight, prior, scale, dtype)
    return poses, lengths


class _SelfAttention(torch.autograd.Function):
    """Shapes: poses [n, i, a], weight [i, a, j, d], prior [i, j]; or all with an axis over the replicas in front"""

    @staticmethod
    def forward(
        poses: Tensor, weight: Tensor, prior: Tensor | None, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        poses, inputs, places, sizes = _prepared(poses, weight, prior)
        *_, j, d = weight.shape
        lead = poses.shape[:-2]
        parents = torch.empty(*lead, j, d, dtype=dtype, device=poses.device)
        lengths = torch.empty(*lead, j, dtype=torch.float32, device=poses.device)
        attend[_grid(poses)](poses, *inputs, parents, lengths, scale, *places, **sizes, num_warps=8)
        return parents, lengths

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3])
        ctx.scale = inputs[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_parents: Tensor | None, d_lengths: Tensor | None) -> Any:
        poses, (weight, prior), places, sizes = _prepared(*ctx.saved_tensors)
        d_parents, d_lengths = (None if x is None else x.contiguous() for x in (d_parents, d_lengths))
        new = {"dtype": torch.float32, "device": poses.device}
        lead, (i, a, j, d) = poses.shape[:-2], weight.shape[-4:]
        d_poses = torch.empty(poses.shape, dtype=poses.dtype, device=poses.device)
        d_weight = torch.empty(weight.shape, **new)
        d_votes = torch.empty(*lead, i, j, d, **new)
        d_pairs = None if prior is None else torch.empty(*lead, i, j, **new)
        d_prior = None if prior is None else torch.empty(prior.shape, **new)
        grid, padded = _grid(poses), triton.next_power_of_2(a)
        attend_backward[grid](
            poses, weight, prior, d_parents, d_lengths, d_poses, d_votes, d_pairs, ctx.scale, *places, **sizes,
            AP=padded, num_warps=8,
        )  # fmt: skip
        attend_to_weights[(i, triton.cdiv(j * d, COLUMNS), grid[1])](
            poses, d_votes, d_pairs, d_weight, d_prior, grid[0], *places,
            C=i, A=a, J=j, D=d, AP=padded, JP=sizes["JP"], N=IMAGES, W=COLUMNS,
        )  # fmt: skip
        return d_poses, d_weight, d_prior, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, poses: Tensor, weight: Tensor, prior: Tensor | None, *rest: Any) -> Any:
        return _SelfAttention.apply(*fronted(info, in_dims, (poses, weight, prior)), *rest), (0, 0)


def _prepared(poses: Tensor, weight: Tensor, prior: Tensor | None) -> Any:
    """Poses of which an image's lie together, the other inputs, strides over replicas and images, and sizes."""
    i, a, j, d = weight.shape[-4:]
    if poses.stride()[-2:] != (a, 1):
        poses = poses.contiguous()
    places = (poses.stride(0) if poses.dim() > 3 else 0), poses.stride(-3)
    padded = {f"{name}P": triton.next_power_of_2(size) for name, size in zip("CJD", (i, j, d), strict=True)}
    inputs = weight.contiguous(), None if prior is None else prior.contiguous()
    return poses, inputs, places, {"C": i, "A": a, "J": j, "D": d, **padded}


def _grid(poses: Tensor) -> tuple[int, int]:
    return poses.shape[-3], poses.shape[:-3].numel()
