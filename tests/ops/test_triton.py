"""Fused steps against plain PyTorch in float64: outputs and every gradient, on odd sizes.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_triton.py` on a CPU, or as it is where there is a GPU.
"""

import logging
import sys
from functools import partial

import pytest
import torch

from benchmarks.kernels import vote_in_tf32
from tests.fused.conftest import unwritten_is_nan  # noqa: F401
from tests.fused.kernels import DEVICE, OPT_IN, on
from tests.helpers import assert_as_accurate, assert_equal_with_gradients, outputs_and_gradients
from torchcaps.ops import Votes, Window, agreement_fit, agreement_step, backend, em_step, gaussian_fit
from torchcaps.routing.dynamic import dynamic_routing
from torchcaps.routing.em import em_routing
from torchcaps.routing.inverted_attention import inverted_attention
from torchcaps.routing.self_attention import self_attention_routing

pytestmark = OPT_IN


SIZES = {  # poses, weight [g, a, j, e], window
    "vectors": ((3, 6, 8), (6, 8, 10, 16), None),
    "matrices": ((17, 17, 16), (17, 4, 5, 4), None),
    "batch of 1": ((1, 5, 16), (5, 4, 32, 4), None),
    "36 dims": ((2, 5, 36), (5, 6, 7, 6), None),
    "one parent": ((2, 5, 3), (5, 3, 1, 5), None),
    "many parents": ((2, 5, 4), (5, 2, 70, 2), None),
    "large poses": ((2, 3, 40), (3, 40, 3, 20), None),
    "larger poses": ((2, 3, 50), (3, 50, 5, 24), None),
    "largest poses": ((2, 3, 64), (3, 64, 20, 64), None),
    "votes of one number": ((3, 5, 40), (5, 40, 9, 1), None),
    "every other child": ((2, 5, 16), (5, 4, 3, 4), None),
    "windows": ((2, 2, 16, 7, 6), (18, 4, 5, 4), Window(3, 2)),
    "windows of large poses": ((1, 1, 64, 5, 3), (9, 64, 12, 64), Window(3, 2)),
    "overlapping": ((1, 2, 4, 4, 5), (8, 2, 3, 2), Window(2, 1)),
    "channels last": ((2, 2, 16, 7, 6), (18, 4, 5, 4), Window(3, 2)),
    "scrambled": ((1, 2, 4, 5, 4), (8, 2, 3, 2), Window(2, 1, True)),
}


DRAWN = {  # in another way than contiguous, or so that votes are about 1
    "larger poses": lambda *shape: torch.randn(shape) / 8,
    "largest poses": lambda *shape: torch.randn(shape) / 8,
    "windows of large poses": lambda *shape: torch.randn(shape) / 8,
    "votes of one number": lambda *shape: torch.randn(shape) / 8,
    "every other child": lambda b, i, p: torch.randn(b, 2 * i, p)[:, ::2],
    "channels last": lambda b, c, p, h, w: torch.randn(b, h, w, c, p).permute(0, 3, 4, 1, 2),
}


def drawn(case):
    shape, weight, window = SIZES[case]
    poses, weight = DRAWN.get(case, torch.randn)(*shape), torch.randn(weight)
    votes = Votes(poses, weight, window)
    return window, [x.to(DEVICE) for x in (poses, weight, torch.randn(*votes.lead, votes.parents, votes.dim))]


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


@pytest.mark.parametrize("case", ["vectors", "windows"])
def test_what_is_the_same_in_every_image(case, monkeypatch):
    """Parents without a batch, and logits and a prior that all children share."""
    window, (poses, weight, parents) = drawn(case)
    above = parents.flatten(0, -3)[0].clone()
    pairs = [torch.randn(weight.shape[2], device=DEVICE) for _ in range(2)]
    function = step(window, names=("logits", "prior"))
    inputs = [poses, weight, above, *pairs]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


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
@pytest.mark.parametrize("case", ["vectors", "many parents", "36 dims", "largest poses", "overlapping"])
def test_half_precision(case, dtype, monkeypatch):
    """Plain PyTorch makes float32 of it first, so that it rounds the results only."""
    window, inputs = drawn(case)
    function = step(window)

    def rounded(*inputs):
        return function(*inputs).to(inputs[0].dtype)

    assert_as_accurate(fused(rounded, monkeypatch), on("torch", rounded), inputs, dtype)


