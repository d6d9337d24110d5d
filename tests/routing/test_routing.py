"""Each routing against its paper's pseudo-code: outputs and gradients, in float64, on odd sizes."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests import oracle
from tests.helpers import assert_as_accurate, assert_equal_with_gradients, outputs_and_gradients
from torchcaps.ops.votes import Votes
from torchcaps.ops.windows import Window
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing, hinton_temperature
from torchcaps.routing.inverted_attention import InvertedAttentionRouting, inverted_attention
from torchcaps.routing.self_attention import SelfAttentionRouting, self_attention_routing

SIZES = {"b": 2, "i": 7, "j": 3, "d": 5}


def steep(t):
    """An inverse temperature at which activations and coupling move; Hinton's stays below 0.01."""
    return 0.1 + 0.2 * t


def affine(weight, bias):
    return lambda x: nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


def affine_loops(weight, bias):
    return lambda x: oracle.layer_norm(x, weight, bias)


def two_steps(routing, votes):
    step = partial(oracle.inverted_attention, norm=affine_loops(routing.norm.weight, routing.norm.bias))
    return step(votes, step(votes)[0])


def with_activations(routing, votes, activations):
    poses, coupling = oracle.inverted_attention(votes, norm=None, activations=activations)
    above = oracle.parent_activations(votes, coupling, activations, routing.beta_u, routing.beta_a, 0.0005)
    return poses, above, coupling


FUNCTIONS = {  # ours, the paper's loops, the letters of the inputs' shapes
    "dynamic-1": (lambda u: dynamic_routing(u, 1), lambda u: oracle.dynamic_routing(u, 1), "bijd"),
    "dynamic-3": (dynamic_routing, oracle.dynamic_routing, "bijd"),
    "dynamic-prior": (
        lambda u, p: dynamic_routing(u, 3, logits=p),
        lambda u, p: oracle.dynamic_routing(u, 3, logits=p),
        "bijd ij",
    ),
    "dynamic-leak": (
        lambda u: dynamic_routing(u, 2, leak=True),
        lambda u: oracle.dynamic_routing(u, 2, leak=True),
        "bijd",
    ),
    "dynamic-all": (
        lambda u, p, bias: dynamic_routing(u, 3, logits=p, leak=True, bias=bias),
        lambda u, p, bias: oracle.dynamic_routing(u, 3, p, True, bias),
        "bijd ij jd",
    ),
    "em": (em_routing, oracle.em_routing, "bijd bi j j"),
    "em-steep": (
        lambda *x: em_routing(*x, 3, inverse_temperature=steep),
        lambda *x: oracle.em_routing(*x, 3, steep),
        "bijd bi j j",
    ),
    "em-1": (lambda *x: em_routing(*x, 1), lambda *x: oracle.em_routing(*x, 1), "bijd bi j j"),
    "inverted-start": (lambda u: inverted_attention(u), lambda u: oracle.inverted_attention(u, norm=None), "bijd"),
    "inverted-scaled": (
        lambda u, p, w, b: inverted_attention(u, p, norm=affine(w, b)),
        lambda u, p, w, b: oracle.inverted_attention(u, p, norm=affine_loops(w, b)),
        "bijd bjd d d",
    ),
    "inverted-printed": (
        lambda u, p: inverted_attention(u, p, scale=1.0),
        lambda u, p: oracle.inverted_attention(u, p, scale=1.0, norm=None),
        "bijd bjd",
    ),
    "inverted-activations": (
        lambda u, p, a: inverted_attention(u, p, activations=a),
        lambda u, p, a: oracle.inverted_attention(u, p, norm=None, activations=a),
        "bijd bjd bi",
    ),
    "self-attention": (self_attention_routing, oracle.self_attention_routing, "bijd"),
    "self-attention-prior": (self_attention_routing, oracle.self_attention_routing, "bijd ij"),
    "self-attention-scale": (
        lambda u: self_attention_routing(u, scale=0.3),
        lambda u: oracle.self_attention_routing(u, scale=0.3),
        "bijd",
    ),
}

