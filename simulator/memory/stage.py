"""Memory of a step: a liveness walk over folded graphs, and what one rank needs to run them.

A tensor lives from its first write, or from the start of the step when it is read before anything wrote it, to the node
that frees it, or to the end. A rank of a pipeline holds, beside what lives while it computes one micro-batch, what the
forward passes of the others in flight have kept for their backward passes (Narayanan et al. 2021, arXiv 2104.04473,
sec. 2.2). Three sums are told apart: *allocated* is what a framework's allocator has handed out
(``torch.cuda.max_memory_allocated``), *reserved* what it took from the device for that, and the peak is what must fit:
reserved, the CUDA context and the buffers of communicators. Option ``allocator`` replays the step through torch's
allocator (:mod:`.replay`) where a stack's usual share of slack is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ..graph import ROLES, Block, Graph, Node
from ..passes.micro_batches import micro_batch_variant
from ..question.plan import GROUPS, Plan, PlanError
from ..report.answer import GIB, Memory

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
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = range(len(BUCKETS))
BUCKET_OF = np.array([BUCKETS.index(BUCKET_OF_ROLE[role]) for role in ROLES])
Pairs = list[tuple[int, int]]  # (tensor, position)
ROUNDING = 512  # bytes to which torch's allocator rounds every block
CONTEXT_GIB = 0.5  # a CUDA context with its kernels
COMMUNICATOR_GIB = 0.15  # NCCL's channels of one communicator


@dataclass(frozen=True)
class Lives:
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


def lives(graph: Graph) -> Lives:
    """The lifetime of every tensor, without unrolling blocks one node at a time."""
    total = graph.tensor_count
    lengths = [len(block.nodes) * block.repeat for block in graph.blocks]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    count = int(offsets[-1])
    read, written = (np.full(total, count, dtype=np.int64) for _ in range(2))
    end = np.full(total, -1, dtype=np.int64)
    for block, offset in zip(graph.blocks, offsets.tolist(), strict=False):
        reads = [(t, p) for p, node in enumerate(block.nodes) for t in node.reads]
        writes = [(t, p) for p, node in enumerate(block.nodes) for t in node.writes]
        for first, pairs in ((read, reads), (written, writes)):
            ids, times = _placed(block, pairs, offset, np.arange(block.repeat))
            np.minimum.at(first, ids, times)
        for pairs, repetitions in _frees(block):
            ids, times = _placed(block, pairs, offset, repetitions)
            np.maximum.at(end, ids, times)
    used = np.minimum(read, written) < count
    begin = np.where(read <= written, -1, written)
    return Lives(graph, begin, np.where(end < 0, count, end), used, offsets)


def _placed(block: Block, pairs: Pairs, offset: int, repetitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and times of (tensor, position) pairs over repetitions of a block that begins at ``offset``."""
    if not pairs or not len(repetitions):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    table = np.array([(t, block.steps.get(t, 0), p) for t, p in pairs], dtype=np.int64)
    ids = table[:, :1] + table[:, 1:2] * repetitions
    times = offset + table[:, 2:] + len(block.nodes) * repetitions
    return ids.ravel(), times.ravel()


def _frees(block: Block) -> list[tuple[Pairs, np.ndarray]]:
    """What is freed where: usually, in the first and in the last repetition."""
    usual: Pairs = []
    first: Pairs = []
    last: Pairs = []
    for position, node in enumerate(block.nodes):
        usual += [(t, position) for t in node.frees]
        first += [(t, position) for t in block.uneven.get((0, position), node.frees)]
        last += [(t, position) for t in block.uneven.get((-1, position), node.frees)]
    ends = [(first, np.array([0]))]
    if block.repeat > 1:
        ends.append((last, np.array([block.repeat - 1])))
    return [(usual, np.arange(1, block.repeat - 1)), *ends]


def peak_memory(graph: Graph) -> Memory:
    """The largest sum of living tensors during the step, split by what they are for, and nothing else."""
    walk = lives(graph)
    living = walk.living(graph.tensor_bytes, BUCKET_OF[graph.tensor_roles], len(BUCKETS))
    if not walk.count:
        return _memory(np.zeros(len(BUCKETS)))
    return _memory(living[:, int(living.sum(axis=0).argmax())])


def _memory(peak: np.ndarray) -> Memory:
    gib = dict(zip((f"{bucket}_gib" for bucket in BUCKETS), (peak / GIB).tolist(), strict=True))
    total = float(peak.sum() / GIB)
    return Memory(peak_gib=total, allocated_gib=total, reserved_gib=total, **gib)


