"""Fused steps against plain PyTorch in float64: outputs and every gradient, on odd sizes.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_triton.py` on a CPU, or as it is where there is a GPU.
"""

import logging
import os
import sys

import pytest
import torch

from tests.helpers import assert_as_accurate, assert_equal_with_gradients
from torchcaps.ops import Votes, Window, agreement_step, backend
from torchcaps.routing.dynamic import dynamic_routing
from torchcaps.routing.inverted_attention import inverted_attention
from torchcaps.routing.self_attention import self_attention_routing

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter"),
]
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **options):
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def channels_last(*shape):
    b, c, p, h, w = shape
    return torch.randn(b, h, w, c, p).permute(0, 3, 4, 1, 2)


SIZES = {  # poses, weight [g, a, j, e], window
    "vectors": (torch.randn(3, 6, 8), (6, 8, 10, 16), None),
    "matrices": (torch.randn(17, 17, 16), (17, 4, 5, 4), None),
    "batch of 1": (torch.randn(1, 5, 16), (5, 4, 32, 4), None),
    "36 dims": (torch.randn(2, 5, 36), (5, 6, 7, 6), None),
    "one parent": (torch.randn(2, 5, 3), (5, 3, 1, 5), None),
    "many parents": (torch.randn(2, 5, 4), (5, 2, 70, 2), None),
    "large poses": (torch.randn(2, 3, 40), (3, 40, 3, 20), None),
    "every other child": (torch.randn(2, 10, 16)[:, ::2], (5, 4, 3, 4), None),
    "windows": (torch.randn(2, 2, 16, 7, 6), (18, 4, 5, 4), Window(3, 2)),
    "overlapping": (torch.randn(1, 2, 4, 4, 5), (8, 2, 3, 2), Window(2, 1)),
    "channels last": (channels_last(2, 2, 16, 7, 6), (18, 4, 5, 4), Window(3, 2)),
    "scrambled": (torch.randn(1, 2, 4, 5, 4), (8, 2, 3, 2), Window(2, 1, True)),
}


def drawn(case):
    poses, weight, window = SIZES[case]
    weight = torch.randn(weight)
    votes = Votes(poses, weight, window)
    return window, [x.to(DEVICE) for x in (poses, weight, torch.randn(*votes.lead, votes.parents, votes.dim))]


def on(name, function):
    def run(*inputs):
        with backend(name):
            return function(*inputs)

    return run


def fused(function, monkeypatch):
    """The function on Triton, which must not fall back."""

    def refused(*args, **options):
        raise AssertionError("votes went through plain PyTorch")

    def run(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(Votes, "_vote", refused)
            return function(*inputs)

    return run


def step(window, **options):
    def run(poses, weight, parents, *rest):
        given = dict(zip(options.get("names", ()), rest, strict=True))
        offset = given.pop("offset", None)
        votes = Votes(poses, weight, window, offset)
        others = {name: x for name, x in options.items() if name != "names"}
        return agreement_step(votes, parents, scale=0.5, **given, **others)[0]

    return run


@pytest.mark.parametrize("case", SIZES)
def test_agreement(case, monkeypatch):
    window, inputs = drawn(case)
    function = step(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("leak", [False, True])
@pytest.mark.parametrize("case", ["vectors", "many parents"])
def test_logits_and_prior(case, leak, monkeypatch):
    window, inputs = drawn(case)
    pairs = [torch.randn(inputs[1].shape[0], inputs[1].shape[2], device=DEVICE) for _ in range(2)]
    function = step(window, leak=leak, names=("logits", "prior"))
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), [*inputs, *pairs], torch.float32)


@pytest.mark.parametrize("shape", [(5, 3, 3, 4), (5, 1, 3, 4), (1, 3, 1, 4)])
def test_offset_and_shared_weights(shape, monkeypatch):
    inputs = [torch.randn(s, device=DEVICE) for s in ((2, 15, 4), (5, 2, 3, 2), (2, 3, 4), shape)]
    function = step(None, names=("offset",))
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", ["vectors", "many parents"])
def test_constant_agreement(case, monkeypatch):
    window, inputs = drawn(case)
    logits = torch.randn(inputs[1].shape[0], inputs[1].shape[2], device=DEVICE)
    function = step(window, constant=True, names=("logits",))
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), [*inputs, logits], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["vectors", "overlapping"])
def test_half_precision(case, dtype, monkeypatch):
    """Plain PyTorch makes float32 of it first, so that it rounds the results only."""
    window, inputs = drawn(case)
    function = step(window)

    def rounded(*inputs):
        return function(*inputs).to(inputs[0].dtype)

    assert_as_accurate(fused(rounded, monkeypatch), on("torch", rounded), inputs, dtype)


ROUTINGS = {
    "dynamic": lambda v, parents: dynamic_routing(v, 3).poses,
    "dynamic, held": lambda v, parents: dynamic_routing(v, 3, detach_inner=True).poses,
    "inverted": lambda v, parents: inverted_attention(v, parents).poses,
    "self-attention": lambda v, parents: self_attention_routing(v).poses,
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name, monkeypatch):
    window, inputs = drawn("overlapping")

    def function(poses, weight, parents):
        return ROUTINGS[name](Votes(poses, weight, window), parents)

    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def test_atomic_weight_gradients(monkeypatch):
    from torchcaps.ops import agreement_triton

    monkeypatch.setattr(agreement_triton, "PARTIAL_BYTES", 0)
    window, inputs = drawn("matrices")
    function = step(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def test_autocast(monkeypatch):
    """Poses in the autocast dtype, weights and their gradients in float32."""
    window, (poses, weight, parents) = drawn("overlapping")
    weight.requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16), backend("triton"):
        capsules = inverted_attention(Votes(poses, weight, window), parents)
    assert capsules.poses.dtype == torch.bfloat16
    assert capsules.coupling is None
    capsules.poses.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    exact = inverted_attention(Votes(poses.double(), weight.detach().double(), window), parents.double()).poses
    assert (capsules.poses - exact).abs().max() < 0.02 * exact.abs().max()


def test_falls_back_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["torchcaps.ops.backend"], "_said", set())
    window, inputs = drawn("vectors")
    function = step(window)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_equal_with_gradients(on("triton", function), on("torch", function), inputs)
    assert [record.getMessage() for record in caplog.records] == [
        "votes are routed in plain PyTorch: the votes are torch.float64"
    ]


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"auto, torch, triton.*'cuda'"), backend("cuda"):
        pass
