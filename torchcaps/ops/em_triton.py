"""EM's steps in kernels, forward and backward, with nothing in memory that has a number for each child and parent.

A step is three sums over the children: of their shares in a parent, of the votes so weighted, and of the squares of the
votes, both counted from a centre near the mean, so that the variance they give does not drown in rounding. The shares
come from the Gaussians of the step before: a first pass takes, for each child, the log of the sum of its densities, a
small one adds up the windows that compete for it, and the main pass makes the densities again.

Capsules with activations that route by agreement (Tsai's ablation C) take the same steps, with agreement in the place
of log densities and the parents in that of precisions.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.ahead_triton import rehearsed
from torchcaps.ops.em_backward_triton import em_backward, em_backward_gather
from torchcaps.ops.em_first_triton import first_gradients, without_votes
from torchcaps.ops.em_fit_triton import fitted
from torchcaps.ops.em_forward_triton import AGREED, EVEN, FITTED, GIVEN, em_forward, em_gather
from torchcaps.ops.plan_triton import (
    Plan,
    few_pairs,
    interpreted,
    low_of,
    or_,
    pack_weight,
    plan,
    pose_sum,
    precision_of,
    summed,
    weight_sum,
)
from torchcaps.ops.votes import Votes
from torchcaps.ops.votes_triton import Tile
from torchcaps.ops.windows import Window
from torchcaps.ops.windows_triton import fold_windows, shared_evenly, sum_over_windows

SCORED = (FITTED.value, AGREED.value)
FEWER = 16  # columns of a product where gradients of four rows are at hand too, in bfloat16: two children, not four
PACKED_BYTES = 2**26  # of weights, as products take them; more are read as they are
NARROW = 168  # registers of a thread with which a multiprocessor has room for three programs of four warps, not two


def fused_fit(votes: Votes, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `gaussian_fit`. Shapes: weights [..., i, j] -> [..., j], [..., j, d], [..., j, d]"""
    centre = _near_the_mean(votes)
    return _fit(votes, _moments(votes, weights, centre, GIVEN.value), centre)


def fused_mixture(votes: Votes, coupling: Tensor) -> Tensor:
    """As `Votes.mixture`. Shapes: coupling [..., i, j] -> [..., j, d]"""
    centre = torch.zeros(*votes.lead, votes.parents, votes.dim, device=votes.device)
    return summed(_moments(votes, coupling, centre, GIVEN.value, squares=False)[1]).unflatten(0, votes.lead)


