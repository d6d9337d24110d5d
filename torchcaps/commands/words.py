"""How commands name rows, folders and figures, and read a recipe's fields from a command line."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torchcaps import recipes
from torchcaps.recipes import Recipe
from torchcaps.results import Result
from torchcaps.shorten import shortened

OWN = "folder"  # the table of one's own images
FIELDS = tuple(each.name for each in fields(Recipe))
TAG = 40  # letters of a run folder's name that say what differs from the row


@dataclass(frozen=True)
class Row:
    """What is to be trained: `name` as it was asked for, `plain` as the table has it, `recipe` with all changes.

    `settings` are the changes as they were asked for, FIELD=VALUE each.
    """

    name: str
    table: str
    row: str
    plain: Recipe
    recipe: Recipe
    settings: tuple[str, ...] = ()

    def about(self) -> dict[str, Any]:
        """What a run folder says of where it belongs and how to go on with it."""
        return {"name": self.name, "table": self.table, "row": self.row, "settings": list(self.settings)}


def with_fields(words: Sequence[str], command: Callable[..., int]) -> list[str]:
    """The words with each field of a recipe turned into the command's own option: --lr 1e-3 into --set lr=1e-3."""
    parameters = inspect.signature(command).parameters.values()
    own = [each.name.replace("_", "-") for each in parameters if each.kind == each.KEYWORD_ONLY]
    left, found = list(words), []
    while left:
        word = left.pop(0)
        name, equals, value = word[2:].partition("=")
        field = name.partition(".")[0].replace("-", "_")
        if not word.startswith("--") or name in (*own, "set", "help"):
            found.append(word)
            continue
        if field not in FIELDS:
            known = [*own, *(each.replace("_", "-") for each in FIELDS)]
            near = get_close_matches(name.replace("_", "-"), known, n=2)
            hint = f"did you mean --{' or --'.join(near)}?" if near else "torchcaps train --help has them all"
            raise ValueError(f"there is no option --{name}; {hint}")
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"--{name} needs a value")
            value = left.pop(0)
        found += ["--set", f"{name}={value}"]
    return found


def overrides(settings: Sequence[str]) -> dict[str, str]:
    """What FIELD=VALUE words set."""
    found: dict[str, str] = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"a field is set by FIELD=VALUE, got {word!r}")
        found[name.replace("-", "_")] = value
    return found


def choose(name: str, changes: Mapping[str, str]) -> Row:
    """A row of a table, "table:row", or one's own images, "folder=PATH", with some fields changed."""
    kind, equals, path = name.partition("=")
    if equals and kind == OWN:
        from torchcaps import own_images

        changes = dict(changes)
        model = changes.pop("model", "efficient_capsnet")
        plain = own_images.recipe(path, model)
        return Row(name, OWN, f"{Path(path).resolve().name}-{model}", plain, recipes.with_overrides(plain, changes))
    plain = recipes.find(name)
    table, _, row = name.partition(":")
    row = row or next(iter(recipes.tables()[table].ROWS))
    return Row(f"{table}:{row}", table, row, plain, recipes.with_overrides(plain, changes))


def in_fewer_epochs(row: Row, epochs: int) -> Row:
    """The row with its schedule shortened to so many epochs, and to fewer images in each where it has them already."""
    whole, own = row.plain.samples, row.recipe.samples
    fewer = own if own and whole and own < whole else None
    recipe = replace(shortened(replace(row.recipe, samples=whole), epochs, fewer), samples=own)
    old, new = row.recipe.to_dict(), recipe.to_dict()
    words = (f"{name}={json.dumps(new[name])}" for name in new if new[name] != old[name])
    return replace(row, recipe=recipe, settings=(*row.settings, *words))


