"""Adam as a kernel against torch's in float64."""

from copy import deepcopy

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
    monkeypatch.setattr(small, "_table", None)
    _, found = trained(small, torch.float32)
    for one, two in zip(found, usual, strict=True):
        assert torch.equal(one, two)


def efficient(half):
    """The real network as a run has it, whose strides for a single channel mean nothing, and its optimiser's state."""
    from torchcaps import create_model
    from torchcaps.fused.adam_triton import SmallAdam

    torch.manual_seed(0)
    network = create_model("efficient_capsnet_mnist").to(DEVICE, memory_format=torch.channels_last)
    optimizer = SmallAdam(network.parameters(), torch.tensor(1e-2, device=DEVICE), capturable=CUDA)
    if half:
        modules = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        weights = [p for m in modules for p in m.parameters()]
        optimizer.halves = {w: nn.Parameter(w.detach().bfloat16()) for w in weights}
    return network, optimizer


def test_gradients_and_copies_in_half_precision(monkeypatch):
    """Gradients in bfloat16 are read as they are; all else is as with the same gradients in float32, bit for bit."""
    from torchcaps.fused import adam_triton

    monkeypatch.setattr(adam_triton, "CHUNK", 2**18 if not CUDA else adam_triton.CHUNK)
    calls = []
    monkeypatch.setattr(Adam, "step", lambda self, step=Adam.step: (calls.append(1), step(self)))
    (one, plain), (two, ours) = efficient(False), efficient(True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for a, b in zip(one.parameters(), two.parameters(), strict=True):
            copy = ours.halves.get(b)
            gradient = torch.randn(a.shape, generator=generator).to(DEVICE)
            gradient = gradient if copy is None else gradient.bfloat16()
            a.grad = torch.empty_like(a).copy_(gradient)
            leaf = b if copy is None else copy
            b.grad, leaf.grad = None, torch.empty_like(leaf).copy_(gradient)
        plain.step()
        ours.step()
    assert len(calls) == 2  # the first of each
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(plain.state[a]["exp_avg_sq"], ours.state[b]["exp_avg_sq"])
    assert len(ours.halves) == 16
    for weight, copy in ours.halves.items():
        assert weight.grad is None
        if CUDA:
            assert torch.equal(copy, weight.bfloat16())
        else:  # the interpreter cuts off, not rounds
            cut = (weight.detach().view(torch.int32) & -65536).view(torch.float32)
            assert torch.equal(copy.float(), cut)


def test_many_weights_with_copies_stay_with_the_kernel(small, monkeypatch):
    from torchcaps.fused import adam_triton

    monkeypatch.setattr(adam_triton, "MOST", 10)
    weight = nn.Parameter(torch.randn(30, 20, device=DEVICE))
    optimizer = small([weight], torch.tensor(1e-2, device=DEVICE), capturable=CUDA)
    copy = nn.Parameter(weight.detach().bfloat16())
    optimizer.halves = {weight: copy}
    calls = []
    monkeypatch.setattr(Adam, "step", lambda self, step=Adam.step: (calls.append(1), step(self)))
    for _ in range(3):
        copy.grad = torch.ones_like(copy)
        optimizer.step()
    assert len(calls) == 1


def test_the_table_of_a_recorded_step_is_filled_afterwards(small, monkeypatch):
    """While a graph is recorded, a step takes a table that is empty; here the kernel waits as a replay would."""
    from torchcaps.fused import adam_triton

    weights, other = weights_of(torch.float32), weights_of(torch.float32)
    ours, plain = (small(w, torch.tensor(1e-2, device=DEVICE), capturable=CUDA) for w in (weights, other))
    kernel, waiting = adam_triton.adam, []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args: waiting.append((grid, args))

    for step in range(3):
        for own in (weights, other):
            for weight in own:
                weight.grad = torch.full_like(weight, 0.1 + step)
        plain.step()
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                patch.setattr(torch.Tensor, "is_cuda", True)
                patch.setattr(adam_triton, "adam", Recorder())
            ours.step()
    ((grid, args),) = waiting
    assert args[0].shape == ours.recorded[0][1].shape
    args[0].zero_()
    ours.after_recording()
    kernel[grid](*args)
    for one, two in zip(weights, other, strict=True):
        assert torch.equal(one, two)


@pytest.mark.skipif(not CUDA, reason="records a CUDA graph")
def test_a_graph_that_frees_memory_before_its_step(small):
    """What the recording frees must not become the table: each replay writes there first."""
    weights, other = weights_of(torch.float32), weights_of(torch.float32)
    lr = torch.tensor(1e-2, device=DEVICE)
    ours, plain = small(weights, lr, capturable=True), Adam(other, lr, capturable=True)

    def update(own, optimizer):
        for size in (1, 2, 8, 64):
            torch.full((256 * size,), -1, dtype=torch.int64, device=DEVICE)
        for weight in own:
            weight.grad = weight.detach().sin()
        optimizer.step()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            update(weights, ours)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            update(weights, ours)
        ours.after_recording()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    for _ in range(6):
        update(other, plain)
    for one, two in zip(weights, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_a_copy_goes_on_and_a_closure_is_asked(small):
    optimizer, weights = trained(small, torch.float32, steps=2)
    twin = deepcopy(optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    versions = [weight._version for weight in weights]
    assert optimizer.step(lambda: 3.0) == 3.0
    assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))
    others = [p for group in twin.param_groups for p in group["params"]]
    for weight in others:
        weight.grad = torch.ones_like(weight)
    twin.step()
    for one, two in zip(weights, others, strict=True):
        assert torch.equal(one, two)


def test_gradients_of_copies_are_cleared_with_the_others(small):
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = small([weight], torch.tensor(1e-2, device=DEVICE), capturable=CUDA)
    half = nn.Parameter(weight.detach().bfloat16())
    half.grad = torch.ones_like(half)
    optimizer.halves = {weight: half}
    optimizer.zero_grad()
    assert half.grad is None
