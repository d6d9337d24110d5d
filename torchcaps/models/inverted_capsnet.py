"""Inverted dot-product attention (Tsai, Srivastava, Goh & Salakhutdinov 2020), tables 8 to 11.

The ablations of figure 4: `norm=False` is A, `concurrent=False` B, `activations=True` C. The released code reads its
windows in another order, `windows="scrambled"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from torchcaps.functional import side_of
from torchcaps.layers.backbone import BasicBlock, conv_stem, simple_backbone
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.linear import LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import LinearHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone, find_routing
from torchcaps.models.registry import register
from torchcaps.routing import InvertedAttentionRouting
from torchcaps.types import Image, Routing

TSAI = "Tsai et al. 2020"


def build_inverted(
    image: Image,
    classes: int,
    backbone: nn.Module,
    *,
    types: int,
    dim: int,
    convs: Sequence[tuple[int, int]],
    hidden: Sequence[int] = (),
    primary_kernel: tuple[int, int] = (1, 1),
    pose: str = "matrix",
    iterations: int = 2,
    concurrent: bool = True,
    norm: bool = True,
    scaled: bool = True,
    start: str = "zero",
    activations: bool = False,
    windows: str = "true",
    routing: str | Callable[..., Routing] | None = None,
    several: bool = False,
    decoder: bool = False,
    objects: int = 1,
) -> CapsNet:
    """Primary capsules, convolutional capsules, class capsules, one linear map to the logits.

    Args:
        convs: kernel and stride of each convolutional capsule layer.
        hidden: capsules of linear layers before the class capsules.
        primary_kernel: kernel and stride of the primary capsules.
        routing: in place of inverted attention; it then iterates within each layer.
        several: an image may have several classes (sigmoid), not just one (softmax).
    """
    activated = activations or routing == "em"
    if routing is None:
        routing = partial(
            InvertedAttentionRouting,
            iterations=1 if concurrent else iterations,
            norm=norm,
            scaled=scaled,
            start=start,
            activations=activations,
        )
    else:
        routing, concurrent = find_routing(routing), False
    channels, height, width = feature_shape(backbone, image)
    kernel_size, stride = primary_kernel
    primary = PrimaryCaps(
        channels,
        types,
        dim,
        kernel_size,
        stride,
        bias=False,
        nonlinearity=nn.LayerNorm(dim) if norm else None,
        activations=activations,
    )
    height, width = primary.out_space(height, width)
    size = side_of(dim) if pose == "matrix" else dim  # numbers of a pose that meet in one product

    layers: list[nn.Module] = []
    for kernel_size, stride in convs:
        init = partial(nn.init.normal_, std=math.sqrt(types / (size * types * kernel_size**2)))
        layer = ConvCaps(types, dim, types, dim, kernel_size, stride, routing, pose=pose, windows=windows, init=init)
        height, width = layer.out_space(height, width)
        layers.append(layer)
    in_caps = types * height * width
    for out_caps in (*hidden, classes):
        init = partial(nn.init.normal_, std=math.sqrt(out_caps / (size * in_caps)))
        layers.append(LinearCaps(in_caps, dim, out_caps, dim, routing, pose=pose, init=init))
        in_caps = out_caps
    return CapsNet(
        backbone,
        primary,
        CapsuleStack(*layers, iterations=iterations if concurrent else 1),
        LinearHead(dim, several, activated),
        Decoder(classes * dim, image=image) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


@register(TSAI, parameters="1.83M, simple 0.56M")
def inverted_cifar10(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    backbone: str | nn.Module = "resnet",
    iterations: int = 2,
    concurrent: bool = True,
    norm: bool = True,
    scaled: bool = True,
    start: str = "zero",
    activations: bool = False,
    windows: str = "true",
    routing: str | Callable[..., Routing] | None = None,
    decoder: bool = False,
) -> CapsNet:
    """Table 8: 32 types of 4 x 4 poses, 16 x 16 -> 7 x 7 -> 5 x 5 -> 10."""
    return build_inverted(
        image,
        classes,
        find_backbone(backbone, image[0]),
        types=32,
        dim=16,
        convs=((3, 2), (3, 1)),
        iterations=iterations,
        concurrent=concurrent,
        norm=norm,
        scaled=scaled,
        start=start,
        activations=activations,
        windows=windows,
        routing=routing,
        decoder=decoder,
    )


@register(TSAI, parameters="2.80M, simple 1.46M")
def inverted_cifar100(
    *,
    image: Image = (3, 32, 32),
    classes: int = 100,
    backbone: str | nn.Module = "resnet",
    iterations: int = 2,
    concurrent: bool = True,
    windows: str = "true",
    routing: str | Callable[..., Routing] | None = None,
    decoder: bool = False,
) -> CapsNet:
    """Table 9: 6 x 6 poses, and 20 capsules before the hundred."""
    return build_inverted(
        image,
        classes,
        find_backbone(backbone, image[0], simple=partial(simple_backbone, width=128)),
        types=32,
        dim=36,
        convs=((3, 2), (3, 1)),
        hidden=(20,),
        iterations=iterations,
        concurrent=concurrent,
        windows=windows,
        routing=routing,
        decoder=decoder,
    )


@register(TSAI, parameters="9.96M, vector 42.48M")
def inverted_diverse_multimnist(
    *,
    image: Image = (1, 36, 36),
    classes: int = 10,
    pose: str = "matrix",
    width: int = 1024,
    iterations: int = 2,
    concurrent: bool = True,
    routing: str | Callable[..., Routing] | None = None,
    decoder: bool = False,
    objects: int = 2,
) -> CapsNet:
    """Tables 10 and 11: one or two digits in an image.

    Args:
        width: channels of the stem, one capsule type of 64 for each 64 of them; 2128 gives the paper's 42M with
            matrix poses, whose widths it does not print.
    """
    return build_inverted(
        image,
        classes,
        conv_stem(image[0], width, kernel_size=3, stride=2, padding=1),
        types=max(1, width // 64),
        dim=64,
        primary_kernel=(3, 2),
        convs=((3, 1),),
        pose=pose,
        iterations=iterations,
        concurrent=concurrent,
        routing=routing,
        several=True,
        decoder=decoder,
        objects=objects,
    )


@register(TSAI)
def inverted_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    backbone: str | nn.Module = "resnet",
    iterations: int = 2,
    concurrent: bool = True,
    several: bool = False,
    decoder: bool = False,
    objects: int = 1,
) -> CapsNet:
    """For your own images: the CIFAR-10 network, with residual blocks that halve the map until 20 x 20 are left."""
    features = find_backbone(backbone, image[0])
    channels, height, width = feature_shape(features, image)
    if not isinstance(backbone, nn.Module):
        halvings = max(0, math.ceil(math.log2(max(height, width) / 20)))
        features = nn.Sequential(features, *(BasicBlock(channels, channels, stride=2) for _ in range(halvings)))
    return build_inverted(
        image,
        classes,
        features,
        types=32,
        dim=16,
        convs=((3, 2), (3, 1)),
        iterations=iterations,
        concurrent=concurrent,
        several=several,
        decoder=decoder,
        objects=objects,
    )
