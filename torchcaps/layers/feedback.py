"""The feedback agreement unit (Li et al. 2018, section 3.2): higher capsules must be able to recover lower ones.

It serves training alone and attaches to any network that shows the features along its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.layers.chain import Chain
from torchcaps.layers.encap import CapDeconv
from torchcaps.losses import kl_divergence, sinkhorn_divergence

WIRINGS = ("none", "within", "within2", "both")


class Path(NamedTuple):
    """Features along one module. Capsules count with their dimensions as channels.

    Shapes: each [b, c, h, w] or [b, c, d, h, w]
    """

    start: Tensor  # what the module is given
    first: Tensor  # after its first layer, which sets size and channels
    half: Tensor  # half-way down the layers that follow
    end: Tensor


class FeedbackUnit(nn.Module):
    """How far the lower features u are from u' = g(v), recovered from the higher ones, over the batch.

    A generator g (transposed 3 x 3 convolution, batch norm, ReLU) recovers u'; an extractor f, the same for both,
    makes a few numbers of u and u', and their distributions over the batch are compared. The switches are the rows of
    Table 3, right; the defaults are row (c). A batch of one has no distribution and costs nothing.

    Args:
        latent: channels of v.
        target: channels of u.
        stride: how much larger u is than v.
        caps: capsules, by which the generator is grouped.
        divergence: "ot", Sinkhorn's (c), or "kl", KL(softmax f(u) || softmax f(u')) (b).
        bias_fix: Eq. 11 rather than Eq. 8 (d1).
        through_plan: gradients also flow through the Sinkhorn iterations (d2).
        extractor: False compares u and u' as they are (d3).
        generator: "capsule", grouped and squashed, or "vanilla" (d4).
        cost: "cosine" or "l2" (d5).

    Shapes: latent [b, c', h', w'], target [b, c, h, w], or capsules with [b, c, d, h, w] -> []
    """

    def __init__(
        self,
        latent: int,
        target: int,
        stride: int = 1,
        *,
        caps: int = 32,
        divergence: str = "ot",
        bias_fix: bool = True,
        through_plan: bool = False,
        extractor: bool = True,
        generator: str = "capsule",
        cost: str = "cosine",
        epsilon: float = 1.0,
        iterations: int = 10,
    ):
        super().__init__()
        if divergence not in ("ot", "kl"):
            raise ValueError(f"feedback must be ot or kl, got {divergence!r}")
        if generator not in ("capsule", "vanilla"):
            raise ValueError(f"generator must be capsule or vanilla, got {generator!r}")
        if cost not in ("cosine", "l2"):
            raise ValueError(f"cost must be cosine or l2, got {cost!r}")
        if generator == "capsule" and (latent % caps or target % caps):
            raise ValueError(
                f"{latent} and {target} channels are not whole capsules of {caps}; use generator='vanilla'"
            )
        self.divergence = divergence
        self.gather: Callable[[Tensor], Tensor] | None = None  # brings the whole batch together on several processes
        self.sinkhorn: dict[str, Any] = dict(
            cost=cost, epsilon=epsilon, iterations=iterations, bias_fix=bias_fix, through_plan=through_plan
        )
        self.generator = (
            CapDeconv(caps, latent // caps, target // caps, stride)
            if generator == "capsule"
            else VanillaDeconv(latent, target, stride)
        )
        self.caps = caps
        self.extractor = extractor_network(target) if extractor else nn.Flatten()

    def forward(self, latent: Tensor, target: Tensor) -> Tensor:
        if len(target) < 2:
            return target.new_zeros((), dtype=torch.promote_types(target.dtype, torch.float32))
        return self.compare(*self.extract(latent, target))

    def extract(self, latent: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """f(u') and f(u), of the whole batch. Shapes: -> two of [b, f]"""
        latent, target = _as_channels(latent), _as_channels(target)
        size = (target.shape[2], target.shape[3])
        if isinstance(self.generator, CapDeconv):
            recovered = self.generator(latent.unflatten(1, (self.caps, -1)), size=size).poses.flatten(1, 2)
        else:
            recovered = self.generator(latent, size)
        low, high = self.extractor(target), self.extractor(recovered)
        return (high, low) if self.gather is None else (self.gather(high), self.gather(low))

    def compare(self, high: Tensor, low: Tensor) -> Tensor:
        """Shapes: two of [b, f] -> []; for OT also [..., b, f] -> [...]"""
        return kl_divergence(low, high) if self.divergence == "kl" else sinkhorn_divergence(high, low, **self.sinkhorn)


class VanillaDeconv(nn.Module):
    """The generator of a plain network: transposed convolution over all channels, batch norm, ReLU.

    Shapes: [b, c', h', w'] -> [b, c, *size]
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.conv = nn.ConvTranspose2d(in_channels, out_channels, 3, stride, padding=1)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        return self.norm(self.conv(features, size)).relu()


def extractor_network(channels: int) -> nn.Sequential:
    """Two strided convolutions down to one channel.

    Features of 4 x 4 or less become a single number, whose direction cannot change: by cosine such a unit has a value
    and no gradient ("within" in the last module of a network for 32 x 32 images).

    Shapes: [b, c, h, w] -> [b, f] with f = (h / 4) (w / 4), rounded up
    """
    hidden = max(1, channels // 4)
    return Chain(
        nn.Conv2d(channels, hidden, 3, stride=2, padding=1),
        nn.BatchNorm2d(hidden),
        nn.ReLU(),
        nn.Conv2d(hidden, 1, 3, stride=2, padding=1),
        nn.BatchNorm2d(1),
        nn.ReLU(),
        nn.Flatten(),
    )


class Feedback(nn.Module):
    """The feedback units of a network, summed and weighted.

    "within" recovers a module's first layer from its end, at the same size; "within2" recovers what the module was
    given from half-way down. "both" has two units for each module.

    Args:
        channels: before the first module and after each.
        strides: of each module.
        wiring: "within", "within2" or "both"; or one of these, or "none", for each module.
        weight: the paper's lambda.
        options: of each `FeedbackUnit`.

    Shapes: a path for each module -> []
    """

    def __init__(
        self,
        channels: Sequence[int],
        strides: Sequence[int],
        wiring: str | Sequence[str] = "both",
        weight: float = 10.0,
        **options: Any,
    ):
        super().__init__()
        wirings = [wiring] * len(strides) if isinstance(wiring, str) else list(wiring)
        if len(wirings) != len(strides) or not set(wirings) <= set(WIRINGS):
            raise ValueError(
                f"wiring must be one of {', '.join(WIRINGS)}, or one of them for each of {len(strides)} modules, "
                f"got {wiring!r}"
            )
        if set(wirings) == {"none"}:
            raise ValueError("wiring leaves no feedback unit; feedback=None says so")
        self.weight = weight
        self.units = nn.ModuleDict()
        for n, stride in enumerate(strides):
            below, above = channels[n], channels[n + 1]
            if wirings[n] in ("within", "both"):
                self.units[f"within_{n + 1}"] = FeedbackUnit(above, above, 1, **options)
            if wirings[n] in ("within2", "both"):
                self.units[f"within2_{n + 1}"] = FeedbackUnit(above, below, stride, **options)

    def forward(self, paths: Sequence[Path]) -> Tensor:
        units = [cast(FeedbackUnit, unit) for unit in self.units.values()]
        ends = []  # v and u of each unit
        for name in self.units:
            wiring, module = name.split("_")
            path = paths[int(module) - 1]
            ends.append((path.end, path.first) if wiring == "within" else (path.half, path.start))
        if units[0].divergence == "kl" or len(paths[0].start) < 2:
            penalties = torch.stack([unit(*pair) for unit, pair in zip(units, ends, strict=True)])
        else:  # Sinkhorn's iterations of all units at once
            pairs = [unit.extract(*pair) for unit, pair in zip(units, ends, strict=True)]
            penalties = units[0].compare(_stack([high for high, _ in pairs]), _stack([low for _, low in pairs]))
        return self.weight * penalties.sum()


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Zeros at the end of a vector change neither its direction nor how far it is from others.

    Shapes: each [b, f'] -> [u, b, f] with the largest f
    """
    most = max(row.shape[1] for row in rows)
    return torch.stack([F.pad(row, (0, most - row.shape[1])) for row in rows])


def _as_channels(features: Tensor) -> Tensor:
    return features.flatten(1, 2) if features.dim() == 5 else features
