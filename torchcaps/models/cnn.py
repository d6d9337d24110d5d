"""The convolutional networks that the papers' tables compare with."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from torchcaps.layers.backbone import resnet_stage, resnet_stem
from torchcaps.layers.sizes import feature_shape
from torchcaps.models.heads import LogitHead
from torchcaps.models.network import Network
from torchcaps.models.registry import register
from torchcaps.types import Capsules, Image


class Classifier(Network):
    """Images -> features -> logits, without capsules.

    Args:
        features: any module from images [b, c, h, w] to what `classifier` takes.
        classifier: features to logits [b, j].
        several: images may show several objects, so each class has a probability of its own.
    """

    def __init__(
        self, features: nn.Module, classifier: nn.Module, *, image: Image, classes: int, several: bool = False
    ):
        super().__init__(image, classes, LogitHead(several), objects=2 if several else 1)
        self.features = features
        self.classifier = classifier

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        return None, self.classifier(self.features(images)), None


@register(paper="Sabour et al. 2017", parameters="35.4M")
def cnn_mnist(*, image: Image = (1, 28, 28), classes: int = 10, dropout: float = 0.5) -> Classifier:
    """The MNIST baseline (section 5). Only zero padding and no pooling give its 35.4M; the dropout rate is assumed."""
    features = nn.Sequential(
        *_conv(image[0], 256, 5, padding=2),
        *_conv(256, 256, 5, padding=2),
        *_conv(256, 128, 5, padding=2),
    )
    classifier = nn.Sequential(
        nn.Flatten(),
        *_dense(prod(feature_shape(features, image)), 328),
        *_dense(328, 192),
        nn.Dropout(dropout),
        nn.Linear(192, classes),
    )
    return Classifier(features, classifier, image=image, classes=classes)


@register(paper="Sabour et al. 2017", parameters="24.56M")
def cnn_multimnist(*, image: Image = (1, 36, 36), classes: int = 10, form: str = "paper") -> Classifier:
    """The MultiMNIST baseline (section 6); `form="official"` has 5 x 5 kernels in both layers, as released."""
    if form not in ("paper", "official"):
        raise ValueError(f"form must be paper or official, got {form!r}")
    first = 9 if form == "paper" else 5
    features = nn.Sequential(
        *_conv(image[0], 512, first, padding=first // 2),
        nn.MaxPool2d(2),
        *_conv(512, 256, 5, padding=2),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Flatten(),
        *_dense(prod(feature_shape(features, image)), 1024),
        nn.Linear(1024, classes),
    )
    return Classifier(features, classifier, image=image, classes=classes, several=True)


@register(paper="Sabour et al. 2017")
def cnn_affnist(*, image: Image = (1, 40, 40), classes: int = 10, dropout: float = 0.5) -> Classifier:
    """The affNIST baseline (section 5.2): "MaxPooling and DropOut", "a similar number of parameters" as CapsNet.

    The paper says no more, so layers, widths and rate are assumed: the MultiMNIST baseline's shape, narrowed until its
    11.28M stand beside the 11.23M of CapsNet without its decoder.
    """
    features = nn.Sequential(
        *_conv(image[0], 256, 5, padding=2),
        nn.MaxPool2d(2),
        *_conv(256, 160, 5, padding=2),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Flatten(),
        *_dense(prod(feature_shape(features, image)), 640),
        nn.Dropout(dropout),
        nn.Linear(640, classes),
    )
    return Classifier(features, classifier, image=image, classes=classes)


@register(paper="Tsai et al. 2020", parameters="18.92M")
def cnn_cifar10(*, image: Image = (3, 32, 32), classes: int = 10) -> Classifier:
    """The baseline CNN of table 2."""
    return _tsai_cnn(image, classes)


@register(paper="Tsai et al. 2020", parameters="19.01M")
def cnn_cifar100(*, image: Image = (3, 32, 32), classes: int = 100) -> Classifier:
    """The baseline CNN of table 3."""
    return _tsai_cnn(image, classes)


@register(paper="Tsai et al. 2020")
def cnn_diverse_multimnist(*, image: Image = (1, 36, 36), classes: int = 10, head: str = "pooling") -> Classifier:
    """The baseline CNN of table 12; `head="dense"` learns a map from every site in place of the pooling (42.49M)."""
    if head not in ("pooling", "dense"):
        raise ValueError(f"head must be pooling or dense, got {head!r}")
    features = nn.Sequential(
        *_conv(image[0], 1024, 3, stride=2, padding=1),
        *_conv(1024, 1024, 3, stride=2),
        nn.BatchNorm2d(1024),
        *_conv(1024, 1024, 3),
        nn.BatchNorm2d(1024),
    )
    sites = feature_shape(features, image)
    neurons: list[nn.Module]
    if head == "pooling":
        neurons = [nn.Conv2d(1024, 640, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    else:
        neurons = [nn.Flatten(), nn.Linear(prod(sites), 640)]
    classifier = nn.Sequential(*neurons, nn.Linear(640, classes))
    return Classifier(features, classifier, image=image, classes=classes, several=True)


@register(paper="Tsai et al. 2020", parameters="11.17M")
def resnet18_cifar10(*, image: Image = (3, 32, 32), classes: int = 10) -> Classifier:
    """ResNet-18 as it is built for 32 x 32 images: a 3 x 3 stem, no pooling before the stages."""
    return _resnet18(image, classes)


@register(paper="Tsai et al. 2020", parameters="11.22M")
def resnet18_cifar100(*, image: Image = (3, 32, 32), classes: int = 100) -> Classifier:
    """ResNet-18 as it is built for 32 x 32 images: a 3 x 3 stem, no pooling before the stages."""
    return _resnet18(image, classes)


def _tsai_cnn(image: Image, classes: int) -> Classifier:
    features = nn.Sequential(
        *_conv(image[0], 1024, 3, stride=2, padding=1),
        *_conv(1024, 1024, 3, stride=2, padding=1),
        nn.BatchNorm2d(1024),
        nn.AvgPool2d(2),
        *_conv(1024, 1024, 3, stride=2, padding=1),
        nn.BatchNorm2d(1024),
        nn.AvgPool2d(2),
    )
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(prod(feature_shape(features, image)), classes))
    return Classifier(features, classifier, image=image, classes=classes)


def _resnet18(image: Image, classes: int) -> Classifier:
    features = nn.Sequential(
        resnet_stem(image[0], 64),
        resnet_stage(64, 64, blocks=2),
        resnet_stage(64, 128, blocks=2, stride=2),
        resnet_stage(128, 256, blocks=2, stride=2),
        resnet_stage(256, 512, blocks=2, stride=2),
    )
    classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
    return Classifier(features, classifier, image=image, classes=classes)


def _conv(ins: int, outs: int, kernel_size: int, stride: int = 1, padding: int = 0) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(ins, outs, kernel_size, stride, padding), nn.ReLU()


def _dense(ins: int, outs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(ins, outs), nn.ReLU()
