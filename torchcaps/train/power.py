"""What the device of a process takes while it trains, from the counters of the driver or of the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")


class Counter:
    """What the device of a process takes: CUDA's by its driver, a CPU's by the kernel where it may be read."""

    def __init__(self, device: torch.device, local_rank: int = 0):
        self.device, self.counts = device, device.type == "cuda" or local_rank == 0  # a machine's CPU counts once
        self.before = self._read()

    def since(self) -> float | None:
        """Joules since the last call; None where nothing tells."""
        before, self.before = self.before, self._read()
        if not self.counts:
            return 0.0
        if before is None or self.before is None or self.before.keys() != before.keys():
            return None
        total = 0.0
        for name, (now, around) in self.before.items():
            total += now - before[name][0] if now >= before[name][0] else now - before[name][0] + around
        return total

    def _read(self) -> dict[str, list[float]] | None:
        """Each counter, and where it starts anew."""
        if self.device.type == "cuda":
            number = torch.cuda.current_device() if self.device.index is None else self.device.index
            found = joules([number])
            return None if found is None else {"cuda": [found, 0.0]}
        if self.device.type != "cpu":
            return None
        try:
            return {
                zone.name: [int((zone / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj")]
                for zone in POWERCAP.glob("intel-rapl:*")
                if zone.name.count(":") == 1
            } or None
        except (OSError, ValueError):
            return None


def joules(numbers: Sequence[int]) -> float | None:
    """What these CUDA devices, each as a whole, have taken since their driver was loaded; None where nothing tells."""
    total = 0
    try:
        for number in numbers:
            driver = ctypes.CDLL("libnvidia-ml.so.1")
            name = f"GPU-{torch.cuda.get_device_properties(number).uuid}".encode()
            handle, count = ctypes.c_void_p(), ctypes.c_ulonglong()
            if (
                driver.nvmlInit_v2()
                or driver.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
                or driver.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count))
            ):
                return None
            total += count.value
    except (OSError, AttributeError, AssertionError, RuntimeError):  # no such library, function or device
        return None
    return total / 1000 if numbers else None
