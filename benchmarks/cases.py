"""What is measured: networks at their sizes on each kind of device, and rows of the papers that print a cost."""

from __future__ import annotations

from benchmarks.measuring import Case

SIMPLE = {"backbone": "simple"}
ON_CPU = (
    Case("efficient_capsnet_mnist", 16),
    Case("capsnet_mnist", 32),
    Case("capsnet_mnist", 32, {"classes": 200, "decoder": False}),
    Case("inverted_cifar10", 4, SIMPLE),
    Case("inverted_cifar10", 4),
    Case("em_cifar10", 2, SIMPLE),
    Case("ar_capsnet_mnist", 16),
    Case("encapnet6_cifar10", 4),
)
LARGE = {"image": (3, 227, 227), "classes": 196, "decoder": False}  # 12 x 12 x 32 children; step.py has 11 x 11
ON_CUDA = (
    Case("efficient_capsnet_mnist", 16, precision="bf16"),
    Case("capsnet_mnist", 128, precision="bf16"),
    Case("em_cifar10", 128, SIMPLE, precision="bf16"),
    Case("inverted_cifar10", 128, precision="bf16"),
    Case("inverted_cifar10", 128, {"iterations": 3}, precision="bf16"),
    Case("capsnet", 128, LARGE, precision="bf16"),
    Case("efficient_capsnet_mnist", 16, precision="tf32"),
    Case("capsnet_mnist", 128, precision="tf32"),
    Case("em_cifar10", 128, SIMPLE, precision="tf32"),
    Case("inverted_cifar10", 128, precision="tf32"),
)
QUICK = (Case("efficient_capsnet_mnist", 4), Case("inverted_cifar10", 1, SIMPLE))
QUICK_COLD = ("efficient_capsnet_mnist",)
COLD = (
    "efficient_capsnet_mnist",
    "capsnet_mnist",
    "inverted_cifar10",
    "em_cifar10",
    "ar_capsnet_mnist",
    "encapnet6_cifar10",
    "capnet_em_cifar10",
)
LI = {  # row of table 1: preset, options, memory in MB at a batch, seconds a batch
    "a dynamic": ("capnet_dynamic_cifar10", {}, 3961, 8, 0.444),
    "b EM": ("capnet_em_cifar10", {}, 10078, 4, 0.957),
    "c CNN, same shape": ("li_cnn6_cifar10", {}, 1652, 128, 0.026),
    "d CNN, similar parameters": ("li_cnn6_cifar10", {"width": 79}, 2420, 128, 0.146),
    "e EncapNet, master": ("encapnet6_cifar10", {"aide_modules": ()}, 1433, 128, 0.039),
    "f EncapNet, master and aide": ("encapnet6_cifar10", {}, 1755, 128, 0.061),
}
CHOI = {  # AR-CapsNet, CapsuleNet, images of an epoch, the printed ratio of their epoch times
    "MNIST": (Case("ar_capsnet_mnist", 100), Case("capsnet_mnist", 100), 54_000, 0.19),
    "CIFAR-10": (
        Case("ar_capsnet_cifar10", 100),
        Case("dynamic_cifar10", 100, {"backbone": "simple", "decoder": True}),
        45_000,
        0.35,
    ),
}
