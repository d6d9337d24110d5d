"""Losses as kernels against plain PyTorch in float64."""

import math

import pytest
import torch
from torch.func import vmap

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, fused, on
from tests.helpers import assert_as_accurate
from torchcaps import losses
from torchcaps.fused import losses_triton
from torchcaps.ops import backend
from torchcaps.train.replicas import Tallies

pytestmark = OPT_IN
LABELS = {
    "one": [0, 2, 6, 6, 1],
    "several": [[0, 2], [3, -1], [-1, -1], [5, 5], [6, 0]],
}


def labels_of(kind):
    return torch.tensor(LABELS[kind], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["paper", "official"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", LABELS)
def test_margin(kind, weighted, scale, dtype, monkeypatch):
    labels, lengths = labels_of(kind), torch.rand(5, 7, device=DEVICE)
    weights = torch.arange(7.0, device=DEVICE) / 8 if weighted else None

    def function(lengths):
        given = None if weights is None else weights.to(lengths.dtype)
        return losses.margin_loss(lengths, labels, scale=scale, class_weights=given)

    assert_as_accurate(fused(function, losses, monkeypatch), on("torch", function), [lengths], dtype)


def test_margin_of_many(monkeypatch):
    labels = torch.arange(300, device=DEVICE) % 13
    lengths = torch.rand(13, 300, device=DEVICE).mT

    def function(lengths):
        return losses.margin_loss(lengths, labels)

    assert_as_accurate(fused(function, losses, monkeypatch), on("torch", function), [lengths], torch.float32)


def test_what_is_not_finite_is_not_lost():
    for bad in (math.nan, math.inf):
        lengths = torch.full((2, 3), 0.5, device=DEVICE)
        lengths[1, 2] = bad
        with backend("triton"):
            assert not losses.margin_loss(lengths, torch.tensor([0, 1], device=DEVICE)).isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kind", "own"), [("one", False), ("several", False), ("several", True)])
def test_reconstruction(kind, own, masked, reduction, dtype, monkeypatch):
    labels = labels_of(kind)
    objects = 1 if labels.dim() == 1 else 2
    pictures = torch.rand(5, objects, 3, 20, 19, device=DEVICE)
    target = torch.rand(5, *([objects] if own else []), 3, 20, 19, device=DEVICE)

    def function(pictures):
        given = labels if masked else None
        return losses.reconstruction_loss(pictures, target.to(pictures.dtype), reduction=reduction, labels=given)

    assert_as_accurate(fused(function, losses, monkeypatch), on("torch", function), [pictures], dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", LABELS)
def test_margin_of_replicas(kind, weighted, monkeypatch):
    labels = torch.stack([labels_of(kind), labels_of(kind).flip(0), labels_of(kind).roll(1, 0)], 1)
    weights = torch.arange(7.0, device=DEVICE) / 8 if weighted else None

    def function(lengths):
        def one(lengths, labels):
            given = None if weights is None else weights.to(lengths.dtype)
            return losses.margin_loss(lengths, labels, class_weights=given)

        return vmap(one, in_dims=(0, 1))(lengths, labels)

    lengths = torch.rand(3, 5, 7, device=DEVICE)
    assert_as_accurate(fused(function, losses, monkeypatch), on("torch", function), [lengths], torch.float32)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("kind", "own", "side"), [("one", False, 19), ("several", False, 19), ("several", True, 50)])
def test_reconstruction_of_replicas(kind, own, side, masked, shared, monkeypatch):
    """Pictures small enough for one program, and larger ones; targets of each replica's own, or of all."""
    labels = torch.stack([labels_of(kind), labels_of(kind).flip(0), labels_of(kind).roll(1, 0)], 1)
    objects = 1 if labels.dim() == 2 else 2
    rest = (*([objects] if own else []), 3, side, 20)
    target = torch.rand(5, *rest, device=DEVICE) if shared else torch.rand(5, 3, *rest, device=DEVICE)

    def function(pictures):
        def one(pictures, target, labels):
            given = labels if masked else None
            return losses.reconstruction_loss(pictures, target, reduction="mean", labels=given, weight=0.4)

        places = (0, None if shared else 1, 1)
        return vmap(one, in_dims=places)(pictures, target.to(pictures.dtype), labels)

    pictures = torch.rand(3, 5, objects, 3, side, 20, device=DEVICE)
    assert_as_accurate(fused(function, losses, monkeypatch), on("torch", function), [pictures], torch.float32)


def test_a_picture_without_label_may_be_anything():
    pictures = torch.rand(2, 1, 1, 4, 4, device=DEVICE)
    pictures[1] = torch.nan
    labels, target = torch.tensor([[3], [-1]], device=DEVICE), torch.zeros(2, 1, 4, 4, device=DEVICE)
    pictures.requires_grad_()
    with backend("triton"):
        loss = losses.reconstruction_loss(pictures, target, reduction="sum", labels=labels)
    torch.testing.assert_close(loss, pictures[0].square().sum() / 2)
    (grad,) = torch.autograd.grad(loss, pictures)
    torch.testing.assert_close(grad[0], pictures.detach()[0])
    assert not grad[1].any()


@pytest.mark.parametrize("shape", [(2,), (3, 5), (2, 200)])
def test_the_tally_counts_finite_totals(shape, monkeypatch):
    """Both ways of adding, with each kind of number that is not finite somewhere."""
    done, kernel = [], losses_triton.tally
    monkeypatch.setattr(losses_triton, "tally", lambda *args: done.append(kernel(*args)) or done[-1])
    generator = torch.Generator().manual_seed(0)
    found = [Tallies(torch.device(DEVICE)) for _ in range(2)]
    bad = {2: torch.inf, 3: -torch.inf, 4: torch.nan}
    for step in range(6):
        values = torch.randn(shape[::-1], generator=generator)
        values.view(-1)[(7 * step) % values.numel()] = bad.get(step, 1.0)
        for name, tally in zip(("torch", "triton"), found, strict=True):
            with backend(name):
                tally.add(tuple("abc"[: shape[0]]), values.t().to(DEVICE), 16 + step)
    assert torch.equal(found[0].good, found[1].good)
    assert found[0].good.min() < 6
    assert done == [True] * 6
    torch.testing.assert_close(found[1].totals, found[0].totals, rtol=1e-12, atol=0, equal_nan=True)
