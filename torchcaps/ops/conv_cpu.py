"""Two convolutions of primary capsules for which a CPU has something quicker.

Large kernels that move in strides leave short rows, and torch's own, which goes row by row, reaches two thirds of what
a matrix product does. With the channels last, what a kernel's row covers lies in one run, so gathering it is a plain
copy, and the rest are matrix products.

Depthwise kernels as large as the map stand in one place: each channel is weighed and summed, and so are its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.fused import switch

PIECE = 2**23  # bytes gathered at a time
SHORT = 16  # columns of a result, below which its rows are short
TERMS = 1024  # of the sums of one kernel row, from which a product pays


def _free(images: Tensor, weight: Tensor) -> bool:
    """Whether these are numbers on a CPU that nobody casts or traces, or wants convolved by torch."""
    return (
        images.device.type == "cpu"
        and switch._backend == "auto"
        and images.dtype == weight.dtype
        and images.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def suits(images: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether `convolve` is quicker. Shapes: images [b, c, h, w], weight [o, c, y, x]"""
    channels_last = torch.channels_last
    return (
        _free(images, weight)
        and stride > 1
        and weight.shape[1] * weight.shape[3] >= TERMS
        and images.shape[2] >= weight.shape[2]
        and 0 <= images.shape[3] - weight.shape[3] < stride * (SHORT - 1)
        and images.is_contiguous(memory_format=channels_last)
        and weight.is_contiguous(memory_format=channels_last)
    )


def covers(images: Tensor, weight: Tensor) -> bool:
    """Whether `weigh` will do. Shapes: images [b, c, h, w], weight [c, 1, y, x]"""
    return _free(images, weight) and weight.shape[1] == 1 and images.shape[1:] == (len(weight), *weight.shape[2:])


def weigh(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Shapes: images [b, c, h, w], weight [c, 1, h, w], bias [c] -> [b, c, 1, 1]"""
    if not torch.is_grad_enabled():
        return _weighed(images, weight, bias)
    out: Tensor = _Weigh.apply(images, weight, bias)
    return out


def _weighed(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if len(images) != 1:
        return F.conv2d(images, weight, bias, groups=len(weight))
    sums = (images * weight[:, 0]).sum((2, 3), keepdim=True)
    return sums if bias is None else sums.add_(bias[:, None, None])


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(images, weight)
        return _weighed(images, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        of_images, of_weight, of_bias = ctx.needs_input_grad
        last = not images.is_contiguous()  # the channels, in everything that is as large
        order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
        back = (0, 3, 1, 2) if last else (0, 1, 2, 3)
        d_images = d_weight = None
        if of_images:
            d_images = (grad.permute(order) * weight.transpose(0, 1).permute(order).contiguous()).permute(back)
        if of_weight:
            d_weight = (grad.permute(order) * images.permute(order)).sum(0, keepdim=True).permute(back).transpose(0, 1)
        return d_images, d_weight, grad.sum((0, 2, 3)) if of_bias else None


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """Shapes: images [b, c, h, w], weight [o, c, y, x], bias [o] -> [b, o, h', w']"""
    if not torch.is_grad_enabled():
        return _convolved(images, weight, bias, stride)
    out: Tensor = _Convolution.apply(images, weight, bias, stride)
    return out


def _convolved(images: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    windows = _Windows(images, weight, stride)
    kernel = weight.permute(0, 2, 3, 1)  # [o, y, x, c]
    out = images.new_empty(len(images), *windows.space, len(weight))
    for some in windows.pieces():
        part = out[some].flatten(0, 2)
        part.zero_() if bias is None else part.copy_(bias)
        for row in range(kernel.shape[1]):
            part.addmm_(windows.gather(some, row), kernel[:, row].flatten(1).T)
    return out.permute(0, 3, 1, 2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride = stride
        return _convolved(images, weight, bias, stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        of_images, of_weight, of_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad):
            # second derivatives or many gradients at once are asked for, which torch's own has
            sizes, step = [len(weight)], [ctx.stride, ctx.stride]
            needed = [of_images, of_weight, of_bias]
            found = torch.ops.aten.convolution_backward(
                grad, images, weight, sizes, step, [0, 0], [1, 1], False, [0, 0], 1, needed
            )
            return *found, None
        windows = _Windows(images, weight, ctx.stride)
        kernel = weight.permute(0, 2, 3, 1)
        above = grad.permute(0, 2, 3, 1).contiguous()  # [b, y, x, o]
        d_images = images.new_zeros(windows.images.shape) if of_images else None
        d_weight = torch.zeros_like(kernel, memory_format=torch.contiguous_format) if of_weight else None
        for some in windows.pieces():
            part = above[some].flatten(0, 2)
            for row in range(kernel.shape[1]):
                if d_weight is not None:
                    d_weight[:, row].flatten(1).addmm_(part.T, windows.gather(some, row))
                if d_images is not None:
                    below = torch.mm(part, kernel[:, row].flatten(1), out=windows.room(some))
                    windows.scatter(d_images, below, some, row)
        return (
            None if d_images is None else d_images.permute(0, 3, 1, 2),
            None if d_weight is None else d_weight.permute(0, 3, 1, 2),
            above.sum((0, 1, 2)) if of_bias else None,
            None,
        )


class _Windows:
    """What one row of the kernel covers, wherever the kernel stands."""

    def __init__(self, images: Tensor, weight: Tensor, stride: int):
        self.images, self.stride = images.permute(0, 2, 3, 1), stride  # [b, h, w, c]
        self.columns = weight.shape[3]
        tall, wide = ((images.shape[2 + n] - weight.shape[2 + n]) // stride for n in range(2))
        self.space = tall + 1, wide + 1
        self.run = self.columns * images.shape[1]
        one = self.space[0] * self.space[1] * self.run * images.itemsize
        count = -(-len(images) // max(1, PIECE // one))
        self.some = max(1, -(-len(images) // max(1, count)))
        self._room = images.new_empty(self.some, *self.space, self.run)

    def pieces(self) -> list[slice]:
        return [slice(n, min(n + self.some, len(self.images))) for n in range(0, len(self.images), self.some)]

    def room(self, some: slice) -> Tensor:
        return self._room[: some.stop - some.start].flatten(0, 2)

    def gather(self, some: slice, row: int) -> Tensor:
        """Shapes: -> [(b y x), (k c)]"""
        seen = self._seen(self.images[some], row).unfold(2, self.columns, self.stride)  # [b, y, x, c, k]
        room = self._room[: len(seen)]
        room.unflatten(3, (self.columns, -1)).copy_(seen.mT)
        return room.flatten(0, 2)

    def scatter(self, out: Tensor, x: Tensor, some: slice, row: int) -> None:
        """Shapes: out [b, h, w, c], x [(b y x), (k c)]"""
        seen = self._seen(out[some], row)
        parts = x.view(len(seen), *self.space, self.columns, -1)
        span = self.stride * (self.space[1] - 1) + 1
        for column in range(self.columns):
            seen[:, :, column : column + span : self.stride] += parts[:, :, :, column]

    def _seen(self, images: Tensor, row: int) -> Tensor:
        return images[:, row : row + self.stride * (self.space[0] - 1) + 1 : self.stride]
