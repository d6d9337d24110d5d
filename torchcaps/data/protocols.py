"""How each paper treats each data set, and we our own images: what is done in training and testing, what is held out.

`find("sabour2017", "cifar10")` follows the paper, `find("sabour2017-official", "cifar10")` its released code where the
two differ. What a paper leaves open is listed as `assumed`, what else is worth knowing as `notes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.augment import (
    Step,
    affine,
    apply,
    brightness,
    byerly,
    centre_crop,
    colour_jitter,
    contrast,
    flip,
    n_crop,
    normalise,
    random_crop,
    resize,
    scale,
    shift,
    standardise,
    ten_crop,
    translate,
)
from torchcaps.data.augment import byerly as changed_by_byerly
from torchcaps.data.random import Draws
from torchcaps.data.splits import Split, Stored
from torchcaps.data.stronger import bend, mirrored, nudged, sometimes, warp
from torchcaps.data.stronger import cutout as cut_out
from torchcaps.data.stronger import elastic as stretched
from torchcaps.data.trivial import trivial as trivially_augmented

Steps = tuple[Any, ...]

CIFAR10_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # as Tsai's code has them, for both CIFARs
CANVAS = ("affnist", "affnist_generated", "mnist40")
LI_SIZES = {  # what images are enlarged to before they are cropped, by augmentation
    32: {"": 32, "+": 34, "++": 40},
    128: {"": 128, "+": 136, "++": 156},
    224: {"": 224, "+": 238, "++": 256},
}
SHIFT_SIX = "the paper shifts by up to 4 pixels, the released command by 6"
ONE_SHIFT = "the released code draws one shift of the first digit for all its pairs, as here"
PARTNERS = "its 1,000 partners of a digit are all different there; here a few come twice"
SAME_CLASS = "the released code compares images, so a tenth of the training pairs are of one class, as here"
FROM_TEST = "the released code picks the best epoch on the test set, as here"
SAME_KIND = "the model is selected on affNIST's validation set, so on the kind of images it is tested on"
SAME_DIGITS = "that validation set is made of digits which are trained on"


@dataclass(frozen=True)
class Protocol:
    """Plain values and steps.

    `crops` are the test steps that give several crops of each image [b, n, c, h, w], where the paper has them.
    `validation` is a fraction of the training images; "affnist", affNIST's own validation set; or "test", the test set
    itself (official protocols only). `options` go to the data set, such as MultiMNIST's shift.
    """

    name: str
    data: str
    train: Steps = ()
    test: Steps = ()
    crops: Steps | None = None
    validation: float | str = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class standardise_split(Step):
    """Each channel to mean 0 and deviation 1 over a whole split; `bind` puts the split's numbers in its place.

    `statistics` names the split they are taken from: "own", or "train" for all.
    """

    statistics: str = "own"

    def __post_init__(self) -> None:
        if self.statistics not in ("own", "train"):
            raise ValueError(f"statistics={self.statistics!r} is not known; it is 'own' or 'train'")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        raise ValueError(f"{self} needs a split's mean and deviation; bind(steps, own, train) puts them in")


@dataclass(frozen=True)
class standardised_crops(Step, geometric=True):
    """`n_crop`, each crop standardised for itself.

    Shapes: images [b, c, h, w] -> [b, n, c, size, size]
    """

    size: int
    n: int = 13

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        crops = n_crop(self.size, self.n)(images)
        return standardise()(crops.flatten(0, 1)).unflatten(0, (-1, self.n))


def bind(steps: Steps, own: Split, train: Split) -> Steps:
    """The steps with the numbers of these splits in place of `standardise_split`."""
    bound = []
    for step in steps:
        if isinstance(step, standardise_split):
            mean, std = statistics(own if step.statistics == "own" else train)
            step = normalise(mean, std)
        bound.append(step)
    return tuple(bound)


def statistics(split: Split) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, of pixels in [0, 1]."""
    if not isinstance(split, Stored):
        raise ValueError("statistics over a whole split need one that is stored, not generated or streamed")
    images = split.images if split.images.dim() == 4 else split.images.unsqueeze(1)
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).cpu().double()
        mean = (counts * levels).sum() / counts.sum()
        means.append(float(mean))
        stds.append(float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt()))
    return tuple(means), tuple(stds)


def image_after(steps: Steps, image: tuple[int, int, int]) -> tuple[int, int, int]:
    """The size of the image that a network sees after these steps."""
    draws = Draws(0, 0, torch.zeros(1, dtype=torch.int64))
    steps = tuple(step for step in steps if not isinstance(step, standardise_split))
    channels, height, width = apply(steps, torch.zeros(1, *image), draws).shape[-3:]
    return channels, height, width


