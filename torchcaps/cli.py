"""The command line. It only parses and prints; the library does the rest."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial, wraps
from typing import Annotated, Any, get_type_hints

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from tyro.conf import Positional, arg

import torchcaps
from torchcaps.commands.demo import show_page
from torchcaps.commands.doctor import doctor
from torchcaps.commands.evaluate import evaluate_runs
from torchcaps.commands.export import export_weights
from torchcaps.commands.figure import draw_figure, read_settings, read_value
from torchcaps.commands.predict import predict_images
from torchcaps.commands.quick import quick
from torchcaps.commands.report import make_report
from torchcaps.commands.table import list_recipes, print_table
from torchcaps.commands.train import train_row
from torchcaps.commands.words import FIELDS, with_fields
from torchcaps.data import cli as data_cli
from torchcaps.models import create_model, list_models
from torchcaps.models.measure import layers, operations, parameters, training_memory
from torchcaps.models.pretrained import shipped
from torchcaps.models.registry import find_preset

DESCRIPTION = """Capsule networks in PyTorch: every network of five papers by name, every row of their tables to train.

  torchcaps quick                     a first run: three minutes to a trained network and its report
  torchcaps recipes                   all rows of all tables, with the papers' numbers
  torchcaps train quick:mnist         train a row (three minutes), test it once, write a report
  torchcaps train quick:mnist --resume    go on after Ctrl-C, a crash or a power cut
  torchcaps train folder=PATH         train on your own images, a folder for each class
  torchcaps evaluate RUN              figures of a finished run; ensembles, several crops
  torchcaps predict RUN IMAGE         which class your images are of, or none of these
  torchcaps export RUN --out FOLDER   its weights to hand on: checksums, a card, ONNX
  torchcaps figure                    all figures; torchcaps figure NAME RUN draws one of them
  torchcaps report RUN                every figure that a run can give, in one HTML file
  torchcaps table quick               a paper's table with our numbers beside its own
  torchcaps list 'efficient*'         presets: sizes beside the papers', operations, training memory
  torchcaps summary capsnet_mnist     the layers of one, with shapes
  torchcaps data list                 data sets; data get, verify, show and make work on them
  torchcaps demo                      a page in the browser: draw a digit, see which capsules read it, bend them
  torchcaps doctor                    what this machine has, and whether it works
  torchcaps --version

Each has --help. In Python the same names go to torchcaps.create_model(name)."""

TRAIN = f"""For example:

  torchcaps train quick:digits                           a minute, no download
  torchcaps train sabour2017_table1:routing3 --epochs 5 --lr 1e-3
  torchcaps train sabour2017_table1:routing3 --model-args.iterations 1 --seed 7
  torchcaps train quick:mnist --seeds 30 --together      statistics over 30 runs
  torchcaps train folder=photos --model efficient_capsnet --class-weights balanced
  torchcaps train quick:mnist --resume                   the same run again, from where it stopped

