"""`torchcaps train ROW`: training, the test at the end, a line of results, the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torchcaps.commands.words import choose, in_fewer_epochs, overrides, results_file, run_folder

CODES = {"SIGINT": 130, "SIGTERM": 143}  # a signal's exit code


def train_row(
    row: str,
    *,
    out: str = "",
    seed: int = 0,
    seeds: int | None = None,
    shorten: int | None = None,
    together: bool = False,
    resume: bool = False,
    device: str = "auto",
    devices: int = 1,
    nodes: int = 1,
    strategy: Literal["auto", "ddp", "fsdp"] = "auto",
    deterministic: bool = False,
    limit: int | None = None,
    save_every: float = 60.0,
    results: str = "",
    no_test: bool = False,
    test_images: int | None = None,
    settings: tuple[str, ...] = (),
) -> int:
    """Train a row of a table, or a network for your own images, then test it once and write a report.

    Args:
        row: TABLE:ROW, as torchcaps recipes lists them, or folder=PATH for a folder of your own images.
        out: the run folder; runs/TABLE-ROW/seed-S if not given. Of several seeds it gets one folder each.
        seed: what order, augmentation and first weights are drawn from.
        seeds: train so many, from --seed on, one after the other; those that are finished are passed over.
        shorten: train for so many epochs instead, with a learning rate that falls as far in them as in the row's.
        together: train these seeds as one program, for small networks that cannot fill a device.
        resume: go on where the run stopped, or start where it has not begun.
        device: auto, cpu, cuda, cuda:N or mps.
        devices: on so many devices of this machine.
        nodes: on so many machines; torchrun sets this and --devices by itself.
        strategy: how several devices share the work; fsdp also shares out the weights.
        deterministic: use only algorithms that give the same bits each time.
        limit: pause after this step.
        save_every: seconds between two checkpoints.
        results: the file that gets the run's line, if not TABLE.jsonl beside the run's folder.
        no_test: leave the test set unread; torchcaps evaluate reads it later.
        test_images: test on so many images only; of generated test sets 100,000 are taken if this is not given.
        settings: a field of the recipe by its name, as lr=1e-3; --lr 1e-3 is the same.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit pauses after a step, counted from 1, got {limit}")
    if test_images is not None and test_images < 1:
        raise ValueError(f"--test-images takes one image at least, got {test_images}; --no-test leaves the test out")
    if together and seeds is None:
        raise ValueError("--together needs --seeds N, the number of runs to train at once")
    if (seeds is not None and seeds < 1) or seed < 0:
        raise ValueError(f"seeds count from 0 and there is at least one, got --seed {seed} --seeds {seeds}")
    from torchcaps.commands.job import Job, balanced

    changes = overrides(settings)
    weigh = changes.get("class_weights") == "balanced"
    if weigh:
        del changes["class_weights"]
    chosen = choose(row, changes)
    if weigh:
        chosen = balanced(chosen)
    chosen = replace(chosen, settings=settings)
    if shorten is not None:
        if "epochs" in changes:
            raise ValueError("--shorten says how many epochs there are, so leave --epochs out")
        chosen = in_fewer_epochs(chosen, shorten)
    parent = Path(out) if out else run_folder(chosen)
    numbers = range(seed, seed + (seeds or 1))
    alone = bool(out) and seeds is None
    folders = {number: parent if alone else parent / f"seed-{number}" for number in numbers}
    ledger = Path(results) if results else results_file(chosen.table, folders[seed])
    options: dict[str, Any] = {
        "device": device,
        "devices": devices,
        "nodes": nodes,
        "strategy": strategy,
        "resume": resume,
        "deterministic": deterministic,
        "limit": limit,
        "save_every": save_every,
    }
    return Job(chosen, folders, ledger, options, seeds is not None, no_test, test_images).run(together)