# --- one rank of a cluster -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkWalk:
    """A chunk's curve of living bytes [buckets, nodes], what its forward keeps, and what lives throughout."""

    lives: Lives
    living: np.ndarray
    saved: float
    static: np.ndarray
    optimizing: np.ndarray


def stage_memory(
    chunks: Sequence[Graph],
    in_flight: Sequence[int],
    plan: Plan,
    device: Device | None = None,
    walks: dict[int, ChunkWalk] | None = None,
) -> Memory:
    """Peak memory of the rank that runs ``chunks`` (each the graph of a step's only micro-batch).

    ``in_flight`` is the largest number of micro-batches of each chunk that are past their forward pass, or in it, and
    not past their backward pass. With a ``device`` the note of what to shrink names what would fit it. ``walks`` keeps
    what was found about a graph, by its identity, for the other stages that hold it.
    """
    known = {} if walks is None else walks
    for graph in chunks:
        if id(graph) not in known:
            known[id(graph)] = walk_chunk(_steady(graph, plan), plan)
    held = [known[id(graph)] for graph in chunks]
    waiting = sum(count * walk.saved for count, walk in zip(in_flight, held, strict=True))
    best, where = np.zeros(len(BUCKETS)), ""
    kept = 0.0
    for place, walk in enumerate(held):
        if not walk.lives.count:
            continue
        others = sum((other.static for at, other in enumerate(held) if at != place), np.zeros(len(BUCKETS)))
        extra = np.where(walk.optimizing, 0.0, max(waiting - walk.saved, 0.0))
        totals = walk.living.sum(axis=0) + extra + others.sum()
        time = int(totals.argmax())
        if totals[time] > best.sum():
            best = walk.living[:, time] + others
            best[ACTIVATIONS] += extra[time]
            where, kept = _place(walk.lives.node(time)), 0.0 if walk.optimizing[time] else waiting
    reserved = _replayed(held, in_flight, str(plan.options["allocator"])) if "allocator" in plan.options else None
    return _with_framework(best, where, kept, plan, device, reserved)


def _replayed(held: Sequence[ChunkWalk], in_flight: Sequence[int], allocator: str) -> int:
    """Bytes that torch's allocator reserves for these chunks (``native`` or ``expandable`` segments)."""
    from .allocator import Allocator
    from .replay import fullest_moment, replay

    if allocator not in ("native", "expandable"):
        raise PlanError(f"options.allocator={allocator!r} is not one of native, expandable")
    made = Allocator(expandable=allocator == "expandable")
    replay(made, held, fullest_moment(in_flight))
    return made.peak_reserved


def _steady(graph: Graph, plan: Plan) -> Graph:
    """The graph of the last micro-batch, which the most lives in."""
    return graph if plan.micro_batches == 1 else micro_batch_variant(graph, first=False, last=True)


