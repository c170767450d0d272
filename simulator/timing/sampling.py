"""The draw of the next token from the logits: sorted, as engines did top-p sampling before they had kernels without a
sort, or drawn by temperature alone with its log-prob, as trainers ask of an engine.

FasterTransformer's ``invokeBatchTopPSampling`` (sampling_topp_kernels.cu) sorts the probabilities of each sequence
by CUB's segmented radix sort: one block of threads sorts one sequence, and the clock of one compute unit decides.
Of 32-bit keys with indices it takes 861 us for one segment of 200,000 and 359 us for 16 of 65,000 on an RTX PRO 6000 at
2.6 GHz (llama.cpp, ARGSORT in test-backend-ops): 11 and 14 clocks a key.

vLLM draws without top-k and top-p by PyTorch's operators, on every tensor rank (v1/sample/sampler.py and
v1/sample/ops/topk_topp_sampler.py, ``forward_native``). Bytes of a logit that they read and write, each row once:
log-softmax of 16 bits in fp32 6, copy in fp32 6, temperature 8, softmax 8, exponential noise 4, division by it 12,
argmax 4, rank of the drawn token 4.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ..graph import Node
from .costs import Costs

TOP_P, LOG_PROBS = "top_p", "log_probs"
SORT_CLOCKS = 12.0  # a key
DRAW_BYTES = (6, 6, 8, 8, 4, 12, 4, 4)  # of a logit, by kernel
HEADS = ("lm_head", "embed_out", "output_layer")  # modules that make logits


def add_draw(costs: Costs, sampling: str, tensor_ranks: int, device: Device) -> Costs:
    """The costs with the draw after logits; the very same where none is asked for (``options.sampling``)."""
    if not sampling:
        return costs
    draw = _sort_us if sampling == TOP_P else _passes_us
    added_us = [draw(node, tensor_ranks, device) if _makes_logits(node) else 0.0 for node in costs.nodes]
    return replace(costs, kernel_us=costs.kernel_us + np.array(added_us))


def _makes_logits(node: Node) -> bool:
    return node.kind == "gemm" and node.path.rpartition(".")[2] in HEADS


def _sort_us(node: Node, tensor_ranks: int, device: Device) -> float:
    """Microseconds of the sort of the logits that a node makes: as many rounds as each unit has sequences."""
    assert node.op is not None
    rounds = math.ceil(node.op.m * node.op.batch / device.compute_units)
    return rounds * node.op.n * tensor_ranks * SORT_CLOCKS / device.clock_mhz


def _passes_us(node: Node, tensor_ranks: int, device: Device) -> float:
    """Microseconds of the kernels that draw from the logits that a node makes."""
    assert node.op is not None
    logits = node.op.m * node.op.batch * node.op.n * tensor_ranks
    return len(DRAW_BYTES) * device.launch_us + logits * sum(DRAW_BYTES) / device.memory_gbps * 1e-3
