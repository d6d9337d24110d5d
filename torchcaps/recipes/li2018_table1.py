"""Li et al. 2018, table 1: CapNet, plain CNNs and EncapNet of six layers on CIFAR-10 and MNIST.

The printed sizes (Mb) are 16 / 2^20 for each parameter. 8 and 4 are the largest batches the paper could fit for the two
CapNets, and are taken as the ones they were trained with.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Li et al. 2018, table 1: test error (%) of networks with six layers"
COLUMNS = ("method", "param #", "mem. size", "runtime", "CIFAR-10", "MNIST")

BASE = Recipe(
    model="encapnet6_cifar10",
    data="cifar10",
    protocol="li2018",
    data_args={"augmentation": ""},
    lr=1e-4,
    optimizer_args={"weight_decay": 5e-4},
    schedule="steps",
    schedule_args={"milestones": (200, 300, 400), "factor": 0.1},
    epochs=600,
    batch_size=128,
    seeds=3,
    assumed=("data_args.augmentation", "seeds"),
)
CAPNET = replace(BASE, assumed=(*BASE.assumed, "batch_size", "loss"))
CNN = replace(BASE, model="li_cnn6_cifar10", loss="cross_entropy", assumed=(*BASE.assumed, "loss", "model_args"))
COUNT = "has more parameters than the paper prints, which no reading of its text explains"
CIFAR10 = {
    "a-dynamic": replace(CAPNET, model="capnet_dynamic_cifar10", batch_size=8, reported="14.28"),
    "b-em": replace(CAPNET, model="capnet_em_cifar10", loss="spread", batch_size=4, reported="12.66"),
    "c-same-shape": replace(CNN, reported="14.43"),
    "d-similar-param": replace(CNN, model_args={"width": 79}, reported="12.09"),
    "e-master": replace(BASE, model_args={"aide_modules": ()}, reported="13.87"),
    "f-master-aide": replace(BASE, reported="11.93", note=COUNT),
}
MNIST = {"a-dynamic": "0.37", "b-em": "0.31", "c-same-shape": "0.38", "d-similar-param": "0.33", "e-master": "0.31"}


def on_mnist(recipe: Recipe, reported: str) -> Recipe:
    return replace(
        recipe,
        data="mnist",
        data_args={},
        model_args={**recipe.model_args, "image": (1, 32, 32)},
        reported=reported,
        assumed=("protocol", *recipe.assumed[1:]),
    )


ROWS: dict[str, Recipe] = {
    **CIFAR10,
    **{f"{row}-mnist": on_mnist(CIFAR10[row], reported) for row, reported in MNIST.items()},
    "f-master-aide-mnist": on_mnist(CIFAR10["f-master-aide"], "0.25"),
}
CITED: dict[str, str] = {}
