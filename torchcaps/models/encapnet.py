"""EncapNet (Li et al. 2018), Table 2: 32 capsules all the way, their dimension doubled by each of four modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from torchcaps.layers.chain import Chain
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.encap import CapConv, CapFC
from torchcaps.layers.feedback import Feedback, Path
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import Network
from torchcaps.models.registry import register, variant
from torchcaps.ops.backend import rehearse
from torchcaps.routing.master_aide import MasterAide
from torchcaps.types import Capsules, Image

CAPS = 32
DIMS = (1, 2, 4, 8, 16)  # before the first module and after each
STRIDES = (1, 2, 2, 2)
LAYERS = {  # type II layers of each module; depth = 2 + the sum of N + 1
    6: (0, 0, 0, 0),
    10: (1, 1, 1, 1),
    14: (2, 2, 2, 2),
    18: (3, 3, 3, 3),
    101: (8, 11, 68, 8),  # the paper gives the depth alone; with type I these are the layers of ResNet-101's stages
}


class EncapModule(nn.Module):
    """One layer of type I, which sets dimension and size, and a chain of type II.

    Args:
        layers: of type II.
        skip1: a convolution around the layer of type I.
        skip2: the first input of the chain is added at its last layer, or with `layerwise` at each.

    Shapes: poses [b, c, p, h, w] -> a path of poses, [b, c, d, h / stride, w / stride] after its start
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        stride: int,
        layers: int,
        routing: Callable[..., MasterAide] | None,
        aide: str,
        skip1: bool,
        skip2: bool,
        layerwise: bool,
    ):
        super().__init__()
        self.type1 = CapConv(CAPS, in_dim, out_dim, 3, stride, routing, aide, skip1)
        self.type2 = nn.ModuleList(CapConv(CAPS, out_dim, out_dim, 1, 1, routing, aide) for _ in range(layers))
        self.shortcuts = [skip2 and (layerwise or n == layers - 1) for n in range(layers)]

    def forward(self, poses: Tensor) -> Path:
        first = self.type1(poses).poses
        chain = [first]
        for layer, shortcut in zip(self.type2, self.shortcuts, strict=True):
            chain.append(layer(chain[-1], shortcut=first if shortcut else None).poses)
        return Path(start=poses, first=first, half=chain[len(self.type2) // 2], end=chain[-1])


class EncapNet(Network):
    """A convolution, four modules of capsule convolutions, and class capsules by `CapFC`.

    The penalty is the feedback of the paths through the modules; it exists in training alone, is already weighted and
    is over the batch: on several devices each compares the images it holds.

    Args:
        modules: each gives the path of its poses.
        feedback: takes the paths.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        feedback: nn.Module | None = None,
        decoder: nn.Module | None = None,
        *,
        image: Image,
        classes: int,
    ):
        super().__init__(image, classes, LengthHead(), decoder)
        channels, height, width = image
        self.stem = Chain(nn.Conv2d(channels, CAPS, 3, padding=1), nn.BatchNorm2d(CAPS), nn.ReLU())
        self.body = nn.ModuleList(modules)
        for stride in STRIDES:
            height, width = -(-height // stride), -(-width // stride)
        self.class_caps = CapFC(CAPS * height * width, classes, DIMS[-1])
        self.feedback = feedback

    def encode(self, images: Tensor) -> tuple[Capsules | None, Tensor, Tensor | None]:
        rehearse(self.encode, images)
        poses = self.stem(images).unflatten(1, (CAPS, DIMS[0]))
        paths = []
        for module in self.body:
            paths.append(module(poses))
            poses = paths[-1].end
        capsules = self.class_caps(poses)
        penalty = self.feedback(paths) if self.feedback is not None and self.training else None
        return capsules, self.head(capsules), penalty


def start_weights(network: nn.Module, bias_init: str = "zero") -> None:
    """Xavier's normal for all convolutions, biases 0 or, as released, from N(0, 1)."""
    if bias_init not in ("zero", "normal"):
        raise ValueError(f"bias_init must be zero or normal, got {bias_init!r}")
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and not name.startswith("decoder"):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                (nn.init.zeros_ if bias_init == "zero" else nn.init.normal_)(module.bias)


@register(paper="Li et al. 2018")
def encapnet(
    *,
    image: Image = (3, 32, 32),
    classes: int = 10,
    depth: int = 18,
    layers: Sequence[int] | None = None,
    aide_modules: Sequence[int] | None = None,
    version: str = "v3",
    aide: str = "full",
    gate: str = "cross",
    skips: str = "both",
    layerwise: bool = False,
    bias_init: str = "zero",
    feedback: str | None = None,
    feedback_weight: float = 10.0,
    wiring: str | Sequence[str] = "both",
    bias_fix: bool = True,
    through_plan: bool = False,
    extractor: bool = True,
    generator: str = "capsule",
    cost: str = "cosine",
    decoder: bool = False,
) -> EncapNet:
    """EncapNet for any image. The defaults are the paper's 18 layers; feedback="ot" adds its regularisation.

    Args:
        depth: 6, 10, 14, 18 or 101.
        layers: of type II in each of the four modules, instead of `depth`.
        aide_modules: which modules have an aide; by default all, of 101 layers the two deeper ones (the paper: "some
            blocks in the shallow layers with master alone").
        version, gate: see `MasterAide`.
        aide: see `CapConv`.
        skips: "none", "type1", "type2" or "both".
        layerwise: whether the skip of type II is added at each layer of the chain, not only at the last.
        bias_init: "zero" or, as released, "normal". N(0, 1) is far larger than the gates' own 0.1 or so, so that chance
            would decide at the start which branch a capsule listens to; elsewhere batch norm takes the bias out.
        feedback: None, "ot" or "kl"; `wiring` and the switches after it are those of `Feedback` and `FeedbackUnit`.
            Table 3 (c) and (d) have one unit for each module, wiring="within2"; (8) has "both".
        feedback_weight: the paper's lambda; 1 in the released code.
    """
    if layers is None:
        if depth not in LAYERS:
            raise ValueError(
                f"depth must be one of {', '.join(map(str, LAYERS))}, got {depth}; layers= takes any other"
            )
        layers = LAYERS[depth]
    if not isinstance(layers, tuple | list) or len(layers) != len(STRIDES) or min(layers) < 0:
        raise ValueError(f"layers must be {len(STRIDES)} numbers from 0, one for each module, got {layers!r}")
    if aide_modules is None:
        aide_modules = (3, 4) if sum(layers) > 90 else (1, 2, 3, 4)
    if not isinstance(aide_modules, tuple | list) or not set(aide_modules) <= {1, 2, 3, 4}:
        raise ValueError(f"aide_modules must be a sequence of modules from 1 to 4, got {aide_modules!r}")
    if skips not in ("none", "type1", "type2", "both"):
        raise ValueError(f"skips must be none, type1, type2 or both, got {skips!r}")
    routing = partial(MasterAide, version=version, gate=gate)
    routing(CAPS, 1, 1)  # says what is wrong with it even where no module has an aide
    modules = [
        EncapModule(
            DIMS[n],
            DIMS[n + 1],
            STRIDES[n],
            layers[n],
            routing if n + 1 in aide_modules else None,
            aide,
            skip1=skips in ("type1", "both"),
            skip2=skips in ("type2", "both"),
            layerwise=layerwise,
        )
        for n in range(len(STRIDES))
    ]
    units = Feedback(
        [CAPS * dim for dim in DIMS],
        STRIDES,
        wiring,
        feedback_weight,
        caps=CAPS,
        divergence="ot" if feedback is None else feedback,
        bias_fix=bias_fix,
        through_plan=through_plan,
        extractor=extractor,
        generator=generator,
        cost=cost,
    )
    picture = Decoder(classes * DIMS[-1], image=image) if decoder else None
    network = EncapNet(modules, None if feedback is None else units, picture, image=image, classes=classes)
    start_weights(network, bias_init)
    return network


@register(paper="Li et al. 2018")
@variant(encapnet)
def encapnet18_cifar10() -> None:
    """Table 3 (7) and, with feedback="ot", (8): v3 in all modules, both skips."""


@register(paper="Li et al. 2018")
@variant(encapnet, classes=100)
def encapnet18_cifar100() -> None:
    """Table 4."""


@register(paper="Li et al. 2018")
@variant(encapnet)
def encapnet18_svhn() -> None:
    """Table 4."""


@register(paper="Li et al. 2018")
@variant(
    encapnet,
    depth=14,
    aide_modules=(),
    wiring=("none", "none", "within", "within2"),
    feedback_weight=1.0,
    through_plan=True,
    generator="vanilla",
    cost="l2",
)
def encapnet14_cifar10() -> None:
    """The released code's default: no aide, which its switch turns on with aide_modules=(3, 4).

    Its feedback, with feedback="ot", has one unit in each of the last two modules, and other settings than the paper's.
    """


@register(paper="Li et al. 2018", parameters="60.68 Mb")
@variant(encapnet, depth=6)
def encapnet6_cifar10() -> None:
    """Table 1 (f), master and aide; aide_modules=() is (e), master alone.

    A parameter is 16 / 2^20 in the unit of that table. This network has 156.5 there, and (e) 25.98 for 25.76 printed.
    """
