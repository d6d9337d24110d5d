"""Operations on votes: the definition in PyTorch, which is what runs on a CPU, and the seam for kernels."""

from torchcaps.ops.agreement import agreement_step
from torchcaps.ops.backend import backend
from torchcaps.ops.em import agreement_fit, em_step, gaussian_fit, gaussian_log_density
from torchcaps.ops.precision import in_full_precision
from torchcaps.ops.votes import Votes, vote_budget
from torchcaps.ops.windows import Window

__all__ = [
    "Votes",
    "Window",
    "agreement_fit",
    "agreement_step",
    "backend",
    "em_step",
    "gaussian_fit",
    "gaussian_log_density",
    "in_full_precision",
    "vote_budget",
]
