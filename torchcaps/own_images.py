"""Own images: how a folder of them is trained on. No paper's; what a first try should be, with every field to change.

>>> own_images.recipe("photos")                       # photos/cat/*.jpg, photos/dog/*.jpg
>>> own_images.recipe("scans/labels.csv", "capsnet")  # a CSV of paths and labels

Networks are without their decoders, whose weights grow with the pixels; of EM and EncapNet it is their small forms, as
the full ones want a GPU: `--model-args.types 32,32,32` and so on has them. A decoder comes back with
`--model-args.decoder true --reconstruction 0.392 --reconstruction-reduction mean`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from difflib import get_close_matches
from pathlib import Path
from statistics import median
from typing import Any

from torchcaps.data.errors import DataError
from torchcaps.data.images import Header, look
from torchcaps.data.listing import Found, in_folders, in_table
from torchcaps.recipes import Recipe

SIDE, SMALLEST = 64, 32  # pixels of an image's side: what large ones are scaled to, and what tiny ones are
LOOKED_AT = 256  # images whose size and colour decide for all
TEST, VALIDATION = 0.2, 0.15  # the shares that are held out, of all images and of those that are left
UNEVEN = 1.5  # classes this many times as large as others are balanced
IMAGES, FEWEST, MOST = 20_000, 15, 150  # to be seen in all, in not less and not more epochs than these

MODELS: dict[str, dict[str, Any]] = {
    "efficient_capsnet": {"model_args": {"decoder": False, "norm_momentum": 0.1}, "lr": 2e-3},
    "capsnet": {"model_args": {"decoder": False}, "lr": 2e-4},  # without a norm it breaks at 1e-3
    "em_capsnet": {"model_args": {"channels": 64, "types": (8, 16, 16)}, "lr": 3e-3},
    "encapnet": {"model_args": {"depth": 6, "aide_modules": ()}},
    "ar_capsnet": {"model_args": {"decoder": False, "norm_momentum": 0.1}},
    "inverted_capsnet": {"model_args": {"backbone": "simple", "width": 128}, "loss": "cross_entropy"},
}


def recipe(path: str | os.PathLike[str], model: str = "efficient_capsnet") -> Recipe:
    """What to train, from a look at the folder, or the CSV, and some of the images in it.

    Images of one small size keep it; others get the area of 64 x 64 pixels, in the shape that they share or else
    square. Colour photographs are mirrored in training, grey scans are not. A fifth of each class is held out for the
    test, and 15 % of the rest for validation, unless the folder has parts of its own. Where classes are uneven, images
    of the rare ones are repeated. Files that cannot be read are left out, with a warning.
    """
    if model not in MODELS:
        near = get_close_matches(model, MODELS, n=1) if isinstance(model, str) else []
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MODELS)}"
        raise ValueError(f"own images are trained by the presets that take any size, and {model!r} is none; {hint}")
    place = Path(os.path.abspath(path))
    found = _found(place)
    classes = {label for item in found for label in item.labels}
    if len(classes) < 2:
        raise DataError(
            f"{path} has only the class {classes.pop()!r}, and a network learns to tell classes apart; "
            "put pictures of something else into a second folder, such as other"
        )
    headers = _headers(found)
    grey = bool(headers) and all(header.grey for header in headers)
    several = max(len(item.labels) for item in found)
    counts = _counts(found)
    images = sum(counts.values())
    settings = dict(MODELS[model])
    data_args: dict[str, Any] = {
        "path": str(place),
        "size": _size(headers),
        "augmentation": "scan" if grey else "photo",
        "on_error": "skip",
    }
    if not any(item.part == "test" for item in found):
        data_args["test"] = TEST
    if several == 1 and max(counts.values()) > UNEVEN * min(counts.values()):
        data_args["balance"] = True
        images = len(counts) * max(counts.values())
    if several > 1:
        settings = _for_several(model, settings, several)
    epochs = min(MOST, max(FEWEST, round(IMAGES / images)))
    return Recipe(
        model=model,
        data="folder",
        data_args=data_args,
        protocol="own_images",
        optimizer_args={"eps": 1e-7},
        schedule="cosine",
        schedule_args={"warmup": 1},
        epochs=epochs,
        batch_size=16 if images < 1000 else 32,
        validation=_validation(found, counts),
        clip=5.0,
        metric="accuracy" if several == 1 else "exact_match_accuracy",
        **settings,
    )


def _found(place: Path) -> list[Found]:
    if place.suffix.lower() == ".csv" and not place.is_dir():
        return in_table(place, place.parent)
    if not place.is_dir():
        raise DataError(f"{place} is no folder; give one with a sub-folder for each class, or a CSV file")
    return in_folders(place)[0]


def _headers(found: list[Found]) -> list[Header]:
    """Of images spread over all that there are; broken ones are for the loader to speak of."""
    step = -(-len(found) // LOOKED_AT)
    headers = []
    for item in found[::step]:
        try:
            headers.append(look(item.path))
        except DataError:
            continue
    return headers


def _size(headers: list[Header]) -> tuple[int, int]:
    """Height and width."""
    if not headers:
        return SIDE, SIDE
    sizes = {(header.height, header.width) for header in headers}
    if len(sizes) == 1:
        (common,) = sizes
        if min(common) >= SMALLEST and max(common) <= SIDE:
            return common
    shapes = [header.width / header.height for header in headers]
    side = min(SIDE, max(SMALLEST, round(median(min(header.height, header.width) for header in headers))))
    shape = median(shapes) if max(shapes) < 1.1 * min(shapes) else 1.0
    shape = min(2.0, max(0.5, shape))
    return max(SMALLEST, 4 * round(side / math.sqrt(shape) / 4)), max(SMALLEST, 4 * round(side * math.sqrt(shape) / 4))


def _counts(found: list[Found]) -> Counter[str]:
    """How many images of each class are left to train on when those for the test are taken."""
    given = any(item.part == "test" for item in found)
    counts = Counter(item.labels[0] for item in found if item.part in ("", "train"))
    if given:
        return counts
    return Counter({name: max(1, count - max(1, round(TEST * count))) for name, count in counts.items()})


def _validation(found: list[Found], counts: Counter[str]) -> float | None:
    """None where the folder has its own validation images, 0 where each class has one image to train on."""
    if any(item.part == "validation" for item in found):
        return None
    images = sum(counts.values())
    spare = images - len(counts)
    return VALIDATION if 1 <= round(VALIDATION * images) <= spare else 0.0


def _for_several(model: str, settings: dict[str, Any], labels: int) -> dict[str, Any]:
    """For images with up to so many labels each."""
    if model in ("em_capsnet", "encapnet"):
        able = ", ".join(name for name in MODELS if name not in ("em_capsnet", "encapnet"))
        raise ValueError(f"{model} finds one class in an image, and some of these have {labels}; choose {able}")
    more = {"several": True} if model == "inverted_capsnet" else {}
    loss = {"loss": "binary_cross_entropy"} if model == "inverted_capsnet" else {}
    return {**settings, **loss, "model_args": {**settings["model_args"], "objects": labels, **more}}
