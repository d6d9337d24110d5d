import pytest
import torch
import torch.nn.functional as F

from torchcaps.layers.encap import CapDeconv
from torchcaps.layers.feedback import Feedback, FeedbackUnit, Path
from torchcaps.losses import kl_divergence, sinkhorn_divergence

CAPS = 4


def unit(**options):
    torch.manual_seed(1)
    return FeedbackUnit(16, 8, 2, caps=CAPS, **options).double()


def features(batch=6, h=8, w=6):
    torch.manual_seed(2)
    return (
        torch.rand(batch, 16, h // 2, w // 2, dtype=torch.float64),
        torch.rand(batch, 8, h, w, dtype=torch.float64),
    )


def norm_relu(x, norm):
    mean, var = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), unbiased=False, keepdim=True)
    return F.relu((x - mean) / (var + norm.eps).sqrt())


def extract_by_hand(f, x):
    x = norm_relu(F.conv2d(x, f[0].weight, f[0].bias, 2, 1), f[1])
    return norm_relu(F.conv2d(x, f[3].weight, f[3].bias, 2, 1), f[4]).reshape(len(x), -1)


@pytest.mark.parametrize("generator", ["capsule", "vanilla"])
def test_unit_by_hand(generator):
    g, (v, u) = unit(generator=generator), features()
    conv = g.generator.conv
    assert conv.groups == (CAPS if generator == "capsule" else 1)
    recovered = F.conv_transpose2d(v, conv.weight, conv.bias, 2, 1, output_padding=1, groups=conv.groups)
    if generator == "capsule":
        recovered = norm_relu(recovered, g.generator.activation.norm).unflatten(1, (CAPS, -1))
        n = recovered.norm(dim=2, keepdim=True)
        recovered = (recovered * n / (1 + n**2)).flatten(1, 2)
    else:
        recovered = norm_relu(recovered, g.generator.norm)
    x, y = extract_by_hand(g.extractor, recovered), extract_by_hand(g.extractor, u)
    assert x.shape == (6, 2 * 2)
    torch.testing.assert_close(g(v, u), sinkhorn_divergence(x, y))


def test_kl_compares_the_lower_with_the_recovered():
    g, (v, u) = unit(divergence="kl"), features()
    recovered = g.generator(v.unflatten(1, (CAPS, -1)), size=(8, 6)).poses.flatten(1, 2)
    x, y = extract_by_hand(g.extractor, u), extract_by_hand(g.extractor, recovered)
    expected = (x.softmax(1) * (x.softmax(1).log() - y.softmax(1).log())).sum() / 6
    torch.testing.assert_close(g(v, u), expected)
    torch.testing.assert_close(kl_divergence(x, y), expected)


SWITCHES = [
    {"divergence": "kl"},
    {"bias_fix": False},
    {"extractor": False},
    {"generator": "vanilla"},
    {"cost": "l2"},
    {"epsilon": 0.1},
    {"iterations": 1, "epsilon": 0.1},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_each_switch_of_table_3_changes_the_penalty(switch):
    v, u = features()
    standard = unit(epsilon=0.1) if "iterations" in switch else unit()
    assert (unit(**switch)(v, u) - standard(v, u)).abs() > 1e-9
    assert unit(**switch)(v, u).isfinite()


def test_gradient_through_the_plan_changes_the_gradient_alone():
    v, u = features()
    v.requires_grad_()
    detached, through = unit(epsilon=0.1)(v, u), unit(epsilon=0.1, through_plan=True)(v, u)
    torch.testing.assert_close(detached, through)
    (one,), (two,) = torch.autograd.grad(detached, v), torch.autograd.grad(through, v)
    assert not torch.allclose(one, two, rtol=1e-3)


def test_without_extractor_the_raw_features_are_compared():
    g, (v, u) = unit(extractor=False), features()
    recovered = g.generator(v.unflatten(1, (CAPS, -1)), size=(8, 6)).poses
    torch.testing.assert_close(g(v, u), sinkhorn_divergence(recovered.flatten(1), u.flatten(1)))
    assert not list(g.extractor.parameters())


def test_gradients_reach_both_ends_and_every_parameter():
    g, (v, u) = unit(), features()
    v.requires_grad_(), u.requires_grad_()
    g(v, u).backward()
    assert v.grad.abs().sum() > 0
    assert u.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in g.parameters())


