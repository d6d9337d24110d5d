"""Every data set by its name: `load("mnist", validation=5000)` gives train, validation and test."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcaps.data import formats, protocols
from torchcaps.data.errors import DataError
from torchcaps.data.splits import DataSet, Stored, balanced, by_viewpoint, hold_out

log = logging.getLogger("torchcaps")

CIFAR10_WORDS = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_WORDS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm"""
FASHION_WORDS = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"

DIGITS = tuple("0123456789")
FASHION = tuple(FASHION_WORDS.split(","))
CIFAR10, CIFAR100 = tuple(CIFAR10_WORDS.split()), tuple(CIFAR100_WORDS.split())
SMALLNORB = ("animal", "human", "airplane", "truck", "car")


def load(
    name: str,
    *,
    validation: float | str | None = None,
    seed: int = 0,
    protocol: str | None = None,
    root: str | os.PathLike[str] | None = None,
    offline: bool = False,
    sources: Sequence[str] | None = None,
    **options: Any,
) -> DataSet:
    """A data set, fetched if it is not in the cache.

    Args:
        validation: how many training images are held out, or which fraction; "first-10000" for the first of them,
            "part-2-of-3" for a part in one piece. Left out, the protocol decides, and nothing is held out without one.
        seed: chooses what is held out.
        protocol: a paper's treatment, such as "sabour2017", or "sabour2017-official" as its released code has it.
        root: the cache folder, if not the usual one.
        offline: never use the network.
        sources: where to look, in this order.
        options: the set's own, such as viewpoint="azimuth" of smallnorb or draw_seed=1 of generated sets, which draws
            other images than the usual ones, and the protocol's, such as augmentation="+". crops=13 tests on several
            crops of each image, where the protocol has them, and crops=1 on the image alone.
    """
    if not isinstance(name, str) or name not in SETS:
        near = get_close_matches(name, SETS, n=3, cutoff=0.5) if isinstance(name, str) else []
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(SETS)}"
        raise ValueError(f"there is no data set {name!r}; {hint}")
    crops = options.pop("crops", None)
    crops = None if crops == 1 else crops
    paper = None if protocol is None else _protocol(protocol, name, crops, options)
    if paper is None and crops is not None:
        raise ValueError(f"crops={crops} needs a protocol that says how {name} is cropped")
    if not isinstance(validation, (Real, str, type(None))) or validation != validation:
        raise ValueError(
            f"validation={validation!r} is no number of images, no fraction and no rule such as 'first-10000' "
            "or 'part-2-of-3'"
        )
    rule = (0 if paper is None else paper.validation) if validation is None else validation
    if validation == "test":
        raise ValueError("the test set is no validation set; only the official protocols use it so, by their names")
    where = Where(rule, seed, root, offline, sources)
    options = {**(paper.options if paper else {}), **options}
    _refuse_unknown(name, options)
    data = replace(SETS[name](where, **options), name=name)
    if rule == "test":
        log.warning("%s of %s validates on the test set, as its released code does", protocol, name)
        data = replace(data, validation=data.test)
    return data if paper is None else _with_protocol(data, paper, crops is not None)


@dataclass(frozen=True)
class Where:
    """What all sets are asked for alike: what to hold out, and where the files are."""

    rule: float | str = 0
    seed: int = 0
    root: str | os.PathLike[str] | None = None
    offline: bool = False
    sources: Sequence[str] | None = None

    def files(self, name: str, *parts: str) -> dict[str, Path]:
        from torchcaps.data import fetch

        more = {"parts": parts} if parts else {}
        return fetch.ensure(name, root=self.root, offline=self.offline, sources=self.sources, **more)

    def hold(self, split: Any, group: str | None = None) -> tuple[Any, Any]:
        """What is left to train on, and what is held out or None."""
        if self.rule in (0, "test"):
            return split, None
        if self.rule == "affnist":
            raise ValueError("validation='affnist' is affNIST's own validation set, which other sets do not have")
        return hold_out(split, self.rule, self.seed, group)

    def part(
        self, train: Any, test: Any, make: Callable[[Any, int], Any] = lambda base, seed: base, **options: Any
    ) -> DataSet:
        """A set of what `make` makes from train, held-out and test images, each with a seed of its own."""
        train, held = self.hold(train, **options)
        return DataSet("", make(train, 0), make(test, 2), None if held is None else make(held, 1))


