"""h-ImageNet, made from one's own copy of ILSVRC 2012."""

from __future__ import annotations

import io
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torchcaps.data.errors import DataError, write_whole
from torchcaps.data.images import THREADS, check_on_error, each, look, pillow, read_image
from torchcaps.data.listing import entries, is_image

MADE = "himagenet.json"  # how the images were cut; it counts them once all are there


def himagenet_classes() -> tuple[str, ...]:
    """The WordNet ids of the 200 classes that were hardest for ResNet-18 (Li et al. 2018)."""
    return tuple(Path(__file__).with_name("himagenet_200_classes.txt").read_text("utf-8").split())


@dataclass(frozen=True)
class Cutting:
    """How objects are cut out: see `make_himagenet`."""

    size: int | None = None
    padding: float = 0.15
    smallest: int = 50
    largest: int = 500


@dataclass
class Made:
    """How many images h-ImageNet has got: those cut to a box, those too small, and those that could not be read."""

    train: int = 0
    test: int = 0
    cut: int = 0
    dropped: int = 0
    skipped: int = 0


def make_himagenet(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int | None = None,
    padding: float = 0.15,
    smallest: int = 50,
    largest: int = 500,
    on_error: str = "stop",
    classes: Sequence[str] | None = None,
) -> Made:
    """Writes h-ImageNet as train/ and test/ from one's own copy of ILSVRC 2012; `load("himagenet")` then reads it.

    The object is cut out with some padding where Annotations/ has its bounding box (the largest of its class if there
    are several), the whole image is taken where not: how the authors cut those by hand is lost. ILSVRC's validation
    images become the test part. A call that was interrupted goes on where it stopped: files appear whole or not at all.

    Args:
        source: holds train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, itself or in ILSVRC/Data/CLS-LOC or Data/CLS-LOC.
        size: what the shorter side is scaled down to; the papers' networks take crops of 128 from 156 and 224 from 256.
        padding: added on each side of a box, as a share of its width and height.
        smallest: objects with a shorter side are dropped.
        largest: what the longer side is scaled down to.
        on_error: "stop" at a file that cannot be read, or "skip" and count it.
        classes: other WordNet ids than the 200.
    """
    check_on_error(on_error)
    if size is not None and size < 1:
        raise ValueError(f"size={size} has no pixels; give the shorter side that images are scaled down to")
    images, notes = _ilsvrc(Path(source))
    wanted = tuple(classes) if classes is not None else himagenet_classes()
    target = Path(out)
    cutting = Cutting(size, padding, smallest, largest)
    _same_options(target, cutting)
    made = Made()
    for part, below in (("train", "train"), ("test", "val")):
        files = _class_files(images / below, wanted)
        cut = partial(_cut, notes=notes, target=target / part, cutting=cutting)
        done, failures = each(cut, files, f"making {part} images", on_error, THREADS)
        setattr(made, part, sum(outcome in ("cut", "whole") for outcome in done))
        made.cut += done.count("cut")
        made.dropped += done.count("small")
        made.skipped += len(failures)
    _written(target / MADE, json.dumps({"options": asdict(cutting), "images": asdict(made)}).encode())
    return made


def _ilsvrc(source: Path) -> tuple[Path, Path | None]:
    """Where the images and the annotations are."""
    for top in (source / "ILSVRC", source):
        for images in (top / "Data" / "CLS-LOC", top):
            if (images / "train").is_dir() and (images / "val").is_dir():
                boxes = [top / "Annotations" / "CLS-LOC", top / "Annotations"]
                return images, next((folder for folder in boxes if folder.is_dir()), None)
    raise DataError(f"{source} has no train and val folders; give the folder of ILSVRC 2012, which is not downloaded")


def _class_files(folder: Path, wanted: tuple[str, ...]) -> list[str]:
    missing = [wnid for wnid in wanted if not (folder / wnid).is_dir()]
    if missing:
        few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"{folder} lacks {len(missing)} of {len(wanted)} class folders ({few}); restore them")
    files = []
    for wnid in wanted:
        images = [entry.path for entry in entries(folder / wnid) if is_image(entry.name)]
        if not images:
            raise DataError(f"{folder / wnid} holds no image; restore this class of ILSVRC")
        files += images
    return files


