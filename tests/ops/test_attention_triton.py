"""Attention routing and grouped convolutions in Triton against plain PyTorch: outputs and every gradient.

Opt-in: `TRITON_INTERPRET=1 pytest tests/ops/test_attention_triton.py` on a CPU, or as it is where there is a GPU.
"""

from functools import partial

import pytest
import torch

from tests.fused.conftest import unwritten_is_nan  # noqa: F401
from tests.fused.kernels import DEVICE, DTYPES, OPT_IN, on
from tests.helpers import assert_as_accurate
from torchcaps.ops import backend
from torchcaps.ops.attention_triton import takes
from torchcaps.ops.grouped import convolve_groups
from torchcaps.routing import attention as routing
from torchcaps.routing.attention import attention_routing

pytestmark = OPT_IN
SIZES = {  # leading, i, j, d
    "one site": ((1,), 8, 3, 4),
    "classes": ((5,), 8, 10, 32),
    "map": ((3, 5, 5), 7, 2, 17),
    "one child": ((2,), 1, 2, 3),
    "most children": ((2,), 16, 1, 5),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["all", "own"])
@pytest.mark.parametrize("size", SIZES)
def test_attention(size, form, dtype, monkeypatch):
    lead, i, j, d = SIZES[size]
    inputs = [drawn(*lead, i, j, d), drawn(*((i, i) if form == "all" else (i,)), j, d)]

    def fused(votes, kernel):
        with monkeypatch.context() as patch, backend("triton"):
            patch.setattr(routing, "_by_formula", None)
            return attention_routing(votes, kernel).poses

    def formula(votes, kernel):
        return on("torch", attention_routing)(votes, kernel).poses

    assert_as_accurate(fused, formula, inputs, dtype)


def test_coupling_and_layout():
    votes, kernel = drawn(4, 3, 5, 6).permute(0, 2, 1, 3), drawn(5, 5, 3, 6)
    ours, theirs = on("triton", attention_routing)(votes, kernel), on("torch", attention_routing)(votes, kernel)
    torch.testing.assert_close(ours, theirs)


def test_what_does_not_fit_runs_on_pytorch():
    assert takes(drawn(2, 16, 3, 4), drawn(16, 16, 3, 4))
    assert not takes(drawn(2, 17, 3, 4), drawn(17, 17, 3, 4))
    assert not takes(drawn(2, 3, 3, 65), drawn(3, 3, 3, 65))
    assert not takes(drawn(2, 3, 3, 4).double(), drawn(3, 3, 3, 4))
    assert not takes(drawn(0, 3, 3, 4), drawn(3, 3, 3, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stride", "padding"), [(1, (1, 1)), (2, (0, 0)), (1, (0, 1))])
def test_convolve_groups(stride, padding, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which torch would make no use of at this size
    inputs = [drawn(2, 6, 7, 5), drawn(3, 4, 2, 3, 3), drawn(3, 4)]
    convolve = partial(convolve_groups, stride=stride, padding=padding)
    assert_as_accurate(on("triton", convolve), on("torch", convolve), inputs, dtype)
