"""What comes before the capsules. A network takes any module from images to features; these are the papers'."""

from __future__ import annotations

from torch import Tensor, nn

from torchcaps.layers.chain import Chain, conv_norm_relu


def conv_stem(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0
) -> nn.Sequential:
    """One convolution and ReLU.

    Shapes: images [b, c, h, w] -> [b, c', h', w']
    """
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding), nn.ReLU())


def simple_backbone(in_channels: int, width: int = 256) -> nn.Sequential:
    """Tsai's simple backbone: one convolution that halves the sides.

    Shapes: images [b, c, h, w] -> [b, width, h / 2, w / 2]
    """
    return conv_stem(in_channels, width, kernel_size=3, stride=2, padding=1)


def keras_batch_norm(channels: int, momentum: float = 0.01) -> nn.Module:
    """With Keras's defaults."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=momentum)


def keras_instance_norm(channels: int, near_zero: bool = False) -> nn.Module:
    """Args: near_zero: scales and shifts start from U(-0.05, 0.05), as in Mazzia's released code."""
    norm = nn.InstanceNorm2d(channels, eps=1e-3, affine=True)
    if near_zero:
        nn.init.uniform_(norm.weight, -0.05, 0.05)
        nn.init.uniform_(norm.bias, -0.05, 0.05)
    return norm


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm and a way around them, a 1 x 1 convolution where sizes differ.

    Shapes: features [b, c, h, w] -> [b, c', h / stride, w / stride]
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(conv_norm_relu(features, self.conv1, self.norm1, self.relu)))
        return self.relu(residual + self.shortcut(features))


def resnet_stage(in_channels: int, out_channels: int, blocks: int, stride: int = 1) -> nn.Sequential:
    """Basic blocks, the first of which changes channels and size."""
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(blocks - 1)))


def resnet_stem(in_channels: int, out_channels: int = 64) -> nn.Sequential:
    """The first convolution of a ResNet for small images, without pooling."""
    return Chain(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU()
    )


PLAIN = {  # the side of the kernels, and channels
    "plain3": (3, (32, 48, 64, 80, 96, 112, 128, 144, 160, 176)),
    "plain5": (5, (32, 64, 96, 128, 160)),
    "plain7": (7, (48, 96, 144, 192)),
    "wide5": (5, (48, 96, 144, 192, 240)),
}


def plain_backbone(in_channels: int, name: str) -> nn.Sequential:
    """Convolutions of 3 x 3, 5 x 5 or 7 x 7, each with batch norm and ReLU, and nothing padded, strided or pooled.

    After An et al. 2020, whose three networks for MNIST err on different digits; "wide5" is ours.

    Shapes: images [b, c, h, w] -> [b, c', h - 20, w - 20], with kernels of 7 [b, c', h - 24, w - 24]
    """
    kernel_size, channels = PLAIN[name]
    layers: list[nn.Module] = []
    for out_channels in channels:
        conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False)
        layers += [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]
        in_channels = out_channels
    return Chain(*layers)


def resnet_backbone(in_channels: int, width: int = 128) -> nn.Sequential:
    """Tsai's ResNet backbone: three blocks of 64 channels, four of `width` (256 for the dynamic rival).

    Shapes: images [b, c, h, w] -> [b, width, h / 2, w / 2]
    """
    return nn.Sequential(
        resnet_stem(in_channels), resnet_stage(64, 64, blocks=3), resnet_stage(64, width, blocks=4, stride=2)
    )
