"""Matrix capsules with EM routing (Hinton, Sabour & Frosst 2018), and its CIFAR form in Tsai's tables 6 and 7."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from torchcaps.functional import check_count
from torchcaps.layers.backbone import conv_stem
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.linear import Init, SharedCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import ActivationHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone, halved_until
from torchcaps.models.registry import register, variant
from torchcaps.routing import EMRouting, hinton_temperature
from torchcaps.types import Image

HINTON = "Hinton et al. 2018"
TSAI = "Tsai et al. 2020"
DIM = 16  # 4 x 4 poses


def em_backbone(in_channels: int, width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Conv2d(in_channels, width, 4, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())


@register(HINTON)
def em_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    backbone: str | nn.Module = "simple",
    channels: int = 256,
    largest: int | None = 20,
    types: tuple[int, int, int] = (32, 32, 32),
    bias: bool = True,
    iterations: int = 2,
    sites: bool = True,
    coordinates: bool = True,
    temperature: tuple[float, float] = (0.01, 0.95),
    variance_floor: float = 5e-4,
) -> CapsNet:
    """For your own images: the CIFAR-10 network, with residual blocks that halve the map of a large one.

    Args:
        backbone: "simple" (a convolution of 4 x 4 with batch norm), "conv" (5 x 5, Hinton's), "resnet" or a module.
        channels: of the first two.
        largest: side of the map up to which blocks after the backbone halve it; None leaves it as it is.
        types: of the primary and the two convolutional capsule layers; poses are 4 x 4.
        bias: of the primary convolutions.
        sites: parents of all windows a child stands in compete for it.
        coordinates: where a child stands is added to its votes for the classes.
        temperature: final and decay of `hinton_temperature`.
    """
    check_count("channels", channels)
    if len(types) != 3:
        raise ValueError(f"types must be three numbers, for the primary and two more layers, got {types!r}")
    for number in types:
        check_count("types", number)
    features = find_backbone(
        backbone,
        image,
        simple=lambda c: em_backbone(c, channels),
        conv=lambda c: conv_stem(c, channels, kernel_size=5, stride=2),
    )
    if largest is not None and not isinstance(backbone, nn.Module):
        features = halved_until(largest, features, image)
    out_channels, height, width = feature_shape(features, image)
    primary = PrimaryCaps(out_channels, types[0], DIM, kernel_size=1, bias=bias, activations=True)
    final, decay = temperature
    routing = partial(
        EMRouting,
        iterations=iterations,
        sites=sites,
        inverse_temperature=partial(hinton_temperature, final=final, decay=decay),
        variance_floor=variance_floor,
    )
    layers: list[nn.Module] = []
    shrunk = 1.0  # a parent, being a mean of n votes that point anywhere, starts sqrt(n) smaller than they are
    for below, above, stride in ((types[0], types[1], 2), (types[1], types[2], 1)):
        layer = ConvCaps(below, DIM, above, DIM, 3, stride, routing, pose="matrix", init=_votes_of_size_1(shrunk))
        height, width = layer.out_space(height, width)
        layers.append(layer)
        shrunk = math.sqrt(below * 3**2)
    layers.append(
        SharedCaps(
            types[2],
            types[2] * height * width,
            DIM,
            classes,
            DIM,
            routing,
            pose="matrix",
            coordinates=coordinates,
            init=_votes_of_size_1(shrunk),
        )
    )
    return CapsNet(features, primary, CapsuleStack(*layers), ActivationHead(), image=image, classes=classes)


def _votes_of_size_1(shrunk: float) -> Init:
    """From poses that much smaller; well above the variance floor."""
    return partial(nn.init.normal_, std=shrunk * DIM**-0.25)


@register(TSAI, parameters="1.71M, simple 0.45M")
@variant(em_capsnet, image=(3, 32, 32), backbone="resnet", largest=None)
def em_cifar10() -> None:
    """Table 6: 16 x 16 -> 7 x 7 -> 5 x 5 -> 10."""


@register(TSAI, parameters="1.76M, simple 0.50M")
@variant(em_capsnet, image=(3, 32, 32), classes=100, backbone="resnet", largest=None)
def em_cifar100() -> None:
    """Table 7."""


@register(HINTON, parameters="310K", operations="0.086G")
@variant(em_capsnet, image=(2, 32, 32), classes=5, backbone="conv", channels=32, largest=None, bias=False, iterations=3)
def em_smallnorb() -> None:
    """Figure 1 of the paper: A = channels, (B, C, D) = types; channels=64, types=(8, 16, 16) is its small network."""
