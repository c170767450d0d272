"""Attention kernels older than those that opcast has times of.

Tables of serving engines timed each GPU's own kernels: FlashAttention-3 and TensorRT-LLM's on Hopper, FlashAttention-2
on Ampere and Ada. Frameworks that train often run older ones. FlashAttention-3's paper (arXiv 2407.08608, abstract)
finds it on H100 1.5 to 2 times faster forward than FlashAttention-2, which was written for Ampere, and 1.5 to 1.75
times backward: the geometric means are taken. FlashAttention-2's paper (arXiv 2307.08691) has it around twice as fast
as FlashAttention (abstract), and 1.3 to 2.5 times as fast as FlashAttention in Triton (sec. 4.1, again the geometric
mean); neither uses what is new in Hopper, so that this is taken to hold there too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...datasets.devices import Device
from ...models.choice import BEYOND, OWN
from .costs import Costs, longer

AS_RUN = (OWN, BEYOND)  # clauses under which the very kernel was timed
FORWARD, BACKWARD = "attention_prefill", "attention_backward"
FLASH3_SPEEDUP = {FORWARD: 1.73, BACKWARD: 1.62}  # over FlashAttention-2, on Hopper
FLASH2_SPEEDUP = {"flash1": 2.0, "flash1_triton": 1.80}  # over FlashAttention, of forward and backward passes
# times that a kernel takes longer than the one in the tables, by Stack.attention, architecture and kind of op
SLOWER: Mapping[str, Mapping[str, Mapping[str, float]]] = {
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


def as_run(costs: Costs, attention: str, device: Device) -> Costs:
    """The costs with the attention that a framework runs (``Stack.attention``); the very same where tables have it.

    Own rows of the kernel that it launches are as they were measured.
    """
    slower = SLOWER.get(attention, {}).get(device.architecture, {})
    if not slower:
        return costs
    asked = zip(costs.nodes, costs.witness.tolist(), strict=True)
    ops = [None if witness.clause in AS_RUN else node.op for node, witness in asked]
    return longer(costs, np.array([slower.get(op.kind, 1.0) if op else 1.0 for op in ops]))
