"""Half-precision copies of the weights, which stand in for them while a network runs forward and back.

Autocast casts each weight of a convolution or linear layer at each step, and its gradient back: two small kernels a
weight, which a small network takes longer for than for its convolutions. Here a copy of the weight is kept in half
precision. It is the same rounding, and the gradient's way back to float32 is exact, so that not a bit of the loss and
its gradients changes. The weights' own `grad` stays empty where the optimiser reads that of the copies.

Optimiser, clipping, averages and checkpoints have to do with the weights alone, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.recipes import Recipe
from torchcaps.train.fabric import Fabric

HALF = torch.bfloat16
DEVICES = ("cuda",)
VIEWS = (
    "PermuteBackward0",
    "TransposeBackward0",
    "TBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
)


class Halves:
    """The copies of one network's weights; none before its first update, which shows which weights are cast.

    Args:
        optimizer: one with a dict `halves` from weights to copies reads the copies' gradients and writes the copies
            itself; it gets the dict, unless gradients are needed in float32 first, as clipping does.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, network: nn.Module, optimizer: Any, compiled: bool = False):
        self.network = network
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # inside Fabric's
        clipped = recipe.clip is not None or recipe.clip_value is not None
        self.taken = hasattr(self.optimizer, "halves") and not clipped
        self.looks = (
            recipe.precision == "bf16"
            and recipe.accumulate == 1  # parts are added up in float32
            and fabric.device.type in DEVICES
            and fabric.world_size == 1
            and not compiled
        )
        self.weights: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.places: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self.versions: list[int] = []  # of the weights that the copies are like

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the network has the copies for its weights, without gradients."""
        for module, name, _, copy in self.places:
            module._parameters[name] = copy  # type: ignore[assignment]
            copy.grad = None
        try:
            yield
        finally:
            for module, name, weight, _ in self.places:
                module._parameters[name] = weight  # type: ignore[assignment]

    def look(self, loss: Tensor) -> None:
        """Once, at what was done with the weights to come to this loss; those which were only cast get their copy."""
        if not self.looks:
            return
        self.looks = False
        self.weights = only_cast(loss)
        self.copies = [nn.Parameter(weight.detach().to(HALF)) for weight in self.weights]
        of = dict(zip(self.weights, self.copies, strict=True))
        self.places = [
            (module, name, weight, of[weight])
            for module in self.network.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight in of
        ]
        if self.taken:
            self.optimizer.halves = of

    def hand_over(self) -> None:
        """Gives the weights their gradients, before clipping and the optimiser, unless that takes the copies'."""
        if self.taken:
            return
        handed = [(w, copy.grad) for w, copy in zip(self.weights, self.copies, strict=True) if copy.grad is not None]
        if handed:
            wide = [torch.empty_like(weight) for weight, _ in handed]
            torch._foreach_copy_(wide, [gradient for _, gradient in handed])
            for (weight, _), gradient in zip(handed, wide, strict=True):
                weight.grad = gradient

    def follow(self) -> None:
        """The copies are the weights' again, after the optimiser; or not at all, where it saw to it."""
        if not self.taken:
            self._copy()
        self.versions = [weight._version for weight in self.weights]

    def catch_up(self) -> None:
        """Before each update: somebody else may have changed the weights, such as who loads a checkpoint."""
        if self.weights and self.versions != [weight._version for weight in self.weights]:
            self._copy()
            self.versions = [weight._version for weight in self.weights]

    @torch.no_grad()
    def _copy(self) -> None:
        if self.weights:
            torch._foreach_copy_(self.copies, self.weights)


def only_cast(loss: Tensor) -> list[Tensor]:
    """The leaves from which all that came to this loss is one half-precision cast each, perhaps after a view."""
    users: dict[Any, list[Any]] = {}
    todo = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in todo:  # grows while it runs
        for source, _ in node.next_functions:  # type: ignore[union-attr]
            if source is not None:
                if source not in users:
                    users[source] = []
                    todo.append(source)
                users[source].append(node)

    leaves = [node for node in users if hasattr(node, "variable")]
    return [leaf.variable for leaf in leaves if leaf.variable.dtype == torch.float32 and _cast(leaf, users)]


def _cast(node: Any, users: dict[Any, list[Any]]) -> bool:
    if len(users[node]) != 1:
        return False
    (user,) = users[node]
    if user.name() == "ToCopyBackward0":
        return user._input_metadata[0].dtype == HALF
    return user.name() in VIEWS and _cast(user, users)
