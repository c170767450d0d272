"""Peak memory of a step: a liveness walk over the graph's tensors."""

from __future__ import annotations

import numpy as np

from .graph import ROLES, Graph
from .report import GIB, Memory

BUCKET_OF_ROLE = {
    "weight": "weights",
    "frozen": "weights",
    "gradient": "gradients",
    "optimizer_state": "optimizer",
    "activation": "activations",
    "cache": "activations",
    "input": "other",
    "buffer": "other",
}
BUCKETS = ("weights", "gradients", "optimizer", "activations", "other")


def peak_memory(graph: Graph) -> Memory:
    """The largest sum of living tensors during the step, split by what they are for.

    A tensor lives from its first write, or from the start of the step when it is read before anything wrote
    it, to the node that frees it, or to the end.
    """
    sizes = graph.tensor_bytes.tolist()
    bucket = [BUCKETS.index(BUCKET_OF_ROLE[ROLES[role]]) for role in graph.tensor_roles.tolist()]
    living = np.zeros(len(BUCKETS))
    events: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # (begins, ends) per node
    seen: set[int] = set()
    for node in graph.nodes():
        for tensor in node.reads:
            if tensor not in seen:  # read before anything wrote it: there from the start
                seen.add(tensor)
                living[bucket[tensor]] += sizes[tensor]
        begins = tuple(t for t in node.writes if t not in seen)
        seen.update(begins)
        events.append((begins, node.frees))
    peak = living.copy()
    for begins, ends in events:
        for tensor in begins:
            living[bucket[tensor]] += sizes[tensor]
        if living.sum() > peak.sum():
            peak = living.copy()
        for tensor in ends:
            living[bucket[tensor]] -= sizes[tensor]
    gib = dict(zip(BUCKETS, (peak / GIB).tolist(), strict=True))
    return Memory(
        peak_gib=float(peak.sum() / GIB),
        weights_gib=gib["weights"],
        gradients_gib=gib["gradients"],
        optimizer_gib=gib["optimizer"],
        activations_gib=gib["activations"],
        other_gib=gib["other"],
    )
