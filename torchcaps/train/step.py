"""One update of the weights: forward, loss terms, backward, clipping, optimiser, averages.

What changes from step to step (the seed, the learning rate, the spread loss's margin, mixup's share) is set before
`Step.update`, and what remains is the same at every step and asks the device nothing. So a CUDA graph can hold all of
it: see capture.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchcaps import losses
from torchcaps.data import Batch
from torchcaps.functional import widen
from torchcaps.fused import has_triton, wanted
from torchcaps.recipes import Recipe
from torchcaps.train.capture import Captured, Compiled, Say
from torchcaps.train.fabric import Fabric
from torchcaps.train.halves import Halves
from torchcaps.train.optim import EMA, set_rates
from torchcaps.train.prepare import seed_of
from torchcaps.train.teachers import Teachers
from torchcaps.types import Output

LOSSES: dict[str, Callable[..., Tensor]] = {
    "margin": losses.margin_loss,
    "cross_entropy": losses.cross_entropy,
    "binary_cross_entropy": losses.binary_cross_entropy,
}


class Step:
    """Does one update after another, and keeps their tally.

    Args:
        model: the network as Fabric has set it up.
        capture: whether full batches go through a CUDA graph; `say` hears why, where that turns out impossible.
        compiled: whether network and loss go through torch.compile for full batches, in a single process. It takes
            seconds at the first step, routes by the formula, and pays for small networks on a fast device.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        fabric: Fabric,
        network: nn.Module,
        model: Any,
        optimizer: Optimizer,
        steps_per_epoch: int,
        *,
        teachers: Teachers | None = None,
        capture: bool = False,
        compiled: bool = False,
        say: Say = print,
    ):
        self.recipe, self.seed, self.fabric, self.teachers = recipe, seed, fabric, teachers
        self.network, self.model, self.optimizer = network, model, optimizer
        self.steps_per_epoch = steps_per_epoch
        self.ema = EMA(network, recipe.ema) if recipe.ema else None
        self.tally, self.ones = Tally(fabric.device), torch.ones(0)
        on_device = (capture or compiled) and recipe.loss == "spread"
        self.margin = torch.zeros((), device=fabric.device) if on_device else 0.0
        self.share: float | Tensor = torch.ones((), device=fabric.device) if recipe.mixup else 1.0
        self.class_weights = (
            None if recipe.class_weights is None else torch.tensor(recipe.class_weights, device=fabric.device)
        )
        self.halves = Halves(recipe, fabric, network, optimizer, compiled)
        self.compiled = Compiled(self.terms_of_network, say) if compiled and fabric.world_size == 1 else None
        recorded = getattr(self.halves.optimizer, "after_recording", None)
        self.run = Captured(self.update, recipe.batch_size, say, recorded) if capture else self.update

    def __call__(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The update that `step` others came before. Gives the loss terms, which the next call may overwrite."""
        torch.manual_seed(seed_of(self.seed, step, self.fabric.global_rank))
        set_rates(self.optimizer, self.recipe, step, self.steps_per_epoch)
        if self.recipe.loss == "spread":
            margin = losses.spread_margin(step, self.recipe.spread_steps)
            self.margin = self.margin.fill_(margin) if isinstance(self.margin, Tensor) else margin
        self.set_share(step)
        self.halves.catch_up()
        terms = self.run(batch)
        if self.ema is not None:
            self.ema.update(self.network)
        self.tally.count(len(batch.images) * self.fabric.world_size)
        return terms

    def set_share(self, step: int) -> None:
        """How much of each image its own batch place keeps, the same on all ranks; mixup fills in the rest."""
        if isinstance(self.share, Tensor):
            self.share.fill_(mixup_share(self.recipe.mixup, self.seed, step))

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One step of the optimiser on one batch, cut into `accumulate` parts whose gradients add up to its own."""
        recipe, fabric = self.recipe, self.fabric
        self.optimizer.zero_grad()
        names: tuple[str, ...] = ()
        values: Tensor | None = None
        parts = list(cut(batch, recipe.accumulate))
        for number, part in enumerate(parts, 1):
            share = len(part.images) / len(batch.images)
            last = number == len(parts)
            with nullcontext() if last or fabric.world_size == 1 else fabric.no_backward_sync(self.model):
                with self.halves.in_place():
                    terms = self.terms_of(part)
                names, stacked = tuple(terms), torch.stack(list(terms.values()))
                stacked = stacked if share == 1 else share * stacked
                self.halves.look(stacked)
                fabric.backward(stacked, self.ones_for(stacked))
            values = stacked.detach() if values is None else values + stacked.detach()
        assert values is not None
        self.halves.hand_over()
        if recipe.clip is not None:
            fabric.clip_gradients(self.model, self.optimizer, max_norm=recipe.clip, error_if_nonfinite=False)
        elif recipe.clip_value is not None:
            fabric.clip_gradients(self.model, self.optimizer, clip_val=recipe.clip_value)
        self.optimizer.step()
        self.halves.follow()
        self.tally.add(names, values, len(batch.images) * fabric.world_size)
        return dict(zip(names, values.unbind(), strict=True))

    def ones_for(self, terms: Tensor) -> Tensor:
        """The gradient of the sum of all terms, which is made once."""
        if self.ones.shape != terms.shape:
            self.ones = torch.ones_like(terms)
        return self.ones

    def terms_of(self, part: Batch) -> dict[str, Tensor]:
        if self.recipe.mixup:
            part = part._replace(images=mixed(part.images, self.share))
        taught = self.taught(part.images)
        if self.compiled is not None and len(part.images) * self.recipe.accumulate == self.recipe.batch_size:
            with self.fabric.autocast():
                return self.compiled(part.images, part.labels, part.targets, self.margin, self.share, taught)
        return self.terms_from(self.output_of(part), part, self.margin, self.share, taught)

    def taught(self, images: Tensor) -> Tensor | None:
        """What the teachers say of these images, where there are any."""
        if not self.teachers:
            return None
        with self.fabric.autocast():
            return self.teachers(self.fabric.strategy.precision.convert_input(images))

    def output_of(self, part: Batch) -> Output:
        """In one process without Fabric's cast of all outputs to float32: losses do that, for what they look at."""
        if self.fabric.world_size > 1:
            return self.model(part.images, part.labels)
        images = self.fabric.strategy.precision.convert_input(part.images)
        with self.fabric.autocast():
            return self.network(images, part.labels)

    def terms_of_network(
        self,
        images: Tensor,
        labels: Tensor,
        targets: Tensor | None,
        margin: float | Tensor,
        share: float | Tensor,
        taught: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Without what Fabric puts around the network, for one process needs none of it but autocast."""
        return self.terms_from(self.network(images, labels), Batch(images, labels, targets), margin, share, taught)

    def terms_from(
        self,
        output: Output,
        batch: Batch,
        margin: float | Tensor,
        share: float | Tensor,
        taught: Tensor | None = None,
    ) -> dict[str, Tensor]:
        weights = self.class_weights
        return loss_terms(self.recipe, output, batch, margin=margin, class_weights=weights, share=share, taught=taught)


class Tally:
    """Each loss term's sum over the images of an epoch, kept on the device so that no step waits for it.

    A sum that is not finite never is again, so the number of steps with a finite one says which step spoilt it.
    """

    def __init__(self, device: torch.device):
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.device = device
        self.names: tuple[str, ...] = ()
        self.totals = self.good = torch.empty(0, device=device)
        self.images = self.steps = 0  # that count() has seen

    def add(self, names: tuple[str, ...], values: Tensor, images: int) -> None:
        """The part done on the device.

        Shapes: values [t], one for each name
        """
        if not self.names:
            self.start(names, torch.zeros(len(names)))
        if wanted(self.device) and has_triton():
            from torchcaps.fused import losses_triton

            if losses_triton.tally(self.totals, self.good, values, images):
                return
        self.totals.add_(values, alpha=images)
        self.good.add_(self.totals - self.totals == 0)

    def count(self, images: int) -> None:
        self.images, self.steps = self.images + images, self.steps + 1

    def start(self, names: Iterable[str], totals: Tensor, images: int = 0) -> None:
        self.names, self.images, self.steps = tuple(names), images, 0
        self.totals = totals.to(self.device, self.dtype)
        self.good = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)

    def clear(self) -> None:
        """For a new epoch, in place: a graph may hold the tensors."""
        self.totals.zero_()
        self.good.zero_()
        self.images = self.steps = 0

    def means(self) -> dict[str, float]:
        """Read from the device, which is not free."""
        totals = (self.totals / max(1, self.images)).tolist()
        return dict(zip(self.names, totals, strict=True)) if self.images else {}

    def first_bad(self) -> tuple[int, str] | None:
        """How many steps ago a term first was not finite, 1 for the last step, and its name."""
        bad = [(self.steps - good, name) for name, good in zip(self.names, self.good.tolist(), strict=True)]
        ago, name = max(bad, key=lambda pair: pair[0], default=(0, ""))
        return (ago, name) if ago else None

    def state_dict(self) -> dict[str, object]:
        return {"totals": dict(zip(self.names, self.totals.unbind(), strict=True)), "images": self.images}

    def load_state_dict(self, state: dict[str, object]) -> None:
        totals, images = state["totals"], state["images"]
        assert isinstance(totals, dict)
        assert isinstance(images, int)
        if totals:
            self.start(totals, torch.stack(list(totals.values())), images)


def loss_terms(
    recipe: Recipe,
    output: Output,
    batch: Batch,
    *,
    margin: float | Tensor = 0.0,
    class_weights: Tensor | None = None,
    share: float | Tensor = 1.0,
    taught: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is minimised, each term by name and weighted. A pure function, of one replica or of many under vmap.

    Args:
        margin: of the spread loss, at this step.
        share: of each image that mixup has left; the rest is the image at the same place from the batch's end.
        taught: how present each class is by the teachers, in a term of its own.

    Shapes: taught [b, j]
    """
    terms: dict[str, Tensor] = {}

    def own_and_others(loss: Callable[..., Tensor], **options: Any) -> Tensor:
        own = loss(output.scores, batch.labels, **options)
        if not recipe.mixup:
            return own
        return share * own + (1 - share) * loss(output.scores, batch.labels.flip(0), **options)

    if recipe.loss == "spread":
        terms["spread"] = losses.spread_loss(output.scores, batch.labels, margin)  # type: ignore[arg-type]
    else:
        loss, options = LOSSES[recipe.loss], dict[str, Any]()
        if recipe.loss == "margin":
            options["scale"] = recipe.loss_scale
        if recipe.loss != "binary_cross_entropy":
            options["class_weights"] = class_weights
        smoothing = {} if recipe.loss == "margin" else {"label_smoothing": recipe.label_smoothing}
        terms[recipe.loss] = own_and_others(loss, **options, **smoothing)
        if taught is not None:  # with the teachers' own doubts, and no smoothing
            terms[recipe.loss] = (1 - recipe.distillation) * terms[recipe.loss]
            terms["distillation"] = recipe.distillation * loss(output.scores, taught, **options)
    if recipe.reconstruction:
        if output.reconstruction is None:
            raise ValueError(
                f"{recipe.model} reconstructs nothing; reconstruction must be 0, got {recipe.reconstruction}"
            )
        target = batch.images if batch.targets is None else batch.targets
        terms["reconstruction"] = losses.reconstruction_loss(
            output.reconstruction,
            target,
            reduction=recipe.reconstruction_reduction,  # type: ignore[arg-type]
            labels=batch.labels,
            weight=recipe.reconstruction,
        )
    if output.penalty is not None:
        terms["penalty"] = widen(output.penalty)
    return terms


def mixed(images: Tensor, share: float | Tensor) -> Tensor:
    """Each image with the one at the same place from the end laid over it; the batch is shuffled already.

    Shapes: images [b, c, h, w], share [] -> [b, c, h, w]
    """
    return share * images + (1 - share) * images.flip(0)


def mixup_share(shape: float, seed: int, step: int) -> float:
    """Drawn from Beta(shape, shape), a pure function of seed and step (Zhang et al. 2018)."""
    return random.Random(seed_of(seed, step, -1)).betavariate(shape, shape)


def cut(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch in so many parts of nearly one size, or as many as it has images."""
    if parts == 1:
        yield batch
        return
    targets: Iterable[Tensor | None] = [None] * parts if batch.targets is None else batch.targets.tensor_split(parts)
    for images, labels, own in zip(
        batch.images.tensor_split(parts), batch.labels.tensor_split(parts), targets, strict=True
    ):
        if len(images):
            yield Batch(images, labels, own)
