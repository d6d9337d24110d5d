from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from torchcaps.data import DataSet, Stored
from torchcaps.models.heads import LengthHead
from torchcaps.models.network import Network
from torchcaps.recipes import Recipe
from torchcaps.runs import Opened
from torchcaps.types import Capsules


class Half(nn.Module):
    """A decoder whose pixel (j, d) is 0.5 plus dimension d of class j, so that a picture tells what moved."""

    def forward(self, poses):
        return 0.5 + poses[:, None]


class Telling(Network):
    """Poses [4, 4] are the pixels themselves, times `longest`."""

    def __init__(self, longest=1.0, decoder=True):
        super().__init__((1, 4, 4), 4, LengthHead(longest), Half() if decoder else None)
        self.scale = nn.Parameter(torch.tensor(longest), requires_grad=False)

    def encode(self, images):
        capsules = Capsules(self.scale * images[:, 0])
        return capsules, self.head(capsules), None


@dataclass
class Made(Opened):
    made: DataSet | None = field(default=None)

    def data(self):
        return self.made


@pytest.fixture
def made():
    """A run of a network that tells, on images [n, 4, 4] in 255ths."""

    def make(images, labels, network=None, reconstruction=0.1, folder="runs/made"):
        names = tuple("abcd")
        pixels = torch.as_tensor(images, dtype=torch.uint8).view(-1, 1, 4, 4)
        split = Stored(pixels, torch.as_tensor(labels), names)
        recipe = Recipe(model="capsnet", data="made", reconstruction=reconstruction)
        network = (Telling() if network is None else network).eval()
        options = (Path(folder), recipe, 0, network, (1, 4, 4), names, 1, None, torch.device("cpu"))
        return Made(*options, made=DataSet("made", split, split))

    make.network = Telling
    return make