def _protocol(protocol: str, name: str, crops: int | None, options: dict[str, Any]) -> protocols.Protocol:
    """Finds the protocol, and takes its options out of `options`."""
    protocols.find(protocol, name)
    known = protocols.protocol_options(protocol)
    own = {word: options.pop(word) for word in list(options) if word in known}
    if crops is not None and "crops" in known:
        own["crops"] = crops
    paper = protocols.find(protocol, name, **own)
    if crops is not None and paper.crops is None:
        raise ValueError(f"{protocol} tests {name} on no crops; leave crops={crops} out")
    if crops is not None and "crops" not in known and crops != 10:
        raise ValueError(f"{protocol} tests on crops=10, not {crops}")
    return paper


def _with_protocol(data: DataSet, paper: protocols.Protocol, several: bool) -> DataSet:
    for note in paper.notes:
        log.info("%s, %s: %s", paper.name, data.name, note)
    test = paper.crops if several and paper.crops is not None else paper.test
    return replace(
        data,
        protocol=paper,
        train_transform=protocols.bind(paper.train, data.train, data.train),
        test_transform=protocols.bind(test, data.test, data.train),
    )


def _refuse_unknown(name: str, options: dict[str, Any]) -> None:
    parameters = inspect.signature(SETS[name]).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        from torchcaps.data.folder import load_folder

        known += [word for word in inspect.signature(load_folder).parameters if word not in ("seed", *known)]
    for word in options:
        if word not in known:
            raise ValueError(f"{name} has no option {word!r}; it has {', '.join(known) or 'none'}")


def _mnist(where: Where, name: str = "mnist", class_names: tuple[str, ...] = DIGITS) -> tuple[Stored, Stored]:
    files = where.files(name)
    pairs = [(files[f"{part}_images"], files[f"{part}_labels"]) for part in ("train", "test")]
    train, test = (Stored(*formats.read_idx_pair(*pair, len(class_names)), class_names) for pair in pairs)
    return train, test


def _joined(batches: list[tuple[Tensor, Tensor]], class_names: tuple[str, ...]) -> Stored:
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Stored(images, labels, class_names)


def mnist(where: Where) -> DataSet:
    return where.part(*_mnist(where))


def fashion_mnist(where: Where) -> DataSet:
    return where.part(*_mnist(where, "fashion_mnist", FASHION))


def cifar10(where: Where) -> DataSet:
    files = where.files("cifar10")
    train = _joined([formats.read_cifar(files[f"data_batch_{number}"]) for number in range(1, 6)], CIFAR10)
    return where.part(train, Stored(*formats.read_cifar(files["test_batch"]), CIFAR10))


def cifar100(where: Where) -> DataSet:
    files = where.files("cifar100")
    train, test = (Stored(*formats.read_cifar(files[part], classes=100), CIFAR100) for part in ("train", "test"))
    return where.part(train, test)


def svhn(where: Where, *, extra: bool = False) -> DataSet:
    """`extra` adds the 531,131 easier digits to the training set."""
    more = ("extra",) if extra else ()
    files = where.files("svhn", *more)
    train = _joined([formats.read_svhn(files[key]) for key in ("train", *more)], DIGITS)
    return where.part(train, Stored(*formats.read_svhn(files["test"]), DIGITS))


def smallnorb(where: Where, *, viewpoint: str | None = None) -> DataSet:
    """Held out by toy. With viewpoint="azimuth" or "elevation", training sees the familiar ones, `test` the novel."""
    files = where.files("smallnorb")
    splits = []
    for part in ("train", "test"):
        images, labels, about = formats.read_smallnorb(*(files[f"{part}_{kind}"] for kind in ("dat", "cat", "info")))
        splits.append(Stored(images, labels, SMALLNORB, about))
    if viewpoint is None:
        return where.part(splits[0], splits[1], group="instance")
    (train, _), (familiar, novel) = (by_viewpoint(split, viewpoint) for split in splits)
    return replace(where.part(train, novel, group="instance"), familiar=familiar)


