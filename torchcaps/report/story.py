"""What a run's folder tells, in words: the headline beside the paper's number, facts, recipe and environment."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps import recipes
from torchcaps.evaluate import Predictions
from torchcaps.models.pretrained import find_pretrained
from torchcaps.recipes import Recipe
from torchcaps.report.page import Table
from torchcaps.results import Result, environment, from_line, source
from torchcaps.runs import Opened, is_exported, open_run, read_json
from torchcaps.train import checkpoint

PAPER = {  # first words of a table's name
    "sabour2017": "Sabour et al. 2017",
    "li2018": "Li et al. 2018",
    "choi2019": "Choi et al. 2019",
    "tsai2020": "Tsai et al. 2020",
    "mazzia2021": "Mazzia et al. 2021",
}


@dataclass
class Story:
    """All that a run's folder tells, or that weights without one keep of it.

    `predictions` are of the test set, and not among what is kept with weights.
    """

    opened: Opened
    metrics: list[dict[str, Any]]
    times: list[dict[str, Any]]
    final: dict[str, Any]
    result: Result | None
    tested: dict[str, Any] | None
    predictions: Predictions | None
    routing: list[dict[str, Any]]

    @property
    def recipe(self) -> Recipe:
        return self.opened.recipe

    @property
    def figures(self) -> dict[str, Any] | None:
        return self.tested["figures"] if self.tested else None


def read_story(folder: Path, device: str = "cpu") -> Story:
    opened = open_run(folder, device=device)
    if is_exported(folder):
        return _kept_with_weights(opened)
    result, predictions = folder / "result.json", folder / "predictions.safetensors"
    tested = read_json(folder / "test.json")
    return Story(
        opened,
        _rows(folder / "metrics.csv"),
        _rows(folder / "times.csv"),
        read_json(folder / "final.json") or {},
        from_line(result.read_text()) if result.exists() else None,
        tested,
        Predictions(**checkpoint.load_weights(predictions)[0]) if tested and predictions.exists() else None,
        _lines(folder / "routing.jsonl"),
    )


def _kept_with_weights(opened: Opened) -> Story:
    try:
        result = from_line(json.dumps(find_pretrained(opened.folder).about["result"]))
    except ValueError as error:
        raise ValueError(f"{opened.folder} does not say how its weights were tested: {error}") from None
    validation = (result.validation or {}).get("error")
    final = {"seconds": result.seconds, "device": result.device, "validation_error": validation}
    tested = {"figures": result.test, "reads": result.test_reads} if result.test else None
    return Story(opened, [], [], final, result, tested, None, [])


def title(story: Story) -> tuple[str, str]:
    recipe, result = story.recipe, story.result
    title = f"{result.table}: {result.row}" if result else f"{recipe.model} on {recipe.data}"
    table = recipes.tables().get(result.table) if result else None
    about = f"{recipe.model} on {recipe.data}" + (f", {recipe.protocol}" if recipe.protocol else "")
    return title, f"{about}. {table.TITLE}." if table else f"{about}."


def headline(story: Story) -> list[tuple[str, str]]:
    """Our number beside the paper's, as the table has it."""
    recipe, found = story.recipe, story.figures
    metric = recipe.metric.removeprefix("ensemble_")
    shown: list[tuple[str, str]] = []
    if metric == "loss" and story.metrics:
        shown.append((f"{float(story.metrics[-1]['loss']):.4f}", "loss of the last epoch"))
    elif found is None:
        error = story.final.get("validation_error")
        shown.append(("not tested", "yet") if error is None else (_percent(error), "validation error, not tested yet"))
    else:
        metric = metric if isinstance(found.get(metric), int | float) else "error"
        own = recipes.is_share_of_images(metric)
        spread = f" ± {100 * found['standard_error']:.2f}" if own else ""
        images = f"{found['images']:,} images" + (", ± standard error" if own else "")
        shown.append((f"{100 * found[metric]:.2f}{spread} %", f"test {metric.replace('_', ' ')}, {images}"))
    if recipe.reported:
        author = PAPER.get(story.result.table.partition("_")[0], "the paper") if story.result else "the paper"
        unit = "" if metric == "loss" or "%" in recipe.reported else " %"
        together = f", {recipe.seeds} networks together" if recipe.metric.startswith("ensemble_") else ""
        shown.append((f"{recipe.reported}{unit}", f"{author}{together}"))
    return shown