def in_tf32(function, monkeypatch):
    """The function in plain PyTorch, with votes as a GPU has them in TF32."""

    def run(*inputs):
        with monkeypatch.context() as patch, backend("torch"):
            patch.setattr(Votes, "_vote", vote_in_tf32)
            return function(*inputs)

    return run


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", ["vectors", "matrices", "many parents", "windows"])
def test_tf32(case, tf32, monkeypatch):
    """At most twice the error of PyTorch in TF32, so factors are rounded as there, not cut off."""
    window, inputs = drawn(case)
    function = step(window)
    assert_as_accurate(fused(function, monkeypatch), in_tf32(function, monkeypatch), inputs, torch.float32)


def parents_before(votes, activations):
    """Mean, variance and log activation as a step before leaves them; broad, so that rounding is not blown up."""
    with backend("torch"):
        _, mean, variance, _ = em_step(votes, activations)
    mean = mean + 0.5 * variance.sqrt() * torch.randn_like(mean)
    return [mean, variance * (1 + votes.dim * torch.rand_like(variance)), -torch.rand_like(mean[..., 0])]


def em_inputs(case):
    """Poses, weight, activations, then mean, variance and log activation of the parents before."""
    window, (poses, weight, _) = drawn(case)
    votes = Votes(poses, weight, window)
    activations = 0.1 + torch.rand(*votes.lead, votes.in_caps, device=DEVICE)
    return window, [poses, weight, activations, *parents_before(votes, activations)]


def em(window, sites=True):
    def run(poses, weight, activations, *parents):
        return em_step(Votes(poses, weight, window), activations, parents or None, sites=sites)[:3]

    return run


@pytest.mark.parametrize("case", SIZES)
def test_em_step(case, monkeypatch):
    window, inputs = em_inputs(case)
    function = em(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", ["matrices", "many parents", "windows", "overlapping", "scrambled"])
def test_first_em_step(case, monkeypatch):
    window, inputs = em_inputs(case)
    function = em(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs[:3], torch.float32)


@pytest.mark.parametrize("first", [False, True])
def test_em_step_within_each_window(first, monkeypatch):
    window, inputs = em_inputs("overlapping")
    function = em(window, sites=False)
    inputs = inputs[: 3 if first else None]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("first", [False, True])
def test_em_step_with_offset_and_shared_weights(first, monkeypatch):
    """Hinton's class layer: the offset says where a child stands."""
    poses, weight, offset = (torch.randn(s, device=DEVICE) for s in ((2, 15, 4), (5, 2, 3, 2), (1, 3, 1, 4)))
    activations = torch.rand(2, 15, device=DEVICE)
    parents = [] if first else parents_before(Votes(poses, weight, None, offset), activations)
    inputs = [poses, weight, offset, activations, *parents]

    def function(poses, weight, offset, activations, *parents):
        return em_step(Votes(poses, weight, None, offset), activations, parents or None)[:3]

    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def test_em_step_of_votes_that_agree(monkeypatch):
    """The variance is a millionth of the squares, and no child is active in one image."""
    poses = torch.ones(2, 5, 4, device=DEVICE) + 1e-3 * torch.randn(2, 5, 4, device=DEVICE)
    weight = torch.ones(5, 2, 3, 2, device=DEVICE)
    activations = torch.tensor([[1.0], [0.0]], device=DEVICE).expand(2, 5)
    function = em(None)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), [poses, weight, activations], torch.float32)


