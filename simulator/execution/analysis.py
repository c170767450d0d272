"""What a run is made of: counts and times by class, exposed communication, idle time, stragglers, the critical path.

Everything is read from columns of starts and ends, recorded or simulated, so that totals and parts agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, classes, is_blind, is_network, note_of, working
from ...datasets.traces.gaps import ROUNDED_US
from ...datasets.traces.groups import JoinedCall, RankedTraces, joined_calls
from ...datasets.traces.table import ExecutionTrace
from .feeder import lanes_of
from .run import SimulatedRun

QUANTILES = (0.1, 0.5, 0.9, 0.99)  # that are told
CDF_SHARES = tuple(place / 40 for place in range(41))
"""Where curves of distributions (``cdf_us``, ``parents_cdf``) have their points: shares of the nodes, 0 to 1."""


@dataclass(frozen=True)
class ClassShare:
    """One class of nodes of a rank: how many, their time, quantiles of their durations (10, 50, 90, 99 %), bytes.

    ``cdf_us`` are their durations at :data:`CDF_SHARES`: so many of the nodes take no longer.
    """

    name: str
    count: int
    total_us: float
    quantiles_us: tuple[float, ...]
    size_bytes: int
    cdf_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class RankAccount:
    """The time of a rank: ``compute_us``, ``exposed_us`` (communication alone) and ``idle_us`` add up to ``total_us``.

    ``communication_us`` is all time with communication. ``parents`` are the mean and the most data parents of a node,
    ``parents_cdf`` how many nodes have at :data:`CDF_SHARES`, fewest first. ``note`` says what its profile lacks;
    ``blind`` that compute and idle time are not known, as no kernels were recorded.
    """

    rank: int
    nodes: int
    total_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    idle_us: float
    parents: tuple[float, int]
    classes: tuple[ClassShare, ...]
    parents_cdf: tuple[float, ...] = ()
    note: str = ""
    blind: bool = False


@dataclass(frozen=True)
class SizeShare:
    """Communication of one class and size (rounded to a power of two)."""

    name: str
    size_bytes: int
    count: int
    total_us: float


@dataclass(frozen=True)
class LateRank:
    """How often a rank was the last to arrive at a collective, and how long the others waited for it in all."""

    rank: int
    calls: int
    waited_us: float


@dataclass(frozen=True)
class PathShare:
    """One class of the critical path: how many nodes, their time."""

    name: str
    count: int
    total_us: float


def covered_us(start: np.ndarray, end: np.ndarray) -> float:
    """Time in which at least one of some intervals runs."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate([[start[0]], np.maximum(start[1:], end[:-1])])
    return float(np.sum(np.maximum(end - begins, 0.0)))


def account(trace: ExecutionTrace, rank: int, start: np.ndarray, end: np.ndarray) -> RankAccount:
    """The account of a rank whose nodes ran from ``start`` to ``end`` [n], in us."""
    codes = classes(trace)
    computes, network = working(trace, codes), is_network(codes)
    total = float(end.max(initial=0.0) - start.min(initial=np.inf)) if len(end) else 0.0
    compute = covered_us(start[computes], end[computes])
    both = covered_us(start[computes | network], end[computes | network])
    sizes = trace.column("comm_size", 0, "int64")
    shares = []
    for code in np.unique(codes).tolist():
        here = codes == code
        us = end[here] - start[here]
        quantiles = tuple(float(each) for each in np.quantile(us, QUANTILES))
        shares.append(ClassShare(CLASSES[code], int(here.sum()), float(us.sum()), quantiles, int(sizes[here].sum()),
                                 _curve(us)))  # fmt: skip
    parents = np.diff(trace.data.offsets)
    return RankAccount(rank, len(trace), total, compute, covered_us(start[network], end[network]), both - compute,
                       total - both, (float(parents.mean()) if len(parents) else 0.0, int(parents.max(initial=0))),
                       tuple(sorted(shares, key=lambda share: -share.total_us)),
                       _curve(parents), note_of(trace), is_blind(trace))  # fmt: skip


def _curve(values: np.ndarray) -> tuple[float, ...]:
    """Values that so many (:data:`CDF_SHARES`) are not above; each is one that there is."""
    if not len(values):
        return ()
    return tuple(float(each) for each in np.quantile(values, CDF_SHARES, method="inverted_cdf"))


