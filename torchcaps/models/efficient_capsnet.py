"""Efficient-CapsNet (Mazzia, Salvetti & Chiaberge 2021): self-attention routing, a tenth of a million weights.

Strides, the order ReLU then norm, and the kernel of 7 for smallNORB are the released code's; the printed parameter
counts need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from torchcaps.functional import squash_exp
from torchcaps.layers.decoder import ConvDecoder, Decoder
from torchcaps.layers.init import he_normal_, keras_conv_, mazzia_decoder
from torchcaps.layers.linear import LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape, out_size
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.models.registry import register
from torchcaps.routing import SelfAttentionRouting
from torchcaps.types import Image

MAZZIA = "Mazzia et al. 2021"
CHANNELS = (32, 64, 64, 128)
TYPES, DIM, OUT_DIM = 16, 8, 16


def keras_batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


def efficient_stem(
    in_channels: int,
    strides: Sequence[int],
    first_kernel: int = 5,
    *,
    relu: Callable[[], nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] = keras_batch_norm,
) -> nn.Sequential:
    """Four convolutions, each followed by its nonlinearity and then its norm."""
    layers: list[nn.Module] = []
    for out_channels, kernel_size, stride in zip(CHANNELS, (first_kernel, 3, 3, 3), strides, strict=True):
        conv = keras_conv_(nn.Conv2d(in_channels, out_channels, kernel_size, stride), "he_normal")
        layers += [conv, relu(), norm(out_channels)]
        in_channels = out_channels
    return nn.Sequential(*layers)


def build_efficient(
    image: Image,
    classes: int,
    stem: nn.Module,
    *,
    kernel_size: int | None = None,
    stride: int = 1,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    decoder: nn.Module | None,
    objects: int = 1,
) -> CapsNet:
    """Depthwise primary capsules over the stem's features, then self-attention.

    Args:
        kernel_size: of the primary capsules; None takes in the whole map.
        hidden: capsules and their size, for layers between the primary and the class capsules.
    """
    channels, height, width = feature_shape(stem, image)
    kernel = (height, width) if kernel_size is None else kernel_size
    primary = PrimaryCaps(channels, channels // DIM, DIM, kernel, stride, nonlinearity=squash_exp, depthwise=True)
    keras_conv_(primary.conv)
    height, width = primary.out_space(height, width)
    layers = []
    in_caps, in_dim = channels // DIM * height * width, DIM
    for out_caps, out_dim in (*hidden, (classes, OUT_DIM)):
        layers.append(
            LinearCaps(
                in_caps,
                in_dim,
                out_caps,
                out_dim,
                partial(SelfAttentionRouting, scale_by=scale_by),
                init=partial(he_normal_, fan_in=out_caps * in_caps * in_dim),
            )
        )
        in_caps, in_dim = out_caps, out_dim
    return CapsNet(
        stem, primary, CapsuleStack(*layers), LengthHead(), decoder, image=image, classes=classes, objects=objects
    )


def _decoder(classes: int, image: Image) -> Decoder:
    return Decoder(classes * OUT_DIM, image=image, init=mazzia_decoder)


@register(MAZZIA, parameters="161K", operations="0.060G")
def efficient_capsnet_mnist(
    *,
    image: Image = (1, 28, 28),
    classes: int = 10,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """28 -> 24 -> 22 -> 20 -> 9, then a 9 x 9 depthwise convolution gives 16 capsules of 8."""
    return build_efficient(
        image,
        classes,
        efficient_stem(image[0], strides=(1, 1, 1, 2)),
        hidden=hidden,
        scale_by=scale_by,
        decoder=_decoder(classes, image) if decoder else None,
        objects=objects,
    )


@register(MAZZIA, parameters="151K")
def efficient_capsnet_smallnorb(
    *,
    image: Image = (2, 48, 48),
    classes: int = 5,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    norm_init: str = "ones",
    decoder: bool = True,
    decoder_output: str = "sigmoid",
) -> CapsNet:
    """Instance norm and leaky ReLU, a stride of 2 at the start, and a convolutional decoder.

    Args:
        norm_init: "ones" for scales of 1 and shifts of 0, "released" for both from U(-0.05, 0.05).
        decoder_output: "sigmoid" as released, or "linear", which standardised images need.
    """
    if norm_init not in ("ones", "released"):
        raise ValueError(f'norm_init must be "ones" or "released", got {norm_init!r}')

    def norm(channels: int) -> nn.Module:
        module = nn.InstanceNorm2d(channels, eps=1e-3, affine=True)
        if norm_init == "released":
            nn.init.uniform_(module.weight, -0.05, 0.05)
            nn.init.uniform_(module.bias, -0.05, 0.05)
        return module

    stem = efficient_stem(image[0], strides=(2, 1, 1, 2), first_kernel=7, relu=partial(nn.LeakyReLU, 0.3), norm=norm)
    return build_efficient(
        image,
        classes,
        stem,
        hidden=hidden,
        scale_by=scale_by,
        decoder=ConvDecoder(classes * OUT_DIM, image=image, output=decoder_output) if decoder else None,
    )


@register(MAZZIA, parameters="154K")
def efficient_capsnet_multimnist(
    *,
    image: Image = (1, 36, 36),
    classes: int = 10,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    decoder: bool = True,
    objects: int = 2,
) -> CapsNet:
    """36 -> 32 -> 30 -> 14 -> 6, then 5 x 5 depthwise with stride 2: the last row and column are not looked at."""
    return build_efficient(
        image,
        classes,
        efficient_stem(image[0], strides=(1, 1, 2, 2)),
        kernel_size=5,
        stride=2,
        hidden=hidden,
        scale_by=scale_by,
        decoder=_decoder(classes, image) if decoder else None,
        objects=objects,
    )


@register(MAZZIA)
def efficient_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    backbone: nn.Module | None = None,
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """For your own images: the MNIST network, with as many strides of 2, the last first, as leave at most 12 x 12."""
    return build_efficient(
        image,
        classes,
        backbone or efficient_stem(image[0], _strides_for(max(image[1:]))),
        hidden=hidden,
        scale_by=scale_by,
        decoder=_decoder(classes, image) if decoder else None,
        objects=objects,
    )


def _strides_for(side: int, largest: int = 12) -> tuple[int, ...]:
    strides = (1, 1, 1, 2)
    for strides in ((1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2), (4, 2, 2, 2)):
        left = side
        for kernel_size, stride in zip((5, 3, 3, 3), strides, strict=True):
            left = out_size(left, kernel_size, stride)
        if left <= largest:
            break
    return strides
