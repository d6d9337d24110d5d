import math

import numpy as np
import ot
import pytest
import torch
import torch.nn.functional as F

from torchcaps.losses import (
    binary_cross_entropy,
    cross_entropy,
    kl_divergence,
    margin_loss,
    multi_hot,
    reconstruction_loss,
    sinkhorn_divergence,
    spread_loss,
    spread_margin,
    transport_plan,
)

HALVES = [torch.float16, torch.bfloat16]
ON_LABELS = [margin_loss, lambda a, t: spread_loss(a, t, 0.2), cross_entropy, binary_cross_entropy]
LABELS = torch.tensor([[0, 2, -1], [1, 1, 1], [-1, -1, -1], [3, -1, 0]])  # padding, repeats, nothing, a gap


def gradcheck(function, *inputs):
    assert torch.autograd.gradcheck(function, [x.double().requires_grad_() for x in inputs])


def gradients(loss, *inputs):
    return torch.autograd.grad(loss.sum(), inputs)


def test_multi_hot():
    expected = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
    assert torch.equal(multi_hot(LABELS, 4), expected)
    assert torch.equal(multi_hot(torch.tensor([2, 0]), 3), torch.tensor([[False, False, True], [True, False, False]]))
    assert not multi_hot(torch.empty(2, 0, dtype=torch.int64), 3).any()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1], dtype=torch.int32), r"labels must be int64, got torch.int32"),
        (torch.tensor([0.0, 1.0]), r"labels must be int64, got torch.float32"),
        (torch.tensor([0, 1, 2]), r"labels must be \[2\] or \[2, k\], got \[3\]"),
        (torch.zeros(2, 1, 1, dtype=torch.int64), r"labels must be \[2\] or \[2, k\], got \[2, 1, 1\]"),
        (torch.tensor([0, 3]), r"labels must lie between 0 and 2, got 0 to 3"),
        (torch.tensor([0, -1]), r"labels must lie between 0 and 2, got -1 to 0"),
        (torch.tensor([[0, -2], [1, 2]]), r"labels must lie between -1 and 2, got -2 to 2"),
    ],
    ids=["int32", "float", "batch", "dimensions", "large", "negative", "padding"],
)
@pytest.mark.parametrize("loss", ON_LABELS, ids=["margin", "spread", "cross", "binary"])
def test_wrong_labels(loss, labels, message):
    with pytest.raises(ValueError, match=message):
        loss(torch.rand(2, 3), labels)


@pytest.mark.parametrize("loss", ON_LABELS, ids=["margin", "spread", "cross", "binary"])
@pytest.mark.parametrize(
    "scores", [torch.rand(2), torch.rand(2, 3, 1), torch.ones(2, 3).long()], ids=["1d", "3d", "int64"]
)
def test_wrong_scores(loss, scores):
    with pytest.raises(ValueError, match=r"must be floating point of shape \[b, j\], got "):
        loss(scores, torch.tensor([0, 1]))


@pytest.mark.parametrize("loss", [margin_loss, cross_entropy])
def test_wrong_class_weights(loss):
    with pytest.raises(ValueError, match=r"class_weights must be \[3\], got \[2\]"):
        loss(torch.rand(2, 3), torch.tensor([0, 1]), class_weights=torch.ones(2))


def test_margin_by_hand():
    lengths = torch.tensor([[0.6, 0.3, 0.05], [0.95, 0.1, 0.5]])
    first = 0.3**2 + 0.5 * 0.2**2 + 0
    second = 0.5 * 0.85**2 + 0.8**2 + 0.5 * 0.4**2
    assert margin_loss(lengths, torch.tensor([0, 1])).item() == pytest.approx((first + second) / 2)
    changed = margin_loss(lengths[:1], torch.tensor([0]), m_plus=0.7, m_minus=0.2, down_weight=0.25)
    assert changed.item() == pytest.approx(0.1**2 + 0.25 * 0.1**2)


@pytest.mark.parametrize("classes", [10, 5, 100])
def test_official_margin(classes):
    """The code takes the mean over classes and half of that: a twentieth of the paper's for ten classes."""
    lengths, labels = torch.rand(7, classes).double(), torch.randint(classes, (7,))
    official, paper = (margin_loss(lengths, labels, scale=scale) for scale in ("official", "paper"))
    assert official.item() == pytest.approx(paper.item() / (2 * classes))