def affnist(where: Where, *, training: str = "mnist40", disjoint: bool = False) -> DataSet:
    """Trained on MNIST-40 as in the papers, or with training="affnist" on its own 1.6 million training images.

    validation="affnist" is its own validation set; `disjoint` then trains on none of the digits it is made of.
    """
    _check_training(training)
    own = where.rule == "affnist"
    parts = (["validation"] if own else []) + (["train"] if training == "affnist" else [])
    files = where.files("affnist", *parts)
    test = Stored(*formats.read_affnist(files["test"]), DIGITS)
    held = Stored(*formats.read_affnist(files["validation"]), DIGITS) if own else None
    if training == "affnist":
        if where.rule not in (0, "test", "affnist"):
            raise ValueError(f"training='affnist' goes with validation='affnist', not with {where.rule!r}")
        train = _joined([formats.read_affnist(files[key]) for key in files if key.startswith("train")], DIGITS)
        return DataSet("", train, test, held)
    data = _trained_on(where, disjoint, _on_canvas)
    return replace(data, test=test, validation=held if own else data.validation)


def affnist_generated(
    where: Where, *, training: str = "mnist40", disjoint: bool = False, draw_seed: int = 0
) -> DataSet:
    """As `affnist`, with the transforms drawn anew from MNIST, 32 for each digit."""
    from torchcaps.data.generated import GeneratedAffNIST

    _check_training(training)
    transformed = training == "affnist"

    def make(base: Stored, seed: int) -> Any:
        return GeneratedAffNIST(base, seed=_drawn(draw_seed, seed))

    data = _trained_on(where, disjoint or transformed, make if transformed else _on_canvas)
    train, test = _mnist(where)
    if where.rule == "affnist":
        last = train.take(torch.arange(_affnist_digits(train), len(train)))
        data = replace(data, validation=make(last, 1))
    return replace(data, test=make(test, 2))


def _trained_on(where: Where, disjoint: bool, make: Callable[..., Any]) -> DataSet:
    train, test = _mnist(where)
    if where.rule != "affnist":
        return where.part(train, test, lambda base, seed: make(base, seed=seed))
    if disjoint:
        train = train.take(torch.arange(_affnist_digits(train)))
    return DataSet("", make(train, seed=0), test)


def _affnist_digits(train: Stored) -> int:
    """How many digits affNIST's training set is made of; the last of MNIST's make its validation set."""
    return len(train) * 5 // 6


def _on_canvas(base: Stored, seed: int = 0) -> Stored:
    from torchcaps.data.generated import canvas

    return canvas(base)


def _check_training(training: str) -> None:
    if training not in ("mnist40", "affnist"):
        raise ValueError(f"training={training!r} is not known; it is 'mnist40' or 'affnist'")


def mnist40(where: Where) -> DataSet:
    """MNIST in the middle of 40 x 40 pixels."""
    return where.part(*_mnist(where), _on_canvas)


def multimnist(
    where: Where,
    *,
    shift: int = 4,
    pad: int = 4,
    relative: bool = False,
    per_digit: int = 1000,
    different: str = "class",
    base_shift: str = "image",
    draw_seed: int = 0,
) -> DataSet:
    """Two digits of different classes over each other, `per_digit` images for each digit: 60 and 10 million.

    different="image" lets training pairs be of one class; those of validation and test never are.
    """
    from torchcaps.data.generated import MultiMNIST

    def make(base: Stored, seed: int) -> Any:
        return MultiMNIST(
            base,
            per_digit * len(base),
            shift=shift,
            pad=pad,
            relative=relative,
            different="class" if seed else different,
            base_shift=base_shift,
            seed=_drawn(draw_seed, seed),
        )

    return where.part(*_mnist(where), make)


