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
from ...datasets.traces.groups import JoinedCall, JoinedRun, RankedTraces, group_members, joined
from ...datasets.traces.reading import rank_files, read_trace
from ...datasets.traces.schema import CollectiveKind, TraceFileError
from ..engines import Engine, ask
from .feeder import Executions, execute
from .policies import is_communication

KINDS_OF = {
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
SMALLEST = 4  # bytes of a collective that carries nothing


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
    (:func:`.feeder.execute`). ``links`` says how long communication takes in place of the engine (:mod:`.on_links`).
    TraceFileError for a run that would hang, or
    is larger than the cluster.
    """
    joint = joined(run)
    duration = recorded_us(run, joint)
    who = np.broadcast_to(np.array("recorded", object), joint.edges.nodes)
    if cluster is not None and max(run.traces) >= cluster.devices:
        raise TraceFileError(
            f"the traces have a rank {max(run.traces)}; the cluster has devices 0 to {cluster.devices - 1}"
        )
    if engine is not None:
        ops = {**(compute_ops(run, joint) if compute else {}), **(network_ops(joint, cluster) if cluster else {})}
        asked = sorted(ops)
        if asked:
            who = who.copy()
            found = ask(engine, [ops[node] for node in asked])
            duration[asked], who[asked] = found.latency_us * shares_of(run, joint)[asked], found.engine
    if links is not None and (times := links(joint)):
        places = sorted(times)
        who = who.copy()
        duration[places], who[places] = [times[place] for place in places], "links"
    return SimulatedRun(run, joint, duration, who, execute(run, joint, duration, policy, window))


def recorded_us(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """Durations as recorded [nodes]. Of a collective the shortest of its ranks: the others waited for the last one."""
    made = np.full(joint.edges.nodes, np.inf)
    for rank, trace in run.traces.items():
        np.minimum.at(made, joint.node[rank], trace.exact_us)
    return made


def compute_ops(run: RankedTraces, joint: JoinedRun) -> dict[int, Op]:
    """The op of each node that computes and is known as one: as opcast wrote it."""
    found: dict[int, Op] = {}
    communicates = is_communication(run, joint)
    for rank, trace in run.traces.items():
        kept = trace.text(OP)
        known = {int(number): op_in(trace.words[number]) for number in np.unique(kept[kept >= 0])}
        for row in np.flatnonzero(kept >= 0).tolist():
            node, op = int(joint.node[rank][row]), known[int(kept[row])]
            if op is not None and not communicates[node]:
                found[node] = op
    return found


def shares_of(run: RankedTraces, joint: JoinedRun) -> np.ndarray:
    """The part of its op's time that each node takes [nodes]: of an op that several kernels do, each kernel's."""
    found = np.ones(joint.edges.nodes)
    for rank, trace in run.traces.items():
        rows, shares = trace.attribute(SHARE, "double")
        found[joint.node[rank][rows]] = shares
    return found


def network_ops(joint: JoinedRun, cluster: Cluster) -> dict[int, Op]:
    """The collectives and messages of a run as ops on a cluster."""
    return {place: call_op(call, cluster) for place, call in enumerate(joint.calls)}


@lru_cache(maxsize=1 << 16)
def op_in(text: str) -> Op | None:
    """The op of an attribute; None for what is none, such as time of the host."""
    try:
        given = json.loads(text)
        return make_op(given.pop("kind"), **given)
    except (ValueError, TypeError, KeyError, AttributeError, OpError):
        return None


def call_op(call: JoinedCall, cluster: Cluster) -> Op:
    """A collective or message as an op on a cluster whose device i is rank i."""
    nodes = np.bincount(np.array(call.ranks) // cluster.devices_per_node)
    near = int(nodes[nodes > 0].min())
    ranks = max(len(call.ranks), 2)
    link = cluster.link if near == len(call.ranks) else cluster.fabric
    kind = "send_recv" if call.kind is None else KINDS_OF[call.kind]
    return make_op(kind, size_bytes=bytes_of(call, kind), ranks=ranks, ranks_per_node=min(near, ranks), link=link)


def bytes_of(call: JoinedCall, kind: str) -> int:
    """The size of a call as opcast counts it: of an all-gather what all ranks have in the end."""
    return max(call.size_bytes, SMALLEST) * (max(len(call.ranks), 2) if kind == "all_gather" else 1)
