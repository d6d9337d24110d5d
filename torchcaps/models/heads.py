"""From class capsules to scores, and from scores to probabilities."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from torchcaps.functional import length
from torchcaps.types import Capsules


class Head(Protocol):
    def __call__(self, capsules: Capsules) -> Tensor: ...

    def probabilities(self, scores: Tensor) -> Tensor: ...


class LengthHead(nn.Module):
    """A capsule is as present as it is long; lengths are already in [0, 1].

    Args:
        longest: the length that counts as 1 (Choi's capsules, whose entries lie in [-1, 1], reach sqrt(d)).
    """

    def __init__(self, longest: float = 1.0):
        super().__init__()
        self.longest = longest

    def forward(self, capsules: Capsules) -> Tensor:
        lengths = length(capsules.poses)
        return lengths if self.longest == 1 else lengths / self.longest

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.clamp(max=1)  # rounding may lead a length just beyond 1


class RoutedLengthHead(LengthHead):
    """The lengths that routing gave along with the poses, for a routing of which these are the activations (Mazzia)."""

    def forward(self, capsules: Capsules) -> Tensor:
        assert capsules.activations is not None
        return capsules.activations


class ActivationHead(nn.Module):
    """The activations that routing gave (EM)."""

    def forward(self, capsules: Capsules) -> Tensor:
        assert capsules.activations is not None
        return capsules.activations

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores


class LogitHead(nn.Module):
    """Scores are logits: of one class each image (softmax) or of each class by itself (sigmoid)."""

    def __init__(self, several: bool = False):
        super().__init__()
        self.several = several

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.sigmoid() if self.several else scores.softmax(dim=-1)


class LinearHead(LogitHead):
    """One linear map, shared by all class capsules, from pose to logit (Tsai).

    Args:
        activated: the activations that routing gave scale the logits (ablation C).
    """

    def __init__(self, dim: int, several: bool = False, activated: bool = False):
        super().__init__(several)
        self.activated = activated
        self.linear = nn.Linear(dim, 1)

    def forward(self, capsules: Capsules) -> Tensor:
        logits = self.linear(capsules.poses)[..., 0]
        if not self.activated:
            return logits
        assert capsules.activations is not None
        return logits * capsules.activations
