"""Whether votes can run fused, and how they are cut up for a launch."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcaps.fused.switch import stands_for
from torchcaps.ops.votes import Votes
from torchcaps.ops.votes_triton import Space, Tile, pack
from torchcaps.ops.windows import Window

# Gradients of votes rounded to bfloat16 err about as much as rounding the result does, and three products in TF32 a
# little more than one in float32. Among many results the largest error hardly grows by it; among few it can, and there
# a second product for what rounding left over, sums of windows in float32 and full products are cheap.
FEW_PAIRS = 2**18
WINDOWS = 16  # in a program, as many as a tensor core takes rows
MOST_PRODUCTS = 2**12  # in a warp, for a window: each is an instruction where tensor cores are not exact enough
PARTIAL_BYTES = 2**26  # of weight gradients, one for each block of windows; beyond that they are added atomically


class Plan(NamedTuple):
    """How votes are cut up for a launch."""

    tile: Tile
    space: Space
    per_split: int
    grid: tuple[int, int, int]  # blocks of windows, splits of the children, blocks of parents
    options: dict[str, int | bool]


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def room() -> int:
    """Bytes of shared memory that a program may have: 227 KiB on an H100, 99 on most other GPUs of today."""
    if not torch.cuda.is_available():
        return sys.maxsize
    return getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 48 * 1024)


def _before_hopper() -> bool:
    """Where gradients go through shared memory before they are rounded."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)


def why_not(votes: Votes) -> str | None:
    """What keeps these votes from running fused, if anything does."""
    if not (stands_for(votes.device).type == "cuda" or interpreted()):
        return f"the votes are on {votes.device.type}"
    if votes.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the votes are {votes.dtype}"
    size, columns = votes.weight.shape[1], votes.weight.shape[3]
    numbers = f"a pose of {votes.rows} x {size} and a vote of {votes.rows} x {columns} numbers"
    if size > 64 or columns > 64 or votes.dim > 128:
        return f"{numbers} take too many registers"
    if (needed := sum(_shared_bytes(votes))) > room():
        return f"{numbers} take {needed:,} bytes of shared memory, of which this GPU has {room():,}"
    return None


