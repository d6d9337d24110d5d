"""Decoders: from class capsules, all but one masked, to the picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from torchcaps.functional import dense
from torchcaps.layers.init import Init, keras_conv_, keras_linear_
from torchcaps.types import Image


class Decoder(nn.Module):
    """Fully connected layers with ReLU between them (Sabour, figure 2).

    Args:
        dim: numbers that come in, classes times the size of their poses.
        image: what comes out.
        output: "sigmoid" for pixels in [0, 1], "linear" for standardised ones.
        init: called as `init(layer, last)` for each linear layer; None leaves PyTorch's own start.

    Shapes: poses [n, j, d] or [n, (j d)] -> [n, c, h, w]
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (512, 1024),
        *,
        image: Image,
        output: str = "sigmoid",
        init: Init | None = None,
    ):
        super().__init__()
        check_output(output)
        self.image = tuple(image)
        channels, height, width = image
        sizes = [dim, *hidden, channels * height * width]
        layers: list[nn.Module] = []
        for n, (ins, outs) in enumerate(pairwise(sizes)):
            linear = nn.Linear(ins, outs)
            last = n == len(hidden)
            if init is not None:
                init(linear, last)
            layers += [linear] if last else [linear, nn.ReLU()]
        if output == "sigmoid":
            layers.append(nn.Sigmoid())
        self.layers = nn.Sequential(*layers)

    def forward(self, poses: Tensor) -> Tensor:
        x, layers = poses.flatten(1), list(self.layers)
        for n in range(0, len(layers), 2):
            x = dense(x, *layers[n : n + 2])  # type: ignore[arg-type]
        return x.unflatten(1, self.image)


class ConvDecoder(nn.Module):
    """Mazzia's decoder for smallNORB: a small grid, doubled three times with 3 x 3 convolutions after each.

    For 48 x 48 pixels a side goes 8, 16, 14, 28, 26, 52, 50, 48. Other sizes start from the smallest grid that ends
    up large enough (8 g - 16 pixels from g), and the middle of the picture is kept.

    Args:
        dim: numbers that come in.
        channels: of the three hidden convolutions.
        output: "sigmoid" as released, or "linear", which standardised images need.

    Shapes: poses [n, j, d] or [n, (j d)] -> [n, c, h, w]
    """

    def __init__(
        self, dim: int, channels: tuple[int, int, int] = (64, 128, 128), *, image: Image, output: str = "sigmoid"
    ):
        super().__init__()
        check_output(output)
        self.image = tuple(image)
        self.grid = tuple(-(-(side + 16) // 8) for side in image[1:])
        self.dense = keras_linear_(nn.Linear(dim, self.grid[0] * self.grid[1]))
        layers: list[nn.Module] = []
        for ins, outs in pairwise((1, *channels)):
            layers += [
                nn.Upsample(scale_factor=2, mode="bilinear"),
                keras_conv_(nn.Conv2d(ins, outs, 3)),
                nn.LeakyReLU(0.2),
            ]
        layers.append(keras_conv_(nn.Conv2d(channels[-1], image[0], 3)))
        if output == "sigmoid":
            layers.append(nn.Sigmoid())
        self.layers = nn.Sequential(*layers)

    def forward(self, poses: Tensor) -> Tensor:
        picture = self.layers(self.dense(poses.flatten(1)).unflatten(1, (1, *self.grid)))
        _, height, width = self.image
        top, left = (picture.shape[2] - height) // 2, (picture.shape[3] - width) // 2
        return picture[:, :, top : top + height, left : left + width]


def check_output(output: str) -> None:
    if output not in ("sigmoid", "linear"):
        raise ValueError(f"a decoder's output must be sigmoid or linear, got {output!r}")
