"""EM's parents from sums over their votes: the kernels against the formulas in float64, with every gradient.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_em_fit_triton.py` on a CPU, or as it is where there is a GPU.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.fused.conftest import unwritten_is_nan  # noqa: F401
from tests.fused.kernels import DEVICE, OPT_IN
from tests.helpers import assert_as_accurate, outputs_and_gradients
from torchcaps.ops import Votes, Window, backend
from torchcaps.routing.em import em_routing, parent_logits

pytestmark = OPT_IN
TEMPERATURE, FLOOR = 0.3, 5e-4


def moments_of(splits, n, j, d, masses=None):
    """Sums over 5 votes in each split, around a centre that is not their mean."""
    centre = torch.randn(n, j, d)
    shares = torch.rand(splits, 5, n, j) if masses is None else masses.expand(splits, 5, n, j) / (5 * splits)
    away = 0.5 + torch.randn(splits, 5, n, j, d)
    first, second = (shares[..., None] * away).sum(1), (shares[..., None] * away**2).sum(1)
    return [x.to(DEVICE) for x in (shares.sum(1), first, second, centre, torch.randn(j), torch.randn(j))]


def formula(last, floor=FLOOR):
    def run(mass, first, second, centre, beta_u, beta_a):
        mass, first, second, centre = mass.sum(0), first.sum(0), second.sum(0), centre.detach()
        least = mass.clamp(min=1e-7)[..., None]
        mean = (first + mass[..., None] * centre) / least
        # the shares' sum of (vote - mean) squared, where votes and mean are counted from the centre
        moved = mean - centre
        spread = (second - 2 * moved * first + mass[..., None] * moved**2) / least
        variance = spread.clamp(min=0) + floor
        logits = parent_logits(mass, variance, beta_u, beta_a, TEMPERATURE)
        if last:
            return mean, logits.sigmoid()
        return mean, 1 / variance, F.logsigmoid(logits) - 0.5 * variance.log().sum(-1)

    return run


def kernels(last, floor=FLOOR):
    def run(*inputs):
        from torchcaps.ops.em_fit_triton import fitted

        *moments, centre, beta_u, beta_a = inputs
        return fitted(moments, centre, beta_u, beta_a, TEMPERATURE, floor, last)

    return run


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [(1, 3, 5, 16), (2, 7, 10, 36), (25, 2, 3, 4), (3, 1, 1, 1), (1, 70, 3, 128)], ids=str)
def test_parents(size, last):
    assert_as_accurate(kernels(last), formula(last), moments_of(*size), torch.float32)


@pytest.mark.parametrize("last", [False, True])
def test_parents_that_next_to_nobody_votes_for(last):
    inputs = moments_of(2, 2, 4, 6, masses=torch.tensor([0.0, 3e-8, 1e-3, 1e3]))
    assert all(x.isfinite().all() for x in outputs_and_gradients(kernels(last), inputs))
    for parent in range(4):  # each against its own largest number, for they lie many powers of ten apart
        own = [x[:, :, parent : parent + 1] for x in inputs[:3]]
        own += [inputs[3][:, parent : parent + 1], *(x[parent : parent + 1] for x in inputs[4:])]
        assert_as_accurate(kernels(last), formula(last), own, torch.float32)


@pytest.mark.parametrize("last", [False, True])
def test_parents_whose_votes_agree(last):
    """Numbers are eighths, so that the variance is exactly 0."""
    _, first, _, centre, *betas = moments_of(1, 3, 4, 5)
    mass = torch.full((1, 3, 4), 2.0, device=DEVICE)
    mean, centre = (8 * first).round() / 8, (8 * centre).round() / 8
    inputs = [mass, 2 * mean, 2 * mean**2, centre, *betas]
    assert all(x.isfinite().all() for x in outputs_and_gradients(kernels(last), inputs))
    assert_as_accurate(kernels(last), formula(last), inputs, torch.float32)


def test_even_shares():
    """Each child's activation, divided by the parents of all windows that it stands in."""
    from torchcaps.ops.em_triton import _plan
    from torchcaps.ops.windows_triton import shared_evenly

    window, (h, w) = Window(3, 2), (7, 8)
    votes = Votes(torch.randn(2, 2, 4, h, w, device=DEVICE), torch.randn(18, 2, 5, 2, device=DEVICE), window)
    n = 2 * votes.lead[1] * votes.lead[2]
    stands = torch.zeros(h, w)
    for y in range(votes.lead[1]):
        for x in range(votes.lead[2]):
            stands[2 * y : 2 * y + 3, 2 * x : 2 * x + 3] += 1
    each = window.unfold(stands.expand(2, 2, 1, h, w).contiguous())[..., 0].reshape(n, 18)
    x = torch.randn(3, n, 18, device=DEVICE)
    expected = x.sum(0) / (5 * each.to(DEVICE))
    torch.testing.assert_close(shared_evenly(x, _plan(votes), window), expected)
    torch.testing.assert_close(shared_evenly(x, _plan(votes), None), x.sum(0) / 5)


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("sites", [False, True])
def test_routing(sites, iterations):
    window = Window(2, 1)
    poses, weight = torch.randn(1, 2, 4, 4, 5, device=DEVICE), torch.randn(8, 2, 3, 2, device=DEVICE)
    activations = 0.1 + torch.rand(1, 3, 4, 8, device=DEVICE)
    betas = torch.randn(2, 3, device=DEVICE)

    def routing(name):
        def run(poses, weight, activations, betas):
            with backend(name):
                votes = Votes(poses, weight, window)
                options = {"inverse_temperature": lambda k: 0.2 + 0.1 * k, "sites": sites, "variance_floor": 0.5}
                return em_routing(votes, activations, *betas, iterations, **options)[:2]

        return run

    inputs = [poses, weight, activations, betas]
    assert_as_accurate(routing("triton"), routing("torch"), inputs, torch.float32)
