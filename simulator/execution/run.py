"""A run of traces simulated: how long each node takes, and when it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.ops import Op, OpError, make_op
from ...datasets.traces.classes import OP, SHARE
from ...datasets.traces.groups import JoinedCall, JoinedRun, RankedTraces, group_members, join_ranks
from ...datasets.traces.reading import rank_files, read_trace
from ...datasets.traces.schema import CollectiveKind, TraceFileError
from ..engines import Engine, ask
from .feeder import Executions, execute
from .policies import is_communication

OP_KINDS = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.REDUCE: "broadcast",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.GATHER: "all_gather",
    CollectiveKind.SCATTER: "broadcast",
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.REDUCE_SCATTER_BLOCK: "reduce_scatter",
    CollectiveKind.BARRIER: "all_reduce",
}
LinkTimes = Callable[[JoinedRun], Mapping[int, float]]
EMPTY_COLLECTIVE_BYTES = 4  # bytes of a collective that carries nothing


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """A run as it executes. ``engine`` [nodes]: who says how long each node takes (``recorded``, or an engine)."""

    run: RankedTraces
    joint: JoinedRun
    duration_us: np.ndarray
    engine: np.ndarray
    executions: Executions


def read_run(path: Path) -> RankedTraces:
    """The traces of a file or folder with its groups. TraceFileError for what is none."""
    files = rank_files(path)
    return RankedTraces({rank: read_trace(file) for rank, file in files.items()}, group_members(path), files)


def simulate_run(
    run: RankedTraces, engine: Engine | None = None, cluster: Cluster | None = None, policy: str = "fifo",
    compute: bool = True, window: int = 0, links: LinkTimes | None = None,
) -> SimulatedRun:  # fmt: skip
    """Run the traces: nodes take as long as recorded, or as an engine says where it is given.

    With ``cluster`` the engine times collectives and messages; a group is as wide as its ranks lie on nodes. With
    ``compute`` it times the ops; what no op is known of stays as recorded. ``policy`` and ``window``: of the feeder
    (:func:`.feeder.execute`). ``links`` says how long communication takes in place of the engine (:mod:`.link_times`).
    TraceFileError for a run that would hang, or
    is larger than the cluster.
    """
    joint = join_ranks(run)
    duration = recorded_us(run, joint)
    engine_names = np.broadcast_to(np.array("recorded", object), joint.edges.nodes)
    if cluster is not None and max(run.traces) >= cluster.devices:
        raise TraceFileError(
            f"the traces have a rank {max(run.traces)}; the cluster has devices 0 to {cluster.devices - 1}"
        )
    if engine is not None:
        ops = {**(compute_ops(run, joint) if compute else {}), **(network_ops(joint, cluster) if cluster else {})}
        op_nodes = sorted(ops)
        if op_nodes:
            engine_names = engine_names.copy()
            answers = ask(engine, [ops[node] for node in op_nodes])
            duration[op_nodes], engine_names[op_nodes] = (
                answers.latency_us * op_shares(run, joint)[op_nodes],
                answers.engine,
            )
    if links is not None and (times := links(joint)):
        link_nodes = sorted(times)
        engine_names = engine_names.copy()
        duration[link_nodes], engine_names[link_nodes] = [times[link_node] for link_node in link_nodes], "links"
    return SimulatedRun(run, joint, duration, engine_names, execute(run, joint, duration, policy, window))


def recorded_us(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Durations as recorded [nodes]. Of a collective the shortest of its ranks: the others waited for the last one."""
    durations_us = np.full(joint.edges.nodes, np.inf)
    for rank, trace in run.traces.items():
        np.minimum.at(durations_us, joint.node[rank], trace.exact_us)
    return durations_us


def compute_ops(run: RankedTraces, joint: JoinedRun) -> dict[int, Op]:
    """The op of each node that computes and is known as one: as opcast wrote it."""
    ops: dict[int, Op] = {}
    communicates = is_communication(run, joint)
    for rank, trace in run.traces.items():
        op_words = trace.text(OP)
        op_of_word = {int(number): op_in(trace.words[number]) for number in np.unique(op_words[op_words >= 0])}
        for row in np.flatnonzero(op_words >= 0).tolist():
            node, op = int(joint.node[rank][row]), op_of_word[int(op_words[row])]
            if op is not None and not communicates[node]:
                ops[node] = op
    return ops


def op_shares(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """The part of its op's time that each node takes [nodes]: of an op that several kernels do, each kernel's."""
    node_shares = np.ones(joint.edges.nodes)
    for rank, trace in run.traces.items():
        rows, shares = trace.attribute(SHARE, "double")
        node_shares[joint.node[rank][rows]] = shares
    return node_shares


def network_ops(joint: JoinedRun, cluster: Cluster) -> dict[int, Op]:
    """The collectives and messages of a run as ops on a cluster."""
    return {node: call_op(call, cluster) for node, call in enumerate(joint.calls)}


@lru_cache(maxsize=1 << 16)
def op_in(text: str) -> Op | None:
    """The op of an attribute; None for what is none, such as time of the host."""
    try:
        fields = json.loads(text)
        return make_op(fields.pop("kind"), **fields)
    except (ValueError, TypeError, KeyError, AttributeError, OpError):
        return None


def call_op(call: JoinedCall, cluster: Cluster) -> Op:
    """A collective or message as an op on a cluster whose device i is rank i."""
    nodes = np.bincount(np.array(call.ranks) // cluster.devices_per_node)
    ranks_per_node = int(nodes[nodes > 0].min())
    ranks = max(len(call.ranks), 2)
    link = cluster.link if ranks_per_node == len(call.ranks) else cluster.fabric
    kind = "send_recv" if call.kind is None else OP_KINDS[call.kind]
    return make_op(
        kind, size_bytes=call_bytes(call, kind), ranks=ranks, ranks_per_node=min(ranks_per_node, ranks), link=link
    )


def call_bytes(call: JoinedCall, kind: str) -> int:
    """The size of a call as opcast counts it: of an all-gather what all ranks have in the end."""
    return max(call.size_bytes, EMPTY_COLLECTIVE_BYTES) * (max(len(call.ranks), 2) if kind == "all_gather" else 1)
