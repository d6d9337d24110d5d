"""How each row of each table of the five papers is trained: plain values, one file a table, one entry a row.

>>> recipes.find("sabour2017_table1:routing3").lr

A table's file has `TITLE`; `COLUMNS`, the headings it is printed with; `ROWS`, a recipe for each number that can be
trained here; and `CITED`, the numbers it quotes from elsewhere.
"""

from __future__ import annotations

import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

CHOICES = {
    "loss": ("margin", "spread", "cross_entropy", "binary_cross_entropy"),
    "loss_scale": ("paper", "official"),
    "reconstruction_reduction": ("sum", "mean"),
    "optimizer": ("adam", "adam_keras", "adamw", "sgd", "rmsprop_keras"),
    "schedule": ("constant", "exponential", "exponential_steps", "steps", "cosine", "linear", "one_cycle"),
    "select": ("last", "best"),
    "precision": ("32", "tf32", "bf16", "fp16"),
    "metric": (
        "error",  # all in per cent; the ensembles' are those of `seeds` members together
        "accuracy",
        "exact_match_error",
        "exact_match_accuracy",
        "per_digit_error",
        "ensemble_error",
        "ensemble_accuracy",
        "ensemble_per_digit_error",
        "loss",
    ),
}
OPTIMIZER_ARGS = ("betas", "eps", "momentum", "weight_decay", "decay_on", "nesterov", "rho", "decay")
SCHEDULE_ARGS = ("decay", "every", "floor", "milestones", "factor", "warmup", "start", "rise")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a word"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "dict": ((dict,), "names with values"),
    "tuple": ((tuple,), "a list"),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run but its seed.

    `schedule_args`: `decay`, `every` (steps) and `floor` of the exponentials, `milestones` (epochs) and `factor` of
    steps, `warmup` (epochs) and `floor` of cosine and linear, `rise` (a share of all steps), `start` (a share of lr)
    and `floor` of one_cycle. `optimizer_args` may have `decay_on`: "all", or "weights", which spares norms and biases.
    `data_args` are those of `torchcaps.data.load`, the protocol's own among them. `stop_at` is the accuracy on the
    validation set, above 0 and at most 1, with which training ends: after the first epoch that has it, or after
    `epochs` if none does. `teachers` are folders of finished runs or of exported weights, or names of weights in the
    package; in the share `distillation` of the loss their answers stand in place of the labels. `assumed` names the
    fields, or single arguments of them, that the paper leaves open.
    """

    model: str
    data: str
    model_args: dict[str, Any] = field(default_factory=dict)
    data_args: dict[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    loss: str = "margin"
    loss_scale: str = "paper"
    spread_steps: int = 50_000  # in which the spread loss's margin grows by one unit of its sigmoid
    reconstruction: float = 0.0
    reconstruction_reduction: str = "sum"
    optimizer: str = "adam"
    lr: float = 1e-3
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    schedule_args: dict[str, Any] = field(default_factory=dict)
    epochs: int = 50
    batch_size: int = 128
    samples: int | None = None  # in an epoch, where that is not the whole training set
    validation: float | str | None = None  # as data.load takes it; None leaves it to the protocol
    select: str = "last"  # or the best on validation
    stop_at: float | None = None  # or earlier than `epochs`, at this accuracy on validation
    ema: float = 0.0
    clip: float | None = None  # the norm of all gradients
    clip_value: float | None = None  # each element
    accumulate: int = 1
    precision: str = "32"
    label_smoothing: float = 0.0
    mixup: float = 0.0  # both shapes of the Beta that says how much of a second image is mixed in
    teachers: tuple[str, ...] = ()
    distillation: float = 0.0
    class_weights: tuple[float, ...] | None = None
    keep_epochs: tuple[int, ...] = ()
    seeds: int = 1
    metric: str = "error"
    reported: str = ""  # the paper's number, as printed
    assumed: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = _plain(each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, _checked(each.name, str(each.type), value))
        for name, allowed in CHOICES.items():
            if (word := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {word!r}{_near(word, allowed)}")
        for name, known in (("optimizer_args", OPTIMIZER_ARGS), ("schedule_args", SCHEDULE_ARGS)):
            for word in getattr(self, name):
                if word not in known:
                    raise ValueError(f"{name} has no {word!r}; it takes {', '.join(known)}")
        for name in ("epochs", "batch_size", "accumulate", "seeds", "samples", "spread_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("lr", "clip", "clip_value"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("ema", "label_smoothing"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ValueError(f"stop_at is an accuracy above 0 and at most 1, got {self.stop_at}")
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation is a share of the loss, from 0 to 1, got {self.distillation}")
        for name in ("reconstruction", "mixup"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON keeps, tuples as lists."""
        return json.loads(json.dumps(asdict(self)))


def views(data_args: Mapping[str, Any]) -> int:
    """How many views of a test image a recipe with these `data_args` counts."""
    return int(data_args.get("crops") or 1)


