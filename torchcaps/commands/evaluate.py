"""`torchcaps evaluate RUN`: the figures of finished runs, other protocols, ensembles."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Literal

from torchcaps import recipes
from torchcaps.commands.words import percent


def evaluate_runs(
    runs: tuple[str, ...] = (),
    *,
    split: Literal["test", "validation"] = "test",
    data: str = "",
    protocol: str = "",
    crops: int | None = None,
    epoch: int | None = None,
    ensemble: tuple[str, ...] | None = None,
    members: int | None = None,
    row: str = "",
    images: int | None = None,
    device: str = "auto",
    results: str = "",
    json: bool = False,
) -> int:
    """Print the figures of finished runs. The test set is not read again for what is stored; else that is counted.

    Args:
        runs: folders of runs, as torchcaps train made them; weights that torchcaps export wrote, or those in the
            package by their names, do as well.
        split: test, or validation, which may be looked at as often as you like.
        data: another data set with the same classes and size, such as affnist_generated for a network on mnist40.
        protocol: another paper's treatment of the images than the recipe's, such as sabour2017.
        crops: sum the lengths over so many crops of each image, where the protocol has them.
        epoch: the weights of this epoch, if --keep-epochs kept it.
        ensemble: these runs and the ones before, together, by summed lengths; alone, it takes all that are named.
        members: choose so many of them for the ensemble, on the validation set.
        row: the row that gets the line of an ensemble, such as ours:mnist-ensemble, where its networks are of several.
        images: look at so many images of the test set only.
        device: auto, cpu, cuda, cuda:N or mps.
        results: the file that gets a line for each new test; as torchcaps train takes it if not given. Weights that
            were exported get one only here, and for what is not their own test.
        json: print JSON instead of sentences.
    """
    from torchcaps.commands.ask import Ask, as_json, told
    from torchcaps.commands.ensembles import together
    from torchcaps.commands.looks import check, single

    folders = [Path(each) for each in (*runs, *(ensemble or ()))]
    if not folders:
        raise ValueError("name at least one run folder, such as runs/quick-digits/seed-0")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("a run is named twice")
    if members is not None and ensemble is None:
        raise ValueError("--members goes with --ensemble, which names the runs to choose from")
    if ensemble is not None and (epoch is not None or split == "validation"):
        raise ValueError("--ensemble tests runs as their recipes select them; leave --epoch and --split out")
    if ensemble is not None and (len(folders) if members is None else members) < 2:
        raise ValueError(f"an ensemble is of two runs or more, not of {len(folders) if members is None else members}")
    if row and ensemble is None:
        raise ValueError("--row goes with --ensemble, which names the runs that are tested together")
    if row and not recipes.find(row).metric.startswith("ensemble_"):
        raise ValueError(f"--row names the row of an ensemble, such as ours:mnist-ensemble, got {row}")
    if row and images is not None:
        raise ValueError(f"a test of {images} images gets no line; leave --row or --images out")
    ask = Ask(
        split=split,
        data=data,
        protocol=protocol,
        crops=crops,
        epoch=epoch,
        images=images,
        device=device,
        results=results,
    )
    asks = [check(folder, ask) for folder in folders]
    if ensemble is None:
        found = list(map(single, folders, asks))
    else:
        found = [together(folders, members, asks[0] if len(set(asks)) == 1 else ask, row)]
    if json:
        print(as_json(found))
    else:
        print("\n".join(map(told, found)))
        if len(found) > 1:
            errors = [each.figures["error"] for each in found]
            mean, spread = statistics.mean(errors), statistics.stdev(errors)
            print(f"over {len(found)} runs: error {percent(mean)} ± {percent(spread)}")
    return 0
