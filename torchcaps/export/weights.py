"""A finished run as weights to hand on: a folder ready for a model hub, or the package's own.

>>> export_run("runs/quick-mnist/seed-0", "efficient_capsnet_mnist")
>>> torchcaps.load_pretrained("efficient_capsnet_mnist")

Half precision is taken only where it changes no prediction on the validation set, or on training images without one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from torchcaps.data import DataSet
from torchcaps.data.splits import Split
from torchcaps.evaluate import Predictions, ranking
from torchcaps.export.card import citation, model_card
from torchcaps.export.folder import CARD, LINE, write_folder
from torchcaps.export.record import ROUNDED, seeds_of
from torchcaps.models.pretrained import CONFIG, LIMIT, SHIPPED, WEIGHTS, find_pretrained
from torchcaps.predictor import steps_of
from torchcaps.results import Result, from_line
from torchcaps.runs import Opened, is_exported, look, open_run
from torchcaps.train import checkpoint

LOOKED_AT = 10_000  # images that half precision is tried on, at most
LICENCE = "apache-2.0"
Say = Callable[[str], None]


def export_run(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    half: bool = False,
    onnx: bool = False,
    results: str | os.PathLike[str] = "",
    device: str = "auto",
    say: Say = lambda sentence: None,
) -> Path:
    """Writes config.json, model.safetensors, README.md, results.jsonl and SHA256SUMS; `load_pretrained` reads them.

    Args:
        out: a folder that is not there yet, or is empty.
        half: float16, if held-out images show no difference, or training images where none are; refused if they do.
        onnx: also model.onnx, checked against torch.
        results: the file or folder that has the run's line and those of its recipe's other seeds, whose mean the card
            gives; if not given, TABLE.jsonl beside the run or `results`, whichever has the line.
        say: is told what was checked.
    """
    out = Path(out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a folder that is not there yet")
    opened = open_run(run, device=device)
    line = result_line(opened)
    seeds = seeds_of(line, *([results] if results else [opened.folder.parent / f"{line.table}.jsonl", "results"]))
    if results and not seeds:
        raise ValueError(f"{results} has no line of {opened.folder}; leave it out, or name the file that has it")
    weights, dtype = network_weights(opened), "float32"
    rounded = {name: _half(value) for name, value in weights.items()}
    if half and all(torch.equal(rounded[name].to(value.dtype), value) for name, value in weights.items()):
        weights, dtype = rounded, ROUNDED
        say("the weights are float16 numbers already")
    elif half:
        weights, changed, seen = halved(opened, weights)
        dtype = "float16"
        if changed:
            raise ValueError(f"in half precision {changed} of {seen} would get another class; leave --half out")
        say(f"half precision changes the class of none of {seen}")
    files = {WEIGHTS: tensors_to_bytes(weights, {"format": "pt"})}
    about = describe(opened, line, files[WEIGHTS], dtype)
    if onnx:
        from torchcaps.export.onnx import export_onnx

        files["model.onnx"], difference = export_onnx(opened.model, opened.image, opened.class_names)
        say(f"model.onnx gives what torch gives, to {difference:.0e}")
    files[CONFIG] = _json(about)
    files[CARD] = model_card(out.resolve().name, about, line, sorted(files), seeds).encode()
    files[LINE] = line.line().encode() + b"\n"
    write_folder(out, files)
    return out


def ship_run(
    run: str | os.PathLike[str], name: str = "", *, device: str = "auto", say: Say = lambda sentence: None
) -> Path:
    """Writes a run's weights into the package, in float16 where that changes no prediction on held-out images.

    The decoder, which has no say in predictions, is in float16 always.

    Args:
        name: under which they are asked for; the preset's if not given.
    """
    opened = open_run(run, device=device)
    line = result_line(opened)
    name = name or opened.recipe.model
    if not name.isidentifier():
        raise ValueError(f"weights go by a name such as efficient_capsnet_mnist, got {name!r}")
    whole = network_weights(opened)
    weights, changed, seen = halved(opened, whole)
    dtype = "float16"
    if changed:
        dtype = "float32, the decoder's float16"
        say(f"float32 but for the decoder, as {changed} of {seen} would change class in float16")
        weights = {key: weights[key] if key.startswith("decoder.") else value for key, value in whole.items()}
    else:
        say(f"float16 changes the class of none of {seen}")
    content = tensors_to_bytes(weights, {"format": "pt"})
    others = sum(p.stat().st_size for p in SHIPPED.glob("*.safetensors") if p.stem != name)
    if others + len(content) > LIMIT:
        raise ValueError(
            f"the package's weights would take {(others + len(content)) / 1e6:.1f} MB, more than "
            f"{LIMIT / 1e6:.0f}; torchcaps export RUN --out FOLDER writes a folder of its own"
        )
    SHIPPED.mkdir(exist_ok=True)
    path = SHIPPED / f"{name}.safetensors"
    checkpoint.write(path, content)
    checkpoint.write(path.with_suffix(".json"), _json(describe(opened, line, content, dtype)))
    return path


def result_line(opened: Opened) -> Result:
    """The results line that a tested run, or what was exported of it, keeps."""
    folder = opened.folder
    if is_exported(folder):
        return from_line(json.dumps(find_pretrained(folder).about["result"]))
    try:
        return from_line((folder / "result.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has not been tested; torchcaps evaluate {folder} does that first") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'result.json'} cannot be read: {error}") from None


def network_weights(opened: Opened) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in opened.model.state_dict().items()}


def halved(opened: Opened, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], int, str]:
    """The weights rounded to float16, how many held-out images then get other classes, and of how many, in words.

    What float16 cannot hold, such as a large variance of a batch norm, stays as it is. Where nothing was held out,
    training images are looked at.
    """
    data = opened.data()
    split, kind = (data.train, "training") if data.validation is None else (data.validation, "validation")
    rounded = {name: _half(value) for name, value in weights.items()}
    before = _classes(opened, data, split)
    opened.model.load_state_dict(rounded)
    try:
        after = _classes(opened, data, split)
    finally:
        opened.model.load_state_dict(weights)
    return rounded, int((before != after).any(dim=1).sum()), f"{len(before):,} {kind} images"


def _half(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    short = value.half()
    return short if bool(short.isfinite().all()) else value


def _classes(opened: Opened, data: DataSet, split: Split) -> Tensor:
    """The classes chosen for each image of a split, as many as it has labels. Shapes: -> [n, k]"""
    found: Predictions = look(opened.model, split, data, opened.recipe, min(LOOKED_AT, len(split)))
    wanted = 1 if found.labels.dim() == 1 else found.labels.shape[1]
    return ranking(found.scores)[:, :wanted].sort(dim=1).values


def describe(opened: Opened, line: Result, content: bytes, dtype: str) -> dict[str, Any]:
    """All that is known of the weights, as JSON keeps it."""
    recipe = opened.recipe
    sizes = {name: p.numel() for name, p in opened.model.named_parameters()}
    decoder = sum(size for name, size in sizes.items() if name.startswith("decoder."))
    known = json.loads(line.line())
    known.pop("curves")
    for figures in (known["test"], known["validation"], known["test_last"]):
        (figures or {}).pop("reliability", None)
    return {
        "library": "torchcaps",
        "preset": recipe.model,
        "options": {word: value for word, value in recipe.model_args.items() if word not in ("image", "classes")},
        "image": list(opened.image),
        "classes": len(opened.class_names),
        "class_names": list(opened.class_names),
        "data": recipe.data,
        "protocol": recipe.protocol,
        "input": ["pixels / 255", *map(repr, steps_of(opened))],
        "threshold": opened.threshold,
        "parameters": sum(sizes.values()) - decoder,
        "decoder_parameters": decoder,
        "dtype": dtype,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "test_error": line.test["error"],
        "seed": opened.seed,
        "epoch": opened.epoch,
        "licence": LICENCE,
        "citation": citation(recipe.model),
        "torch": torch.__version__,
        "result": known,
    }


def _json(about: dict[str, Any]) -> bytes:
    return json.dumps(about, indent=2, ensure_ascii=False).encode() + b"\n"
