"""Networks by name. Importing this registers every preset."""

from torchcaps.models import (  # noqa: F401
    ar_capsnet,
    capsnet,
    cnn,
    efficient_capsnet,
    em_capsnet,
    encapnet,
    inverted_capsnet,
    li_cnn,
    mazzia_cnn,
    rivals,
)
from torchcaps.models.inference import Inference
from torchcaps.models.network import CapsNet, Network
from torchcaps.models.pretrained import load_pretrained
from torchcaps.models.registry import create_model, list_models, register

__all__ = ["CapsNet", "Inference", "Network", "create_model", "list_models", "load_pretrained", "register"]
