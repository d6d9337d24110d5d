"""All figures that `torchcaps figure` can draw, by name."""

from __future__ import annotations

from difflib import get_close_matches

from torchcaps.figures import kinds_poses, kinds_routing
from torchcaps.figures.kind import Kind

KINDS: tuple[Kind, ...] = (*kinds_poses.KINDS, *kinds_routing.KINDS)


def find(name: str) -> Kind:
    """The figure of this name; of an unknown one the sentence tells those that are near."""
    kinds = {kind.name: kind for kind in KINDS}
    if name in kinds:
        return kinds[name]
    near = get_close_matches(name, kinds, n=3, cutoff=0.5) or [each for each in kinds if name and name in each][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(kinds)}"
    raise ValueError(f"there is no figure {name!r}; {hint}")