def _cut(file: str, *, notes: Path | None, target: Path, cutting: Cutting) -> str:
    """Writes one image: "cut" to its box, "whole", or not at all because it is "small"."""
    path = Path(file)
    wnid, part = path.parent.name, path.parent.parent.name
    box = None if notes is None else _box(notes, part, wnid, path.stem)
    goal, outcome = target / wnid / f"{path.stem}.jpg", "whole" if box is None else "cut"
    if goal.exists():
        return outcome
    height, width, _ = look(file)
    left, top, right, bottom = (0.0, 0.0, 1.0, 1.0) if box is None else box
    across, down = (right - left) * cutting.padding, (bottom - top) * cutting.padding
    left, right = (round(width * min(1.0, max(0.0, edge))) for edge in (left - across, right + across))
    top, bottom = (round(height * min(1.0, max(0.0, edge))) for edge in (top - down, bottom + down))
    across, down = right - left, bottom - top
    if min(across, down) < cutting.smallest:
        return "small"
    scale = min(1.0, cutting.largest / max(across, down), (cutting.size or min(across, down)) / min(across, down))
    pixels = read_image(file, (3, height, width))[:, top:bottom, left:right].permute(1, 2, 0).contiguous()
    still = pillow().fromarray(pixels.numpy())
    still = still.resize((max(1, round(across * scale)), max(1, round(down * scale))), pillow().Resampling.BICUBIC)
    encoded = io.BytesIO()
    still.save(encoded, "JPEG", quality=95)
    _written(goal, encoded.getvalue())
    return outcome


def _box(notes: Path, part: str, wnid: str, stem: str) -> tuple[float, float, float, float] | None:
    """The largest object of the class: left, top, right, bottom as shares of width and height."""
    places = [notes / part / wnid, notes / part, notes / wnid]
    file = next((place / f"{stem}.xml" for place in places if (place / f"{stem}.xml").is_file()), None)
    if file is None:
        return None
    try:
        tree = ElementTree.parse(file)
        width, height = (float(tree.findtext(f"size/{side}", "")) for side in ("width", "height"))
        boxes = []
        for thing in tree.iterfind("object"):
            across = [float(thing.findtext(f"bndbox/{edge}", "")) / width for edge in ("xmin", "xmax")]
            down = [float(thing.findtext(f"bndbox/{edge}", "")) / height for edge in ("ymin", "ymax")]
            if thing.findtext("name") == wnid:
                left, right, top, bottom = (min(1.0, max(0.0, edge)) for edge in (*across, *down))
                boxes.append((left, top, right, bottom))
    except (ElementTree.ParseError, ValueError, ZeroDivisionError) as error:
        raise DataError(f"{file} is no annotation of bounding boxes ({error}); restore or remove it") from error
    return max(boxes, key=lambda box: (box[2] - box[0]) * (box[3] - box[1]), default=None)


def check_finished(place: Path) -> None:
    """Refuses what an interrupted call has left: some of its images are missing."""
    again = "run torchcaps data make himagenet --from FOLDER again"
    made = place / MADE
    try:
        finished = not made.exists() or "images" in json.loads(made.read_text("utf-8"))
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{made} is damaged ({error}); remove {place} and {again}") from error
    if not finished:
        raise DataError(f"{place} is not finished; {again}")
    for part in ("train", "test"):
        if not (place / part).is_dir():
            raise DataError(f"{place} has no folder {part}; {again}")


def _same_options(target: Path, cutting: Cutting) -> None:
    """Refuses to mix images that were cut in different ways."""
    made = target / MADE
    try:
        before = Cutting(**json.loads(made.read_text("utf-8"))["options"]) if made.exists() else cutting
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{made} is damaged ({error}); remove {target} and make it anew") from error
    if before != cutting:
        raise DataError(f"{target} was made with {before}, not {cutting}; choose another folder or remove it")
    _written(made, json.dumps({"options": asdict(cutting)}).encode())


def _written(goal: Path, content: bytes) -> None:
    """Whole or not at all."""
    with write_whole(goal, "see to it and call again to go on") as part:
        part.write_bytes(content)