def test_margin_of_several_labels():
    lengths, weights = torch.rand(4, 4).double(), torch.tensor([1.0, 2.0, 0.0, 0.5]).double()
    expected = 0.0
    for b, present in enumerate([{0, 2}, {1}, set(), {0, 3}]):
        for j, v in enumerate(lengths[b].tolist()):
            term = max(0, 0.9 - v) ** 2 if j in present else 0.5 * max(0, v - 0.1) ** 2
            expected += weights[j].item() * term / 4
    assert margin_loss(lengths, LABELS, class_weights=weights).item() == pytest.approx(expected)
    gradcheck(lambda v: margin_loss(v, LABELS, class_weights=weights), lengths)


def test_margin_with_an_unknown_scale():
    with pytest.raises(ValueError, match=r"scale must be 'paper' or 'official', got 'mean'"):
        margin_loss(torch.rand(1, 3), torch.tensor([0]), scale="mean")


def test_spread_by_hand():
    activations = torch.tensor([[0.8, 0.5, 0.7], [0.1, 0.2, 0.9]])
    losses = 0 + 0.1**2, (0.2 + 0.1) ** 2 + 0
    labels = torch.tensor([0, 2])
    assert spread_loss(activations, labels, 0.2).item() == pytest.approx(losses[0] / 2)
    labels = torch.tensor([0, 1])
    losses = 0.1**2 + (0.2 - 0.1) ** 2 + (0.2 + 0.7) ** 2
    assert spread_loss(activations, labels, 0.2).item() == pytest.approx(losses / 2)
    assert spread_loss(activations, labels, 0.2, reduction="mean").item() == pytest.approx(losses / 6)


def test_spread_of_several_labels():
    activations = torch.rand(4, 4).double()
    expected = 0.0
    for b, present in enumerate([{0, 2}, {1}, set(), {0, 3}]):
        for t in present:
            for i in set(range(4)) - present:
                expected += max(0, 0.9 - (activations[b, t] - activations[b, i]).item()) ** 2 / 4
    assert spread_loss(activations, LABELS, 0.9).item() == pytest.approx(expected)
    gradcheck(lambda a: spread_loss(a, LABELS, 0.9), activations)


def test_spread_margin():
    assert spread_margin(0) == pytest.approx(0.2 + 0.79 / (1 + math.exp(4)))
    assert spread_margin(200_000) == spread_margin(400, every=100) == pytest.approx(0.2 + 0.79 / 2)
    assert spread_margin(700_000) == spread_margin(10**9) == pytest.approx(0.99, abs=1e-4)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        spread_margin(-1)


def test_spread_with_an_unknown_reduction():
    with pytest.raises(ValueError, match=r"reduction must be 'sum' or 'mean', got 'none'"):
        spread_loss(torch.rand(1, 3), torch.tensor([0]), 0.2, reduction="none")


def test_reconstruction_by_hand():
    pictures = torch.tensor([[[[[0.5, 1.0]]]], [[[[0.0, 0.0]]]]])  # [2, 1, 1, 1, 2]
    target = torch.tensor([[[[1.0, 0.0]]], [[[3.0, 4.0]]]])
    assert reconstruction_loss(pictures, target, reduction="sum").item() == pytest.approx((1.25 + 25) / 2)
    assert reconstruction_loss(pictures, target, reduction="mean").item() == pytest.approx((1.25 + 25) / 4)
    with pytest.raises(TypeError):
        reconstruction_loss(pictures, target)


