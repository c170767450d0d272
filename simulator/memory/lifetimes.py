"""When tensors live: a walk over folded graphs.

A tensor lives from its first write, or from the start of the step when it is read before anything wrote it, to the node
that frees it, or to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph import ROLES, Graph, Node
from ..question.plan import Plan
from .breakdown import GIB, Memory

BUCKET_OF_ROLE = {
    "weight": "weights",
    "frozen": "weights",
    "gradient": "gradients",
    "optimizer_state": "optimizer",
    "activation": "activations",
    "cache": "cache",
    "input": "other",
    "buffer": "other",
}
BUCKETS = ("weights", "gradients", "optimizer", "activations", "cache", "other")
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CACHE, OTHER = range(len(BUCKETS))
BUCKET_INDEX = np.array([BUCKETS.index(BUCKET_OF_ROLE[role]) for role in ROLES])
BLOCK_BYTES = 512  # bytes to which torch's allocator rounds every block


@dataclass(frozen=True)
class Lifetimes:
    """When tensors live, in executed nodes. Times run from 0; ``begin`` -1 is before the step, ``end`` n after it.

    ``begin`` and ``end`` are by tensor id (a tensor lives while ``begin <= time <= end``), ``used`` tells those that
    nodes touch; ``offsets`` give the time at which each block of the graph begins.
    """

    graph: Graph
    begin: np.ndarray
    end: np.ndarray
    used: np.ndarray
    offsets: np.ndarray

    @property
    def count(self) -> int:
        """Number of executed nodes."""
        return int(self.offsets[-1])

    def node(self, time: int) -> Node:
        """The node, as in the first repetition, that runs at a time."""
        index = int(np.searchsorted(self.offsets, time, side="right")) - 1
        block = self.graph.blocks[index]
        return block.nodes[(time - int(self.offsets[index])) % len(block.nodes)]

    def living(self, sizes: np.ndarray, kinds: np.ndarray, number: int) -> np.ndarray:
        """Bytes alive during every node, [number of kinds, nodes], of tensors of each kind."""
        count = self.count
        change = np.zeros((number, count + 1))
        begin, end = np.maximum(self.begin[self.used], 0), np.minimum(self.end[self.used] + 1, count)
        np.add.at(change, (kinds[self.used], begin), sizes[self.used])
        np.add.at(change, (kinds[self.used], end), -sizes[self.used])
        return np.cumsum(change, axis=1)[:, :count]


def find_lifetimes(graph: Graph) -> Lifetimes:
    """The lifetime of every tensor, without unrolling blocks one node at a time."""
    total = graph.tensor_count
    lengths = [len(block.nodes) * block.repeat for block in graph.blocks]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(offsets[-1])
    read, written = (np.full(total, count, dtype=np.int64) for _ in range(2))
    end = np.full(total, -1, dtype=np.int64)
    for block, offset in zip(graph.blocks, offsets.tolist(), strict=False):
        repetitions = np.arange(block.repeat)
        for first, used in ((read, block.read), (written, block.written)):
            np.minimum.at(first, *used.over(repetitions, offset))
        for freed, which in block.freed:
            np.maximum.at(end, *freed.over(which, offset))
    begin = np.where(read <= written, -1, written)
    return Lifetimes(graph, begin, np.where(end < 0, count, end), np.minimum(read, written) < count, offsets)


def peak_memory(graph: Graph) -> Memory:
    """The largest sum of living tensors during the step, split by what they are for, and nothing else."""
    lifetimes = find_lifetimes(graph)
    living = lifetimes.living(graph.tensor_bytes, BUCKET_INDEX[graph.tensor_roles], len(BUCKETS))
    if not lifetimes.count:
        return memory_from_bytes(np.zeros(len(BUCKETS)))
    return memory_from_bytes(living[:, int(living.sum(axis=0).argmax())])


def memory_from_bytes(peak: np.ndarray) -> Memory:
    """The memory of living bytes by bucket; keys and values count as activations."""
    gib = dict(zip((f"{bucket}_gib" for bucket in BUCKETS), (peak / GIB).tolist(), strict=True))
    gib["activations_gib"] += gib.pop("cache_gib")
    total = float(peak.sum() / GIB)
    return Memory(peak_gib=total, allocated_gib=total, reserved_gib=total, **gib)


@dataclass(frozen=True)
class ChunkWalk:
    """A chunk's curve of living bytes [buckets, nodes], what its forward keeps, and what lives throughout.

    ``optimizing`` tells which of the executed nodes are the optimizer's [nodes].
    """

    lives: Lifetimes
    living: np.ndarray
    saved: float
    static: np.ndarray
    optimizing: np.ndarray


def walk_chunk(graph: Graph, plan: Plan) -> ChunkWalk:
    """The walk of a chunk's graph, as the last micro-batch runs it."""
    lifetimes = find_lifetimes(graph)
    phases = [np.tile([n.phase for n in block.nodes], block.repeat) for block in graph.blocks]
    phase = np.concatenate([np.zeros(0, dtype="<U1"), *phases])  # a chunk of no layers has no nodes
    kinds = BUCKET_INDEX[graph.tensor_roles]
    sizes = -(-graph.tensor_bytes // BLOCK_BYTES) * BLOCK_BYTES
    living = lifetimes.living(sizes, kinds, len(BUCKETS))
    living[OTHER] += _prefetch_bytes(graph, phase, plan)
    forward = np.flatnonzero(phase == "forward")
    last = int(forward[-1]) if len(forward) else -1
    crossing = (
        lifetimes.used
        & (kinds == ACTIVATIONS)
        & (lifetimes.begin >= 0)
        & (lifetimes.begin <= last)
        & (lifetimes.end > last)
    )
    persistent = lifetimes.used & ((lifetimes.begin < 0) | (kinds == GRADIENTS)) & (kinds != ACTIVATIONS)
    static = np.bincount(kinds[persistent], sizes[persistent], len(BUCKETS))
    return ChunkWalk(lifetimes, living, float(sizes[crossing].sum()), static, phase == "optimizer")


def _prefetch_bytes(graph: Graph, phase: np.ndarray, plan: Plan) -> np.ndarray:
    """Bytes of the next layer's weights, gathered ahead while a layer computes."""
    extra = np.zeros(len(phase))
    if "dp" not in plan.stack.overlap:
        return extra
    for name in ("forward", "backward"):
        gathered_bytes = [
            node.op.size_bytes
            for block in graph.blocks
            for node in block.nodes
            if block.repeat > 1 and node.phase == name and node.source == "fsdp.all_gather" and node.op is not None
        ]
        if gathered_bytes:
            extra[phase == name] = max(gathered_bytes)
    return extra