def sabour2017(name: str, data: str, official: bool, *, crops: int = 13) -> Protocol:
    """Sabour, Frosst & Hinton 2017. Nothing is held out; `validation="first-10000"` is the code's validation mode."""
    strong = (brightness(63 / 255), contrast(0.2, 1.8))
    if data == "mnist":
        return Protocol(name, data, train=(shift(2),))
    if data == "multimnist":
        if official:
            options = {"shift": 6, "base_shift": "digit"}
            return Protocol(name, data, options=options, notes=(SHIFT_SIX, ONE_SHIFT, PARTNERS))
        return Protocol(name, data, options={"shift": 4}, notes=(SHIFT_SIX,))
    if data == "cifar10":
        return Protocol(
            name,
            data,
            train=(random_crop(24), flip(), *strong, standardise()),
            test=(centre_crop(24), standardise()),
            assumed=("everything but the size of the crops is as in the released code",),
        )
    if data == "smallnorb":
        return Protocol(
            name,
            data,
            train=(resize(48), *strong, random_crop(32), standardise()),
            test=(resize(48), centre_crop(32), standardise()),
            crops=(resize(48), standardised_crops(32, crops)),
            notes=("13 crops are Hinton et al. 2018, who treat smallNORB in the same way",),
            assumed=("brightness, contrast and standardisation are as in the released code",),
        )
    if data == "svhn":
        return Protocol(name, data, notes=("73,257 training images, without extra",), assumed=("no augmentation",))
    notes = ("the network is trained on MNIST-40 until it has 99.23 % there, then tested on affNIST",)
    return Protocol(name, data, train=(shift(6),), notes=notes)