def diverse_multimnist(
    where: Where,
    *,
    train_length: int = 21_000_000,
    test_length: int = 10_000,
    overlay: str = "sum",
    draw_seed: int = 0,
) -> DataSet:
    """One digit in a sixth of the images, two of different classes in the others."""
    from torchcaps.data.generated import DiverseMultiMNIST

    def make(base: Stored, seed: int) -> Any:
        length = test_length if seed else train_length
        return DiverseMultiMNIST(base, length, overlay=overlay, seed=_drawn(draw_seed, seed))

    return where.part(*_mnist(where), make)


def _drawn(draw_seed: int, part: int) -> int:
    """The seed of part 0, 1 or 2: train, validation and test have one of their own, whatever `draw_seed` is."""
    if type(draw_seed) is not int or draw_seed < 0:
        raise ValueError(f"draw_seed={draw_seed!r} is no whole number from 0 on")
    return 3 * draw_seed + part


def digits(where: Where) -> DataSet:
    """1,797 digits of 8 x 8 pixels that come with the package, the first four fifths to train on."""
    path = where.files("digits")["digits"]
    try:
        with np.load(path, allow_pickle=False) as content:
            levels, labels = content["images"], content["labels"]
    except (OSError, ValueError, KeyError, EOFError):
        raise DataError(f"{path} is damaged: install torchcaps again") from None
    images = torch.from_numpy(((levels.astype(np.int64) * 255 + 8) // 16).astype(np.uint8))
    everything = Stored(images, formats.check_labels(torch.from_numpy(labels), 10, path), DIGITS)
    rows, start = torch.arange(len(images)), len(images) * 4 // 5
    return where.part(everything.take(rows[:start]), everything.take(rows[start:]))


def folder(
    where: Where, *, path: str | os.PathLike[str] | None = None, balance: bool = False, **options: Any
) -> DataSet:
    """Images of one's own, see `torchcaps.data.folder.load_folder`; `balance` repeats those of rare classes."""
    from torchcaps.data.folder import load_folder

    if path is None:
        raise DataError(
            "folder needs path=, or --path in a shell: the folder with your images, or a CSV that lists them"
        )
    data = _held(where, load_folder(path, seed=where.seed, **options), path)
    if not balance:
        return data
    train = balanced(data.train)  # type: ignore[type-var]
    note = f"images of rare classes are repeated: {len(data.train):,} training images count as {len(train):,}"
    return replace(data, train=train, notes=(*data.notes, note) if len(train) > len(data.train) else data.notes)


def himagenet(where: Where, *, path: str | os.PathLike[str] | None = None, **options: Any) -> DataSet:
    """The folder that `torchcaps data make himagenet` wrote: `path`, or himagenet in the cache folder."""
    from torchcaps.data.fetch import cache_folder
    from torchcaps.data.folder import load_folder
    from torchcaps.data.himagenet import check_finished, himagenet_classes

    place = cache_folder(where.root) / "himagenet" if path is None else Path(path)
    if not place.is_dir():
        raise DataError(
            f"{place} is no folder; torchcaps data make himagenet --from FOLDER --out {place} makes it from ILSVRC"
        )
    if "csv" not in options:
        check_finished(place)
    options = {"classes": himagenet_classes(), "size": 156, **options}
    return _held(where, load_folder(place, seed=where.seed, **options), place)


def _held(where: Where, data: DataSet, path: str | os.PathLike[str]) -> DataSet:
    if where.rule in (0, "test"):
        return data
    if data.validation is not None:
        raise ValueError(f"{path} has a validation part of its own; leave validation={where.rule!r} out")
    train, held = where.hold(data.train)
    return replace(data, train=train, validation=held)


SETS: dict[str, Callable[..., DataSet]] = {
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "smallnorb": smallnorb,
    "affnist": affnist,
    "affnist_generated": affnist_generated,
    "mnist40": mnist40,
    "multimnist": multimnist,
    "multimnist_shift6": partial(multimnist, shift=6),
    "multimnist_relative": partial(multimnist, relative=True),
    "diverse_multimnist": diverse_multimnist,
    "himagenet": himagenet,
    "folder": folder,
    "digits": digits,
}
