"""The next token drawn from a sorted vocabulary, as engines did top-p sampling before they had kernels without a sort.

FasterTransformer's ``invokeBatchTopPSampling`` (sampling_topp_kernels.cu) sorts the probabilities of each sequence
by CUB's segmented radix sort: one block of threads sorts one sequence, and the clock of one compute unit decides.
Of 32-bit keys with indices it takes 861 us for one segment of 200,000 and 359 us for 16 of 65,000 on an RTX PRO 6000 at
2.6 GHz (llama.cpp, ARGSORT in test-backend-ops): 11 and 14 clocks a key.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ..graph import Node
from .costs import Costs

TOP_P = "top_p"
SORT_CLOCKS = 12.0  # a key
HEADS = ("lm_head", "embed_out", "output_layer")  # modules that make logits


def add_top_p_sort(costs: Costs, sampling: str, tensor_ranks: int, device: Device) -> Costs:
    """The costs with the draw after logits; the very same where none is asked for (``options.sampling``)."""
    if sampling != TOP_P:
        return costs
    return replace(
        costs, kernel_us=costs.kernel_us + np.array([_sort(node, tensor_ranks, device) for node in costs.nodes])
    )


def _sort(node: Node, tensor_ranks: int, device: Device) -> float:
    """Microseconds of the sort of the logits that a node makes: as many rounds as each unit has sequences."""
    op = node.op
    if op is None or op.kind != "gemm" or node.path.rpartition(".")[2] not in HEADS:
        return 0.0
    rounds = math.ceil(op.m * op.batch / device.compute_units)
    return rounds * op.n * tensor_ranks * SORT_CLOCKS / device.clock_mhz