@pytest.mark.parametrize("size", [(8, 6), (7, 5)])
def test_odd_sizes_and_capsules(size):
    g = unit()
    v = torch.rand(3, CAPS, 4, -(-size[0] // 2), -(-size[1] // 2), dtype=torch.float64)
    u = torch.rand(3, CAPS, 2, *size, dtype=torch.float64)
    torch.testing.assert_close(g(v, u), g(v.flatten(1, 2), u.flatten(1, 2)))


def test_a_batch_of_one_costs_nothing():
    v, u = features(batch=1)
    assert unit()(v, u) == 0


def test_wiring():
    shapes = {"start": (4, 8), "first": (8, 4), "half": (8, 4), "end": (8, 4)}
    path = Path(**{name: torch.rand(5, c, s, s) for name, (c, s) in shapes.items()})
    both = Feedback((4, 8), (2,), "both", weight=3.0, caps=2)
    assert set(both.units) == {"within_1", "within2_1"}
    expected = both.units["within_1"](path.end, path.first) + both.units["within2_1"](path.half, path.start)
    torch.testing.assert_close(both([path]), 3 * expected)
    assert both.units["within_1"].generator.conv.stride == (1, 1)
    assert both.units["within2_1"].generator.conv.stride == (2, 2)
    some = Feedback((4, 8, 16, 32), (1, 2, 2), ("none", "within", "within2"), caps=2)
    assert set(some.units) == {"within_2", "within2_3"}
    assert isinstance(some.units["within_2"].generator, CapDeconv)


OPTIONS = [{}, {"cost": "l2"}, {"bias_fix": False}, {"through_plan": True}, {"extractor": False}, {"divergence": "kl"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_units_at_once_cost_what_they_cost_one_by_one(options):
    """Their features have 1, 4 and 16 numbers, or without an extractor several hundred."""
    shapes = [{"start": (4, 16), "end": (8, 8)}, {"start": (8, 8), "end": (16, 4)}]
    paths = []
    for shape in shapes:
        start, end = (torch.rand(5, c, s, s, dtype=torch.float64, requires_grad=True) for c, s in shape.values())
        paths.append(Path(start, first=end.flip(0), half=end.sqrt(), end=end))
    feedback = Feedback((4, 8, 16), (2, 2), "both", weight=3.0, caps=2, **options).double()
    inputs = [paths[0].start, paths[0].end, paths[1].end]
    expected = 3 * sum(
        feedback.units[f"within_{n}"](path.end, path.first) + feedback.units[f"within2_{n}"](path.half, path.start)
        for n, path in enumerate(paths, 1)
    )
    torch.testing.assert_close(feedback(paths), expected)
    ours, theirs = (torch.autograd.grad(x, inputs, retain_graph=True) for x in (feedback(paths), expected))
    torch.testing.assert_close(ours, theirs)


def test_a_batch_of_one_costs_nothing_in_any_unit():
    path = Path(*(torch.rand(1, 4, 8, 8) for _ in range(4)))
    assert Feedback((4, 4), (1,), "both", caps=2)([path]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_compares_in_float32(dtype):
    g, (v, u) = unit().to(dtype), features()
    penalty = g(v.to(dtype), u.to(dtype))
    assert penalty.dtype == torch.float32
    assert penalty.isfinite()


def test_bad_options():
    with pytest.raises(ValueError, match="feedback must be ot or kl, got 'js'"):
        unit(divergence="js")
    with pytest.raises(ValueError, match="generator must be capsule or vanilla, got 'cnn'"):
        unit(generator="cnn")
    with pytest.raises(ValueError, match="cost must be cosine or l2, got 'l1'"):
        unit(cost="l1")
    with pytest.raises(ValueError, match="10 and 8 channels are not whole capsules of 4"):
        FeedbackUnit(10, 8, caps=4)
    with pytest.raises(ValueError, match="wiring must be one of none, within, within2, both"):
        Feedback((4, 8), (2,), "within3", caps=2)
    with pytest.raises(ValueError, match="wiring leaves no feedback unit"):
        Feedback((4, 8), (2,), "none", caps=2)
