"""Sabour, Frosst & Hinton 2017, section 7: a smaller CapsNet on the 73,257 training images of SVHN.

Only the network's sizes are printed; the training is that of MNIST, without reconstruction.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, section 7: test error (%) on SVHN"
COLUMNS = ("Method", "SVHN (%)")

BASE = Recipe(
    model="capsnet_svhn",
    data="svhn",
    protocol="sabour2017",
    model_args={"iterations": 3},
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=524,
    batch_size=128,
    seeds=3,
    reported="4.3",
    assumed=("reconstruction", "schedule_args", "epochs", "batch_size", "seeds", "protocol"),
)
ROWS: dict[str, Recipe] = {
    "capsnet": BASE,
    "capsnet-official": replace(
        BASE,
        model_args={"iterations": 3, "form": "official"},
        protocol="sabour2017-official",
        loss_scale="official",
    ),
}
CITED: dict[str, str] = {}
