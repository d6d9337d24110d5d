"""Votes and windows against loops: which child stands where, what it says, and the same in pieces."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import oracle
from tests.helpers import assert_as_accurate, assert_equal_with_gradients
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.linear import LinearCaps, SharedCaps
from torchcaps.ops import vote_budget
from torchcaps.ops import votes as votes_module
from torchcaps.ops import windows as window_module
from torchcaps.ops.votes import Votes
from torchcaps.ops.windows import Window
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing
from torchcaps.routing.inverted_attention import InvertedAttentionRouting, inverted_attention
from torchcaps.routing.self_attention import SelfAttentionRouting, self_attention_routing

MAPS = [(3, 1, 6, 5), (3, 2, 7, 5), (2, 2, 5, 7), (1, 1, 3, 4), (3, 2, 6, 6)]  # kernel, stride, height, width


def coded(types, height, width):
    """Poses [1, c, 2, h, w] that say where they are: 100 y + 10 x + c, and the same negated."""
    poses = torch.empty(1, types, 2, height, width).double()
    for c in range(types):
        for y in range(height):
            for x in range(width):
                poses[0, c, 0, y, x] = 100 * y + 10 * x + c
                poses[0, c, 1, y, x] = -poses[0, c, 0, y, x]
    return poses


def identity(children, dim, parents):
    """Weights [i, p, j, p] by which parent j hears j + 1 times the pose."""
    return (
        torch.einsum("ae,j->aje", torch.eye(dim), torch.arange(1.0, parents + 1)).expand(children, -1, -1, -1).double()
    )


@pytest.mark.parametrize(("kernel", "stride", "height", "width"), MAPS)
def test_each_child_stands_where_it_should(kernel, stride, height, width):
    types, parents = 3, 2
    votes = Votes(coded(types, height, width), identity(types * kernel**2, 2, parents), Window(kernel, stride))
    said = votes.materialise()
    sites_y, sites_x = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    assert said.shape == (1, sites_y, sites_x, types * kernel**2, parents, 2)
    for y in range(sites_y):
        for x in range(sites_x):
            for i in range(types * kernel**2):
                c, dy, dx = i // kernel**2, i // kernel % kernel, i % kernel
                code = 100 * (y * stride + dy) + 10 * (x * stride + dx) + c
                for j in range(parents):
                    assert said[0, y, x, i, j].tolist() == [(j + 1) * code, -(j + 1) * code]


@pytest.mark.parametrize(("kernel", "stride", "height", "width"), MAPS)
@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("size", [4, 2], ids=["vector", "matrix"])
def test_window_votes(kernel, stride, height, width, scrambled, size):
    poses, weight = torch.randn(1, 2, 4, height, width), torch.randn(2 * kernel**2, size, 2, size)
    assert_equal_with_gradients(
        lambda p, w: Votes(p, w, Window(kernel, stride, scrambled)).materialise(),
        partial(oracle.window_votes, kernel=kernel, stride=stride, scrambled=scrambled),
        [poses, weight],
    )


def test_scrambled_windows_read_one_component_across_sites():
    poses = coded(1, 4, 4)
    weight = identity(1, 2, 1)
    true = Votes(poses, weight, Window(1, 1)).materialise()
    scrambled = Votes(poses, weight, Window(1, 1, scrambled=True)).materialise()
    assert true[0, 0, 1, 0, 0].tolist() == [10, -10]
    assert scrambled[0, 0, 1, 0, 0].tolist() == [20, 30]  # the first component at sites 2 and 3
    assert scrambled[0, 2, 0, 0, 0].tolist() == [0, -10]  # the second begins half way


@pytest.mark.parametrize("size", [4, 2, 1])
def test_linear_votes(size):
    poses, weight = torch.randn(2, 5, 4), torch.randn(5, size, 3, 6)
    assert_equal_with_gradients(lambda p, w: Votes(p, w).materialise(), oracle.linear_votes, [poses, weight])


def test_shared_weights_and_offset():
    poses, weight, offset = torch.randn(2, 6, 4), torch.randn(2, 2, 3, 2), torch.randn(2, 3, 3, 4)

    def loops(poses, weight, offset):
        return oracle.linear_votes(poses, oracle.tensor([weight[i // 3] for i in range(6)])) + offset.flatten(0, 1)

    assert_equal_with_gradients(lambda p, w, o: Votes(p, w, offset=o).materialise(), loops, [poses, weight, offset])
    assert_equal_with_gradients(
        lambda p, w, o: Votes(p, w, offset=o).total(), lambda *x: loops(*x).sum(1), [poses, weight, offset]
    )


@pytest.mark.parametrize(("kernel", "stride", "height", "width"), MAPS)
@pytest.mark.parametrize("scrambled", [False, True])
def test_sums_over_children(kernel, stride, height, width, scrambled):
    poses, weight = torch.randn(2, 2, 4, height, width), torch.randn(2 * kernel**2, 2, 3, 2)
    shared = torch.rand(2 * kernel**2, 3)
    votes = partial(Votes, window=Window(kernel, stride, scrambled))
    coupling = torch.rand(*votes(poses, weight).lead, 2 * kernel**2, 3)

    def stored(poses, weight, coupling):
        return (votes(poses, weight).materialise() * coupling[..., None]).sum(3)

    assert_equal_with_gradients(
        lambda *x: votes(*x).total(), lambda *x: votes(*x).materialise().sum(3), [poses, weight]
    )
    assert_equal_with_gradients(lambda p, w, c: votes(p, w).total(c), stored, [poses, weight, shared])
    assert_equal_with_gradients(lambda p, w, c: votes(p, w).mixture(c), stored, [poses, weight, coupling])


@pytest.mark.parametrize(("kernel", "stride", "height", "width"), MAPS)
def test_per_child(kernel, stride, height, width):
    poses, weight = torch.randn(2, 2, 4, height, width).double(), torch.randn(2 * kernel**2, 2, 3, 2).double()
    votes = Votes(poses, weight, Window(kernel, stride))
    sites_y, sites_x = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    within = [(c, dy, dx) for c in range(2) for dy in range(kernel) for dx in range(kernel)]

    def loops(x):
        said = {}
        for n in range(2):
            for y in range(sites_y):
                for s in range(sites_x):
                    for i, (c, dy, dx) in enumerate(within):
                        said.setdefault((n, c, y * stride + dy, s * stride + dx), []).extend(x[n, y, s, i])
        total = {child: torch.log(sum(torch.exp(entry) for entry in entries)) for child, entries in said.items()}
        return oracle.tensor(
            [
                [
                    [[total[n, c, y * stride + dy, s * stride + dx] for c, dy, dx in within] for s in range(sites_x)]
                    for y in range(sites_y)
                ]
                for n in range(2)
            ]
        )

    assert_equal_with_gradients(votes.per_child, loops, [3 * torch.randn(2, sites_y, sites_x, len(within), 3)])


def test_per_child_without_windows():
    x = torch.randn(2, 5, 3)
    votes = Votes(torch.randn(2, 5, 4).double(), torch.randn(5, 4, 3, 2).double())
    assert_equal_with_gradients(votes.per_child, lambda x: torch.log(torch.exp(x).sum(-1)), [x])


def test_per_child_far_from_zero():
    votes = Votes(torch.randn(1, 1, 4, 5, 5), torch.randn(9, 2, 3, 2), Window(3, 1))
    x = torch.randn(1, 3, 3, 9, 3)
    for shift in (-1e4, 1e4):
        torch.testing.assert_close(votes.per_child(x + shift), votes.per_child(x) + shift, rtol=0, atol=2e-3)


ROUTINGS = {  # the routing, and the paper's loops over one window with what the routing has learnt
    "dynamic": (
        partial(DynamicRouting, priors=True, bias=True),
        lambda r, u: oracle.dynamic_routing(u, 3, r.logits, bias=r.bias),
    ),
    "inverted": (
        InvertedAttentionRouting,
        lambda r, u: oracle.inverted_attention(u, norm=lambda x: oracle.layer_norm(x, r.norm.weight, r.norm.bias)),
    ),
    "self_attention": (SelfAttentionRouting, lambda r, u: oracle.self_attention_routing(u, r.prior)),
}


def moved(layer):
    """In float64, with parameters that have left where they start."""
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer.double()


def as_function(layer):
    """The layer as a function of poses and weight, which returns poses and coupling."""
    layer.routing.requires_grad_(False)
    return lambda poses, weight: torch.func.functional_call(layer, {"weight": weight}, (poses,))[::2]


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("pose", "windows"), [("vector", "true"), ("matrix", "true"), ("matrix", "scrambled")])
def test_conv_caps(case, stride, pose, windows):
    routing, loops = ROUTINGS[case]
    layer = moved(ConvCaps(2, 4, 3, 4, 2, stride, routing, pose=pose, windows=windows))

    def by_hand(poses, weight):
        votes = oracle.window_votes(poses, weight, 2, stride, windows == "scrambled")
        poses, coupling = (x.unflatten(0, votes.shape[:3]) for x in loops(layer.routing, votes.flatten(0, 2)))
        return poses.permute(0, 3, 4, 1, 2), coupling

    assert_equal_with_gradients(as_function(layer), by_hand, [torch.randn(1, 2, 4, 5, 3), layer.weight.detach()])


def test_conv_caps_go_on_from_their_parents():
    layer = moved(ConvCaps(2, 4, 3, 4, 3, 1, partial(InvertedAttentionRouting, norm=False), pose="matrix"))
    poses, parents = torch.randn(2, 2, 4, 4, 5).double(), torch.randn(2, 3, 4, 2, 3).double()
    ours = layer(poses, parents=parents).poses
    votes = oracle.window_votes(poses, layer.weight, 3, 1)
    for y in range(2):
        for x in range(3):
            expected, _ = oracle.inverted_attention(votes[:, y, x], parents[..., y, x], norm=None)
            torch.testing.assert_close(ours[..., y, x], expected)


@pytest.mark.parametrize("stride", [1, 2])
def test_conv_caps_with_em(stride):
    layer = moved(ConvCaps(2, 4, 2, 4, 3, stride, partial(EMRouting, iterations=2), pose="matrix"))
    poses, activations = torch.randn(1, 2, 4, 5, 5).double(), torch.rand(1, 2, 5, 5).double()
    ours = layer(poses, activations)
    weight = layer.weight.view(2, 3, 3, 2, 2, 2)
    mean, above, coupling = oracle.em_routing_sites(
        poses, activations, weight, stride, layer.routing.beta_u, layer.routing.beta_a, 2
    )
    torch.testing.assert_close(ours.poses, mean.permute(0, 3, 4, 1, 2))
    torch.testing.assert_close(ours.activations, above.permute(0, 3, 1, 2))
    torch.testing.assert_close(ours.coupling, coupling)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("pose", ["vector", "matrix"])
def test_linear_caps(case, pose):
    routing, loops = ROUTINGS[case]
    layer = moved(LinearCaps(2 * 3 * 2, 4, 3, 4, routing, pose=pose))

    def by_hand(poses, weight):
        children = [poses[:, c, :, y, x] for c in range(2) for y in range(3) for x in range(2)]
        return loops(layer.routing, oracle.linear_votes(torch.stack(children, 1), weight))

    assert_equal_with_gradients(as_function(layer), by_hand, [torch.randn(2, 2, 4, 3, 2), layer.weight.detach()])


def test_shared_caps_say_where_they_stand():
    layer = moved(
        SharedCaps(
            2, 12, 9, 3, 9, partial(InvertedAttentionRouting, norm=False), pose="matrix", coordinates=True, bias=True
        )
    )
    poses = torch.randn(2, 2, 9, 3, 2).double()
    votes = []
    for c in range(2):
        for y in range(3):
            for x in range(2):
                vote = oracle.linear_votes(poses[:, c, None, :, y, x], layer.weight[c, None])[:, 0] + layer.bias[c, 0]
                vote[..., 2] += (y + 0.5) / 3  # the right-hand column of the matrix
                vote[..., 5] += (x + 0.5) / 2
                votes.append(vote)
    expected, _ = oracle.inverted_attention(torch.stack(votes, 1), norm=None)
    torch.testing.assert_close(layer(poses).poses, expected)


def routed(case, window, offset=None):
    """Each routing as a function of poses and weight, from votes that need not exist."""
    parents = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def run(poses, weight):
        votes = Votes(poses, weight, window, None if offset is None else offset.to(poses))
        above = parents.to(poses).expand(*votes.lead, 3, 4)
        ones = poses.new_ones(3)
        if case == "dynamic":
            return dynamic_routing(votes, 3, logits=0.1 * weight[:, 0, :, 0] if offset is None else None, leak=True)
        if case == "inverted":
            return inverted_attention(votes, above)
        if case == "self_attention":
            return self_attention_routing(votes, weight[:, 0, :, 0] if offset is None else None)
        return em_routing(votes, None, ones, ones, 3)

    return run


def within(budget, function):
    def run(*inputs):
        with vote_budget(budget):
            return function(*inputs)

    return run


CHUNKED = ["dynamic", "em", "inverted", "self_attention"]
BUDGETS = [0, 300, 3000]  # bytes: the votes of one weight at a time, of some, of some windows


@pytest.fixture
def never_all(monkeypatch):
    """Fails where all votes are made at once in spite of a budget."""
    whole = Votes._by_parent

    def watched(self):
        assert self._size() <= votes_module._budget, "all votes were made at once"
        return whole(self)

    monkeypatch.setattr(Votes, "_by_parent", watched)


@pytest.mark.usefixtures("never_all")
@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("scrambled", [False, True])
def test_votes_in_pieces(case, budget, scrambled):
    function = routed(case, Window(2, 1, scrambled))
    inputs = [torch.randn(1, 2, 4, 4, 3), torch.randn(8, 2, 3, 2)]
    assert_equal_with_gradients(within(budget, function), function, inputs)


@pytest.mark.usefixtures("never_all")
@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.parametrize("budget", BUDGETS)
def test_shared_votes_in_pieces(case, budget):
    function = routed(case, None, offset=torch.randn(5, 3, 3, 4))
    inputs = [torch.randn(7, 15, 4), torch.randn(5, 2, 3, 2)]
    assert_equal_with_gradients(within(budget, function), function, inputs)


@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.parametrize("budget", BUDGETS)
def test_pieces_are_as_accurate(case, budget):
    function = routed(case, Window(2, 1))
    inputs = [torch.randn(1, 3, 4, 4, 5), torch.randn(12, 2, 3, 2)]
    assert_as_accurate(within(budget, function), function, inputs, torch.float32)


def test_budget_ends_with_its_block():
    before = votes_module._budget
    with vote_budget(1):
        assert votes_module._budget == 1
    assert votes_module._budget == before


SIZES = [(9, 3, 1), (9, 3, 2), (8, 3, 2), (7, 1, 3), (6, 2, 3), (4, 4, 1)]


@pytest.mark.parametrize(("size", "kernel", "stride"), SIZES)
@pytest.mark.parametrize("scrambled", [False, True])
def test_windows_where_they_are_compiled(monkeypatch, size, kernel, stride, scrambled):
    window = Window(kernel, stride, scrambled)
    poses = torch.randn(2, 3, 4, size, size + 1, dtype=torch.float64, requires_grad=True)
    expected = window.unfold(poses)
    weights = torch.randn_like(expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = window.unfold(poses)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad((x * weights).sum(), poses)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_window_larger_than_the_image_is_refused_where_it_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="maximum size for tensor at dimension 3 is 2"):
        Window(3).unfold(torch.randn(1, 1, 1, 2, 2))


COMPILED = """
import torch
from torchcaps.ops.windows import Window
torch.set_num_threads(2)
poses = torch.randn(2, 8, 16, 9, 9, requires_grad=True)
window = Window(3, 1)
found = [function(poses) for function in (torch.compile(window.unfold, fullgraph=True), window.unfold)]
weights = torch.randn_like(found[0])
gradients = [torch.autograd.grad((x * weights).sum(), poses)[0] for x in found]
torch.testing.assert_close(*found)
torch.testing.assert_close(*gradients)
"""


def test_compiled_windows_keep_to_their_memory():
    """In a process of its own: with torch 2.13 and two unfolds it crashes."""
    root = Path(window_module.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