TOLD = ("seeds", "metric", "reported", "assumed", "note")  # of a row, and no step of its training depends on them


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first field in which the trainings of two recipes, as `to_dict` gives them, differ; either may lack some."""
    one, other = {**DEFAULTS, **one}, {**DEFAULTS, **other}
    return next((name for name in one if name not in TOLD and one[name] != other.get(name)), None)


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_dict` came from."""
    if not isinstance(values, Mapping):
        raise ValueError(f"a recipe is a set of fields with values, got {values!r}")
    for name in values:
        _known_field(name)
    for name in ("model", "data"):
        if name not in values:
            raise ValueError(f"a recipe needs {name}, but only {', '.join(map(str, values)) or 'nothing'} is given")
    return Recipe(**values)


def with_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed. Strings are read as the field's kind.

    >>> with_overrides(recipe, {"lr": "1e-3", "keep-epochs": "1,20", "model_args.iterations": "1"})
    """
    changes: dict[str, Any] = {}
    for path, value in overrides.items():
        name, _, key = path.replace("-", "_").partition(".")
        kind = _known_field(name)
        if not key:
            changes[name] = _read(name, kind, value) if isinstance(value, str) else value
        elif kind.startswith("dict"):
            old = changes.get(name, getattr(recipe, name))
            changes[name] = {**old, key: _read_any(value) if isinstance(value, str) else value}
        else:
            raise ValueError(f"{name} is a single value, so there is no {path!r} to set")
    return replace(recipe, **changes)


def is_share_of_images(metric: str) -> bool:
    """Whether it counts images that are right or wrong, so that a binomial's standard error goes with it."""
    return metric.removeprefix("ensemble_").removeprefix("exact_match_") in ("error", "accuracy")


def tables() -> dict[str, ModuleType]:
    """Every table's file by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}") for name in names}


def names() -> list[str]:
    """Every row as "table:row"."""
    return [f"{table}:{row}" for table, module in tables().items() for row in module.ROWS]


def find(name: str) -> Recipe:
    """A row by its name, "table:row"; the row may be left out where a table has only one."""
    if not isinstance(name, str):
        raise ValueError(f"a recipe is asked for by name, got {name!r}")
    table, _, row = name.partition(":")
    known = tables()
    if table not in known:
        near = get_close_matches(name, names(), n=3, cutoff=0.4) if row else get_close_matches(table, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the tables are {', '.join(known)}"
        raise ValueError(f"there is no recipe {name!r}; {hint}")
    rows: dict[str, Recipe] = known[table].ROWS
    if not row and len(rows) == 1:
        return next(iter(rows.values()))
    if row not in rows:
        near = get_close_matches(row, rows, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"its rows are {', '.join(rows)}"
        raise ValueError(f"{table} has no row {row!r}; {hint}" if row else f"{table} needs a row; {hint}")
    return rows[row]


def _near(word: Any, known: Any) -> str:
    near = get_close_matches(word, known, n=1) if isinstance(word, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _known_field(name: Any) -> str:
    kinds = {each.name: str(each.type) for each in fields(Recipe)}
    if name not in kinds:
        near = get_close_matches(name, kinds, n=2) if isinstance(name, str) else []
        hint = f"did you mean {' or '.join(near)}?" if near else f"its fields are {', '.join(kinds)}"
        raise ValueError(f"a recipe has no field {name!r}; {hint}")
    return kinds[name]


def _plain(name: str, value: Any) -> Any:
    """The value with lists as tuples, so that what JSON gives back is the same recipe."""
    if isinstance(value, list | tuple):
        return tuple(_plain(name, each) for each in value)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must be names with values, got {value!r}")
        return {key: _plain(name, each) for key, each in value.items()}
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{name} takes plain values only, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    return value


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value, if it is of the field's kind; a whole number for a float field becomes a float."""
    options = [part.strip() for part in kind.split("|")]
    if value is None and "None" in options:
        return None
    words = []
    for option in options:
        if option == "None":
            continue
        base, _, inner = option.partition("[")
        types, word = KINDS[base]
        words.append(word)
        fits = isinstance(value, types) and not isinstance(value, bool)
        if not fits:
            continue
        if base == "tuple":
            return tuple(_checked(name, inner.split(",")[0], each) for each in value)
        return float(value) if kind in ("float", "float | None") else value
    raise ValueError(f"{name} must be {' or '.join(words)}, got {value!r}")


def _read(name: str, kind: str, text: str) -> Any:
    """A field's value from the command line."""
    if text.lower() == "none" and "None" in kind:
        return None
    if kind.startswith("dict"):
        value = _read_any(text)
        if not isinstance(value, dict):
            raise ValueError(f'{name} must be names with values such as {{"iterations": 3}}, got {text!r}')
        return value
    if kind.startswith("tuple"):
        return _read_list(text)
    return text if kind.startswith("str") else _read_any(text)


def _read_list(text: str) -> tuple[Any, ...]:
    return tuple(_read_any(part.strip()) for part in text.strip("()[] ").split(",") if part.strip())


def _read_any(text: str) -> Any:
    """JSON where it is, else a Python constant, else a list with commas, else the word itself."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        pass
    if "," in text:
        return _read_list(text)
    try:
        return float(text)
    except ValueError:
        return text


DEFAULTS = {name: value for name, value in Recipe(model="", data="").to_dict().items() if name not in ("model", "data")}
