"""Training: one loop, what a step does, and what a run keeps; start at `loop.py`, then `step.py`."""

from torchcaps.train.loop import Interrupted, train
from torchcaps.train.together import train_together

__all__ = ["Interrupted", "train", "train_together"]
