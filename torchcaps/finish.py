"""The end of a run: validation and test, the line for the results, the report. Whatever is done already stays done.

The test set is read here, once. Its figures go to test.json, what the network said of each image to
predictions.safetensors; from then on these are looked up.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from torchcaps.data import DataSet, Split
from torchcaps.evaluate import Figures, Predictions, figures
from torchcaps.predictor import choose_threshold
from torchcaps.recipes import Recipe, views
from torchcaps.results import Result, append, checksums, from_line, read, thinned
from torchcaps.runs import Opened, look, open_run, read_json, write_json
from torchcaps.train import checkpoint
from torchcaps.train.folder import Run
from torchcaps.train.prepare import load_data

NO_FIGURES = "there is no report, as matplotlib is missing: pip install 'torchcaps[figures]'"


def finish(
    run: Run | str | os.PathLike[str],
    *,
    table: str,
    row: str,
    results: str | os.PathLike[str] | None,
    reads: int = 1,
    images: int | None = None,
    device: str | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Result:
    """Tests a run that has been trained to its end, and gives the line that it adds to the results.

    Args:
        run: what `train` gave, or its folder.
        table, row: under which the results have it.
        results: the file that gets the line, once; None for none.
        reads: how often the test set has been read for this run, this time included.
        images: of the test set, where not all of them (of generated ones: 100,000) are to be looked at.
        device: where to evaluate; by default where the run was, or else "auto".
        say: is told what a user should know.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    if device is None:
        device = str(next(run.model.parameters()).device) if isinstance(run, Run) else "auto"
    with checkpoint.locked(folder):
        opened = open_run(folder, device=device)
        loaded: list[DataSet] = [run.data] if isinstance(run, Run) else []

        def data() -> DataSet:
            if not loaded:
                loaded.append(opened.data())
            return loaded[0]

        found = read_json(folder / "validation.json") or validate(opened, data())
        tested = read_json(folder / "test.json")
        if tested is None:
            tested = read_test(opened, data(), found, reads, images)
        line = _line(opened, data, found, tested, table, row)
        if results is not None:
            add_line(results, line)
        if not (folder / "report.html").exists():
            _report(folder, say)
    return line


def add_line(path: str | os.PathLike[str], line: Result) -> None:
    """Adds it to the results, unless they have it."""
    if any(json.loads(other.line()) == json.loads(line.line()) for other in read(path)):
        return
    try:
        append(path, line)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"the result could not be written to {path}: {reason}; the run is safe, and "
            "torchcaps evaluate adds its line with --results"
        ) from error


def validate(opened: Opened, data: DataSet) -> dict[str, Any]:
    """Figures on the validation set, where there is one, and the threshold for "none of these" chosen there."""
    found: dict[str, Any] = {"figures": None, "threshold": None}
    if data.validation is not None:
        predictions = look(opened.model, data.validation, data, opened.recipe)
        found = {"figures": figures(predictions), "threshold": choose_threshold(predictions)}
    write_json(opened.folder / "validation.json", found)
    return found


def read_test(
    opened: Opened, data: DataSet, validated: dict[str, Any], reads: int = 1, images: int | None = None
) -> dict[str, Any]:
    """Reads the test set and writes down all there is to know of it, also by the last weights if others were chosen,
    and of each image alone if several views of it are what counts: all of it is one reading.

    A reading that was cut short before its figures were written counts all the same, and so does one after each epoch
    where the test set is what epochs are chosen on.
    """
    if images is not None and images < 1:
        raise ValueError(f"at least one image of the test set must be looked at, got {images}")
    folder, recipe = opened.folder, opened.recipe
    epochs = len(next(iter(read_curves(folder / "metrics.csv").values())))
    last = _last(opened) if opened.epoch != epochs else None  # before the test set is read, as it may not be there
    begun = (read_json(folder / "reading.json") or {"begun": 0})["begun"]
    each_epoch = epochs if data.validation is data.test else 0
    write_json(folder / "reading.json", {"begun": begun + 1, "epochs": each_epoch})
    predictions = look(opened.model, data.test, data, recipe, images)
    found: dict[str, Any] = {
        "reads": reads + begun + each_epoch,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "epoch": opened.epoch,
        "threshold": validated["threshold"],
        "figures": figures_of(predictions, data.test),
        "last": None,
    }
    if (plain := _alone(recipe)) is not None:
        same = load_data(plain)
        found["figures"]["one_view"] = figures_of(look(opened.model, same.test, same, plain, images), same.test)
    if data.familiar is not None:
        found["figures"]["familiar"] = figures(look(opened.model, data.familiar, data, recipe, images))
    if last is not None:
        found["last"] = figures_of(look(last, data.test, data, recipe, images), data.test)
    save_predictions(folder / "predictions.safetensors", predictions, opened)
    write_json(folder / "test.json", found)
    return found


