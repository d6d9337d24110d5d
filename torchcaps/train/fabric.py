"""Lightning Fabric, from whichever of its two packages is installed, imported at the first use as that takes long."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fabric import Fabric
else:

    def Fabric(**options: Any) -> Any:
        for name, module in (("lightning_fabric", "lightning_fabric"), ("lightning", "lightning.fabric")):
            if find_spec(name) is not None:
                fabric = import_module(module).Fabric
                logging.getLogger(module).setLevel(logging.WARNING)  # which importing has set to INFO
                return fabric(**options)
        raise ImportError("training needs Lightning Fabric; pip install lightning-fabric")


__all__ = ["Fabric"]
