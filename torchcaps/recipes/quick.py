"""Minutes on a CPU: Efficient-CapsNet on MNIST, and on the digits in the package for a machine with no network.

Ours, no paper's. An epoch is 12,000 images, so that the curves have points; about five make one pass over MNIST. The
8 x 8 digits need a smaller first kernel and no strides.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Efficient-CapsNet in three minutes on two CPU cores: test accuracy (%)"
COLUMNS = ("Data", "Accuracy")

MNIST = Recipe(
    model="efficient_capsnet_mnist",
    data="mnist",
    validation=0.05,
    reconstruction=0.392,
    reconstruction_reduction="mean",
    lr=2e-3,
    optimizer_args={"eps": 1e-7},
    schedule="cosine",
    schedule_args={"warmup": 0.2},
    epochs=6,
    batch_size=32,
    samples=12_000,
    metric="accuracy",
)
ROWS: dict[str, Recipe] = {
    "mnist": MNIST,
    "digits": replace(
        MNIST,
        model="efficient_capsnet",
        model_args={"image": (1, 8, 8), "first_kernel": 2, "strides": (1, 1, 1, 1)},
        data="digits",
        validation=0.1,
        epochs=30,
        samples=None,
        schedule_args={"warmup": 1},
    ),
}
CITED: dict[str, str] = {}
