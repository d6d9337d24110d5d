"""The routing log against loops over images, children and parents."""

import json
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests import oracle
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.linear import LinearCaps
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models import create_model
from torchcaps.ops import vote_budget
from torchcaps.routing import DynamicRouting, EMRouting, InvertedAttentionRouting, SelfAttentionRouting
from torchcaps.train.checkpoint import fingerprint
from torchcaps.train.routing_log import COSINES, LENGTHS, PIECE, routing_log


class Poses(nn.Module):
    """A network that is given its first capsules: poses [b, c, p, h, w], with activations where it wants them."""

    def __init__(self, body, activations=False):
        super().__init__()
        self.body, self.activations = body.double(), activations

    def forward(self, poses):
        return self.body(poses, poses[:, :, 0].sigmoid() if self.activations else None)


def poses(batch=3, types=2, dim=4, height=4, width=3):
    return torch.randn(batch, types, dim, height, width).double()


def histograms(votes, parents):
    """Counts of cosines and of lengths, and the mean length at each cosine, of votes [n, i, j, d]."""
    cosine, lengths, along = [0] * 20, [0] * 24, [[] for _ in range(20)]
    for n in range(len(votes)):
        for i in range(votes.shape[1]):
            for j in range(votes.shape[2]):
                vote, parent = votes[n, i, j].tolist(), parents[n, j].tolist()
                size = math.sqrt(sum(x * x for x in vote))
                cos = sum(x * y for x, y in zip(vote, parent, strict=True)) / (
                    size * math.sqrt(sum(y * y for y in parent))
                )
                where = max(bin for bin in range(20) if bin == 0 or cos >= COSINES[bin])
                cosine[where] += 1
                along[where].append(size)
                lengths[max(bin for bin in range(24) if bin == 0 or size >= LENGTHS[bin])] += 1
    return {"cosine": cosine, "lengths": lengths, "cosine_lengths": [sum(x) / len(x) if x else None for x in along]}


def assert_same(log, **expected):
    for word, values in expected.items():
        ours = log[word]
        assert len(ours) == len(values), word
        for x, e in zip(ours, values, strict=True):
            assert (x is None) == (e is None), word
            assert x is None or x == pytest.approx(e, rel=1e-10), word


def mean_change(before, after):
    pairs = list(zip(before.flatten().tolist(), after.flatten().tolist(), strict=True))
    return sum(abs(y - x) for x, y in pairs) / len(pairs)


def linear(routing, **options):
    return LinearCaps(24, 4, 3, 4, partial(routing, **options)).double()


def votes_of(layer, x):
    return oracle.linear_votes(x.permute(0, 1, 3, 4, 2).flatten(1, 3), layer.weight.detach())


@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"leak": True}, {"bias": True, "priors": True}], ids=["plain", "leak", "bias"])
def test_dynamic_routing(iterations, options):
    layer, x = linear(DynamicRouting, iterations=iterations, **options), poses()
    routing = layer.routing
    for weight in routing.parameters():
        nn.init.normal_(weight)
    logits, coupling = [], []
    votes = votes_of(layer, x)
    start = None if routing.logits is None else routing.logits.detach()
    bias = None if routing.bias is None else routing.bias.detach()
    for n in range(1, iterations + 1):
        v, c = oracle.dynamic_routing(votes, n, start, routing.leak, bias)
        change = [
            abs(float(oracle.dot(votes[b, i, j], v[b, j]))) for b in range(3) for i in range(24) for j in range(3)
        ]
        logits.append(sum(change) / len(change))
        coupling.append(c)
    log = routing_log(Poses(CapsuleStack(layer)), x)["layers"]["body.layers.0"]
    changes = [mean_change(a, b) for a, b in pairwise(coupling)]
    assert (log["routing"], log["iterations"]) == ("DynamicRouting", iterations)
    assert_same(log, logits=logits, coupling=changes, **histograms(votes, v))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("start", ["zero", "learnt"])
