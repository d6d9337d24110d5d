import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_equal_with_gradients
from torchcaps.routing.attention import (
    AttentionRouting,
    CapsuleActivation,
    attention_routing,
    capsule_activation,
    capsule_map,
)

FORMS = {"all": lambda i, j, d: torch.randn(i, i, j, d), "own": lambda i, j, d: torch.randn(i, j, d)}


def loops(votes, kernel):
    """Eq. 6 to 8 for one list of sites: votes [n, i, j, d], kernel [m, i, j, d] or [i, j, d]."""
    sites, children, parents, dim = votes.shape
    poses, coupling = [], []
    for n in range(sites):
        for j in range(parents):
            logits = []
            for i in range(children):
                heard = range(children) if kernel.dim() == 4 else [i]
                form = [kernel[m, i, j] if kernel.dim() == 4 else kernel[i, j] for m in heard]
                logits.append(
                    sum(w[d] * votes[n, m, j, d] for m, w in zip(heard, form, strict=True) for d in range(dim))
                )
            shares = [torch.exp(b) for b in logits]
            c = [share / sum(shares) for share in shares]
            coupling.append(torch.stack(c))
            poses.append(sum(c[i] * votes[n, i, j] for i in range(children)))
    return (
        torch.stack(poses).view(sites, parents, dim),
        torch.stack(coupling).view(sites, parents, children).transpose(1, 2),
    )


def activation_loops(poses, weight, bias):
    rows = []
    for pose in poses.flatten(0, -3):
        for j in range(len(weight)):
            for d in range(weight.shape[2]):
                affine = sum(pose[j, p] * weight[j, p, d] for p in range(weight.shape[1])) + bias[j, d]
                rows.append((torch.exp(affine) - torch.exp(-affine)) / (torch.exp(affine) + torch.exp(-affine)))
    return torch.stack(rows).view(*poses.shape[:-1], weight.shape[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("i", "j", "d"), [(7, 3, 5), (1, 2, 3), (2, 1, 1)])
def test_equals_loops(form, i, j, d):
    votes, kernel = torch.randn(3, i, j, d), FORMS[form](i, j, d)
    assert_equal_with_gradients(attention_routing, loops, [votes, kernel])


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    votes, kernel = torch.randn(2, 3, 2, 3).double(), FORMS[form](3, 2, 3).double()
    torch.autograd.gradcheck(
        lambda v, k: attention_routing(v, k)[::2], (votes.requires_grad_(), kernel.requires_grad_())
    )


def test_all_is_the_3d_convolution_of_the_released_code():
    """A convolution over (h, w, d) with N ins and N outs for each parent, kernel (1, 1, D), no bias."""
    n, j, d = 5, 3, 4
    votes, kernel = torch.randn(2, 3, 6, n, j, d).double(), torch.randn(n, n, j, d).double()  # [b, h, w, i, j, d]
    coupling = attention_routing(votes, kernel).coupling
    for parent in range(j):
        volume = votes[..., parent, :].permute(0, 3, 1, 2, 4)  # [b, m, h, w, d]
        logits = F.conv3d(volume, kernel[:, :, parent].transpose(0, 1)[:, :, None, None])  # [b, i, h, w, 1]
        torch.testing.assert_close(coupling[..., parent], logits[..., 0].softmax(1).permute(0, 2, 3, 1))


@pytest.mark.parametrize("form", FORMS)
def test_children_compete_and_parents_do_not(form):
    coupling = attention_routing(torch.randn(2, 3, 5, 4, 6), FORMS[form](5, 4, 6)).coupling
    assert coupling.shape == (2, 3, 5, 4)
    torch.testing.assert_close(coupling.sum(-2), torch.ones(2, 3, 4))
    assert (coupling.sum(-1) - 1).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_leading_dimensions_are_free(form):
    votes, kernel = torch.randn(2, 3, 4, 5, 3, 2), FORMS[form](5, 3, 2)
    many = attention_routing(votes, kernel)
    one = attention_routing(votes[1, 2, 3], kernel)
    torch.testing.assert_close(many.poses[1, 2, 3], one.poses)
    torch.testing.assert_close(many.coupling[1, 2, 3], one.coupling)


def test_own_ignores_other_children_before_the_softmax():
    votes = torch.randn(4, 3, 5).double()
    kernel = torch.randn(4, 3, 5).double()
    before = attention_routing(votes, kernel).coupling
    votes[2] += 1
    after = attention_routing(votes, kernel).coupling
    ratio = (after / before)[[0, 1, 3]]  # the others' shares shrink by one factor
    torch.testing.assert_close(ratio, ratio[:1].expand(3, -1))


def test_capsule_activation_equals_loops():
    poses, weight, bias = torch.randn(2, 3, 4, 5), torch.randn(4, 5, 3), torch.randn(4, 3)
    assert_equal_with_gradients(capsule_activation, activation_loops, [poses, weight, bias])
    inputs = [x.double().requires_grad_() for x in (poses, weight, bias)]
    torch.autograd.gradcheck(capsule_activation, inputs)


def test_capsule_activation_is_a_grouped_1x1_convolution():
    activation = CapsuleActivation(4, 3).double()
    torch.nn.init.normal_(activation.bias)
    poses = torch.randn(2, 4, 3, 5, 6).double()  # [b, c, d, h, w]
    weight = activation.weight.transpose(1, 2).flatten(0, 1)[..., None, None]
    expected = F.conv2d(poses.flatten(1, 2), weight, activation.bias.flatten(), groups=4).tanh()
    ours = activation(poses.permute(0, 3, 4, 1, 2)).permute(0, 3, 4, 1, 2)
    torch.testing.assert_close(ours.flatten(1, 2), expected)


@pytest.mark.parametrize("attention", FORMS)
def test_module_routes_then_activates(attention):
    routing = AttentionRouting(5, 3, 4, attention=attention).double()
    votes = torch.randn(2, 5, 3, 4).double()
    capsules = routing(votes)
    mixed = attention_routing(votes, routing.kernel)
    expected = capsule_activation(mixed.poses, routing.activation.weight, routing.activation.bias)
    torch.testing.assert_close(capsules.poses, expected)
    torch.testing.assert_close(capsules.coupling, mixed.coupling)
    assert capsules.activations is None


def test_without_tanh():
    routing, open_ended = AttentionRouting(5, 3, 4), AttentionRouting(5, 3, 4, tanh=False)
    open_ended.load_state_dict(routing.state_dict())
    votes = 5 * torch.randn(2, 5, 3, 4)
    assert open_ended(votes).poses.abs().max() > 1
    torch.testing.assert_close(open_ended(votes).poses.tanh(), routing(votes).poses)
    torch.testing.assert_close(
        open_ended.activation(votes[:, 0]),
        capsule_map(votes[:, 0], routing.activation.weight, routing.activation.bias),
    )


def test_sizes_and_start_are_those_of_keras():
    for attention, shape, limit in (
        ("all", (8, 8, 10, 32), math.sqrt(6 / 512)),
        ("own", (8, 10, 32), math.sqrt(6 / 64)),
    ):
        kernel = AttentionRouting(8, 10, 32, attention=attention).kernel
        assert kernel.shape == shape
        assert 0.99 * limit < kernel.abs().max() <= limit
        torch.testing.assert_close(kernel.std().item(), limit / math.sqrt(3), rtol=0.05, atol=0)
    activation = CapsuleActivation(8, 32)
    assert 0.99 * math.sqrt(6 / 64) < activation.weight.abs().max() <= math.sqrt(6 / 64)
    assert not activation.bias.any()


def test_weights_can_start_as_one_kernel_for_all_parents():
    """Keras counts the last two axes of [1, 1, d, i, (j i)] and [1, 1, p, (j d)], times those before them."""
    routing = AttentionRouting(8, 10, 32, whole=True)
    for weight, ins, outs in ((routing.kernel, 32 * 8, 32 * 80), (routing.activation.weight, 32, 320)):
        limit = math.sqrt(6 / (ins + outs))
        assert 0.99 * limit < weight.abs().max() <= limit


@pytest.mark.parametrize("attention", FORMS)
def test_zero_votes_are_shared_evenly_with_finite_gradients(attention):
    routing = AttentionRouting(6, 3, 4, attention=attention)
    votes = torch.zeros(2, 6, 3, 4, requires_grad=True)
    capsules = routing(votes)
    torch.testing.assert_close(capsules.coupling, torch.full((2, 6, 3), 1 / 6))
    capsules.poses.sum().backward()
    assert votes.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in routing.parameters())