CASES = {  # the routing, and the paper's loops with what the module has learnt
    "dynamic": (DynamicRouting, lambda r, u, a: oracle.dynamic_routing(u, 3)),
    "dynamic-learnt": (
        partial(DynamicRouting, iterations=2, priors=True, bias=True),
        lambda r, u, a: oracle.dynamic_routing(u, 2, r.logits, bias=r.bias),
    ),
    "em": (partial(EMRouting, iterations=3), lambda r, u, a: oracle.em_routing(u, a, r.beta_u, r.beta_a, 3)),
    "inverted": (
        InvertedAttentionRouting,
        lambda r, u, a: oracle.inverted_attention(u, norm=affine_loops(r.norm.weight, r.norm.bias)),
    ),
    "inverted-2": (partial(InvertedAttentionRouting, iterations=2), lambda r, u, a: two_steps(r, u)),
    "inverted-bare": (
        partial(InvertedAttentionRouting, norm=False, scaled=False, start="learnt"),
        lambda r, u, a: oracle.inverted_attention(u, r.start.expand(2, -1, -1), scale=1.0, norm=None),
    ),
    "inverted-activations": (
        partial(InvertedAttentionRouting, norm=False, activations=True),
        with_activations,
    ),
    "self_attention": (SelfAttentionRouting, lambda r, u, a: oracle.self_attention_routing(u, r.prior)),
}


def draw(letters, sizes=SIZES):
    """Random inputs in float64; activations [b, i] lie in (0, 1)."""
    return [
        (torch.rand if shape == "bi" else torch.randn)([sizes[s] for s in shape], dtype=torch.float64)
        for shape in letters.split()
    ]


def build(case, sizes=SIZES):
    """A routing in float64 whose parameters have moved from where they start."""
    routing = CASES[case][0](sizes["i"], sizes["j"], sizes["d"]).double()
    for p in routing.parameters():
        nn.init.normal_(p)
    return routing


class Loops(nn.Module):
    """The paper's loops with the parameters of a routing."""

    def __init__(self, routing, loops):
        super().__init__()
        self.routing, self.loops = routing, loops

    def forward(self, votes, activations):
        return self.loops(self.routing, votes, activations)


def with_parameters(module):
    """The module as a function of its inputs and its parameters, so that their gradients are compared too."""
    names = [name for name, _ in module.named_parameters()]
    return lambda u, a, *p: torch.func.functional_call(module, dict(zip(names, p, strict=True)), (u, a))


def like(loops, ours, inputs):
    """Ours, returning what the loops return: with the activations where they have them."""
    return (lambda *x: ours(*x)) if len(loops(*inputs)) == 3 else (lambda *x: ours(*x)[::2])


@pytest.mark.parametrize("case", FUNCTIONS)
def test_function_equals_the_paper(case):
    ours, loops, letters = FUNCTIONS[case]
    inputs = draw(letters)
    assert_equal_with_gradients(like(loops, ours, inputs), loops, inputs)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_gradcheck(case):
    ours, _, letters = FUNCTIONS[case]
    inputs = [x.requires_grad_() for x in draw(letters, {"b": 1, "i": 3, "j": 2, "d": 2})]
    assert torch.autograd.gradcheck(lambda *x: [y for y in ours(*x) if y is not None and y.requires_grad], inputs)


@pytest.mark.parametrize("case", CASES)
def test_module_equals_the_paper(case):
    ours = build(case)
    theirs = Loops(ours, CASES[case][1])
    inputs = [*draw("bijd bi"), *ours.parameters()]
    ours, theirs = with_parameters(ours), with_parameters(theirs)
    assert_equal_with_gradients(like(theirs, ours, inputs), theirs, inputs)


