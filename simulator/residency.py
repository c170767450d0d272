"""Which bytes an op finds in the last-level cache: reuse distance over the graph's tensors.

An operator that runs right after its input was written finds it in the cache; a layer's weights, last touched
one step ago, it does not. The harness times both states (``cache`` = warm, cold); this module says how much of
each node's input is cold, so that the two can be mixed. Stack distance as in Mattson et al. 1970, with the
traffic since the last touch standing for the distinct bytes touched (an upper bound).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .graph import Node


def cold_fractions(nodes: Sequence[Node], tensor_bytes: np.ndarray, cache_bytes: float) -> np.ndarray:
    """Share of each node's read bytes that left a cache of ``cache_bytes`` since they were last touched.

    ``nodes`` in execution order, unrolled. The step is walked twice and the second walk counts, because a step
    follows a step. Shape [len(nodes)], from 0 (all in the cache) to 1.
    """
    sizes = tensor_bytes.tolist()
    touched: dict[int, float] = {}
    clock = 0.0
    cold = np.zeros(len(nodes))
    for counted in (False, True):
        for index, node in enumerate(nodes):
            total = missing = 0.0
            for tensor in node.reads:
                size = sizes[tensor]
                distance = clock - touched.get(tensor, -np.inf)
                total += size
                missing += size - min(size, max(0.0, cache_bytes - distance))
            if counted and total:
                cold[index] = missing / total
            for tensor in {*node.reads, *node.writes}:
                clock += min(sizes[tensor], node.bytes_moved)
            for tensor in (*node.reads, *node.writes):
                touched[tensor] = clock
    return cold
