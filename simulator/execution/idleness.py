"""Why the device of a rank stands still in a simulated run: what the node that ends each idle time waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, classes, is_network, working
from ...datasets.traces.gaps import ROUNDED_US
from ...datasets.traces.table import SparseRows
from .run import SimulatedRun

HOST, GAPS, OTHER_RANK, NOTHING = "host", "host gap", "late rank", "nothing that is recorded"


@dataclass(frozen=True)
class IdleShare:
    """Idle time of a rank's device: what it waited for, how often, microseconds in all, the longest and its node."""

    rank: int
    waited_for: str
    count: int
    total_us: float
    longest_us: float
    node: int


def idle_shares(made: SimulatedRun) -> list[IdleShare]:
    """Idle times of every rank by cause, the longest first within a rank; they add up to its idle time.

    The node that ends an idle time waited for the last of its parents: a gap or call of the host, another class of
    node, or of a collective for the rank that came last. What comes after a rank's last node is no time of its own.
    """
    parents = made.joint.edges.parents
    return [share for rank in made.run.traces for share in _of_rank(made, rank, parents)]


def _of_rank(made: SimulatedRun, rank: int, parents: SparseRows) -> list[IdleShare]:
    trace, node = made.run.traces[rank], made.joint.node[rank]
    codes = classes(trace)
    start, end = made.executions.start_us[node], made.executions.end_us[node]
    rows = np.flatnonzero(working(trace, codes) | is_network(codes))
    if not len(trace):
        return []
    rows = rows[np.lexsort((end[rows], start[rows]))]
    origin, last = float(start.min()), float(end.max())
    reached = np.maximum.accumulate(np.concatenate([[origin], end[rows]]))
    begins = np.append(start[rows], last)
    waits = np.maximum(begins - reached, 0.0)
    found: dict[str, list[tuple[float, int]]] = {}
    for place in np.flatnonzero(waits > ROUNDED_US).tolist():
        row = int(rows[place]) if place < len(rows) else -1
        cause = _cause(made, rank, codes, parents.row(int(node[row]))) if row >= 0 else HOST
        number = int(trace.ids[row]) if row >= 0 else int(trace.ids[int(np.argmax(end))])
        found.setdefault(cause, []).append((float(waits[place]), number))
    shares = [IdleShare(rank, cause, len(each), sum(us for us, _ in each), *max(each)) for cause, each in found.items()]
    return sorted(shares, key=lambda share: -share.total_us)


def _cause(made: SimulatedRun, rank: int, codes: np.ndarray, parents: np.ndarray) -> str:
    """Which of its parents a node waited for: the one that ended last, of those that ended together its own rank's."""
    if not len(parents):
        return NOTHING
    joint, ends = made.joint, made.executions.end_us[parents]
    for parent in parents[ends >= ends.max() - ROUNDED_US].tolist():
        call = int(joint.call[parent])
        rows = joint.calls[call].rows if call >= 0 else {int(joint.rank[parent]): int(joint.row[parent])}
        if rank in rows:
            name = CLASSES[codes[rows[rank]]]
            return GAPS if name == "gap" else name
    return OTHER_RANK