def li2018(name: str, data: str, official: bool, *, augmentation: str = "++", size: int = 128) -> Protocol:
    """Li et al. 2018. `augmentation` is "", "+" or "++" as in table 4; `size`, for h-ImageNet, is 128 or 224 (v3)."""
    _one_of("augmentation", augmentation, ("", "+", "++"))
    _one_of("size", size, tuple(LI_SIZES)[1:])
    side = size if data == "himagenet" else 32
    larger = LI_SIZES[side]["++" if data == "mnist" else augmentation]
    mirrored: Steps = (flip(),)
    jitter: Steps = (colour_jitter(0.2, 0.2, 0.2, 0.2),) if augmentation == "++" else ()
    notes: tuple[str, ...] = ()
    if data == "mnist":
        mirrored, jitter = (), ()
    elif data == "svhn":
        mirrored = mirrored if official else ()
        notes = ("the released code flips house numbers too" + (", as here" if official else "; here they stay"),)
    enlarged: Steps = () if data == "himagenet" or larger == side else (resize(larger),)
    crop = random_crop(side, padding=0 if larger > side else side // 8)
    test: Steps = (*enlarged, centre_crop(side))
    kind = f"table 4's {augmentation}" if augmentation else "the blank of table 4"
    means = [f"crops from {larger} x {larger}" if larger > side else f"crops after padding by {side // 8}"]
    means += ["mirror images"] * bool(mirrored) + ["jittered colours"] * bool(jitter)
    if official and larger > side:
        test = (*enlarged, crop)
        notes += ("tests on random crops, so that the test error is itself random",)
    return Protocol(
        name,
        data,
        train=(*enlarged, crop, *mirrored, *jitter),
        test=test,
        crops=(*enlarged, ten_crop(side)) if larger > side else None,
        validation="test" if official else 0,
        options={"size": larger} if data == "himagenet" else {},
        notes=(*notes, FROM_TEST) if official else notes,
        assumed=() if official or data == "mnist" else (f"{kind} is taken as {' and '.join(means)}",),
    )


def choi2019(name: str, data: str, official: bool, *, augmentation: str = "") -> Protocol:
    """Choi et al. 2019. `augmentation` is "" or "+" as in table 1; a tenth of the training images is held out."""
    _one_of("augmentation", augmentation, ("", "+"))
    if data in CANVAS:
        train: Steps = (translate(0.2), flip()) if official else (translate(0.2),)
        flipped = ("the released code flips digits" + (", as here" if official else "; here they stay"),)
        if data == "mnist40":
            return Protocol(name, data, train, validation=0.1, notes=flipped)
        return Protocol(
            name,
            data,
            train,
            validation="affnist",
            options={} if official else {"disjoint": True},
            notes=(*flipped, SAME_KIND, *((SAME_DIGITS,) if official else ())),
            assumed=() if official else ("affNIST's validation set is made of the last 10,000 training digits",),
        )
    steps: Steps = ()
    notes: tuple[str, ...] = ()
    if augmentation and data == "mnist":
        steps = (affine(degrees=20, fraction=0.1),) if official else (translate(0.1),)
        notes = ("the released code rotates by up to 20 degrees as well" + (", as here" if official else ""),)
    elif augmentation:
        steps = (affine(degrees=20, fraction=0.1), flip())
    return Protocol(name, data, steps, validation=0.1, notes=notes)


def tsai2020(name: str, data: str, official: bool) -> Protocol:
    """Tsai et al. 2020. Both CIFARs are normalised with the numbers of CIFAR-10, as in the released code."""
    if data == "diverse_multimnist":
        return Protocol(
            name,
            data,
            assumed=("digits are summed and clipped", "a digit counts as found from a probability of 0.5 on"),
        )
    numbers = normalise(*CIFAR10_STATISTICS)
    return Protocol(
        name,
        data,
        train=(random_crop(32, padding=4), flip(), numbers),
        test=(numbers,),
        validation="test" if official else 0,
        notes=(FROM_TEST,) if official else (),
        assumed=("normalisation is as in the released code",),
    )


def mazzia2021(name: str, data: str, official: bool, *, crops: int = 13, statistics: str = "own") -> Protocol:
    """Mazzia et al. 2021. `statistics`, "own" or "train", says which split standardises smallNORB in official form."""
    picked = (FROM_TEST,) if official else ()
    assumed = () if official else ("how much of the training set is held out",)
    if data == "mnist":
        return Protocol(
            name,
            data,
            train=(scale(255 / 256), byerly()),
            test=(scale(255 / 256),),
            validation="test" if official else 0.05,
            notes=("pixels are value / 256", *picked),
            assumed=assumed,
        )
    if data == "multimnist":
        return Protocol(
            name,
            data,
            validation="test" if official else 0.05,
            options={"shift": 6, "different": "image"} if official else {"shift": 4},
            notes=(SHIFT_SIX, *((SAME_CLASS,) if official else ()), *picked),
            assumed=assumed,
        )
    even = standardise_split(statistics) if official else standardise()
    return Protocol(
        name,
        data,
        train=(even, resize(64), random_crop(48), brightness(2.0), contrast(0.5, 1.5)),
        test=(even, resize(64), centre_crop(48)),
        crops=(even, resize(64), n_crop(48, crops)),
        validation="test" if official else 0.2,
        notes=("the released code standardises each split as a whole, the paper each image", *picked),
        assumed=(*assumed, "where the 40 patches lie; 13 are those of Hinton et al. 2018"),
    )


def own_images(name: str, data: str, official: bool, *, augmentation: str = "photo") -> Protocol:
    """Ours, for one's own images: gentle changes that leave an image what it is.

    `augmentation` is "photo"; "scan", which mirrors nothing, as text and drawings want it; or "" for none.
    """
    _one_of("augmentation", augmentation, ("photo", "scan", ""))
    steps: dict[str, Steps] = {
        "photo": (affine(degrees=10, fraction=0.08), flip(), colour_jitter(0.2, 0.2, 0.2, 0.02)),
        "scan": (affine(degrees=5, fraction=0.05), colour_jitter(0.2, 0.2)),
        "": (),
    }
    return Protocol(name, data, steps[augmentation])


def ours(
    name: str,
    data: str,
    official: bool,
    *,
    degrees: float = 0.0,
    zoom: float = 0.0,
    shear: float = 0.0,
    move: float = 0.0,
    elastic: float = 0.0,
    contrast: float = 0.0,
    share: float = 1.0,
    byerly: float = 0.0,
    padding: int = 0,
    mirror: bool = False,
    jitter: float = 0.0,
    trivial: bool = False,
    cutout: int = 0,
    crops: int = 1,
) -> Protocol:
    """Of our own rows, which say what is done: `warp`, `elastic`, crops after `padding`, flips, colours, `trivial`,
    `cutout`.

    The first two blur an image and are done to a `share` of them; with a `contrast` they are one step, `bend`, which
    does not. A share `byerly` of the images takes `augment.byerly` instead. A tenth of the training images is held out
    unless a row says otherwise. crops=2 tests on an image and its mirror image, crops=9 on an image where it is and a
    pixel to each side. What is generated with targets, as MultiMNIST is, takes none of it.
    """
    views: dict[int, Steps] = {1: (), 2: (mirrored(),), 9: (nudged(),)}
    _one_of("crops", crops, tuple(views))
    if data.startswith("multimnist"):
        bending = (degrees, zoom, shear, move, elastic, contrast, byerly)
        if any((*bending, padding, mirror, jitter, trivial, cutout, crops > 1)):
            raise ValueError(f"{data} has targets, from which augmentation would part its images; leave it out")
        return Protocol(name, data, validation=0.1)
    numbers: Steps = (normalise(*CIFAR10_STATISTICS),) if data.startswith("cifar") else ()
    side = 28 if data in ("mnist", "fashion_mnist") else 32
    blurring = [(degrees or zoom or shear or move, warp(degrees, zoom, shear, move)), (elastic, stretched(elastic))]
    chosen = tuple(step for wanted, step in blurring if wanted)
    if contrast:
        chosen = (bend(degrees, zoom, shear, move, elastic, contrast),)
    if chosen and share < 1:
        chosen = (sometimes(chosen, share),)
    if byerly:
        chosen = (sometimes((changed_by_byerly(),), byerly, chosen),)
    steps: list[tuple[Any, Step]] = [
        *((True, step) for step in chosen),
        (padding, random_crop(side, padding=padding)),
        (mirror, flip()),
        (jitter, colour_jitter(jitter, jitter, jitter)),
        (trivial, trivially_augmented()),
    ]
    train = (*(step for wanted, step in steps if wanted), *numbers, *((cut_out(cutout),) if cutout else ()))
    several = (*numbers, *views[crops]) if crops > 1 else None
    return Protocol(name, data, train, numbers, crops=several, validation=0.1)


PAPERS: dict[str, tuple[Callable[..., Protocol], tuple[str, ...]]] = {
    "sabour2017": (sabour2017, ("mnist", "multimnist", *CANVAS, "cifar10", "smallnorb", "svhn")),
    "li2018": (li2018, ("mnist", "cifar10", "cifar100", "svhn", "himagenet")),
    "choi2019": (choi2019, ("mnist", *CANVAS, "cifar10")),
    "tsai2020": (tsai2020, ("cifar10", "cifar100", "diverse_multimnist")),
    "mazzia2021": (mazzia2021, ("mnist", "smallnorb", "multimnist")),
}
OURS: dict[str, tuple[Callable[..., Protocol], tuple[str, ...]]] = {
    "own_images": (own_images, ("folder",)),
    "ours": (
        ours,
        ("mnist", "fashion_mnist", "multimnist", "multimnist_relative", "cifar10", "cifar100", "svhn"),
    ),
}


def find(name: str, data: str, **options: Any) -> Protocol:
    """The protocol of that name for a data set; `options` are the paper's own, such as augmentation="+"."""
    paper, _, form = name.partition("-")
    if (paper not in PAPERS or form not in ("", "official")) and name not in OURS:
        near = get_close_matches(name, protocol_names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(protocol_names())}"
        raise ValueError(f"there is no protocol {name!r}; {hint}")
    make, sets = {**PAPERS, **OURS}[paper]
    if data == "multimnist_shift6" and "multimnist" in sets:
        if form != "official":
            raise ValueError(f"{paper} shifts by 4 pixels; multimnist_shift6 has {', '.join(protocol_names(data))}")
        return replace(find(name, "multimnist", **options), data=data)
    if data not in sets:
        others = [other for other in protocol_names(data) if "-" not in other] or protocol_names(data)
        known = (
            f"{data} has {', '.join(others)}" if others else f"no paper here uses {data}, so name your own transforms"
        )
        raise ValueError(f"{paper} has no protocol for {data}; {known}")
    _refuse_unknown(name, options, protocol_options(name))
    return make(name, data, form == "official", **options)


def protocol_names(data: str | None = None) -> list[str]:
    """All names of the papers' protocols, or those that a data set has."""
    if data == "multimnist_shift6":
        return [name for name in protocol_names("multimnist") if name.endswith("-official")]
    ours = [name for name, (_, sets) in OURS.items() if data in sets]
    papers = [paper for paper, (_, sets) in PAPERS.items() if data is None or data in sets]
    return [*(name for paper in papers for name in (paper, f"{paper}-official")), *ours]


def protocol_options(name: str) -> tuple[str, ...]:
    make = {**PAPERS, **OURS}[name.partition("-")[0]][0]
    return tuple(word for word, value in inspect.signature(make).parameters.items() if value.kind == value.KEYWORD_ONLY)


def _one_of(word: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ValueError(f"{word}={value!r} is not known; it is one of {', '.join(map(repr, known))}")


def _refuse_unknown(name: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for word in options:
        if word not in known:
            raise ValueError(f"{name} has no option {word!r}; it has {', '.join(known) or 'none'}")
