"""Adam in one kernel that also keeps half-precision copies of the weights.

torch's has a block of threads for 65,536 weights: too few to fill a GPU where a network is small.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Adam

MOST = 2**22  # weights; torch's own kernel is as quick for more
CHUNK = 2048  # weights of a program


@triton.jit
def adam(table, lr, rest1, rest2, log1, log2, eps, weight_decay, COUNT: tl.constexpr):
    """One chunk of one weight, of which a row of the table has the addresses: the weight, both moments, its count of
    steps, its gradient in float32 or else in bfloat16, a copy of it in bfloat16 or 0, and how many numbers they are.
    `rest` is 1 - beta, exactly, and `log` that of beta.

    Shapes: table [chunks, 8]
    """
    row = table + tl.program_id(0) * 8
    numbers = tl.pointer_type(tl.float32)
    halves = tl.pointer_type(tl.bfloat16)
    weight, mean, square = tl.load(row).to(numbers), tl.load(row + 1).to(numbers), tl.load(row + 2).to(numbers)
    step = tl.load(tl.load(row + 3).to(numbers)).to(tl.float64)
    whole, half, copy = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    first, second = (1 - tl.exp(step * log1)).to(tl.float32), (1 - tl.exp(step * log2)).to(tl.float32)
    at, count = tl.arange(0, COUNT), tl.load(row + 7)
    there = at < count
    w = tl.load(weight + at, mask=there, other=0.0)
    g = tl.load(whole.to(numbers) + at, mask=at < tl.where(whole != 0, count, 0), other=0.0)
    g += tl.load(half.to(halves) + at, mask=at < tl.where(half != 0, count, 0), other=0.0).to(tl.float32)
    g += weight_decay * w
    m = tl.load(mean + at, mask=there, other=0.0)
    v = tl.load(square + at, mask=there, other=0.0)
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    w -= tl.load(lr) / first * m / (tl.sqrt(v) / tl.sqrt(second) + eps)
    tl.store(weight + at, w, mask=there)
    tl.store(mean + at, m, mask=there)
    tl.store(square + at, v, mask=there)
    tl.store(copy.to(halves) + at, w.to(tl.bfloat16), mask=at < tl.where(copy != 0, count, 0))


class SmallAdam(Adam):
    """torch's Adam, capturable and fused; once it has moments, one kernel counts as its whole step.

    What that kernel cannot take goes through torch's own: gradients laid out in another way, many weights that have no
    copies, or a graph recorded before there was a step of the same weights.

    Attributes:
        halves: weights that have a copy in bfloat16, which is written along with them. The gradients of the copy
            count, where it has some, for the weight's own.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.halves: dict[Tensor, Tensor] = {}
        self.spare: dict[int, Tensor] = {}  # a table for each group, for a graph to come
        self.recorded: list[tuple[Tensor, Tensor]] = []  # tables that a graph reads, and what is to be in them

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, empty in (("halves", {}), ("spare", {}), ("recorded", [])):  # a copy's, which begins anew
            self.__dict__.setdefault(name, empty)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in self.halves.values():
            copy.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all(self._fits(number, group) for number, group in enumerate(self.param_groups)):
            self._usual_step()
            return loss
        for number, group in enumerate(self.param_groups):
            weights = self._trained(group)
            table = self._table(number, weights)
            torch._foreach_add_([self.state[w]["step"] for w in weights], 1)
            beta1, beta2 = group["betas"]
            adam[(len(table),)](
                table, group["lr"], 1 - beta1, 1 - beta2, math.log(beta1), math.log(beta2), group["eps"],
                group["weight_decay"], CHUNK,
            )  # fmt: skip
            torch.autograd.graph.increment_version(weights)  # autograd cannot see what a kernel writes
        return loss

    def after_recording(self) -> None:
        """Fills the tables of steps that were recorded in a graph; to be called before its first replay."""
        for table, rows in self.recorded:
            table.copy_(rows)

    def _usual_step(self) -> None:
        for weight, copy in self.halves.items():
            if copy.grad is not None:
                weight.grad = copy.grad.float()
        super().step()
        for weight, copy in self.halves.items():
            weight.grad = None
            copy.copy_(weight)

    def _gradient(self, weight: Tensor) -> Tensor | None:
        copy = self.halves.get(weight)
        return weight.grad if copy is None or copy.grad is None else copy.grad

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        return [w for w in group["params"] if self._gradient(w) is not None]

    def _fits(self, number: int, group: dict[str, Any]) -> bool:
        weights = self._trained(group)
        return bool(weights) and (
            (bool(self.halves) or sum(w.numel() for w in weights) <= MOST)
            and isinstance(group["lr"], Tensor)
            and group["lr"].device == weights[0].device
            and min(group["betas"]) > 0
            and not (group["amsgrad"] or group["maximize"] or group.get("decoupled_weight_decay"))
            and getattr(self, "grad_scale", None) is None
            and getattr(self, "found_inf", None) is None
            and all(self.state[w] and self._alike(w) for w in weights)
            and all(self.state[w]["step"].device == w.device for w in weights)  # a host's address is none on a GPU
            and (not _recording(weights) or self._has_spare(number, weights))
        )

    def _has_spare(self, number: int, weights: list[Tensor]) -> bool:
        return number in self.spare and len(self.spare[number]) == sum(-(-w.numel() // CHUNK) for w in weights)

    def _alike(self, weight: Tensor) -> bool:
        """Whether all that belongs to a weight is without gaps, and lies in memory in the same order."""
        order, moments = _order(weight), [self.state[weight][name] for name in MOMENTS]
        gradient, copy = self._gradient(weight), self.halves.get(weight, weight)
        assert gradient is not None
        return (
            _order(torch.empty_like(weight, device="meta")) == order
            and all(x.dtype == torch.float32 for x in (weight, *moments))
            and gradient.dtype in (torch.float32, torch.bfloat16)
            and all(_order(x) == order for x in (*moments, gradient, copy))
        )

    def _table(self, number: int, weights: list[Tensor]) -> Tensor:
        """Where a graph is being recorded nothing can be brought to the device, and nothing has to be there yet.

        Its table must be older than the graph: what is allocated in a recording shares its memory with all that the
        recording has freed before, and each replay would write there.
        """
        rows = torch.tensor([row for weight in weights for row in self._rows(weight)])
        if not _recording(weights):
            self.spare[number] = torch.empty_like(rows, device=weights[0].device)
            return rows.to(weights[0].device)
        table = self.spare.pop(number)
        self.recorded.append((table, rows))
        return table

    def _rows(self, weight: Tensor) -> Iterator[list[int]]:
        state, gradient, copy = self.state[weight], self._gradient(weight), self.halves.get(weight)
        assert gradient is not None
        half = gradient.dtype == torch.bfloat16
        for start in range(0, weight.numel(), CHUNK):
            yield [
                *(x.data_ptr() + 4 * start for x in (weight, *(state[name] for name in MOMENTS))),
                state["step"].data_ptr(),
                0 if half else gradient.data_ptr() + 4 * start,
                gradient.data_ptr() + 2 * start if half else 0,
                0 if copy is None else copy.data_ptr() + 2 * start,
                min(CHUNK, weight.numel() - start),
            ]


MOMENTS = ("exp_avg", "exp_avg_sq")


def _recording(weights: list[Tensor]) -> bool:
    return weights[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _order(x: Tensor) -> list[int]:
    """Strides but for those of dimensions of size 1, which mean nothing and which a gradient may have otherwise."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
