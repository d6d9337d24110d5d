"""Li et al. 2018, table 4: EncapNet with two OTs on CIFAR-10, CIFAR-100, SVHN and h-ImageNet.

The blank, + and ++ are kinds of augmentation that the paper does not define; "the multi-crop test is a key factor", so
+ and ++ are tested on ten crops. In bold the paper prints its best runs, in brackets the means. h-ImageNet must be made
first, from ILSVRC; v1 has 18 layers, v2 and v3 have 101, v3 a larger image.
"""

from dataclasses import replace

from torchcaps.recipes import Recipe

TITLE = "Li et al. 2018, table 4: test error (%) on CIFAR-10, CIFAR-100, SVHN and h-ImageNet"
COLUMNS = ("method", "CIFAR-10", "CIFAR-100", "SVHN", "h-ImageNet")

BASE = Recipe(
    model="encapnet18_cifar10",
    data="cifar10",
    protocol="li2018",
    model_args={"feedback": "ot", "wiring": "both"},
    lr=1e-4,
    optimizer_args={"weight_decay": 5e-4},
    schedule="steps",
    schedule_args={"milestones": (200, 300, 400), "factor": 0.1},
    epochs=600,
    batch_size=128,
    seeds=3,
    assumed=("data_args", "seeds"),
)
IMAGENET = replace(
    BASE, model="encapnet", data="himagenet", batch_size=256, seeds=1, assumed=("data_args", "model_args")
)
CROPS = {"": {}, "+": {"crops": 10}, "++": {"crops": 10}}
SMALL = {
    "cifar10": ("encapnet18_cifar10", {"": "4.55", "+": "3.13", "++": "3.10 (3.56 ± 0.12)"}),
    "cifar100": ("encapnet18_cifar100", {"": "26.77", "+": "24.01 (24.85 ± 0.11)", "++": "24.18"}),
    "svhn": ("encapnet18_svhn", {"": "2.01", "+": "1.64", "++": "1.52 (1.87 ± 0.11)"}),
}


def himagenet(reported: str, depth: int, size: int, augmentation: str = "") -> Recipe:
    deep = depth > 18
    return replace(
        IMAGENET,
        model_args={**BASE.model_args, "image": (3, size, size), "classes": 200, "depth": depth}
        | ({"layerwise": True} if deep else {}),
        data_args={"size": size, "augmentation": augmentation, **CROPS[augmentation]},
        reported=reported,
        note="with skips at the ends of its chains alone, gradients outgrow float32 over 101 layers" if deep else "",
    )


ROWS: dict[str, Recipe] = {
    f"encapnet{plus}-{data}": replace(
        BASE, model=model, data=data, data_args={"augmentation": plus, **CROPS[plus]}, reported=reported
    )
    for data, (model, numbers) in SMALL.items()
    for plus, reported in numbers.items()
} | {
    "v1-himagenet": himagenet("48.23", 18, 128),
    "v2-himagenet": himagenet("43.15", 101, 128),
    "v3-himagenet": himagenet("42.76", 101, 224),
    "v3+-himagenet": himagenet("40.18", 101, 224, "+"),
    "v3++-himagenet": himagenet("40.05", 101, 224, "++"),
}
CITED: dict[str, str] = {
    "GoodInit [32]": "5.84 / 27.66 / -",
    "BayesNet [33]": "6.37 / 27.40 / -",
    "ResNet [5]": "6.43 / - / -",
    "ELU [34]": "6.55 / 24.28 / -",
    "Batch NIN [35]": "6.75 / 28.86 / 1.81",
    "Rec-CNN [36]": "7.09 / 31.75 / 1.77",
    "Piecewise [37]": "7.51 / 30.83 / -",
    "DSN [38]": "8.22 / 34.57 / 1.92",
    "NIN [39]": "8.80 / 35.68 / 2.35",
    "dasNet [26]": "9.22 / 33.78 / -",
    "Maxout [40]": "9.35 / 38.57 / 2.47",
    "AlexNet [2]": "11.00 / - / -",
    "WRN [31], h-ImageNet": "42.51",
    "ResNet-101 [5], h-ImageNet": "44.13",
    "VGG [3], h-ImageNet": "55.76",
    "GoogleNet [4], h-ImageNet": "60.18",
    "EncapNet-18, complete ImageNet (top-5)": "7.51",
    "GoogleNet [4], complete ImageNet (top-5)": "7.89",
    "VGG [3], complete ImageNet (top-5)": "8.43",
    "ResNet-101 [5], complete ImageNet (top-5)": "6.21",
}
