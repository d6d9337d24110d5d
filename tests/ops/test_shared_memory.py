"""No kernel takes more shared memory than was reckoned, nor than a GPU has: compiled for some that are not there.

Opt-in: runs where Triton is installed, but not in its interpreter; some minutes.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from torchcaps.ops import Votes, Window, agreement_step, backend, em_step

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
]
ROOM = {80: 166_912, 86: 101_376, 90: 232_448}
SIZES = {  # images, children, rows, size, parents, columns
    "matrices": (600, 64, 4, 4, 32, 4),
    "few matrices": (2, 8, 4, 4, 32, 4),
    "vectors": (600, 64, 1, 8, 200, 16),
    "large vectors": (600, 64, 1, 64, 16, 64),
    "few large vectors": (2, 8, 1, 64, 16, 64),
    "few large matrices": (2, 8, 4, 32, 16, 32),
    "long matrices": (600, 64, 8, 64, 10, 16),
    "votes of one number": (600, 64, 1, 64, 20, 1),
    "few votes of one number": (2, 8, 1, 64, 3, 1),
}
CASES = [
    ("matrices", 86, "bf16"),
    ("matrices", 80, "bf16"),
    ("matrices", 90, "32"),
    ("few matrices", 86, "32"),
    ("vectors", 86, "tf32"),
    ("large vectors", 90, "bf16"),
    ("large vectors", 86, "bf16"),
    ("large vectors", 86, "tf32"),
    ("large vectors", 80, "32"),
    ("few large vectors", 90, "32"),
    ("few large matrices", 86, "32"),
    ("long matrices", 90, "tf32"),
    ("votes of one number", 90, "bf16"),
    ("votes of one number", 86, "32"),
    ("few votes of one number", 90, "32"),
]


class Driver:
    launcher_cls = utils = None

    def __init__(self, capability):
        self.get_current_device = lambda: capability
        self.get_current_target = lambda: triton.backends.compiler.GPUTarget("cuda", capability, 32)
        self.get_current_stream = lambda device: 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Kernels and what they take; no launch does anything."""
    from torchcaps.ops import ahead_triton, em_first_triton, plan_triton

    found, kernels, real, before = {}, [], triton.compile, triton.runtime.driver._active

    def compiling(src, target=None, options=None, **more):
        done = real(src, target=target, options=options)
        found[src.fn.__name__] = max(found.get(src.fn.__name__, 0), done.metadata.shared)
        kernels.append(src.fn)
        return SimpleNamespace(
            run=lambda *args: None, launch_metadata=lambda *args: None, function=None, packed_metadata=None
        )

    def on(capability):
        triton.runtime.driver.set_active(Driver(capability))
        for module in (plan_triton, em_first_triton):
            monkeypatch.setattr(module, "room", lambda: ROOM[capability])
        monkeypatch.setattr(plan_triton, "before_hopper", lambda: capability < 90)
        return found

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", compiling)
    monkeypatch.setattr(ahead_triton, "active_mode", None)
    monkeypatch.setattr(plan_triton, "why_not", lambda votes: None)
    yield on
    triton.runtime.driver._active = before
    for kernel in kernels:
        kernel.compile = real
        for capability in ROOM:
            kernel.device_caches.pop(capability, None)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("case", "capability", "precision"), CASES)
def test_what_is_taken(case, capability, precision, windows, compiled, monkeypatch):
    from torchcaps.ops import agreement_triton, em_triton, plan_triton

    found, reckoned = compiled(capability), {"agreement": 0, "em": 0}

    def noted(votes, **options):
        cut = plan_triton.plan(votes, **options)
        kind = "em" if "low" in options else "agreement"
        reckoned[kind] = max(reckoned[kind], cut.shared)
        return cut

    for module in (agreement_triton, em_triton):
        monkeypatch.setattr(module, "plan", noted)
    n, i, rows, size, j, columns = SIZES[case]
    shape, window = ((n, i, rows * size), None) if not windows else ((n, 2, rows * size, 3, 3), Window(3, 1))
    poses, weight = (torch.randn(x, requires_grad=True) for x in (shape, (18 if windows else i, size, j, columns)))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "32" else "high")
    try:
        votes = Votes(poses, weight, window, None, torch.bfloat16 if precision == "bf16" else None)
        parents = [torch.rand(*votes.lead, j, votes.dim, requires_grad=True) for _ in range(2)]
        with backend("triton"):
            agreement_step(votes, parents[0])[0].sum().backward()
            em_step(votes, None, (*parents, torch.rand(*votes.lead, j)))[1].sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    for kind, most in reckoned.items():
        taken = {name: bytes_ for name, bytes_ in found.items() if name.startswith(kind)}
        assert len(taken) >= 2
        assert max(taken.values()) <= most <= ROOM[capability], taken
