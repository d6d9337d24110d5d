"""Couplings followed to the pixels: constructed ones with a known answer, mass that is kept, and fields by gradient."""

import math

import pytest
import torch
from torch import nn

from torchcaps.analysis.coupling import Routes, coupling_map
from torchcaps.analysis.fields import PixelField, WindowField, counting_paths, stretch
from torchcaps.analysis.links import _taps, look
from torchcaps.layers.backbone import resnet_backbone
from torchcaps.layers.linear import LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models import create_model
from torchcaps.models.efficient_capsnet import efficient_stem
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.ops import Votes, backend
from torchcaps.train.routing_log import undisturbed
from torchcaps.types import Capsules

SMALL = (1, 12, 12)
NETWORKS = {
    "dynamic": lambda: create_model(
        "capsnet", image=(1, 20, 20), classes=3, channels=8, types=2, dim=4, out_dim=5, decoder=False
    ),
    "same": lambda: create_model(
        "capsnet", image=(1, 9, 9), classes=3, channels=8, types=2, padding="same", leak=True, decoder=False
    ),
    "efficient": lambda: create_model(
        "efficient_capsnet", image=SMALL, classes=3, first_kernel=3, strides=(1, 1, 1, 1), hidden=((6, 4),)
    ),
    "em": lambda: create_model("em_capsnet", image=(1, 16, 16), classes=3, channels=8, types=(3, 2, 2)),
    "inverted": lambda: create_model(
        "inverted_capsnet", image=SMALL, classes=3, backbone="simple", width=8, types=2, dim=4, primary=(3, 1),
        convs=((2, 1), (2, 1)), hidden=(4,), iterations=3,
    ),
    "sequential": lambda: create_model(
        "inverted_capsnet", image=SMALL, classes=3, backbone="simple", width=8, types=2, dim=4, pose="vector",
        convs=((3, 2),), iterations=2, concurrent=False,
    ),
    "attention": lambda: create_model("ar_capsnet", image=SMALL, classes=3, depth=2, dim=4),
    "encap": lambda: create_model("encapnet", image=(1, 16, 16), classes=3, depth=6),
}  # fmt: skip


def network_of(name):
    torch.manual_seed(0)
    return NETWORKS[name]().eval()


class Fixed(nn.Module):
    """A routing whose coupling is given."""

    def __init__(self, coupling):
        super().__init__()
        self.coupling = coupling

    def forward(self, votes, activations=None, parents=None):
        coupling = self.coupling.expand(*votes.lead, -1, -1)
        return Capsules(Votes.of(votes).mixture(coupling), None, coupling)


def fixed_network(coupling, side=4, types=2, classes=3):
    """No stem, capsules of one number for each pixel and type, votes that repeat them."""
    primary = PrimaryCaps(1, types, 1, 1, bias=False)
    nn.init.ones_(primary.conv.weight)
    layer = LinearCaps(types * side**2, 1, classes, 1, lambda *sizes: Fixed(coupling), init=nn.init.ones_)
    parts = nn.Identity(), primary, CapsuleStack(layer), LengthHead()
    return CapsNet(*parts, image=(1, side, side), classes=classes).eval()


def test_all_of_one_childs_vote_is_one_pixel():
    coupling = torch.zeros(32, 3)
    coupling[16 + 4 * 2 + 3, 1] = 1.0  # type 1, row 2, column 3
    heat = coupling_map(fixed_network(coupling), torch.ones(1, 4, 4), 1)
    assert heat.shape == (4, 4)
    assert heat[2, 3] == 1
    assert heat.sum() == 1


def test_shares_are_coupling_times_vote():
    coupling = torch.zeros(32, 3)
    coupling[0, 0], coupling[5, 0], coupling[16 + 15, 0] = 0.5, 0.25, 1.0
    image = torch.ones(1, 4, 4)
    image[0, 3, 3] = 0.25
    heat = coupling_map(fixed_network(coupling), image, 0)
    assert heat[0, 0] == 0.5
    assert heat[1, 1] == 0.25
    assert heat[3, 3] == 0.25
    assert heat.sum() == 1


def test_a_class_that_nobody_votes_for_is_spread_evenly():
    heat = coupling_map(fixed_network(torch.zeros(32, 3)), torch.ones(1, 4, 4), 2)
    torch.testing.assert_close(heat, torch.full((4, 4), 1 / 16, dtype=torch.float64), rtol=0, atol=1e-15)


