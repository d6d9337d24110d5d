"""What routing does inside a network: how much it still changes from iteration to iteration, and who agrees with whom.

For Sabour's figure A.1 and Li's figure 2. Nothing in a layer or a routing knows of it: hooks see the votes go by, and
the routing is asked again what it would have said after fewer iterations.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.functional import length, widen
from torchcaps.ops import Votes, backend, gaussian_fit, gaussian_log_density
from torchcaps.routing import DynamicRouting, EMRouting, InvertedAttentionRouting
from torchcaps.routing.em import parent_logits
from torchcaps.types import Capsules

COSINES = [bin / 10 for bin in range(-10, 11)]  # edges of the bins, the last of which has its upper edge inside
LENGTHS = [10 ** (bin / 4 - 4) for bin in range(25)]  # the first and the last bin also take what lies beyond them
PIECE = 8  # images at a time


def routing_log(network: nn.Module, images: Tensor) -> dict[str, Any]:
    """Plain values for one batch, means and counts over all its images, sites, children and parents.

    For each layer that routes votes:

    `logits`: the mean absolute change of a routing logit after each iteration. In dynamic routing the logits b_ij
    gather v_j . u_ij, so that is their change, after the last iteration too (Sabour's procedure 1, figure A.1). In
    inverted attention they are the agreements with the parents so far, in concurrent iterations of votes that change
    as well, and in EM the log responsibilities; there the last iteration is followed by no other, and counts none.
    A routing without iterations has none.

    `coupling`: the same of the coupling coefficients, from each iteration to the next.

    `cosine`: how many votes have which cosine with their parent's final pose, cos(v_j, v_j|i) in bins between
    `cosine_edges`; `cosine_lengths`, how long these votes are on average, None where there are none (Li's figure 2).
    `lengths`: how many votes have which length, between `length_edges`.

    The network runs in eval mode and without gradients, and is then as it was; so are torch's random numbers.

    Shapes: images [b, c, h, w]
    """
    names = {module: name for name, module in network.named_modules() if routes_votes(module)}
    seen: dict[nn.Module, _Record] = {}
    with undisturbed(network, images.device), torch.no_grad():
        for piece in images.split(PIECE):
            calls: dict[nn.Module, list[_Call]] = {module: [] for module in names}
            hooks = [
                hook
                for module in names
                for hook in (
                    module.register_forward_pre_hook(draw_start, with_kwargs=True),
                    module.register_forward_hook(_listener(calls[module]), with_kwargs=True),
                )
            ]
            try:
                network(piece)
            finally:
                for hook in hooks:
                    hook.remove()
            for module, made in calls.items():
                if made:
                    seen.setdefault(module, _Record()).add(module, made)
    layers = {
        names[module].removesuffix("routing").rstrip("."): {"routing": type(module).__name__, **record.plain()}
        for module, record in seen.items()
    }
    return {"images": len(images), "cosine_edges": COSINES, "length_edges": LENGTHS, "layers": layers}


class _Call:
    """One call of a routing: what it would have given after 1, 2, ... iterations, the last being what it gave.

    The votes are kept for the last call alone, which the histograms are of.
    """

    def __init__(self, module: Any, votes: Votes, activations: Tensor | None, parents: Tensor | None, output: Capsules):
        self.votes: Votes | None = votes
        self.poses = output.poses
        stages = [*after_fewer_iterations(module, votes, activations, parents), output]
        self.coupling = [stage.coupling for stage in stages]
        self.changes: list[Tensor] = []  # of logits, where they add up
        self.logits: list[Tensor] = []  # of each iteration, where they are made anew
        if isinstance(module, DynamicRouting):
            self.changes = [_agreement(votes, stage.poses) for stage in stages]
        elif isinstance(module, EMRouting):
            self.logits = list(_log_responsibilities(module, votes, activations, stages))
        elif isinstance(module, InvertedAttentionRouting):
            scale = votes.dim**-0.5 if module.scaled else 1.0
            before = [module.start if parents is None else parents, *(stage.poses for stage in stages[:-1])]
            for poses in before:
                given = torch.zeros_like(output.poses) if poses is None else poses.expand_as(output.poses)
                self.logits.append(scale * _agreement(votes, given))


class _Record:
    """Sums over all pieces of a batch."""

    def __init__(self) -> None:
        self.iterations = 0
        self.logits: list[_Mean] = []
        self.coupling: list[_Mean] = []
        self.cosine = [0] * (len(COSINES) - 1)
        self.along = [0.0] * (len(COSINES) - 1)  # sums of the votes' lengths
        self.lengths = [0] * (len(LENGTHS) - 1)

    def add(self, module: nn.Module, calls: list[_Call]) -> None:
        logits = [logits for call in calls for logits in call.logits]
        coupling = [coupling for call in calls for coupling in call.coupling]
        self.iterations = len(coupling)
        changes = [change for call in calls for change in call.changes]
        changes += [later - earlier for earlier, later in pairwise(logits)]
        _add_means(self.logits, changes)
        known = [each for each in coupling if each is not None]  # a routing may keep none
        _add_means(self.coupling, [later - earlier for earlier, later in pairwise(known)])
        votes = calls[-1].votes
        assert votes is not None
        self.count(votes, calls[-1].poses)

    def count(self, votes: Votes, poses: Tensor) -> None:
        def step(votes: Tensor, parents: Tensor) -> tuple[None, None]:
            lengths = length(votes)
            product = lengths * length(parents)[..., None]
            cosines = (votes @ parents[..., None])[..., 0] / torch.where(product > 0, product, 1)
            which = torch.bucketize(cosines, torch.tensor(COSINES[1:-1]).to(cosines), right=True)
            self.cosine = [a + int(b) for a, b in zip(self.cosine, _tally(which, COSINES), strict=True)]
            self.along = [a + float(b) for a, b in zip(self.along, _tally(which, COSINES, lengths), strict=True)]
            which = torch.bucketize(lengths, torch.tensor(LENGTHS[1:-1]).to(lengths), right=True)
            self.lengths = [a + int(b) for a, b in zip(self.lengths, _tally(which, LENGTHS), strict=True)]
            return None, None

        votes.sweep(step, windows=[poses])

    def plain(self) -> dict[str, Any]:
        return {
            "iterations": self.iterations,
            "logits": [mean.plain() for mean in self.logits],
            "coupling": [mean.plain() for mean in self.coupling],
            "cosine": self.cosine,
            "cosine_lengths": [
                _finite(along / count) if count else None for along, count in zip(self.along, self.cosine, strict=True)
            ],
            "lengths": self.lengths,
        }


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def plain(self) -> float | None:
        return _finite(self.total / self.count)


def _add_means(means: list[_Mean], changes: list[Tensor]) -> None:
    means += [_Mean() for _ in changes[len(means) :]]
    for mean, change in zip(means, changes, strict=True):
        mean.total += _total(change.abs())
        mean.count += change.numel()


def _total(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float32 if x.device.type == "mps" else torch.float64))


def _tally(which: Tensor, edges: list[float], weights: Tensor | None = None) -> list[float]:
    """How many are in each bin, or the sum of their weights; on an accelerator bin by bin, so always in one order."""
    bins = len(edges) - 1
    if which.device.type == "cpu":
        flat = None if weights is None else weights.flatten().double()
        return torch.bincount(which.flatten(), flat, bins).tolist()
    return [_total((which == bin) if weights is None else torch.where(which == bin, weights, 0)) for bin in range(bins)]


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def routes_votes(module: nn.Module) -> bool:
    return "votes" in inspect.signature(module.forward).parameters


def draw_start(module: nn.Module, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Random first parents are drawn here, so that they are known."""
    if not isinstance(module, InvertedAttentionRouting) or module.start_at != "random":
        return None
    asked = inspect.signature(module.forward).bind(*args, **options).arguments
    if asked.get("parents") is None:
        votes = Votes.of(asked["votes"])
        asked["parents"] = torch.randn(*votes.lead, *module.dims, dtype=votes.dtype, device=votes.device)
    return (), asked


def _listener(calls: list[_Call]) -> Any:
    def listen(module: nn.Module, args: tuple, options: dict[str, Any], output: Any) -> None:
        asked = inspect.signature(module.forward).bind(*args, **options).arguments
        votes = Votes.of(asked["votes"])
        wide = votes.to(torch.promote_types(votes.dtype, torch.float32))
        with nullcontext() if votes.device.type == "meta" else torch.autocast(votes.device.type, enabled=False):
            activations, parents = (_widened(asked.get(name)) for name in ("activations", "parents"))
            given = Capsules(*(_widened(part) for part in output))
            call = _Call(module, wide, activations, parents, given)
        if calls:
            calls[-1].votes = None
        calls.append(call)

    return listen


def _widened(x: Tensor | None) -> Any:
    return None if x is None else widen(x)


def after_fewer_iterations(
    module: Any, votes: Votes, activations: Tensor | None, parents: Tensor | None
) -> Iterator[Capsules]:
    """A copy shares all weights; only how often it iterates is its own."""
    fewer = copy.copy(module)
    for iterations in range(1, getattr(module, "iterations", 1)):
        fewer.iterations = iterations
        yield fewer.forward(votes, activations, parents)


def _agreement(votes: Votes, parents: Tensor) -> Tensor:
    """Shapes: votes [..., i, j, d], parents [..., j, d] -> [..., i, j]"""
    _, agreement = votes.sweep(lambda votes, parents: (None, (votes @ parents[..., None])[..., 0]), windows=[parents])
    return agreement


def _log_responsibilities(
    module: EMRouting, votes: Votes, activations: Tensor | None, stages: list[Capsules]
) -> Iterator[Tensor]:
    """Of each iteration, in log space, where none is lost to 0. The E-step's, from the means of the M-step before.

    Shapes: -> [..., i, j] each
    """

    def compete(logits: Tensor) -> Tensor:
        return logits - (votes.per_child(logits) if module.sites else logits.logsumexp(-1))[..., None]

    yield compete(torch.zeros(*votes.lead, votes.in_caps, votes.parents, dtype=votes.dtype, device=votes.device))
    for iteration, stage in enumerate(stages[:-1]):
        assert stage.coupling is not None
        weights = stage.coupling if activations is None else stage.coupling * activations[..., None]
        mass, mean, variance = gaussian_fit(votes, weights)
        variance = variance + module.variance_floor
        temperature = module.inverse_temperature(iteration)
        logits = parent_logits(mass, variance, module.beta_u, module.beta_a, temperature)
        yield compete(gaussian_log_density(votes, mean, variance) + F.logsigmoid(logits)[..., None, :])


@contextmanager
def undisturbed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, every layer stepped, couplings kept and fixed random numbers inside; afterwards all is as it was."""
    modes = {module: module.training for module in network.modules()}
    stacks = [module for module in network.modules() if hasattr(module, "in_full")]
    own = device.type in ("cuda", "mps")
    places = [device] if own else []
    with torch.random.fork_rng(places, device_type=device.type if own else "cuda"):
        torch.manual_seed(0)
        network.eval()
        for stack in stacks:
            stack.in_full = True  # type: ignore[assignment]
        try:
            with backend("torch"):
                yield
        finally:
            for stack in stacks:
                stack.in_full = False  # type: ignore[assignment]
            for module, mode in modes.items():
                module.training = mode