@pytest.mark.parametrize("case", CASES)
def test_leading_dimensions_are_free(case):
    routing = build(case)
    votes, activations = torch.randn(2, 3, 7, 3, 5).double(), torch.rand(2, 3, 7).double()
    spread, flat = routing(votes, activations), routing(votes.flatten(0, 1), activations.flatten(0, 1))
    alone = routing(votes[1, 2], activations[1, 2])
    for x, y, z in zip(spread, flat, alone, strict=True):
        if y is not None:
            torch.testing.assert_close(x.flatten(0, 1), y, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(z, y[5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_parents_compete_for_each_child(case):
    routing = CASES[case][0](7, 3, 5).double()
    votes, activations = draw("bijd bi")
    coupling = routing(votes, activations).coupling
    assert coupling.shape == (2, 7, 3)
    torch.testing.assert_close(coupling.sum(-1), torch.ones(2, 7).double())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [0.0, 1e4])
def test_extreme_votes_stay_finite(case, size):
    routing = CASES[case][0](7, 3, 5)
    votes = size * torch.randn(2, 7, 3, 5)

    def function(votes, activations):
        capsules = routing(votes, activations)
        return [x for x in capsules if x is not None and x.requires_grad]

    for x in outputs_and_gradients(function, [votes, torch.rand(2, 7)]):
        assert x.dtype == torch.float32
        assert x.isfinite().all()


def test_leak_keeps_a_share():
    votes = draw("bijd")[0]
    total = dynamic_routing(votes, 3, leak=True).coupling.sum(-1)
    assert (total < 1).all()
    torch.testing.assert_close(dynamic_routing(votes, 1, leak=True).coupling, torch.full((2, 7, 3), 1 / 4).double())


def test_priors_enter_where_each_paper_puts_them():
    votes = torch.ones(1, 1, 2, 1).double()
    prior = torch.tensor([[math.log(3), 0.0]]).double()
    before = dynamic_routing(votes, 1, logits=prior)
    after = self_attention_routing(votes, prior)
    torch.testing.assert_close(before.coupling, torch.tensor([[[0.75, 0.25]]]).double())
    torch.testing.assert_close(before.poses[0, :, 0], torch.tensor([0.36, 1 / 17]).double())
    expected = torch.tensor([1 - math.exp(-0.5) / 3, 1 - math.exp(-0.5)]).double()
    torch.testing.assert_close(after.poses[0, :, 0], expected)


def test_first_coupling_is_exactly_uniform():
    votes = torch.randn(2, 7, 10, 5)
    uniform = torch.full((2, 7, 10), 1 / 10)
    assert torch.equal(dynamic_routing(votes, 1).coupling, uniform)
    assert torch.equal(inverted_attention(votes).coupling, uniform)
    em = em_routing(votes, torch.rand(2, 7), torch.zeros(10), torch.zeros(10), 1)  # in log space
    torch.testing.assert_close(em.coupling, uniform)


def test_no_parents_are_zero_parents():
    votes = draw("bijd")[0]
    zeros = torch.zeros(2, 3, 5).double()
    torch.testing.assert_close(inverted_attention(votes).poses, inverted_attention(votes, zeros).poses)


def test_detach_inner_holds_the_agreement_constant():
    """As in the ports that cut the gradient: it reaches the votes through the last mixture only."""
    inputs = draw("bijd ij jd")
    agreement = oracle.dynamic_routing(inputs[0], 3, inputs[1], bias=inputs[2])[1].log() - inputs[1]

    def last_iteration(votes, logits, bias):
        poses = []
        for n in range(2):
            c = [oracle.softmax(logits[i] + agreement[n, i]) for i in range(7)]
            s = [sum(c[i][j] * votes[n, i, j] for i in range(7)) + bias[j] for j in range(3)]
            poses.append([oracle.squash(x) for x in s])
        return oracle.tensor(poses)

    def ours(votes, logits, bias, detach_inner=True):
        return dynamic_routing(votes, 3, logits=logits, bias=bias, detach_inner=detach_inner).poses

    assert_equal_with_gradients(ours, last_iteration, inputs)
    through = outputs_and_gradients(partial(ours, detach_inner=False), inputs)
    last = outputs_and_gradients(ours, inputs)
    torch.testing.assert_close(through[0], last[0])
    for x, y in zip(through[1:], last[1:], strict=True):
        assert not torch.allclose(x, y, rtol=1e-3)


def em_on_map(size=(5, 5)):
    """Poses, activations, weights and betas of a convolutional layer of 2 x 2 matrices with a 3 x 3 window."""
    poses, activations = torch.randn(1, 2, 4, *size).double(), torch.rand(1, 2, *size).double()
    weight = torch.randn(2, 3, 3, 2, 2, 2).double()
    return poses, activations, weight, torch.randn(2).double(), torch.randn(2).double()


def in_windows(activations, stride):
    return oracle.window_poses(activations[:, :, None], 3, stride)[..., 0]


@pytest.mark.parametrize(("stride", "size"), [(1, (5, 5)), (2, (5, 5)), (2, (6, 4))])
def test_em_sites_compete(stride, size):
    """On 6 x 4 the last row and column stand in no window."""

    def ours(poses, activations, weight, beta_u, beta_a):
        votes = Votes(poses, weight.flatten(0, 2), Window(3, stride))
        return em_routing(votes, in_windows(activations, stride), beta_u, beta_a, 3, inverse_temperature=steep)

    def loops(poses, activations, weight, beta_u, beta_a):
        return oracle.em_routing_sites(poses, activations, weight, stride, beta_u, beta_a, 3, steep)

    assert_equal_with_gradients(ours, loops, em_on_map(size))


@pytest.mark.parametrize("stride", [1, 2])
def test_em_sites_apart(stride):
    poses, activations, weight, beta_u, beta_a = em_on_map()
    votes = Votes(poses, weight.flatten(0, 2), Window(3, stride))
    inside = in_windows(activations, stride)
    apart = em_routing(votes, inside, beta_u, beta_a, 3, sites=False)
    loops = oracle.em_routing(votes.materialise().flatten(0, 2), inside.flatten(0, 2), beta_u, beta_a, 3)
    for x, y in zip(apart, loops, strict=True):
        torch.testing.assert_close(x.flatten(0, 2), y)
    together = em_routing(votes, inside, beta_u, beta_a, 3)
    assert not torch.allclose(together.poses, apart.poses, rtol=1e-2)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("iterations", [1, 3])
def test_em_shares_of_a_child_sum_to_one(stride, iterations):
    poses, activations, weight, beta_u, beta_a = em_on_map((7, 5))
    votes = Votes(poses, weight.flatten(0, 2), Window(3, stride))
    coupling = em_routing(votes, in_windows(activations, stride), beta_u, beta_a, iterations).coupling
    coupling = coupling.sum(-1).unflatten(-1, (2, 3, 3))
    shares = torch.zeros(1, 2, 7, 5).double()
    for y in range(coupling.shape[1]):
        for x in range(coupling.shape[2]):
            shares[:, :, stride * y : stride * y + 3, stride * x : stride * x + 3] += coupling[:, y, x]
    torch.testing.assert_close(shares, torch.ones_like(shares))


def test_hinton_temperature():
    assert hinton_temperature(0) == pytest.approx(0.0005)
    assert hinton_temperature(2) == pytest.approx(0.01 * (1 - 0.95**3))


@pytest.mark.parametrize(
    "call",
    [
        lambda u: dynamic_routing(u, 0),
        lambda u: em_routing(u, u[:, :, 0, 0].sigmoid(), u[0, 0, :, 0], u[0, 0, :, 0], 0),
        lambda u: DynamicRouting(7, 3, 5, iterations=0)(u),
        lambda u: EMRouting(7, 3, 5, iterations=0)(u, u[:, :, 0, 0].sigmoid()),
    ],
)
def test_no_iterations_is_refused(call):
    with pytest.raises(ValueError, match=r"iterations.*\b0\b"):
        call(torch.randn(2, 7, 3, 5))


def test_comparison_has_teeth():
    votes = draw("bijd")[0].float()
    reference = lambda u: dynamic_routing(u).poses  # noqa: E731
    assert_as_accurate(reference, reference, [votes], torch.float32)
    for fault in (lambda u: 1.01 * reference(u), lambda u: reference(u.detach()) + 0 * u.sum()):
        with pytest.raises(AssertionError, match=r"output|gradient"):
            assert_as_accurate(fault, reference, [votes], torch.float32)