def test_the_tree_of_a_known_coupling():
    coupling = torch.zeros(32, 3)
    coupling[7, 2], coupling[16, 2] = 0.75, 0.25
    node = Routes(fixed_network(coupling), torch.ones(1, 4, 4)).tree(2)
    assert (node.type, node.site, node.layer, node.mass) == (2, None, 1, 1.0)
    first, second = node.children
    assert (first.type, first.site, first.box, first.coupling) == (0, (1, 3), (1, 3, 2, 4), 0.75)
    assert (second.type, second.site, second.box, second.children) == (1, (0, 0), (0, 0, 1, 1), ())
    assert first.share == first.mass == 0.75
    assert second.mass == 0.25


@pytest.mark.parametrize("name", NETWORKS)
def test_mass_is_kept(name):
    network = network_of(name)
    routes = Routes(network, torch.rand(network.image))
    for links in routes.links:
        for link in links:
            torch.testing.assert_close(link.shares.sum(-1), torch.ones(link.parents, dtype=torch.float64))
    for frame in range(len(routes.frames)):
        heats = torch.stack([routes.heat(k, frame) for k in range(3)])
        assert heats.shape[1:] == network.image[1:]
        assert heats.min() >= 0
        torch.testing.assert_close(heats.sum((1, 2)), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-9)
        first = routes.first_capsules(1, frame)
        torch.testing.assert_close(first.sum(), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_trees_multiply_shares(name):
    network = network_of(name)
    routes = Routes(network, torch.rand(network.image))

    def check(node, depth):
        shares = [child.share for child in node.children]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-9
        assert node.layer == depth
        assert bool(node.children) == (depth > 0)
        top, left, bottom, right = node.box
        assert 0 <= top < bottom <= network.image[1]
        assert 0 <= left < right <= network.image[2]
        for child in node.children:
            assert math.isclose(child.mass, node.mass * child.share)
            check(child, depth - 1)

    check(routes.tree(2), len(routes.links[-1]))


def test_dynamic_shares_by_loops():
    network = network_of("dynamic")
    image = torch.rand(network.image)
    with torch.no_grad(), backend("torch"):
        children = network.primary(network.stem(image[None]))
        layer = network.body.layers[0]
        output = layer(children.poses)
    flat = children.poses[0].permute(0, 2, 3, 1).reshape(-1, 4).double()
    votes = torch.einsum("ip,ipjd->ijd", flat, layer.weight.detach().double())
    coupling = output.coupling[0].double()
    link = Routes(network, image).links[-1][0]
    for j in range(3):
        mixture = sum(coupling[i, j] * votes[i, j] for i in range(len(votes)))
        towards = mixture / mixture.norm()
        parts = [max(0.0, float(coupling[i, j] * (votes[i, j] @ towards))) for i in range(len(votes))]
        expected = torch.tensor(parts, dtype=torch.float64) / sum(parts)
        torch.testing.assert_close(link.shares[j, 0, 0], expected, rtol=1e-4, atol=1e-8)


def test_em_shares_are_responsibility_times_activation():
    network = network_of("em")
    seen = []
    routing = network.body.layers[0].routing
    hook = routing.register_forward_hook(lambda module, args, output: seen.append((args[1], output.coupling)))
    image = torch.rand(network.image)
    link = Routes(network, image).links[-1][0]
    hook.remove()
    activations, coupling = seen[0]
    weights = (coupling * activations[..., None])[0].double()
    expected = (weights / weights.sum(2, keepdim=True)).permute(3, 0, 1, 2)
    torch.testing.assert_close(link.shares, expected, rtol=1e-5, atol=1e-9)


def test_windows_hand_down_to_their_own_children():
    network = network_of("inverted")
    link = Routes(network, torch.rand(network.image)).links[-1][0]
    (types, height, width), (above, rows, columns) = link.children, link.parents
    mass = torch.rand(above, rows, columns, dtype=torch.float64)
    expected = torch.zeros(types, height, width, dtype=torch.float64)
    for j in range(above):
        for y in range(rows):
            for x in range(columns):
                n = 0
                for c in range(types):
                    for dy in range(2):
                        for dx in range(2):
                            expected[c, y + dy, x + dx] += mass[j, y, x] * link.shares[j, y, x, n]
                            n += 1
    torch.testing.assert_close(link.down(mass), expected)


def test_windows_that_vote_as_one_add_up_to_their_vote():
    network = network_of("attention")
    with undisturbed(network, torch.device("cpu")), torch.no_grad():
        poses = network.primary(network.stem(torch.rand(1, *SMALL))).poses
        layer = network.body.layers[0]
        votes = layer.vote(poses)[0]  # [y, x, i, j, d]
        towards = torch.nn.functional.normalize(torch.randn(1, *votes.shape[:2], *votes.shape[3:]), dim=-1)
        coupling = torch.rand(1, *votes.shape[:4])
        parts, where, valid, _ = _taps(layer, poses, coupling, towards)
    expected = coupling[0] * torch.einsum("yxijd,yxjd->yxij", votes - layer.bias, towards[0])
    torch.testing.assert_close(parts.unflatten(2, (8, -1)).sum(3), expected, rtol=1e-4, atol=1e-5)
    last = 8 * 9 - 1  # the last type, lower right of its window; with stride 2 one row and column are padded after
    assert where[1, 1, last] == 7 * 36 + 4 * 6 + 4
    assert valid[1, 1, last]
    assert not valid[1, 2, last]


def test_frames_are_the_iterations():
    network = network_of("inverted")
    image = torch.rand(network.image)
    routes = Routes(network, image)
    assert routes.frames == ("iteration 1", "iteration 2", "iteration 3")
    for t in range(3):
        network.body.iterations = t + 1
        with undisturbed(network, image.device), torch.no_grad():
            coupling = network(image[None]).capsules.coupling[0]
        torch.testing.assert_close(routes.links[t][-1].coupling[:, 0, 0], coupling.mT, rtol=1e-4, atol=1e-6)


def test_fewer_iterations_within_a_layer():
    network = network_of("dynamic")
    image = torch.rand(network.image)
    routes = Routes(network, image)
    assert len(routes.frames) == 3
    torch.testing.assert_close(routes.links[0][0].coupling, torch.full_like(routes.links[0][0].coupling, 1 / 3))
    assert Routes(network_of("efficient"), torch.rand(SMALL)).frames == ("evenly", "routed")


STEMS = {
    "stride": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU()),
    "efficient": lambda: efficient_stem(1, (1, 1, 1, 2), 3),
    "pool": lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Dropout(0.5)),
    "resnet": lambda: nn.Sequential(*list(resnet_backbone(1, 8))[:2]),
}


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("site", [(0, 0), (1, 2), (-1, -1)])
def test_fields_by_gradient(name, site):
    torch.manual_seed(0)
    stem = STEMS[name]().eval()
    images = torch.randn(32, 1, 13, 13, requires_grad=True)
    features = stem(images)
    mass = torch.zeros(features.shape[2:])
    mass[site] = 1
    (features * mass * torch.randn_like(features)).sum().backward()
    reached = images.grad.abs().sum((0, 1)) > 0
    field = PixelField(stem, (1, 13, 13), tuple(mass.shape)).spread(mass)
    assert torch.equal(field > 0, reached)
    assert math.isclose(float(field.sum()), 1, rel_tol=1e-9)


