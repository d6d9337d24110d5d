"""CapsNet (Sabour, Frosst & Hinton 2017): dynamic routing.

`form="paper"` is procedure 1 and figure 1 as printed. `form="official"` adds what the released code has and the paper
does not say: biases inside the iterations, primary capsules scaled by 1/types, weights from a truncated normal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from torchcaps.functional import check_count, squash
from torchcaps.layers.backbone import conv_stem
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.init import mixture_normal_, sabour_official, truncated_normal_
from torchcaps.layers.linear import Init, LinearCaps
from torchcaps.layers.primary import PrimaryCaps
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack
from torchcaps.models.heads import ActivationHead, LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone, find_routing, gives_activations
from torchcaps.models.registry import register, variant
from torchcaps.routing import DynamicRouting
from torchcaps.types import Image, Routing

SABOUR = "Sabour et al. 2017"


@register(SABOUR)
def capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    form: str = "paper",
    routing: str | Callable[..., Routing] = "dynamic",
    iterations: int | None = None,
    priors: bool = False,
    leak: bool = False,
    detach_inner: bool = False,
    scale_by: str | None = None,
    channels: int = 256,
    stride: int | None = None,
    types: int = 32,
    dim: int = 8,
    out_dim: int = 16,
    padding: str = "valid",
    backbone: str | nn.Module = "conv",
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """For your own images: the MNIST network, whose first stride grows until at most 12 x 12 sites are left.

    Args:
        routing: "dynamic", "self_attention", "em" or a class.
        iterations: 3 unless given.
        priors, leak, detach_inner: see `dynamic_routing`.
        scale_by: see `SelfAttentionRouting`.
        channels, stride: of the first convolution, 9 x 9; the stride follows from the image unless given.
        types, dim: of the primary capsules, 9 x 9 with stride 2.
        out_dim: size of a class capsule.
        padding: "valid", or "same" as the released code has it for CIFAR-10.
        backbone: "conv", the first convolution; "resnet"; or a module.
    """
    if form not in ("paper", "official"):
        raise ValueError(f'form must be "paper" or "official", got {form!r}')
    if padding not in ("valid", "same"):
        raise ValueError(f'padding must be "valid" or "same", got {padding!r}')
    for what, value in (("channels", channels), ("types", types), ("dim", dim), ("out_dim", out_dim)):
        check_count(what, value)
    official, same = form == "official", padding == "same"
    if stride is None:
        stride = max(1, -(-(max(image[1:]) - 8) // 32))
    check_count("stride", stride)
    stem = find_backbone(
        backbone,
        image,
        conv=lambda c: conv_stem(c, channels, kernel_size=9, stride=stride, padding=4 if same else 0),
    )
    features, height, width = feature_shape(stem, image)
    primary = PrimaryCaps(
        features,
        types,
        dim,
        kernel_size=9,
        stride=2,
        padding="same" if same else 0,
        nonlinearity=squash,
        scale=1 / (types + leak) if official else 1.0,
    )
    height, width = primary.out_space(height, width)
    in_caps = types * height * width
    if official:
        inits: list[Init] = [partial(truncated_normal_, std=std) for std in (0.05, 0.1, 0.1)]
    else:
        inits = [nn.init.kaiming_normal_, nn.init.kaiming_normal_, partial(mixture_normal_, in_caps=in_caps, size=0.8)]
    for conv, init in zip([stem[0], primary.conv] if backbone == "conv" else [primary.conv], inits, strict=False):
        init(conv.weight)
        nn.init.constant_(conv.bias, 0.1 if official else 0.0)
    chosen = find_routing(
        routing,
        iterations=iterations,
        priors=priors or None,
        leak=leak or None,
        detach_inner=detach_inner or None,
        scale_by=scale_by,
        bias=True if official and routing in ("dynamic", DynamicRouting) else None,
    )
    return CapsNet(
        stem,
        primary,
        CapsuleStack(LinearCaps(in_caps, dim, classes, out_dim, chosen, init=inits[2])),
        ActivationHead() if gives_activations(chosen) else LengthHead(),
        Decoder(classes * out_dim, image=image, init=sabour_official if official else None) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


@register(SABOUR, parameters="6.8M, 8.2M with decoder", operations="0.401G")
@variant(capsnet, image=(1, 28, 28), stride=1)
def capsnet_mnist() -> None:
    """Table 1's network; routing="self_attention" is the one in Mazzia's figures 5 and 7."""


@register(SABOUR, parameters="11.36M with decoder")
@variant(capsnet, image=(1, 36, 36), stride=1, objects=2)
def capsnet_multimnist() -> None:
    """Two overlapping digits; both are decoded, one at a time."""


@register(SABOUR)
@variant(capsnet, image=(3, 24, 24), stride=1, types=64, padding="same", leak=True, decoder=False)
def capsnet_cifar10() -> None:
    """24 x 24 crops, 64 types, and a "none of the above" for what no class explains."""


@register(SABOUR)
@variant(capsnet, image=(2, 32, 32), classes=5, stride=1, decoder=False)
def capsnet_smallnorb() -> None:
    """The MNIST network on pairs of 32 x 32 crops."""


@register(SABOUR)
@variant(capsnet, image=(3, 32, 32), channels=64, stride=1, types=16, dim=6, out_dim=8, decoder=False)
def capsnet_svhn() -> None:
    """The small one: 64 channels, 16 types of 6, class capsules of 8."""


@register(SABOUR)
@variant(capsnet, image=(1, 40, 40), stride=1)
def capsnet_affnist() -> None:
    """The MNIST network on a 40 x 40 canvas."""
