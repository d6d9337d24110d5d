"""Kernels compiled ahead: exactly those that are launched later, without a GPU and mostly without compiling any.

Opt-in: runs where Triton is installed, but not in its interpreter.
"""

import itertools
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchcaps.models import create_model
from torchcaps.ops import Votes, Window, backend
from torchcaps.routing.em import em_routing

triton = pytest.importorskip("triton")
pytest.importorskip("triton.runtime._async_compile")
pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
]
DEVICES = itertools.count(1000)  # one for each test, so that none finds another's kernels


class Driver:
    """Of an H200 that is not there."""

    launcher_cls = utils = None

    def __init__(self, device):
        self.get_current_device = lambda: device

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device):
        return 0


class Chip:
    """What was compiled for it and launched on it."""

    def __init__(self, device):
        self.device, self.compiled, self.launches = device, [], []

    def compile(self, src, **options):
        self.compiled.append(src.fn)
        return SimpleNamespace(
            run=lambda *args: self.launches.append(src.fn.__name__),
            launch_metadata=lambda *args: None,
            function=None,
            packed_metadata=None,
        )

    def cached(self):
        """What stands in Triton's cache for each kernel that can be compiled ahead."""
        from torchcaps.fused import gate_triton, mixture_triton, norm_triton, rows_triton
        from torchcaps.fused.launch_triton import launched
        from torchcaps.ops import (
            agreement_triton,
            em_first_triton,
            em_fit_triton,
            em_triton,
            plan_triton,
            windows_triton,
        )

        modules = [agreement_triton, em_first_triton, em_fit_triton, em_triton, plan_triton, windows_triton]
        modules += [gate_triton, mixture_triton, norm_triton, rows_triton]
        kernels = {x.kernel for module in modules for x in vars(module).values() if isinstance(x, launched)}
        variants = {kernel.__name__: kernel.device_caches[self.device][0] for kernel in kernels}
        return {name: dict(cache) for name, cache in variants.items() if cache}


def keys(cached):
    return {name: set(variants) for name, variants in cached.items()}


def waiting(cached):
    from torchcaps.ops.ahead_triton import _Coming

    return [name for name, variants in cached.items() for x in variants.values() if isinstance(x, _Coming)]


@pytest.fixture
def chip(monkeypatch):
    from torchcaps.fused import norm_triton, rows_triton
    from torchcaps.ops import ahead_triton, plan_triton

    chip, real = Chip(next(DEVICES)), triton.compiler.compile
    monkeypatch.setattr(triton.compiler, "compile", chip.compile)
    monkeypatch.setattr(ahead_triton, "_met", set())
    monkeypatch.setattr(plan_triton, "why_not", lambda votes: None)
    for module in (norm_triton, rows_triton):
        monkeypatch.setattr(module, "stands_for", lambda device: torch.device("cuda"))
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver(chip.device))
    yield chip
    ahead_triton._threads().shutdown()
    ahead_triton._threads.cache_clear()
    triton.runtime.driver._active = before
    for kernel in chip.compiled:
        kernel.compile = real
        kernel.device_caches.pop(chip.device, None)


@pytest.fixture
def rehearsals(monkeypatch, chip):
    """What stood in the cache after each rehearsal; none of them may launch anything."""
    from torchcaps.ops import ahead_triton

    rehearse, after, launched = ahead_triton._rehearse, [], []

    def noted(*args):
        launches = list(chip.launches)
        rehearse(*args)
        after.append(chip.cached())
        launched.extend(chip.launches[len(launches) :])

    monkeypatch.setattr(ahead_triton, "_rehearse", noted)
    yield after
    assert launched == []


def em(grad=True, **options):
    window = Window(3, 2)
    poses, weight = torch.randn(2, 2, 16, 7, 6), torch.randn(18, 4, 5, 4)
    betas = torch.randn(2, 5)  # whose second row is not aligned
    tensors = [x.requires_grad_(grad) for x in (poses, weight, torch.rand(2, 3, 2, 18), betas)]
    votes = Votes(tensors[0], tensors[1], window)
    with backend("triton"):
        return em_routing(votes, tensors[2], *tensors[3], **options).poses


def network(name="em_cifar10", autocast=False, memory_format=torch.contiguous_format, images=16, **options):
    made = create_model(name, **options).to(memory_format=memory_format)
    images = torch.rand(images, *made.image).contiguous(memory_format=memory_format)
    with backend("triton"), torch.autocast("cpu", torch.bfloat16, autocast):
        output = made(images)
        activations = output.capsules.activations  # a rehearsal does not know that few want their gradient
        return sum(x.float().sum() for x in (output.scores, activations, output.penalty) if x is not None)


em_cifar10 = partial(network, backbone="simple")
inverted_cifar10 = partial(network, "inverted_cifar10", backbone="simple")