@pytest.mark.parametrize("name", STEMS)
def test_one_channel_counts_as_many(name):
    stem = STEMS[name]().eval()
    pixels = torch.rand(1, 1, 13, 13, dtype=torch.float64)
    wide, narrow = counting_paths(stem)(pixels), counting_paths(stem, narrow=True)(pixels)
    assert narrow.shape[1] == 1
    torch.testing.assert_close(wide, narrow.expand_as(wide))


def test_a_stem_that_tells_channels_apart():
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PixelShuffle(2), nn.MaxPool2d(2, 1))
    field = PixelField(stem, (3, 8, 8), (11, 11)).spread(torch.full((11, 11), 1 / 121, dtype=torch.float64))
    assert math.isclose(float(field.sum()), 1, rel_tol=1e-9)


def test_even_mass_leaves_no_pattern():
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU())
    field = PixelField(stem, (1, 16, 16), (8, 8)).spread(torch.full((8, 8), 1 / 64))
    inner = field[2:-2, 2:-2]
    torch.testing.assert_close(inner, inner.mean().expand_as(inner), rtol=1e-9, atol=0)


def test_a_pixel_outside_the_heat_changes_nothing():
    network = network_of("sequential").double()
    image = torch.rand(network.image, dtype=torch.float64)
    routes = Routes(network.float(), image.float())
    node = routes.tree(0).children[0]
    layer = network.double().body.layers[0]

    def pose(image):
        with torch.no_grad(), backend("torch"):
            capsules = network.primary(network.stem(image[None]))
            return layer(capsules.poses, capsules.activations).poses[0, node.type][(slice(None), *node.site)]

    before = pose(image)
    outside = (node.heat == 0).nonzero().tolist()
    assert 10 < len(outside) < 140
    for y, x in outside[::7]:
        other = image.clone()
        other[0, y, x] += 1
        assert torch.equal(pose(other), before)
    y, x = (node.heat == node.heat.max()).nonzero()[0].tolist()
    other = image.clone()
    other[0, y, x] += 1
    assert not torch.equal(pose(other), before)


