"""The capsule networks that Tsai's and Li's tables compare with: dynamic and EM routing in their hands."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from torchcaps.functional import squash
from torchcaps.layers.backbone import conv_stem
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.init import mixture_normal_
from torchcaps.layers.linear import LinearCaps, SharedCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import ActivationHead, LengthHead, LinearHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone
from torchcaps.models.registry import register, variant
from torchcaps.routing import DynamicRouting, EMRouting
from torchcaps.types import Capsules, Image

TSAI = "Tsai et al. 2020"
LI = "Li et al. 2018"


@register(TSAI, parameters="12.45M, simple 7.99M")
def dynamic_cifar10(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    backbone: str | nn.Module = "resnet",
    iterations: int = 3,
    priors: bool = False,
    leak: bool = False,
    detach_inner: bool = False,
    decoder: bool = False,
    objects: int = 1,
) -> CapsNet:
    """Table 4; with backbone="simple" and decoder=True it is the CapsuleNet of Choi's table 1 (11.74M).

    After the ResNet, whose map is small, the primary capsules pad: the counts need it.
    """
    features = find_backbone(backbone, image, width=256, simple=partial(conv_stem, out_channels=256, kernel_size=9))
    channels, height, width = feature_shape(features, image)
    padding = 0 if backbone == "simple" else 4
    primary = PrimaryCaps(channels, 32, 8, kernel_size=9, stride=2, padding=padding, nonlinearity=squash)
    height, width = primary.out_space(height, width)
    in_caps = 32 * height * width
    routing = partial(DynamicRouting, iterations=iterations, priors=priors, leak=leak, detach_inner=detach_inner)
    init = partial(mixture_normal_, in_caps=in_caps, size=0.9 / classes**0.25)  # the margin loss adds up over classes
    return CapsNet(
        features,
        primary,
        CapsuleStack(LinearCaps(in_caps, 8, classes, 16, routing, init=init)),
        LengthHead(),
        Decoder(classes * 16, image=image) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


@register(TSAI, parameters="36.04M, simple 31.59M")
@variant(dynamic_cifar10, classes=100)
def dynamic_cifar100() -> None:
    """Table 5."""


@register(TSAI)
def dynamic_diverse_multimnist(
    *,
    image: Image = (1, 36, 36),
    classes: int = 10,
    iterations: int = 3,
    decoder: bool = False,
    objects: int = 2,
) -> CapsNet:
    """CapsNet* of figure 5: table 11's layers with dynamic routing and squash in place of layer norm.

    At size 2 squashed lengths of a half stay a half from layer to layer; shorter ones are squared away, and SGD does
    not bring them back.
    """
    stem = conv_stem(image[0], 1024, kernel_size=3, stride=2, padding=1)
    _, height, width = feature_shape(stem, image)
    primary = PrimaryCaps(1024, 16, 64, kernel_size=3, stride=2, bias=False, nonlinearity=squash)
    routing = partial(DynamicRouting, iterations=iterations)
    init = partial(mixture_normal_, in_caps=16 * 3 * 3, size=2.0)
    conv = ConvCaps(16, 64, 16, 64, kernel_size=3, stride=1, routing=routing, init=init)
    height, width = conv.out_space(*primary.out_space(height, width))
    in_caps = 16 * height * width
    init = partial(mixture_normal_, in_caps=in_caps, size=2.0)
    return CapsNet(
        stem,
        primary,
        CapsuleStack(conv, LinearCaps(in_caps, 64, classes, 64, routing, init=init)),
        LinearHead(64, several=True),
        Decoder(classes * 64, image=image) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


def build_capnet(image: Image, classes: int, routing: partial, activations: bool) -> CapsNet:
    """Li's CapNet: four convolutions, then two layers in which capsules of one type share their weights over space.

    Every site's 32 capsules of 8 vote for as many capsules of 16 as there are in the whole map (2,048 for 32 x 32).
    """
    stem = nn.Sequential()
    channels = image[0]
    for out_channels, stride in ((32, 1), (64, 1), (128, 2), (256, 2)):
        stem.append(nn.Conv2d(channels, out_channels, 3, stride, padding=1))
        stem.append(nn.BatchNorm2d(out_channels))
        stem.append(nn.ReLU())
        channels = out_channels
    _, height, width = feature_shape(stem, image)
    caps = 32 * height * width
    init = partial(mixture_normal_, in_caps=caps)
    first = SharedCaps(32, caps, 8, caps, 16, routing, bias=True, init=init)
    second = SharedCaps(32, caps, 16, classes, 16, routing, bias=True, init=init)
    return CapsNet(
        stem,
        SplitCaps(256, 32, activations),
        CapsuleStack(first, second),
        ActivationHead() if activations else LengthHead(),
        image=image,
        classes=classes,
    )


class SplitCaps(nn.Module):
    """The features themselves as capsules, squashed; for EM, activations from a further convolution.

    Shapes: features [b, f, h, w] -> poses [b, c, d, h, w], activations [b, c, h, w] or None
    """

    def __init__(self, in_channels: int, types: int, activations: bool):
        super().__init__()
        self.types = types
        self.activation = None
        if activations:
            self.activation = nn.Sequential(
                nn.Conv2d(in_channels, types, 3, padding=1), nn.BatchNorm2d(types), nn.Sigmoid()
            )

    def forward(self, features: Tensor) -> Capsules:
        poses = squash(features.unflatten(1, (self.types, -1)), dim=2)
        return Capsules(poses, None if self.activation is None else self.activation(features))


@register(LI, parameters="9.9M (151.24 Mb)")
def capnet_dynamic_cifar10(*, image: Image = (3, 32, 32), classes: int = 10, iterations: int = 3) -> CapsNet:
    """Table 1 (a)."""
    return build_capnet(image, classes, partial(DynamicRouting, iterations=iterations), activations=False)


@register(LI, parameters="10.0M (152.44 Mb)")
def capnet_em_cifar10(*, image: Image = (3, 32, 32), classes: int = 10, iterations: int = 3) -> CapsNet:
    """Table 1 (b)."""
    return build_capnet(image, classes, partial(EMRouting, iterations=iterations), activations=True)