CASES = {
    "one step": lambda: em(iterations=1),
    "three steps": lambda: em(iterations=3),
    "each window for itself": lambda: em(sites=False),
    "em_cifar10": em_cifar10,
    "em_cifar10, channels last": lambda: em_cifar10(memory_format=torch.channels_last),
    "em_cifar10, autocast": lambda: em_cifar10(autocast=True),
    "inverted_cifar10": inverted_cifar10,
    "inverted_cifar10, channels last": lambda: inverted_cifar10(memory_format=torch.channels_last),
    "inverted_cifar10, autocast": lambda: inverted_cifar10(autocast=True),
    "inverted_cifar10, within each layer": lambda: inverted_cifar10(concurrent=False, iterations=3),
    "inverted_cifar10, active": lambda: inverted_cifar10(activations=True),
    "dynamic_cifar10": lambda: network("dynamic_cifar10", backbone="simple"),
    "encapnet6_cifar10": lambda: network("encapnet6_cifar10", memory_format=torch.channels_last, images=2),
    "encapnet6_cifar10, autocast": lambda: network(
        "encapnet6_cifar10", autocast=True, memory_format=torch.channels_last, images=2
    ),
    "encapnet6_cifar10, feedback": lambda: network(
        "encapnet6_cifar10", memory_format=torch.channels_last, images=2, feedback="ot"
    ),
    "encapnet6_cifar10, feedback, autocast": lambda: network(
        "encapnet6_cifar10", autocast=True, memory_format=torch.channels_last, images=2, feedback="ot"
    ),
    "encapnet6_cifar10, one channel": lambda: network(
        "encapnet6_cifar10", memory_format=torch.channels_last, images=2, image=(1, 28, 28)
    ),
    "vectors": lambda: network("dynamic_diverse_multimnist", images=2),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_what_will_be_launched_and_nothing_else(case, chip, rehearsals):
    CASES[case]().float().sum().backward()
    assert keys(rehearsals[-1]) == keys(chip.cached())
    assert waiting(rehearsals[0])
    assert not waiting(chip.cached())
    assert any("backward" in name for name in chip.launches)
    if case.startswith("encapnet6"):
        assert {"norm_forward", "norm_backward", "mixture_forward", "mixture_backward"} <= set(chip.launches)
    assert ("first_weight" in chip.launches) == (case == "em_cifar10, autocast")


def test_nothing_for_maps_that_no_kernel_takes(chip, rehearsals):
    network("encapnet6_cifar10", images=2).backward()
    assert rehearsals == [{}]
    assert chip.launches == []


@pytest.mark.parametrize("made", [em_cifar10, inverted_cifar10])
@pytest.mark.parametrize("autocast", [False, True])
def test_all_layers_together(autocast, made, chip, rehearsals):
    """And no layer by itself."""
    made(autocast=autocast, images=2).float().sum().backward()
    assert len(rehearsals) == 1
    assert keys(rehearsals[0]) == keys(chip.cached())


def test_a_hook_sees_no_rehearsal(chip, rehearsals):
    made, seen = create_model("em_cifar10", backbone="simple"), []
    made.body.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.poses.device.type))
    with backend("triton"):
        made(torch.rand(2, 3, 32, 32)).scores.sum().backward()
    assert seen == ["cpu"]
    assert len(rehearsals) == len(made.body.layers)


def test_inference_compiles_no_backward(chip, rehearsals):
    with torch.no_grad():
        em()
    em(grad=False)
    assert keys(rehearsals[0]) == keys(chip.cached())
    assert not waiting(chip.cached())
    assert len(chip.cached()["em_forward"]) == 2
    assert not any("backward" in name for name in chip.cached())


def test_once(chip, rehearsals):
    for step in range(3):
        em(inverse_temperature=lambda k, step=step: 0.1 * step)
    assert len(rehearsals) == 1


def test_nothing_is_launched_without_memory(chip, rehearsals):
    """Whatever the thread that autograd takes, and whether or not the kernel is there."""
    em().sum().backward()
    launches = list(chip.launches)
    em().sum().backward()
    assert chip.launches == 2 * launches


def test_leaves_checkpoints_alone(chip):
    """Which count what is saved for the backward pass, in the first call and when it is repeated."""
    x = torch.ones(1, requires_grad=True)
    checkpoint(lambda x: x * em(), x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("trouble", ["rehearsal", "threads", "another Triton"])
def test_launches_all_the_same(trouble, chip, monkeypatch):
    from torchcaps.ops import ahead_triton

    em().sum().backward()
    launches = list(chip.launches)
    for kernel in chip.compiled:
        kernel.device_caches[chip.device][0].clear()
    chip.launches.clear()

    def fails(*args):
        raise OSError("no such luck")

    monkeypatch.setattr(ahead_triton, "_met", set())
    if trouble == "rehearsal":
        monkeypatch.setattr(ahead_triton._Ahead, "submit", fails)
    elif trouble == "threads":
        monkeypatch.setattr(ahead_triton._Coming, "build", fails)
    else:
        monkeypatch.setattr(ahead_triton, "active_mode", None)
    em().sum().backward()
    assert chip.launches == launches


def test_compiles_in_threads(chip, monkeypatch, tmp_path):
    """One kernel, for the H200."""
    from torchcaps.ops import ahead_triton
    from torchcaps.ops.em_triton import _plan
    from torchcaps.ops.windows_triton import shared_evenly

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", triton.compile)
    window = Window(3, 2)
    votes = Votes(torch.randn(2, 2, 4, 7, 8), torch.randn(18, 2, 5, 2), window)
    ahead_triton._rehearse(lambda x: shared_evenly(x, _plan(votes), window), (torch.randn(3, 24, 18),), False)
    (coming,) = chip.cached()["even_shares"].values()
    assert isinstance(coming, ahead_triton._Coming)
    compiled = coming.result()
    assert "sm_90" in compiled.asm["ptx"]
    assert list(chip.cached()["even_shares"].values()) == [compiled]