def walk_chunk(graph: Graph, plan: Plan) -> ChunkWalk:
    """The walk of a chunk's graph, as the last micro-batch runs it."""
    walk = lives(graph)
    phases = [np.tile([n.phase for n in block.nodes], block.repeat) for block in graph.blocks]
    phase = np.concatenate([np.zeros(0, dtype="<U1"), *phases])  # a chunk of no layers has no nodes
    kinds = BUCKET_OF[graph.tensor_roles]
    stray = _stray_gradients(graph)
    used = walk.used.copy()
    used[stray] = False
    walk = replace(walk, used=used)
    sizes = -(-graph.tensor_bytes // ROUNDING) * ROUNDING
    living = walk.living(sizes, kinds, len(BUCKETS))
    living[OTHER] += _prefetched(graph, phase, plan)
    forward = np.flatnonzero(phase == "forward")
    last = int(forward[-1]) if len(forward) else -1
    crossing = used & (kinds == ACTIVATIONS) & (walk.begin >= 0) & (walk.begin <= last) & (walk.end > last)
    always = used & ((walk.begin < 0) | (kinds == GRADIENTS)) & (kinds != ACTIVATIONS)
    static = np.bincount(kinds[always], sizes[always], len(BUCKETS))
    return ChunkWalk(walk, living, float(sizes[crossing].sum()), static, phase == "optimizer")


def _stray_gradients(graph: Graph) -> np.ndarray:
    """Gradients that the optimizer names and no other node touches: those of other stages."""
    gradient = ROLES.index("gradient")
    own = np.zeros(graph.tensor_count, dtype=bool)
    for block in graph.blocks:
        for node in block.nodes:
            if node.phase != "optimizer":
                for tensor in {*node.reads, *node.writes}:
                    step = block.steps.get(tensor, 0)
                    own[tensor + step * np.arange(block.repeat if step else 1)] = True
    stray: np.ndarray = (graph.tensor_roles == gradient) & ~own
    return stray


def _prefetched(graph: Graph, phase: np.ndarray, plan: Plan) -> np.ndarray:
    """Bytes of the next layer's weights, gathered ahead while a layer computes."""
    extra = np.zeros(len(phase))
    if "dp" not in plan.stack.overlap:
        return extra
    for name in ("forward", "backward"):
        ahead = [
            node.op.size_bytes
            for block in graph.blocks
            for node in block.nodes
            if block.repeat > 1 and node.phase == name and node.source == "fsdp.all_gather" and node.op is not None
        ]
        if ahead:
            extra[phase == name] = max(ahead)
    return extra


def _place(node: Node) -> str:
    return f"{node.phase} {node.path or node.source} ({node.op.kind if node.op else node.source})"


def _with_framework(
    best: np.ndarray, where: str, waiting: float, plan: Plan, device: Device | None, replayed: int | None = None
) -> Memory:
    """The memory of a rank with its allocator's slack (``replayed``, or a usual share), context and communicators."""
    stack = plan.stack
    allocated = float(best.sum())
    reserved = allocated * (1.0 + stack.fragmentation) if replayed is None else max(float(replayed), allocated)
    groups = sum(plan.group(name).ranks > 1 for name in GROUPS if name != "dp")
    context = (stack.context_gib or CONTEXT_GIB) * GIB + groups * COMMUNICATOR_GIB * GIB
    by_class = {
        "weights": best[WEIGHTS],
        "gradients": best[GRADIENTS],
        "optimizer states": best[OPTIMIZER],
        "activations kept for the backward pass": min(waiting, best[ACTIVATIONS]),
        "activations of the moment": max(best[ACTIVATIONS] - waiting, 0.0),
        "gathered weights and buffers": best[OTHER],
        "allocator": reserved - allocated,
        "context and communicators": context,
    }
    made = _memory(best)
    memory = replace(
        made,
        peak_gib=(reserved + context) / GIB,
        other_gib=made.other_gib + (reserved - allocated + context) / GIB,
        allocated_gib=allocated / GIB,
        reserved_gib=reserved / GIB,
        where=where,
        by_class={name: float(size) / GIB for name, size in by_class.items()},
    )
    if device is None or memory.peak_gib <= device.memory_gib:
        return memory
    return replace(memory, advice=advice(memory, plan, device))


def advice(memory: Memory, plan: Plan, device: Device) -> str:
    """Which class of tensors to shrink so that a step fits, largest first, and what would do."""
    over = memory.peak_gib - device.memory_gib
    p = plan.parallel
    shards = plan.group("dp_cp").ranks
    kept = memory.by_class.get("activations kept for the backward pass", 0.0)
    state = memory.weights_gib + memory.gradients_gib
    everything, whole = state + memory.optimizer_gib, 1 - 1 / shards
    options = [
        (0.9 * kept * (plan.recompute != "full"), f"activations {kept:.1f} GiB: recompute=full"),
        (memory.activations_gib / 2, f"activations {memory.activations_gib:.1f} GiB: half the micro_batch"),
        (
            memory.optimizer_gib * whole * (p.zero_stage < 1),
            f"optimizer {memory.optimizer_gib:.1f} GiB: parallel.zero_stage=1",
        ),
        (
            (state + memory.optimizer_gib * (p.zero_stage < 1)) * whole * (p.zero_stage < 3),
            f"weights and gradients {state:.1f} GiB: parallel.zero_stage=3",
        ),
        (everything / 2, f"weights, gradients and optimizer {everything:.1f} GiB: tp={2 * p.tp} or pp={2 * p.pp}"),
    ]
    enough = [option for option in options if option[0] >= over]
    chosen = [min(enough)[1]] if enough else [text for _, text in sorted(options, reverse=True)[:3]]
    return f"{over:.1f} GiB too much for {device.memory_gib:g} GiB; shrink " + " and ".join(chosen)
