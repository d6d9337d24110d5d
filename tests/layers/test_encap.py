from functools import partial

import pytest
import torch
import torch.nn.functional as F

from torchcaps.layers.encap import CapConv, CapDeconv, CapFC
from torchcaps.ops import grouped
from torchcaps.routing.master_aide import MasterAide, master_aide

CAPS, P, D = 3, 2, 4


@pytest.fixture(autouse=True, params=["by group", "all at once"])
def form(request, monkeypatch):
    """Every test runs in both forms of the grouped convolutions."""
    monkeypatch.setattr(grouped, "spreads", lambda x, channels: request.param == "all at once")


def squash_by_hand(s):
    """[b, c, d, h, w]"""
    n = s.square().sum(dim=2, keepdim=True).sqrt()
    return n**2 / (1 + n**2) * s / (n + 1e-300)


def finish(norm, features):
    """Batch norm in eval mode, ReLU, squash, from the weights of `norm`; [b, (c d), h, w] -> [b, c, d, h, w]"""
    shaped = (features - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + norm.eps).sqrt()
    shaped = (shaped * norm.weight[:, None, None] + norm.bias[:, None, None]).clamp(min=0)
    return squash_by_hand(shaped.reshape(len(features), CAPS, -1, *features.shape[2:]))


def per_capsule(poses, conv, stride):
    """A convolution for each capsule, one after the other; [b, c, p, h, w] -> [b, (c d), h, w]"""
    weight, bias = conv.weight.chunk(poses.shape[1]), conv.bias.chunk(poses.shape[1])
    padding = conv.weight.shape[-1] // 2
    return torch.cat(
        [F.conv2d(poses[:, g], weight[g], bias[g], stride, padding) for g in range(poses.shape[1])],
        dim=1,
    )


def build(layer):
    """In float64 and eval mode, with statistics and biases that are not 0 and 1."""
    layer = layer.double().eval()
    with torch.no_grad():
        for module in layer.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                for t in (module.running_mean, module.bias):
                    t.normal_(std=0.3)
                for t in (module.running_var, module.weight):
                    t.uniform_(0.5, 2)
    return layer


def poses(h=5, w=7, dim=P, batch=2):
    return torch.rand(batch, CAPS, dim, h, w, dtype=torch.float64)


