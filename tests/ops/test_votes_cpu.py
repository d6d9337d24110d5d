"""Routing in pieces that stay in a CPU's cache, against the definition with all votes stored."""

import pytest
import torch

from tests.helpers import assert_as_accurate, assert_equal_with_gradients
from torchcaps import ops
from torchcaps.models import create_model
from torchcaps.ops import Votes, Window, agreement_cpu, em_cpu, votes_cpu
from torchcaps.routing.dynamic import dynamic_routing
from torchcaps.routing.em import em_routing

SIZES = {  # batch and children, weight [g, a, j, e], rows of a pose, offsets of those that share a weight, if any
    "vectors": ((20, 17), (17, 8, 5, 6), 1, None),
    "small poses": ((20, 17), (17, 3, 5, 7), 1, None),
    "matrices": ((5, 17), (17, 4, 7, 4), 4, None),
    "36 dims": ((3, 17), (17, 6, 2, 6), 6, None),
    "200 parents": ((3, 5), (5, 2, 200, 3), 1, None),
    "one image": ((1, 9), (9, 4, 3, 4), 4, None),
    "one image of vectors": ((1, 9), (9, 4, 3, 6), 1, None),
    "one child": ((4, 1), (1, 4, 3, 4), 4, None),
    "shared": ((3, 12), (4, 4, 7, 4), 4, None),
    "shared, small poses": ((19, 12), (4, 2, 3, 8), 1, None),
    "shared by many": ((3, 42), (2, 5, 3, 4), 1, None),
    "shared, one offset": ((3, 12), (4, 4, 7, 4), 4, 1),
    "shared, one offset, small poses": ((5, 42), (2, 2, 3, 8), 1, 1),
    "shared, own offsets": ((3, 12), (4, 4, 7, 4), 4, 3),
    "shared, own offsets, small poses": ((19, 12), (4, 2, 3, 8), 1, 3),
}
WINDOWS = {"stride 2": Window(3, 2), "stride 1": Window(2), "scrambled": Window(3, 2, scrambled=True)}


def linear(name):
    (batch, children), (groups, size, parents, columns), rows, offset = SIZES[name]
    inputs = [torch.randn(batch, children, rows * size), 0.3 * torch.randn(groups, size, parents, columns)]
    if offset is not None:
        inputs.append(0.3 * torch.randn(groups, offset, parents, rows * columns))
    return (lambda poses, weight, offset=None: Votes(poses, weight, offset=offset)), inputs


def spatial(name, layout):
    window = WINDOWS[name]
    poses = torch.randn(2, 2, 4, 9, 7)
    if layout == "channels last":
        poses = poses.flatten(1, 2).contiguous(memory_format=torch.channels_last).unflatten(1, (2, 4))
    weight = 0.3 * torch.randn(2 * window.kernel_size**2, 2, 3, 2)
    return (lambda poses, weight: Votes(poses, weight, window)), [poses, weight]