def test_huge_votes_stay_finite():
    routing = AttentionRouting(6, 3, 4)
    votes = (1e4 * torch.randn(2, 6, 3, 4)).requires_grad_()
    capsules = routing(votes)
    capsules.poses.sum().backward()
    assert capsules.poses.isfinite().all()
    assert votes.grad.isfinite().all()


def test_autocast_leaves_routing_in_float32():
    routing = AttentionRouting(6, 3, 4)
    votes = 20 * torch.randn(2, 6, 3, 4)
    expected = routing(votes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = routing(votes)
    assert ours.poses.dtype == torch.float32
    torch.testing.assert_close(ours.poses, expected.poses, rtol=0, atol=0)
    torch.testing.assert_close(ours.coupling, expected.coupling, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_precisions(dtype):
    routing = AttentionRouting(6, 3, 4).to(dtype)
    capsules = routing(torch.randn(2, 6, 3, 4, dtype=dtype))
    assert capsules.poses.dtype == capsules.coupling.dtype == dtype


def test_compiles_whole():
    routing = AttentionRouting(6, 3, 4)
    votes = torch.randn(2, 6, 3, 4)
    torch.testing.assert_close(torch.compile(routing, fullgraph=True, backend="eager")(votes)[0], routing(votes)[0])


def test_more_than_64_children_are_refused():
    AttentionRouting(64, 2, 3)
    with pytest.raises(ValueError, match="at most 64 children, got 65"):
        AttentionRouting(65, 2, 3)


def test_unknown_attention_is_refused():
    with pytest.raises(ValueError, match="attention must be all or own, got 'vector'"):
        AttentionRouting(8, 2, 3, attention="vector")