@pytest.mark.parametrize("one_target", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reconstruction_of_several_objects(reduction, one_target):
    pictures = torch.rand(4, 3, 2, 3, 5).double()
    target = torch.rand(4, 2, 3, 5).double() if one_target else torch.rand(4, 3, 2, 3, 5).double()
    expected = 0.0
    for b in range(4):
        for k in range(3):
            if LABELS[b, k] >= 0:
                squares = (pictures[b, k] - (target[b] if one_target else target[b, k])) ** 2
                expected += (squares.sum() if reduction == "sum" else squares.mean()).item() / 4
    loss = reconstruction_loss(pictures, target, reduction=reduction, labels=LABELS)
    assert loss.item() == pytest.approx(expected)
    every = reconstruction_loss(pictures, target, reduction=reduction)
    assert every.item() == pytest.approx(
        reconstruction_loss(pictures, target, reduction=reduction, labels=LABELS.clamp(min=0)).item()
    )
    assert every > loss


def test_reconstruction_without_an_object_gets_no_gradient():
    pictures = torch.full((4, 3, 1, 2, 2), torch.inf)
    pictures[LABELS >= 0] = 0.5
    pictures.requires_grad_()
    loss = reconstruction_loss(pictures, torch.zeros(4, 1, 2, 2), reduction="sum", labels=LABELS)
    (gradient,) = gradients(loss, pictures)
    assert torch.equal(gradient, (LABELS >= 0).float()[..., None, None, None].expand_as(gradient) * 2 * 0.5 / 4)


@pytest.mark.parametrize(
    ("pictures", "target", "options", "message"),
    [
        ((2, 3, 4, 4), (2, 3, 4, 4), {}, r"reconstruction must be \[b, k, c, h, w\], got \[2, 3, 4, 4\]"),
        ((2, 1, 3, 4, 4), (2, 3, 4, 5), {}, r"target must be \[2, 3, 4, 4\] or \[2, 1, 3, 4, 4\], got \[2, 3, 4, 5\]"),
        ((2, 1, 3, 4, 4), (2, 3, 4, 4), {"labels": torch.zeros(2, 2).long()}, r"labels must be \[2, 1\]"),
        ((2, 1, 3, 4, 4), (2, 3, 4, 4), {"labels": torch.zeros(2, 1)}, r"labels must be int64"),
        ((2, 1, 3, 4, 4), (2, 3, 4, 4), {"reduction": "none"}, r"reduction must be 'sum' or 'mean', got 'none'"),
    ],
    ids=["pictures", "target", "labels", "dtype", "reduction"],
)
def test_wrong_reconstruction(pictures, target, options, message):
    with pytest.raises(ValueError, match=message):
        reconstruction_loss(torch.rand(pictures), torch.rand(target), **{"reduction": "sum", **options})


def cost_matrix(x, y, cost):
    """[n, f], [m, f] -> [n, m], one entry after the other."""
    if cost == "l2":
        return np.array([[np.sqrt(((a - b) ** 2).sum()) for b in y] for a in x])
    return np.array([[1 - (a @ b) / np.sqrt((a @ a) * (b @ b)) for b in y] for a in x])


def plan_by_loops(costs, epsilon, iterations):
    """The released code's order, without logarithms: b starts at 1/m, a from b, then b from the new a."""
    n, m = costs.shape
    kernel = np.exp(-costs / epsilon)
    a, b = np.zeros(n), np.full(m, 1 / m)
    for _ in range(iterations):
        for i in range(n):
            a[i] = (1 / n) / sum(kernel[i, k] * b[k] for k in range(m))
        for k in range(m):
            b[k] = (1 / m) / sum(kernel[i, k] * a[i] for i in range(n))
    return a[:, None] * kernel * b


def points(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize(("n", "m", "epsilon", "iterations"), [(8, 8, 1.0, 10), (5, 7, 0.1, 10), (3, 1, 0.5, 1)])
def test_sinkhorn_equals_loops(cost, n, m, epsilon, iterations):
    x, y = points(n, 6), points(m, 6)

    def transport(x, y):
        costs = cost_matrix(x.numpy(), y.numpy(), cost)
        plan = plan_by_loops(costs, epsilon, iterations)
        ours = transport_plan(torch.from_numpy(costs), epsilon=epsilon, iterations=iterations)
        np.testing.assert_allclose(ours, plan, rtol=1e-11)
        return (plan * costs).sum()

    options = {"cost": cost, "epsilon": epsilon, "iterations": iterations}
    assert sinkhorn_divergence(x, y, bias_fix=False, **options).item() == pytest.approx(transport(x, y), rel=1e-11)
    fixed = 2 * transport(x, y) - transport(x, x) - transport(y, y)
    assert sinkhorn_divergence(x, y, **options).item() == pytest.approx(fixed, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("iterations", [1, 10])
def test_plan_equals_pot_step_by_step(iterations):
    """POT updates the columns' factor first and ours the rows', so it is given the transpose."""
    costs = cost_matrix(points(6, 4).numpy(), points(9, 4).numpy(), "l2")
    uniform = np.full(9, 1 / 9), np.full(6, 1 / 6)
    theirs = ot.sinkhorn(*uniform, np.ascontiguousarray(costs.T), 0.3, numItermax=iterations, stopThr=0, warn=False).T
    ours = transport_plan(torch.from_numpy(costs), epsilon=0.3, iterations=iterations)
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)


@pytest.mark.parametrize(("cost", "metric"), [("cosine", "cosine"), ("l2", "euclidean")])
def test_divergence_is_twice_pots(cost, metric):
    """POT's is W(x, y) - (W(x, x) + W(y, y)) / 2, half of Li's Eq. 11, once both have converged."""
    x, y = points(6, 4), points(9, 4) + 1
    theirs = ot.bregman.empirical_sinkhorn_divergence(
        x.numpy(), y.numpy(), 0.5, metric=metric, numIterMax=2000, stopThr=1e-14, warn=False
    )
    ours = sinkhorn_divergence(x, y, cost=cost, epsilon=0.5, iterations=500)
    assert ours.item() == pytest.approx(2 * float(theirs), rel=1e-9)
    assert ours > 0.01


def test_small_epsilon_is_optimal_transport():
    """In the limit the plan solves the linear programme of Eq. 8."""
    costs = cost_matrix(points(7, 3).numpy(), points(7, 3).numpy(), "l2")
    best = ot.emd2(np.full(7, 1 / 7), np.full(7, 1 / 7), costs)
    plan = transport_plan(torch.from_numpy(costs), epsilon=0.005, iterations=5000).numpy()
    assert (plan * costs).sum() == pytest.approx(best, rel=1e-3)


def test_two_points_by_hand():
    """x to itself: K = [[1, 1/e], [1/e, 1]], divided by its sum. x to x + 5: K has rank one, so P is 1/4 everywhere."""
    x = torch.tensor([[0.0], [1.0]])
    wrong_way = math.exp(-1) / (1 + math.exp(-1))
    loss = sinkhorn_divergence(x, x, cost="l2", bias_fix=False)
    assert loss.item() == pytest.approx(wrong_way)
    assert sinkhorn_divergence(x, x + 5, cost="l2").item() == pytest.approx(2 * (5 - wrong_way))


def test_marginals():
    plan = transport_plan(5 * torch.rand(3, 8, 6).double(), epsilon=0.5, iterations=300)
    torch.testing.assert_close(plan.sum(dim=-2), torch.full((3, 6), 1 / 6, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(plan.sum(dim=-1), torch.full((3, 8), 1 / 8, dtype=torch.float64), rtol=1e-9, atol=0)
    early = transport_plan(5 * torch.rand(8, 8).double(), epsilon=0.5, iterations=1)
    assert early.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("cost", ["cosine", "l2"])
def test_batched_equals_one_by_one(cost):
    x, y = points(2, 3, 5, 4), points(2, 3, 6, 4)
    together = sinkhorn_divergence(x, y, cost=cost)
    assert together.shape == (2, 3)
    for a in range(2):
        for b in range(3):
            torch.testing.assert_close(together[a, b], sinkhorn_divergence(x[a, b], y[a, b], cost=cost))


@pytest.mark.parametrize("bias_fix", [True, False])
@pytest.mark.parametrize("cost", ["cosine", "l2"])
def test_gradient_through_the_plan(cost, bias_fix):
    """With the bias fix and l2 points coincide with themselves, where the distance has no derivative: gradient 0."""
    options = {"cost": cost, "bias_fix": bias_fix, "epsilon": 0.5, "iterations": 4, "through_plan": True}
    x, y = points(2, 4, 3), points(2, 5, 3)
    gradcheck(lambda x, y: sinkhorn_divergence(x, y, **options), x, y)


@pytest.mark.parametrize("cost", ["cosine", "l2"])
def test_gradient_with_a_fixed_plan(cost):
    x, y = points(5, 3).requires_grad_(), points(4, 3).requires_grad_()

    def transport(x, y):
        directions = (F.normalize(x, dim=-1), F.normalize(y, dim=-1))
        costs = 1 - directions[0] @ directions[1].T if cost == "cosine" else (x[:, None] - y + 1e-30).norm(dim=-1)
        return (torch.from_numpy(plan_by_loops(costs.detach().numpy(), 0.5, 10)) * costs).sum()

    ours = gradients(sinkhorn_divergence(x, y, cost=cost, epsilon=0.5), x, y)
    theirs = gradients(2 * transport(x, y) - transport(x, x) - transport(y, y), x, y)
    through = gradients(sinkhorn_divergence(x, y, cost=cost, epsilon=0.5, through_plan=True), x, y)
    for our, their, other in zip(ours, theirs, through, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-9, atol=1e-12)
        assert (our - other).abs().max() > 1e-3


@pytest.mark.parametrize("cost", ["cosine", "l2"])
def test_a_set_is_no_distance_from_itself(cost):
    x = torch.randn(16, 8)
    assert sinkhorn_divergence(x, x, cost=cost).item() == 0
    assert sinkhorn_divergence(x, x, cost=cost, bias_fix=False) > 0.1


@pytest.mark.parametrize("through_plan", [True, False])
@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("size", [0, 1e-30, 1e-10, 1e-6, 2e-4, 1e4])
def test_sinkhorn_is_finite(size, dtype, cost, through_plan):
    x = (size * torch.randn(6, 4)).to(dtype)
    x[1] = x[2]
    y = torch.cat([torch.zeros(1, 4), torch.randn(3, 4)]).to(dtype)
    x.requires_grad_(), y.requires_grad_()
    loss = sinkhorn_divergence(x, y, cost=cost, through_plan=through_plan)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.isfinite()
    for gradient in gradients(loss, x, y):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


def test_a_vector_without_direction_costs_one():
    zeros, y = torch.zeros(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = sinkhorn_divergence(zeros, y, bias_fix=False)
    assert loss.item() == pytest.approx(1)
    assert torch.equal(gradients(loss, zeros)[0], torch.zeros(3, 4))


def test_cosine_does_not_see_sizes():
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    torch.testing.assert_close(sinkhorn_divergence(1e-9 * x, 1e9 * y), sinkhorn_divergence(x, y))


@pytest.mark.parametrize("cost", ["cosine", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_epsilon_does_not_overflow(cost, dtype):
    x, y = (100 * torch.randn(2, 12, 5)).to(dtype).requires_grad_().unbind()
    loss = sinkhorn_divergence(x, y, cost=cost, epsilon=1e-3, bias_fix=False, through_plan=True)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, x, y))
    costs = torch.cdist(x, y).detach() if cost == "l2" else 2 * torch.rand(12, 12, dtype=dtype)
    plan = transport_plan(costs, epsilon=1e-3)
    torch.testing.assert_close(plan.sum(dim=-2), torch.full((12,), 1 / 12, dtype=dtype))


@pytest.mark.parametrize("cost", ["cosine", "l2"])
def test_sinkhorn_keeps_out_of_autocast(cost):
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = sinkhorn_divergence(x, y, cost=cost)
    assert torch.equal(loss, sinkhorn_divergence(x, y, cost=cost))


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        ((4, 3), (4, 3), {"cost": "foo"}, r"cost must be 'cosine' or 'l2', got 'foo'"),
        ((4, 3), (4, 3), {"iterations": 0}, r"iterations must be at least 1, got 0"),
        ((4, 3), (4, 3), {"epsilon": 0.0}, r"epsilon must be positive, got 0.0"),
        ((4, 3), (4, 2), {}, r"x and y must be \[..., n, f\] and \[..., m, f\], got \[4, 3\] and \[4, 2\]"),
        ((2, 4, 3), (4, 3), {}, r"x and y must be"),
        ((3,), (3,), {}, r"x and y must be"),
        ((0, 3), (4, 3), {}, r"costs must be \[..., n, m\] with n and m at least 1, got \[0, 4\]"),
    ],
    ids=["cost", "iterations", "epsilon", "features", "leading", "vectors", "empty"],
)
def test_wrong_sinkhorn(x, y, options, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn_divergence(torch.rand(x), torch.rand(y), **options)


def test_kl_by_hand():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(p.log() + 3, q.log() - 1).item() == pytest.approx(expected / 2)
    gradcheck(kl_divergence, torch.randn(3, 5), torch.randn(3, 5))
    with pytest.raises(ValueError, match=r"x and y must both be \[n, f\], got \[2, 2\] and \[2, 3\]"):
        kl_divergence(p, torch.rand(2, 3))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_one_label_is_torchs(weighted, label_smoothing):
    logits, labels = torch.randn(7, 5).double(), torch.randint(5, (7,))
    weights = torch.rand(5).double() if weighted else None
    ours = cross_entropy(logits, labels, class_weights=weights, label_smoothing=label_smoothing)
    theirs = F.cross_entropy(logits, labels, weight=weights, label_smoothing=label_smoothing)
    assert ours.item() == pytest.approx(theirs.item())
    gradcheck(lambda x: cross_entropy(x, labels, class_weights=weights, label_smoothing=label_smoothing), logits)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3)]])
    assert cross_entropy(logits, torch.tensor([1])).item() == pytest.approx(math.log(4 / 3))
    assert cross_entropy(logits, torch.tensor([[0, 1]])).item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_cross_entropy_of_several_labels():
    logits = torch.randn(4, 4).double()
    log_p = logits.log_softmax(dim=1).tolist()
    expected = -(sum(log_p[0][j] for j in (0, 2)) / 2 + log_p[1][1] + sum(log_p[3][j] for j in (0, 3)) / 2) / 3
    assert cross_entropy(logits, LABELS).item() == pytest.approx(expected)
    nothing = torch.full((4, 2), -1)
    assert cross_entropy(logits, nothing, label_smoothing=0.1).item() == 0


