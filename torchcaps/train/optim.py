"""Optimisers as the papers' frameworks have them, schedules, and the moving average of weights.

A schedule is a pure function of the step, and so is whatever else changes from update to update: a resumed run has
nothing to restore but the optimiser's moments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from torchcaps.fused import has_triton

if TYPE_CHECKING:
    from torchcaps.recipes import Recipe


def constant(lr: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    return lr


def exponential(
    lr: float, step: int, steps_per_epoch: int, epochs: int, *, decay: float, every: int = 1, floor: float = 0.0
) -> float:
    """Times `decay` after each epoch, or each `every` of them."""
    return max(floor, lr * decay ** (step // steps_per_epoch // every))


def exponential_steps(
    lr: float, step: int, steps_per_epoch: int, epochs: int, *, decay: float, every: float = 1, floor: float = 0.0
) -> float:
    """Times `decay` over each `every` steps, falling a little at every one (Sabour's released code: 0.96, 2000)."""
    return max(floor, lr * decay ** (step / every))


def steps(
    lr: float, step: int, steps_per_epoch: int, epochs: int, *, milestones: Sequence[int], factor: float = 0.1
) -> float:
    """Times `factor` from each of these epochs on, counted from 0."""
    return lr * factor ** sum(step // steps_per_epoch >= milestone for milestone in milestones)


def cosine(lr: float, step: int, steps_per_epoch: int, epochs: int, *, warmup: float = 0, floor: float = 0.0) -> float:
    """Up in a line over `warmup` epochs, then down half a cosine, to `floor` at the end of the last epoch."""
    rising = warmup * steps_per_epoch
    if step < rising:
        return lr * (step + 1) / (rising + 1)
    way = min(1.0, (step - rising) / max(1, epochs * steps_per_epoch - rising))
    return floor + (lr - floor) * (1 + math.cos(math.pi * way)) / 2


def linear(lr: float, step: int, steps_per_epoch: int, epochs: int, *, warmup: float = 0, floor: float = 0.0) -> float:
    """Up in a line over `warmup` epochs, then down in a line, to `floor` at the end of the last epoch."""
    rising = warmup * steps_per_epoch
    if step < rising:
        return lr * (step + 1) / (rising + 1)
    way = min(1.0, (step - rising) / max(1, epochs * steps_per_epoch - rising))
    return lr + (floor - lr) * way


def one_cycle(
    lr: float,
    step: int,
    steps_per_epoch: int,
    epochs: int,
    *,
    rise: float = 0.3,
    start: float = 0.04,
    floor: float = 0.0,
) -> float:
    """From `start` times lr up half a cosine over a share `rise` of all steps, then down another to `floor`.

    As in torch's OneCycleLR, whose defaults these are but for the floor, the last step has the floor itself.
    """
    last = epochs * steps_per_epoch - 1
    top = max(0.0, rise * (last + 1) - 1)
    if step <= top:
        way, low = step / top if top else 1.0, start * lr
        return low + (lr - low) * (1 - math.cos(math.pi * way)) / 2
    way = min(1.0, (step - top) / (last - top))
    return floor + (lr - floor) * (1 + math.cos(math.pi * way)) / 2


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "exponential": exponential,
    "exponential_steps": exponential_steps,
    "steps": steps,
    "cosine": cosine,
    "linear": linear,
    "one_cycle": one_cycle,
}


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Of the update that `step` others came before. Keras's `decay` divides whatever the schedule says."""
    schedule = _known("schedule", recipe.schedule, SCHEDULES)
    _check_words(f"the schedule {recipe.schedule}", schedule, recipe.schedule_args)
    try:
        lr = schedule(recipe.lr, step, steps_per_epoch, recipe.epochs, **recipe.schedule_args)
    except TypeError:
        told = ", ".join(f"{name} = {value!r}" for name, value in recipe.schedule_args.items())
        raise ValueError(
            f"the schedule {recipe.schedule} takes numbers, and milestones as a list of them, got {told}"
        ) from None
    return lr / (1 + recipe.optimizer_args.get("decay", 0.0) * step)


class AdamKeras(Optimizer):
    """Keras's and TensorFlow's Adam: w = w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps).

    torch corrects v before it adds eps, where this one would be eps / sqrt(1 - beta2^t). `set_rates` puts both
    corrections into the learning rate, so `step` keeps no count.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients: Any = [p.grad for p in weights]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            means, squares = ([self.state[p][name] for p in weights] for name in ("exp_avg", "exp_avg_sq"))
            if group["weight_decay"]:
                gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            torch._foreach_lerp_(means, gradients, 1 - group["betas"][0])
            torch._foreach_mul_(squares, group["betas"][1])
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["betas"][1])
            roots = torch._foreach_sqrt(squares)
            torch._foreach_add_(roots, group["eps"])
            changes = torch._foreach_div(means, roots)
            torch._foreach_mul_(changes, group["lr"])
            torch._foreach_sub_(weights, changes)


def rmsprop_keras(
    parameters: Iterable[nn.Parameter],
    lr: float | Tensor,
    rho: float = 0.9,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    **options: Any,
) -> RMSprop:
    """a = rho a + (1 - rho) g^2, then w = w - lr g / (sqrt(a) + eps), with `decay` in the learning rate."""
    return RMSprop(parameters, lr, alpha=rho, eps=eps, weight_decay=weight_decay, **options)


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adam": (Adam, ("betas", "eps", "weight_decay")),  # weight_decay is L2, added to the gradient
    "adam_keras": (AdamKeras, ("betas", "eps", "weight_decay")),
    "adamw": (AdamW, ("betas", "eps", "weight_decay")),
    "sgd": (SGD, ("momentum", "weight_decay", "nesterov")),
    "rmsprop_keras": (rmsprop_keras, ("rho", "eps", "weight_decay")),
}


NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
DECAYED = ("weight", "kernel")  # as layers and routings call their matrices


def trained_names(recipe: Recipe, network: nn.Module) -> tuple[list[str], list[str]]:
    """Parameters that take part in training: those that decay, and those that the recipe's `decay_on` spares."""
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    where = recipe.optimizer_args.get("decay_on", "all")
    if where not in ("all", "weights"):
        raise ValueError(f"decay_on is 'all' or 'weights', got {where!r}")
    if where == "all":
        return names, []

    def decays(name: str) -> bool:
        place, _, own = name.rpartition(".")
        return own in DECAYED and not isinstance(network.get_submodule(place), NORMS)

    return [name for name in names if decays(name)], [name for name in names if not decays(name)]


def create_optimizer(
    recipe: Recipe, network: nn.Module | Iterable[nn.Parameter], capturable: bool = False
) -> Optimizer:
    """The recipe's, over those parameters that take part in training; `decay_on` needs the network they are of.

    On CUDA and on a CPU all of them are changed in one kernel where torch has one. A capturable optimiser has its
    learning rate on the device, so that a CUDA graph sees it change.
    """
    make, takes = _known("optimizer", recipe.optimizer, OPTIMIZERS)
    options = {word: value for word, value in recipe.optimizer_args.items() if word not in ("decay", "decay_on")}
    for word in options:
        if word not in takes:
            takes = (*takes, "decay_on", "decay")
            raise ValueError(f"the optimizer {recipe.optimizer} has no {word!r}; it takes {', '.join(takes)}")
    spared: list[nn.Parameter] = []
    if isinstance(network, nn.Module):
        trained, spared = ([network.get_parameter(name) for name in part] for part in trained_names(recipe, network))
    else:
        trained = [p for p in network if p.requires_grad]
    everything = [*trained, *spared]
    on_cuda = bool(everything) and all(p.is_cuda for p in everything)
    on_cpu = bool(everything) and all(p.device.type == "cpu" for p in everything)
    if (on_cuda or on_cpu) and recipe.optimizer in ("adam", "adamw", "sgd"):
        options["fused"] = True
    if capturable and recipe.optimizer in ("adam", "adamw", "rmsprop_keras"):
        options["capturable"] = True
    lr = torch.tensor(recipe.lr, device=everything[0].device) if capturable else recipe.lr
    if on_cuda and capturable and recipe.optimizer == "adam" and has_triton():
        from torchcaps.fused.adam_triton import SmallAdam

        make = SmallAdam
    groups: Any = [{"params": trained}, {"params": spared, "weight_decay": 0.0}] if trained and spared else trained
    optimizer = make(groups or spared, lr, **options)
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # a few steps are, and may be
    return optimizer


def set_rates(optimizer: Optimizer, recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Readies an optimiser for its update number `step`, and gives the learning rate."""
    lr = learning_rate(recipe, step, steps_per_epoch)
    for group in optimizer.param_groups:
        rate = lr
        if recipe.optimizer == "adam_keras":
            first, second = group["betas"]
            rate *= math.sqrt(1 - second ** (step + 1)) / (1 - first ** (step + 1))
        if isinstance(group["lr"], Tensor):
            _fill(group["lr"], rate)
        else:
            group["lr"] = rate
    return lr


def _fill(tensor: Tensor, value: float) -> None:
    """Launches nothing where this is what the tensor was last filled with, and nobody has written to it since."""
    place = tensor.data_ptr()  # another for a copy, which carries along what is remembered here
    if getattr(tensor, "filled", None) != (value, place, tensor._version):
        tensor.fill_(value)
        tensor.filled = value, place, tensor._version  # type: ignore[attr-defined]


def load_moments(optimizer: Optimizer, moments: dict[Any, Any]) -> None:
    """Loads the `state` of an optimiser's state_dict, laid out in memory as the weights are."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    for group in optimizer.param_groups:
        for weight in group["params"]:
            for name, value in optimizer.state[weight].items():
                if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                    optimizer.state[weight][name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


class EMA:
    """The moving average of a network's weights and of its batch-norm statistics.

    The first averages are short, min(decay, (1 + n) / (10 + n)) after n updates, so that the start is soon forgotten.
    What is not floating point is copied.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"ema must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self.updates = 0
        self.average = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                averages.append(self.average[name])
                values.append(value)
            else:
                self.average[name].copy_(value)
        torch._foreach_lerp_(averages, values, 1 - keep)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """The network has the average's weights inside, and its own again afterwards."""
        own = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self.average)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in self.average.items():
            value.copy_(state["average"][name])


def _known(what: str, word: str, known: dict[str, Any]) -> Any:
    if word not in known:
        raise ValueError(f"there is no {what} {word!r}; there are {', '.join(known)}")
    return known[word]


def _check_words(what: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    own = _keywords(function)
    takes = ", ".join(own) or "nothing"
    for word in given:
        if word not in own:
            raise ValueError(f"{what} has no {word!r}; it takes {takes}")
    for word, needed in own.items():
        if needed and word not in given:
            raise ValueError(f"{what} needs {word!r}; it takes {takes}")


@cache
def _keywords(function: Callable[..., Any]) -> dict[str, bool]:
    """What a schedule takes of its own, and whether it must be given."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    return {p.name: p.default is p.empty for p in own}
