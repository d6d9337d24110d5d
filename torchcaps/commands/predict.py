"""`torchcaps predict RUN IMAGE...`: what images of any size and colour show."""

from __future__ import annotations

import json as words
import sys
from typing import Any

NONE = "none of these"


def predict_images(
    run: str,
    images: tuple[str, ...],
    *,
    json: bool = False,
    threshold: float | None = None,
    device: str = "auto",
    batch_size: int = 32,
) -> int:
    """Name the class of images, how sure that is, and the runner-up; "none of these" where no class is sure enough.

    Files that cannot be read are named on stderr, the others go on; the exit code is then 2.

    Args:
        run: the folder of a finished run, or the name of weights that come with the package.
        images: files, or folders, whose images are taken with those of the folders in them.
        json: print a JSON list instead of lines.
        threshold: below which it is none of these; by default what the run chose on its validation images, so that 99 %
            of those it recognised keep their class. 0 gives every image a class.
        device: auto, cpu, cuda, cuda:N or mps.
        batch_size: images that go through the network at once.
    """
    from torchcaps.data.errors import DataError
    from torchcaps.data.images import track
    from torchcaps.predictor import Predictor

    if not images:
        raise ValueError("name at least one image, or a folder of them")
    predictor = Predictor.open(run, device=device, threshold=threshold, batch_size=batch_size)
    files = predictor.files(*images)
    if predictor.threshold is None:
        tested = (predictor.run.folder / "validation.json").exists()
        why = "nothing was held out to choose a threshold on" if tested else "its threshold has not been chosen yet"
        more = "" if tested else f"; torchcaps evaluate {run} chooses it"
        note = f"{why}, so every image gets a class; --threshold sets one{more}"
        print(f"torchcaps: {run}: {note}", file=sys.stderr)
    width = max(map(len, (*predictor.run.class_names, NONE)))
    longest = min(60, max(map(len, files)))
    failures = 0
    if json:
        print("[", end="")
    answers = track(predictor.stream(files), "looking at images", len(files))
    for shown, (file, answer) in enumerate(answers):
        if isinstance(answer, DataError):
            failures += 1
            print(f"torchcaps: {answer}", file=sys.stderr)
            entry: dict[str, Any] = {"file": file, "error": str(answer)}
        else:
            entry = as_dict(file, answer, predictor.threshold)
            if not json:
                print(line(file, answer, predictor.word, longest, width), flush=True)
        if json:
            print(f"{',' if shown else ''}\n  {words.dumps(entry, ensure_ascii=False)}", end="", flush=True)
    if json:
        print("\n]")
    return 2 if failures else 0


def line(file: str, answer: Any, word: str, longest: int, width: int) -> str:
    """One image in a line: file, class, length, runner-up; of several objects, each with its length."""
    if len(answer.found) > 1:
        named = ", ".join(f"{each.label} {each.probability:.3f}" for each in answer.found)
        return f"{file:<{longest}}  {named}{_then(answer)}"
    return f"{file:<{longest}}  {answer.label or NONE:<{width}}  {word} {answer.probability:.3f}{_then(answer)}"


def _then(answer: Any) -> str:
    if answer.label is None:
        return f"  (nearest: {answer.ranked[0].label})"
    return f"  then {answer.runner_up.label} {answer.runner_up.probability:.3f}" if answer.runner_up else ""


def as_dict(file: str, answer: Any, threshold: float | None) -> dict[str, Any]:
    """Plain values; `class` is null for "none of these"."""
    runner_up = answer.runner_up
    return {
        "file": file,
        "class": answer.label,
        "probability": answer.probability,
        "runner_up": runner_up and runner_up.label,
        "runner_up_probability": runner_up and runner_up.probability,
        "classes": [each.label for each in answer.found],
        "probabilities": {each.label: each.probability for each in answer.ranked},
        "threshold": threshold,
    }
