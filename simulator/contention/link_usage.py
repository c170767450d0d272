"""What the communication of a step uses of a cluster's links: patterns, bytes and latencies of all that it runs.

A step says what communicates when (:class:`Communication`); the engine of flows says over which links. Ops of one stage
that differ in nothing but their bytes are one pattern (:mod:`..network.timeline_sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op, make_op
from ..engines.flow import FAMILIES, FlowEngine
from ..graph import Node
from ..network.timeline_sharing import Patterns, Traffic, Usage
from ..question.plan import Plan
from ..timing.costs import Costs
from ..timing.phases import Variant, place_phase, select_nodes

MIN_STRETCH = 1e-6  # by which a communication may take longer than alone and count as unhindered

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # nodes that communicate, when each starts, how long it lasts


class Slot(NamedTuple):
    """A stored node that communicates: part of the model, variant of the micro-batch, position among its nodes."""

    part: int
    variant: Variant
    node: int


class Send(NamedTuple):
    """Transfers from tasks of stages to others [n]: by stage, chunk and micro-batch of the sender."""

    back: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    other: np.ndarray
    size_bytes: np.ndarray
    start_us: np.ndarray
    lasts_us: np.ndarray


class Collective(NamedTuple):
    """Executions of nodes that communicate [n]: ``slot`` points into the slots they belong to."""

    slot: np.ndarray
    stage: np.ndarray
    start_us: np.ndarray
    lasts_us: np.ndarray


@dataclass(frozen=True, eq=False)
class Communication:
    """All communication of a step: ``slots`` with their nodes, executions of them, and sends."""

    slots: list[Slot]
    nodes: list[Node]
    collectives: Collective
    sends: Send

    @cached_property
    def ops(self) -> list[Op]:
        """The op of each slot."""
        return [node.op for node in self.nodes if node.op is not None]

    @cached_property
    def previous(self) -> np.ndarray:
        """What each collective follows on its stream of its stage, -1 for the first and for sends [n]."""
        names = sorted({node.stream for node in self.nodes})
        collectives = self.collectives
        stream = np.array([names.index(node.stream) for node in self.nodes], dtype=np.int64)[collectives.slot]
        order = np.lexsort((collectives.start_us, stream, collectives.stage))
        same = (np.diff(collectives.stage[order]) == 0) & (np.diff(stream[order]) == 0)
        previous = np.full(len(collectives.slot) + len(self.sends.stage), -1)
        previous[order[1:][same]] = order[:-1][same]
        return previous


def communicates(op: Op | None) -> bool:
    """Whether an op moves bytes between devices."""
    return op is not None and KINDS[op.kind].family in FAMILIES


def phase_spans(costs: Costs, phase: str, plan: Plan, device: Device) -> Spans:
    """What of a phase communicates, from its own start."""
    selection = select_nodes(costs, phase)
    moves = np.array([communicates(costs.nodes[i].op) for i in selection.tolist()], dtype=bool)
    if not moves.any():
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    placement = place_phase(costs, phase, plan, device)
    communicating = moves[placement.node]
    return (
        selection[placement.node[communicating]],
        placement.start_us[communicating],
        (placement.end_us - placement.start_us)[communicating],
    )


class Uses(NamedTuple):
    """Of every communication of a step, collectives first [n]: its pattern, bytes, and latency before they move.

    Times are those of the slowest stage. On this one the bytes take a ``share`` of that, and all of it no less than
    ``minimum`` of it, which is without faults, or where nothing blocks.
    """

    patterns: Patterns
    pattern: np.ndarray
    size_bytes: np.ndarray
    still_us: np.ndarray
    share: np.ndarray
    minimum: np.ndarray


def link_uses(communication: Communication, plan: Plan, flows: FlowEngine) -> Uses:
    """What all communication of a step uses of the links."""
    devices = [plan.stage_devices(stage) for stage in range(plan.parallel.pp)]
    number: dict[tuple[object, int], int] = {}
    usages: list[Usage] = []
    kinds: list[object] = []

    def pattern_number(kind: object, stage: int, usage: Usage) -> int:
        if (kind, stage) not in number:
            number[kind, stage] = len(usages)
            usages.append(usage)
            kinds.append(kind)
        return number[kind, stage]

    collectives, sends_ = communication.collectives, communication.sends
    pairs, which = np.unique(np.stack([collectives.slot, collectives.stage]), axis=1, return_inverse=True)
    patterns_moved = []
    for slot, stage in pairs.T.tolist():
        kind, usage, moved_bytes = flows.usage(communication.ops[slot], devices[stage])
        patterns_moved.append((pattern_number(kind, stage, usage), moved_bytes))
    ways, way = np.unique(np.stack([sends_.stage, sends_.other]), axis=1, return_inverse=True)
    sends = []
    for stage, receiver in ways.T.tolist():
        near = "near" if plan.neighbours(stage, receiver) else "far"
        sends.append(pattern_number((near, receiver), stage, flows.sends(devices[stage], devices[receiver])))
    pattern = np.array([pattern_id for pattern_id, _ in patterns_moved], dtype=np.int64)[which.ravel()]
    pattern = np.concatenate([pattern, np.array(sends, dtype=np.int64)[way.ravel()]])
    size = np.array([moved_bytes for _, moved_bytes in patterns_moved], dtype=float)[which.ravel()]
    ops, op = _send_ops(sends_, plan)
    still = np.concatenate([flows.still_us(communication.ops)[collectives.slot], flows.still_us(ops)[op]])
    stretch = _stretches(flows, communication.ops, collectives.slot, ops, op)
    healthy = _stretches(flows.with_faults(()), communication.ops, collectives.slot, ops, op) if flows.faults else 1.0
    patterns = Patterns(usages, flows.topology.bandwidth_gbps)
    return Uses(
        patterns,
        pattern,
        np.concatenate([size, sends_.size_bytes]),
        still,
        _stage_shares(patterns, kinds)[pattern],
        healthy / stretch,
    )


def _stage_shares(patterns: Patterns, kinds: Sequence[object]) -> np.ndarray:
    """What the bytes of each pattern take, of what those of its slowest like on another stage do [patterns]."""
    slowest: dict[object, float] = {}
    names = [kind[0] if isinstance(kind, tuple) and kind[0] in ("near", "far") else kind for kind in kinds]
    for name, us in zip(names, patterns.us_per_byte.tolist(), strict=True):
        slowest[name] = max(us, slowest.get(name, 0.0))
    slowest_us = np.array([slowest[name] for name in names])
    return np.divide(patterns.us_per_byte, slowest_us, out=np.ones(len(slowest_us)), where=patterns.us_per_byte > 0)


def _stretches(
    flows: FlowEngine, ops: Sequence[Op], slot: np.ndarray, sent: Sequence[Op], way: np.ndarray
) -> np.ndarray:
    """The stretch of every communication, collectives of a slot first [n]."""
    return np.concatenate([flows.stretches(ops)[slot], flows.stretches(sent)[way]])


def _send_ops(sent: Send, plan: Plan) -> tuple[list[Op], np.ndarray]:
    """The distinct ops among sends, and which of them each is [n]."""
    ways, which = np.unique(np.stack([sent.stage, sent.other, np.round(sent.size_bytes)]), axis=1, return_inverse=True)
    links = {True: plan.cluster.link, False: plan.cluster.fabric}
    ops = []
    for stage, receiver, size in ways.T.astype(np.int64).tolist():
        near = plan.neighbours(stage, receiver)
        ops.append(make_op("send_recv", size_bytes=size, ranks=2, ranks_per_node=1 + near, link=links[near]))
    return ops, which.ravel()


def build_traffic(communication: Communication, uses: Uses, pace: np.ndarray, sends_us: np.ndarray) -> Traffic:
    """What moves when: starts are those of the present placing, lengths those alone (``pace`` by slot, of sends us)."""
    collectives, sends = communication.collectives, communication.sends
    slowest = np.concatenate([collectives.lasts_us / pace[collectives.slot], sends_us])
    still = np.minimum(uses.still_us, slowest)
    moving = np.maximum((slowest - still) * uses.share, slowest * np.minimum(uses.minimum, 1.0) - still)
    return Traffic(
        uses.pattern, np.concatenate([collectives.start_us, sends.start_us]), still, moving, communication.previous
    )


def measure_pace(communication: Communication, pace: np.ndarray, took_us: np.ndarray) -> np.ndarray:
    """How many times longer than the engine says the executions of each slot take together [slots].

    ``pace`` is what they were placed with.
    """
    collectives, count = communication.collectives, len(communication.slots)
    sums = np.bincount(collectives.slot, collectives.lasts_us / pace[collectives.slot], count)
    pace_now: np.ndarray = np.bincount(collectives.slot, took_us[: len(collectives.slot)], count) / np.maximum(
        sums, 1e-300
    )
    return np.where(np.abs(pace_now - 1.0) > MIN_STRETCH, pace_now, 1.0)
