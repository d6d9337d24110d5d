"""EM's first step backward without votes, against plain PyTorch in float64: every gradient, on odd sizes.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_em_first_triton.py` on a CPU, or as it is where there is a GPU.
"""

import pytest
import torch

from tests.fused.kernels import DEVICE, OPT_IN, on
from tests.helpers import assert_as_accurate
from tests.ops.test_triton import deterministic, fused, in_tf32, tf32, unwritten_is_nan  # noqa: F401 - three are fixtures
from torchcaps.ops import Votes, Window, em_step

pytestmark = OPT_IN

SIZES = {  # poses, weight [g, a, j, e], window
    "matrices": ((19, 17, 16), (17, 4, 11, 4), None),
    "vectors": ((35, 7, 3), (7, 3, 9, 5), None),
    "three rows": ((3, 9, 6), (9, 2, 6, 3), None),
    "many parents": ((5, 6, 16), (6, 4, 37, 4), None),
    "batch of 1": ((1, 35, 16), (35, 4, 8, 4), None),
    "lone numbers": ((9, 5, 4), (5, 1, 7, 3), None),
    "windows": ((2, 2, 16, 7, 6), (18, 4, 9, 4), Window(3, 2)),
    "overlapping": ((3, 2, 4, 4, 5), (8, 2, 9, 2), Window(2, 1)),
    "channels last": ((2, 2, 16, 7, 6), (18, 4, 9, 4), Window(3, 2)),
    "scrambled": ((3, 2, 4, 5, 4), (8, 2, 9, 2), Window(2, 1, True)),
}


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Sizes that an interpreter can do are not few; and gradients come from here."""
    from torchcaps.ops import em_first_triton, em_triton, plan_triton

    if plan_triton.room() < em_first_triton.SHARED_BYTES:
        pytest.skip("too little shared memory")
    monkeypatch.setattr(plan_triton, "FEW_PAIRS", 0)
    calls = []

    def noted(*args):
        calls.append(args)
        return first_gradients(*args)

    first_gradients = em_triton.first_gradients
    monkeypatch.setattr(em_triton, "first_gradients", noted)
    yield
    assert calls


def drawn(case, agreeing=False, spread=0.05):
    """Poses, weights and activations; of votes that agree, each is 1 but for twice the spread or so."""
    shape, weight, window = SIZES[case]
    poses, weight = torch.randn(shape), torch.randn(weight)
    if agreeing:
        poses, weight = 1 + spread * poses, (1 + spread * weight) / weight.shape[1]
    if case == "channels last":
        poses = poses.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    votes = Votes(poses, weight, window)
    activations = 0.1 + torch.rand(*votes.lead, votes.in_caps)
    return window, [x.to(DEVICE) for x in (poses, weight, activations)]


def first_step(window, sites=True):
    def run(poses, weight, activations):
        return em_step(Votes(poses, weight, window), activations, sites=sites)[:3]

    return run


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_first_step_in_tf32(case, agreeing, tf32, monkeypatch):  # noqa: F811
    window, inputs = drawn(case, agreeing)
    function = first_step(window)
    assert_as_accurate(fused(function, monkeypatch), in_tf32(function, monkeypatch), inputs, torch.float32)


def test_first_step_in_parts(tf32, deterministic, monkeypatch):  # noqa: F811
    """Of poses and gates for each block of columns, as deterministic algorithms are asked for."""
    window, inputs = drawn("many parents")
    function = first_step(window)
    assert_as_accurate(fused(function, monkeypatch), in_tf32(function, monkeypatch), inputs, torch.float32)


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_first_step_in_bfloat16(case, agreeing, monkeypatch):
    window, inputs = drawn(case, agreeing)
    function = first_step(window)

    def rounded(*inputs):
        return [x.to(inputs[0].dtype) for x in function(*inputs)]

    assert_as_accurate(fused(rounded, monkeypatch), on("torch", rounded), inputs, torch.bfloat16)


@pytest.mark.parametrize("case", ["matrices", "vectors", "windows"])
def test_votes_that_nearly_coincide(case, monkeypatch):
    """Where the log of a variance pulls hardest, and the terms of a gradient leave next to nothing of each other."""
    window, inputs = drawn(case, agreeing=True, spread=0.005)
    step = first_step(window)

    def function(*inputs):
        mass, mean, variance = step(*inputs)
        return mass, mean, (variance + 1e-6).log().to(inputs[0].dtype)

    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.bfloat16)


def test_within_each_window(monkeypatch):
    window, inputs = drawn("overlapping")
    function = first_step(window, sites=False)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.bfloat16)


@pytest.mark.parametrize("case", ["batch of 1", "channels last", "scrambled"])
def test_in_one_go(case, monkeypatch):
    """No program leaves any of its windows or children to another."""
    from torchcaps.ops import em_first_triton

    monkeypatch.setattr(em_first_triton, "_split", lambda steps, others: steps)
    window, inputs = drawn(case)
    function = first_step(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.bfloat16)
