"""Data sets of the papers by name, on the device, treated as each paper treats them.

>>> data = torchcaps.data.load("mnist", protocol="mazzia2021")
>>> for images, labels, targets in Batches(data.train, 16, transform=data.train_transform).epoch(0): ...
"""

from torchcaps.data import augment
from torchcaps.data.batches import Batches
from torchcaps.data.catalog import CATALOG
from torchcaps.data.errors import DataError
from torchcaps.data.random import Draws
from torchcaps.data.sets import load
from torchcaps.data.splits import Batch, DataSet, Example, Split, Stored
from torchcaps.data.stream import batches_for

__all__ = [
    "CATALOG",
    "Batch",
    "Batches",
    "DataError",
    "DataSet",
    "Draws",
    "Example",
    "Split",
    "Stored",
    "augment",
    "batches_for",
    "load",
]
