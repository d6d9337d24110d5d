"""The report of a run: pictures in its folder, and one HTML file with all of them inside.

>>> write_report("runs/quick-mnist/seed-0")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps import figures
from torchcaps.data import DataSet, Split
from torchcaps.data.batches import Order, as_float
from torchcaps.evaluate import (
    THRESHOLD,
    Predictions,
    calibration,
    confusion_matrix,
    expected_calibration_error,
    longest,
)
from torchcaps.figures.confusion import most_confused
from torchcaps.figures.pictures import brightness
from torchcaps.figures.reconstructions import columns_for
from torchcaps.losses import multi_hot
from torchcaps.models.heads import ActivationHead, LengthHead
from torchcaps.report import story
from torchcaps.report.page import Page, Section, Shown, Table, render_page
from torchcaps.runs import Opened
from torchcaps.train import checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISTAKES = 12
SEARCHED = 5000  # right answers among which a spread of classes is looked for
LISTED = 15  # classes beyond which the confusion is also a list of pairs


def write_report(folder: str | os.PathLike[str], *, data: DataSet | None = None) -> Path:
    """Writes curves.png, confusion.png, mistakes.png, reconstructions.png and the like, and report.html, its path.

    What a run has not got is left out: a network without decoder has no reconstructions, a run that was not tested has
    curves only, and images that cannot be had any more leave a sentence in their place.

    Args:
        data: instead of the recipe's.
    """
    folder = Path(folder)
    run = story.read_story(folder)
    report = Report(folder)
    report.add(
        "curves",
        lambda dark: figures.curves(run.metrics, selected=run.opened.epoch, dark=dark),
        Section("Curves", "Means over each epoch; the validation error after it."),
        "Loss, validation error and learning rate by epoch.",
    )
    notes = story.notes(run)
    if run.predictions is not None:
        _add_confusion(report, run.opened, run.predictions)
        try:
            _add_pictures(report, run, run.predictions, data)
        except (ValueError, OSError) as error:
            notes.append(f"There are no pictures of test images here: {error}.")
        _add_calibration(report, run.predictions)
    if run.routing and run.routing[-1].get("layers"):
        report.add(
            "routing",
            lambda dark: figures.routing(run.routing, dark=dark),
            Section("Routing", "On a fixed batch after some of the epochs, the palest the first."),
            "Mean change of the routing logits by iteration, and votes by cosine with their parent.",
        )
    open_fields = "Assumed are the values that the paper leaves open." if run.recipe.assumed else ""
    report.sections += [
        Section("Recipe", open_fields, table=story.recipe_table(run), folded=True),
        Section("Environment", table=story.environment_table(run), folded=True),
    ]
    title, subtitle = story.title(run)
    page = Page(title, subtitle, story.headline(run), story.facts(run), notes, report.sections, story.foot(run))
    path = folder / "report.html"
    checkpoint.write(path, render_page(page).encode())
    return path


class Report:
    """The sections so far; each figure is also a file of the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sections: list[Section] = []

    def add(
        self, name: str, draw: Callable[[bool], Figure], section: Section, words: str = "", wide: bool = False
    ) -> None:
        """`draw` is called for light and for dark paper."""
        shown = Shown(figures.png(draw(False)), figures.png(draw(True)), words, wide)
        checkpoint.write(self.folder / f"{name}.png", shown.light)
        self.sections.append(replace(section, figure=shown))


def chosen(predictions: Predictions) -> Tensor:
    """What was said of each image: the k longest where every image has k labels, else those from the threshold on.

    Shapes: -> bool [n, j]
    """
    counts = multi_hot(predictions.labels, predictions.scores.shape[1]).sum(dim=1)
    if predictions.labels.dim() == 1 or bool((counts == counts[0]).all()):
        return longest(predictions.scores, counts)
    return predictions.probabilities >= THRESHOLD


def lengths(opened: Opened, predictions: Predictions) -> tuple[Tensor, str]:
    """What the bars show, and its name: lengths or activations where the network ranks classes by them."""
    head = getattr(opened.model, "head", None)
    if isinstance(head, LengthHead):
        return predictions.scores, "capsule length"
    return predictions.probabilities, "activation" if isinstance(head, ActivationHead) else "probability"


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


