"""Products of a library older than the one in the tables.

Tables of products are of 2025. Frameworks of 2023 and 2024 called the cuBLAS of CUDA 12.1 (the wheels of torch 2.1 to
2.3). Vidur's layers were timed under such a wheel (Sarathi-Serve, which it profiles, installs torch 2.3 of cu121): on
H100 16-bit products of 50 to 300 us take 1.13 times as long as by the tables in the median, half of them 1.05 to 1.23,
those below and above as well, so that it is no clock. On A100, whose kernels are older than both libraries, the same
lab's take 1.01 times as long (``tests/benchmarks/library_age.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...datasets.devices import Device
from .costs import Costs, longer

SIXTEEN_BITS = ("bf16", "fp16")
# times that a 16-bit product takes longer than in the tables, by Stack.products and architecture
SLOWER: Mapping[str, Mapping[str, float]] = {"cublas_12_1": {"hopper": 1.13}}


def by_library(costs: Costs, products: str, device: Device) -> Costs:
    """The costs with the library that a framework called (``Stack.products``); the very same where tables have it."""
    slower = SLOWER.get(products, {}).get(device.architecture, 1.0)
    if slower == 1.0:
        return costs
    ops = [node.op for node in costs.nodes]
    product = [op is not None and op.kind == "gemm" and op.dtype in SIXTEEN_BITS for op in ops]
    return longer(costs, np.where(product, slower, 1.0))