def test_label_smoothing_out_of_range():
    with pytest.raises(ValueError, match=r"label_smoothing must lie between 0 and 1, got 1.5"):
        cross_entropy(torch.rand(1, 2), torch.tensor([0]), label_smoothing=1.5)


def test_binary_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    expected = (math.log(2) + math.log(4 / 3) + math.log(2) + math.log(4)) / 4
    assert binary_cross_entropy(logits, torch.tensor([[0, 1], [-1, 0]])).item() == pytest.approx(expected)
    assert binary_cross_entropy(logits, torch.tensor([1, 0])).item() == pytest.approx(expected)
    gradcheck(lambda x: binary_cross_entropy(x, LABELS), torch.randn(4, 6))


GENERATOR = torch.Generator().manual_seed(0)
SCORES, FEATURES = torch.rand(4, 4, generator=GENERATOR), torch.randn(2, 6, 4, generator=GENERATOR)
ALL = {
    "margin": (lambda x: margin_loss(x, LABELS), SCORES),
    "spread": (lambda x: spread_loss(x, LABELS, 0.5), SCORES),
    "reconstruction": (
        lambda x: reconstruction_loss(x, x.new_zeros(4, 1, 40, 40), reduction="sum", labels=LABELS),
        9 * torch.rand(4, 3, 1, 40, 40, generator=GENERATOR),  # the sum of squares is too large for float16
    ),
    "cosine": (lambda x: sinkhorn_divergence(x[0], x[1]), FEATURES),
    "l2": (lambda x: sinkhorn_divergence(x[0], x[1], cost="l2"), FEATURES),
    "kl": (lambda x: kl_divergence(x[0], x[1]), FEATURES),
    "cross": (lambda x: cross_entropy(x, LABELS), SCORES),
    "binary": (lambda x: binary_cross_entropy(x, LABELS), SCORES),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_computed_in_float32(name, dtype):
    """Exactly the float32 loss of the same numbers, and its gradient rounded once."""
    loss, x = ALL[name]
    half = x.to(dtype).requires_grad_()
    full = x.to(dtype).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = loss(half)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, loss(full))
    (our,), (their,) = gradients(ours, half), gradients(loss(full), full)
    torch.testing.assert_close(our, their.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_losses_compile(name):
    loss, x = ALL[name]
    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="eager")(x), loss(x))


@pytest.mark.parametrize("name", ["cosine", "l2", "kl"])
def test_divergences_on_meta(name):
    loss, x = ALL[name]
    assert loss(x.to("meta")).shape == ()
