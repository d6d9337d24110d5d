"""Batches and updates of several seeds at once, each seed's as it would have them alone.

The axis over the replicas follows the batch's: images [b, r, c, h, w], labels [b, r].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchcaps.data import Batch, Batches, DataSet
from torchcaps.data.stream import StreamedBatches
from torchcaps.recipes import Recipe
from torchcaps.train.capture import Say
from torchcaps.train.fabric import Fabric
from torchcaps.train.prepare import seed_of, training_batches
from torchcaps.train.stacked import Stack
from torchcaps.train.step import Step, Tally, cut, mixed, mixup_share
from torchcaps.train.teachers import Teachers

DRAWN = 64 << 20  # bytes of images drawn and augmented in one call on a fast device


class ReplicaBatches:
    """The batches of all seeds side by side, gathered and augmented in one call.

    Shapes: images [b, r, c, h, w], labels [b, r] or [b, r, k], targets [b, r, k, c, h, w] or None
    """

    def __init__(self, recipe: Recipe, data: DataSet, seeds: Sequence[int], device: torch.device):
        self.first = training_batches(recipe, data, seeds[0], {"device": device, "rank": 0, "world": 1})
        if isinstance(self.first, StreamedBatches):
            raise ValueError("images read from disk serve one seed at a time; leave out --together")
        self.orders = [replace(self.first.order, seed=seed) for seed in seeds]
        self.seeds = torch.tensor(seeds, device=device)
        self.together = 1
        if device.type == "cuda":
            images = len(seeds) * recipe.batch_size
            self.together = max(1, min(256, DRAWN // (4 * images * torch.Size(data.train.image).numel())))

    def __len__(self) -> int:
        return len(self.first)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""
        first, size = self.first, len(self.orders)
        group = start - start % self.together
        shares = zip(*(order.shares(epoch, group, first.device) for order in self.orders), strict=True)
        while parts := list(islice(shares, self.together)):
            orders = [torch.cat([own for _, own in seed]) for seed in zip(*parts, strict=True)]
            indices = torch.stack(orders, 1).flatten()
            positions = torch.cat([part[0][0] for part in parts]).repeat_interleave(size)
            drawn = self._finish(first.split.gather(indices), epoch, positions)
            whole = Batch(*(None if x is None else x.unflatten(0, (-1, size)) for x in drawn))  # type: ignore[arg-type]
            row = 0
            for number, part in enumerate(parts, group):
                rows = slice(row, row + len(part[0][0]))
                if number >= start:
                    yield Batch(*(None if x is None else x[rows] for x in whole))  # type: ignore[arg-type]
                row = rows.stop
            group += len(parts)

    def _finish(self, batch: Batch, epoch: int, positions: Tensor) -> Batch:
        """As `Batches` does it, with a seed for each row, which the draws take as they take a single one."""
        rows: Any = self.seeds.repeat(len(positions) // len(self.seeds))
        batches: Batches = copy(self.first)
        batches.order = replace(self.first.order, seed=rows)
        return batches._finish(batch, epoch, positions)


class Tallies(Tally):
    """The same for each replica. Shapes: totals and good [t, r]"""

    def add(self, names: tuple[str, ...], values: Tensor, images: int) -> None:
        if not self.names:
            self.start(names, torch.zeros_like(values))
        super().add(names, values, images)

    def start(self, names: Any, totals: Tensor, images: int = 0) -> None:
        super().start(names, totals, images)
        self.good = torch.zeros_like(self.totals, dtype=torch.int64)

    def every(self) -> list[dict[str, float]]:
        """The means of each replica, read from the device at once."""
        means = (self.totals / max(1, self.images)).T.tolist()
        return [dict(zip(self.names, row, strict=True)) for row in means]

    def bad(self) -> dict[int, tuple[int, str]]:
        """Which replicas have a term that is not finite, for how many steps, and its name."""
        found = {}
        for k, row in enumerate(self.good.T.tolist() if self.names else []):
            bad = [(self.steps - good, name) for good, name in zip(row, self.names, strict=True)]
            ago, name = max(bad, key=lambda pair: pair[0])
            if ago:
                found[k] = ago, name
        return found


class ReplicaStep(Step):
    """One update of every replica; nothing passes from one to another."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        fabric: Fabric,
        stack: Stack,
        optimizer: Optimizer,
        steps_per_epoch: int,
        *,
        teachers: Teachers | None = None,
        capture: bool = False,
        say: Say = print,
    ):
        network, options = stack.all, {"teachers": teachers, "capture": capture, "say": say}
        super().__init__(recipe, seeds[0], fabric, network, network, optimizer, steps_per_epoch, **options)  # type: ignore[arg-type]
        self.seeds, self.stack = tuple(seeds), stack
        self.tally: Tallies = Tallies(fabric.device)
        self.share: Tensor = torch.ones(1, len(seeds), device=fabric.device)

    def __call__(self, batch: Batch, step: int) -> dict[str, Tensor]:
        self.stack.seed([seed_of(seed, step, 0) for seed in self.seeds])
        return super().__call__(batch, step)

    def set_share(self, step: int) -> None:
        if self.recipe.mixup:
            shares = [mixup_share(self.recipe.mixup, seed, step) for seed in self.seeds]
            self.share.copy_(torch.tensor([shares]))

    def update(self, batch: Batch) -> dict[str, Tensor]:
        recipe = self.recipe
        values: Tensor | None = None
        self.optimizer.zero_grad()
        for part in cut(batch, recipe.accumulate):
            share = len(part.images) / len(batch.images)
            with self.halves.in_place():
                terms = self.terms(part)
            terms = terms if share == 1 else share * terms
            self.halves.look(terms)
            terms.backward(self.ones_for(terms))
            values = terms.detach() if values is None else values + terms.detach()
        assert values is not None
        self.halves.hand_over()
        if recipe.clip is not None:
            clip_norms(self.network.parameters(), recipe.clip)
        elif recipe.clip_value is not None:
            nn.utils.clip_grad_value_(self.network.parameters(), recipe.clip_value)
        self.optimizer.step()
        self.halves.follow()
        self.tally.add(self.names, values.T, len(batch.images))
        return dict(zip(self.names, values.unbind(1), strict=True))

    def terms(self, batch: Batch) -> Tensor:
        """The loss terms of all replicas. Shapes: -> [r, t]"""

        if self.recipe.mixup:
            batch = batch._replace(images=mixed(batch.images, self.share[..., None, None, None]))
        taught = self.taught(batch.images.flatten(0, 1))  # by teachers, who see all replicas' images as one batch
        taught = None if taught is None else taught.unflatten(0, batch.images.shape[:2])
        given = {name: x for name, x in (("targets", batch.targets), ("taught", taught)) if x is not None}

        def work(network: Any, share: Tensor, images: Tensor, labels: Tensor, *rest: Tensor) -> Tensor:
            more = dict(zip(given, rest, strict=True))
            with self.fabric.autocast():
                output = network(images, labels)
            part = Batch(images, labels, more.get("targets"))
            terms = self.terms_from(output, part, self.margin, share.squeeze(), more.get("taught"))
            self.names = tuple(terms)
            return torch.stack(list(terms.values()))

        return self.stack(work, self.share, batch.images, batch.labels, *given.values())


def clip_norms(parameters: Any, most: float) -> None:
    """Each replica's gradients, scaled where their norm is above `most`, as torch's clip_grad_norm_ scales one's.

    Shapes: gradients [r, ...]
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    factor = (most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)))
