"""Backbones, and the sizes found without running them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchcaps.layers.backbone import (
    BasicBlock,
    conv_stem,
    plain_backbone,
    resnet_backbone,
    resnet_stage,
    simple_backbone,
)
from torchcaps.layers.sizes import feature_shape, out_size
from torchcaps.types import ImageTooSmall


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("make", "expected", "shape"),
    [
        (lambda: resnet_backbone(3), 1_340_224, (128, 16, 16)),
        (lambda: resnet_backbone(3, width=256), 4_521_024, (256, 16, 16)),
        (lambda: simple_backbone(3), 7_168, (256, 16, 16)),
        (lambda: conv_stem(3, 256, 9), 62_464, (256, 24, 24)),
        (lambda: plain_backbone(3, "plain3"), 1_012_096, (176, 12, 12)),
        (lambda: plain_backbone(3, "plain5"), 1_027_360, (160, 12, 12)),
        (lambda: plain_backbone(3, "plain7"), 2_265_936, (192, 8, 8)),
        (lambda: plain_backbone(3, "wide5"), 2_309_040, (240, 12, 12)),
    ],
    ids=["resnet128", "resnet256", "simple", "stem", "plain3", "plain5", "plain7", "wide5"],
)
def test_counts_and_shapes(make, expected, shape):
    with torch.device("meta"):
        backbone = make()
        assert count(backbone) == expected
        assert feature_shape(backbone, (3, 32, 32)) == shape


def normed(x, norm):
    at = (None, slice(None), None, None)
    return (x - norm.running_mean[at]) / (norm.running_var[at] + norm.eps).sqrt() * norm.weight[at] + norm.bias[at]


@pytest.mark.parametrize(("ins", "outs", "stride"), [(4, 4, 1), (4, 6, 2), (4, 6, 1), (4, 4, 2)])
def test_basic_block_by_hand(ins, outs, stride):
    block = BasicBlock(ins, outs, stride).double()
    block(torch.randn(8, ins, 7, 5, dtype=torch.float64))  # running statistics that are not 0 and 1
    block.eval()
    x = torch.randn(2, ins, 7, 5, dtype=torch.float64)
    inner = normed(F.conv2d(x, block.conv1.weight, None, stride, 1), block.norm1).clamp(min=0)
    inner = normed(F.conv2d(inner, block.conv2.weight, None, 1, 1), block.norm2)
    around = x
    if stride != 1 or ins != outs:
        around = normed(
            torch.einsum("oi,bihw->bohw", block.shortcut[0].weight[..., 0, 0], x[:, :, ::stride, ::stride]),
            block.shortcut[1],
        )
    assert torch.allclose(block(x), (inner + around).clamp(min=0), rtol=1e-12, atol=1e-14)


def test_backbone_trains_and_compiles():
    backbone = nn.Sequential(conv_stem(2, 4, 3), resnet_stage(4, 4, blocks=2), resnet_stage(4, 6, blocks=2, stride=2))
    images = torch.randn(3, 2, 9, 8)
    compiled = torch.compile(backbone, fullgraph=True, backend="eager")
    compiled(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in backbone.parameters())
    backbone.eval()
    assert torch.allclose(backbone(images)[:1], backbone(images[:1]), atol=1e-6)


class Reads(nn.Module):
    """Looks at values, which the meta device does not have, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x[:, :, 1:] if x.sum().item() == 0 else x


class MakesTensors(nn.Module):
    """Adds a tensor that is born on the CPU wherever its input is."""

    def forward(self, x):
        return (x + torch.zeros(x.shape, device="cpu"))[..., :-2]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return x


MODULES = {
    "own": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 5, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Dropout(), Counts()
    ),
    "simple": lambda: simple_backbone(3, width=8),
    "block": lambda: BasicBlock(3, 5, stride=2),
    "double": lambda: nn.Conv2d(3, 4, 3).double(),
    "dilated": lambda: nn.Conv2d(3, 4, 3, dilation=3, padding="same"),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)),
    "tracked instance norm": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
    "upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "shuffle": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2)),
    "nothing": lambda: nn.Identity(),
    "reads values": lambda: nn.Sequential(nn.BatchNorm2d(3), Reads()),
    "makes tensors": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), MakesTensors()),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()),
}


@pytest.mark.parametrize("image", [(3, 11, 14), (3, 32, 32)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_feature_shape_equals_forward(name, image):
    module = MODULES[name]()
    shape = feature_shape(module, image)
    dtype = torch.float64 if name == "double" else torch.float32
    assert shape == tuple(module.eval()(torch.zeros(1, *image, dtype=dtype)).shape[1:])


@pytest.mark.parametrize("name", ["own", "reads values", "tracked instance norm"])
def test_feature_shape_leaves_no_trace(name):
    module = nn.Sequential(MODULES[name](), nn.Sequential(nn.Dropout(), nn.ReLU()))
    module[1].eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    feature_shape(module, (3, 12, 12))
    assert [part.training for part in module] == [True, False]
    assert all(part.training for part in module[0].modules())
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.device.type == "cpu" and p.grad is None and p.requires_grad for p in module.parameters())


def test_feature_shape_restores_after_an_error():
    module = nn.Sequential(nn.Conv2d(3, 4, 9), nn.BatchNorm2d(4))
    with pytest.raises(ImageTooSmall):
        feature_shape(module, (3, 5, 5))
    assert module.training
    assert module[1].training


def test_feature_shape_does_not_compute():
    module = nn.Sequential(Counts(), nn.Conv2d(1, 2**20, 1), nn.BatchNorm2d(2**20))
    assert feature_shape(module, (1, 2000, 2000)) == (2**20, 2000, 2000)  # 17 TB
    assert module[0].calls == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 4, 9),
        lambda: nn.MaxPool2d(8),
        lambda: nn.AvgPool2d(8),
        lambda: nn.ReflectionPad2d(8),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 7), nn.InstanceNorm2d(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 5, 2), simple_backbone(4), nn.MaxPool2d(2)),
    ],
    ids=["conv", "max pooling", "average pooling", "reflection", "instance norm", "stack"],
)
def test_image_too_small(make, device):
    with pytest.raises(ImageTooSmall, match="image 3 x 7 x 7 is too small"), torch.device(device):
        feature_shape(nn.Sequential(make(), nn.BatchNorm2d(4)), (3, 7, 7))


def test_image_too_small_where_values_are_read():
    with pytest.raises(ImageTooSmall, match="image 3 x 7 x 7 is too small"):
        feature_shape(nn.Sequential(Reads(), nn.Conv2d(3, 4, 9)), (3, 7, 7))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_backbone_that_does_not_fit_says_so(device):
    with torch.device(device):
        with pytest.raises(ValueError, match="cannot take image 1 x 9 x 9") as error:
            feature_shape(nn.Conv2d(3, 4, 3), (1, 9, 9))
        assert not isinstance(error.value, ImageTooSmall)
        with pytest.raises(ValueError, match=r"must give features \[b, c, h, w\], got \[1, 243\]"):
            feature_shape(nn.Flatten(), (3, 9, 9))


def test_out_size():
    for size in range(1, 12):
        for kernel in range(1, 6):
            for stride in (1, 2, 3):
                for padding in range(kernel // 2 + 1):
                    places = [x for x in range(-padding, size + padding) if x + kernel <= size + padding][::stride]
                    if places:
                        assert out_size(size, kernel, stride, padding) == len(places)
                    else:
                        with pytest.raises(ImageTooSmall, match=f"a window of {kernel} does not fit {size}"):
                            out_size(size, kernel, stride, padding)