@pytest.mark.parametrize("padding", [0, 1, "same"])
@pytest.mark.parametrize("depthwise", [False, True])
def test_shares_within_a_window_by_loops(padding, depthwise):
    if depthwise and padding == 1:
        pytest.skip("padding is the same for both")
    torch.manual_seed(0)
    primary = PrimaryCaps(6, 2, 3, 3, 2, padding, depthwise=depthwise)
    change = torch.randn(6, 6, 7)
    poses = primary(change[None]).poses[0]
    pull, mass = torch.randn_like(poses), torch.rand(2, *poses.shape[2:])
    before = {0: 0, 1: 1, "same": 0}[padding]
    left = {0: 0, 1: 1, "same": 1}[padding]
    expected = torch.zeros(6, 7, dtype=torch.float64)
    weight = primary.conv.weight.detach()
    for c in range(2):
        for y in range(poses.shape[2]):
            for x in range(poses.shape[3]):
                parts = {}
                for ky in range(3):
                    for kx in range(3):
                        at = (2 * y + ky - before, 2 * x + kx - left)
                        if not (0 <= at[0] < 6 and 0 <= at[1] < 7):
                            continue
                        adds = 0.0
                        for d in range(3):
                            o = 3 * c + d
                            seen = [(o, 0)] if depthwise else [(f, f) for f in range(6)]
                            value = sum(float(weight[o, k, ky, kx] * change[(f, *at)]) for f, k in seen)
                            adds += value * float(pull[c, d, y, x])
                        parts[at] = max(0.0, adds)
                for at, part in parts.items():
                    expected[at] += float(mass[c, y, x]) * part / sum(parts.values())
    windows = WindowField(primary, change)
    found = windows.spread(mass, pull)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(windows.spread(mass, None).sum(), mass.sum().double())


def test_stretching_keeps_mass():
    mass = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(stretch(mass, (12, 10)).sum(), mass.sum())
    assert stretch(mass, (3, 4)) is mass


def test_the_network_is_left_as_it_was():
    network = network_of("attention").train()
    image = torch.rand(SMALL)
    state = torch.get_rng_state()
    coupling_map(network, image, 0)
    assert network.training
    assert network.body.layers[0].dropout.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not network.stem._forward_hooks
    assert all(not m._forward_pre_hooks for m in network.modules())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_bad_input():
    network = network_of("dynamic")
    with pytest.raises(ValueError, match=r"one image \[c, h, w\], got \[2, 1, 20, 20\]"):
        coupling_map(network, torch.rand(2, 1, 20, 20), 0)
    with pytest.raises(ValueError, match="there are 3 classes, from 0 on, and no class 3"):
        coupling_map(network, torch.rand(1, 20, 20), 3)
    plain = create_model("cnn_diverse_multimnist", image=(1, 13, 13))
    with pytest.raises(ValueError, match="no layer in which capsules vote"):
        coupling_map(plain, torch.rand(1, 13, 13), 0)


def test_a_routing_without_coupling_is_named():
    class Silent(nn.Module):
        def forward(self, votes, activations=None, parents=None):
            return Capsules(Votes.of(votes).total())

    network = fixed_network(torch.zeros(32, 3))
    network.body.layers[0].routing = Silent()
    with pytest.raises(ValueError, match=r"Silent of body\.layers\.0 keeps no coupling"), torch.no_grad():
        look(network, torch.rand(1, 1, 4, 4))
