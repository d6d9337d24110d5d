"""Checks and times the fused routing steps on a GPU: `python benchmarks/kernels.py`, about two minutes.

First every case is checked in a process of its own, several at a time, which also fills Triton's cache; then they are
timed one after another. A case that fails prints its error and the next goes on. With --small, other cases,
which are small, are checked in this one process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchcaps.ops import Votes, Window, agreement_step, backend, em_step, vote_budget

# name: batch, poses of one image, spatial ones channels-last; weight [g, a, j, e]; window
CASES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], Window | None]] = {
    "tsai-1": (128, (32, 16, 16, 16), (288, 4, 32, 4), Window(3, 2)),
    "tsai-2": (128, (32, 16, 7, 7), (288, 4, 32, 4), Window(3, 1)),
    "tsai-class": (128, (800, 16), (800, 4, 10, 4), None),
    "capsnet": (128, (1152, 8), (1152, 8, 10, 16), None),
    "large": (128, (3872, 8), (3872, 8, 196, 16), None),
    "cifar100": (64, (32, 36, 7, 7), (288, 6, 32, 6), Window(3, 1)),
    "em-conv1": (128, (32, 16, 16, 16), (288, 4, 32, 4), Window(3, 2)),
    "em-conv2": (128, (32, 16, 7, 7), (288, 4, 32, 4), Window(3, 1)),
    "em-class": (128, (800, 16), (32, 4, 10, 4), None),
}
SMALL: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], Window | None]] = {
    "vectors": (3, (19, 8), (19, 8, 10, 16), None),
    "matrices": (5, (2, 16, 7, 7), (18, 4, 5, 4), Window(3, 2)),
    "many parents": (2, (9, 8), (9, 8, 70, 8), None),
    "36 dims": (2, (2, 36, 5, 5), (18, 6, 7, 6), Window(3, 1)),
    "em-matrices": (5, (2, 16, 7, 7), (18, 4, 5, 4), Window(3, 2)),
    "em-many parents": (2, (9, 8), (9, 8, 70, 8), None),
    "em-36 dims": (2, (2, 36, 5, 5), (18, 6, 7, 6), Window(3, 1)),
    "em-shared": (3, (20, 16), (5, 4, 10, 4), None),
}
DTYPES = {"bf16": (torch.bfloat16, "high"), "tf32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}
CHECKED = [(case, "bf16") for case in CASES]
CHECKED += [(case, "tf32") for case in CASES if case != "cifar100"]
CHECKED += [("tsai-1", "fp32"), ("capsnet", "fp32"), ("em-conv2", "fp32")]
EM_SWEEP: dict[str, dict[str, Any]] = {  # other ways to cut up the first convolutional layer of EM
    "em, default": {},
    "em, 16 parents": {"block": 16},
    "em, 32 parents": {"block": 32},
    "em, 4 parents": {"block": 4},
    "em, 168 registers": {"registers": 168},
    "em, stages 1": {"stages": 1},
    "em, stages 3": {"stages": 3},
    "em, 4 a warp, 16 parents": {"low": 4, "block": 16},
    "em, 2 children": {"wide": 16},
    "em, rows apart": {"together": 1},
}
SWEEP: dict[str, dict[str, Any]] = EM_SWEEP | {  # and the first case of all
    "default": {},
    "stages 1": {"stages": 1},
    "128 registers": {"registers": 128},
    "8 a warp": {"low": 8, "wide": 128},
    "8 a warp, 2 children": {"low": 8},
    "2 children": {"wide": 32},
    "rows apart": {"together": 1},
    "2 rows together": {"together": 2},
    "512 programs": {"programs": 512},
    "3000 programs": {"programs": 3000},
}


def find(case: str) -> tuple[int, tuple[int, ...], tuple[int, ...], Window | None]:
    return SMALL[case] if case in SMALL else CASES[case]


def build(case: str, dtype: str, batch: int | None = None, device: str = "cuda") -> tuple[Votes, list[torch.Tensor]]:
    """Votes, and what goes in: poses and weight, then the parents, or for EM activations and logits of the parents."""
    images, pose, weight, window = find(case)
    kind, precision = DTYPES[dtype]
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    poses = torch.randn(batch or images, *pose, device=device).to(kind)
    if window is not None:
        poses = poses.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    w = (torch.randn(weight, device=device) * weight[1] ** -0.5).to(kind)
    votes = Votes(poses, w, window)
    if case.startswith("em-"):
        activations = torch.rand(*votes.lead, votes.in_caps, device=device)
        priors = torch.randn(*votes.lead, votes.parents, device=device)
        return votes, [poses, w, activations, priors]
    parents = torch.randn(*votes.lead, votes.parents, votes.dim, device=device).to(kind)
    return votes, [poses, w, parents]


def step(case: str, inputs: list[torch.Tensor], name: str) -> torch.Tensor:
    """One agreement step, or two steps of EM, of which the mean and the variance are returned."""
    poses, weight, *rest = inputs
    offset = None
    if case in ("em-class", "em-shared"):
        offset = torch.linspace(0, 1, poses.shape[1] // len(weight), device=poses.device)[None, :, None, None]
    with backend(name):
        dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        votes = Votes(poses, weight, find(case)[3], None if offset is None else offset.to(dtype))
        votes = votes.to(dtype) if name == "torch" else votes.with_products(poses.dtype)
        rest = [x.to(dtype) for x in rest]
        if not case.startswith("em-"):
            return agreement_step(votes, rest[0], scale=votes.dim**-0.5)[0]
        activations, priors = rest
        _, mean, variance, _ = em_step(votes, activations)
        parents = mean, variance + 5e-4, torch.nn.functional.logsigmoid(priors)
        mass, mean, variance, _ = em_step(votes, activations, parents)
        return torch.cat([mean, variance.sqrt(), mass[..., None]], -1)


def outcome(case: str, inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """What the step gives, then the gradients of its inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = step(case, inputs, name)
    torch.manual_seed(1)
    projection = torch.randn(result.shape, device=result.device)
    return [result.detach(), *torch.autograd.grad(result, inputs, projection.to(result.dtype))]