def _add_pictures(report: Report, run: story.Story, predictions: Predictions, data: DataSet | None) -> None:
    """The worst mistakes, and reconstructions where the decoder was trained."""
    names = run.opened.class_names
    said, right = chosen(predictions), multi_hot(predictions.labels, len(names))
    values, measure = lengths(run.opened, predictions)
    worst = figures.worst_mistakes(values, right, said, MISTAKES)
    data = run.opened.data() if data is None else data
    test = data.test.to("cpu")
    order = Order(len(test), len(right), shuffle=len(right) < len(test), samples=len(right))
    _, indices = next(order.shares(0))
    _check_same(test, indices, predictions, worst)
    images = test.gather(indices[worst]).images
    cases = [
        figures.Case(figures.picture(image), _classes(right[k]), _classes(said[k]), values[k].tolist(), int(indices[k]))
        for image, k in zip(images, worst, strict=True)
    ]
    wrong = int((said != right).any(dim=1).sum())
    how = f"{len(cases)} of {wrong:,} mistakes, those with the largest margin of the longest wrong capsule over the "
    report.add(
        "mistakes",
        lambda dark: figures.mistakes(cases, names, measure=measure, dark=dark),
        Section("Worst mistakes", f"{how}shortest right one." if cases else "No test image was wrongly classified."),
        "; ".join(f"{_named(case.labels, names)} taken for {_named(case.chosen, names)}" for case in cases),
    )
    if getattr(run.opened.model, "decoder", None) is not None and run.recipe.reconstruction:
        shape = figures.picture(images[0] if worst else test[0].image).shape
        columns = columns_for(shape[0], shape[1])
        good = _spread((said == right).all(dim=1), right, columns)
        blocks = []
        for title, rows, ways in (
            ("Recognised", good, [("reconstruction", said, "right")]),
            ("Mistaken", worst[:columns], [("as predicted", said, "wrong"), ("as labelled", right, "right")]),
        ):
            if rows:
                seen = as_float(test.gather(indices[rows]).images)
                for step in data.test_transform:
                    seen = step(seen, None)
                seen = seen[:, 0] if seen.dim() == 5 else seen  # the first of several crops
                kinds = [(name, [_classes(classes[k]) for k in rows], tone) for name, classes, tone in ways]
                blocks.append(_block(run.opened, title, seen, [_classes(right[k]) for k in rows], kinds))
        report.add(
            "reconstructions",
            lambda dark: figures.reconstructions(blocks, dark=dark),
            Section("Reconstructions", "What the decoder makes of the capsules of the classes named below each."),
            "Test images and their reconstructions.",
        )


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


def _check_same(test: Split, indices: Tensor, predictions: Predictions, some: Sequence[int]) -> None:
    """Refuses a test set that is not the one the predictions are of, as far as a few labels tell."""
    which = torch.tensor([*range(min(64, len(indices))), *some])
    if not torch.equal(test.gather(indices[which]).labels, predictions.labels[which]):
        raise ValueError("the test set has changed since the run was tested")


def _block(
    opened: Opened,
    title: str,
    images: Tensor,
    labels: Sequence[tuple[int, ...]],
    kinds: Sequence[tuple[str, Sequence[tuple[int, ...]], str]],
) -> figures.Block:
    """Inputs, and below them, for each kind, what their capsules of some classes give: a strip for each object."""
    names = opened.class_names
    spans = [brightness(image) for image in images]
    inputs = [figures.picture(image, *span) for image, span in zip(images, spans, strict=True)]
    strips = [figures.Strip("input", inputs, [_named(each, names, ", ") for each in labels])]
    for name, classes, tone in kinds:
        most = max(1, *map(len, classes))
        padded = torch.tensor([[*each, *[-1] * (most - len(each))] for each in classes])
        with torch.inference_mode():
            pictures = opened.model(images, padded).reconstruction
        for k in range(most):
            drawn: list[Any] = [
                figures.picture(picture[k], *span) if k < len(each) else None
                for picture, each, span in zip(pictures, classes, spans, strict=True)
            ]
            words = [names[each[k]] if k < len(each) else "" for each in classes]
            strips.append(figures.Strip("" if k else name, drawn, words, tone))
    return figures.Block(title, strips)


def _spread(good: Tensor, right: Tensor, most: int) -> list[int]:
    """Images recognised, of as many different classes as there are."""
    rows = good.nonzero()[:SEARCHED, 0].tolist()
    first: dict[tuple[int, ...], int] = {}
    for row in rows:
        first.setdefault(_classes(right[row]), row)
    different = [first[key] for key in sorted(first)][:most]
    return [*different, *(row for row in rows if row not in different)][:most]


def _classes(row: Tensor) -> tuple[int, ...]:
    return tuple(row.nonzero()[:, 0].tolist())


def _named(classes: Sequence[int], names: Sequence[str], joined: str = " and ") -> str:
    return joined.join(names[k] for k in classes) or "nothing"
