"""Groups all at once against one after the other; tests/layers/test_encap.py has whole layers in both forms."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_equal_with_gradients
from torchcaps.ops import grouped
from torchcaps.ops.grouped import GroupedConv2d, GroupedConvTranspose2d, block_diagonal, map_groups


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(grouped, "spreads", lambda x, channels: True)


def test_block_diagonal_by_index():
    weight = torch.randn(3 * 2, 4, 5, 7)
    dense = block_diagonal(weight, 3)
    assert dense.shape == (6, 12, 5, 7)
    for g in range(3):
        for other in range(3):
            block = dense[2 * g : 2 * g + 2, 4 * other : 4 * other + 4]
            assert torch.equal(block, weight[2 * g : 2 * g + 2] if g == other else torch.zeros(2, 4, 5, 7))
    assert dense.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize(("kernel_size", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 1, 0)])
def test_convolution(groups, kernel_size, stride, padding, at_once):
    conv = GroupedConv2d(6, 12, kernel_size, stride, padding, groups=groups).double()

    def ours(x, weight, bias):
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, x)

    def groupwise(x, weight, bias):
        parts = zip(x.chunk(groups, 1), weight.chunk(groups), bias.chunk(groups), strict=True)
        return torch.cat([F.conv2d(*part, stride, padding) for part in parts], 1)

    assert_equal_with_gradients(ours, groupwise, [torch.randn(2, 6, 5, 7), conv.weight, conv.bias])


@pytest.mark.parametrize(("stride", "size"), [(1, (5, 7)), (2, (10, 13)), (2, None)])
def test_transposed_convolution(stride, size, at_once):
    conv = GroupedConvTranspose2d(6, 9, 3, stride, padding=1, groups=3).double()
    spare = (0, 0) if size is None else (size[0] - 4 * stride - 1, size[1] - 6 * stride - 1)

    def ours(x, weight, bias):
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x, size))

    def groupwise(x, weight, bias):
        parts = zip(x.chunk(3, 1), weight.chunk(3), bias.chunk(3), strict=True)
        return torch.cat([F.conv_transpose2d(*part, stride, 1, spare) for part in parts], 1)

    assert_equal_with_gradients(ours, groupwise, [torch.randn(2, 6, 5, 7), conv.weight, conv.bias])


def test_map(at_once):
    def loops(x, weight, bias):
        return torch.stack([x[:, :, g] @ weight[g] + bias[g] for g in range(4)], 2)

    assert_equal_with_gradients(map_groups, loops, [torch.randn(2, 3, 4, 5), torch.randn(4, 5, 6), torch.randn(4, 6)])


def test_a_cpu_goes_by_groups():
    assert not grouped.spreads(torch.zeros(1, 4, 2, 2), 4)
