"""Which parts of an image vote for which class: couplings followed from a class capsule down to the pixels.

>>> coupling_map(model, image, 3)  # where in the image class 3 comes from, [h, w], summing to 1
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps import pictures
from torchcaps.analysis.fields import PixelField, WindowField, stretch
from torchcaps.analysis.links import Seen, Space, look
from torchcaps.analysis.sample import chosen_image, whole
from torchcaps.evaluate import ranking
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.runs import Opened
from torchcaps.train.routing_log import undisturbed

BRANCHES = {1: (8,), 2: (4, 3), 3: (3, 2, 2)}  # children of a node, by how many layers route; deeper ones get 2
HELD = 0.9  # of the mass along a side that the box of a capsule holds


def coupling_map(model: nn.Module, image: Tensor, which: int) -> Tensor:
    """How much of a class capsule comes from where in the image.

    Shapes: image [c, h, w] -> [h, w], at least 0 and summing to 1
    """
    return Routes(model, image).heat(which)


class Node(NamedTuple):
    """A capsule of a parse tree. `share` is its part of its parent, `mass` its part of the class capsule.

    `box` is top, left, bottom, right of the patch it looks at, in pixels; `site` is None for capsules without a place.

    Shapes: heat [h, w], which sums to 1
    """

    layer: int  # 0 the first capsules
    type: int
    site: tuple[int, int] | None
    share: float
    coupling: float
    mass: float
    box: tuple[int, int, int, int]
    heat: Tensor
    children: tuple[Node, ...] = ()


class Routes:
    """The routing of one image, to be asked for maps and trees of any class.

    Attributes:
        frames: names of the iterations, the last being what the network did.
        output: what the network said, of a batch of one.

    Shapes: image [c, h, w]
    """

    def __init__(self, model: nn.Module, image: Tensor):
        if image.dim() != 3:
            raise ValueError(f"couplings are shown of one image [c, h, w], got {list(image.shape)}")
        if image.device.type == "mps":  # which has no float64
            model, image = copy.deepcopy(model).cpu(), image.cpu()
        self.model, self.image = model, image
        with undisturbed(model, image.device), torch.no_grad():
            self.seen: Seen = look(model, image[None])
        self.frames, self.output = self.seen.frames, self.seen.output
        self.links = self.seen.links
        self._field: PixelField | None = None
        self._windows: WindowField | None = None
        features, blank, primary = self.seen.features, self.seen.blank, getattr(model, "primary", None)
        if features is not None and blank is not None:
            self._size = (features.shape[2], features.shape[3])
            shape = (image.shape[0], image.shape[1], image.shape[2])
            self._field = PixelField(model.stem, shape, self._size, image.device)  # type: ignore[arg-type]
            first = self.links[-1][0].children
            if isinstance(primary, PrimaryCaps) and (primary.types, *primary.out_space(*self._size)) == first:
                self._windows = WindowField(primary, (features - blank)[0].float())

    @property
    def classes(self) -> int:
        return self.links[-1][-1].parents[0]

    def heat(self, which: int, frame: int = -1) -> Tensor:
        """Where class `which` comes from. Shapes: -> [h, w]"""
        return self._down(self._one(self.links[frame][-1].parents, self._checked(which), 0, 0), frame)

    def first_capsules(self, which: int, frame: int = -1) -> Tensor:
        """Each first capsule's part of a class. Shapes: -> [c, h, w]"""
        mass = self._one(self.links[frame][-1].parents, self._checked(which), 0, 0)
        for link in reversed(self.links[frame]):
            mass = link.down(mass)
        return mass

    def tree(self, which: int, branches: tuple[int, ...] = ()) -> Node:
        """The class capsule, its strongest children, theirs, and so on down to the first capsules.

        Args:
            branches: how many children a node has, from the class downwards.
        """
        depth = len(self.links[-1])
        branches = branches or BRANCHES.get(depth, (3, *[2] * (depth - 1)))
        return self._node(depth, (self._checked(which), 0, 0), 1.0, 1.0, 1.0, branches, None)

    def _node(
        self,
        layer: int,
        place: tuple[int, int, int],
        share: float,
        coupling: float,
        mass: float,
        branches: tuple[int, ...],
        above: tuple[int, int, int] | None,
    ) -> Node:
        links = self.links[-1]
        space = links[layer - 1].parents if layer else links[0].children
        children: list[Node] = []
        if layer:
            link = links[layer - 1]
            shares = link.shares[place]
            for n in shares.topk(min(branches[0], len(shares))).indices.tolist():
                part = float(shares[n])
                if part > 0:
                    c, rest = divmod(int(link.where[place[1], place[2], n]), link.children[1] * link.children[2])
                    at = (c, *divmod(rest, link.children[2]))
                    tied = float(link.coupling[place][n])
                    children.append(self._node(layer - 1, at, part, tied, mass * part, branches[1:] or (2,), place))
        if layer:
            heat = self._down(self._one(space, *place), -1, layer)
        else:
            assert above is not None
            heat = self._pixels(self._one(space, *place), self._one(links[0].parents, *above), -1)
        site = None if space[1:] == (1, 1) else place[1:]
        return Node(layer, place[0], site, share, coupling, mass, _box(heat), heat, tuple(children))

    def _down(self, mass: Tensor, frame: int, layer: int | None = None) -> Tensor:
        """Shapes: [j, y, x] of some layer, by default the last -> [h, w]"""
        links = self.links[frame][:layer]
        for link in reversed(links[1:]):
            mass = link.down(mass)
        return self._pixels(links[0].down(mass), mass, frame)

    def _pixels(self, mass: Tensor, above: Tensor, frame: int) -> Tensor:
        """Shapes: mass of the first capsules [c, h, w], above of their parents [j, y, x] -> [h, w]"""
        if self._field is None:
            return stretch(mass.sum(0), (self.image.shape[1], self.image.shape[2]))
        if self._windows is None:
            return self._field.spread(stretch(mass.sum(0), self._size))
        pull = self.links[frame][0].pull_on(above) if self._windows.kernel != (1, 1) else None
        return self._field.spread(self._windows.spread(mass, pull))

    def _one(self, space: Space, *place: int) -> Tensor:
        mass = torch.zeros(space, dtype=torch.float64, device=self.image.device)
        mass[place] = 1.0
        return mass

    def _checked(self, which: int) -> int:
        if not 0 <= which < self.classes:
            raise ValueError(f"there are {self.classes} classes, from 0 on, and no class {which}")
        return which


