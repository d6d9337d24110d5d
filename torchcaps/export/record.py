"""What a card says of the run behind it: its figures, those of the recipe's other seeds, and how it was trained."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchcaps import recipes
from torchcaps.results import Result, again, read
from torchcaps.results.notes import held_out, protocol_of
from torchcaps.results.tables import cell_of, variation

ROUNDED = "float16, as the run has them"  # they were rounded before, on their way from another machine, say


def seeds_of(line: Result, *places: str | os.PathLike[str]) -> list[Result]:
    """All seeds of a run's recipe, from the first file or folder of results that has its line; none where none has it.

    Of two runs with one seed the later counts, but for the run itself.
    """
    recipe = recipes.from_dict(line.recipe)
    for place in places:
        found = read(place)
        if any(_which(each) == _which(line) and each.finished == line.finished for each in found):
            same = [each for each in found if _which(each)[:2] == _which(line)[:2] and not each.look]
            alike = [each for each in same if variation(recipe, each) == variation(recipe, line)]
            seeds = {each.seed: each for each in sorted(alike, key=lambda each: each.finished)} | {line.seed: line}
            return [seeds[seed] for seed in sorted(seeds)]
    return []


def _which(line: Result) -> tuple[str, str, int, tuple[str, ...]]:
    return line.table, line.row, line.seed, line.members


def several(line: Result) -> bool:
    """Whether images have several labels, so that only all of them together are an exact match."""
    return "per_digit_error" in line.test


def views(line: Result) -> int:
    """How many views of a test image count."""
    return recipes.views(line.recipe["data_args"])


def numbers(line: Result, dtype: str, seeds: Sequence[Result] = ()) -> str:
    rows = [("test", line.test)]
    if line.validation:
        rows.append(("validation", line.validation))
    metric = "exact match error %" if several(line) else "error %"
    table = [f"| split | images | {metric} | standard error |", "| --- | ---: | ---: | ---: |"]
    for word, figures in rows:
        error, spread = (100 * figures[key] for key in ("error", "standard_error"))
        table.append(f"| {word} | {figures['images']:,} | {error:.2f} | {spread:.2f} |")
    reads = "once" if line.test_reads == 1 else f"{line.test_reads} times"
    share = f", its share of {line.together} seeds at once" if line.together > 1 else ""
    took = f" in {line.seconds:,.0f} s on {line.device}{share}" if line.seconds and line.device else ""
    shortened = f", shortened from {line.planned}{',' if took else ''}" if line.shortened else ""
    epoch = f"epoch {line.epoch} of" if line.epoch else "the last of"
    judge = "test" if _validates_on_test(line) else "validation"
    chosen = f"the best on the {judge} set" if line.selected == "best" else "the last one"
    figures_of = [
        *_exact_match(line),
        f"Row `{line.table}:{line.row}`, seed {line.seed}, trained for "
        f"{line.epochs} epoch{'s' * (line.epochs != 1)}{shortened}{took}.",
        *_spread(line, seeds),
    ]
    weights = [
        f"The weights are those of {epoch} these epochs, {chosen}; the test set was read {reads}.",
        *(
            [f"Each test image counts by the sum over {views(line)} views of it{_one_view(line)}."]
            if views(line) > 1
            else []
        ),
        *([f"The figures are from before they were rounded to float16, {_tried_on(line)}."] * (dtype == "float16")),
        *(
            ["They came here in float16, and the figures may be from before they were rounded to it."]
            * (dtype == ROUNDED)
        ),
        f"Code: commit {line.commit[:12]}{' with changes' if line.dirty else ''}.",
    ]
    return "\n\n".join(["\n".join(table), " ".join(figures_of), " ".join(weights)])


def _one_view(line: Result) -> str:
    alone = line.test.get("one_view")
    return f"; with one view the error is {100 * alone['error']:.2f} %" if alone else ""


def _exact_match(line: Result) -> list[str]:
    """Of images with several labels, what their error is and how far it can be trusted."""
    if not several(line):
        return []
    single = f"{100 * line.test['per_digit_error']:.2f} %"
    if "multimnist" not in line.recipe["data"]:
        return [f"An exact match has all classes of an image and no other; per class the error is {single}."]
    whole = line.test.get("sampled_from")
    return [
        f"An exact match has both digits right; per digit the error is {single}.",
        *([f"The test pairs are {line.test['images']:,} of {whole:,}, always the same ones."] if whole else []),
        "Pairs share digits, so they are not independent: the standard error, which takes them for that, is too small.",
    ]


def _spread(line: Result, seeds: Sequence[Result]) -> list[str]:
    """What all seeds have."""
    if not seeds:
        return []
    if len(seeds) == 1:
        return ["The results have no other seed of this recipe."]
    errors = [f"{100 * each.test['error']:.2f}" for each in seeds]
    told = [
        f"The {len(seeds)} seeds of this recipe have a test error of {cell_of('error', seeds)} % (mean ± standard "
        f"deviation): {', '.join(errors[:-1])} and {errors[-1]}."
    ]
    if sorted(each.test["error"] for each in seeds)[1] > line.test["error"]:
        told.append("This seed has the lowest; the mean is the better guess at another training.")
    return told


def _tried_on(line: Result) -> str:
    if _validates_on_test(line):
        return "which changed no prediction on test images, on which the recipe validates"
    held = "held-out images" if line.validation else "training images, as the recipe holds none out"
    return f"which changed no prediction on {held}"


def _validates_on_test(line: Result) -> bool:
    return held_out(recipes.from_dict(line.recipe)) == "test"


def training(name: str, line: Result) -> str:
    recipe = recipes.from_dict(line.recipe)
    own = {word: value for word, value in recipe.data_args.items() if word not in ("path", "crops")}
    protocol = protocol_of(recipe)
    steps = ", ".join(map(repr, protocol.train)) if protocol else ""
    held = held_out(recipe)
    reconstruction = f" + {recipe.reconstruction:g} x reconstruction ({recipe.reconstruction_reduction})"
    rows = {
        "protocol": recipe.protocol or "none",
        "augmentation (`data_args`)": _pairs(own) or (f"`{steps}`, the protocol's" if steps else "none"),
        "held out": f"{held} of the training images" if isinstance(held, float) and held else held or "nothing",
        "loss": recipe.loss + reconstruction * bool(recipe.reconstruction),
        "optimiser": _with(recipe.optimizer, recipe.optimizer_args),
        "learning rate": f"{recipe.lr:g}, schedule {_with(recipe.schedule, recipe.schedule_args)}",
        "epochs": f"{line.epochs}" + (f" of {recipe.samples:,} images" if recipe.samples else ""),
        "batches": f"{recipe.batch_size} images",
        "precision": recipe.precision,
        "moving average of weights": f"{recipe.ema:g}" if recipe.ema else "none",
        "label smoothing": f"{recipe.label_smoothing:g}" if recipe.label_smoothing else "none",
        "mixup": f"{recipe.mixup:g}" if recipe.mixup else "none",
    }
    if recipe.teachers:
        share = f"in {recipe.distillation:g} of the loss" if recipe.distillation < 1 else "in place of all labels"
        names = [f"`{'/'.join(Path(name).parts[-2:])}`" for name in recipe.teachers]
        rows["teachers"] = f"{', '.join(names)}, {share}"
    table = ["| | |", "| --- | --- |", *(f"| {word} | {value} |" for word, value in rows.items())]
    shell = []
    if f"{line.table}:{line.row}" in recipes.names():
        command = ["torchcaps", *again.words(line), *(["--seed", str(line.seed)] if line.seed else [])]
        shell.append(f"{shlex.join(command)}  # trains it, in a clone of the repository")
    if recipe.data != "folder":
        shell.append(f"torchcaps evaluate {shlex.quote(name)}  # tests this folder, from the one above it")
        shell.append(f"torchcaps evaluate {shlex.quote(name)} --images 1000  # on a part, which takes less time")
    commands = "\n\n```\n" + "\n".join(shell) + "\n```" if shell else ""
    return "\n".join(table) + commands


def _with(word: str, options: Mapping[str, Any]) -> str:
    return f"{word} ({_pairs(options)})" if options else word


def _pairs(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{word} {value if isinstance(value, str) else json.dumps(value)}" for word, value in options.items()
    )
