"""Random numbers as a pure function of (seed, epoch, position): nothing is stored, and any device may ask in any order.

The hash works on 32-bit words held in int64 tensors. Its multipliers are below 2^31 in absolute value, so that no
product overflows and CPU, CUDA and MPS agree to the bit; Python integers may take the place of tensors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: multiples of it stay far from each other
ROUNDS = 8


class Draws:
    """The draws of a batch: the k-th call gives each sample what (seed, epoch, its position, k) decides.

    Two batches that share a position share its draws, whatever else is in them. `epoch` may be a tensor, so that a
    captured graph can count it up.

    Shapes: positions [b] -> every draw [b, *shape]
    """

    def __init__(self, seed: int, epoch: int | Tensor, positions: Tensor):
        self.seed, self.epoch, self.positions = seed, epoch, positions
        self.calls = 0
        self._state = _state(seed, epoch, positions)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1): the upper 24 bits of a word, so exact."""
        return (self._words(shape)[1] >> 8).to(torch.float32) * 2.0**-24

    def normal(self, *shape: int) -> Tensor:
        """float32, standard normal, by Box and Muller's formula in float64 where the device has it.

        Devices differ in the last bit of a logarithm: about one draw in 10^8 is then rounded differently.
        """
        first, second = self._words(shape)
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        radius = (((first >> 8).to(wide) + 0.5) * 2.0**-24).log().mul(-2).sqrt()
        angle = (second >> 8).to(wide) * (2 * math.pi * 2.0**-24)
        return (radius * angle.cos()).to(torch.float32)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        if high <= low:
            raise ValueError(f"integers from {low} to below {high} do not exist; high must exceed low")
        return _join(self._words(shape)) % (high - low) + low

    def below(self, limit: Tensor) -> Tensor:
        """int64 in [0, limit), each sample with its own limit of at least 1.

        Shapes: limit [b, ...] -> [b, ...]
        """
        return _join(self._words(tuple(limit.shape[1:]))) % limit

    def _words(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Two words for each element; the second depends on all 64 bits of the state."""
        first, second = _absorb(self._state, self.calls * GOLDEN & WORD)
        self.calls += 1
        if shape:
            elements = torch.arange(math.prod(shape), device=first.device)
            first, second = _absorb((first[:, None], second[:, None]), elements)
        first = _mix((first + second) & WORD)
        return first.reshape(-1, *shape), second.reshape(-1, *shape)


def hashed(seed: int, stream: int, index: Tensor) -> Tensor:
    """62 random bits for each index, as int64 that are never negative.

    Shapes: index [...] -> [...]
    """
    first, second = _state(seed, stream, index)
    return _join((_mix((first + second) & WORD), second))


def permuted(position: Tensor, length: int, seed: int, epoch: int | Tensor) -> Tensor:
    """The index that stands at each position of the epoch's order: a bijection of range(length), never stored.

    A Feistel network on a grid just larger than `length`. The few cells too many are walked through: a walk meets each
    of them once at most, so as many steps as there are such cells always suffice, and the device is never asked.

    Shapes: position [...] with entries in [0, length) -> [...]
    """
    if length < 1:
        raise ValueError(f"a permutation of {length} things does not exist; length must be at least 1")
    rows, columns = _grid(length)
    index = _shuffle(position, rows, columns, seed, epoch)
    for _ in range(rows * columns - length):
        index = torch.where(index < length, index, _shuffle(index, rows, columns, seed, epoch))
    return index


def _shuffle(index: Tensor, rows: int, columns: int, seed: int, epoch: int | Tensor) -> Tensor:
    row, column = index // columns, index % columns
    state = _state(seed, epoch, -1)
    for _ in range(ROUNDS // 2):
        state = _absorb(state, 0)
        row = (row + (_mix(column ^ state[0]) * rows >> 32)) % rows
        column = (column + (_mix(row ^ state[1]) * columns >> 32)) % columns
    return row * columns + column


@lru_cache(maxsize=256)
def _grid(length: int) -> tuple[int, int]:
    """Rows and columns, alike in number, whose product exceeds `length` by as little as can be."""
    root = max(2, math.isqrt(length))
    return min(
        ((rows, -(-length // rows)) for rows in range(root + 1, max(1, root // 2), -1)),
        key=lambda grid: grid[0] * grid[1],
    )


def _state(*values: Any) -> tuple[Any, Any]:
    state: tuple[Any, Any] = (0, GOLDEN)
    for value in values:
        state = _absorb(state, value & WORD, value >> 32 & WORD)
    return state


def _absorb(state: tuple[Any, Any], low: Any, high: Any = None) -> tuple[Any, Any]:
    """64 bits of state take up a word or two, each value to another state."""
    first = _mix(state[0] ^ low)
    second = state[1] + first if high is None else state[1] + first + high
    return first, _mix(second & WORD)


def _mix(word: Any) -> Any:
    """A bijection of 32-bit words in which every input bit turns every output bit half of the time."""
    word = (word ^ (word >> 16)) * 0x21F0AAAD & WORD
    word = (word ^ (word >> 15)) * (0xD35A2D97 - (1 << 32)) & WORD
    return word ^ (word >> 15)


def _join(words: tuple[Tensor, Tensor]) -> Tensor:
    return (words[1] >> 2) << 32 | words[0]