@pytest.mark.parametrize(("kernel_size", "stride"), [(3, 1), (3, 2), (1, 1)])
def test_master_is_one_convolution_for_each_capsule(kernel_size, stride):
    layer, u = build(CapConv(CAPS, P, D, kernel_size, stride)), poses()
    capsules = layer(u)
    torch.testing.assert_close(capsules.poses, finish(layer.activation.norm, per_capsule(u, layer.master, stride)))
    assert capsules.poses.shape == (2, CAPS, D, -(-5 // stride), -(-7 // stride))
    assert capsules.coupling is None


def test_skip_and_shortcut_are_added_before_the_batch_norm():
    layer, u = build(CapConv(CAPS, P, D, 3, 2, skip=True)), poses()
    shortcut = torch.randn(2, CAPS, D, 3, 4, dtype=torch.float64)
    skip = F.conv2d(u.reshape(2, -1, 5, 7), layer.skip.weight, layer.skip.bias, 2, 1)
    core = per_capsule(u, layer.master, 2) + skip
    torch.testing.assert_close(layer(u).poses, finish(layer.activation.norm, core))
    core = core + shortcut.reshape(2, -1, 3, 4)
    torch.testing.assert_close(layer(u, shortcut=shortcut).poses, finish(layer.activation.norm, core))


def coefficients(version, gate, layer, u, v1, v2, stride):
    m1 = layer.routing.m1
    if version == "v1":
        m = per_capsule(v1, m1, 1)
        return m, 1 - m
    if version == "v2":
        m = per_capsule(u, m1, stride)
        return m, 1 - m
    if version == "v4":
        return per_capsule(v1, m1, 1), per_capsule(v2, layer.routing.m2, 1)
    if gate == "cross":
        return per_capsule(v2, m1, 1), per_capsule(v1, layer.routing.m2, 1)
    both = torch.cat([v1, v2], dim=2)
    return per_capsule(both, m1, 1), per_capsule(both, layer.routing.m2, 1)


@pytest.mark.parametrize(("kernel_size", "stride", "p"), [(3, 2, P), (1, 1, D)], ids=["type1", "type2"])
@pytest.mark.parametrize("aide", ["full", "complement"])
@pytest.mark.parametrize(
    ("version", "gate", "reach"),
    [("v1", "cross", 0), ("v2", "cross", 0), ("v3", "cross", 4), ("v3", "both", 4), ("v4", "cross", 4)],
)
def test_master_and_aide_by_hand(version, gate, reach, aide, kernel_size, stride, p):
    layer = build(
        CapConv(CAPS, p, D, kernel_size, stride, partial(MasterAide, version=version, gate=gate), aide, skip=True)
    )
    u = poses(dim=p)
    weight = layer.aide[0].weight.clone()
    assert weight.shape == (CAPS * D, CAPS * p, kernel_size + reach, kernel_size + reach)
    if aide == "complement":
        for g in range(CAPS):
            weight[g * D : (g + 1) * D, g * p : (g + 1) * p] = 0
    features = u.reshape(2, -1, 5, 7)
    v1 = finish(layer.master[1].norm, per_capsule(u, layer.master[0], stride))
    v2 = finish(
        layer.aide[1].norm,
        F.conv2d(features, weight, layer.aide[0].bias, stride, (kernel_size + reach) // 2),
    )
    m1, m2 = coefficients(version, gate, layer, u, v1, v2, stride)
    mixture = torch.stack([m1[:, g, None] * v1[:, g] + m2[:, g, None] * v2[:, g] for g in range(CAPS)], dim=1)
    skip = F.conv2d(features, layer.skip.weight, layer.skip.bias, stride, 1)
    capsules = layer(u)
    torch.testing.assert_close(capsules.poses, finish(layer.activation.norm, mixture.flatten(1, 2) + skip))
    torch.testing.assert_close(capsules.coupling, torch.stack([m1, m2], dim=1))


@pytest.mark.parametrize("aide", ["full", "complement"])
def test_complement_sees_nothing_of_its_own_child(aide):
    layer = build(CapConv(CAPS, P, D, 3, 1, MasterAide, aide))
    for g in range(CAPS):
        u = poses().requires_grad_()
        layer.aide(u.flatten(1, 2))[:, g].sum().backward()
        seen = u.grad.abs().amax(dim=(0, 2, 3, 4))
        assert (seen > 0).tolist() == [aide == "full" or k != g for k in range(CAPS)]


def test_gate_by_hand_and_its_gradient():
    master, aide = poses(2, 3), poses(2, 3)
    m1, m2 = torch.randn(2, 2, CAPS, 2, 3, dtype=torch.float64)
    mixed = master_aide(master, aide, m1, m2).poses
    for b, c, d, y, x in [(0, 0, 0, 0, 0), (1, 2, 1, 1, 2), (0, 1, 1, 1, 0)]:
        expected = m1[b, c, y, x] * master[b, c, d, y, x] + m2[b, c, y, x] * aide[b, c, d, y, x]
        torch.testing.assert_close(mixed[b, c, d, y, x], expected)
    torch.testing.assert_close(master_aide(master, aide, m1).poses, master_aide(master, aide, m1, 1 - m1).poses)
    inputs = [x.detach().requires_grad_() for x in (master, aide, m1, m2)]
    assert torch.autograd.gradcheck(lambda *x: master_aide(*x).poses, inputs)


def test_gradcheck_through_the_layer_with_dead_capsules():
    layer = build(CapConv(CAPS, P, D, 1, 1, MasterAide))
    with torch.no_grad():
        layer.activation.norm.bias[:D] = -9  # ReLU leaves nothing of the first capsule
    u = poses(2, 2, batch=1).requires_grad_()
    assert not layer(u).poses[:, 0].any()
    assert torch.autograd.gradcheck(lambda u: layer(u).poses, u)


def test_cap_fc_is_a_linear_map_for_each_dimension():
    layer, u = CapFC(CAPS * 2 * 3, 5, P).double(), poses(2, 3)
    s = torch.zeros(2, 5, P, dtype=torch.float64)
    for j in range(5):
        for d in range(P):
            i = 0
            for c in range(CAPS):
                for y in range(2):
                    for x in range(3):
                        s[:, j, d] += layer.weight[d, i, j].detach() * u[:, c, d, y, x]
                        i += 1
    n = s.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(layer(u).poses, n / (1 + n**2) * s)
    flat = u.permute(0, 1, 3, 4, 2).reshape(2, -1, P)
    torch.testing.assert_close(layer(flat).poses, layer(u).poses)


def test_cap_fc_starts_within_its_bound():
    weight = CapFC(512, 10, 16).weight
    assert weight.abs().max() <= 512**-0.5
    assert weight.std().item() == pytest.approx((3 * 512) ** -0.5, rel=0.02)


@pytest.mark.parametrize("size", [(10, 14), (9, 13), (9, 14), None])
def test_cap_deconv_undoes_the_stride_for_each_capsule(size):
    layer, v = build(CapDeconv(CAPS, D, P, stride=2)), poses(dim=D)
    h, w = size or (10, 14)
    weight, bias = layer.conv.weight.chunk(CAPS), layer.conv.bias.chunk(CAPS)
    features = torch.cat(
        [F.conv_transpose2d(v[:, g], weight[g], bias[g], 2, 1, output_padding=(h - 9, w - 13)) for g in range(CAPS)],
        dim=1,
    )
    u = layer(v, size=size).poses
    assert u.shape == (2, CAPS, P, h, w)
    torch.testing.assert_close(u, finish(layer.activation.norm, features))


def test_cap_deconv_keeps_the_size_without_stride():
    assert CapDeconv(CAPS, D, P)(poses(dim=D).float()).poses.shape == (2, CAPS, P, 5, 7)


def test_bad_options():
    with pytest.raises(ValueError, match="aide must be full or complement, got 'none'"):
        CapConv(CAPS, P, D, routing=MasterAide, aide="none")
    with pytest.raises(ValueError, match="version must be one of v1, v2, v3, v4, got '3'"):
        MasterAide(CAPS, P, D, version="3")
    with pytest.raises(ValueError, match="gate must be cross or both, got 'own'"):
        MasterAide(CAPS, P, D, gate="own")
    with pytest.raises(ValueError, match="gate='both' is a form of v3, got version 'v4'"):
        MasterAide(CAPS, P, D, version="v4", gate="both")
