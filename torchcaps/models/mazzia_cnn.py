"""Mazzia's two convolutional baselines: "Our Baseline" (softmax) and "Base-CapsNet" (a vector for each class).

Only their sizes are printed (173K, 183K; 198K, 167K for smallNORB), and that the first is Sabour's CNN "with a reduced
number of feature maps and layers". The rest is assumed: Sabour's three 5 x 5 convolutions with 32, 32 and 64 maps, with
strides that bring them to 3 x 3, each followed by ReLU and then a norm as in Efficient-CapsNet; one fully connected
layer, as wide as the printed size asks. The decoder is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from torchcaps.functional import squash_exp
from torchcaps.layers.backbone import keras_batch_norm, keras_instance_norm
from torchcaps.layers.decoder import ConvDecoder, Decoder
from torchcaps.layers.init import keras_conv_, keras_linear_, mazzia_decoder
from torchcaps.layers.sizes import feature_shape
from torchcaps.models.heads import LengthHead, LogitHead
from torchcaps.models.network import Network
from torchcaps.models.registry import register
from torchcaps.types import Capsules, Image

DIM = 16  # of a class vector


class PlainCNN(Network):
    """Logits from hidden features, which the decoder sees as they are: nothing in them belongs to one class.

    They come out as one unlabelled capsule [b, 1, d]; the picture is the same for every label.
    """

    def __init__(
        self,
        features: nn.Module,
        hidden: int,
        decoder: nn.Module | None,
        *,
        image: Image,
        classes: int,
        dropout: float = 0.5,
    ):
        super().__init__(image, classes, LogitHead(), decoder)
        self.features = features
        self.classifier = nn.Sequential(nn.Dropout(dropout), keras_linear_(nn.Linear(hidden, classes)))

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        hidden = self.features(images)
        return Capsules(hidden[:, None]), self.classifier(hidden), None

    def reconstruct(self, capsules: Capsules | None, scores: Tensor, labels: Tensor | None) -> Tensor | None:
        if self.decoder is None or capsules is None:
            return None
        objects = self.objects if labels is None else labels.shape[1] if labels.dim() == 2 else 1
        return self.decoder(capsules.poses)[:, None].expand(-1, objects, -1, -1, -1)


class VectorCNN(Network):
    """A vector for each class straight from the hidden features, with no routing; its length is the score."""

    def __init__(
        self, features: nn.Module, hidden: int, decoder: nn.Module | None, *, image: Image, classes: int, dim: int = DIM
    ):
        super().__init__(image, classes, LengthHead(), decoder)
        self.features = features
        self.vectors = keras_linear_(nn.Linear(hidden, classes * dim))
        nn.init.normal_(self.vectors.weight, std=0.2 / (dim * hidden) ** 0.5)  # vectors start short, not at length 1

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        poses = squash_exp(self.vectors(self.features(images)).unflatten(1, (self.classes, -1)))
        capsules = Capsules(poses)
        return capsules, self.head(capsules), None


@register(paper="Mazzia et al. 2021", parameters="173K")
def mazzia_cnn_mnist(*, image: Image = (1, 28, 28), classes: int = 10, decoder: bool = True) -> PlainCNN:
    """The "Our Baseline" rows of table 2; widths assumed (see the module)."""
    features = _features(image, strides=(1, 2, 2), hidden=162, norm=keras_batch_norm)
    return PlainCNN(features, 162, _mnist_decoder(162, image) if decoder else None, image=image, classes=classes)


@register(paper="Mazzia et al. 2021", parameters="183K")
def mazzia_vector_cnn_mnist(*, image: Image = (1, 28, 28), classes: int = 10, decoder: bool = True) -> VectorCNN:
    """The "Base-CapsNet" rows of table 2; widths assumed (see the module)."""
    features = _features(image, strides=(1, 2, 2), hidden=142, norm=keras_batch_norm)
    pictures = _mnist_decoder(classes * DIM, image) if decoder else None
    return VectorCNN(features, 142, pictures, image=image, classes=classes)


@register(paper="Mazzia et al. 2021", parameters="198K")
def mazzia_cnn_smallnorb(
    *, image: Image = (2, 48, 48), classes: int = 5, decoder: bool = True, decoder_output: str = "sigmoid"
) -> PlainCNN:
    """The "Our Baseline" rows of table 4; widths assumed (see the module).

    Args:
        decoder_output: "sigmoid" as released, or "linear", which standardised images need.
    """
    features = _features(image, strides=(2, 2, 2), hidden=205, norm=keras_instance_norm)
    pictures = ConvDecoder(205, image=image, output=decoder_output) if decoder else None
    return PlainCNN(features, 205, pictures, image=image, classes=classes)


@register(paper="Mazzia et al. 2021", parameters="167K")
def mazzia_vector_cnn_smallnorb(
    *, image: Image = (2, 48, 48), classes: int = 5, decoder: bool = True, decoder_output: str = "sigmoid"
) -> VectorCNN:
    """The "Base-CapsNet" rows of table 4; widths assumed (see the module).

    Args:
        decoder_output: "sigmoid" as released, or "linear", which standardised images need.
    """
    features = _features(image, strides=(2, 2, 2), hidden=134, norm=keras_instance_norm)
    pictures = ConvDecoder(classes * DIM, image=image, output=decoder_output) if decoder else None
    return VectorCNN(features, 134, pictures, image=image, classes=classes)


def _features(
    image: Image, strides: tuple[int, int, int], hidden: int, norm: Callable[[int], nn.Module]
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for (ins, outs), stride in zip(pairwise((image[0], 32, 32, 64)), strides, strict=True):
        layers += [keras_conv_(nn.Conv2d(ins, outs, 5, stride), "he_normal"), nn.ReLU(), norm(outs)]
    maps = nn.Sequential(*layers)
    dense = keras_linear_(nn.Linear(prod(feature_shape(maps, image)), hidden))
    return nn.Sequential(*maps, nn.Flatten(), dense, nn.ReLU())


def _mnist_decoder(dim: int, image: Image) -> Decoder:
    return Decoder(dim, hidden=(512, 1024), image=image, init=mazzia_decoder)