def precision_of(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """float16 poses have no more digits than TF32, but their gradients need more, and float16 would overflow."""
    if dtype == torch.bfloat16 and not interpreted():
        return tl.bfloat16, "tf32"
    exact = dtype == torch.float16 or (dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest")
    return tl.float32, "tf32x3" if exact else "tf32"


def _shared_bytes(votes: Votes, low: int | None = None, stages: int = 2, packed: bool = False) -> tuple[int, int]:
    """How much shared memory a program takes at most, and how much more for each warp.

    A warp has the weights of its parents there as they are read, ahead of time, and as a product takes them, and the
    gradients of its votes; all warps have the poses, before and after rounding. Less is taken where memory is reused.
    """
    dtype, precision = precision_of(votes.products)
    item = 2 if dtype == tl.bfloat16 else 4
    _, size, _, columns = votes.weight.shape
    low = low_of(votes) if low is None else low
    depth = max(16, triton.next_power_of_2(size))
    width = max(64, low * triton.next_power_of_2(columns))  # with several children where columns are few
    read = item if packed else votes.weight.element_size()
    weights = depth * width * ((stages - 1) * read + item)
    gradients = WINDOWS * width * (4 if _before_hopper() else item) * math.gcd(votes.rows, _together(dtype, precision))
    return 2 * WINDOWS * depth * 4 * votes.rows + 1024, weights + gradients


def low_of(votes: Votes) -> int:
    """Parents in a warp; fewer where votes are large."""
    return 2 if votes.rows * triton.next_power_of_2(votes.weight.shape[3]) > 32 else 4


def _together(dtype: tl.dtype, precision: str) -> int:
    return 4 if dtype == tl.bfloat16 else 2 if precision == "tf32" else 1


def few_pairs(votes: Votes) -> bool:
    return math.prod(votes.lead) * votes.in_caps * votes.parents < FEW_PAIRS


def plan(
    votes: Votes,
    *,
    block: int | None = None,
    low: int | None = None,
    wide: int = 64,
    together: int | None = None,
    stages: int = 2,
    registers: int | None = None,
    programs: int = 1024,
    packed: bool = False,
) -> Plan:
    """How to cut these votes up.

    Args:
        block: parents in a program; fewer where poses are large, for a thread has no more than 255 registers, and where
            shared memory would not hold their weights.
        low: of them in a warp, 1, 2, 4 or 8.
        wide: columns of a product in a warp, over children and entries.
        together: rows whose gradients are multiplied at once, 1, 2 or 4.
        programs: enough to keep every multiprocessor busy to the end.
    """
    _, size, parents, columns = votes.weight.shape
    window = votes.window or Window(1)
    poses = votes.poses
    y, x = votes.lead[1:] if votes.window is not None else (1, 1)
    sb, sc, sp, sh, sw = (*poses.stride(), 0, 0)[:5]
    dtype, precision = precision_of(votes.products)
    low = low_of(votes) if low is None else low
    if precision == "tf32x3" and votes.products == torch.float32 and few_pairs(votes) and not interpreted():
        # not on tensor cores, for which children are multiplied together; and every product is an instruction
        precision, wide = "ieee", min(wide, 16)
        low = min(low, max(1, MOST_PRODUCTS // triton.next_power_of_2(size) // triton.next_power_of_2(columns)))
    if together is None:
        together = _together(dtype, precision)
    block = 8 * low if block is None else block
    entries = max(8 // low, triton.next_power_of_2(columns))
    padded = triton.next_power_of_2(size)
    children = max(1, min(16 // padded, wide // (entries * low)))
    high = max(1, min(block, triton.next_power_of_2(parents)) // low)
    all_warps, each_warp = _shared_bytes(votes, low, stages, packed)
    while high > 1 and all_warps + high * each_warp > room():
        high //= 2
    n = math.prod(votes.lead)
    tile = Tile(
        M=votes.rows,
        A=size,
        AP=max(padded, 16 // children),
        E=columns,
        EH=entries * low // 8,
        EL=8 // low,
        JB=high,
        JL=low,
        C=children,
        BN=WINDOWS,
        G=math.gcd(votes.rows, together),
        KS=window.kernel_size,
        SCRAMBLED=window.scrambled,
        SHARING=votes.sharing,
        OFFSET=votes.offset is not None,
        DT=dtype,
        PRECISION=precision,
        SPLIT=votes.products == torch.bfloat16 and few_pairs(votes),
        PACKED=packed,
    )
    over_windows, over_parents = triton.cdiv(n, tile.BN), triton.cdiv(parents, high * low)
    splits = max(1, min(triton.cdiv(programs, over_windows * over_parents), triton.cdiv(votes.in_caps, 8 * children)))
    per_split = triton.cdiv(triton.cdiv(votes.in_caps, splits), children) * children
    return Plan(
        _known(tile),
        Space(sb, sc, sp, sh, sw, sh * window.stride, sw * window.stride, y, x, n, votes.in_caps, parents),
        per_split,
        (over_windows, triton.cdiv(votes.in_caps, per_split), over_parents),
        {"num_warps": high, "num_stages": stages, "enable_fp_fusion": True}
        | ({} if registers is None else {"maxnreg": registers}),
    )


def _known(tile: Tile) -> Tile:
    """As kernels take it."""
    return tile if interpreted() else Tile(*(tl.constexpr(x) for x in tile))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def pack_weight(weight: Tensor, plan: Plan) -> Tensor:
    """The weights in the products' dtype, with their zeros, tile after tile: a kernel takes them as they come.

    Shapes: weight [g, a, j, e] -> [i / C, j / JL, (c a), (c e j)], the numbers of tiles rounded up
    """
    tile = Tile(*(_value(x) for x in plan.tile))
    over_children, over_parents = triton.cdiv(plan.space.I, tile.C), triton.cdiv(plan.space.J, tile.JB * tile.JL)
    shape = (over_children, over_parents * tile.JB, tile.C * tile.AP, tile.C * tile.EH * tile.JL * tile.EL)
    dtype = torch.bfloat16 if tl.bfloat16 == tile.DT else torch.float32
    packed = torch.empty(shape, dtype=dtype, device=weight.device)
    plain = _known(tile._replace(PACKED=False))
    pack[(over_children, over_parents)](weight, packed, plan.space, plan.tile, plain, num_warps=tile.JB)
    return packed


def or_(x: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel wants an address for what it does not read."""
    return unused if x is None else x


def summed(x: Tensor) -> Tensor:
    """The sum of partial sums, which a single one is already. Shapes: [k, ...] -> [...]"""
    return x[0] if len(x) == 1 else x.sum(0)
