"""Routing holds no votes: what forward and backward take at most, on a CPU and, where there is one, on a GPU."""

import os

import pytest
import torch

from torchcaps.models.measure import LiveBytes
from torchcaps.ops import Votes, agreement_step, backend, em_step, votes_cpu
from torchcaps.routing.dynamic import dynamic_routing

ON_GPU = [pytest.mark.triton, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NO_GPU = [pytest.mark.triton, pytest.mark.skipif(not IN_INTERPRETER, reason="no interpreter")]
FUSED = [pytest.param(what, "cuda", marks=ON_GPU) for what in ("agreement", "em")]
INTERPRETED = [pytest.param(what, "interpreted", marks=NO_GPU) for what in ("agreement", "em")]


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
    with LiveBytes(torch.empty(1), 1) as live, backend("triton" if device == "interpreted" else "auto"):
        before = live.now
        work()
    return live.peak - before


def drawn(device, *shapes):
    device = "cpu" if device == "interpreted" else device
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def one_step(what, votes, parents):
    if what == "agreement":
        return agreement_step(votes, parents)[0].sum()
    gates = torch.ones(*votes.lead, votes.in_caps, device=votes.device)
    spread = torch.ones_like(parents)
    _, mean, variance, _ = em_step(votes, gates, (parents, spread, spread[..., 0]))
    return (mean + variance).sum()


def cost_of(what, device, n, children, weight):
    """Bytes for one step and its gradients. Shapes: weight [a, j, e]"""
    rows = 4 if weight[0] == 4 else 1
    size, count, columns = weight
    poses, weight, parents = drawn(device, (n, children, rows * size), (children, *weight), (n, count, rows * columns))

    def work():
        poses.grad = weight.grad = parents.grad = None
        one_step(what, Votes(poses, weight), parents).backward()

    return held(work, device)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("what", "device"), [("agreement", "cpu"), *FUSED])
def test_below_a_quarter_of_the_votes(what, device, size):
    n, children, count = (128 * size, 128, 64) if device == "cpu" else (2048 * size, 288, 32)
    assert cost_of(what, device, n, children, (4, count, 4)) < 4 * n * children * count * 16 / 4


@pytest.mark.parametrize(("what", "device"), FUSED)
def test_large_poses_below_a_quarter_of_the_votes(what, device):
    """As those of DiverseMultiMNIST, of whose parents a program has few."""
    n, children, count = 4096, 72, 32
    assert cost_of(what, device, n, children, (64, count, 64)) < 4 * n * children * count * 64 / 4


@pytest.mark.parametrize(("what", "device"), [*FUSED, *INTERPRETED])
def test_one_gradient_of_the_poses_for_all_parents(what, device, monkeypatch):
    """Twice as many parents need as many poses and weights of their own again, however large the children are."""
    monkeypatch.setattr("torchcaps.ops.plan_triton.PARTIAL_BYTES", 0)
    n, children, size = (256, 8, 64) if device == "interpreted" else (4096, 72, 64)
    few = 32 if what == "agreement" else 8
    more = cost_of(what, device, n, children, (size, 2 * few, 1)) - cost_of(what, device, n, children, (size, few, 1))
    of_children, of_weights, of_poses = 4 * n * children * size, 4 * few * children * size, 4 * n * few
    own = 8 if what == "agreement" else 24  # EM also has spreads, activations and masses, and their gradients
    assert 3 * of_weights + own * of_poses < of_children
    assert more < 3 * of_weights + own * of_poses


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