def test_inverted_attention_one_after_the_other(scaled, start):
    layer, x = linear(InvertedAttentionRouting, iterations=3, scaled=scaled, start=start), poses()
    if start == "learnt":
        nn.init.normal_(layer.routing.start)
    votes, scale = votes_of(layer, x), 0.5 if scaled else 1.0
    parents = torch.zeros(3, 3, 4).double() if start == "zero" else layer.routing.start.detach().expand(3, 3, 4)
    logits, coupling = [], []
    for _ in range(3):
        logits.append(
            oracle.tensor(
                [
                    [[scale * oracle.dot(votes[b, i, j], parents[b, j]) for j in range(3)] for i in range(24)]
                    for b in range(3)
                ]
            )
        )
        parents, c = oracle.inverted_attention(votes, parents, scale)
        coupling.append(c)
    log = routing_log(Poses(CapsuleStack(layer)), x)["layers"]["body.layers.0"]
    assert_same(
        log,
        logits=[mean_change(logits[0], logits[1]), mean_change(logits[1], logits[2])],
        coupling=[mean_change(coupling[0], coupling[1]), mean_change(coupling[1], coupling[2])],
        **histograms(votes, parents),
    )


def test_inverted_attention_all_at_once():
    conv = ConvCaps(2, 4, 3, 4, 2, 1, InvertedAttentionRouting, pose="matrix").double()
    top = LinearCaps(18, 4, 2, 4, InvertedAttentionRouting, pose="matrix").double()
    x = poses()
    logits, coupling, last = {0: [], 1: []}, {0: [], 1: []}, {}

    def step(which, votes, parents):
        given = torch.zeros_like(votes[:, 0]) if parents is None else parents
        logits[which].append(0.5 * (votes * given[:, None]).sum(-1))
        after, c = oracle.inverted_attention(votes, given)
        coupling[which].append(c)
        last[which] = (votes, after)
        return after

    def below(x, parents):
        votes = oracle.window_votes(x, conv.weight.detach(), 2, 1).flatten(0, 2)
        parents = None if parents is None else parents.permute(0, 3, 4, 1, 2).flatten(0, 2)
        return step(0, votes, parents).unflatten(0, (3, 3, 2)).permute(0, 3, 4, 1, 2)

    def above(x, parents):
        votes = oracle.linear_votes(x.permute(0, 1, 3, 4, 2).flatten(1, 3), top.weight.detach())
        return step(1, votes, parents)

    oracle.concurrent_routing([below, above], x, 3)
    log = routing_log(Poses(CapsuleStack(conv, top, iterations=3)), x)["layers"]
    for which in (0, 1):
        ours = log[f"body.layers.{which}"]
        assert ours["iterations"] == 3
        assert_same(
            ours,
            logits=[mean_change(logits[which][n], logits[which][n + 1]) for n in (0, 1)],
            coupling=[mean_change(coupling[which][n], coupling[which][n + 1]) for n in (0, 1)],
            **histograms(*last[which]),
        )


def test_em_in_windows():
    layer = ConvCaps(2, 4, 2, 4, 2, 1, partial(EMRouting, iterations=3), pose="matrix").double()
    for weight in layer.routing.parameters():
        nn.init.normal_(weight)
    x = poses(batch=1, height=3)
    weight = layer.weight.detach().unflatten(0, (2, 2, 2))
    betas = layer.routing.beta_u.detach(), layer.routing.beta_a.detach()
    coupling = []
    for n in (1, 2, 3):
        means, _, share = oracle.em_routing_sites(x, x[:, :, 0].sigmoid(), weight, 1, *betas, iterations=n)
        coupling.append(share)
    log = routing_log(Poses(layer, activations=True), x)["layers"]["body"]
    votes = oracle.window_votes(x, layer.weight.detach(), 2, 1).flatten(0, 2)
    assert_same(
        log,
        logits=[mean_change(coupling[n].log(), coupling[n + 1].log()) for n in (0, 1)],
        coupling=[mean_change(coupling[n], coupling[n + 1]) for n in (0, 1)],
        **histograms(votes, means.flatten(0, 2)),
    )


def test_responsibilities_lost_to_zero_still_count():
    layer, x = linear(EMRouting, iterations=4), torch.ones(1, 2, 4, 4, 3).double()
    layer.weight.data[:, :, 0] = 1
    layer.weight.data[0, :, 0] = 100  # one child says something else than all others
    assert layer.routing(votes_of(layer, x)).coupling[0, 0, 0] == 0
    log = routing_log(Poses(layer), x)["layers"]["body"]
    assert log["logits"][2] > 1000


def test_a_routing_without_iterations_has_histograms_alone():
    layer, x = linear(SelfAttentionRouting), poses()
    log = routing_log(Poses(layer), x)["layers"]["body"]
    votes = votes_of(layer, x)
    assert (log["logits"], log["coupling"], log["iterations"]) == ([], [], 1)
    assert_same(log, **histograms(votes, oracle.self_attention_routing(votes)[0]))


