"""Sabour, Frosst & Hinton 2017, table 1: CapsNet on MNIST and MultiMNIST, with and without routing and reconstruction.

The paper says "Adam with TensorFlow's defaults, including the exponentially decaying learning rate" and no more; the
numbers of it are those of the released code: 0.96 every 2,000 steps, batches of 128, 300,000 steps. On MultiMNIST the
period is ten times longer, and so is the training here. Rows named -official have the released network and loss.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, table 1: test error (%) on MNIST and MultiMNIST"
COLUMNS = ("Method", "Routing", "Reconstruction", "MNIST (%)", "MultiMNIST (%)")

OPEN = ("epochs", "batch_size", "schedule_args")
MNIST = Recipe(
    model="capsnet_mnist",
    data="mnist",
    protocol="sabour2017",
    reconstruction=0.0005,
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=640,
    batch_size=128,
    seeds=3,
    assumed=OPEN,
)
MULTIMNIST = replace(
    MNIST,
    model="capsnet_multimnist",
    data="multimnist",
    schedule_args={"decay": 0.96, "every": 20_000, "floor": 1e-6},
    epochs=64,
    samples=6_000_000,
    metric="exact_match_error",
    assumed=(*OPEN, "samples", "metric"),
)
PLAIN = {"decoder": False}


def official(recipe: Recipe) -> Recipe:
    return replace(
        recipe,
        model_args={**recipe.model_args, "form": "official"},
        protocol="sabour2017-official",
        loss_scale="official",
        assumed=tuple(name for name in recipe.assumed if name in ("samples", "epochs")),
    )


BASELINE = replace(
    MNIST,
    model="cnn_mnist",
    loss="cross_entropy",
    reconstruction=0.0,
    reported="0.39",
    assumed=(*OPEN, "model_args.dropout"),
)
MULTI_BASELINE = replace(
    MULTIMNIST, model="cnn_multimnist", loss="binary_cross_entropy", reconstruction=0.0, reported="8.1"
)
CAPSNETS = {
    "routing1-plain": replace(
        MNIST, model_args={"iterations": 1, **PLAIN}, reconstruction=0.0, reported="0.34 ± 0.032"
    ),
    "routing1": replace(MNIST, model_args={"iterations": 1}, reported="0.29 ± 0.011"),
    "routing3-plain": replace(
        MNIST, model_args={"iterations": 3, **PLAIN}, reconstruction=0.0, reported="0.35 ± 0.036"
    ),
    "routing3": replace(MNIST, model_args={"iterations": 3}, reported="0.25 ± 0.005"),
    "routing1-multimnist": replace(MULTIMNIST, model_args={"iterations": 1}, reported="7.5"),
    "routing3-multimnist": replace(
        MULTIMNIST, model_args={"iterations": 3}, reported="5.2", note="the text says 5.0 %"
    ),
}
ROWS: dict[str, Recipe] = {
    "baseline": BASELINE,
    "baseline-multimnist": MULTI_BASELINE,
    "baseline-multimnist-official": official(replace(MULTI_BASELINE, note="both kernels 5 x 5, as released")),
    **CAPSNETS,
    **{f"{name}-official": official(recipe) for name, recipe in CAPSNETS.items()},
}
CITED: dict[str, str] = {}
