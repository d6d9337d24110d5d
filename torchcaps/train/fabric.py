"""Lightning Fabric, from whichever of its two packages is installed."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fabric import Fabric
else:
    for name in ("lightning_fabric", "lightning"):
        if find_spec(name) is not None:
            Fabric = import_module(name if name == "lightning_fabric" else "lightning.fabric").Fabric
            logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
            logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
            break
    else:
        raise ImportError("training needs Lightning Fabric; pip install lightning-fabric")

__all__ = ["Fabric"]