def _box(heat: Tensor) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of what holds most of the heat on either side.

    Shapes: [h, w]
    """
    ends = []
    for side in (heat.sum(1), heat.sum(0)):
        reached = side.cumsum(0) / side.sum()
        low = int((reached <= (1 - HELD) / 2).sum())
        high = int((reached < (1 + HELD) / 2 - 1e-12).sum()) + 1
        ends.append((low, min(high, len(side))))
    return ends[0][0], ends[1][0], ends[0][1], ends[1][1]


def coupling_view(runs: Sequence[Opened], options: Mapping[str, Any]) -> dict[str, Any]:
    """Heat maps of the classes that are most likely, after each iteration, and parse trees of those that are named.

    Options: `image`, a place in the test set, or `digit`, a class of which one is looked for; `classes`, how many.
    """
    (run,) = runs
    sample = chosen_image(run, options)
    image = sample.seen()[0].to(run.device)
    routes = Routes(run.model, image)
    names = run.class_names
    probabilities = routes.output.probabilities[0]
    ranked = ranking(probabilities[None])[0].tolist()
    labels = sample.labels.reshape(1, -1)[0].tolist()
    objects = int(getattr(run.model, "objects", 1))
    picture = pictures.picture(image.cpu())
    return {
        "model": run.recipe.model,
        "data": run.recipe.data,
        "number": int(sample.indices[0]),
        "picture": pictures.packed(picture),
        "size": list(image.shape[1:]),
        "labels": [names[k] for k in labels if k >= 0],
        "predicted": [names[k] for k in ranked[:objects]],
        "frames": list(routes.frames),
        "layers": [{"name": link.name, "routing": link.routing} for link in routes.links[-1]],
        "classes": [
            {
                "name": names[k],
                "probability": float(probabilities[k]),
                "label": k in labels,
                "heat": [_rows(routes.heat(k, frame)) for frame in range(len(routes.frames))],
            }
            for k in ranked[: whole(options, "classes")]
        ],
        "trees": [{"name": names[k], **_plain(routes.tree(k))} for k in ranked[: min(objects, 2)]],
    }


def _plain(node: Node) -> dict[str, Any]:
    values = node._asdict()
    values["heat"] = pictures.packed(pictures.picture((node.heat / node.heat.max().clamp(min=1e-30))[None].cpu()))
    return {**values, "children": [_plain(child) for child in node.children]}


def _rows(heat: Tensor) -> list[list[float]]:
    return [[round(value, 8) for value in row] for row in heat.tolist()]
