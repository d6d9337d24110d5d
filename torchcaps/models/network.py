"""The one call all networks share, and the capsule network made of blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.functional import check_labels, mask_capsules
from torchcaps.models.heads import Head
from torchcaps.types import Capsules, Image, Output


class Network(nn.Module):
    """Checks what comes in, encodes it, and decodes the capsules of the labels, or else of the best scores.

    Subclasses give `encode`. Parameters under `decoder.` serve the reconstruction alone.

    Args:
        image: channels, height, width.
        objects: how many capsules are decoded when no labels are given.

    Shapes: images [b, c, h, w], labels [b] or [b, k] padded with -1
    """

    def __init__(self, image: Image, classes: int, head: Head, decoder: nn.Module | None = None, objects: int = 1):
        super().__init__()
        if not 1 <= objects <= classes:
            raise ValueError(f"objects must lie between 1 and the {classes} classes, got {objects}")
        self.image: Image = (image[0], image[1], image[2])
        self.classes = classes
        self.objects = objects
        self.head = head
        self.decoder = decoder
        self._channels_last = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        kernels = (p for p in self.parameters() if p.dim() == 4 and not p.is_contiguous())
        self._channels_last = any(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)
        return self

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        """Class capsules, scores, and a penalty of the network's own."""
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        check_images(images, self.image, next(self.parameters()).dtype)
        if labels is not None:
            check_labels(labels, len(images), self.classes)
        if self._channels_last and images.device.type == "cpu" and images.shape[1] == 1:
            # grey images lie in both orders at once, of which torch would take the other, up to the second convolution
            images = images.squeeze(1).unsqueeze(3).permute(0, 3, 1, 2)
        capsules, scores, penalty = self.encode(images)
        return Output(
            scores, capsules, self.reconstruct(capsules, scores, labels), penalty, self.head.probabilities(scores)
        )

    def reconstruct(self, capsules: Capsules | None, scores: Tensor, labels: Tensor | None) -> Tensor | None:
        """Shapes: -> [b, k, c, h, w]; the picture of a label of -1 means nothing"""
        if self.decoder is None or capsules is None:
            return None
        targets = scores.topk(self.objects, dim=1).indices if labels is None else labels
        targets = targets[:, None] if targets.dim() == 1 else targets
        pictures = self.decoder(mask_capsules(capsules.poses, targets).flatten(0, 1))
        return pictures.unflatten(0, targets.shape)


class CapsNet(Network):
    """Images -> features -> primary capsules -> capsule layers -> scores.

    Args:
        stem: any module from images [b, c, h, w] to features [b, c', h', w'].
        primary: features to capsules.
        body: the capsule layers, the last of which has the class capsules.
    """

    def __init__(
        self,
        stem: nn.Module,
        primary: nn.Module,
        body: nn.Module,
        head: Head,
        decoder: nn.Module | None = None,
        *,
        image: Image,
        classes: int,
        objects: int = 1,
    ):
        super().__init__(image, classes, head, decoder, objects)
        self.stem = stem
        self.primary = primary
        self.body = body

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        children = self.primary(self.stem(images))
        capsules = self.body(children.poses, children.activations)
        return capsules, self.head(capsules), None


def check_images(images: Tensor, image: Image, dtype: torch.dtype) -> None:
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a tensor, got {type(images).__name__}")
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point, got {images.dtype}; divide bytes by 255 first")
    if images.dim() != 4 or tuple(images.shape[1:]) != image:
        raise ValueError(
            f"images must be [b, {', '.join(map(str, image))}], got {list(images.shape)}; "
            "a network for other images is built with image=(channels, height, width)"
        )
    device = images.device.type
    if images.dtype != dtype and (device == "meta" or not torch.is_autocast_enabled(device)):
        raise ValueError(f"images must be {dtype} like the network's weights, got {images.dtype}")
