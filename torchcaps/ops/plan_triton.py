"""Whether votes can run fused, and how they are cut up for a launch."""

from __future__ import annotations

import math
import sys
from functools import cache
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
DEPTH = 16  # of a product, at least; that of gradients with weights runs over a vote's columns
MOST_PRODUCTS = 2**12  # in a warp, for a window, where tensor cores are not exact enough and each is an instruction
MOST_WEIGHTS = 2**11  # of a child in a warp with several parents: 64 of a thread's 255 registers for their gradient
PARTIAL_BYTES = 2**26  # of weight gradients, one for each block of windows; beyond that they are added atomically


class Plan(NamedTuple):
    """How votes are cut up for a launch."""

    tile: Tile
    space: Space
    per_split: int
    grid: tuple[int, int, int]  # blocks of windows, splits of the children, blocks of parents
    options: dict[str, int | bool]
    shared: int  # bytes of shared memory, or less


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def room() -> int:
    """Bytes of shared memory that a program may have: 227 KiB on an H100, 99 on most other GPUs of today."""
    return _gpu(torch.cuda.current_device())[0] if torch.cuda.is_available() else sys.maxsize


def before_hopper() -> bool:
    """Where gradients go through shared memory before they are rounded."""
    return torch.cuda.is_available() and _gpu(torch.cuda.current_device())[1] < 9


@cache
def _gpu(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 48 * 1024), properties.major


def why_not(votes: Votes) -> str | None:
    """What keeps these votes from running fused, if anything does."""
    if not (stands_for(votes.device).type == "cuda" or interpreted()):
        return f"the votes are on {votes.device.type}"
    if votes.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the votes are {votes.dtype}"
    if votes.sharing > 1 and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
        return "gradients of weights that children share are added up in no fixed order, and it was to be deterministic"
    size, columns = votes.weight.shape[1], votes.weight.shape[3]
    numbers = f"a pose of {votes.rows} x {size} and a vote of {votes.rows} x {columns} numbers"
    if size > 64 or columns > 64 or votes.dim > 128:
        return f"{numbers} take too many registers"
    if votes.rows * size * columns > MOST_PRODUCTS and few_exact(votes):
        return f"few exact products of {numbers} take longer to compile than to compute"
    if size * columns > 256 and (least := plan(votes, stages=3).shared) > room():
        return f"{numbers} take {least:,} bytes of shared memory, of which this GPU has {room():,}"
    return None


def precision_of(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """float16 poses have no more digits than TF32, but their gradients need more, and float16 would overflow."""
    if dtype == torch.bfloat16 and not interpreted():
        return tl.bfloat16, "tf32"
    exact = dtype == torch.float16 or (dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest")
    return tl.float32, "tf32x3" if exact else "tf32"


def low_of(votes: Votes) -> int:
    """Parents in a warp; fewer where votes are large."""
    return 2 if votes.rows * triton.next_power_of_2(votes.weight.shape[3]) > 32 else 4


def few_pairs(votes: Votes) -> bool:
    return math.prod(votes.lead) * votes.in_caps * votes.parents < FEW_PAIRS


def few_exact(votes: Votes) -> bool:
    """Whether products are not on tensor cores, of which three in TF32 are a little less exact."""
    exact = votes.products == torch.float32 and precision_of(votes.products)[1] == "tf32x3"
    return exact and few_pairs(votes) and not interpreted()


def shared_bytes(tile: Tile, stages: int, read: int) -> int:
    """Shared memory that a program takes at most, as compiled for GPUs from the A100 on; less where it is reused.

    A warp has the weights of its parents there, as they are read ahead of time and as a product takes them, and the
    gradients of its votes where products are rounded or not on tensor cores; all warps together have the poses.

    Args:
        tile: of plain numbers.
        read: bytes of a weight in memory.
    """
    item = 2 if tl.bfloat16 == tile.DT else 4
    depth, width = tile.C * tile.AP, max(64, tile.C * tile.EH * tile.JL * tile.EL)  # as if for any `wide`
    poses = WINDOWS * depth * 4 * tile.M
    each = depth * width * ((stages - 1) * read + item * (2 if tile.PRECISION == "tf32x3" else 1))
    if item == 2 or tile.PRECISION != "tf32":
        each += WINDOWS * width * (4 if before_hopper() else item) * tile.G
    if tile.PRECISION == "ieee":
        each += poses
    return 2 * poses + 1024 + tile.JB * each


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
    padded = triton.next_power_of_2(size)
    if low is None:
        low = min(low_of(votes), max(1, MOST_WEIGHTS // (padded * triton.next_power_of_2(columns))))
    if few_exact(votes):  # there children are not multiplied together
        precision, wide = "ieee", min(wide, 16)
        low = min(low, max(1, MOST_PRODUCTS // (votes.rows * padded * triton.next_power_of_2(columns))))
    if together is None:
        together = 4 if dtype == tl.bfloat16 else 2 if precision == "tf32" else 1
    block = 8 * low if block is None else block
    high = max(1, min(block, triton.next_power_of_2(parents)) // low)

    def cut(high: int, low: int) -> Tile:
        entries = max(8 // low, triton.next_power_of_2(columns))
        children = max(1, min(DEPTH // padded, wide // (entries * low)))
        entries = max(entries, DEPTH // (children * low))
        return Tile(
            M=votes.rows,
            A=size,
            AP=max(padded, DEPTH // children),
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

    read = (2 if dtype == tl.bfloat16 else 4) if packed else votes.weight.element_size()
    tile = cut(high, low)
    while (shared := shared_bytes(tile, stages, read)) > room() and high * low > 1:
        high, low = (high // 2, low) if high > 1 else (1, low // 2)
        tile = cut(high, low)
    n, children = math.prod(votes.lead), tile.C
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
        shared,
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


class Sum(NamedTuple):
    """Where programs that have a part in the same gradient put it: in parts, or all in one place, atomically."""

    parts: int
    atomic: bool
    device: torch.device

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Shapes: [k, *shape], for `summed`"""
        make, parts = (torch.zeros, 1) if self.atomic else (torch.empty, self.parts)
        return make(parts, *shape, dtype=dtype, device=self.device)


def pose_sum(blocks: int, device: torch.device) -> Sum:
    """Of what children get, whose parts would grow with the parents, as votes do."""
    return Sum(blocks, blocks > 1 and not torch.are_deterministic_algorithms_enabled(), device)


def weight_sum(votes: Votes, plan: Plan) -> Sum:
    """Of what weights get."""
    blocks = plan.grid[0]
    large = blocks * votes.weight.numel() * 4 > PARTIAL_BYTES and not torch.are_deterministic_algorithms_enabled()
    return Sum(blocks, votes.sharing > 1 or large, votes.device)


def summed(x: Tensor) -> Tensor:
    """The sum of partial sums, which a single one is already. Shapes: [k, ...] -> [...]"""
    return x[0] if len(x) == 1 else x.sum(0)
