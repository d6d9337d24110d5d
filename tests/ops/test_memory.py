"""Routing holds no votes: what forward and backward take at most, on a CPU and, where there is one, on a GPU."""

import pytest
import torch

from torchcaps.models.measure import LiveBytes
from torchcaps.ops import Votes, agreement_step, votes_cpu
from torchcaps.routing.dynamic import dynamic_routing

ON_GPU = [pytest.mark.triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Pieces are as large as the cache, which on some machines would hold all of these votes."""
    monkeypatch.setattr(votes_cpu, "_cache_size", lambda: 2**17 // torch.get_num_threads())


def held(work, device):
    """Bytes that are in use at most while this works, besides what was there before."""
    if device == "cuda":
        work()  # kernels are compiled
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes(torch.empty(1), 1) as live:
        before = live.now
        work()
    return live.peak - before


def drawn(device, *shapes):
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2])
def test_below_a_quarter_of_the_votes(device, size):
    n, children, count = (128 * size, 128, 64) if device == "cpu" else (2048 * size, 288, 32)
    poses, weight, parents = drawn(device, (n, children, 16), (children, 4, count, 4), (n, count, 16))

    def work():
        poses.grad = weight.grad = parents.grad = None
        agreement_step(Votes(poses, weight), parents)[0].sum().backward()

    assert held(work, device) < 4 * n * children * count * 16 / 4


@pytest.mark.parametrize("device", DEVICES)
def test_grows_with_the_parents_own_poses_and_weights(device):
    """Twice as many parents: as many weights, poses and gradients again. On a CPU the couplings are results too."""
    n, children, few, dim = (256, 128, 32, 16) if device == "cpu" else (128, 1152, 100, 16)
    (poses,) = drawn(device, (n, children, 8))

    def cost(count):
        (weight,) = drawn(device, (children, 8, count, dim))

        def work():
            poses.grad = weight.grad = None
            dynamic_routing(Votes(poses, weight), 3).poses.square().sum().backward()

        return held(work, device)

    of_weights, of_poses = 4 * children * 8 * dim, 4 * n * dim
    of_coupling = 2 * 4 * n * children if device == "cpu" else 0  # of the two iterations that have one
    more, votes = cost(2 * few) - cost(few), few * 4 * n * children * dim
    assert more < few * (4 * of_weights + 16 * of_poses + of_coupling)
    assert more < votes / 3
