"""Why the device of a rank stands still in a simulated run: what the node that ends each idle time waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, class_codes, is_network, is_work
from ...datasets.traces.gaps import FLOAT_ROUNDING_US
from ...datasets.traces.table import SparseRows
from .run import SimulatedRun

HOST, GAPS, OTHER_RANK, NOTHING_RECORDED = "host", "host gap", "late rank", "nothing that is recorded"


@dataclass(frozen=True)
class IdleShare:
    """Idle time of a rank's device: what it waited for, how often, microseconds in all, the longest and its node."""

    rank: int
    waited_for: str
    count: int
    total_us: float
    longest_us: float
    node: int


def idle_shares(simulated: SimulatedRun) -> list[IdleShare]:
    """Idle times of every rank by cause, the longest first within a rank; they add up to its idle time.

    The node that ends an idle time waited for the last of its parents: a gap or call of the host, another class of
    node, or of a collective for the rank that came last. What comes after a rank's last node is no time of its own.
    """
    parents = simulated.joint.edges.parents
    return [share for rank in simulated.run.traces for share in _rank_idle_shares(simulated, rank, parents)]


def _rank_idle_shares(simulated: SimulatedRun, rank: int, parents: SparseRows) -> list[IdleShare]:
    trace, node = simulated.run.traces[rank], simulated.joint.node[rank]
    codes = class_codes(trace)
    start, end = simulated.executions.start_us[node], simulated.executions.end_us[node]
    rows = np.flatnonzero(is_work(trace, codes) | is_network(codes))
    if not len(trace):
        return []
    rows = rows[np.lexsort((end[rows], start[rows]))]
    origin, last = float(start.min()), float(end.max())
    reached = np.maximum.accumulate(np.concatenate([[origin], end[rows]]))
    begins = np.append(start[rows], last)
    waits = np.maximum(begins - reached, 0.0)
    waits_by_cause: dict[str, list[tuple[float, int]]] = {}
    for index in np.flatnonzero(waits > FLOAT_ROUNDING_US).tolist():
        row = int(rows[index]) if index < len(rows) else -1
        cause = _idle_cause(simulated, rank, codes, parents.row(int(node[row]))) if row >= 0 else HOST
        number = int(trace.ids[row]) if row >= 0 else int(trace.ids[int(np.argmax(end))])
        waits_by_cause.setdefault(cause, []).append((float(waits[index]), number))
    shares = [
        IdleShare(rank, cause, len(cause_waits), sum(us for us, _ in cause_waits), *max(cause_waits))
        for cause, cause_waits in waits_by_cause.items()
    ]
    return sorted(shares, key=lambda share: -share.total_us)


def _idle_cause(simulated: SimulatedRun, rank: int, codes: np.ndarray, parents: np.ndarray) -> str:
    """Which of its parents a node waited for: the one that ended last, of those that ended together its own rank's."""
    if not len(parents):
        return NOTHING_RECORDED
    joint, ends = simulated.joint, simulated.executions.end_us[parents]
    for parent in parents[ends >= ends.max() - FLOAT_ROUNDING_US].tolist():
        call = int(joint.call[parent])
        rows = joint.calls[call].rows if call >= 0 else {int(joint.rank[parent]): int(joint.row[parent])}
        if rank in rows:
            name = CLASSES[codes[rows[rank]]]
            return GAPS if name == "gap" else name
    return OTHER_RANK
