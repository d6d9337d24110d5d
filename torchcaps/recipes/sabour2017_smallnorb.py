"""Sabour, Frosst & Hinton 2017, section 7: "the exact same architecture as we used for MNIST" on smallNORB.

Whether it was trained with reconstruction is not said; here it is not, and the training lasts as many steps as MNIST's.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, section 7: test error (%) on smallNORB"
COLUMNS = ("Method", "smallNORB (%)")

BASE = Recipe(
    model="capsnet_smallnorb",
    data="smallnorb",
    protocol="sabour2017",
    model_args={"iterations": 3},
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=1579,
    batch_size=128,
    seeds=3,
    reported="2.7",
    assumed=("reconstruction", "schedule_args", "epochs", "batch_size", "seeds", "protocol"),
)
ROWS: dict[str, Recipe] = {
    "capsnet": BASE,
    "capsnet-official": replace(
        BASE,
        model_args={"iterations": 3, "form": "official"},
        protocol="sabour2017-official",
        loss_scale="official",
        assumed=("epochs", "seeds"),
    ),
}
CITED: dict[str, str] = {}
