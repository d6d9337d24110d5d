"""Every routing by the textbook: votes as one tensor [..., i, j, d], then einsum. Others are compared with it.

    with plain():
        create_model("inverted_cifar10")(images)

It has nothing that the library does to be quick: the first, uniform iteration goes through votes as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor

from torchcaps.ops import backend
from torchcaps.ops.votes import Votes

CALLERS = (  # modules that call these formulas by name
    "torchcaps.ops.em",
    *(f"torchcaps.routing.{name}" for name in ("dynamic", "em", "inverted_attention", "self_attention")),
)


def materialise(votes: Votes) -> Tensor:
    """Shapes: -> [..., i, j, d]; made once for each layer and call"""
    if not hasattr(votes, "weight"):
        return votes.materialise()
    if not hasattr(votes, "plain"):
        children = votes.children().unflatten(3, (votes.rows, -1))
        made = torch.einsum("ngsma,gaje->ngsjme", children, votes.weight).flatten(4)
        if votes.offset is not None:
            made = made + votes.offset
        votes.plain = made.flatten(1, 2).unflatten(0, votes.lead)  # type: ignore[attr-defined]
    plain: Tensor = votes.plain  # type: ignore[attr-defined]
    return plain


def agreement_step(
    votes: Votes | Tensor,
    parents: Tensor | None = None,
    *,
    scale: float = 1.0,
    logits: Tensor | None = None,
    prior: Tensor | None = None,
    leak: bool = False,
    constant: bool = False,
    coupling: bool = False,
) -> tuple[Tensor, Tensor]:
    votes = materialise(Votes.of(votes))
    agreement = votes.new_zeros(votes.shape[:-1])
    if parents is not None:
        agreement = scale * torch.einsum("...ijd,...jd->...ij", votes, parents)
        agreement = agreement.detach() if constant else agreement
    if logits is not None:
        agreement = agreement + logits
    if leak:
        agreement = torch.cat([torch.zeros_like(agreement[..., :1]), agreement], dim=-1)
    shares = agreement.softmax(dim=-1)[..., leak:]
    if prior is not None:
        shares = shares + prior
    return torch.einsum("...ij,...ijd->...jd", shares, votes), shares


def gaussian_fit(votes: Votes | Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    votes = materialise(Votes.of(votes))
    mass = weights.sum(-2)
    share = weights / mass.clamp(min=1e-7)[..., None, :]
    mean = torch.einsum("...ij,...ijd->...jd", share, votes)
    variance = torch.einsum("...ij,...ijd->...jd", share, (votes - mean[..., None, :, :]) ** 2)
    return mass, mean, variance


def gaussian_log_density(votes: Votes | Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    votes = materialise(Votes.of(votes))
    mean, variance = mean[..., None, :, :], variance[..., None, :, :]
    return -0.5 * ((votes - mean) ** 2 / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


def mixture(votes: Votes, coupling: Tensor) -> Tensor:
    return torch.einsum("...ij,...ijd->...jd", coupling, materialise(votes))


def total(votes: Votes, coupling: Tensor | None = None) -> Tensor:
    made = materialise(votes)
    return made.sum(-3) if coupling is None else torch.einsum("ij,...ijd->...jd", coupling, made)


@contextmanager
def plain() -> Iterator[None]:
    """Networks within it route by these formulas."""
    with ExitStack() as stack:
        stack.enter_context(backend("torch"))
        for module in map(import_module, CALLERS):
            for formula in (agreement_step, gaussian_fit, gaussian_log_density):
                if hasattr(module, formula.__name__):
                    stack.enter_context(patch.object(module, formula.__name__, formula))
        stack.enter_context(patch.object(Votes, "mixture", mixture))
        stack.enter_context(patch.object(Votes, "total", total))
        yield
