"""Who was routed to whom for one image, layer by layer and iteration by iteration.

Nothing in a network knows of it: hooks see the votes go by, and a routing is asked again what it would have said after
fewer iterations.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.functional import flatten_capsules
from torchcaps.layers.encap import CapFC
from torchcaps.layers.pooled import FullWindowCaps, PooledConvCaps
from torchcaps.layers.same import same_padding
from torchcaps.ops import Votes, Window
from torchcaps.routing import EMRouting
from torchcaps.train.routing_log import after_fewer_iterations, draw_start, routes_votes
from torchcaps.types import Capsules

Space = tuple[int, int, int]  # types, height, width; flat capsules are types of one site


class Link(NamedTuple):
    """What each parent of a layer is made of.

    The share of a child in a parent is the part of the parent's mixture that comes from its vote: the coupling times
    the vote's component along the mixture, where that is positive, as a part of the sum over all children. In EM, where
    a parent is a mean, it is responsibility times activation. Shares of a parent sum to 1, evenly where nothing votes
    for it. A way around a layer is no vote and is not followed.

    Attributes:
        where: the child behind each of a window's, as a number in (c h w).
        weights: with which the votes were mixed, and `towards` the direction of each mixture.

    Shapes: shares and coupling [j, y, x, n] and where [y, x, n], n being the children of a window;
        weights [1, ..., i, j], towards [1, ..., j, d]
    """

    name: str
    routing: str
    shares: Tensor
    coupling: Tensor
    where: Tensor
    children: Space
    votes: Votes
    weights: Tensor
    towards: Tensor

    @property
    def parents(self) -> Space:
        j, y, x, _ = self.shares.shape
        return j, y, x

    def down(self, mass: Tensor) -> Tensor:
        """Hands each parent's mass to its children, by their shares; none is lost.

        Shapes: [j, y, x] -> [c, h, w]
        """
        below = torch.zeros(self.children, dtype=self.shares.dtype, device=self.shares.device).flatten()
        given = torch.einsum("jyx,jyxn->yxn", mass.to(below), self.shares)
        return below.index_add(0, self.where.flatten(), given.flatten()).view(self.children)

    def pull_on(self, mass: Tensor) -> Tensor | None:
        """In which direction each child's pose adds to the parents that have mass; None where the votes do not tell.

        Shapes: [j, y, x] -> [c, p, h, w]
        """
        if type(self.votes) is not Votes:
            return None
        poses = self.votes.poses.detach().requires_grad_()
        votes = Votes(poses, self.votes.weight.detach(), self.votes.window, self.votes.offset)
        above = mass.permute(1, 2, 0).reshape(*votes.lead, 1, votes.parents).to(self.weights)
        with torch.enable_grad():
            total = (votes.mixture(self.weights * above) * self.towards).sum()
            (pull,) = torch.autograd.grad(total, poses)
        if pull.dim() == 5:
            return pull[0]
        return pull[0].view(*self.children, -1).permute(0, 3, 1, 2)


class Seen(NamedTuple):
    """What one look at an image gives: links[t][n] of frame t and layer n, counted from the image.

    Frames are the iterations, the last being the network's own; a routing without any has two, its votes spread evenly
    and as it routed them. `features` and `blank` [1, f, H, W] are the stem's, of the image and of an empty one; they
    are None where the network has no stem.
    """

    output: Any
    frames: tuple[str, ...]
    links: list[list[Link]]
    features: Tensor | None
    blank: Tensor | None


class _Stage(NamedTuple):
    votes: Votes
    coupling: Tensor
    weights: Tensor
    by_weight: bool  # shares are the weights themselves
    poses: Tensor  # of the children, as the layer got them
    layer: nn.Module


def look(network: nn.Module, image: Tensor) -> Seen:
    """Runs the network on one image and keeps what was routed; `undisturbed` is the caller's.

    Shapes: image [1, c, h, w]
    """
    owners = {module.routing: module for module in network.modules() if isinstance(_routing(module), nn.Module)}
    names = {module: name for name, module in network.named_modules()}
    given: dict[nn.Module, Tensor] = {}
    order: list[nn.Module] = []
    stages: dict[nn.Module, list[_Stage]] = {}
    calls: dict[nn.Module, int] = {}
    features: list[Tensor] = []

    def before(layer: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        given[layer] = args[0] if args else options["poses"]

    def after(routing: Any, args: tuple, options: dict[str, Any], output: Capsules) -> None:
        asked = inspect.signature(routing.forward).bind(*args, **options).arguments
        votes = Votes.of(asked["votes"]).to(torch.float32)
        layer = owners.get(routing, routing)
        activations, parents = asked.get("activations"), asked.get("parents")
        made = [*after_fewer_iterations(routing, votes, activations, parents), output]
        poses = given.get(layer, votes.poses)
        for each in made:
            if each.coupling is None:
                raise ValueError(f"{type(routing).__name__} of {names[layer]} keeps no coupling that could be drawn")
            weights = each.coupling.float()
            activated = isinstance(routing, EMRouting) or getattr(routing, "beta_u", None) is not None
            if activated and activations is not None:
                weights = weights * activations[..., None].float()
            stage = _Stage(votes, each.coupling.float(), weights, isinstance(routing, EMRouting), poses, layer)
            stages.setdefault(layer, []).append(stage)
        calls[layer] = calls.get(layer, 0) + 1
        if layer not in order:
            order.append(layer)

    def after_capfc(layer: Any, args: tuple, output: Capsules) -> None:
        votes = Votes.of(torch.einsum("bid,dij->bijd", flatten_capsules(args[0]), layer.weight).float())
        ones = torch.ones(votes.poses.shape[:-1], device=votes.poses.device)
        stages[layer] = [_Stage(votes, ones, ones, False, args[0], layer)]
        calls[layer] = 1
        order.append(layer)

    stem = getattr(network, "stem", None)
    with ExitStack() as hooks:
        for module in network.modules():
            if routes_votes(module):
                hooks.enter_context(module.register_forward_pre_hook(draw_start, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            if module in owners.values():
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            if isinstance(module, CapFC):
                hooks.enter_context(module.register_forward_hook(after_capfc))
        if isinstance(stem, nn.Module):
            hooks.enter_context(stem.register_forward_hook(lambda module, args, output: features.append(output)))
        output = network(image)
    if not order:
        raise ValueError("this network has no layer in which capsules vote, so there is no coupling to show")
    blank = stem(torch.zeros_like(image)) if isinstance(stem, nn.Module) else None
    frames, chosen = _frames(order, stages, concurrent=max(calls.values()) > 1)
    links = [[_link(names[stage.layer], stage) for stage in row] for row in chosen]
    return Seen(output, frames, links, features[0] if features else None, blank)


def _routing(module: nn.Module) -> Any:
    routing = getattr(module, "routing", None)
    return routing if isinstance(routing, nn.Module) and routes_votes(routing) else None


def _frames(
    order: Sequence[nn.Module], stages: dict[nn.Module, list[_Stage]], concurrent: bool
) -> tuple[tuple[str, ...], list[list[_Stage]]]:
    """For each frame a stage of each layer.

    In concurrent iterations a layer's children are those of the iteration before.
    """
    count = max(len(stages[layer]) for layer in order)
    if count == 1:
        last = [stages[layer][0] for layer in order]
        return ("evenly", "routed"), [[_evenly(stage) for stage in last], last]
    rows = []
    for t in range(count):
        depths = reversed(range(len(order))) if concurrent else [0] * len(order)
        rows.append([
            stages[layer][min(max(t - depth, 0), len(stages[layer]) - 1)]
            for layer, depth in zip(order, depths, strict=True)
        ])  # fmt: skip
    return tuple(f"iteration {t + 1}" for t in range(count)), rows


def _evenly(stage: _Stage) -> _Stage:
    even = torch.full_like(stage.coupling, 1 / stage.coupling.shape[-1])
    return stage._replace(coupling=even, weights=even)


def _link(name: str, stage: _Stage) -> Link:
    votes, layer = stage.votes, stage.layer
    mixture = votes.mixture(stage.weights)
    towards = F.normalize(mixture, dim=-1)
    if isinstance(layer, PooledConvCaps):
        parts, where, valid, coupling = _taps(layer, stage.poses.float(), stage.coupling, towards)
        children: Space = (stage.poses.shape[1], stage.poses.shape[3], stage.poses.shape[4])
    else:
        if stage.by_weight:
            parts = stage.weights
        else:
            _, parts = votes.sweep(lambda votes, to: (None, (votes @ to[..., None])[..., 0]), windows=[towards])
            parts = stage.weights * parts
        children, where = _places(votes, stage.poses)
        parts, coupling = (x.reshape(*where.shape[:2], *x.shape[-2:]) for x in (parts, stage.coupling))
        valid = torch.ones_like(where, dtype=torch.bool)
    shares = _normalised(parts.clamp(min=0), valid)
    assert shares.shape[:2] == where.shape[:2]
    return Link(
        name, type(_routing(layer) or layer).__name__, shares.permute(3, 0, 1, 2), coupling.permute(3, 0, 1, 2), where,
        children, votes, stage.weights, towards,
    )  # fmt: skip


def _places(votes: Votes, poses: Tensor) -> tuple[Space, Tensor]:
    """Shapes: -> where [y, x, n]"""
    if votes.window is not None:
        _, c, _, h, w = votes.poses.shape
        numbers = torch.arange(c * h * w, device=poses.device).view(1, c, 1, h, w)
        return (c, h, w), Window(votes.window.kernel_size, votes.window.stride).unfold(numbers)[0, ..., 0]
    space: Space = (votes.in_caps, 1, 1)
    if poses.dim() == 5 and poses.shape[1] * poses.shape[3] * poses.shape[4] == votes.in_caps:
        space = (poses.shape[1], poses.shape[3], poses.shape[4])
    return space, torch.arange(votes.in_caps, device=poses.device)[None, None]


def _taps(layer: Any, poses: Tensor, coupling: Tensor, towards: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of windows that vote as one: what each of their capsules adds, coupled as its window is.

    Shapes: poses [1, i, p, h, w], coupling [1, (y, x,) i, j], towards [1, (y, x,) j, d]
        -> parts [y, x, n, j], where and valid [y, x, n], coupling [y, x, n, j]
    """
    _, i, _, h, w = poses.shape
    tall, wide = layer.weight.shape[-2:]
    stride = layer.stride
    sides = (0, 0, 0, 0)
    if not isinstance(layer, FullWindowCaps):
        top, bottom = same_padding(h, tall, stride)
        left, right = same_padding(w, wide, stride)
        sides = (left, right, top, bottom)

    def windows(x: Tensor, value: float) -> Tensor:
        """Shapes: [i, p, h, w] -> [i, p, y, x, k, l]"""
        return F.pad(x, sides, value=value).unfold(2, tall, stride).unfold(3, wide, stride)

    numbers = windows(torch.arange(i * h * w, dtype=torch.float64).view(i, 1, h, w).to(poses.device), -1)
    where = numbers[:, 0].permute(1, 2, 0, 3, 4).flatten(2).long()
    to = towards.reshape(*where.shape[:2], *towards.shape[-2:])
    shared = coupling.reshape(*where.shape[:2], i, -1)
    parts = torch.einsum("ipyxkl,ijdpkl,yxjd->yxiklj", windows(poses[0], 0.0), layer.weight.float(), to)
    coupling = shared[:, :, :, None, None, :].expand_as(parts)
    return (coupling * parts).flatten(2, 4), where.clamp(min=0), where >= 0, coupling.flatten(2, 4)


def _normalised(parts: Tensor, valid: Tensor) -> Tensor:
    """Sums to 1 over the children, evenly where no part is positive.

    Shapes: parts [y, x, n, j], valid [y, x, n] -> [y, x, n, j]
    """
    parts = parts.double() * valid[..., None]
    total = parts.sum(2, keepdim=True)
    even = valid[..., None] / valid.sum(2)[..., None, None]
    return torch.where(total > 0, parts / torch.where(total > 0, total, 1), even.to(parts).expand_as(parts))
