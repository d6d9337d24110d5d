"""Efficient-CapsNet (Mazzia, Salvetti & Chiaberge 2021): self-attention routing, a tenth of a million weights.

Strides, the order ReLU then norm, and the kernel of 7 for smallNORB are the released code's; the printed parameter
counts need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from torchcaps.functional import check_count, squash_exp
from torchcaps.layers.backbone import keras_batch_norm, keras_instance_norm
from torchcaps.layers.chain import Chain
from torchcaps.layers.decoder import ConvDecoder, Decoder
from torchcaps.layers.init import he_normal_, keras_conv_, mazzia_decoder, mixture_normal_
from torchcaps.layers.linear import Init, LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape, out_size
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import RoutedLengthHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone
from torchcaps.models.registry import register, variant
from torchcaps.routing import SelfAttentionRouting
from torchcaps.types import Image

MAZZIA = "Mazzia et al. 2021"
CHANNELS = (32, 64, 64, 128)
DIM, OUT_DIM = 8, 16


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
    return Chain(*layers)


@register(MAZZIA)
def efficient_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    hidden: Sequence[tuple[int, int]] = (),
    scale_by: str = "parent",
    strides: Sequence[int] | None = None,
    first_kernel: int = 5,
    norm: str = "batch",
    norm_init: str = "ones",
    norm_momentum: float = 0.01,
    primary: tuple[int, int] | None = None,
    backbone: str | nn.Module = "conv",
    decoder: bool = True,
    decoder_layers: str = "dense",
    decoder_output: str = "sigmoid",
    objects: int = 1,
) -> CapsNet:
    """For your own images: the MNIST network, with as many strides of 2, the last first, as leave at most 12 x 12.

    Args:
        hidden: capsules and their size, for layers between the primary and the class capsules.
        scale_by: see `SelfAttentionRouting`.
        strides: of the four convolutions.
        first_kernel: of the first convolution; the others have 3.
        norm: "batch" after ReLU, or "instance" after leaky ReLU.
        norm_init: of instance norms: "ones" for scales of 1 and shifts of 0, "released" for both from U(-0.05, 0.05).
        norm_momentum: of batch norms: how fast their statistics follow. Keras's 0.01 wants a thousand steps and more.
        primary: kernel and stride of the depthwise primary capsules; None takes in the whole map.
        backbone: "conv", the four convolutions; "resnet"; "plain3", "plain5", "plain7" or "wide5", see
            `plain_backbone`; or a module whose channels are a multiple of 8.
        decoder_layers: "dense" or "conv".
        decoder_output: "sigmoid" as released, or "linear", which standardised images need.
    """
    if norm_init not in ("ones", "released"):
        raise ValueError(f'norm_init must be "ones" or "released", got {norm_init!r}')
    stem = find_backbone(
        backbone, image, conv=lambda c: _stem(c, image, strides, first_kernel, norm, norm_init, norm_momentum)
    )
    channels, height, width = feature_shape(stem, image)
    if channels % DIM:
        raise ValueError(f"a backbone for capsules of {DIM} needs a multiple of {DIM} channels, got {channels}")
    kernel, stride = ((height, width), 1) if primary is None else primary
    first = PrimaryCaps(channels, channels // DIM, DIM, kernel, stride, nonlinearity=squash_exp, depthwise=True)
    keras_conv_(first.conv)
    height, width = first.out_space(height, width)
    in_caps, in_dim = channels // DIM * height * width, DIM
    layers = []
    for n, (out_caps, out_dim) in enumerate((*_pairs(hidden), (classes, OUT_DIM))):
        if n < len(hidden):
            init: Init = partial(mixture_normal_, in_caps=in_caps, size=1.0)
        else:
            init = partial(he_normal_, fan_in=out_caps * in_caps * in_dim)
        routing = partial(SelfAttentionRouting, scale_by=scale_by)
        layers.append(LinearCaps(in_caps, in_dim, out_caps, out_dim, routing, init=init))
        in_caps, in_dim = out_caps, out_dim
    return CapsNet(
        stem,
        first,
        CapsuleStack(*layers),
        RoutedLengthHead(),
        _decoder(classes, image, decoder_layers, decoder_output) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


def _pairs(hidden: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    for pair in hidden:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"hidden must be pairs of capsules and their size, such as ((16, 8),), got {hidden!r}")
        check_count("hidden capsules", pair[0])
        check_count("size of hidden capsules", pair[1])
    return [(caps, dim) for caps, dim in hidden]


def _stem(
    channels: int,
    image: Image,
    strides: Sequence[int] | None,
    first_kernel: int,
    norm: str,
    norm_init: str,
    norm_momentum: float,
) -> nn.Module:
    strides = _strides_for(max(image[1:])) if strides is None else strides
    if norm == "batch":
        return efficient_stem(channels, strides, first_kernel, norm=partial(keras_batch_norm, momentum=norm_momentum))
    if norm != "instance":
        raise ValueError(f'norm must be "batch" or "instance", got {norm!r}')
    released = norm_init == "released"
    return efficient_stem(
        channels,
        strides,
        first_kernel,
        relu=partial(nn.LeakyReLU, 0.3),
        norm=partial(keras_instance_norm, near_zero=released),
    )


def _decoder(classes: int, image: Image, layers: str, output: str) -> nn.Module:
    if layers == "dense":
        return Decoder(classes * OUT_DIM, image=image, output=output, init=mazzia_decoder)
    if layers != "conv":
        raise ValueError(f'decoder_layers must be "dense" or "conv", got {layers!r}')
    return ConvDecoder(classes * OUT_DIM, image=image, output=output)


def _strides_for(side: int, largest: int = 12) -> tuple[int, ...]:
    strides = (1, 1, 1, 2)
    for strides in ((1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2), (4, 2, 2, 2), (4, 4, 2, 2)):
        left = side
        for kernel_size, stride in zip((5, 3, 3, 3), strides, strict=True):
            left = out_size(left, kernel_size, stride)
        if left <= largest:
            break
    return strides


@register(MAZZIA, parameters="161K", operations="0.060G")
@variant(efficient_capsnet, image=(1, 28, 28), strides=(1, 1, 1, 2))
def efficient_capsnet_mnist() -> None:
    """28 -> 24 -> 22 -> 20 -> 9, then a 9 x 9 depthwise convolution gives 16 capsules of 8."""


@register(MAZZIA, parameters="151K")
@variant(
    efficient_capsnet,
    image=(2, 48, 48),
    classes=5,
    strides=(2, 1, 1, 2),
    first_kernel=7,
    norm="instance",
    decoder_layers="conv",
)
def efficient_capsnet_smallnorb() -> None:
    """48 -> 21 -> 19 -> 17 -> 8 with instance norm and leaky ReLU, and a convolutional decoder."""


@register(MAZZIA, parameters="154K")
@variant(efficient_capsnet, image=(1, 36, 36), strides=(1, 1, 2, 2), primary=(5, 2), objects=2)
def efficient_capsnet_multimnist() -> None:
    """36 -> 32 -> 30 -> 14 -> 6, then 5 x 5 depthwise with stride 2: the last row and column are not looked at."""
