"""A finished run as weights to hand on: in a folder for a model hub, in the package, as ONNX."""

from torchcaps.export.folder import renew_card
from torchcaps.export.weights import export_run, ship_run

__all__ = ["export_run", "renew_card", "ship_run"]
