"""Sabour, Frosst & Hinton 2017, section 7: seven CapsNets on 24 x 24 patches of CIFAR-10, their lengths summed.

64 types of primary capsules and a none-of-the-above category in the routing. No reconstruction and 600,000 steps are
as in the released code.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, section 7: test error (%) on CIFAR-10"
COLUMNS = ("Method", "CIFAR-10 (%)")

BASE = Recipe(
    model="capsnet_cifar10",
    data="cifar10",
    protocol="sabour2017",
    model_args={"iterations": 3},
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=1535,
    batch_size=128,
    seeds=7,
    metric="ensemble_error",
    reported="10.6",
    assumed=("reconstruction", "schedule_args", "epochs", "protocol"),
)
ROWS: dict[str, Recipe] = {
    "ensemble7": BASE,
    "ensemble7-official": replace(
        BASE,
        model_args={"iterations": 3, "form": "official"},
        protocol="sabour2017-official",
        loss_scale="official",
        assumed=(),
    ),
    "single": replace(BASE, metric="error", seeds=3, reported="", note="one network alone; the paper prints no number"),
}
CITED: dict[str, str] = {}
