"""The report of a run: pictures in a folder, and one HTML file with all of them inside.

>>> write_report("runs/quick-mnist/seed-0")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps import figures
from torchcaps.data import DataSet
from torchcaps.evaluate import Predictions, calibration, confusion_matrix, expected_calibration_error
from torchcaps.figures.catalog import KINDS, find
from torchcaps.figures.confusion import most_confused
from torchcaps.figures.kind import RUNS, Kind
from torchcaps.figures.mistakes import cases_of
from torchcaps.figures.reconstructions import draw as draw_reconstructions
from torchcaps.report import story
from torchcaps.report.drawn import Drawn, take_numbers
from torchcaps.report.page import Page, Section, Shown, Table, render_page
from torchcaps.runs import Opened, home, is_exported, open_run
from torchcaps.train import checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISTAKES = 12
OWN = ("mistakes", "reconstructions")  # of the catalogue, which every report has
NO_PICTURES = "There are no pictures of test images here"
LISTED = 15  # classes beyond which the confusion is also a list of pairs


@dataclass
class Held(Opened):
    """A run whose data set is loaded once, or missed once, and whose network is asked about it once."""

    held: list[DataSet] = field(default_factory=list)
    said: list[Predictions] = field(default_factory=list)
    missed: list[Exception] = field(default_factory=list)

    def data(self) -> DataSet:
        if self.missed:
            raise self.missed[0]
        if not self.held:
            try:
                self.held.append(super().data())
            except (ValueError, OSError) as error:
                self.missed.append(error)
                raise
        return self.held[0]

    def look(self) -> Predictions:
        if not self.said:
            self.said.append(super().look())
        return self.said[0]


def write_report(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    data: DataSet | None = None,
    everything: bool = False,
    beside: Sequence[str | os.PathLike[str]] = (),
    device: str = "cpu",
    say: Callable[[str], None] = lambda title: None,
) -> Path:
    """Writes curves.png, confusion.png, mistakes.png, reconstructions.png and the like, and report.html, its path.

    What a run has not got is left out: a network without decoder has no reconstructions, a run that was not tested has
    curves only, and images that cannot be had any more leave a sentence in their place. Weights that were exported, or
    come with the package, have no curves; what they say of the test images is asked anew, and kept nowhere.

    Args:
        out: the folder for all of it; by default the run's, or for weights without one a folder here of their name.
        data: instead of the recipe's.
        everything: with all figures of the catalogue that the run can give, which takes minutes.
        beside: further runs, for those figures that compare several.
        device: where the figures of the catalogue take their numbers.
        say: is told the title of each of these before it is made.
    """
    folder = Path(folder)
    alone = is_exported(folder)
    run = story.read_story(folder, device if alone else "cpu")
    others = [open_run(each, device=device) for each in beside]
    held = [] if data is None else [data]
    opened = Held(**vars(run.opened), held=held)
    report = Report(Path(out) if out else home(folder))
    notes = story.notes(run)
    predictions = run.predictions
    if alone:
        notes.append("There are no curves here, as these weights came without the folder of their run.")
        try:
            predictions = opened.look()
            notes.append(f"{len(predictions.labels):,} test images were looked at anew for what is drawn here.")
        except (ValueError, OSError) as error:
            notes.append(f"{NO_PICTURES}: {error}.")
    else:
        report.add(
            "curves",
            lambda dark: figures.curves(run.metrics, selected=run.opened.epoch, dark=dark),
            Section("Curves", "Means over each epoch; the validation error after it."),
            "Loss, validation error and learning rate by epoch.",
        )
    if predictions is not None:
        _add_confusion(report, run.opened, predictions)
        try:
            _add_pictures(report, opened, everything)
        except (ValueError, OSError) as error:
            notes.append(f"{NO_PICTURES}: {error}.")
        _add_calibration(report, predictions)
    if run.routing and run.routing[-1].get("layers"):
        report.add(
            "routing",
            lambda dark: figures.routing(run.routing, dark=dark),
            Section("Routing", "On a fixed batch after some of the epochs, the palest the first."),
            "Mean change of the routing logits by iteration, and votes by cosine with their parent.",
        )
    if everything:
        mine = open_run(folder, device=device)
        _add_catalogue(report, [Held(**vars(each), held=held if each is mine else []) for each in (mine, *others)], say)
    open_fields = "Assumed are the values that the paper leaves open." if run.recipe.assumed else ""
    report.sections += [
        Section("Recipe", open_fields, table=story.recipe_table(run), folded=True),
        Section("Environment", table=story.environment_table(run), folded=True),
    ]
    title, subtitle = story.title(run)
    page = Page(title, subtitle, story.headline(run), story.facts(run), notes, report.sections, story.foot(run))
    path = report.folder / "report.html"
    checkpoint.write(path, render_page(page).encode())
    return path


class Report:
    """The sections so far; each figure is also a file of the folder."""

    def __init__(self, folder: Path):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is no folder; --out names one for the files")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.sections: list[Section] = []

    def add(
        self, name: str, draw: Callable[[bool], Figure], section: Section, words: str = "", wide: bool = False
    ) -> None:
        """`draw` is called for light and for dark paper."""
        shown = Shown(figures.png(draw(False)), figures.png(draw(True)), words, wide)
        checkpoint.write(self.folder / f"{name}.png", shown.light)
        self.sections.append(replace(section, figure=shown))


def _add_confusion(report: Report, opened: Opened, predictions: Predictions) -> None:
    names = opened.class_names
    counts = confusion_matrix(predictions.scores, predictions.labels)
    pairs = most_confused(counts) if len(names) > LISTED else []
    table = Table([(names[r], names[c], f"{n:g}") for r, c, n in pairs], ("label", "predicted", "how often"))
    several = (
        "; a label that is missed counts in equal parts for the wrong ones" if predictions.labels.dim() == 2 else ""
    )
    report.add(
        "confusion",
        lambda dark: figures.confusion(counts, names, dark=dark),
        Section(
            "Confusion",
            f"Test images by label and prediction{several}. Beside each row is its error.",
            table=table if pairs else None,
        ),
        "Confusion matrix of the test set.",
        wide=len(names) > LISTED,
    )


def _add_pictures(report: Report, run: Opened, everything: bool) -> None:
    """The worst mistakes, and reconstructions where the decoder was trained."""
    names = run.class_names
    drawn = take_numbers(find("mistakes"), [run], {"most": MISTAKES})
    if everything:
        drawn.write(report.folder / "figures", drawn.files())
    found = drawn.numbers
    cases = found["cases"]
    how = f"{len(cases)} of {found['wrong']:,} mistakes, those with the largest margin of the longest wrong capsule "
    report.add(
        "mistakes",
        lambda dark: figures.mistakes(cases_of(found), names, measure=found["measure"], dark=dark),
        Section(
            "Worst mistakes", f"{how}over the shortest right one." if cases else "No test image was wrongly classified."
        ),
        "; ".join(f"{_named(case['labels'], names)} taken for {_named(case['chosen'], names)}" for case in cases),
    )
    if getattr(run.model, "decoder", None) is not None and run.recipe.reconstruction:
        drawn = take_numbers(find("reconstructions"), [run])
        if everything:
            drawn.write(report.folder / "figures", drawn.files())
        pictures = drawn.numbers
        several = any("(" in word for block in pictures["blocks"] for each in block["strips"] for word in each["words"])
        below = "(label, prediction, target)" if several else "the class that is decoded"
        report.add(
            "reconstructions",
            lambda dark: draw_reconstructions(pictures, dark=dark),
            Section("Reconstructions", f"What the decoder makes of the capsules; below each: {below}."),
            "Test images and their reconstructions.",
        )


def _add_catalogue(report: Report, runs: Sequence[Opened], say: Callable[[str], None]) -> None:
    """Every figure of the catalogue that these runs can give, and a list of those that they cannot."""
    missing: list[tuple[str, str]] = []
    for kind in KINDS:
        if kind.name in OWN:
            continue
        say(kind.title)
        least, most = RUNS[kind.runs]
        try:
            if least > len(runs):
                raise ValueError("it compares runs; --beside names another")
            drawn = _of_all_or_the_first(kind, runs[:most], least)
            files = drawn.files()
            shown = Shown(files[".png"], drawn.png(dark=True), kind.what, kind.wide)
        except (ValueError, OSError) as error:
            missing.append((kind.title, str(error)))
            continue
        drawn.write(report.folder / "figures", files)
        text = kind.what + (f" ({kind.paper}.)" if kind.paper else "")
        report.sections.append(Section(kind.title, text, figure=shown))
        if ".gif" in files:
            moving = Shown(files[".gif"], drawn.gif(dark=True) or b"", f"{kind.title}, moving.", kind.wide)
            report.sections.append(Section(f"{kind.title}, moving", figure=moving))
    if missing:
        report.sections.append(Section("Not for this run", table=Table(missing, ("figure", "why not")), folded=True))


def _of_all_or_the_first(kind: Kind, runs: Sequence[Opened], least: int) -> Drawn:
    """Where a run beside it lacks what a figure needs, that figure is of the first alone."""
    try:
        return take_numbers(kind, runs)
    except (ValueError, OSError):
        if least == len(runs):
            raise
    return take_numbers(kind, runs[:least])


def _add_calibration(report: Report, predictions: Predictions) -> None:
    table = calibration(predictions)
    several = predictions.labels.dim() == 2
    of = "every class's probability that it is present" if several else "the probability of the class named"
    distance = 100 * expected_calibration_error(table)
    report.add(
        "calibration",
        lambda dark: figures.calibration([each._asdict() for each in table], dark=dark),
        Section("Calibration", f"How often came true what was expected, by {of}: {distance:.2f} % off on average."),
        "How often predictions came true, by confidence.",
    )


def _named(classes: Sequence[int], names: Sequence[str], joined: str = " and ") -> str:
    return joined.join(names[k] for k in classes) or "nothing"
