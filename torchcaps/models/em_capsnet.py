"""Matrix capsules with EM routing (Hinton, Sabour & Frosst 2018), and its CIFAR form in Tsai's tables 6 and 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import nn

from torchcaps.layers.backbone import conv_stem
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.linear import SharedCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import ActivationHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone
from torchcaps.models.registry import register
from torchcaps.routing import EMRouting
from torchcaps.types import Image

HINTON = "Hinton et al. 2018"
TSAI = "Tsai et al. 2020"


def build_em(
    image: Image,
    classes: int,
    backbone: nn.Module,
    *,
    types: Sequence[int] = (32, 32, 32),
    dim: int = 16,
    bias: bool,
    iterations: int,
    sites: bool,
) -> CapsNet:
    """Primary capsules, two convolutional layers of 3 x 3 windows, class capsules whose matrices are shared over sites.

    Args:
        types: of the primary and the two convolutional layers.
        bias: of the primary convolutions.
    """
    channels, height, width = feature_shape(backbone, image)
    primary = PrimaryCaps(channels, types[0], dim, kernel_size=1, bias=bias, activations=True)
    routing = partial(EMRouting, iterations=iterations, sites=sites)
    layers: list[nn.Module] = []
    shrunk = 1.0  # a parent, being a mean of n votes that point anywhere, starts sqrt(n) smaller than they are
    for below, above, stride in ((types[0], types[1], 2), (types[1], types[2], 1)):
        init = partial(nn.init.normal_, std=shrunk * dim**-0.25)  # votes of size 1, well above the variance floor
        layer = ConvCaps(below, dim, above, dim, 3, stride, routing, pose="matrix", init=init)
        height, width = layer.out_space(height, width)
        layers.append(layer)
        shrunk = math.sqrt(below * 3**2)
    init = partial(nn.init.normal_, std=shrunk * dim**-0.25)
    layers.append(
        SharedCaps(
            types[2],
            types[2] * height * width,
            dim,
            classes,
            dim,
            routing,
            pose="matrix",
            coordinates=True,
            init=init,
        )
    )
    return CapsNet(backbone, primary, CapsuleStack(*layers), ActivationHead(), image=image, classes=classes)


def em_backbone(in_channels: int) -> nn.Module:
    conv = nn.Conv2d(in_channels, 256, 4, stride=2, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(256), nn.ReLU())


@register(TSAI, parameters="1.71M, simple 0.45M")
def em_cifar10(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    backbone: str | nn.Module = "resnet",
    iterations: int = 2,
    sites: bool = True,
) -> CapsNet:
    """Table 6: 16 x 16 -> 7 x 7 -> 5 x 5 -> 10."""
    features = find_backbone(backbone, image[0], simple=em_backbone)
    return build_em(image, classes, features, bias=True, iterations=iterations, sites=sites)


@register(TSAI, parameters="1.76M, simple 0.50M")
def em_cifar100(
    *,
    image: Image = (3, 32, 32),
    classes: int = 100,
    backbone: str | nn.Module = "resnet",
    iterations: int = 2,
    sites: bool = True,
) -> CapsNet:
    """Table 7."""
    features = find_backbone(backbone, image[0], simple=em_backbone)
    return build_em(image, classes, features, bias=True, iterations=iterations, sites=sites)


@register(HINTON, parameters="310K", operations="0.086G")
def em_smallnorb(
    *,
    image: Image = (2, 32, 32),
    classes: int = 5,
    channels: int = 32,
    types: tuple[int, int, int] = (32, 32, 32),
    iterations: int = 3,
    sites: bool = True,
) -> CapsNet:
    """Figure 1 of the paper: A = channels, (B, C, D) = types; channels=64, types=(8, 16, 16) is its small network."""
    stem = conv_stem(image[0], channels, kernel_size=5, stride=2)
    return build_em(image, classes, stem, types=types, bias=False, iterations=iterations, sites=sites)


@register(HINTON)
def em_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    backbone: nn.Module | None = None,
    types: tuple[int, int, int] = (32, 32, 32),
    iterations: int = 2,
    sites: bool = True,
) -> CapsNet:
    """For your own images: strided convolutions until at most 20 x 20 are left, then the same capsules."""
    if backbone is None:
        halvings = max(1, math.ceil(math.log2(max(image[1:]) / 20)))
        backbone = nn.Sequential(em_backbone(image[0]), *(em_backbone(256) for _ in range(halvings - 1)))
    return build_em(image, classes, backbone, types=types, bias=True, iterations=iterations, sites=sites)
