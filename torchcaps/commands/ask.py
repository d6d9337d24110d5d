"""What is asked of a trained network, and what is answered."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchcaps.commands.words import percent, times
from torchcaps.data import DataSet
from torchcaps.data.protocols import find, protocol_options
from torchcaps.evaluate import Figures
from torchcaps.recipes import Recipe, views, with_overrides
from torchcaps.runs import Opened
from torchcaps.train.prepare import load_data


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of a run, but for its folder."""

    split: str = "test"
    data: str = ""
    protocol: str = ""
    crops: int | None = None
    epoch: int | None = None
    images: int | None = None
    device: str = "auto"
    results: str = ""

    @property
    def plain(self) -> bool:
        """Whether this is what a run stores of itself."""
        asked = (self.crops, self.epoch, self.images)
        return not self.data and not self.protocol and asked == (None, None, None)

    def of(self, recipe: Recipe) -> Ask:
        """Without what is the recipe's own."""
        data = "" if self.data == recipe.data else self.data
        protocol = "" if self.protocol == recipe.protocol else self.protocol
        own = not data and not protocol and self.crops == views(recipe.data_args)
        return replace(self, data=data, protocol=protocol, crops=None if own else self.crops)

    def key(self) -> dict[str, Any]:
        other = {"data": self.data} if self.data else {}
        protocol = self.protocol or None
        return {**other, "protocol": protocol, "crops": self.crops, "epoch": self.epoch, "images": self.images}

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that tests so; options that only its own protocol knows are left out for another one."""
        changes: dict[str, Any] = {}
        if self.data:
            changes["data"] = self.data
        if self.protocol:
            find(self.protocol, self.data or recipe.data)
            own = protocol_options(recipe.protocol) if recipe.protocol else ()
            lost = {*own} - {*protocol_options(self.protocol)}
            kept = {name: value for name, value in recipe.data_args.items() if name not in lost}
            changes |= {"protocol": self.protocol, "data_args": kept}
        if self.crops is not None:
            changes["data_args.crops"] = self.crops
        return with_overrides(recipe, changes)

    def load(self, opened: Opened) -> DataSet:
        """What is asked for, if it has the classes of the network and images of its size."""
        data = load_data(self.recipe(opened.recipe))
        if self.data and data.class_names != opened.class_names:
            raise ValueError(f"{opened.folder} tells other classes apart than those of {self.data}")
        if (self.data or self.protocol) and data.image != opened.image:
            name = " by ".join(filter(None, (self.data or opened.recipe.data, self.protocol)))
            mine, theirs = (" x ".join(map(str, size)) for size in (opened.image, data.image))
            raise ValueError(f"{opened.folder} takes images of {mine}, and those of {name} have {theirs}")
        return data


@dataclass(frozen=True)
class Found:
    """Figures of a run or of an ensemble, and where they are from."""

    run: str
    split: str
    figures: Figures
    epoch: int | None
    test_reads: int | None  # None for validation
    stored: bool
    data: str | None = None
    protocol: str | None = None
    crops: int | None = None
    members: tuple[str, ...] = ()


def answer(
    run: str,
    ask: Ask,
    figures: Figures,
    epoch: int | None,
    test_reads: int | None,
    stored: bool,
    members: tuple[str, ...] = (),
) -> Found:
    how = ask.data or None, ask.protocol or None, ask.crops
    return Found(run, ask.split, figures, epoch, test_reads, stored, *how, members)


def told(found: Found) -> str:
    numbers = found.figures
    what = f"ensemble of {', '.join(found.members)}" if found.members else found.run
    words = [f"error {percent(numbers['error'])} ± {percent(numbers['standard_error'])}"]
    if "per_digit_error" in numbers:
        words = [f"exact match {words[0]}", f"per digit {percent(numbers['per_digit_error'])}"]
        words.append(f"at least one {percent(numbers['at_least_one_error'])}")
    words.append(f"calibration error {percent(numbers['calibration_error'])}")
    how = [f"epoch {found.epoch}"] if found.epoch is not None else []
    how += [f"data {found.data}"] if found.data else []
    how += [f"protocol {found.protocol}"] if found.protocol else []
    how += [f"{found.crops} crop{'s' * (found.crops != 1)}"] if found.crops is not None else []
    of = f" of {numbers['images']:,} images"
    told = f"{what}{' (' + ', '.join(how) + ')' if how else ''}: {found.split} {', '.join(words)},{of}"
    if found.test_reads is None:
        return told
    stored = "as stored; " if found.stored else ""
    return f"{told} ({stored}the test set has been read {times(found.test_reads)} for this)"


def as_json(found: list[Found]) -> str:
    return json.dumps([asdict(each) for each in found], indent=2)
