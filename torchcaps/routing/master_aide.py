"""Master and aide (Li et al. 2018), Eq. 6: routing in one pass, learnt instead of iterated.

Each parent gets two votes. The master's comes from the one child it continues, the aide's from the other channels; two
coefficients, read off the votes by small convolutions, mix them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.functional import gated, gated_by
from torchcaps.ops.grouped import GroupedConv2d
from torchcaps.types import Capsules

VERSIONS = ("v1", "v2", "v3", "v4")


def master_aide(master: Tensor, aide: Tensor, m1: Tensor, m2: Tensor | None = None) -> Capsules:
    """s_j = m1 v1 + m2 v2. Without m2 the aide gets what the master leaves, 1 - m1.

    Shapes: master and aide [b, c, d, h, w], m1 and m2 [b, c, h, w] -> poses [b, c, d, h, w], coupling [b, 2, c, h, w]
    """
    m2 = 1 - m1 if m2 is None else m2
    return Capsules(gated(master, aide, m1, m2), None, torch.stack([m1, m2], dim=1))


class MasterAide(nn.Module):
    """The coefficients: 3 x 3 convolutions, one map for each capsule, with no squashing of their own.

    Args:
        version: where coefficients come from (Table 3, left). "v1": m1 from the master's vote, m2 = 1 - m1;
            "v2": m1 from the layer's input, m2 = 1 - m1; "v3": see `gate`; "v4": each from its own branch's vote.
        gate: for v3: "cross", each coefficient from the other branch (as released), or "both", each from both branches
            (the paper's words).
        stride: from children to parents; v2 needs it.

    Shapes: master and aide [b, c, d, h, w], children [b, c, p, h', w'] -> Capsules as `master_aide` gives them
    """

    def __init__(self, caps: int, in_dim: int, out_dim: int, stride: int = 1, version: str = "v3", gate: str = "cross"):
        super().__init__()
        if version not in VERSIONS:
            raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
        if gate not in ("cross", "both"):
            raise ValueError(f"gate must be cross or both, got {gate!r}")
        if gate == "both" and version != "v3":
            raise ValueError(f"gate='both' is a form of v3, got version {version!r}")
        self.version = version
        self.gate = gate
        dim = in_dim if version == "v2" else 2 * out_dim if gate == "both" else out_dim
        self.m1 = GroupedConv2d(caps * dim, caps, 3, stride if version == "v2" else 1, padding=1, groups=caps)
        self.m2 = GroupedConv2d(caps * dim, caps, 3, padding=1, groups=caps) if version in ("v3", "v4") else None

    @property
    def reach(self) -> int:
        """How much wider the aide's window is than the master's: the same in v1 and v2, 4 pixels in v3 and v4."""
        return 4 if self.version in ("v3", "v4") else 0

    def forward(self, master: Tensor, aide: Tensor, children: Tensor) -> Capsules:
        if self.m2 is None:
            source = master if self.version == "v1" else children
            return master_aide(master, aide, self.m1(source.flatten(1, 2)))
        if self.gate == "cross":
            mixed = gated_by(master, aide, self.m1, self.m2, cross=self.version == "v3")
            if mixed is not None:
                return Capsules(mixed[0], None, mixed[1])
        if self.version == "v4":
            first, second = master, aide
        elif self.gate == "cross":
            first, second = aide, master
        else:
            first = second = torch.cat([master, aide], dim=2)
        return master_aide(master, aide, self.m1(first.flatten(1, 2)), self.m2(second.flatten(1, 2)))
