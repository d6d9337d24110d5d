"""Tsai et al. 2020, figure 5: CapsNets and CNNs with as many neurons on DiverseMultiMNIST, one or two digits an image.

350 steps of 60,000 images, a tenth of the learning rate after 150 and 250, SGD at 0.1 for all. An image counts where
all its digits and no others are named. The numbers are those of the text; the 42M network's widths are not printed.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Tsai et al. 2020, figure 5: test accuracy (%) on DiverseMultiMNIST"
COLUMNS = ("Method", "Pose", "Parameters", "Test accuracy")

OPEN = ("optimizer_args", "seeds")
BASE = Recipe(
    model="inverted_diverse_multimnist",
    data="diverse_multimnist",
    protocol="tsai2020",
    loss="binary_cross_entropy",
    optimizer="sgd",
    lr=0.1,
    optimizer_args={"momentum": 0.9, "weight_decay": 5e-4},
    schedule="steps",
    schedule_args={"milestones": (150, 250), "factor": 0.1},
    epochs=350,
    batch_size=128,
    samples=60_000,
    seeds=3,
    metric="exact_match_accuracy",
    assumed=(*OPEN, "model_args.iterations"),
)
CNN = replace(BASE, model="cnn_diverse_multimnist", assumed=OPEN)
ROWS: dict[str, Recipe] = {
    "dynamic-vector": replace(
        BASE,
        model="dynamic_diverse_multimnist",
        model_args={"iterations": 3},
        reported="83.39",
        note="how large weights start is not said; here so that lengths of a half stay a half",
    ),
    "inverted-vector": replace(BASE, model_args={"pose": "vector", "iterations": 2}, reported="85.74"),
    "inverted-matrix": replace(BASE, model_args={"pose": "matrix", "iterations": 2}, reported="80.59"),
    "inverted-matrix-42m": replace(
        BASE,
        model_args={"pose": "matrix", "iterations": 2, "width": 2128},
        reported="91.17",
        assumed=(*BASE.assumed, "model_args.width"),
    ),
    "cnn": replace(CNN, model_args={"head": "pooling"}, reported="79.81"),
    "cnn-dense": replace(CNN, model_args={"head": "dense"}, reported="84.84"),
}
CITED: dict[str, str] = {}
