"""A network as ONNX, for runtimes without torch, checked against torch on a few images."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from torchcaps.ops import backend, vote_budget
from torchcaps.types import Image

NEEDED = ("onnx", "onnxscript", "onnxruntime")
CLOSE = 1e-4  # the most that a score may differ by
SIZES = (1, 3)  # batches that are compared


class _Scores(nn.Module):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.network(images)
        return output.scores, output.probabilities


def export_onnx(network: nn.Module, image: Image, class_names: Sequence[str] = ()) -> tuple[bytes, float]:
    """The bytes of a file with one input, `images`, and the outputs `scores` and `probabilities`.

    The number of images is free. Gives also the largest difference to torch, on images at random.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {' and '.join(missing)}: pip install 'torchcaps[export]'")
    import onnxruntime

    device = next(network.parameters()).device
    model = _Scores(network.cpu()).eval()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), backend("torch"), vote_budget(2**62), _quiet():
            program = torch.onnx.export(
                model,
                (torch.rand(2, *image, generator=generator),),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["scores", "probabilities"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1, max=2**20)}},
            )
        assert program is not None
        proto = program.model_proto
        proto.metadata_props.add(key="class_names", value=json.dumps(list(class_names)))
        content = proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        difference = 0.0
        for size in SIZES:
            images = torch.rand(size, *image, generator=generator)
            with torch.no_grad():
                ours = model(images)
            theirs = session.run(["scores", "probabilities"], {"images": images.numpy()})
            pairs = zip(ours, theirs, strict=True)
            difference = max(difference, *(float((a - torch.from_numpy(b)).abs().max()) for a, b in pairs))
    finally:
        network.to(device)
    if not difference <= CLOSE:
        raise ValueError(f"the ONNX file would give scores that are {difference:.1e} off torch's; it is not written")
    return content, difference


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own future, and of torchvision."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
