"""AR-CapsNet (Choi, Seo, Im & Kang 2019): capsules from convolutions, attention routing and the capsule activation.

The paper leaves open where a residual meets the tanh; this follows the released code, as do the attention kernel of
N x N x D for each parent (the paper's counts need it) and Keras's start and batch norm. No layer has a window that
might not fit, so there is no smallest image; the class capsules' window is the whole map, and its weights grow with it.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from torchcaps.functional import check_count
from torchcaps.layers.backbone import keras_batch_norm
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.init import keras_conv_, keras_linear_
from torchcaps.layers.pooled import FullWindowCaps, PooledConvCaps
from torchcaps.layers.same import conv_same
from torchcaps.layers.sizes import feature_shape
from torchcaps.layers.stack import CapsuleStack, Residual
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import CapsNet
from torchcaps.models.parts import find_backbone
from torchcaps.models.registry import register, variant
from torchcaps.routing.attention import AttentionRouting, CapsuleActivation
from torchcaps.types import Capsules, Image

CHOI = "Choi et al. 2019"
CAPS, PRIMARY_DIM = 8, 16


def ar_stem(in_channels: int, width: int = 64, momentum: float = 0.01) -> nn.Sequential:
    """Twice convolution, batch norm, ReLU.

    Shapes: images [b, c, h, w] -> [b, width, h, w]
    """
    layers: list[nn.Module] = []
    for ins in (in_channels, width):
        conv = keras_conv_(nn.Conv2d(ins, width, 3, padding=1))
        layers += [conv, keras_batch_norm(width, momentum), nn.ReLU()]
    return nn.Sequential(*layers)


class ARPrimaryCaps(nn.Module):
    """A convolution that halves the sides, ReLU, and the capsule activation of each type (Eq. 3 and 4).

    Shapes: features [b, c', h, w] -> Capsules with poses [b, c, d, ceil(h / 2), ceil(w / 2)]
    """

    def __init__(self, in_channels: int, caps: int, dim: int, whole: bool = False):
        super().__init__()
        self.conv = keras_conv_(nn.Conv2d(in_channels, caps * dim, 3, stride=2))
        self.activation = CapsuleActivation(caps, dim, whole=whole)

    def forward(self, features: Tensor) -> Capsules:
        poses = conv_same(features, self.conv.weight, self.conv.bias, stride=2).relu()
        poses = poses.unflatten(1, self.activation.bias.shape).permute(0, 3, 4, 1, 2)
        return Capsules(self.activation(poses).permute(0, 3, 4, 1, 2))


class TanhResidual(Residual):
    """u_l = tanh(u_(l-1) + what the layer gives before its own tanh).

    Shapes: poses [b, c, d, h, w] -> Capsules with poses [b, c, d, h, w]
    """

    def forward(self, poses: Tensor, activations: Tensor | None = None, parents: Tensor | None = None) -> Capsules:
        capsules = super().forward(poses, activations, parents)
        return Capsules(capsules.poses.tanh(), capsules.activations, capsules.coupling)


@register(CHOI)
def ar_capsnet(
    *,
    image: Image = (3, 64, 64),
    classes: int = 10,
    depth: int = 4,
    dim: int = 32,
    attention: str = "all",
    dropout: float = 0.5,
    largest: int | None = 10,
    norm_momentum: float = 0.01,
    kernel_start: str = "pair",
    backbone: str | nn.Module = "conv",
    decoder: bool = True,
    objects: int = 1,
) -> CapsNet:
    """For your own images. As many of the ConvCaps layers halve the sides as bring the map down to `largest`.

    The paper halves once, which for its own images is the same; for 224 x 224 pixels all four layers do, and the class
    capsules have 4M weights instead of 257M. The decoder still has 512 for each pixel: `decoder=False` goes without.

    Args:
        depth: ConvCaps layers; those that do not halve are residual.
        dim: size of their capsules.
        attention: "all", each logit sees all children's votes; "own", its own child's alone, as in the paper's text.
        largest: side of the map up to which layers halve it; None leaves that to the first alone.
        norm_momentum: of batch norms: how fast their statistics follow. Keras's 0.01 wants a thousand steps and more.
        kernel_start: as what kernels the capsule layers' weights start, "pair", each pair of types one of its own, or
            "whole", one for all pairs, as in the released code; the paper does not say.
        backbone: "conv", the paper's two convolutions; "resnet"; or a module.
    """
    if kernel_start not in ("pair", "whole"):
        raise ValueError(f"kernel_start must be pair or whole, got {kernel_start!r}")
    whole = kernel_start == "whole"
    check_count("depth", depth, least=0)
    check_count("dim", dim)
    stem = find_backbone(backbone, image, conv=lambda c: ar_stem(c, momentum=norm_momentum))
    channels, height, width = feature_shape(stem, image)
    height, width, in_dim = -(-height // 2), -(-width // 2), PRIMARY_DIM
    routing = partial(AttentionRouting, attention=attention, whole=whole)
    layers: list[nn.Module] = []
    for n in range(depth):
        if n == 0 or (largest is not None and max(height, width) > largest):
            layers.append(PooledConvCaps(CAPS, in_dim, CAPS, dim, routing, stride=2, dropout=dropout, whole=whole))
            height, width, in_dim = -(-height // 2), -(-width // 2), dim
        else:
            inner = PooledConvCaps(CAPS, dim, CAPS, dim, partial(routing, tanh=False), dropout=dropout, whole=whole)
            layers.append(TanhResidual(inner))
    last = FullWindowCaps(CAPS, in_dim, classes, dim, routing, (height, width), dropout, whole=whole)
    return CapsNet(
        stem=stem,
        primary=ARPrimaryCaps(channels, CAPS, PRIMARY_DIM, whole),
        body=CapsuleStack(*layers, last),
        head=LengthHead(longest=math.sqrt(dim)),
        decoder=Decoder(classes * dim, hidden=(512, 512), image=image, init=_start) if decoder else None,
        image=image,
        classes=classes,
        objects=objects,
    )


def _start(linear: nn.Linear, last: bool) -> None:
    keras_linear_(linear)


@register(CHOI, parameters="5.31M with decoder", operations="0.098G")
@variant(ar_capsnet, image=(1, 28, 28), depth=1, largest=None)
def ar_capsnet_mnist() -> None:
    """One ConvCaps layer."""


@register(CHOI)
@variant(ar_capsnet, image=(1, 40, 40), depth=1, dim=16, largest=None)
def ar_capsnet_affnist() -> None:
    """The network for MNIST with capsules of half the size."""


@register(CHOI, parameters="9.6M with decoder")
@variant(ar_capsnet, image=(3, 32, 32), largest=None)
def ar_capsnet_cifar10() -> None:
    """Table 2: `depth` ConvCaps layers, 0 to 4 in the paper, of capsules with `dim` numbers, 16 or 32."""
