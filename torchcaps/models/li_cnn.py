"""The plain networks in Li et al. 2018: the ResNet of Table 2, to which feedback attaches, and the CNN of Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from torchcaps.layers.backbone import resnet_stage, resnet_stem
from torchcaps.layers.feedback import Feedback, Path
from torchcaps.models.encapnet import STRIDES, start_weights
from torchcaps.models.heads import LogitHead
from torchcaps.models.network import Network
from torchcaps.models.registry import register
from torchcaps.types import Capsules, Image

CHANNELS = (32, 64, 128, 256, 512)


class LiResNet(Network):
    """A ResNet with the blob shapes of EncapNet. Each module is a path like EncapNet's: its blocks take the place of
    the layers, so the same feedback serves both.
    """

    def __init__(self, stages: Sequence[nn.Sequential], feedback: Feedback | None, *, image: Image, classes: int):
        super().__init__(image, classes, LogitHead())
        self.stem = resnet_stem(image[0], CHANNELS[0])
        self.stages = nn.ModuleList(stages)
        self.classifier = nn.Linear(CHANNELS[-1], classes)
        self.feedback = feedback

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        features = self.stem(images)
        paths = []
        for stage in self.stages:
            chain = [features]
            for block in stage.children():
                chain.append(block(chain[-1]))
            features = chain[-1]
            paths.append(Path(start=chain[0], first=chain[1], half=chain[len(chain) // 2], end=features))
        penalty = self.feedback(paths) if self.feedback is not None and self.training else None
        return None, self.classifier(features.mean(dim=(2, 3))), penalty


@register(paper="Li et al. 2018")
def li_resnet18_cifar10(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    blocks: Sequence[int] = (2, 2, 2, 2),
    feedback: str | None = None,
    feedback_weight: float = 10.0,
    wiring: str | Sequence[str] = "within2",
    bias_fix: bool = True,
    through_plan: bool = False,
    extractor: bool = True,
    generator: str = "vanilla",
    cost: str = "cosine",
) -> LiResNet:
    """Table 3, right: (a), and with feedback="kl" or "ot" (b) and (c). Its features are no capsules, so neither is the
    generator.

    Args:
        blocks: residual blocks of each module, n in Table 2.
        feedback: None, "ot" or "kl"; `wiring` and the switches after it are those of `Feedback` and `FeedbackUnit`.
    """
    if not isinstance(blocks, tuple | list) or len(blocks) != len(STRIDES) or min(blocks) < 1:
        raise ValueError(f"blocks must be {len(STRIDES)} numbers from 1, one for each module, got {blocks!r}")
    stages = [
        resnet_stage(ins, outs, n, stride)
        for (ins, outs), n, stride in zip(pairwise(CHANNELS), blocks, STRIDES, strict=True)
    ]
    units = Feedback(
        CHANNELS,
        STRIDES,
        wiring,
        feedback_weight,
        divergence="ot" if feedback is None else feedback,
        bias_fix=bias_fix,
        through_plan=through_plan,
        extractor=extractor,
        generator=generator,
        cost=cost,
    )
    network = LiResNet(stages, None if feedback is None else units, image=image, classes=classes)
    start_weights(network)
    return network


class LiCNN(Network):
    """Convolution, batch norm, ReLU five times, then one linear layer.

    Args:
        pooling: the mean over all places comes before the linear layer; False keeps each place.
    """

    def __init__(self, width: int, pooling: bool, *, image: Image, classes: int):
        super().__init__(image, classes, LogitHead())
        channels, height, breadth = image
        layers: list[nn.Module] = []
        for n, stride in enumerate((1, *STRIDES)):
            layers += [nn.Conv2d(channels, width << n, 3, stride, padding=1), nn.BatchNorm2d(width << n), nn.ReLU()]
            channels, height, breadth = width << n, -(-height // stride), -(-breadth // stride)
        self.layers = nn.Sequential(*layers)
        self.pooling = pooling
        self.classifier = nn.Linear(channels if pooling else channels * height * breadth, classes)

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        features = self.layers(images)
        return None, self.classifier(features.mean(dim=(2, 3)) if self.pooling else features.flatten(1)), None


@register(paper="Li et al. 2018", parameters="24.44 Mb")
def li_cnn6_cifar10(*, image: Image = (3, 32, 32), classes: int = 10, width: int = 32, pooling: bool = True) -> LiCNN:
    """Table 1 (c), the blob shapes of EncapNet's six layers; width=79 is (d), similar parameters.

    A parameter is 16 / 2^20 in the unit of that table: (c) has 24.04 (25.2 without pooling), (d) 146.0 for 146.88.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    network = LiCNN(width, pooling, image=image, classes=classes)
    start_weights(network)
    return network
