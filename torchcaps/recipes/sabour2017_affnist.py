"""Sabour, Frosst & Hinton 2017, section 5.2: trained on MNIST in 40 x 40 pixels, tested on affNIST.

The paper stops its under-trained network at 99.23 % on the expanded MNIST test set. That would be choosing on a test
set, so here training ends after the first epoch with as much on held-out training digits; final.json says which.
Where affNIST cannot be fetched, data="affnist_generated" draws its transforms anew.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, section 5.2: test accuracy (%) on affNIST after training on translated MNIST"
COLUMNS = ("Method", "MNIST-40 (%)", "affNIST (%)")

STOPPED = (
    "the paper stops at {} % on the expanded MNIST test set; here as much on held-out digits, padded and not moved, "
    "ends training"
)
OPEN = ("reconstruction", "schedule_args", "epochs", "batch_size", "seeds", "validation", "stop_at")
BASE = Recipe(
    model="capsnet_affnist",
    data="affnist",
    protocol="sabour2017",
    model_args={"iterations": 3},
    reconstruction=0.0005,
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=50,
    batch_size=128,
    validation="first-10000",
    stop_at=0.9923,
    seeds=3,
    metric="accuracy",
    reported="79",
    assumed=(*OPEN, "model_args.iterations"),
    note=STOPPED.format(99.23),
)
OFFICIAL = replace(
    BASE,
    model_args={"iterations": 3, "form": "official"},
    protocol="sabour2017-official",
    loss_scale="official",
    assumed=("epochs", "seeds", "validation", "stop_at"),
)
CNN = replace(
    BASE,
    model="cnn_affnist",
    model_args={},
    loss="cross_entropy",
    reconstruction=0.0,
    stop_at=0.9922,
    reported="66",
    assumed=(*OPEN, "model"),
    note=STOPPED.format(99.22),
)
ROWS: dict[str, Recipe] = {
    "capsnet": BASE,
    "capsnet-official": OFFICIAL,
    "cnn": CNN,
    "capsnet-mnist40": replace(BASE, data="mnist40", reported="99.23"),
    "cnn-mnist40": replace(CNN, data="mnist40", reported="99.22"),
}
CITED: dict[str, str] = {}
