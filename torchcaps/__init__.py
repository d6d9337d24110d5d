"""Capsule networks in PyTorch: five papers from shared blocks.

>>> model = torchcaps.create_model("efficient_capsnet_mnist")
>>> model(images).probabilities
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bfloat16 crashes on some CPUs that advertise AMX

from torchcaps import data, functional, layers, losses, models, ops, routing
from torchcaps.functional import length, squash, squash_exp
from torchcaps.layers import CapsuleStack, ConvCaps, Decoder, LinearCaps, PrimaryCaps
from torchcaps.losses import margin_loss, reconstruction_loss, sinkhorn_divergence, spread_loss
from torchcaps.models import CapsNet, Inference, create_model, list_models, load_pretrained, register
from torchcaps.ops import Votes, vote_budget
from torchcaps.types import Capsules, Output, Routing

__version__ = "0.1.0"

__all__ = [
    "CapsNet",
    "CapsuleStack",
    "Capsules",
    "ConvCaps",
    "Decoder",
    "Inference",
    "LinearCaps",
    "Output",
    "PrimaryCaps",
    "Routing",
    "Votes",
    "create_model",
    "data",
    "functional",
    "layers",
    "length",
    "list_models",
    "load_pretrained",
    "losses",
    "margin_loss",
    "models",
    "ops",
    "reconstruction_loss",
    "register",
    "routing",
    "sinkhorn_divergence",
    "spread_loss",
    "squash",
    "squash_exp",
    "vote_budget",
]
