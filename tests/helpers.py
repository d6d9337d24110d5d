"""Comparisons with nothing to tune, and what becomes of a test that lacks something."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest
import torch
from torch import Tensor

Function = Callable[..., Tensor | Sequence[Tensor | None]]


def lacking(why: str) -> NoReturn:
    """Skips, but where every change is tried nothing may be left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """All outputs that are tensors, then the gradient of each input of one fixed projection of them.

    The projection's entries are eighths, exact in every dtype; an input that is not used has gradient 0.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]
    generator = torch.Generator().manual_seed(0)
    eighths = [torch.randint(-8, 9, x.shape, generator=generator).to(x) / 8 for x in outputs]
    differentiable = [(x, e) for x, e in zip(outputs, eighths, strict=True) if x.requires_grad]
    gradients = torch.autograd.grad(
        [x for x, _ in differentiable],
        inputs,
        [e for _, e in differentiable],
        allow_unused=True,
        materialize_grads=True,
    )
    return [x.detach() for x in outputs] + list(gradients)


def assert_equal_with_gradients(function: Function, reference: Function, inputs: Sequence[Tensor], rtol=1e-9) -> None:
    """Outputs and gradients agree in float64, relative to the largest entry of each."""
    inputs = [x.double() for x in inputs]
    ours, expected = outputs_and_gradients(function, inputs), outputs_and_gradients(reference, inputs)
    for name, x, e in _named(ours, expected, inputs=inputs):
        assert x.shape == e.shape, f"{name}: {list(x.shape)} is not {list(e.shape)}"
        error, allowed = (x - e).abs().max(), rtol * e.abs().max() + 1e-14
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


def assert_as_accurate(fast: Function, reference: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """`fast` may err twice as much as `reference` in the same dtype, both measured against float64."""
    rounded = [x.to(dtype) for x in inputs]
    exact = outputs_and_gradients(reference, [x.double() for x in rounded])
    plain = outputs_and_gradients(reference, rounded)
    fused = outputs_and_gradients(fast, rounded)
    for name, e, p, f in _named(exact, plain, fused, inputs=inputs):
        error, allowed = (f - e).abs().max(), 2 * (p - e).abs().max() + 1e-6 * e.abs().max()
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


def _named(*lists: list[Tensor], inputs: Sequence[Tensor]):
    for k, entries in enumerate(zip(*lists, strict=True)):
        outputs = len(lists[0]) - len(inputs)
        yield (f"output {k}" if k < outputs else f"gradient {k - outputs}"), *entries
