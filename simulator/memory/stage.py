"""What one rank needs of its device to run its chunks of a model.

A rank of a pipeline holds, beside what lives while it computes one micro-batch, what the forward passes of the others
in flight have kept for their backward passes (Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2), and the keys and
values of the others under way. Three sums are told apart: *allocated* is what a framework's allocator has handed out
(``torch.cuda.max_memory_allocated``), *reserved* what it took from the device for that, and the peak is what must fit:
reserved, the CUDA context and the buffers of communicators. Option ``allocator`` replays the step through torch's
allocator (:mod:`.replay`) where a stack's usual share of slack is not enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ..graph import Graph, Node
from ..passes.micro_batches import micro_batch_variant
from ..question.plan import GROUPS, Plan
from .breakdown import GIB, Memory
from .lifetimes import (
    ACTIVATIONS,
    BUCKETS,
    CACHE,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    ChunkWalk,
    memory_from_bytes,
    walk_chunk,
)

CONTEXT_GIB = 0.5  # a CUDA context with its kernels: assumed, where no stack says more (sources in conf/stack)
COMMUNICATOR_GIB = 0.15  # NCCL's channels of one communicator: assumed, some 16 channels of 4 to 8 MiB
GRADIENT_GROUPS = ("dp", "dp_cp", "edp")  # groups that sum gradients; those that serve have none


def stage_memory(
    chunks: Sequence[Graph],
    in_flight: Sequence[int],
    plan: Plan,
    device: Device | None = None,
    walks: dict[int, ChunkWalk] | None = None,
) -> Memory:
    """Peak memory of the rank that runs ``chunks`` (each the graph of a step's only micro-batch).

    ``in_flight`` is the largest number of micro-batches of each chunk that are past their forward pass, or in it, and
    not past their backward pass. Keys and values are those of all micro-batches of the plan.
    ``walks`` keeps what was found about a graph, by its
    identity, for the other stages that hold it.
    """
    walks_by_graph = {} if walks is None else walks
    for graph in chunks:
        if id(graph) not in walks_by_graph:
            walks_by_graph[id(graph)] = walk_chunk(_last_micro_batch(graph, plan), plan)
    chunk_walks = [walks_by_graph[id(graph)] for graph in chunks]
    saved_bytes = sum(count * walk.saved for count, walk in zip(in_flight, chunk_walks, strict=True))
    peak, where = np.zeros(len(BUCKETS)), ""
    kept_bytes = 0.0
    for position, walk in enumerate(chunk_walks):
        if not walk.lives.count:
            continue
        other_static = sum(
            (other_walk.static for index, other_walk in enumerate(chunk_walks) if index != position),
            np.zeros(len(BUCKETS)),
        )
        extra = np.where(walk.optimizing, 0.0, max(saved_bytes - walk.saved, 0.0))
        totals = walk.living.sum(axis=0) + extra + other_static.sum()
        time = int(totals.argmax()) if len(totals) else -1
        if time >= 0 and totals[time] > peak.sum():
            peak = walk.living[:, time] + other_static
            peak[ACTIVATIONS] += extra[time]
            where, kept_bytes = _describe_node(walk.lives.node(time)), 0.0 if walk.optimizing[time] else saved_bytes
    peak[CACHE] += (plan.micro_batches - 1) * sum(walk.living[CACHE].max(initial=0.0) for walk in chunk_walks)
    allocator = plan.settings.allocator
    reserved = _replay_reserved(chunk_walks, in_flight, allocator) if allocator else None
    trains = any(len(walk.optimizing) and walk.optimizing.any() for walk in chunk_walks) or bool(peak[GRADIENTS])
    return _add_framework(peak, where, kept_bytes, plan, device, trains, reserved)


def _replay_reserved(walks: Sequence[ChunkWalk], in_flight: Sequence[int], allocator: str) -> int:
    """Bytes that torch's allocator reserves for these chunks (``native`` or ``expandable`` segments)."""
    from .allocator import Allocator
    from .replay import fullest_moment, replay

    device_allocator = Allocator(expandable=allocator == "expandable")
    replay(device_allocator, walks, fullest_moment(in_flight))
    return device_allocator.peak_reserved


def _last_micro_batch(graph: Graph, plan: Plan) -> Graph:
    """The graph of the last micro-batch, which the most lives in."""
    return graph if plan.micro_batches == 1 else micro_batch_variant(graph, first=False, last=True)


def _describe_node(node: Node) -> str:
    return f"{node.phase} {node.path or node.source} ({node.op.kind if node.op else node.source})"


def _add_framework(
    peak: np.ndarray,
    where: str,
    saved_bytes: float,
    plan: Plan,
    device: Device | None,
    is_training: bool,
    replayed: int | None = None,
) -> Memory:
    """The memory of a rank with its allocator's slack (``replayed``, or a usual share), context and communicators."""
    stack = plan.stack
    allocated = float(peak.sum())
    reserved = allocated * (1.0 + stack.fragmentation) if replayed is None else max(float(replayed), allocated)
    groups = sum(
        plan.group(name).ranks > 1 for name in GROUPS if name not in (("dp",) if is_training else GRADIENT_GROUPS)
    )
    context = (stack.context_gib or CONTEXT_GIB) * GIB + groups * COMMUNICATOR_GIB * GIB
    if device is not None and device.synchronous:
        context = 0.0
    by_class = {
        "weights": peak[WEIGHTS],
        "gradients": peak[GRADIENTS],
        "optimizer states": peak[OPTIMIZER],
        "KV cache": peak[CACHE],
        "activations kept for the backward pass": min(saved_bytes, peak[ACTIVATIONS]) if is_training else 0.0,
        "activations of the moment": max(peak[ACTIVATIONS] - saved_bytes, 0.0) if is_training else peak[ACTIVATIONS],
        "gathered weights and buffers": peak[OTHER],
        "allocator": reserved - allocated,
        "context and communicators": context,
    }
    memory = memory_from_bytes(peak)
    return replace(
        memory,
        peak_gib=(reserved + context) / GIB,
        other_gib=memory.other_gib + (reserved - allocated + context) / GIB,
        allocated_gib=allocated / GIB,
        reserved_gib=reserved / GIB,
        where=where,
        by_class={name: float(size) / GIB for name, size in by_class.items() if size > 0},
    )
