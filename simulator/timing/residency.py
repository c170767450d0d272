"""Which bytes an op finds in the last-level cache: reuse distance over the graph's tensors.

An operator that runs right after its input was written finds it in the cache; a layer's weights, last touched
one step ago, it does not. Nor is the memory of a new result always in the cache: an allocator hands out the block
freed last, warm when that was a moment ago, cold when a whole forward pass has kept its activations since. The
harness times both states (``cache`` = warm, cold); this module says how much of each node's traffic is cold, so that
the two can be mixed. Where the host itself computes, the code of an operator goes cold like data: it is counted as
one more tensor that every call of that operator reads.

Stack distance as in Mattson et al. 1970, with the traffic since the last touch standing for the distinct bytes
touched. A last-level cache does not keep the most recent bytes exactly: with random replacement a line survives d bytes
of traffic through a cache of C with probability exp(-d/C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..graph import Node

NEVER = -np.inf
CODE_BYTES = 2**20  # what fetching an operator's code costs in time, as bytes streamed: some 20 us at 40 GB/s


def cold_fractions(
    nodes: Sequence[Node], tensor_bytes: np.ndarray, cache_bytes: float, code_bytes: int = 0
) -> np.ndarray:
    """Share of the bytes that each node reads and writes that lie outside a cache of ``cache_bytes``.

    ``nodes`` in execution order, unrolled; ``code_bytes`` is the weight of an operator's code among its operands.
    The step is walked twice and the second walk counts, because a step follows a step. Shape [len(nodes)], from 0
    (all in the cache) to 1.
    """
    sizes = tensor_bytes.tolist()
    touched: dict[int, float] = {}
    blocks: dict[int, list[float]] = {}  # freed memory by size: when each block was touched, the last freed last
    cold = np.zeros(len(nodes))
    clock = 0.0
    called: dict[str, float] = {}  # operators: when each ran last
    made: set[int] = set()  # by the step itself, and not yet freed

    def gone(distance: float) -> float:
        return 1.0 - math.exp(-distance / cache_bytes)

    def free(tensor: int) -> None:
        blocks.setdefault(sizes[tensor], []).append(touched.pop(tensor))
        made.discard(tensor)

    for counted in (False, True):
        for index, node in enumerate(nodes):
            reads = set(node.reads)
            tensors = reads.union(node.writes)
            total = float(code_bytes)
            missing = code_bytes * gone(clock - called.get(node.source, NEVER))
            for tensor in tensors:
                size = sizes[tensor]
                if tensor not in touched:
                    block = blocks.get(size)
                    touched[tensor] = block.pop() if block else NEVER
                    if tensor not in reads:
                        made.add(tensor)
                moved = min(size, node.bytes_moved)
                total += moved
                missing += moved * gone(clock - touched[tensor] + size / 2)  # its own bytes pass too
            if counted and total:
                cold[index] = missing / total
            clock += total - code_bytes
            called[node.source] = clock
            for tensor in tensors:
                touched[tensor] = clock
            for tensor in node.frees:
                if tensor in touched:
                    free(tensor)
        for tensor in sorted(made):  # what a step leaves, its caller drops before the next
            free(tensor)
    return cold
