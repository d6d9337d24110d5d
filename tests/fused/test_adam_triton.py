"""Adam as a kernel against torch's in float64."""

import pytest
import torch
from torch import nn
from torch.optim import Adam

from tests.fused.kernels import CUDA, DEVICE, OPT_IN

pytestmark = OPT_IN


def weights_of(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (2, 3, 4, 4), (70, 31), ()]
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    made[1] = made[1].to(memory_format=torch.channels_last)
    return [nn.Parameter(x) for x in made]


def trained(make, dtype, steps=6, **options):
    weights = weights_of(dtype)
    lr = torch.tensor(1e-2, device=DEVICE, dtype=dtype)
    optimizer = make(weights, lr, capturable=CUDA, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        lr.fill_(1e-2 / (1 + step))
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator).to(DEVICE, dtype)
            weight.grad = torch.empty_like(weight).copy_(gradient)
        optimizer.step()
    return optimizer, weights


@pytest.fixture
def small(monkeypatch):
    from torchcaps.fused import adam_triton

    monkeypatch.setattr(adam_triton, "CHUNK", 64)
    return adam_triton.SmallAdam


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.1}])
def test_as_accurate_as_torch(small, options, monkeypatch):
    exact, right = trained(Adam, torch.float64, foreach=False, **options)
    plain, usual = trained(Adam, torch.float32, foreach=False, **options)
    calls = []
    monkeypatch.setattr(Adam, "step", lambda self, step=Adam.step: (calls.append(1), step(self)))
    ours, found = trained(small, torch.float32, **options)
    assert len(calls) == 1  # the first, which makes the moments
    for e, p, f in zip(right, usual, found, strict=True):
        assert f.stride() == p.stride()
        assert (f - e).abs().max() <= 2 * (p - e).abs().max() + 1e-7 * e.abs().max()
        for name in ("exp_avg", "exp_avg_sq"):
            e_, p_, f_ = exact.state[e][name], plain.state[p][name], ours.state[f][name]
            assert (f_ - e_).abs().max() <= 2 * (p_ - e_).abs().max() + 1e-6 * e_.abs().max()
        assert ours.state[f]["step"] == 6


def test_it_goes_on_from_a_checkpoint(small):
    _, right = trained(small, torch.float32, steps=6)
    ours, found = trained(small, torch.float32, steps=3)
    other, weights = trained(small, torch.float32, steps=1)
    with torch.no_grad():
        for to, source in zip(weights, found, strict=True):
            to.copy_(source)
    other.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        gradients = [torch.randn(w.shape, generator=generator).to(DEVICE) for w in weights]
        if step >= 3:
            other.param_groups[0]["lr"] = torch.tensor(1e-2 / (1 + step), device=DEVICE)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = torch.empty_like(weight).copy_(gradient)
            other.step()
    for one, two in zip(weights, right, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_strides_that_mean_nothing_make_no_difference(small, monkeypatch):
    weight = nn.Parameter(torch.randn(3, 1, 5, 5, device=DEVICE).as_strided((3, 1, 5, 5), (25, 1, 5, 1)))
    optimizer = small([weight], torch.tensor(1e-2, device=DEVICE), capturable=CUDA)
    calls = []
    monkeypatch.setattr(Adam, "step", lambda self, step=Adam.step: (calls.append(1), step(self)))
    for _ in range(3):
        weight.grad = torch.ones(3, 1, 5, 5, device=DEVICE).as_strided((3, 1, 5, 5), (25, 25, 5, 1))
        optimizer.step()
    assert len(calls) == 1


def test_many_weights_go_through_torch(small, monkeypatch):
    from torchcaps.fused import adam_triton

    monkeypatch.setattr(adam_triton, "MOST", 10)
    _, usual = trained(Adam, torch.float32)
    ours, found = trained(small, torch.float32)
    assert not ours.tables
    for one, two in zip(found, usual, strict=True):
        assert torch.equal(one, two)