VOTE = Votes._vote


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) if x.dtype == torch.float32 else x


class RoundedToTF32(torch.autograd.Function):
    """Where PyTorch itself may or may not run in TF32: factors of votes rounded, and the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: bool) -> torch.Tensor:
        ctx.forth = forth
        return to_tf32(x.contiguous()) if forth else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return (grad if ctx.forth else to_tf32(grad.contiguous())), None


def vote_in_tf32(
    self: Votes, children: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor:
    """`Votes._vote` with factors rounded to TF32, forth and back; PyTorch does so on some devices and shapes only."""
    votes = VOTE(self, RoundedToTF32.apply(children, True), RoundedToTF32.apply(weight, True), None)
    votes = RoundedToTF32.apply(votes, False)
    if offset is None:
        return votes
    offset = offset.expand(len(weight), self.sharing, self.parents, self.dim)
    return votes + offset.permute(2, 0, 1, 3).flatten(1, 2)


def in_tf32(case: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outcome in plain PyTorch, with TF32 where the kernels have it."""
    before = torch.get_float32_matmul_precision()
    Votes._vote = vote_in_tf32  # type: ignore[method-assign]
    torch.set_float32_matmul_precision("highest")
    try:
        return outcome(case, inputs, "torch")
    finally:
        Votes._vote = VOTE  # type: ignore[method-assign]
        torch.set_float32_matmul_precision(before)


def check(case: str, dtype: str, device: str = "cuda", batch: int = 16) -> dict[str, Any]:
    """Error against float64, over the error of plain PyTorch in the same dtype: at most 2 is right."""
    _, inputs = build(case, dtype, batch, device)
    exact = outcome(case, [x.double() for x in inputs], "torch")
    plain = in_tf32(case, inputs) if dtype == "tf32" else outcome(case, inputs, "torch")
    fused = outcome(case, inputs, "triton")
    ratios, errors = [], []
    for e, p, f in zip(exact, plain, fused, strict=True):
        allowed = (p - e).abs().max() + 0.5e-6 * e.abs().max()
        ratios.append(round(float((f - e).abs().max() / allowed), 2))
        errors.append(float((f - e).abs().max() / e.abs().max()))
    again = outcome(case, inputs, "triton")
    same = [bool(torch.equal(x, y)) for x, y in zip(fused, again, strict=True)]
    return {"ratios": ratios, "errors": [f"{x:.1e}" for x in errors], "same again": same}


def worker(case: str, dtype: str, sweep: str | None) -> None:
    began = time.time()
    if sweep is not None:
        override(SWEEP[sweep])
        report: dict[str, Any] = {}
    else:
        report = check(case, dtype)
    _, inputs = build(case, dtype)
    outcome(case, inputs, "triton")
    torch.cuda.synchronize()
    print(json.dumps(report | {"seconds": round(time.time() - began, 1)}), flush=True)
    os._exit(0)  # threads of Triton and CUDA may abort an orderly exit, after all is said


def override(options: dict[str, Any]) -> Callable[[], None]:
    from torchcaps.ops import agreement_triton, em_triton, plan_triton

    before = em_triton._plan
    agreement_triton.plan = functools.partial(plan_triton.plan, **options)
    em_triton._plan = functools.partial(before, **options)

    def back() -> None:
        agreement_triton.plan, em_triton._plan = plan_triton.plan, before

    return back


