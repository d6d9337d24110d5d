"""Modules one after another, of which a GPU does some in one go."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.fused import autocasted, has_triton, wanted, watched

CONV = ([nn.Conv2d, nn.ReLU, nn.BatchNorm2d], [nn.Conv2d, nn.BatchNorm2d, nn.ReLU])
LINEAR = ([nn.Linear, nn.ReLU], [nn.Linear, nn.Sigmoid])


class Chain(nn.Sequential):
    """As nn.Sequential, in names and results.

    In a training step on a GPU, convolutions and linear layers leave their bias to the kernels of what follows.
    """

    def forward(self, x: Tensor) -> Tensor:
        modules = list(self)
        while modules:
            types = [type(module) for module in modules]
            if types[:3] in CONV:
                x = conv_norm_relu(x, *modules[:3])
                del modules[:3]
            elif types[:2] in LINEAR:
                x = linear_activation(x, *modules[:2])
                del modules[:2]
            else:
                x = modules.pop(0)(x)
        return x


def conv_norm_relu(x: Tensor, conv: nn.Module, second: nn.Module, third: nn.Module) -> Tensor:
    """A convolution, then batch norm and ReLU in either order.

    Shapes: [b, c, h, w] -> [b, c', h', w']
    """
    if (
        not _fuse(x, conv, second, third)
        or [type(conv), type(second), type(third)] not in CONV
        or not isinstance(conv, nn.Conv2d)
        or conv.padding_mode != "zeros"
    ):
        return third(second(conv(x)))
    from torchcaps.fused import norm_triton

    relu_first = isinstance(second, nn.ReLU)
    norm = third if relu_first else second
    maps = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    if isinstance(norm, nn.BatchNorm2d) and norm_triton.takes(maps, conv.bias, norm):
        return norm_triton.norm_with_relu(maps, conv.bias, norm, relu_first)
    if conv.bias is not None:
        maps = maps + conv.bias.to(maps.dtype)[:, None, None]
    return third(second(maps))


def linear_activation(x: Tensor, linear: nn.Module, activation: nn.Module) -> Tensor:
    """A linear layer, then ReLU or sigmoid.

    Shapes: [n, p] -> [n, d]
    """
    if (
        not _fuse(x, linear, activation)
        or [type(linear), type(activation)] not in LINEAR
        or not isinstance(linear, nn.Linear)
        or linear.bias is None
        or x.dim() != 2
    ):
        return activation(linear(x))
    from torchcaps.fused import bias_triton, linear_triton

    kind = "relu" if isinstance(activation, nn.ReLU) else "sigmoid"
    if len(x) <= linear_triton.ROWS:
        rows, weight = autocasted(x, linear.weight)
        if linear_triton.takes(rows, weight, linear.bias):
            return linear_triton.linear(rows, weight, linear.bias, kind)
    y = F.linear(x, linear.weight)
    if bias_triton.takes(y, linear.bias):
        return bias_triton.biased(y, linear.bias, kind)
    return activation(y + linear.bias.to(y.dtype))


def _fuse(x: Tensor, *modules: nn.Module) -> bool:
    """Whether kernels are asked for, and no hook waits for what goes between the modules."""
    return wanted(x.device, replicas=True) and has_triton() and all(m.training and not watched(m) for m in modules)