@pytest.mark.parametrize("case", ["matrices", "many parents", "overlapping"])
def test_given_weights(case, monkeypatch):
    window, inputs = drawn(case)
    votes = Votes(*inputs[:2], window)
    weights = torch.rand(*votes.lead, votes.in_caps, votes.parents, device=DEVICE)

    def function(poses, weight, weights):
        votes = Votes(poses, weight, window)
        return *gaussian_fit(votes, weights), votes.mixture(weights)

    inputs = [*inputs[:2], weights]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


def agreeing(window):
    def run(poses, weight, activations, *parents):
        votes = Votes(poses, weight, window)
        return agreement_fit(votes, activations, *parents, scale=votes.dim**-0.5)[:3]

    return run


def agreeing_inputs(case):
    """Poses, weight, activations and parents; votes are about 1, as in a network, and no child has a parent alone."""
    window, (poses, weight, parents) = drawn(case)
    votes = Votes(poses, weight, window)
    activations = 0.1 + torch.rand(*votes.lead, votes.in_caps, device=DEVICE)
    return window, [poses, weight / weight.shape[1] ** 0.5, activations, parents]


@pytest.mark.parametrize("case", SIZES)
def test_agreement_with_activations(case, monkeypatch):
    window, inputs = agreeing_inputs(case)
    function = agreeing(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", ["matrices", "many parents", "overlapping"])
def test_first_agreement_with_activations(case, monkeypatch):
    window, inputs = agreeing_inputs(case)
    function = agreeing(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs[:3], torch.float32)


def test_agreement_with_activations_and_offset(monkeypatch):
    shapes = (2, 15, 4), (5, 2, 3, 2), (1, 3, 1, 4), (2, 3, 4)
    poses, weight, offset, parents = (torch.randn(s, device=DEVICE) for s in shapes)
    activations = 0.1 + torch.rand(15, device=DEVICE)  # the same in every image

    def function(poses, weight, offset, activations, parents):
        return agreement_fit(Votes(poses, weight, None, offset), activations, parents, scale=0.5)[:3]

    inputs = [poses, weight, offset, activations, parents]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", ["matrices", "windows"])
def test_parents_of_a_fit_that_are_the_same_in_every_image(case, monkeypatch):
    window, (poses, weight, activations, parents) = agreeing_inputs(case)
    above = parents.flatten(0, -3)[0].clone()

    def function(poses, weight, activations, above):
        votes = Votes(poses, weight, window)
        agreed = agreement_fit(votes, activations, above, scale=votes.dim**-0.5)[:3]
        return *agreed, *em_step(votes, activations, (above, above**2 + 1, above[:, 0]))[:3]

    inputs = [poses, weight, activations, above]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", ["matrices", "windows"])
def test_agreement_with_activations_in_tf32(case, tf32, monkeypatch):
    window, inputs = agreeing_inputs(case)
    function = agreeing(window)
    assert_as_accurate(fused(function, monkeypatch), in_tf32(function, monkeypatch), inputs, torch.float32)


@pytest.mark.parametrize("case", ["matrices", "windows"])
def test_em_in_tf32(case, tf32, monkeypatch):
    window, inputs = em_inputs(case)
    function = em(window)
    assert_as_accurate(fused(function, monkeypatch), in_tf32(function, monkeypatch), inputs, torch.float32)


def em_poses(votes, parents):
    betas = torch.linspace(-1, 1, 2 * votes.parents, dtype=parents.dtype, device=DEVICE).view(2, -1)
    capsules = em_routing(votes, None, *betas, 3, inverse_temperature=lambda iteration: 0.5)
    return capsules.poses * capsules.activations[..., None]


def active_poses(votes, parents):
    """Ablation C of Tsai et al., children and parents with activations."""
    betas = torch.linspace(-1, 1, 2 * votes.parents, dtype=parents.dtype, device=DEVICE).view(2, -1)
    active = torch.linspace(0.2, 1, votes.in_caps, dtype=parents.dtype, device=DEVICE).expand(*votes.lead, -1)
    capsules = inverted_attention(votes, parents, activations=active, betas=tuple(betas))
    return capsules.poses * capsules.activations[..., None]


ROUTINGS = {
    "dynamic": lambda v, parents: dynamic_routing(v, 3).poses,
    "dynamic, held": lambda v, parents: dynamic_routing(v, 3, detach_inner=True).poses,
    "inverted": lambda v, parents: inverted_attention(v, parents).poses,
    "inverted, active": active_poses,
    "self-attention": lambda v, parents: self_attention_routing(v).poses,
    "em": em_poses,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name, dtype, monkeypatch):
    window, inputs = drawn("overlapping")

    def function(poses, weight, parents):
        return ROUTINGS[name](Votes(poses, weight, window), parents)

    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, dtype)