def fused_em_step(
    votes: Votes, activations: Tensor | None, parents: tuple[Tensor, Tensor, Tensor] | None, competing: Window | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `em_step`.

    Args:
        competing: the window, if parents of all windows a child stands in compete for it.
    """
    if parents is not None:
        mean, variance, log_prior = parents
        parents = (mean, variance.reciprocal(), log_prior - 0.5 * variance.log().sum(-1))
    return _fit(votes, *_step(votes, activations, parents, competing))


def fused_agreement_fit(
    votes: Votes, activations: Tensor | None, parents: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `agreement_fit`."""
    centre = _near_the_mean(votes)
    gates = _gates(votes, activations)
    if parents is None or votes.parents == 1:  # a lone parent has all of every vote
        moments = _moments(votes, gates, centre, EVEN.value)
    else:
        moments = _moments(votes, gates, centre, AGREED.value, scale * parents.float())
    mass, _, variance = _fit(votes, moments, centre)
    return mass, summed(moments[1]).unflatten(0, votes.lead) + mass[..., None] * centre, variance


@rehearsed
def fused_em(
    votes: Votes,
    activations: Tensor | None,
    beta_u: Tensor,
    beta_a: Tensor,
    temperatures: list[float],
    competing: Window | None,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """As `em_routing`. Shapes: -> poses [..., j, d], activations [..., j]"""
    betas = (beta_u.expand(votes.parents), beta_a.expand(votes.parents))
    parents = None
    for temperature in temperatures[:-1]:
        parents = fitted(*_step(votes, activations, parents, competing), *betas, temperature, floor)
    moments, centre = _step(votes, activations, parents, competing)
    return fitted(moments, centre, *betas, temperatures[-1], floor, last=True)


def _step(
    votes: Votes, activations: Tensor | None, parents: tuple[Tensor, Tensor, Tensor] | None, competing: Window | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The moments of each parent's votes, and the centre that they are counted from.

    Args:
        parents: mean, precision and score of the step before, where score x density is the share before it is made
            to add up to 1; none means that all are equally responsible.
    """
    activations = _gates(votes, activations)
    if parents is None or (votes.parents == 1 and competing is None):  # a lone parent is responsible for every vote
        centre = _near_the_mean(votes)
        return _moments(votes, activations, centre, EVEN.value, competing=competing), centre
    mean, precision, score = parents
    return _moments(votes, activations, mean, FITTED.value, precision, score, competing), mean.detach()


def _gates(votes: Votes, activations: Tensor | None) -> Tensor:
    """Without activations all children are present. Shapes: -> [..., i]"""
    if activations is None:
        return torch.ones(*votes.lead, votes.in_caps, device=votes.device)
    return activations.expand(*votes.lead, votes.in_caps)


def _near_the_mean(votes: Votes) -> Tensor:
    with torch.no_grad():
        return votes.total() / votes.in_caps


def _fit(votes: Votes, moments: tuple[Tensor, Tensor, Tensor], centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mass, mean and variance from sums around a centre, on which they do not depend."""
    mass, first, second = (summed(x).unflatten(0, votes.lead) for x in moments)
    least = mass.clamp(min=1e-7)[..., None]
    whole = mass[..., None] / least  # 1, but for parents that next to nobody votes for
    first = first / least
    moved = first + (whole - 1) * centre
    variance = second / least + moved * (whole * moved - 2 * first)
    return mass, centre + moved, variance.clamp(min=0)


def _moments(
    votes: Votes,
    gates: Tensor,
    centre: Tensor,
    kind: int,
    precision: Tensor | None = None,
    score: Tensor | None = None,
    competing: Window | None = None,
    squares: bool = True,
) -> Any:
    """Shapes: -> mass [s, n, j], first and second [s, n, j, d]; without squares, mass and second are None"""
    offset = votes.offset
    if offset is not None:
        groups, _, parents, _ = votes.weight.shape
        offset = offset.expand(groups, votes.sharing, parents, votes.dim)
    own = (votes.window, votes.products)
    return _Moments.apply(
        votes.poses, votes.weight, offset, gates, centre, precision, score, *own, competing, kind, squares
    )


class _Moments(torch.autograd.Function):
    """Sums of shares, votes and squares around a centre that counts as a constant in them.

    The centre's gradient is that of the Gaussians' means only; of agreement it has none. Each sum comes in parts, one
    for each split of the children, for whoever takes them to add up; so all parts have the same gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        poses: Tensor,
        weight: Tensor,
        offset: Tensor | None,
        gates: Tensor,
        centre: Tensor,
        precision: Tensor | None,
        score: Tensor | None,
        window: Window | None,
        products: torch.dtype,
        competing: Window | None,
        kind: int,
        squares: bool,
    ) -> Any:
        given = (poses, weight, offset, gates, centre, precision, score)
        ctx.inputs = [None if x is None else (x.dtype, x.shape) for x in given]
        ctx.window, ctx.products, ctx.competing, ctx.kind, ctx.squares = window, products, competing, kind, squares
        weight = weight.to(poses.dtype).contiguous()
        if precision_of(products)[0] == tl.bfloat16:
            poses = poses.to(torch.bfloat16)
        offset, gates, centre, precision, score = (
            None if x is None else x.float().contiguous() for x in (offset, gates, centre, precision, score)
        )
        votes = Votes(poses, weight, window, offset, products)
        if kind == GIVEN.value:
            gates = gates.expand(*votes.lead, -1, -1).contiguous()
        cut = _plan(votes)
        packed = pack_weight(weight, cut) if cut.tile.PACKED else weight
        n, i, j = cut.space[-3:]
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        splits, blocks = cut.grid[1:]
        log_total = None
        if kind == EVEN.value:
            gates = shared_evenly(gates.view(1, n, i), cut, competing)
        if kind in SCORED:
            gathered = new(blocks, n, i)
            em_gather[cut.grid](
                poses, packed, or_(offset, gates), centre, precision, or_(score, gates), gathered, cut.per_split,
                cut.space, cut.tile, kind, **cut.options,
            )  # fmt: skip
            log_total = sum_over_windows(gathered, cut, competing)
        first = new(splits, n, j, votes.dim)
        mass, second = (new(splits, n, j), new(splits, n, j, votes.dim)) if squares else (first, first)
        em_forward[cut.grid](
            poses, packed, or_(offset, gates), gates, centre, or_(precision, gates), or_(score, gates),
            or_(log_total, gates), mass, first, second, 0.0, cut.per_split, cut.space, _strict(votes, cut.tile), kind,
            squares, **(_narrow(votes, cut) if kind in SCORED else cut.options),
        )  # fmt: skip
        ctx.save_for_backward(poses, weight, packed, offset, gates, centre, precision, score, log_total)
        return (mass, first, second) if squares else (None, first, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mass: Tensor | None, d_first: Tensor, d_second: Tensor | None) -> Any:
        poses, weight, packed, offset, gates, centre, precision, score, log_total = ctx.saved_tensors
        votes = Votes(poses, weight, ctx.window, offset, ctx.products)
        cut = _plan(votes)
        n, i, j = cut.space[-3:]
        blocks = cut.grid[2]
        d_first = d_first[0].contiguous()
        d_mass, d_second = (d_first if x is None else x[0].contiguous() for x in (d_mass, d_second))
        pose_dtype = torch.float32 if few_pairs(votes) or interpreted() else ctx.inputs[0][0]  # it cuts bfloat16 off
        if ctx.kind == EVEN.value and ctx.squares and without_votes(votes):
            moments = (d_mass, d_first, d_second)
            d_poses, d_weight, d_gates = first_gradients(votes, cut, gates, centre, moments, pose_dtype)
            d_gates = shared_evenly(d_gates, cut, ctx.competing)
            grads = [fold_windows(d_poses, poses, cut, ctx.window), summed(d_weight), None, d_gates, *[None] * 3]
            return _like(grads, ctx.inputs)
        new = partial(torch.empty, dtype=torch.float32, device=poses.device)
        over_parents, over_windows = pose_sum(blocks, poses.device), weight_sum(votes, cut)
        d_poses = over_parents.new(n, i, poses.shape[2], dtype=torch.float32 if blocks > 1 else pose_dtype)
        d_weight = over_windows.new(*weight.shape)
        d_offset = None if offset is None else over_windows.new(*offset.shape)
        total, d_mean, d_precision, d_score = gates, gates, gates, gates
        if ctx.kind in SCORED:
            d_gates = over_parents.new(n, i)
            em_backward_gather[cut.grid](
                poses, packed, or_(offset, gates), centre, precision, or_(score, gates), log_total, d_mass, d_first,
                d_second, d_gates, cut.per_split, cut.space, cut.tile, ctx.kind, over_parents.atomic, **cut.options,
            )  # fmt: skip
            total = sum_over_windows(d_gates, cut, ctx.competing, factor=gates)
        few = _plan(votes, wide=FEWER) if votes.products == torch.bfloat16 else cut
        if few.tile.PACKED and few.tile != cut.tile:
            packed = pack_weight(weight, few)
        if ctx.kind in SCORED:
            splits = few.grid[1]
            d_precision = new(splits, n, j, votes.dim)
            if ctx.kind == FITTED.value:
                d_mean, d_score = new(splits, n, j, votes.dim), new(splits, n, j)
        elif ctx.kind == GIVEN.value:
            d_gates = new(n, i, j)
        else:  # each warp has parents of its own, and none waits for the others
            d_gates = over_parents._replace(parts=blocks * few.options["num_warps"]).new(n, i)
        em_backward[few.grid](
            poses, packed, or_(offset, gates), gates, centre, or_(precision, gates), or_(score, gates),
            or_(log_total, gates), total, d_mass, d_first, d_second, d_poses, d_weight, or_(d_offset, gates), d_gates,
            d_mean, d_precision, d_score, 0.0, few.per_split, few.space, few.tile, ctx.kind, ctx.squares,
            over_windows.atomic, over_parents.atomic, **few.options,
        )  # fmt: skip
        if ctx.kind != GIVEN.value:
            d_gates = shared_evenly(d_gates, cut, ctx.competing) if ctx.kind == EVEN.value else summed(d_gates)
        grads = [
            fold_windows(d_poses, poses, cut, ctx.window),
            summed(d_weight),
            None if d_offset is None else summed(d_offset),
            d_gates,
            None,
            None,
            None,
        ]
        if ctx.kind in SCORED:
            grads[5] = summed(d_precision)
        if ctx.kind == FITTED.value:
            grads[4], grads[6] = summed(d_mean), summed(d_score)
        return _like(grads, ctx.inputs)


def _like(grads: list[Tensor | None], inputs: list[tuple[torch.dtype, torch.Size] | None]) -> tuple[Tensor | None, ...]:
    """Gradients as their inputs were given, and none for what is no tensor."""
    pairs = zip(grads, inputs, strict=True)
    return *(None if x is None or like is None else x.to(like[0]).reshape(like[1]) for x, like in pairs), *[None] * 5


def _plan(votes: Votes, **options: Any) -> Plan:
    """Few parents in a program, for each needs up to six rows of numbers at hand."""
    packed = votes.in_caps * votes.weight[0].numel() * 16 <= PACKED_BYTES  # up to 4 children a tile, in float32
    stages = 3 if votes.products == torch.bfloat16 else 2
    return plan(votes, **{"low": low_of(votes) // 2, "block": 8, "packed": packed, "stages": stages} | options)


def _strict(votes: Votes, tile: Tile) -> Tile:
    """A variance of votes that agree is what two sums nearly equal leave, and three products in TF32 are too coarse."""
    exact = votes.products == torch.float32 and precision_of(votes.products)[1] == "tf32x3"
    return tile._replace(PRECISION=tl.constexpr("ieee")) if exact and not interpreted() else tile


def _narrow(votes: Votes, plan: Plan) -> dict[str, int | bool]:
    """Options for a kernel that takes more registers than they are worth, if poses are small."""
    fits = votes.dim <= 16 and plan.options["num_warps"] <= 4
    return plan.options | ({"maxnreg": NARROW} if fits else {})
