"""Which rows of the papers were to be reproduced, in the order of RESULTS.md; our own rows come after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A row of the page: of a paper's table, perhaps with settings of its own, and what it is counted by.

    `printed` is the paper's figure where it is not the row's own; `changes` are fields as `with_overrides` takes them.
    With `look` it is counted by further tests of the row's networks, and not by trainings.
    """

    label: str
    row: str
    printed: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    look: bool = False


@dataclass(frozen=True)
class Group:
    """A section of the page; of one with `curves`, whose rows are compared at equal epochs, the README has nothing."""

    key: str
    title: str
    entries: tuple[Entry, ...]
    curves: bool = False


BOTH = ("exact_match_error", "per_digit_error")
RESNET = "tsai2020_table1:inverted-resnet-cifar10"
GENERATED = {"data": "affnist_generated"}
ROUTINGS = {
    "ours": "inverted",
    "A": "inverted-a",
    "B": "inverted-b",
    "C": "inverted-c",
    "dynamic": "dynamic",
    "EM": "em",
}
GROUPS = (
    Group(
        "1",
        "Efficient-CapsNet on MNIST (Mazzia, tables 2 and 3)",
        (
            Entry("Efficient-CapsNet", "mazzia2021_table2:efficient"),
            Entry("released code, best epoch on the test set", "mazzia2021_table2:efficient-official"),
            Entry("ensemble", "mazzia2021_table3:efficient"),
        ),
    ),
    Group(
        "2",
        "Inverted attention on CIFAR-10 (Tsai, table 1)",
        (
            Entry("ResNet backbone, 2 iterations", RESNET, "mean 94.85, best 95.14"),
            Entry("released code, scrambled and best on the test set", f"{RESNET}-official", "mean 94.85, best 95.14"),
        ),
    ),
    Group(
        "3",
        "CapsNet on MNIST, 3 iterations with reconstruction (Sabour, table 1)",
        (
            Entry("loss as in the paper", "sabour2017_table1:routing3"),
            Entry("loss as in the released code", "sabour2017_table1:routing3-official"),
        ),
    ),
    Group(
        "4",
        "MultiMNIST",
        (
            Entry("Efficient-CapsNet", "mazzia2021_multimnist:efficient", "5.1 per digit", metrics=BOTH),
            Entry("CapsNet, 3 iterations", "sabour2017_table1:routing3-multimnist", "5.2 of pairs", metrics=BOTH),
            Entry("CapsNet, 1 iteration", "sabour2017_table1:routing1-multimnist", "7.5 of pairs", metrics=BOTH),
            Entry("CNN", "sabour2017_table1:baseline-multimnist", "8.1 of pairs", metrics=BOTH),
        ),
    ),
    Group(
        "5",
        "Inverted attention on CIFAR-10, what the windows and the iterations do",
        (
            Entry("scrambled windows", RESNET, "-", {"model_args.windows": "scrambled"}),
            Entry("1 iteration", RESNET, "94.73", {"model_args.iterations": 1}),
        ),
    ),
    Group(
        "6",
        "AR-CapsNet (Choi, table 1)",
        (
            Entry("MNIST", "choi2019_table1:ours-mnist"),
            Entry("CIFAR-10", "choi2019_table1:ours-c10"),
            Entry("CIFAR-10+", "choi2019_table1:ours-c10+"),
        ),
    ),
    Group(
        "7",
        "EncapNet-18 on CIFAR-10 (Li, table 3)",
        (
            Entry("master", "li2018_table3:1-master"),
            Entry("v3 with both skips", "li2018_table3:7-skip-both"),
            Entry("two OTs", "li2018_table3:8-two-ots"),
        ),
    ),
    Group(
        "8",
        "The other rows of Sabour's table 1 on MNIST, and Mazzia's baselines",
        (
            Entry("CNN", "sabour2017_table1:baseline"),
            Entry("CapsNet, 1 iteration, no reconstruction", "sabour2017_table1:routing1-plain"),
            Entry("CapsNet, 1 iteration", "sabour2017_table1:routing1"),
            Entry("CapsNet, 3 iterations, no reconstruction", "sabour2017_table1:routing3-plain"),
            Entry("Mazzia's CNN, no reconstruction", "mazzia2021_table2:baseline-plain"),
            Entry("Mazzia's vector CNN, no reconstruction", "mazzia2021_table2:base-capsnet-plain"),
            Entry("Mazzia's CNN", "mazzia2021_table2:baseline"),
            Entry("Mazzia's vector CNN", "mazzia2021_table2:base-capsnet"),
        ),
    ),
    Group(
        "9",
        "Generated affNIST after training on translated MNIST",
        (
            Entry("CapsNet", "sabour2017_affnist:capsnet", "79 on the official set", GENERATED),
            Entry("AR-CapsNet", "choi2019_table1:ours-affnist", "91.6 on the official set", GENERATED),
            Entry(
                "Efficient-CapsNet",
                "sabour2017_affnist:capsnet",
                "-",
                {**GENERATED, "model": "efficient_capsnet_mnist", "model_args": {}},
            ),
            Entry("CNN", "sabour2017_affnist:cnn", "66 on the official set", GENERATED),
        ),
    ),
    Group(
        "10",
        "Iterations of each routing on the simple backbone, CIFAR-10 (Tsai, figure 4)",
        tuple(
            Entry(
                f"{word}, {n} iteration{'s' * (n > 1)}",
                f"tsai2020_figure4:{row}-{n}",
                "collapses" if (word, n) == ("A", 5) else "-",
            )
            for word, row in ROUTINGS.items()
            for n in range(1, 6)
        ),
        curves=True,
    ),
    Group(
        "11",
        "Rivals on CIFAR-10 (Tsai, table 1) and DiverseMultiMNIST (figure 5)",
        (
            Entry("CIFAR-10, dynamic", "tsai2020_table1:dynamic-resnet-cifar10"),
            Entry("CIFAR-10, EM", "tsai2020_table1:em-resnet-cifar10"),
            Entry("CIFAR-10, CNN", "tsai2020_table1:cnn-cifar10"),
            Entry("CIFAR-10, ResNet-18", "tsai2020_table1:resnet18-cifar10"),
            Entry("DiverseMultiMNIST, vector", "tsai2020_figure5:inverted-vector"),
            Entry("DiverseMultiMNIST, matrix", "tsai2020_figure5:inverted-matrix"),
            Entry("DiverseMultiMNIST, dynamic", "tsai2020_figure5:dynamic-vector"),
            Entry("DiverseMultiMNIST, CNN", "tsai2020_figure5:cnn"),
        ),
    ),
)
TESTED_ON_OTHERS = {
    "multimnist-resnet": Entry(
        "multimnist-resnet, tested on relative shifts",
        "ours:multimnist-resnet",
        "-",
        {"data": "multimnist_relative"},
        BOTH,
        look=True,
    ),
}
