"""Linear layers of few rows in kernels against plain PyTorch in float64."""

import pytest
import torch
from torch.func import vmap

from tests.fused.kernels import DEVICE, DTYPES, OPT_IN
from tests.helpers import assert_as_accurate

pytestmark = OPT_IN
SIZES = {  # rows, numbers in and out
    "one": (1, 1, 1),
    "odd": (3, 19, 17),
    "many blocks": (16, 150, 130),
    "most rows": (32, 33, 65),
}


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def ours(kind):
    from torchcaps.fused.linear_triton import linear, takes

    def run(x, weight, bias):
        assert takes(x, weight, bias.float())
        return linear(x, weight, bias.float(), kind)

    return run


def plain(kind):
    return lambda x, weight, bias: getattr(torch, kind)(torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["relu", "sigmoid"])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients(size, kind, dtype):
    n, p, d = SIZES[size]
    inputs = [drawn(n, p), drawn(d, p) / p**0.5, drawn(d)]
    assert_as_accurate(ours(kind), plain(kind), inputs, dtype)


def test_layout_and_replicas():
    """Rows with the replicas' axis second, and weights that lie the other way."""
    places = (1, 0, 0)
    inputs = [drawn(5, 3, 7), drawn(3, 7, 9).mT, drawn(3, 9)]
    assert_as_accurate(vmap(ours("relu"), places), vmap(plain("relu"), places), inputs, torch.float32)


def test_what_does_not_fit():
    from torchcaps.fused.linear_triton import takes

    assert takes(drawn(32, 3), drawn(5, 3), drawn(5))
    assert not takes(drawn(33, 3), drawn(5, 3), drawn(5))
    assert not takes(drawn(3, 3), drawn(5, 3).half(), drawn(5))
    assert not takes(drawn(3, 3), drawn(5, 3), drawn(5).half())
    assert not takes(drawn(3, 4), drawn(5, 3), drawn(5))
    assert not takes(drawn(3, 3), drawn(5, 3), drawn(4))
