"""Sabour, Frosst & Hinton 2017, figure A.2: training loss on CIFAR-10 with 1 and 3 iterations, in batches of 128.

Both are curves; the network and the schedule are those of the CIFAR-10 ensemble.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Sabour et al. 2017, figure A.2: training loss on CIFAR-10"
COLUMNS = ("Routing iterations", "Loss")

BASE = Recipe(
    model="capsnet_cifar10",
    data="cifar10",
    protocol="sabour2017",
    schedule="exponential_steps",
    schedule_args={"decay": 0.96, "every": 2000, "floor": 1e-6},
    epochs=1535,
    batch_size=128,
    metric="loss",
    assumed=("model", "reconstruction", "schedule_args", "epochs", "protocol"),
    note="the paper prints curves, no numbers",
)
ROWS: dict[str, Recipe] = {
    "routing1": replace(BASE, model_args={"iterations": 1}),
    "routing3": replace(BASE, model_args={"iterations": 3}),
}
CITED: dict[str, str] = {}
