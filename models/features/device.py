"""Features of the device: what lets one model serve several, constant within one."""

from __future__ import annotations

import math

from ...datasets.devices import Device
from .pieces import Columns

COMPARED = tuple(f"device_{name}" for name in ("rate", "vector", "memory", "cache_size", "cache_rate", "units"))


def device_figures(device: Device, dtype: str) -> Columns:
    rate = device.tensor_rate(dtype) if device.supports(dtype) else device.vector_tflops
    figures = {
        "rate": rate,
        "vector": device.vector_tflops,
        "memory": device.memory_gbps,
        "cache_size": device.l2_mib,
        "cache_rate": device.l2_gbps,
        "units": device.compute_units,
        "clock": device.clock_mhz,
        "launch": device.launch_us,
        "dispatch": device.dispatch_us,
        "shared": device.shared_kib,
        "link": device.link_gbps,
        "pcie": device.pcie_gbps,
    }
    return {f"device_{name}": math.log2(max(value, 2.0**-10)) for name, value in figures.items()}


def device_distance(left: Device, right: Device, dtype: str) -> float:
    """Octaves between two devices: the largest ratio of their rates, bandwidths, caches and units."""
    mine, theirs = device_figures(left, dtype), device_figures(right, dtype)
    return max(abs(float(mine[name]) - float(theirs[name])) for name in COMPARED)
