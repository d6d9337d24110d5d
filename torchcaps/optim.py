"""Optimisers as the papers' frameworks have them, schedules, and the moving average of weights.

A schedule is a pure function of the step, and so is whatever else changes from update to update: a resumed run has
nothing to restore but the optimiser's moments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

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


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "exponential": exponential,
    "exponential_steps": exponential_steps,
    "steps": steps,
    "cosine": cosine,
}


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Of the update that `step` others came before. Keras's `decay` divides whatever the schedule says."""
    schedule = _known("schedule", recipe.schedule, SCHEDULES)
    _check_words(f"the schedule {recipe.schedule}", schedule, recipe.schedule_args)
    lr = schedule(recipe.lr, step, steps_per_epoch, recipe.epochs, **recipe.schedule_args)
    return lr / (1 + recipe.optimizer_args.get("decay", 0.0) * step)


def adam(parameters: Iterable[nn.Parameter], lr: float, **options: Any) -> Adam:
    """`weight_decay` is L2, added to the gradient."""
    return Adam(parameters, lr, **options)


def adam_keras(
    parameters: Iterable[nn.Parameter],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-7,
    weight_decay: float = 0.0,
) -> Adam:
    """Keras and TensorFlow add eps to sqrt(v) before its bias is corrected: torch's eps over sqrt(1 - beta2^t)."""
    return Adam(parameters, lr, (betas[0], betas[1]), eps, weight_decay)


def adamw(parameters: Iterable[nn.Parameter], lr: float, **options: Any) -> AdamW:
    return AdamW(parameters, lr, **options)


def sgd(parameters: Iterable[nn.Parameter], lr: float, **options: Any) -> SGD:
    return SGD(parameters, lr, **options)


def rmsprop_keras(
    parameters: Iterable[nn.Parameter], lr: float, rho: float = 0.9, eps: float = 1e-7, weight_decay: float = 0.0
) -> RMSprop:
    """a = rho a + (1 - rho) g^2, then w = w - lr g / (sqrt(a) + eps), with `decay` in the learning rate."""
    return RMSprop(parameters, lr, alpha=rho, eps=eps, weight_decay=weight_decay)


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "adam": (adam, ("betas", "eps", "weight_decay")),
    "adam_keras": (adam_keras, ("betas", "eps", "weight_decay")),
    "adamw": (adamw, ("betas", "eps", "weight_decay")),
    "sgd": (sgd, ("momentum", "weight_decay", "nesterov")),
    "rmsprop_keras": (rmsprop_keras, ("rho", "eps", "weight_decay")),
}


def create_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The recipe's, over those parameters that take part in training."""
    make, takes = _known("optimizer", recipe.optimizer, OPTIMIZERS)
    options = {word: value for word, value in recipe.optimizer_args.items() if word != "decay"}
    for word in options:
        if word not in takes:
            raise ValueError(
                f"the optimizer {recipe.optimizer} has no {word!r}; it takes {', '.join((*takes, 'decay'))}"
            )
    return make([p for p in parameters if p.requires_grad], recipe.lr, **options)


def set_rates(optimizer: Optimizer, recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Readies an optimiser for its update number `step`, and gives the learning rate."""
    lr = learning_rate(recipe, step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = lr
        if recipe.optimizer == "adam_keras":
            eps = recipe.optimizer_args.get("eps", 1e-7)
            group["eps"] = eps / math.sqrt(1 - group["betas"][1] ** (step + 1))
    return lr


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
    own = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    takes = ", ".join(p.name for p in own) or "nothing"
    for word in given:
        if word not in {p.name for p in own}:
            raise ValueError(f"{what} has no {word!r}; it takes {takes}")
    for p in own:
        if p.default is p.empty and p.name not in given:
            raise ValueError(f"{what} needs {p.name!r}; it takes {takes}")
