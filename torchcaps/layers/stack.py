"""Capsule layers one after another, and all at once."""

from __future__ import annotations

from torch import Tensor, nn

from torchcaps.functional import check_count
from torchcaps.ops.backend import rehearse
from torchcaps.types import Capsules


class CapsuleStack(nn.Module):
    """Runs layers in sequence; further iterations step every layer at once (Tsai, procedure 2).

    A concurrent iteration takes each layer's children and parents from the iteration before, so information moves one
    layer at a time, and what a layer does in the last iterations no longer reaches the top: with two of them only the
    last layer is stepped. The first capsules stay as they are.

    Args:
        iterations: 1 is a plain sequence.

    Attributes:
        in_full: steps every layer in every iteration all the same, for those who look inside.

    Shapes: poses as the first layer takes them -> Capsules of the last layer
    """

    def __init__(self, *layers: nn.Module, iterations: int = 1):
        super().__init__()
        check_count("iterations", iterations)
        self.layers = nn.ModuleList(layers)
        self.iterations = iterations
        self.in_full = False

    def forward(self, poses: Tensor, activations: Tensor | None = None) -> Capsules:
        if self.rehearses:
            rehearse(self.forward, poses, activations)
        first = Capsules(poses, activations)
        states: list[Capsules] = []
        for layer in self.layers:
            below = states[-1] if states else first
            states.append(layer(below.poses, below.activations))
        for left in reversed(range(self.iterations - 1)):
            seen = 0 if self.in_full else max(0, len(states) - 1 - left)  # the lowest layer that the top still sees
            children = [first, *states[:-1]]
            states[seen:] = [
                layer(below.poses, below.activations, parents=state.poses)
                for layer, below, state in zip(self.layers[seen:], children[seen:], states[seen:], strict=True)
            ]
        return states[-1]

    @property
    def rehearses(self) -> bool:
        """Whether kernels would be waited for one after the other, and need not."""
        routings = (getattr(layer, "routing", None) for layer in self.layers)
        return all(getattr(routing, "rehearses", False) for routing in routings)


class Residual(nn.Module):
    """Adds a layer's input to its output poses, where both have the same size."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        capsules: Capsules = self.layer(poses, activations, parents)
        return Capsules(poses + capsules.poses, capsules.activations, capsules.coupling)