Every field of the recipe is an option: --{", --".join(name.replace("_", "-") for name in FIELDS if name != "seeds")}.
Single arguments of model, data, optimizer and schedule go by a dot, as --optimizer-args.eps 1e-7; lists by commas, as
--keep-epochs 1,20,80. --class-weights balanced weighs classes by how rare they are."""

PAPERS = "(default: as in the paper)"
WIDE = 200  # columns where there is no terminal to ask


@dataclass
class Row:
    """What `torchcaps list` knows of a preset."""

    preset: str
    paper: str
    image: tuple[int, int, int]
    classes: int
    parameters: int
    decoder: int
    printed: str
    operations: int
    operations_printed: str
    memory: int
    pretrained: bool
    seconds: float | None = None


def list_presets(
    pattern: Annotated[Positional[str], arg(metavar="PATTERN")] = "*",
    *,
    batch: Annotated[int, arg(metavar="IMAGES")] = 128,
    json: bool = False,
    run: bool = False,
) -> int:
    """Print presets with paper, parameters beside the printed ones, operations and estimated training memory.

    Args:
        pattern: part of a name, or a shell pattern such as 'capsnet_*'.
        batch: images in a batch, for the training memory.
        json: print JSON instead of a table.
        run: also build each preset with real weights and run two images through it.
    """
    names = list_models(pattern if any(c in pattern for c in "*?[") else f"*{pattern}*")
    if not names:
        find_preset(pattern)
    rows = [_measure(name, batch, run) for name in _with_progress(names)]
    if json:
        _print_json(rows)
    else:
        _print_presets(rows, batch)
    return 0


def summarise(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    *,
    image: Annotated[tuple[str, ...], arg(metavar="C H W", help_behavior_hint=PAPERS)] = (),
    classes: Annotated[str, arg(metavar="N", help_behavior_hint=PAPERS)] = "",
    option: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, arg(metavar="KEY=VALUE ...")] = (),
    batch: Annotated[int, arg(metavar="IMAGES")] = 128,
) -> int:
    """Print the layers of a preset with the shapes of their outputs.

    Args:
        name: a preset, as `torchcaps list` shows them.
        image: channels, height and width of your images.
        classes: how many classes to tell apart.
        option: an option of the preset, such as iterations=1 or routing=self_attention.
        batch: images in a batch, for the training memory.
    """
    preset = find_preset(name)
    options = read_settings([word for words in option for word in words])
    if image:
        options["image"] = tuple(read_value(size) for size in image)
    if classes:
        options["classes"] = read_value(classes)
    model = _build_on_meta(name, options)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("kind", overflow="fold")
    table.add_column("output of one image", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    for layer in layers(model):
        shape = "in training alone" if layer.shape is None else _by(layer.shape)
        table.add_row(layer.name, layer.kind, shape, f"{layer.parameters:,}" if layer.parameters else "")
    chosen = {**preset.options, **options}
    count = parameters(model)
    console = _console()
    console.print(f"{name} ({preset.paper}) for images {_by(chosen['image'])} and {chosen['classes']} classes")
    console.print(table)
    console.print(
        f"{count.network:,} parameters"
        + (f", {count.decoder:,} in the decoder" if count.decoder else "")
        + (f", {count.feedback:,} in the feedback" if count.feedback else "")
        + f"; {operations(model) / 1e9:.3f} G operations for an image"
        + f"; about {training_memory(model, batch) / 1e9:.2f} GB to train with batches of {batch}"
    )
    console.print("options: " + ", ".join(f"{k}={v!r}" for k, v in chosen.items() if k not in ("image", "classes")))
    return 0


def annotated(command: Callable[..., int], **marks: Any) -> Callable[..., int]:
    """The same command with marks for tyro on its arguments, which its own file does without."""

    @wraps(command)
    def call(*args: Any, **kwargs: Any) -> int:
        return command(*args, **kwargs)

    hints = get_type_hints(command, include_extras=True)
    for name, given in marks.items():
        for mark in given if isinstance(given, tuple) else (given,):
            hints[name] = Annotated[hints[name], mark]
    signature = inspect.signature(command)
    marked = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]
    del call.__wrapped__  # tyro would look behind it
    call.__annotations__ = hints
    call.__signature__ = signature.replace(parameters=marked)  # type: ignore[attr-defined]
    return call


def described(command: Callable[..., int], more: str) -> Callable[..., int]:
    """The same command with more in its help, before its arguments."""
    same = annotated(command)
    head, _, rest = inspect.cleandoc(command.__doc__ or "").partition("\n\n")
    same.__doc__ = f"{head}\n\n{more}\n\n{rest}"
    return same


COMMANDS: dict[str, Callable[..., int]] = {
    "recipes": annotated(list_recipes, pattern=(tyro.conf.Positional, arg(metavar="PATTERN"))),
    "train": annotated(
        train_row,
        row=(tyro.conf.Positional, arg(metavar="ROW")),
        out=arg(metavar="FOLDER", help_behavior_hint=""),
        seeds=arg(metavar="N", help_behavior_hint=""),
        limit=arg(metavar="STEP", help_behavior_hint=""),
        save_every=arg(metavar="SECONDS"),
        results=arg(metavar="FILE", help_behavior_hint=""),
        test_images=arg(metavar="N", help_behavior_hint=""),
        settings=(tyro.conf.UseAppendAction, arg(name="set", metavar="FIELD=VALUE", help_behavior_hint="")),
    ),
    "evaluate": annotated(
        evaluate_runs,
        runs=(tyro.conf.Positional, arg(metavar="RUN", help_behavior_hint="")),
        data=arg(metavar="NAME", help_behavior_hint=""),
        protocol=arg(metavar="NAME", help_behavior_hint=""),
        crops=arg(metavar="N", help_behavior_hint=""),
        epoch=arg(metavar="N", help_behavior_hint=""),
        ensemble=arg(metavar="RUN", help_behavior_hint=""),
        members=arg(metavar="N", help_behavior_hint=""),
        row=arg(metavar="ROW", help_behavior_hint=""),
        images=arg(metavar="N", help_behavior_hint=""),
        results=arg(metavar="FILE", help_behavior_hint=""),
    ),
    "predict": annotated(
        predict_images,
        run=(tyro.conf.Positional, arg(metavar="RUN")),
        images=(tyro.conf.Positional, arg(metavar="IMAGE")),
        threshold=arg(metavar="LENGTH", help_behavior_hint=""),
    ),
    "figure": annotated(
        draw_figure,
        name=(tyro.conf.Positional, arg(metavar="NAME", help_behavior_hint="")),
        runs=(tyro.conf.Positional, arg(metavar="RUN", help_behavior_hint="")),
        out=arg(metavar="FOLDER", help_behavior_hint=""),
        settings=(tyro.conf.UseAppendAction, arg(name="set", metavar="KEY=VALUE", help_behavior_hint="")),
    ),
    "report": annotated(
        make_report,
        run=(tyro.conf.Positional, arg(metavar="RUN")),
        beside=(tyro.conf.UseAppendAction, arg(metavar="RUN", help_behavior_hint="")),
    ),
    "table": annotated(
        print_table,
        name=(tyro.conf.Positional, arg(metavar="NAME", help_behavior_hint="")),
        results=arg(metavar="PLACE", help_behavior_hint=""),
        out=arg(metavar="FILE", help_behavior_hint=""),
        readme=arg(metavar="FILE", help_behavior_hint=""),
        page=arg(metavar="FILE", help_behavior_hint=""),
    ),
    "demo": annotated(
        show_page,
        runs=(tyro.conf.Positional, arg(metavar="RUN", help_behavior_hint="")),
        port=arg(metavar="N"),
        space=arg(metavar="FOLDER", help_behavior_hint=""),
    ),
    "export": annotated(
        export_weights,
        run=(tyro.conf.Positional, arg(metavar="RUN")),
        out=arg(metavar="FOLDER", help_behavior_hint=""),
        name=arg(metavar="NAME", help_behavior_hint=""),
    ),
    "list": list_presets,
    "summary": summarise,
    "doctor": doctor,
    "quick": annotated(quick, out=arg(metavar="FOLDER")),
}
DATA_COMMANDS: dict[str, Callable[..., int]] = {
    "list": data_cli.list_sets,
    "get": annotated(data_cli.get, names=tyro.conf.Positional),
    "verify": annotated(data_cli.verify, names=tyro.conf.Positional),
    "show": annotated(data_cli.show, name=tyro.conf.Positional),
    "make": annotated(data_cli.make, what=tyro.conf.Positional, source=arg(name="from", metavar="FOLDER")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, or 2 with a sentence on stderr for what cannot be done."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words in (["--version"], ["-V"]):
            print(f"torchcaps {torchcaps.__version__}")
            return 0
        code = _parse(words or ["--help"])()
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"torchcaps: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # help was printed, or rich met a closed pipe
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"torchcaps: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(words: list[str]) -> Callable[[], int]:
    """The command to run, with its arguments; what tyro says of bad ones becomes one sentence."""
    if words[0] == "data":
        return _choose("torchcaps data", "Data sets of the papers by name, and your own.", DATA_COMMANDS, words[1:])
    commands = COMMANDS
    if words[0] == "train":
        words = with_fields(words, train_row)
        commands = {**COMMANDS, "train": described(COMMANDS["train"], TRAIN)}
    return _choose("torchcaps", DESCRIPTION, commands, words, also=("data",))


def _choose(
    prog: str, description: str, commands: dict[str, Callable[..., int]], words: list[str], also: Sequence[str] = ()
) -> Callable[[], int]:
    words = words or ["--help"]
    if words[0] not in commands and not words[0].startswith("-"):
        there = [*commands, *also]
        near = get_close_matches(words[0], there, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}"
        raise ValueError(f"there is no command {words[0]!r}; {hint}")
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                {name: _bind(command) for name, command in commands.items()},
                prog=prog,
                description=description,
                args=words,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    sentence = _first_paragraph(complaint.getvalue())
    command = f"{prog} {words[0]} --help" if words[0] in commands else f"{prog} --help"
    raise ValueError(f"{sentence[:1].lower()}{sentence[1:].rstrip('.')}; {command} tells more")


def _first_paragraph(box: str) -> str:
    """The words of a box that tyro draws, without its title, frame and colours, up to the next rule."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip("│| ") for line in box.splitlines()[1:]]
    paragraphs = "\n".join(line if re.search(r"\w", line) else "" for line in lines).split("\n\n")
    return " ".join(paragraphs[0].replace("(required)", "").split())


