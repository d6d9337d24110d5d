import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.helpers import assert_equal_with_gradients
from torchcaps.layers.pooled import FullWindowCaps, PooledConvCaps
from torchcaps.layers.same import conv_same, same_padding
from torchcaps.types import Capsules

SIZES = [(1, (5, 7)), (1, (4, 6)), (2, (5, 7)), (2, (4, 6)), (2, (6, 5)), (2, (1, 2))]


class Shares(nn.Module):
    """A stand-in that tells children apart: the vote of child i counts i + 1 times."""

    def __init__(self, in_caps, out_caps, out_dim):
        super().__init__()
        self.built_for = in_caps, out_caps, out_dim
        self.seen = None

    def forward(self, votes, activations=None, parents=None):
        self.seen = votes, activations, parents
        shares = torch.arange(1, votes.shape[-3] + 1).to(votes)
        coupling = shares[:, None].expand(votes.shape[:-1])
        poses = (coupling[..., None] * votes).sum(-3)
        return Capsules(poses, poses.sum(-1), coupling)


def layer(stride=1, dropout=0.0, **options):
    made = PooledConvCaps(3, 2, 4, 5, Shares, stride=stride, dropout=dropout, **options)
    nn.init.normal_(made.bias)
    return made


def loops(poses, weight, bias, stride):
    """Votes [b, h', w', i, j, d], one tap of one window at a time; what lies outside the map is 0."""
    batch, children, _, height, width = poses.shape
    _, parents, _, _, rows, columns = weight.shape
    before = [max((math.ceil(n / stride) - 1) * stride + k - n, 0) // 2 for n, k in ((height, rows), (width, columns))]
    sites = []
    for n in range(batch):
        for y in range(math.ceil(height / stride)):
            for x in range(math.ceil(width / stride)):
                for i in range(children):
                    for j in range(parents):
                        vote = bias[i, j]
                        for dy in range(rows):
                            for dx in range(columns):
                                py, px = y * stride + dy - before[0], x * stride + dx - before[1]
                                if 0 <= py < height and 0 <= px < width:
                                    vote = vote + weight[i, j, :, :, dy, dx] @ poses[n, i, :, py, px]
                        sites.append(vote)
    return torch.stack(sites).view(batch, math.ceil(height / stride), math.ceil(width / stride), *bias.shape)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_is_tensorflows(size, kernel, stride):
    """The rule as TensorFlow's manual states it."""
    rest = size % stride
    total = max(kernel - (stride if rest == 0 else rest), 0)
    before, after = same_padding(size, kernel, stride)
    assert (before, after) == (total // 2, total - total // 2)
    if kernel >= stride:
        assert (size + before + after - kernel) // stride + 1 == math.ceil(size / stride)


def test_an_even_side_halved_is_padded_after_only():
    assert same_padding(14, 3, 2) == (0, 1)
    assert same_padding(7, 3, 2) == (1, 1)
    assert same_padding(8, 3, 1) == (1, 1)


@pytest.mark.parametrize(("stride", "size"), SIZES)
def test_conv_same_sees_the_right_pixel(stride, size):
    """Index-coded: a kernel with a single 1 moves pixels, whose value says where they were."""
    height, width = size
    pixels = 100.0 * torch.arange(1, height + 1)[:, None] + torch.arange(1, width + 1)
    top, left = same_padding(height, 3, stride)[0], same_padding(width, 3, stride)[0]
    for dy in range(3):
        for dx in range(3):
            kernel = torch.zeros(1, 1, 3, 3)
            kernel[0, 0, dy, dx] = 1
            moved = conv_same(pixels[None, None], kernel, stride=stride)[0, 0]
            for y in range(moved.shape[0]):
                for x in range(moved.shape[1]):
                    py, px = y * stride + dy - top, x * stride + dx - left
                    inside = 0 <= py < height and 0 <= px < width
                    assert moved[y, x] == (100 * (py + 1) + px + 1 if inside else 0)


@pytest.mark.parametrize(("stride", "size"), SIZES)
def test_votes_equal_loops(stride, size):
    made = layer(stride).double()

    def ours(poses, weight, bias):
        capsules = functional_call(made, {"weight": weight, "bias": bias}, poses)
        return made.routing.seen[0], capsules.poses, capsules.activations

    def expected(poses, weight, bias):
        votes = loops(poses, weight, bias, stride)
        mixed = sum((i + 1) * votes[:, :, :, i] for i in range(3)).permute(0, 3, 4, 1, 2)
        return votes, mixed, mixed.sum(2)

    assert_equal_with_gradients(ours, expected, [torch.randn(2, 3, 2, *size), made.weight, made.bias])


@pytest.mark.parametrize(("stride", "size"), SIZES)
def test_every_pair_of_types_has_its_own_convolution(stride, size):
    made = layer(stride).double()
    poses = torch.randn(2, 3, 2, *size).double()
    made(poses)
    (left, right), (top, bottom) = same_padding(size[1], 3, stride), same_padding(size[0], 3, stride)
    for i in range(3):
        for j in range(4):
            window = F.pad(poses[:, i], (left, right, top, bottom))
            expected = F.conv2d(window, made.weight[i, j], made.bias[i, j], stride=stride)
            torch.testing.assert_close(made.routing.seen[0][..., i, j, :], expected.permute(0, 2, 3, 1))


def test_other_windows():
    made = layer(kernel_size=(1, 3)).double()
    poses = torch.randn(2, 3, 2, 4, 5).double()
    torch.testing.assert_close(made.vote(poses), loops(poses, made.weight, made.bias, 1))


def test_the_routing_is_built_for_capsule_types_and_gets_the_parents():
    made = layer()
    assert made.routing.built_for == (3, 4, 5)
    parents = torch.randn(2, 4, 5, 6, 7)
    capsules = made(torch.randn(2, 3, 2, 6, 7), torch.rand(2, 3, 6, 7), parents)
    _, activations, handed_on = made.routing.seen
    assert activations is None
    torch.testing.assert_close(handed_on[1, 2, 3], parents[1, :, :, 2, 3])
    assert capsules.coupling.shape == (2, 6, 7, 3, 4)
    torch.testing.assert_close(capsules.activations, capsules.poses.sum(2))


def test_memory_format_does_not_matter():
    made = layer(stride=2)
    poses = torch.randn(2, 3, 2, 6, 6)
    last = poses.flatten(1, 2).contiguous(memory_format=torch.channels_last).unflatten(1, (3, 2))
    torch.testing.assert_close(made(last).poses, made(poses).poses)


def test_full_window_equals_a_valid_convolution_for_each_pair():
    made = FullWindowCaps(3, 2, 4, 5, Shares, size=(4, 7), dropout=0).double()
    nn.init.normal_(made.bias)

    def ours(poses, weight, bias):
        capsules = functional_call(made, {"weight": weight, "bias": bias}, poses)
        return made.routing.seen[0], capsules.poses

    def expected(poses, weight, bias):
        pairs = [[F.conv2d(poses[:, i], weight[i, j], bias[i, j])[..., 0, 0] for j in range(4)] for i in range(3)]
        votes = torch.stack([torch.stack(row, 1) for row in pairs], 1)
        return votes, sum((i + 1) * votes[:, i] for i in range(3))

    assert_equal_with_gradients(ours, expected, [torch.randn(2, 3, 2, 4, 7), made.weight, made.bias])


def test_full_window_refuses_another_map():
    made = FullWindowCaps(3, 2, 4, 5, Shares, size=(4, 7))
    with pytest.raises(ValueError, match="as large as the map, 4 x 7, and got a map of 7 x 4"):
        made(torch.randn(1, 3, 2, 7, 4))


def test_dropout_falls_on_the_children_in_training_only():
    made = PooledConvCaps(3, 2, 3, 2, Shares, kernel_size=1, dropout=0.5)
    with torch.no_grad():
        made.weight.copy_(torch.eye(2)[None, None, :, :, None, None].expand_as(made.weight))
    poses = torch.ones(4, 3, 2, 20, 20)
    made(poses)
    votes = made.routing.seen[0]
    assert set(votes.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (votes == 0).float().mean() < 0.55
    assert (votes == votes[..., :1, :]).all()  # one child tells every parent the same
    assert (votes[..., 0] != votes[..., 1]).any()  # its entries fall one by one
    made.eval()(poses)
    assert (made.routing.seen[0] == 1).all()


def test_full_window_drops_children_too():
    made = FullWindowCaps(1, 1, 1, 1, Shares, size=(20, 20), dropout=0.5)
    nn.init.constant_(made.weight, 1 / 400)
    poses = torch.ones(64, 1, 1, 20, 20)
    votes = made(poses).poses
    assert votes.std() > 0.02
    assert 0.95 < votes.mean() < 1.05
    torch.testing.assert_close(made.eval()(poses).poses, torch.ones(64, 1, 1))


@pytest.mark.parametrize(("window", "ins", "outs"), [(3, 9 * 16, 9 * 32), ((7, 5), 35 * 16, 35 * 32)], ids=str)
def test_start_is_that_of_keras(window, ins, outs):
    """As a kernel for each pair of types, or as one for all, in which Keras counts the outs of all."""
    for whole, pairs in ((False, 1), (True, 2 * 3)):
        made = PooledConvCaps(2, 16, 3, 32, Shares, kernel_size=window, whole=whole)
        limit = math.sqrt(6 / (ins + pairs * outs))
        assert 0.99 * limit < made.weight.abs().max() <= limit
        assert not made.bias.any()


def test_a_full_window_starts_as_one_kernel_too():
    made = FullWindowCaps(2, 16, 3, 32, Shares, size=(4, 5), whole=True)
    limit = math.sqrt(6 / (20 * 16 + 2 * 3 * 20 * 32))
    assert 0.99 * limit < made.weight.abs().max() <= limit


def test_compiles_whole():
    made = layer(stride=2)
    poses = torch.randn(2, 3, 2, 6, 5)
    torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="eager")(poses).poses, made(poses).poses)