def recorded(trace: ExecutionTrace) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of a trace as recorded, in us."""
    return trace.exact_start_us, trace.exact_start_us + trace.exact_us


def accounts(run: RankedTraces) -> list[RankAccount]:
    """The accounts of all ranks, as recorded."""
    return [account(trace, rank, *recorded(trace)) for rank, trace in run.traces.items()]


def simulated_accounts(made: SimulatedRun) -> list[RankAccount]:
    """The accounts of all ranks, as simulated."""
    found = []
    for rank, trace in made.run.traces.items():
        node = made.joint.node[rank]
        found.append(account(trace, rank, made.executions.start_us[node], made.executions.end_us[node]))
    return found


def by_size(run: RankedTraces) -> list[SizeShare]:
    """Communication of all ranks by class and size, as recorded."""
    found: dict[tuple[str, int], list[float]] = {}
    for trace in run.traces.values():
        codes, sizes = classes(trace), trace.column("comm_size", 0, "int64")
        for row in np.flatnonzero(is_network(codes)).tolist():
            size = 1 << max(int(sizes[row]) - 1, 0).bit_length() if sizes[row] > 0 else 0
            found.setdefault((CLASSES[codes[row]], size), []).append(float(trace.exact_us[row]))
    return [SizeShare(*key, len(us), sum(us)) for key, us in sorted(found.items())]


def late_ranks(run: RankedTraces, calls: Sequence[JoinedCall] | None = None) -> list[LateRank]:
    """Who kept the others waiting, by recorded starts of collectives on a common clock; the worst first."""
    counts, waited = dict.fromkeys(run.traces, 0), dict.fromkeys(run.traces, 0.0)
    for call in joined_calls(run) if calls is None else calls:
        if len(call.rows) < 2 or call.kind is None:
            continue
        starts = {rank: float(run.traces[rank].exact_start_us[row]) for rank, row in call.rows.items()}
        last = max(starts, key=lambda rank: starts[rank])
        counts[last] += 1
        waited[last] += sum(starts[last] - each for each in starts.values())
    found = [LateRank(rank, counts[rank], waited[rank]) for rank in run.traces]
    return sorted(found, key=lambda each: -each.waited_us)


# --- the critical path ---------------------------------------------------------------------------------


def critical_path(made: SimulatedRun) -> list[int]:
    """The nodes that the end of a simulated run waited for, first to last.

    Each began when the one before it ended: a parent, or what ran on its lane.
    """
    executions, edges = made.executions, made.joint.edges
    if not edges.nodes:
        return []
    parents, lanes = edges.parents, lanes_of(made.run, made.joint)
    rows = lanes.rows
    order = np.lexsort((executions.end_us[rows], lanes.values))
    lane, node_at, ends = lanes.values[order], rows[order], executions.end_us[rows[order]]
    bounds = np.searchsorted(lane, np.arange(int(lane.max(initial=-1)) + 2))
    at = int(np.argmax(executions.end_us))
    found = [at]
    seen = {at}
    while executions.start_us[at] > ROUNDED_US:
        own = parents.row(at)
        best = int(own[np.argmax(executions.end_us[own])]) if len(own) else -1
        if best < 0 or executions.end_us[best] < executions.start_us[at] - ROUNDED_US:
            for each in lanes.row(at).tolist():
                low, high = int(bounds[each]), int(bounds[each + 1])
                place = low + int(np.searchsorted(ends[low:high], executions.start_us[at] + ROUNDED_US)) - 1
                while place >= low and int(node_at[place]) in seen:
                    place -= 1
                if place >= low and ends[place] >= executions.start_us[at] - ROUNDED_US:
                    best = int(node_at[place])
        if best < 0 or best in seen:
            break
        found.append(best)
        seen.add(best)
        at = best
    return found[::-1]


def path_shares(made: SimulatedRun, path: Sequence[int]) -> list[PathShare]:
    """The critical path by class, the longest first; times are what each node adds to it."""
    named: dict[int, str] = {}
    codes = {rank: classes(trace) for rank, trace in made.run.traces.items()}
    for node in path:
        rank, row = int(made.joint.rank[node]), int(made.joint.row[node])
        named[node] = CLASSES[codes[rank][row]]
    found: dict[str, list[float]] = {}
    ends = 0.0
    for node in path:
        now = float(made.executions.end_us[node])
        found.setdefault(named[node], []).append(now - ends)
        ends = now
    shares = [PathShare(name, len(us), sum(us)) for name, us in found.items()]
    return sorted(shares, key=lambda share: -share.total_us)


def compared(first: Sequence[RankAccount], second: Sequence[RankAccount]) -> list[tuple[str, int, float, int, float]]:
    """Two runs by class, means over their ranks: (class, count and us of the first, count and us of the second)."""

    def means(found: Sequence[RankAccount]) -> Mapping[str, tuple[float, float]]:
        total: dict[str, tuple[float, float]] = {}
        for each in found:
            for share in each.classes:
                count, us = total.get(share.name, (0.0, 0.0))
                total[share.name] = count + share.count / len(found), us + share.total_us / len(found)
        return total

    one, other = means(first), means(second)
    names = sorted({*one, *other}, key=lambda name: -abs(one.get(name, (0, 0))[1] - other.get(name, (0, 0))[1]))
    none = (0.0, 0.0)
    return [
        (
            name,
            round(one.get(name, none)[0]),
            one.get(name, none)[1],
            round(other.get(name, none)[0]),
            other.get(name, none)[1],
        )
        for name in names
    ]
