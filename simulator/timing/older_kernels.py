"""Kernels older than those that opcast has times of: products and attention of earlier libraries.

**Products.** Tables of products are of 2025. Frameworks of 2023 and 2024 called the cuBLAS of CUDA 12.1 (the wheels of
torch 2.1 to 2.3). Vidur's layers were timed under such a wheel (Sarathi-Serve, which it profiles, installs torch 2.3 of
cu121): on H100 16-bit products of 50 to 300 us take 1.13 times as long as by the tables in the median, half of them
1.05 to 1.23, those below and above as well, so that it is no clock. On A100, whose kernels are older than both
libraries, the same lab's take 1.01 times as long (``tests/benchmarks/library_age.py``).

**Attention.** Tables of serving engines timed each GPU's own kernels: FlashAttention-3 and TensorRT-LLM's on Hopper,
FlashAttention-2 on Ampere and Ada. Frameworks that train often run older ones. FlashAttention-3's paper (arXiv
2407.08608, abstract) finds it on H100 1.5 to 2 times faster forward than FlashAttention-2, which was written for
Ampere, and 1.5 to 1.75 times backward: the geometric means are taken. FlashAttention-2's paper (arXiv 2307.08691) has
it around twice as fast as FlashAttention (abstract), and 1.3 to 2.5 times as fast as FlashAttention in Triton (sec.
4.1, again the geometric mean); neither uses what is new in Hopper, so that this is taken to hold there too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...datasets.devices import Device
from ...models.choice import BEYOND, OWN
from .costs import Costs, multiply_kernels

SIXTEEN_BITS = ("bf16", "fp16")
# times that a 16-bit product takes longer than in the tables, by Stack.products and architecture
SLOWER_PRODUCTS: Mapping[str, Mapping[str, float]] = {"cublas_12_1": {"hopper": 1.13}}

TIMED_KERNEL = (OWN, BEYOND)  # clauses under which the very kernel was timed
FORWARD, BACKWARD = "attention_prefill", "attention_backward"
FLASH3_SPEEDUP = {FORWARD: 1.73, BACKWARD: 1.62}  # over FlashAttention-2, on Hopper
FLASH2_SPEEDUP = {"flash1": 2.0, "flash1_triton": 1.80}  # over FlashAttention, of forward and backward passes
# times that a kernel takes longer than the one in the tables, by Stack.attention, architecture and kind of op
SLOWER_ATTENTION: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "flash2": {"hopper": FLASH3_SPEEDUP},
    **{
        name: {
            "ampere": {FORWARD: speedup, BACKWARD: speedup},
            "ada": {FORWARD: speedup, BACKWARD: speedup},
            "hopper": {kind: speedup * of_flash3 for kind, of_flash3 in FLASH3_SPEEDUP.items()},
        }
        for name, speedup in FLASH2_SPEEDUP.items()
    },
}


def slow_products(costs: Costs, products: str, device: Device) -> Costs:
    """The costs with the library that a framework called (``Stack.products``); the very same where tables have it."""
    slower = SLOWER_PRODUCTS.get(products, {}).get(device.architecture, 1.0)
    if slower == 1.0:
        return costs
    ops = [node.op for node in costs.nodes]
    product = [op is not None and op.kind == "gemm" and op.dtype in SIXTEEN_BITS for op in ops]
    return multiply_kernels(costs, np.where(product, slower, 1.0))


def slow_attention(costs: Costs, attention: str, device: Device) -> Costs:
    """The costs with the attention that a framework runs (``Stack.attention``); the very same where tables have it.

    Own rows of the kernel that it launches are as they were measured.
    """
    slower = SLOWER_ATTENTION.get(attention, {}).get(device.architecture, {})
    if not slower:
        return costs
    pairs = zip(costs.nodes, costs.witness.tolist(), strict=True)
    ops = [None if witness.clause in TIMED_KERNEL else node.op for node, witness in pairs]
    return multiply_kernels(costs, np.array([slower.get(op.kind, 1.0) if op else 1.0 for op in ops]))