STEPS = {  # inputs for a case of SIZES, and the function of a window
    "agreement": (drawn, step),
    "em": (em_inputs, em),
    "active": (agreeing_inputs, agreeing),
}


@pytest.mark.parametrize("case", ["matrices", "windows"])
@pytest.mark.parametrize("what", ["em", "active"])
def test_weights_as_they_are(what, case, monkeypatch):
    from torchcaps.ops import em_triton

    monkeypatch.setattr(em_triton, "PACKED_BYTES", 0)
    inputs_of, function_of = STEPS[what]
    window, inputs = inputs_of(case)
    function = function_of(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("what", STEPS)
def test_atomic_weight_gradients(what, monkeypatch):
    from torchcaps.ops import plan_triton

    monkeypatch.setattr(plan_triton, "PARTIAL_BYTES", 0)
    inputs_of, function_of = STEPS[what]
    window, inputs = inputs_of("matrices")
    function = function_of(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.fixture
def deterministic(monkeypatch):
    """Memory is not filled by PyTorch then: NaN is in it already."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("what", [*STEPS, "em, first"])
def test_gradients_in_parts(what, deterministic, monkeypatch):
    """Of poses for each block of parents, and of weights for each of windows, however much memory that takes."""
    from torchcaps.ops import plan_triton

    monkeypatch.setattr(plan_triton, "PARTIAL_BYTES", 0)
    monkeypatch.setitem(SIZES, "many of all", ((19, 5, 4), (5, 2, 70, 2), None))
    inputs_of, function_of = STEPS[what.partition(",")[0]]
    window, inputs = inputs_of("many of all")
    votes = Votes(*inputs[:2], window)
    cut = plan_triton.plan(votes)
    for parts in (plan_triton.pose_sum(cut.grid[2], votes.device), plan_triton.weight_sum(votes, cut)):
        assert not parts.atomic
        assert len(parts.new(1)) > 1
    inputs = inputs[: 3 if what == "em, first" else None]
    function = function_of(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)
    first, *others = (outputs_and_gradients(fused(function, monkeypatch), inputs) for _ in range(4))
    for again in others:
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_shared_weights_are_not_added_up_if_that_should_be_deterministic(deterministic):
    from torchcaps.ops.plan_triton import why_not

    votes = Votes(torch.randn(2, 15, 4, device=DEVICE), torch.randn(5, 2, 3, 2, device=DEVICE))
    assert "no fixed order" in why_not(votes)
    with torch.no_grad():
        assert why_not(votes) is None


@pytest.mark.parametrize("case", ["matrices", "windows"])
@pytest.mark.parametrize("what", ["agreement", "em"])
def test_gradients_of_four_rows_at_once(what, case, monkeypatch):
    """As on a GPU with products in bfloat16."""
    from torchcaps.ops import agreement_triton, em_triton

    for module in (agreement_triton, em_triton):
        monkeypatch.setattr(module, "plan", partial(module.plan, together=4))
    inputs_of, function_of = STEPS[what]
    window, inputs = inputs_of(case)
    function = function_of(window)
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("options", [{"low": 1}, {"wide": 16}, {"low": 1, "wide": 16}])
@pytest.mark.parametrize("case", ["matrices", "largest poses", "windows"])
@pytest.mark.parametrize("what", ["agreement", "em"])
def test_few_parents_or_one_child_in_a_warp(what, case, options, monkeypatch):
    """As on a GPU with few exact products."""
    from torchcaps.ops import agreement_triton, em_triton

    monkeypatch.setattr(agreement_triton, "plan", partial(agreement_triton.plan, **options))
    monkeypatch.setattr(em_triton, "_plan", partial(em_triton._plan, **options))
    inputs_of, function_of = STEPS[what]
    window, inputs = inputs_of(case)
    function = function_of(window)
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


@pytest.mark.parametrize("case", ["batch of 1", "largest poses", "windows"])
@pytest.mark.parametrize("what", ["agreement", "em"])
def test_little_shared_memory(what, case, monkeypatch):
    """Then a program has fewer parents."""
    from torchcaps.ops import em_triton, plan_triton

    inputs_of, function_of = STEPS[what]
    window, inputs = inputs_of(case)
    function = function_of(window)
    votes = Votes(inputs[0], inputs[1], window)
    plan = em_triton._plan if what == "em" else plan_triton.plan
    most = plan(votes)
    monkeypatch.setattr(plan_triton, "room", lambda: most.shared - 1)
    assert plan(votes).shared < most.shared
    assert plan(votes).grid[2] > most.grid[2]
    assert_as_accurate(fused(function, monkeypatch), on("torch", function), inputs, torch.float32)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("low", [1, 2, 4, 8, None])
@pytest.mark.parametrize("wide", [8, 16, 64])
def test_products_are_deep_enough_for_tensor_cores(case, low, wide):
    """Or they would not compile, which the interpreter does not notice."""
    from torchcaps.ops.plan_triton import _value, plan
    from torchcaps.ops.votes_triton import Tile

    window, (poses, weight, _) = drawn(case)
    tile = Tile(*map(_value, plan(Votes(poses, weight, window), low=low, wide=wide).tile))
    assert tile.C * tile.AP >= 16
    assert tile.C * tile.EH * tile.JL * tile.EL >= 16
    assert tile.EH * tile.EL >= tile.E
    assert tile.JL * tile.EL == 8


@pytest.mark.parametrize("case", SIZES)
def test_gradients_of_weights_have_registers(case):
    """Or the compiler gives a kernel 32 of them and keeps the rest in memory."""
    from torchcaps.ops.plan_triton import MOST_WEIGHTS, _value, plan
    from torchcaps.ops.votes_triton import Tile

    window, (poses, weight, _) = drawn(case)
    tile = Tile(*map(_value, plan(Votes(poses, weight, window)).tile))
    assert tile.JL == 1 or tile.C * tile.AP * tile.C * tile.EH * tile.JL * tile.EL <= MOST_WEIGHTS


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_both_plans_of_em_cut_parents_alike(case, products):
    """One for the sums of each block of parents, one for the gradients that are added to them."""
    from torchcaps.ops.em_triton import FEWER, _plan

    window, (poses, weight, _) = drawn(case)
    votes = Votes(poses, weight, window, products=products)
    assert _plan(votes).grid[2] == _plan(votes, wide=FEWER).grid[2]


def test_too_little_shared_memory(monkeypatch):
    from torchcaps.ops import plan_triton

    window, (poses, weight, _) = drawn("largest poses")
    monkeypatch.setattr(plan_triton, "room", lambda: 0)
    votes = Votes(poses, weight, window)
    least = plan_triton.plan(votes, stages=3)
    assert (least.options["num_warps"], least.tile.JL) == (1, 1)
    assert plan_triton.why_not(votes) == (
        f"a pose of 1 x 64 and a vote of 1 x 64 numbers take {least.shared:,} bytes of shared memory, "
        "of which this GPU has 0"
    )


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
