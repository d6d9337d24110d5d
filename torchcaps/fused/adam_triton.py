"""Adam for small networks in one kernel. torch's has a block of threads for 65,536 weights: too few to fill a GPU."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Adam

MOST = 2**22  # weights; torch's own kernel is as quick for more
CHUNK = 2048  # weights of a program


@triton.jit
def adam(table, gradients, lr, rest1, rest2, log1, log2, eps, weight_decay, COUNT: tl.constexpr):
    """One chunk of one weight, which a row of the table says where to find: the weight, both moments, its count of
    steps, the place of its gradients, and how many there are. `rest` is 1 - beta, exactly, and `log` that of beta.

    Shapes: table [chunks, 6], gradients [all weights]
    """
    row = table + tl.program_id(0) * 6
    numbers = tl.pointer_type(tl.float32)
    weight, mean, square = tl.load(row).to(numbers), tl.load(row + 1).to(numbers), tl.load(row + 2).to(numbers)
    step = tl.load(tl.load(row + 3).to(numbers)).to(tl.float64)
    first, second = (1 - tl.exp(step * log1)).to(tl.float32), (1 - tl.exp(step * log2)).to(tl.float32)
    at = tl.arange(0, COUNT)
    there = at < tl.load(row + 5)
    w = tl.load(weight + at, mask=there, other=0.0)
    g = tl.load(gradients + tl.load(row + 4) + at, mask=there, other=0.0) + weight_decay * w
    m = tl.load(mean + at, mask=there, other=0.0)
    v = tl.load(square + at, mask=there, other=0.0)
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    w -= tl.load(lr) / first * m / (tl.sqrt(v) / tl.sqrt(second) + eps)
    tl.store(weight + at, w, mask=there)
    tl.store(mean + at, m, mask=there)
    tl.store(square + at, v, mask=there)


class SmallAdam(Adam):
    """torch's Adam, capturable and fused; once it has moments, the gradients are gathered and one kernel does the rest.

    What that kernel cannot take goes through torch's own: many weights, gradients laid out in another way, or weights
    that have moved since the table was made where a graph is being recorded, which cannot wait for a new one.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.tables: dict[int, tuple[list[int], Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        found = [self._table(number, group) for number, group in enumerate(self.param_groups)]
        tables = [table for table in found if table is not None]
        if len(tables) < len(found):
            super().step()
            return
        for group, table in zip(self.param_groups, tables, strict=True):
            weights = _trained(group)
            torch._foreach_add_([self.state[w]["step"] for w in weights], 1)
            gradients = torch.cat([w.grad.as_strided((w.numel(),), (1,)) for w in weights])  # type: ignore[union-attr]
            beta1, beta2 = group["betas"]
            adam[(len(table),)](
                table, gradients, group["lr"], 1 - beta1, 1 - beta2, math.log(beta1), math.log(beta2), group["eps"],
                group["weight_decay"], CHUNK,
            )  # fmt: skip

    def _table(self, number: int, group: dict[str, Any]) -> Tensor | None:
        weights = _trained(group)
        fits = (
            0 < sum(w.numel() for w in weights) <= MOST
            and isinstance(group["lr"], Tensor)
            and group["lr"].device == weights[0].device
            and min(group["betas"]) > 0
            and not (group["amsgrad"] or group["maximize"])
            and all(self.state[w] and _alike(w, w.grad, *map(self.state[w].get, MOMENTS)) for w in weights)
            and all(self.state[w]["step"].device == w.device for w in weights)  # a host's address is none on a GPU
        )
        if not fits:
            return None
        places = [x.data_ptr() for w in weights for x in (w, *(self.state[w][name] for name in (*MOMENTS, "step")))]
        known, table = self.tables.get(number, ([], None))
        if known != places:
            if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            table = torch.tensor(_chunks(places, [w.numel() for w in weights]), device=weights[0].device)
            self.tables[number] = places, table
        return table


MOMENTS = ("exp_avg", "exp_avg_sq")


def _trained(group: dict[str, Any]) -> list[Tensor]:
    return [w for w in group["params"] if w.grad is not None]


def _alike(weight: Tensor, *others: Any) -> bool:
    """Whether all are float32, without gaps, and lie in memory in the same order."""
    order = _order(weight)
    return _order(torch.empty_like(weight, device="meta")) == order and all(
        x.dtype == torch.float32 and _order(x) == order for x in (weight, *others)
    )


def _order(x: Tensor) -> list[int]:
    """Strides but for those of dimensions of size 1, which mean nothing and which a gradient may have otherwise."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def _chunks(places: list[int], sizes: list[int]) -> list[list[int]]:
    rows, begin = [], 0
    for number, size in enumerate(sizes):
        *tensors, step = places[4 * number : 4 * number + 4]
        for start in range(0, size, CHUNK):
            moved = [place + 4 * start for place in tensors]
            rows.append([*moved, step, begin + start, min(CHUNK, size - start)])
        begin += size
    return rows