def test_what_is_nothing_is_orthogonal():
    log = routing_log(Poses(linear(DynamicRouting)), torch.zeros(2, 2, 4, 4, 3).double())["layers"]["body"]
    assert log["cosine"] == [0] * 10 + [2 * 24 * 3] + [0] * 9
    assert log["lengths"] == [2 * 24 * 3] + [0] * 23
    assert log["cosine_lengths"][10] == 0


def test_pieces_of_a_batch_and_of_the_votes_add_up():
    network, x = Poses(CapsuleStack(linear(DynamicRouting))), poses(batch=2 * PIECE + 3)
    whole = routing_log(network, x)
    with vote_budget(300):
        small = routing_log(network, x)
    parts = [routing_log(network, part)["layers"]["body.layers.0"] for part in (x[:5], x[5:])]
    ours = whole["layers"]["body.layers.0"]
    assert small["layers"]["body.layers.0"]["cosine"] == ours["cosine"]
    assert_same(small["layers"]["body.layers.0"], logits=ours["logits"], coupling=ours["coupling"])
    assert [sum(pair) for pair in zip(*(part["cosine"] for part in parts), strict=True)] == ours["cosine"]
    mean = [(5 * a + 14 * b) / 19 for a, b in zip(*(part["logits"] for part in parts), strict=True)]
    assert_same(ours, logits=mean)
    assert whole["images"] == 19


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("capsnet_cifar10", {"channels": 8, "types": 2}),
        ("efficient_capsnet_mnist", {}),
        ("inverted_cifar10", {"image": (3, 16, 16), "backbone": "simple", "types": 4, "start": "random"}),
        ("em_smallnorb", {"image": (1, 17, 17)}),
        ("ar_capsnet_mnist", {}),
        ("encapnet6_cifar10", {"image": (3, 8, 8)}),
        ("li_cnn6_cifar10", {"width": 4}),
    ],
)
def test_a_network_is_left_as_it_was(name, options):
    network = create_model(name, **options)
    network.train()
    network.head.eval()
    images = torch.rand(2, *network.image)
    modes = [module.training for module in network.modules()]
    before, random = fingerprint(network.state_dict()), torch.get_rng_state()
    log = routing_log(network, images)
    assert fingerprint(network.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in network.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert all(weight.grad is None and weight.requires_grad for weight in network.parameters())
    assert json.loads(json.dumps(log, allow_nan=False)) == log == routing_log(network, images)
    assert bool(log["layers"]) == (name not in ("encapnet6_cifar10", "li_cnn6_cifar10"))


def test_random_first_parents_are_those_the_network_has():
    layer, x = linear(InvertedAttentionRouting, start="random", iterations=2), poses()
    torch.manual_seed(0)
    start = torch.randn(3, 3, 4, dtype=torch.float64)
    votes = votes_of(layer, x)
    first, before = oracle.inverted_attention(votes, start)
    second, after = oracle.inverted_attention(votes, first)
    logits = [(votes * parents[:, None]).sum(-1) / 2 for parents in (start, first)]
    log = routing_log(Poses(layer), x)["layers"]["body"]
    assert_same(log, logits=[mean_change(*logits)], coupling=[mean_change(before, after)], **histograms(votes, second))


def test_half_precision():
    network = create_model("capsnet_cifar10", channels=8, types=2)
    images = torch.rand(2, *network.image)
    exact = routing_log(network, images)["layers"]["body.layers.0"]
    with torch.autocast("cpu", torch.bfloat16):
        rough = routing_log(network, images)["layers"]["body.layers.0"]
    assert rough["logits"] == pytest.approx(exact["logits"], rel=0.05)
    assert sum(rough["lengths"]) == sum(exact["lengths"])


def test_what_is_not_finite_is_none():
    layer = linear(DynamicRouting)
    layer.weight.data[0] = math.nan
    log = routing_log(Poses(layer), poses())["layers"]["body"]
    assert log["logits"] == [None] * 3


def test_a_failing_network_is_left_as_it_was():
    network = Poses(linear(DynamicRouting))
    network.train()
    with pytest.raises(ValueError, match="24 children"):
        routing_log(network, poses(height=5))
    assert network.body.routing.training
    assert not network.body.routing._forward_hooks