def facts(story: Story) -> list[tuple[str, str]]:
    final = story.final
    found = [("seed", str(story.opened.seed))]
    epochs = len(story.metrics) or (story.result.epochs if story.result else 0)
    found.append(
        ("epochs", f"{epochs}" if story.opened.epoch == epochs else f"{epochs}, weights of {story.opened.epoch}")
    )
    if isinstance(final.get("seconds"), int | float):
        found.append(("training time", _time(final["seconds"])))
    if final.get("device"):
        ranks = final.get("ranks", 1)
        found.append(("device", f"{ranks} x {final['device']}" if ranks > 1 else final["device"]))
    speeds = [row["images_per_second"] for row in story.times if row.get("images_per_second")]
    if speeds:
        found.append(("images a second", f"{sum(speeds) / len(speeds):,.0f}"))
    if story.figures and "error" in story.figures:
        images = story.figures["images"]
        found.append(("wrong", f"{round(story.figures['error'] * images):,} of {images:,}"))
    if story.final.get("validation_error") is not None:
        found.append(("validation error", _percent(story.final["validation_error"])))
    for name, word in (("per_digit_error", "per-digit error"), ("at_least_one_error", "error of at least one")):
        if story.figures and story.figures.get(name) is not None:
            found.append((word, _percent(story.figures[name])))
    if story.opened.threshold is not None:
        found.append(("“none of these” below", f"{story.opened.threshold:.2f}"))
    if story.result and story.result.energy is not None:
        found.append(("energy", f"{story.result.energy / 3600:,.1f} Wh"))
    return found


def notes(story: Story) -> list[str]:
    said, result = [], story.result
    if result and result.shortened:
        said.append(f"Shortened: {result.epochs} of the row's {result.planned} epochs.")
    if story.tested and story.tested.get("reads", 1) != 1:
        said.append(f"The test set was read {story.tested['reads']} times for this run.")
    if story.figures and "sampled_from" in story.figures:
        sample, whole = story.figures["images"], story.figures["sampled_from"]
        said.append(f"The test figures are of {sample:,} images, a sample of the {whole:,} that there are.")
    if story.recipe.note:
        said.append(story.recipe.note[:1].upper() + story.recipe.note[1:])
    return said


def recipe_table(story: Story) -> Table:
    """All that is set, each argument on a line of its own; what the paper leaves open, and what is not the row's."""
    values = _flat(story.recipe)
    rows: list[tuple[str, str]] = []
    marks: dict[int, str] = {}
    table = recipes.tables().get(story.result.table) if story.result else None
    row = table.ROWS.get(story.result.row) if table and story.result else None
    theirs = None if row is None else _flat(row)
    hidden = ("metric", "reported", "assumed", "note", "seeds", "keep_epochs")
    for name in dict.fromkeys([*values, *(theirs or {})]):
        if name.partition(".")[0] in hidden:
            continue
        assumed = {name, name.partition(".")[0]} & set(story.recipe.assumed)
        mark = ["assumed"] if assumed else []
        if theirs is not None and values.get(name) != theirs.get(name):
            mark.append(f"the row has {_word(theirs.get(name))}")
        if not mark and values.get(name) in (None, [], {}):
            continue
        if mark:
            marks[len(rows)] = ", ".join(mark)
        rows.append((name, _word(values.get(name))))
    return Table(rows, marks=marks)


def _flat(recipe: Recipe) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.to_dict().items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def environment_table(story: Story) -> Table:
    """Of the time when the run was finished, or of now where it has not kept that."""
    result = story.result
    commit, dirty = (result.commit, result.dirty) if result else source()
    about = (result.environment if result else None) or environment()
    rows = [("commit", commit + (" with changes" if dirty else ""))]
    if result:
        rows.append(("finished", result.finished))
    rows += [(name, _word(value)) for name, value in about.items() if value not in (None, [], "")]
    rows += [(f"data, {name}", str(value)) for name, value in (result.data if result else {}).items()]
    return Table(rows)


def foot(story: Story) -> str:
    if story.tested is None:
        return "The test set has not been read."
    reads = story.tested.get("reads", 1)
    return (
        "The test figures are of one reading, after training."
        if reads == 1
        else f"The test set was read {reads} times."
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """A CSV of numbers, missing ones as None."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]
    return [{**row, "epoch": int(row["epoch"] or 0)} for row in rows]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _word(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
