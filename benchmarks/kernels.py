"""Checks and times the fused routing steps on a GPU: `python benchmarks/kernels.py`, about a minute and a half.

First every case is checked in a process of its own, several at a time, which also fills Triton's cache; then they are
timed one after another. A case that fails prints its error and the next goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchcaps.ops import Votes, Window, agreement_step, backend, vote_budget

# name: batch, poses of one image, spatial ones channels-last; weight [g, a, j, e]; window
CASES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], Window | None]] = {
    "tsai-1": (128, (32, 16, 16, 16), (288, 4, 32, 4), Window(3, 2)),
    "tsai-2": (128, (32, 16, 7, 7), (288, 4, 32, 4), Window(3, 1)),
    "tsai-class": (128, (800, 16), (800, 4, 10, 4), None),
    "capsnet": (128, (1152, 8), (1152, 8, 10, 16), None),
    "large": (128, (3872, 8), (3872, 8, 196, 16), None),
    "cifar100": (64, (32, 36, 7, 7), (288, 6, 32, 6), Window(3, 1)),
}
DTYPES = {"bf16": (torch.bfloat16, "high"), "tf32": (torch.float32, "high"), "fp32": (torch.float32, "highest")}
CHECKED = [(case, "bf16") for case in CASES]
CHECKED += [(case, "tf32") for case in CASES if case != "cifar100"]
CHECKED += [("tsai-1", "fp32"), ("capsnet", "fp32")]
SWEEP: dict[str, dict[str, Any]] = {  # other ways to cut up the first case
    "default": {},
    "stages 1": {"stages": 1},
    "128 registers": {"registers": 128},
    "8 a warp": {"low": 8, "wide": 128},
    "8 a warp, 2 children": {"low": 8},
    "2 children": {"wide": 32},
    "512 programs": {"programs": 512},
    "3000 programs": {"programs": 3000},
}


def build(case: str, dtype: str, batch: int | None = None, device: str = "cuda") -> tuple[Votes, list[torch.Tensor]]:
    """Votes, and what they are made of: poses, weight and parents."""
    images, pose, weight, window = CASES[case]
    kind, precision = DTYPES[dtype]
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    poses = torch.randn(batch or images, *pose, device=device).to(kind)
    if window is not None:
        poses = poses.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    w = (torch.randn(weight, device=device) * weight[1] ** -0.5).to(kind)
    votes = Votes(poses, w, window)
    parents = torch.randn(*votes.lead, votes.parents, votes.dim, device=device).to(kind)
    return votes, [poses, w, parents]


def step(votes: Votes, inputs: list[torch.Tensor], window: Window | None, name: str) -> torch.Tensor:
    poses, weight, parents = inputs
    with backend(name):
        dtype = torch.float64 if poses.dtype == torch.float64 else torch.float32
        made = Votes(poses, weight, window)
        if name == "torch":
            made, parents = made.to(dtype), parents.to(dtype)
        return agreement_step(made, parents, scale=votes.dim**-0.5)[0]


def outcome(votes: Votes, inputs: list[torch.Tensor], window: Window | None, name: str) -> list[torch.Tensor]:
    """The mixture, then the gradients of poses, weight and parents."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    mixture = step(votes, inputs, window, name)
    torch.manual_seed(1)
    projection = torch.randn(mixture.shape, device=mixture.device)
    return [mixture.detach(), *torch.autograd.grad(mixture, inputs, projection.to(mixture.dtype))]


def check(case: str, dtype: str, device: str = "cuda", batch: int = 16) -> dict[str, Any]:
    """Error against float64, over the error of plain PyTorch in the same dtype: at most 2 is right."""
    votes, inputs = build(case, dtype, batch, device)
    window = CASES[case][3]
    exact = outcome(votes, [x.double() for x in inputs], window, "torch")
    plain = outcome(votes, inputs, window, "torch")
    fused = outcome(votes, inputs, window, "triton")
    ratios, errors = [], []
    for e, p, f in zip(exact, plain, fused, strict=True):
        allowed = (p - e).abs().max() + 0.5e-6 * e.abs().max()
        ratios.append(round(float((f - e).abs().max() / allowed), 2))
        errors.append(float((f - e).abs().max() / e.abs().max()))
    again = outcome(votes, inputs, window, "triton")
    same = [bool(torch.equal(x, y)) for x, y in zip(fused, again, strict=True)]
    return {"ratios": ratios, "errors": [f"{x:.1e}" for x in errors], "same again": same}


def worker(case: str, dtype: str, sweep: str | None) -> None:
    began = time.time()
    if sweep is not None:
        override(SWEEP[sweep])
        report: dict[str, Any] = {}
    else:
        report = check(case, dtype)
    votes, inputs = build(case, dtype)
    outcome(votes, inputs, CASES[case][3], "triton")
    torch.cuda.synchronize()
    print(json.dumps(report | {"seconds": round(time.time() - began, 1)}))


def override(options: dict[str, Any]) -> Callable[[], None]:
    from torchcaps.ops import agreement_triton, votes_triton

    agreement_triton.plan = functools.partial(votes_triton.plan, **options)
    return lambda: setattr(agreement_triton, "plan", votes_triton.plan)


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
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:6])


def measure(case: str, dtype: str, name: str, times: int) -> dict[str, float]:
    votes, inputs = build(case, dtype)
    window = CASES[case][3]
    inputs = [x.requires_grad_() for x in inputs]
    projection = torch.randn(*votes.lead, votes.parents, votes.dim, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            step(votes, inputs, window, name)

    def both() -> None:
        torch.autograd.grad(step(votes, inputs, window, name), inputs, projection)

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
    votes, inputs = build(case, dtype)
    window = CASES[case][3]
    inputs = [x.requires_grad_() for x in inputs]
    run = torch.compile(lambda *x: step(votes, list(x), window, "torch"), dynamic=False)
    projection = torch.randn(*votes.lead, votes.parents, votes.dim, device="cuda")
    with vote_budget(2**40):
        return median_ms(lambda: torch.autograd.grad(run(*inputs), inputs, projection), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--sweep")
    parser.add_argument("--compile", action="store_true", help="times torch.compile of the reference too")
    parser.add_argument("--no-sweep", action="store_true")
    given = parser.parse_args()
    if given.worker:
        return worker(*given.worker, given.sweep)
    began = time.time()
    sweeps = [] if given.no_sweep else list(SWEEP)
    jobs = [["--worker", *which] for which in CHECKED]
    jobs += [["--worker", "tsai-1", "bf16", "--sweep", name] for name in sweeps if SWEEP[name].keys() - {"programs"}]
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
        swept.append((name, attempt(measure, "tsai-1", "bf16", "triton", 10)))
        back()
    fast = attempt(compiled, "tsai-1", "bf16") if given.compile else None

    print(f"\n{'':11s} {'':5s} {'fused':>31s}   {'plain eager':>28s}")
    print(f"{'':11s} {'':5s} {'forward ms':>12s}{'both ms':>10s}{'GiB':>9s}   {'forward':>10s}{'both':>9s}{'GiB':>9s}")
    for case, dtype, *rows in table:
        cells = ["".join(f"{r[k]:10.3f}" for k in ("forward", "both", "GiB")) if r else f"{'-':>30s}" for r in rows]
        print(f"{case:11s} {dtype:5s} " + "   ".join(cells))
    for name, row in swept:
        print(f"{name:24s}" + ("  failed" if row is None else f"{row['forward']:9.3f}{row['both']:9.3f}"))
    if fast is not None:
        print(f"tsai-1 bf16, torch.compile of the reference, both: {fast:.3f} ms")
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