def _bind(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    @wraps(command)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return partial(command, *args, **kwargs)

    return bind


def _measure(name: str, batch: int, run: bool) -> Row:
    preset = find_preset(name)
    with torch.device("meta"):
        model = preset.build()
    count = parameters(model)
    return Row(
        preset=name,
        paper=preset.paper,
        image=preset.options["image"],
        classes=preset.options["classes"],
        parameters=count.network,
        decoder=count.decoder,
        printed=preset.parameters,
        operations=operations(model),
        operations_printed=preset.operations,
        memory=training_memory(model, batch),
        pretrained=name in shipped(),
        seconds=_time_forward(name) if run else None,
    )


def _time_forward(name: str) -> float:
    torch.manual_seed(0)
    model = create_model(name).eval()
    images = torch.rand(2, *find_preset(name).options["image"])
    start = time.perf_counter()
    with torch.inference_mode():
        output = model(images)
    seconds = time.perf_counter() - start
    probabilities = output.probabilities
    if not (probabilities.isfinite().all() and probabilities.min() >= 0 and probabilities.max() <= 1):
        raise ValueError(f"{name} gives probabilities outside [0, 1]")
    return seconds


def _build_on_meta(name: str, options: dict[str, Any]) -> nn.Module:
    try:
        with torch.device("meta"):
            return create_model(name, **options)
    except TypeError as error:  # a value of a kind for which the preset has no use
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ValueError(f"{name} cannot be built with {given}: {error}") from None


def _print_presets(rows: list[Row], batch: int) -> None:
    columns = {
        "preset": [row.preset for row in rows],
        "paper": [row.paper for row in rows],
        "image": ["x".join(map(str, row.image)) for row in rows],
        "classes": [str(row.classes) for row in rows],
        "parameters": [f"{row.parameters:,}" for row in rows],
        "decoder": [f"{row.decoder:,}" if row.decoder else "" for row in rows],
        "as printed": [row.printed for row in rows],
        "G ops": [f"{row.operations / 1e9:.3f}" for row in rows],
        "ops printed": [row.operations_printed for row in rows],
        f"GB at {batch}": [f"{row.memory / 1e9:.2f}" for row in rows],
        "weights": ["yes" if row.pretrained else "" for row in rows],
    }
    if all(row.seconds is not None for row in rows):
        columns["forward"] = [f"ok, {row.seconds:.2f} s" for row in rows]
    console = _console()
    left_out = _drop_columns(columns, console.width)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in columns:
        words = header in ("preset", "paper", "image", "as printed")
        table.add_column(header, justify="left" if words else "right", no_wrap=header != "as printed")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    console.print(
        "\nParameters are without the decoder; operations, two for each multiply-add, are for one image without it; "
        f"GB is an estimate of what training with Adam in float32 takes for batches of {batch}."
    )
    console.print("torchcaps summary NAME has a preset's layers; torchcaps recipes lists what can be trained.")
    if shipped():
        console.print(f"create_model(NAME, pretrained=True) has trained weights of {', '.join(shipped())}.")
    if left_out:
        console.print(f"Left out, as this terminal is narrow: {', '.join(left_out)}.")


def _drop_columns(columns: dict[str, list[str]], width: int) -> list[str]:
    """Takes away what is least missed until the rest fits, and names it."""
    dropped = []
    for name in ("image", "classes", "weights", "ops printed", "decoder", "paper"):
        widths = [max(map(len, (header, *cells))) for header, cells in columns.items()]
        if sum(widths) + 2 * len(widths) <= width:
            break
        del columns[name]
        dropped.append(name)
    return dropped


def _print_json(rows: list[Row]) -> None:
    fields = [asdict(row) for row in rows]
    print(json.dumps([{k: v for k, v in row.items() if k != "seconds" or v is not None} for row in fields], indent=2))


def _with_progress(names: list[str]) -> Iterator[str]:
    console = Console(stderr=True)
    yield from track(names, "measuring", console=console, transient=True, disable=not console.is_terminal)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
