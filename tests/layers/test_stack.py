"""Concurrent routing against Tsai's procedure 2 by hand."""

from functools import partial

import pytest
import torch

from tests import oracle
from tests.helpers import assert_equal_with_gradients
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.linear import LinearCaps
from torchcaps.layers.stack import CapsuleStack, Residual
from torchcaps.routing.dynamic import DynamicRouting
from torchcaps.routing.em import EMRouting
from torchcaps.routing.inverted_attention import InvertedAttentionRouting


def build(iterations=1, steps=1):
    """Two convolutional layers and the class capsules: 6 x 6 -> 3 x 3 (kernel 2) -> 2 x 2 (kernel 2) -> 3 classes."""
    torch.manual_seed(0)
    routing = partial(InvertedAttentionRouting, iterations=steps)
    stack = CapsuleStack(
        ConvCaps(2, 4, 2, 4, 2, 2, routing, pose="matrix"),
        ConvCaps(2, 4, 2, 4, 2, 1, routing, pose="matrix"),
        LinearCaps(2 * 2 * 2, 4, 3, 4, routing, pose="matrix"),
        iterations=iterations,
    ).double()
    for p in stack.parameters():
        torch.nn.init.normal_(p)
    return stack


def steps_by_hand(stack, weights):
    """For each layer, procedure 1 as loops: (children, its own poses) -> its poses."""

    def norm(layer):
        return lambda x: oracle.layer_norm(x, layer.routing.norm.weight, layer.routing.norm.bias)

    def conv(layer, weight, stride, poses, parents):
        votes = oracle.window_votes(poses, weight, 2, stride)
        above = None if parents is None else parents.permute(0, 3, 4, 1, 2).flatten(0, 2)
        poses, _ = oracle.inverted_attention(votes.flatten(0, 2), above, norm=norm(layer))
        return poses.unflatten(0, votes.shape[:3]).permute(0, 3, 4, 1, 2)

    def linear(layer, weight, poses, parents):
        children = [poses[:, c, :, y, x] for c in range(2) for y in range(2) for x in range(2)]
        votes = oracle.linear_votes(torch.stack(children, 1), weight)
        return oracle.inverted_attention(votes, parents, norm=norm(layer))[0]

    first, second, last = stack.layers
    return [
        partial(conv, first, weights[0], 2),
        partial(conv, second, weights[1], 1),
        partial(linear, last, weights[2]),
    ]


def weights_of(stack):
    return [layer.weight.detach() for layer in stack.layers]


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_concurrent_routing_equals_procedure_2(iterations):
    stack = build(iterations)
    stack.requires_grad_(False)

    def ours(poses, *weights):
        parameters = {f"layers.{n}.weight": weight for n, weight in enumerate(weights)}
        return torch.func.functional_call(stack, parameters, (poses,)).poses

    def by_hand(poses, *weights):
        return oracle.concurrent_routing(steps_by_hand(stack, weights), poses, iterations)[-1]

    assert_equal_with_gradients(ours, by_hand, [torch.randn(2, 2, 4, 6, 6), *weights_of(stack)])


def test_one_concurrent_step_is_a_jacobi_step():
    """The class capsules see the middle capsules of the iteration before, not the new ones."""
    poses = torch.randn(2, 2, 4, 6, 6).double()
    stack = build(iterations=2)
    below, middle, above = steps_by_hand(stack, weights_of(stack))
    p1 = below(poses, None)
    p2 = middle(p1, None)
    p3 = above(p2, None)
    jacobi = above(p2, p3)
    in_order = above(middle(below(poses, p1), p2), p3)
    concurrent = stack(poses).poses
    torch.testing.assert_close(concurrent, jacobi)
    assert (concurrent - in_order).abs().max() > 1e-2


def test_concurrent_differs_from_sequential():
    poses = torch.randn(2, 2, 4, 6, 6).double()
    sequential, concurrent = build(steps=2)(poses).poses, build(iterations=2)(poses).poses
    assert (sequential - concurrent).abs().max() > 1e-2


@pytest.mark.parametrize("steps", [1, 2])
def test_one_iteration_is_the_layers_in_sequence(steps):
    stack = build(steps=steps)
    poses = torch.randn(2, 2, 4, 6, 6).double()
    ours = stack(poses)
    for layer in stack.layers:
        capsules = layer(poses)
        poses = capsules.poses
    assert torch.equal(ours.poses, poses)
    assert torch.equal(ours.coupling, capsules.coupling)


def test_sequential_steps_by_hand():
    poses = torch.randn(1, 2, 4, 6, 6).double()
    stack = build(steps=2)
    expected = poses
    for step in steps_by_hand(stack, weights_of(stack)):
        expected = step(expected, step(expected, None))
    torch.testing.assert_close(stack(poses).poses, expected)


def test_activations_pass_from_layer_to_layer():
    stack = CapsuleStack(
        ConvCaps(2, 4, 3, 4, 3, 2, EMRouting, pose="matrix"), LinearCaps(3 * 2 * 2, 4, 2, 4, EMRouting, pose="matrix")
    )
    poses, activations = torch.randn(2, 2, 4, 5, 5), torch.rand(2, 2, 5, 5)
    first, last = stack.layers
    below = first(poses, activations)
    assert torch.equal(stack(poses, activations).activations, last(below.poses, below.activations).activations)
    assert not torch.equal(stack(poses, activations).activations, stack(poses).activations)


def test_residual():
    layer = LinearCaps(3, 4, 3, 4, DynamicRouting)
    poses = torch.randn(2, 3, 4)
    torch.testing.assert_close(Residual(layer)(poses).poses, poses + layer(poses).poses)


@pytest.mark.parametrize("iterations", [0, -1])
def test_no_iterations_is_refused(iterations):
    with pytest.raises(ValueError, match=f"iterations.*{iterations}"):
        CapsuleStack(LinearCaps(3, 4, 3, 4, DynamicRouting), iterations=iterations)


@pytest.mark.parametrize("iterations", [2, 3, 4])
def test_what_no_longer_reaches_the_top_is_left_out(iterations):
    stack, poses = build(iterations), torch.randn(2, 2, 4, 6, 6).double()
    calls = [0, 0, 0]
    for number, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    short = stack(poses).poses
    assert calls == [1 + max(0, iterations - 3), 1 + max(0, iterations - 2), iterations]
    stack.in_full = True
    torch.testing.assert_close(stack(poses).poses, short, rtol=0, atol=0)
