"""Features of the device: what lets one model serve several, constant within one."""

from __future__ import annotations

import numpy as np

from ...datasets.devices import Device
from .pieces import Columns


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
    return {f"device_{name}": float(np.log2(max(value, 2.0**-10))) for name, value in figures.items()}