def ask(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def median_ms(function: Callable[[], object], times: int = 15) -> float:
    for _ in range(2):
        function()
    spans = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return sorted(spans)[len(spans) // 2]


def kernel_times(function: Callable[[], object], times: int = 5) -> dict[str, float]:
    """Milliseconds in each kernel, for one call."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            function()
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total / 1000 / times for e in profile.key_averages()}
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:10])


def measure(case: str, dtype: str, name: str, times: int) -> dict[str, float]:
    _, inputs = build(case, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        projection = torch.randn_like(step(case, inputs, name))

    def forward() -> None:
        with torch.no_grad():
            step(case, inputs, name)

    def both() -> None:
        torch.autograd.grad(step(case, inputs, name), inputs, projection)

    row = {"forward": median_ms(forward, times)}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    row["both"] = median_ms(both, times)
    row["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if name == "triton":
        for key, span in kernel_times(both).items():
            print(f"  {case:11s} {dtype}  {span:8.3f} ms  {key[:70]}")
    return row


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # the next case goes on
        torch.cuda.empty_cache()
        print(f"  failed {arguments}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")
        return None


def compiled(case: str, dtype: str) -> float:
    _, inputs = build(case, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    run = torch.compile(lambda *x: step(case, list(x), "torch"), dynamic=False)
    with vote_budget(2**40):
        with torch.no_grad():
            projection = torch.randn_like(run(*inputs))
        return median_ms(lambda: torch.autograd.grad(run(*inputs), inputs, projection), 5)


def swept_case(name: str) -> tuple[str, str]:
    return ("em-conv1" if name in EM_SWEEP else "tsai-1"), "bf16"


def small(cases: Sequence[str], device: str = "cuda") -> None:
    wrong = 0
    for case in cases:
        for dtype in DTYPES:
            report = check(case, dtype, device, SMALL[case][0])
            wrong += not max(report["ratios"]) <= 2
            print(case, dtype, report, flush=True)
    print(f"{wrong} of {len(cases) * len(DTYPES)} beyond twice the error of plain PyTorch", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--sweep")
    parser.add_argument("--compile", action="store_true", help="times torch.compile of the reference too")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--small", nargs="*", choices=tuple(SMALL), help="these small sizes, checks only, one process")
    given = parser.parse_args()
    if given.small is not None:
        return small(given.small or tuple(SMALL))
    if given.worker:
        case, dtype = given.worker
        return worker(case, dtype, given.sweep)
    began = time.time()
    sweeps = [] if given.no_sweep else list(SWEEP)
    jobs = [["--worker", *which] for which in CHECKED]
    jobs += [["--worker", *swept_case(name), "--sweep", name] for name in sweeps if SWEEP[name].keys() - {"programs"}]
    with ThreadPoolExecutor(14) as pool:
        answers = list(pool.map(ask, jobs))
    for job, answer in zip(jobs, answers, strict=True):
        print(" ".join(job[1:]), answer, flush=True)
    print(f"checked in {time.time() - began:.0f} s", flush=True)

    table = []
    for case, dtype in CHECKED:
        ours = attempt(measure, case, dtype, "triton", 15)
        theirs = None
        if dtype != "fp32" and case != "large":
            with vote_budget(2**40):
                theirs = attempt(measure, case, dtype, "torch", 3)
        torch.cuda.empty_cache()
        table.append((case, dtype, ours, theirs))
    swept = []
    for name in sweeps:
        back = override(SWEEP[name])
        swept.append((name, attempt(measure, *swept_case(name), "triton", 10)))
        back()
    fast = {case: attempt(compiled, case, "bf16") for case in ("tsai-1", "em-conv1") if given.compile}

    print(f"\n{'':11s} {'':5s} {'fused':>31s}   {'plain eager':>28s}")
    print(f"{'':11s} {'':5s} {'forward ms':>12s}{'both ms':>10s}{'GiB':>9s}   {'forward':>10s}{'both':>9s}{'GiB':>9s}")
    for case, dtype, *rows in table:
        cells = ["".join(f"{r[k]:10.3f}" for k in ("forward", "both", "GiB")) if r else f"{'-':>30s}" for r in rows]
        print(f"{case:11s} {dtype:5s} " + "   ".join(cells))
    for name, row in swept:
        print(f"{name:24s}" + ("  failed" if row is None else f"{row['forward']:9.3f}{row['both']:9.3f}"))
    for case, span in fast.items():
        print(f"{case} bf16, torch.compile of the reference, both: {'failed' if span is None else f'{span:.3f} ms'}")
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