CASES = {name: (lambda name=name: linear(name)) for name in SIZES} | {
    f"{name}, {layout}": (lambda name=name, layout=layout: spatial(name, layout))
    for name in WINDOWS
    for layout in ("contiguous", "channels last")
}
AGREEMENTS = {
    "plain": {},
    "logits": {"logits": True, "scale": 0.7},
    "leak": {"leak": True, "logits": True},
    "prior": {"prior": True, "scale": 0.7},
    "constant": {"constant": True, "logits": True},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of a few windows and children, and memory that nobody wrote is not a number."""
    monkeypatch.setattr(votes_cpu, "WINDOWS", 8)
    monkeypatch.setattr(votes_cpu, "_cache_size", lambda: 2**12 // torch.get_num_threads())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before)


def check(ours, definition, inputs):
    assert_equal_with_gradients(ours, definition, inputs)
    assert_as_accurate(ours, definition, inputs, torch.float32)


@pytest.mark.parametrize("place", [agreement_cpu, em_cpu], ids=lambda place: place.__name__)
def test_what_is_the_same_in_every_image(place, monkeypatch):
    """Parents without a batch, and logits and a prior that all children share, whichever code makes the votes."""
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    made = []
    monkeypatch.setattr(place, "parts", lambda votes, parts=place.parts: made.append(votes) or parts(votes))
    above, pairs = torch.randn(3, 5), [torch.randn(3) for _ in range(2)]
    inputs = [torch.randn(4, 7, 2), torch.randn(7, 2, 3, 5), above, *pairs]

    def steps(poses, weight, above, logits, prior):
        votes, gates = Votes(poses, weight), torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).to(poses)
        if place is agreement_cpu:
            return ops.agreement_step(votes, above, logits=logits, prior=prior)[0]
        return ops.em_step(votes, gates, (above, above**2 + 1, logits + prior))[1]

    def by_formulas(*inputs):
        with ops.backend("torch"):
            return steps(*inputs)

    assert_equal_with_gradients(steps, by_formulas, inputs)
    assert made


@pytest.mark.parametrize("options", AGREEMENTS.values(), ids=AGREEMENTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agreement(case, options):
    make, inputs = case()
    votes = make(*inputs)
    pairs = [name for name in ("logits", "prior") if options.get(name)]
    given = {name: value for name, value in options.items() if name not in pairs}
    inputs.append(torch.randn(*votes.lead, votes.parents, votes.dim))
    inputs += [0.3 * torch.randn(votes.in_caps, votes.parents) for _ in pairs]
    last = len(inputs) - len(pairs)

    def by(step):
        def run(*x):
            return step(make(*x[: last - 1]), x[last - 1], **given, **dict(zip(pairs, x[last:], strict=True)))

        return run

    with ops.backend("torch"):
        check(by(agreement_cpu.agreement_step), by(ops.agreement_step), inputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mixture(case):
    make, inputs = case()
    votes = make(*inputs)
    inputs.append(torch.rand(*votes.lead, votes.in_caps, votes.parents))
    with ops.backend("torch"):
        check(
            lambda *x: agreement_cpu.mixture(make(*x[:-1]), x[-1]),
            lambda *x: make(*x[:-1]).mixture(x[-1]),
            inputs,
        )


@pytest.mark.parametrize("size", [1, 1e-9], ids=["mass", "hardly any mass"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gaussian_fit(case, size):
    make, inputs = case()
    votes = make(*inputs)
    inputs.append(size * torch.rand(*votes.lead, votes.in_caps, votes.parents))
    with ops.backend("torch"):
        check(
            lambda *x: em_cpu.gaussian_fit(make(*x[:-1]), x[-1]),
            lambda *x: ops.gaussian_fit(make(*x[:-1]), x[-1]),
            inputs,
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gaussian_log_density(case):
    make, inputs = case()
    votes = make(*inputs)
    inputs.append(torch.randn(*votes.lead, votes.parents, votes.dim))
    inputs.append(0.3 + torch.rand(*votes.lead, votes.parents, votes.dim))
    with ops.backend("torch"):
        check(
            lambda *x: em_cpu.gaussian_log_density(make(*x[:-2]), *x[-2:]),
            lambda *x: ops.gaussian_log_density(make(*x[:-2]), *x[-2:]),
            inputs,
        )


@pytest.mark.parametrize("needed", range(3))
def test_only_the_gradients_asked_for(needed):
    make, inputs = linear("matrices")
    inputs.append(torch.randn(5, 7, 16))
    inputs[needed].requires_grad_()
    agreement_cpu.agreement_step(make(*inputs[:2]), inputs[2])[0].sum().backward()
    assert [x.grad is not None for x in inputs] == [n == needed for n in range(3)]


def test_parents_are_read_alone():
    """Vectors of one image lie in memory as the pieces want them, and still are not theirs to scale."""
    make, inputs = linear("one image of vectors")
    parents, variance = torch.randn(1, 3, 6), torch.rand(1, 3, 6) + 0.3
    before = parents.clone(), variance.clone()
    agreement_cpu.agreement_step(make(*inputs), parents, scale=0.7)
    em_cpu.gaussian_log_density(make(*inputs), parents, variance)
    assert torch.equal(parents, before[0])
    assert torch.equal(variance, before[1])


@pytest.mark.parametrize("case", [name for name in SIZES if "shared" not in name])
def test_total(case):
    make, inputs = linear(case)
    with ops.backend("torch"):
        check(lambda *x: agreement_cpu.total(make(*x)), lambda *x: make(*x).total(), inputs)


def em_poses(votes):
    betas = torch.zeros(2, votes.parents, dtype=votes.dtype)
    return em_routing(votes, None, *betas, 3, inverse_temperature=lambda iteration: 0.5).poses


ROUTINGS = {"dynamic": lambda votes: dynamic_routing(votes, 3).poses, "em": em_poses}


def routed(name, make, within):
    def run(*inputs):
        with ops.backend(within):
            return ROUTINGS[name](make(*inputs))

    return run


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("case", ["vectors", "small poses", "matrices", "shared", "stride 1, contiguous"])
def test_steps_share_one_gradient_of_the_weights(name, case, monkeypatch):
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    make, inputs = CASES[case]()
    assert_equal_with_gradients(routed(name, make, "auto"), routed(name, make, "torch"), inputs)


def test_every_backward_pass_has_a_gradient_of_its_own(monkeypatch):
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    make, inputs = linear("vectors")
    poses, weight = (x.requires_grad_() for x in inputs)
    out = dynamic_routing(make(poses, weight), 3).poses.square().sum()
    first = torch.autograd.grad(out, [poses, weight], retain_graph=True)
    (of_poses,) = torch.autograd.grad(out, [poses], retain_graph=True)
    (of_weight,) = torch.autograd.grad(out, [weight], retain_graph=True)
    assert torch.equal(first[0], of_poses)
    assert torch.equal(first[1], of_weight)
    out.backward(retain_graph=True)
    out.backward()
    assert torch.equal(weight.grad, 2 * of_weight)


def test_gradients_with_and_without_recording(monkeypatch):
    """Votes that were first asked without gradients give them all the same when they are wanted."""
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    make, inputs = linear("vectors")
    votes = make(*(x.requires_grad_() for x in inputs))
    with torch.no_grad():
        quiet = dynamic_routing(votes, 2).poses
    poses = dynamic_routing(votes, 2).poses
    assert not quiet.requires_grad
    assert torch.equal(quiet, poses)
    poses.sum().backward()
    assert all(x.grad is not None for x in inputs)


def test_second_derivatives_are_refused(monkeypatch):
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    make, inputs = linear("vectors")
    out = dynamic_routing(make(*(x.requires_grad_() for x in inputs)), 3).poses.square().sum()
    for grad in torch.autograd.grad(out, inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward(retain_graph=True)


def test_networks_made_channels_last_keep_their_vote_weights():
    network = create_model("capsnet_mnist", channels=8, types=2).to(memory_format=torch.channels_last)
    weights = [p for p in network.parameters() if p.dim() == 4]
    votes = [p for p in weights if p.shape[2] == network.classes]
    assert votes
    assert all(p.is_contiguous() for p in votes)
    assert any(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in weights)


def test_what_runs_here():
    make, (poses, weight) = linear("matrices")
    assert not votes_cpu.fits(make(poses, weight))  # too few to be worth it
    large = torch.randn(64, 512, 16), torch.randn(512, 4, 10, 4)
    assert votes_cpu.fits(make(*large))
    assert not votes_cpu.fits(make(large[0][:8], large[1]))  # eight children for each weight
    assert votes_cpu.fits(make(*(x.double() for x in large)))
    assert not votes_cpu.fits(make(*(x.bfloat16() for x in large)))
    assert not votes_cpu.fits(make(*(x.to("meta") for x in large)))
    assert not votes_cpu.fits(Votes.of(torch.randn(64, 512, 10, 16)))
    assert not torch.func.vmap(lambda poses: torch.tensor(votes_cpu.fits(make(poses, large[1]))))(large[0][None]).any()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (agreement_cpu, "agreement_step"),
        (agreement_cpu, "mixture"),
        (em_cpu, "gaussian_fit"),
        (em_cpu, "gaussian_log_density"),
    ],
)
def test_large_votes_come_here_by_themselves(place, name, monkeypatch):
    monkeypatch.setattr(votes_cpu, "LEAST", 0)
    monkeypatch.setattr(votes_cpu, "FEWEST", 0)
    votes, parents = Votes(torch.randn(2, 3, 4), torch.randn(3, 4, 5, 6)), torch.rand(2, 5, 6) + 0.1
    calls, own = [], getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **options: (calls.append(1), own(*args, **options))[1])
    ask = {
        "agreement_step": lambda: ops.agreement_step(votes, parents),
        "mixture": lambda: votes.mixture(torch.rand(2, 3, 5)),
        "gaussian_fit": lambda: ops.gaussian_fit(votes, torch.rand(2, 3, 5)),
        "gaussian_log_density": lambda: ops.gaussian_log_density(votes, parents, parents),
    }[name]
    ask()
    assert calls == [1]
    with ops.backend("torch"):
        ask()
    assert calls == [1]
