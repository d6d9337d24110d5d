"""The numbers behind the figures: functions on networks, capsules and images, with nothing drawn.

Those that a figure of the catalogue is made of take opened runs and give plain values, which go to JSON as they are.
"""

from torchcaps.analysis.alignment import align_vectors, alignment_ratios, random_ratios
from torchcaps.analysis.perturb import amounts, perturbed
from torchcaps.analysis.sample import Sample, class_poses, take
from torchcaps.analysis.transform import add_noise, moved
from torchcaps.analysis.variance import random_variance, variance_shares

__all__ = [
    "Sample",
    "add_noise",
    "align_vectors",
    "alignment_ratios",
    "amounts",
    "class_poses",
    "moved",
    "perturbed",
    "random_ratios",
    "random_variance",
    "take",
    "variance_shares",
]