def run_folder(row: Row) -> Path:
    """runs/table-row, with a short tag where fields differ from the row, so that variants keep out of each other's way.

    A seed's own folder is inside.
    """
    old, new = row.plain.to_dict(), row.recipe.to_dict()
    changed = {name: new[name] for name in new if new[name] != old[name]}
    tag = _slug("-".join(f"{name}-{_short(old[name], value)}" for name, value in changed.items()))
    if len(tag) > TAG:
        tag = f"{tag[: TAG - 7]}-{hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]}"
    return Path("runs") / "-".join(part for part in (_slug(row.table), _slug(row.row), tag) if part)


def results_file(table: str, folder: Path) -> Path:
    """TABLE.jsonl beside the run's folder. What is to be published goes to results/ by --results."""
    return folder.parent / f"{table}.jsonl"


def described(row: Row) -> list[str]:
    """A recipe in a few lines."""
    recipe = row.recipe
    loss = f"{recipe.loss} loss".replace("_", " ")
    if recipe.reconstruction:
        loss += f" + {recipe.reconstruction:g} x reconstruction ({recipe.reconstruction_reduction})"
    options = _pairs(recipe.model_args)
    schedule = "" if recipe.schedule == "constant" else f", {recipe.schedule} {_pairs(recipe.schedule_args)}".rstrip()
    epoch = f" of {recipe.samples:,} images" if recipe.samples else ""
    extras = [
        f"validation {recipe.validation}" if recipe.validation is not None else "",
        f"protocol {recipe.protocol}" if recipe.protocol else "",
        "the best epoch on validation is kept" if recipe.select == "best" else "",
        f"ema {recipe.ema:g}" if recipe.ema else "",
        f"{recipe.distillation:g} of the loss by {len(recipe.teachers)} teacher{'s' * (len(recipe.teachers) > 1)}"
        if recipe.teachers
        else "",
        f"precision {recipe.precision}" if recipe.precision != "32" else "",
    ]
    more = "".join(f", {extra}" for extra in extras if extra)
    lines = [
        f"{row.name}: {recipe.model} {options}".rstrip() + f" on {recipe.data} {_pairs(recipe.data_args)}".rstrip(),
        f"  {loss}; {recipe.optimizer}, lr {recipe.lr:g}{schedule}",
        f"  {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}{epoch} in batches of {recipe.batch_size}{more}",
    ]
    if recipe.reported:
        lines.append(f"  the paper: {metric_name(recipe)} {recipe.reported}")
    if recipe.assumed:
        lines.append(f"  assumed, as the paper leaves it open: {', '.join(recipe.assumed)}")
    return lines


def metric_name(recipe: Recipe) -> str:
    return recipe.metric.replace("_", " ")


def headline(result: Result, recipe: Recipe) -> str:
    """The figure that the row is about, with its standard error, beside the paper's."""
    value = figure(result, recipe)
    metric = recipe.metric.removeprefix("ensemble_") if not result.members else recipe.metric
    if value is None:
        words = f"no {metric.replace('_', ' ')}"
    elif metric == "loss":
        words = f"loss {value:.4f}"
    else:
        spread = f" ± {100 * result.test['standard_error']:.2f}" if recipes.is_share_of_images(metric) else ""
        words = f"test {metric.replace('_', ' ')} {value:.2f} %{spread}"
    return words + (f" (the paper: {recipe.reported})" if recipe.reported else "")


def figure(result: Result, recipe: Recipe) -> float | None:
    """The row's metric: per cent, but for a loss."""
    if recipe.metric == "loss":
        values = result.curves.get("loss") or [None]
        return values[-1]
    value = result.test.get(recipe.metric.removeprefix("ensemble_"))
    return 100 * value if isinstance(value, int | float) else None


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _pairs(values: Mapping[str, Any]) -> str:
    words = ", ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    return f"({words})" if words else ""


def _short(old: Any, new: Any) -> str:
    """A value, or of names with values those that changed."""
    if isinstance(new, dict) and isinstance(old, dict):
        names = [name for name in (*new, *old) if new.get(name) != old.get(name)]
        return "-".join(f"{name}-{new.get(name)}" for name in dict.fromkeys(names))
    return f"{new:g}" if isinstance(new, float) else str(new)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", text).strip("-.")
