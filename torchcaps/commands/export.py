"""`torchcaps export RUN --out FOLDER`: the weights of a finished run, to hand on."""

from __future__ import annotations


def export_weights(
    run: str,
    *,
    out: str = "",
    half: bool = False,
    onnx: bool = False,
    ship: bool = False,
    name: str = "",
    results: str = "",
    device: str = "auto",
) -> int:
    """Write a folder ready for a model hub: weights, what they are, a card, their results, checksums.

    torchcaps.load_pretrained(FOLDER) gives the network back, and torchcaps predict takes the folder for a run.

    Args:
        run: the folder of a finished run that has been tested.
        out: the folder to write, which must be empty or not there yet.
        half: in float16, if that changes no prediction on the validation set, or, without one, on training images.
        onnx: also model.onnx, checked against torch; needs torchcaps[export].
        ship: write into the package itself instead, for those who publish it; float16 where it costs nothing.
        name: with --ship, under which the weights are asked for; the preset's if not given.
        results: the file or folder that has this run's line and those of its recipe's other seeds, whose mean the card
            gives; if not given, TABLE.jsonl beside the run or results, whichever has the line.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from torchcaps.export import export_run, ship_run

    if ship:
        if out or half or onnx or results:
            raise ValueError("--ship decides where and how the weights are written; --name and --device go with it")
        path = ship_run(run, name, device=device, say=print)
        print(f"{path.stem} is in the package: {path.stat().st_size / 1e6:.2f} MB")
        return 0
    if name:
        raise ValueError("--name goes with --ship; a folder is named by --out")
    if not out:
        raise ValueError("--out FOLDER says where the weights go")
    folder = export_run(run, out, half=half, onnx=onnx, results=results, device=device, say=print)
    print(f"{folder} has {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0
