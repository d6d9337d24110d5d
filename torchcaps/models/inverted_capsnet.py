"""Inverted dot-product attention (Tsai, Srivastava, Goh & Salakhutdinov 2020), tables 8 to 11.

The ablations of figure 4: `norm=False` is A, `concurrent=False` B, `activations=True` C. The released code reads its
windows in another order, `windows="scrambled"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from torchcaps.functional import check_count, side_of
from torchcaps.layers.backbone import simple_backbone
from torchcaps.layers.conv import ConvCaps
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.init import mixture_normal_
from torchcaps.layers.linear import Init, LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import LinearHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone, find_routing, gives_activations, halved_until
from torchcaps.models.registry import register, variant
from torchcaps.routing import InvertedAttentionRouting
from torchcaps.types import Image, Routing

TSAI = "Tsai et al. 2020"


@register(TSAI)
def inverted_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    backbone: str | nn.Module = "resnet",
    width: int = 256,
    largest: int | None = 20,
    types: int | None = 32,
    dim: int = 16,
    pose: str = "matrix",
    primary: tuple[int, int] = (1, 1),
    convs: Sequence[tuple[int, int]] = ((3, 2), (3, 1)),
    hidden: Sequence[int] = (),
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
    """For your own images: the CIFAR-10 network, with residual blocks that halve the map of a large one.

    Args:
        backbone: "simple", "resnet" or a module.
        width: channels of the simple backbone.
        largest: side of the map up to which blocks after the backbone halve it; None leaves it as it is.
        types: of the primary and the convolutional capsules; None takes as many as the width holds.
        dim, pose: size of a pose, and "matrix" or "vector".
        primary: kernel and stride of the primary capsules.
        convs: kernel and stride of each convolutional capsule layer.
        hidden: capsules of linear layers before the class capsules.
        concurrent: iterations step all layers at once; otherwise each layer iterates by itself.
        norm: layer norm, of the primary capsules too.
        scaled, start, activations: see `InvertedAttentionRouting`.
        windows: see `ConvCaps`.
        routing: in place of inverted attention, by name or class; it then iterates within each layer.
        several: an image may have several classes (sigmoid), not just one (softmax).
    """
    check_count("iterations", iterations)
    check_count("width", width)
    own = routing is None
    if own:
        chosen: Callable[..., Routing] = partial(
            InvertedAttentionRouting,
            iterations=1 if concurrent else iterations,
            norm=norm,
            scaled=scaled,
            start=start,
            activations=activations,
        )
    elif not (concurrent and scaled and norm and start == "zero" and not activations):
        raise ValueError(
            "concurrent, norm, scaled, start and activations belong to inverted attention, not to a routing"
        )
    else:
        assert routing is not None
        chosen = find_routing(routing, iterations=None if routing == "self_attention" else iterations)
    simple = partial(simple_backbone, width=width)
    features = find_backbone(backbone, image, simple=simple)
    if largest is not None and not isinstance(backbone, nn.Module):
        features = halved_until(largest, features, image)
    channels, tall, wide = feature_shape(features, image)
    types = max(1, width // dim) if types is None else types
    check_count("types", types)
    first = PrimaryCaps(
        channels,
        types,
        dim,
        *primary,
        bias=False,
        nonlinearity=nn.LayerNorm(dim) if norm else None,
        activations=activations,
    )
    tall, wide = first.out_space(tall, wide)
    size = side_of(dim) if pose == "matrix" else dim  # numbers of a pose that meet in one product

    def start_of(children: int, parents: int, below: float) -> Init:
        """Tsai's for inverted attention; it counts on layer norm, without which poses shrink from layer to layer.

        With EM a child is the mean of the votes it has won, and smaller than they are by the root of their number; of
        all votes where there is but one iteration.
        """
        if own:
            return partial(nn.init.normal_, std=math.sqrt(parents / (size * children)))
        if gives_activations(chosen):
            return partial(nn.init.normal_, std=math.sqrt(below / size))
        return partial(mixture_normal_, in_caps=children, size=1.0)

    def won(children: int, parents: int) -> float:
        return children if iterations == 1 else children / parents

    below = 1.0
    layers: list[nn.Module] = []
    for kernel_size, stride in convs:
        children = types * kernel_size**2
        init, below = start_of(children, types, below), won(children, types)
        layer = ConvCaps(types, dim, types, dim, kernel_size, stride, chosen, pose=pose, windows=windows, init=init)
        tall, wide = layer.out_space(tall, wide)
        layers.append(layer)
    in_caps = types * tall * wide
    for out_caps in (*hidden, classes):
        check_count("hidden", out_caps)
        init, below = start_of(in_caps, out_caps, below), won(in_caps, out_caps)
        layers.append(LinearCaps(in_caps, dim, out_caps, dim, chosen, pose=pose, init=init))
        in_caps = out_caps
    return CapsNet(
        features,
        first,
        CapsuleStack(*layers, iterations=iterations if own and concurrent else 1),
        LinearHead(dim, several, activated=activations or gives_activations(chosen)),
        Decoder(classes * dim, image=image) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


@register(TSAI, parameters="1.83M, simple 0.56M")
@variant(inverted_capsnet, image=(3, 32, 32), largest=None)
def inverted_cifar10() -> None:
    """Table 8: 32 types of 4 x 4 poses, 16 x 16 -> 7 x 7 -> 5 x 5 -> 10."""


@register(TSAI, parameters="2.80M, simple 1.46M")
@variant(inverted_capsnet, image=(3, 32, 32), classes=100, largest=None, width=128, dim=36, hidden=(20,))
def inverted_cifar100() -> None:
    """Table 9: 6 x 6 poses, and 20 capsules before the hundred."""


@register(TSAI, parameters="9.96M, vector 42.48M")
@variant(
    inverted_capsnet,
    image=(1, 36, 36),
    backbone="simple",
    width=1024,
    largest=None,
    types=None,
    dim=64,
    primary=(3, 2),
    convs=((3, 1),),
    several=True,
    objects=2,
)
def inverted_diverse_multimnist() -> None:
    """Tables 10 and 11: one or two digits in an image, 8 x 8 poses, a type for each 64 channels of the stem.

    With pose="matrix", width=2128 gives the paper's 42M, whose widths it does not print.
    """
