"""CapsNet (Sabour, Frosst & Hinton 2017): dynamic routing.

`form="paper"` is procedure 1 and figure 1 as printed. `form="official"` adds what the released code has and the paper
does not say: biases inside the iterations, primary capsules scaled by 1/types, weights from a truncated normal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchcaps.functional import squash
from torchcaps.layers.backbone import conv_stem
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.init import mixture_normal_, sabour_official, truncated_normal_
from torchcaps.layers.linear import Init, LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_routing
from torchcaps.models.registry import register
from torchcaps.types import Image, Routing

SABOUR = "Sabour et al. 2017"


def build_capsnet(
    image: Image,
    classes: int,
    *,
    form: str,
    routing: str | Callable[..., Routing] = "dynamic",
    iterations: int = 3,
    detach_inner: bool = False,
    leak: bool = False,
    channels: int = 256,
    types: int = 32,
    dim: int = 8,
    out_dim: int = 16,
    same: bool = False,
    stride: int = 1,
    backbone: nn.Module | None = None,
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """One 9 x 9 convolution, 9 x 9 primary capsules of stride 2, class capsules.

    Args:
        same: keeps sizes by padding, as the released code does for CIFAR-10.
        stride: of the first convolution.
        backbone: in place of the first convolution.
    """
    if form not in ("paper", "official"):
        raise ValueError(f'form must be "paper" or "official", got {form!r}')
    official = form == "official"
    stem: Any = backbone or conv_stem(image[0], channels, kernel_size=9, stride=stride, padding=4 if same else 0)
    features, height, width = feature_shape(stem, image)
    primary = PrimaryCaps(
        features,
        types,
        dim,
        kernel_size=9,
        stride=2,
        padding=4 if same else 0,
        nonlinearity=squash,
        scale=1 / (types + leak) if official else 1.0,
    )
    height, width = primary.out_space(height, width)
    in_caps = types * height * width
    if official:
        inits: list[Init] = [partial(truncated_normal_, std=std) for std in (0.05, 0.1, 0.1)]
    else:
        inits = [nn.init.kaiming_normal_, nn.init.kaiming_normal_, partial(mixture_normal_, in_caps=in_caps, size=0.8)]
    bias = 0.1 if official else 0.0
    if backbone is None:
        _fill(stem[0], inits[0], bias)
    _fill(primary.conv, inits[1], bias)
    if routing == "dynamic":
        chosen: Callable[..., Routing] = partial(
            find_routing(routing), iterations=iterations, leak=leak, bias=official, detach_inner=detach_inner
        )
    else:
        chosen = find_routing(routing)
    return CapsNet(
        stem,
        primary,
        CapsuleStack(LinearCaps(in_caps, dim, classes, out_dim, chosen, init=inits[2])),
        LengthHead(),
        Decoder(classes * out_dim, image=image, init=sabour_official if official else None) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


def _fill(conv: nn.Module, init: Init, bias: float) -> None:
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    init(conv.weight)
    nn.init.constant_(conv.bias, bias)


@register(SABOUR, parameters="6.8M, 8.2M with decoder", operations="0.401G")
def capsnet_mnist(
    *,
    image: Image = (1, 28, 28),
    classes: int = 10,
    form: str = "paper",
    routing: str | Callable[..., Routing] = "dynamic",
    iterations: int = 3,
    detach_inner: bool = False,
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """Table 1's network; routing="self_attention" is the one in Mazzia's figures 5 and 7."""
    return build_capsnet(
        image,
        classes,
        form=form,
        routing=routing,
        iterations=iterations,
        detach_inner=detach_inner,
        decoder=decoder,
        objects=objects,
    )


@register(SABOUR, parameters="11.36M with decoder")
def capsnet_multimnist(
    *,
    image: Image = (1, 36, 36),
    classes: int = 10,
    form: str = "paper",
    routing: str | Callable[..., Routing] = "dynamic",
    iterations: int = 3,
    decoder: bool = True,
    objects: int = 2,
) -> CapsNet:
    """Two overlapping digits; both are decoded, one at a time."""
    return build_capsnet(
        image, classes, form=form, routing=routing, iterations=iterations, decoder=decoder, objects=objects
    )


@register(SABOUR)
def capsnet_cifar10(
    *,
    image: Image = (3, 24, 24),
    classes: int = 10,
    form: str = "paper",
    iterations: int = 3,
    leak: bool = True,
    decoder: bool = False,
) -> CapsNet:
    """24 x 24 crops, 64 types, and a "none of the above" for what no class explains."""
    return build_capsnet(
        image, classes, form=form, iterations=iterations, types=64, same=True, leak=leak, decoder=decoder
    )


@register(SABOUR)
def capsnet_smallnorb(
    *,
    image: Image = (2, 32, 32),
    classes: int = 5,
    form: str = "paper",
    iterations: int = 3,
    decoder: bool = False,
) -> CapsNet:
    """The MNIST network on pairs of 32 x 32 crops."""
    return build_capsnet(image, classes, form=form, iterations=iterations, decoder=decoder)


@register(SABOUR)
def capsnet_svhn(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    form: str = "paper",
    iterations: int = 3,
    decoder: bool = False,
) -> CapsNet:
    """The small one: 64 channels, 16 types of 6, class capsules of 8."""
    return build_capsnet(
        image, classes, form=form, iterations=iterations, channels=64, types=16, dim=6, out_dim=8, decoder=decoder
    )


@register(SABOUR)
def capsnet_affnist(
    *,
    image: Image = (1, 40, 40),
    classes: int = 10,
    form: str = "paper",
    iterations: int = 3,
    decoder: bool = True,
) -> CapsNet:
    """The MNIST network on a 40 x 40 canvas."""
    return build_capsnet(image, classes, form=form, iterations=iterations, decoder=decoder)


@register(SABOUR)
def capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    form: str = "paper",
    routing: str | Callable[..., Routing] = "dynamic",
    iterations: int = 3,
    backbone: nn.Module | None = None,
    leak: bool = False,
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """For your own images: the MNIST network, whose first stride grows until at most 12 x 12 sites are left."""
    return build_capsnet(
        image,
        classes,
        form=form,
        routing=routing,
        iterations=iterations,
        leak=leak,
        stride=max(1, -(-(max(image[1:]) - 8) // 32)),
        backbone=backbone,
        decoder=decoder,
        objects=objects,
    )
