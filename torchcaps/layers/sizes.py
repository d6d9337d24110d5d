"""Sizes that follow from the layers, so that no preset types them by hand."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from torchcaps.types import Image, ImageTooSmall

# What torch says when a window, a pooling, a reflection or an instance norm has too few pixels.
_TOO_FEW_PIXELS = re.compile(
    r"greater than actual input size|output size is too small|must be at least one|too large relative to input"
    r"|padding size should be less|spatial element|negative dimension|non-zero size",
    re.IGNORECASE,
)


def out_size(size: int, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """How many places a window takes along one side."""
    if size + 2 * padding < kernel:
        raise ImageTooSmall(f"a window of {kernel} does not fit {size} pixels, so the image is too small")
    return (size + 2 * padding - kernel) // stride + 1


def feature_shape(module: nn.Module, image: Image) -> Image:
    """What a module makes of one image, as [c, h, w], found without computing.

    The module is run in eval mode with copies of its weights on the meta device; one that cannot run there is run
    once for real. Its weights, buffers and modes are left as they were.
    """
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            features = _run(module, image)
    finally:
        for part, mode in training.items():
            part.training = mode
    given = list(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
    if not isinstance(features, Tensor) or features.dim() != 4:
        raise ValueError(f"a backbone must give features [b, c, h, w], got {given} for one image")
    _, channels, height, width = features.shape
    if height * width == 0:
        raise ImageTooSmall(f"image {_by(image)} is too small")
    return channels, height, width


def _run(module: nn.Module, image: Image) -> Tensor:
    tensors = [*module.parameters(), *module.buffers()]
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    home = tensors[0].device if tensors else torch.device("cpu")
    try:
        named = [*module.named_parameters(), *module.named_buffers()]
        copies = {name: torch.empty_like(t, device="meta") for name, t in named}
        return functional_call(module, copies, torch.empty(1, *image, dtype=dtype, device="meta"))
    except Exception as error:
        if home.type == "meta" or _is_about_size(error):
            raise _in_our_words(error, image) from error
    buffers = {name: t.clone() for name, t in module.named_buffers() if not is_lazy(t)}
    try:
        return functional_call(module, buffers, torch.zeros(1, *image, dtype=dtype, device=home))
    except (RuntimeError, ValueError) as error:
        raise _in_our_words(error, image) from error


def _is_about_size(error: Exception) -> bool:
    return isinstance(error, ImageTooSmall) or bool(_TOO_FEW_PIXELS.search(str(error)))


def _in_our_words(error: Exception, image: Image) -> ValueError:
    if _is_about_size(error):
        return ImageTooSmall(f"image {_by(image)} is too small")
    return ValueError(f"the backbone cannot take image {_by(image)}: {error}")


def _by(image: Image) -> str:
    return " x ".join(map(str, image))
