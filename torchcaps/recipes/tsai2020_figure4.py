"""Tsai et al. 2020, figure 4: 1 to 5 iterations on CIFAR-10 with the simple backbone, and three ablations.

A is without layer norm, which is taken to mean that of the primary capsules too, B routes one layer after the other, C
has activations in its capsules. The paper draws its numbers; the text says only that A predicts uniformly with five
iterations.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe
from torchcaps.recipes.tsai2020_table1 import DYNAMIC, EM, INVERTED

TITLE = "Tsai et al. 2020, figure 4: test accuracy (%) on CIFAR-10 after 1 to 5 iterations"
COLUMNS = ("Method", "1", "2", "3", "4", "5")

DRAWN = "the paper draws this number and does not print it"
KINDS: dict[str, tuple[Recipe, dict[str, bool]]] = {
    "inverted": (INVERTED, {}),
    "dynamic": (DYNAMIC, {}),
    "em": (EM, {}),
    "inverted-a": (replace(INVERTED, assumed=(*INVERTED.assumed, "model_args.norm")), {"norm": False}),
    "inverted-b": (INVERTED, {"concurrent": False}),
    "inverted-c": (replace(INVERTED, assumed=(*INVERTED.assumed, "model_args.activations")), {"activations": True}),
}
ROWS: dict[str, Recipe] = {
    f"{name}-{iterations}": replace(
        recipe,
        model_args={"backbone": "simple", "iterations": iterations, **options},
        seeds=3,
        note=DRAWN,
        assumed=tuple(field for field in recipe.assumed if field != "model_args.iterations"),
    )
    for name, (recipe, options) in KINDS.items()
    for iterations in range(1, 6)
}
ROWS["inverted-a-5"] = replace(ROWS["inverted-a-5"], reported="uniform", note="a uniform prediction, 10 %")
CITED: dict[str, str] = {}
