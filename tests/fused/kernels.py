"""What the tests of these kernels share.

They are opt-in: `TRITON_INTERPRET=1 pytest tests/fused` on a CPU, or as they are where there is a GPU.
"""

import os

import pytest
import torch

from torchcaps.ops import backend

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA  # which the interpreter cuts off, not rounds
OPT_IN = [
    pytest.mark.triton,
    pytest.mark.skipif(not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter"),
]


def on(name, function):
    def run(*inputs):
        with backend(name):
            return function(*inputs)

    return run


def fused(function, module, monkeypatch):
    """The function on Triton, which must not fall back to the module's formulas: these widen first."""

    def run(*inputs):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(module, "widen", None)
            return function(*inputs)

    return run