def _alone(recipe: Recipe) -> Recipe | None:
    """The recipe that tests on each image alone, where this one tests on several views of it."""
    if views(recipe.data_args) == 1:
        return None
    return replace(recipe, data_args={name: value for name, value in recipe.data_args.items() if name != "crops"})


def figures_of(predictions: Predictions, split: Split) -> Figures:
    """With the size of the split where the predictions are of a sample."""
    found = figures(predictions)
    return found if found["images"] == len(split) else {**found, "sampled_from": len(split)}


def save_predictions(path: Path, predictions: Predictions, opened: Opened) -> None:
    about = {"epoch": opened.epoch, "seed": opened.seed, "class_names": list(opened.class_names)}
    checkpoint.save_weights(path, predictions._asdict(), about)


def load_predictions(path: Path) -> Predictions:
    tensors, _ = checkpoint.load_weights(path)
    return Predictions(**tensors)


def _last(opened: Opened) -> nn.Module:
    """The network as the last epoch left it."""
    kept = opened.folder / "last.safetensors"  # of seeds trained together
    if kept.exists():
        weights, _ = checkpoint.load_weights(kept)
    else:
        found = checkpoint.latest(opened.folder / "checkpoints")
        if found is None:
            raise ValueError(f"{opened.folder} has no checkpoint of its last epoch any more")
        averaged = found.state["ema"]
        weights = found.weights if averaged is None else averaged["average"]
    model = open_run(opened.folder, device=str(opened.device)).model
    model.load_state_dict(weights)
    return model


def _line(
    opened: Opened,
    data: Callable[[], DataSet],
    validated: dict[str, Any],
    tested: dict[str, Any],
    table: str,
    row: str,
) -> Result:
    """The result, kept in the run's folder from the first time on, with the commit and machine of that time."""
    kept = opened.folder / "result.json"
    if kept.exists():
        try:
            return from_line(kept.read_text())
        except ValueError as error:
            raise ValueError(f"{kept} cannot be read: {error}") from None
    line = result_of(
        opened,
        data(),
        table,
        row,
        test=tested["figures"],
        test_last=tested["last"],
        test_reads=tested["reads"],
        validation=validated["figures"],
        finished=tested["finished"],
    )
    checkpoint.write(kept, line.line().encode() + b"\n")
    return line


def result_of(opened: Opened, data: DataSet, table: str, row: str, **figures: Any) -> Result:
    """A line for the results, with all that the run's folder knows; `figures` are fields of it and come first."""
    final = read_json(opened.folder / "final.json") or {}
    curves = read_curves(opened.folder / "metrics.csv")
    ranks = final.get("ranks", 1)
    known = {
        "table": table,
        "row": row,
        "recipe": opened.recipe.to_dict(),
        "seed": opened.seed,
        "epochs": len(next(iter(curves.values()), [])),
        "selected": opened.recipe.select,
        "epoch": opened.epoch,
        "curves": thinned(curves),
        "data": checksums(data.splits()),
        "device": f"{ranks} x {final.get('device', '')}" if ranks > 1 else final.get("device", ""),
        "seconds": final.get("seconds"),
        "steps": final.get("step"),
        "together": len(final.get("together", [0])),
        "energy": final.get("joules"),
        "teachers": final.get("teachers", {}),
    }
    return Result.now(**{**known, **figures})


def read_curves(path: Path) -> dict[str, list[float | None]]:
    """The columns of metrics.csv but the epoch's number."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    words = [word for word in (rows[0] if rows else {}) if word != "epoch"]
    return {word: [float(row[word]) if row[word] else None for row in rows] for word in words}


def _report(folder: Path, say: Callable[[str], None]) -> None:
    if find_spec("matplotlib") is None:
        say(NO_FIGURES)
        return
    from torchcaps.report import write_report

    write_report(folder)
