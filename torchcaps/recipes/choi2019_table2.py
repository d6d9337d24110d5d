"""Choi et al. 2019, table 2: AR-CapsNet on CIFAR-10 with 0 to 4 conv caps layers of capsules in 16 or 32 dimensions."""

from dataclasses import replace

from torchcaps.recipes import Recipe
from torchcaps.recipes.choi2019_table1 import CIFAR10, PLUS

TITLE = "Choi et al. 2019, table 2: test accuracy (%) on CIFAR-10"
COLUMNS = ("Conv caps layer", "Caps dim", "Params", "C10", "C10+")

NUMBERS = {  # layers, dimension: without and with augmentation
    (0, 16): ("77.51", "81.89"),
    (0, 32): ("77.44", "81.97"),
    (1, 16): ("81.96", "82.83"),
    (1, 32): ("82.39", "83.92"),
    (2, 16): ("84.48", "84.77"),
    (2, 32): ("85.46", "87.01"),
    (3, 16): ("85.56", "86.93"),
    (3, 32): ("86.56", "87.91"),
    (4, 16): ("86.37", "87.21"),
    (4, 32): ("87.19", "88.61"),
}
ROWS: dict[str, Recipe] = {}
for (depth, dim), (plain, augmented) in NUMBERS.items():
    row = replace(CIFAR10, model_args={"depth": depth, "dim": dim})
    ROWS[f"layers{depth}-dim{dim}-c10"] = replace(row, reported=plain)
    ROWS[f"layers{depth}-dim{dim}-c10+"] = replace(row, data_args=PLUS, reported=augmented)
CITED: dict[str, str] = {}
