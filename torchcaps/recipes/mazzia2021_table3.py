"""Mazzia, Salvetti & Chiaberge 2021, table 3: ensembles on MNIST.

The paper averages those of its 30 networks whose test accuracy is above 0.9973, without saying how many they are. Here
all 30 stand together: nothing is chosen on the test set.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe
from torchcaps.recipes.mazzia2021_table2 import ROWS as SINGLE

TITLE = "Mazzia et al. 2021, table 3: test error (%) of ensembles on MNIST"
COLUMNS = ("Method", "Year", "Test Error [%]")

ALL = "all that were trained, together; the paper takes those of its 30 with a test accuracy above 0.9973"


def ensemble(recipe: Recipe) -> Recipe:
    return replace(recipe, metric="ensemble_error", reported="0.16", assumed=(*recipe.assumed, "seeds"), note=ALL)


ROWS: dict[str, Recipe] = {
    "efficient": ensemble(SINGLE["efficient"]),
    "efficient-official": ensemble(SINGLE["efficient-official"]),
}
CITED: dict[str, str] = {
    "Multi-Column Deep Neural Networks for Image Classification [43], 2012": "0.23",
    "Regularization of Neural Networks using DropConnect [44], 2013": "0.21",
    "RMDL: Random Multimodel Deep Learning for Classification [45], 2018": "0.18",
    "Base-Branching & Merging CNN w/HFCs [20], 2020": "0.16",
}
