"""What a run is made of: counts and times by class, exposed communication, idle time, stragglers, the critical path.

Everything is read from columns of starts and ends, recorded or simulated, so that totals and parts agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, class_codes, is_blind, is_network, is_work, note_of
from ...datasets.traces.gaps import FLOAT_ROUNDING_US
from ...datasets.traces.groups import RankedTraces, join_calls
from ...datasets.traces.table import ExecutionTrace
from .feeder import lanes_of
from .run import SimulatedRun

DURATION_QUANTILES = (0.1, 0.5, 0.9, 0.99)  # that are told
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
    codes = class_codes(trace)
    computes, network = is_work(trace, codes), is_network(codes)
    total_us = float(end.max(initial=0.0) - start.min(initial=np.inf)) if len(end) else 0.0
    compute_us = covered_us(start[computes], end[computes])
    busy_us = covered_us(start[computes | network], end[computes | network])
    sizes = trace.column("comm_size", 0, "int64")
    shares = []
    for code in np.unique(codes).tolist():
        is_class = codes == code
        durations_us = end[is_class] - start[is_class]
        quantiles = tuple(float(quantile) for quantile in np.quantile(durations_us, DURATION_QUANTILES))
        shares.append(ClassShare(CLASSES[code], int(is_class.sum()), float(durations_us.sum()), quantiles,
                                 int(sizes[is_class].sum()), _curve(durations_us)))  # fmt: skip
    parents = np.diff(trace.data.offsets)
    parent_counts = float(parents.mean()) if len(parents) else 0.0, int(parents.max(initial=0))
    return RankAccount(
        rank, len(trace), total_us, compute_us, covered_us(start[network], end[network]), busy_us - compute_us,
        total_us - busy_us, parent_counts, tuple(sorted(shares, key=lambda share: -share.total_us)),
        _curve(parents), note_of(trace), is_blind(trace),
    )  # fmt: skip


def _curve(values: np.ndarray) -> tuple[float, ...]:
    """Values that so many (:data:`CDF_SHARES`) are not above; each is one that there is."""
    if not len(values):
        return ()
    return tuple(float(value) for value in np.quantile(values, CDF_SHARES, method="inverted_cdf"))


def recorded_times(trace: ExecutionTrace) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of a trace as recorded, in us."""
    return trace.exact_start_us, trace.exact_start_us + trace.exact_us


def recorded_accounts(run: RankedTraces) -> list[RankAccount]:
    """The accounts of all ranks, as recorded."""
    return [account(trace, rank, *recorded_times(trace)) for rank, trace in run.traces.items()]


def simulated_accounts(simulated: SimulatedRun) -> list[RankAccount]:
    """The accounts of all ranks, as simulated."""
    accounts = []
    for rank, trace in simulated.run.traces.items():
        node = simulated.joint.node[rank]
        accounts.append(account(trace, rank, simulated.executions.start_us[node], simulated.executions.end_us[node]))
    return accounts


def communication_by_size(run: RankedTraces) -> list[SizeShare]:
    """Communication of all ranks by class and size, as recorded."""
    durations_us: dict[tuple[str, int], list[float]] = {}
    for trace in run.traces.values():
        codes, sizes = class_codes(trace), trace.column("comm_size", 0, "int64")
        for row in np.flatnonzero(is_network(codes)).tolist():
            size = 1 << max(int(sizes[row]) - 1, 0).bit_length() if sizes[row] > 0 else 0
            durations_us.setdefault((CLASSES[codes[row]], size), []).append(float(trace.exact_us[row]))
    return [SizeShare(*key, len(durations), sum(durations)) for key, durations in sorted(durations_us.items())]


def late_ranks(run: RankedTraces) -> list[LateRank]:
    """Who kept the others waiting, by recorded starts of collectives on a common clock; the worst first."""
    counts, waited_us = dict.fromkeys(run.traces, 0), dict.fromkeys(run.traces, 0.0)
    for call in join_calls(run):
        if len(call.rows) < 2 or call.kind is None:
            continue
        starts = {rank: float(run.traces[rank].exact_start_us[row]) for rank, row in call.rows.items()}
        last = max(starts, key=lambda rank: starts[rank])
        counts[last] += 1
        waited_us[last] += sum(starts[last] - start for start in starts.values())
    late = [LateRank(rank, counts[rank], waited_us[rank]) for rank in run.traces]
    return sorted(late, key=lambda late_rank: -late_rank.waited_us)


# --- the critical path ---------------------------------------------------------------------------------


def critical_path(simulated: SimulatedRun) -> list[int]:
    """The nodes that the end of a simulated run waited for, first to last.

    Each began when the one before it ended: a parent, or what ran on its lane.
    """
    executions, edges = simulated.executions, simulated.joint.edges
    if not edges.nodes:
        return []
    parents, lanes = edges.parents, lanes_of(simulated.run, simulated.joint)
    rows = lanes.rows
    order = np.lexsort((executions.end_us[rows], lanes.values))
    lane, node_at, ends = lanes.values[order], rows[order], executions.end_us[rows[order]]
    bounds = np.searchsorted(lane, np.arange(int(lane.max(initial=-1)) + 2))
    node = int(np.argmax(executions.end_us))
    path = [node]
    seen = {node}
    while executions.start_us[node] > FLOAT_ROUNDING_US:
        parent_nodes = parents.row(node)
        best = int(parent_nodes[np.argmax(executions.end_us[parent_nodes])]) if len(parent_nodes) else -1
        if best < 0 or executions.end_us[best] < executions.start_us[node] - FLOAT_ROUNDING_US:
            for lane_id in lanes.row(node).tolist():
                low, high = int(bounds[lane_id]), int(bounds[lane_id + 1])
                position = low + int(np.searchsorted(ends[low:high], executions.start_us[node] + FLOAT_ROUNDING_US)) - 1
                while position >= low and int(node_at[position]) in seen:
                    position -= 1
                if position >= low and ends[position] >= executions.start_us[node] - FLOAT_ROUNDING_US:
                    best = int(node_at[position])
        if best < 0 or best in seen:
            break
        path.append(best)
        seen.add(best)
        node = best
    return path[::-1]


def path_shares(simulated: SimulatedRun, path: Sequence[int]) -> list[PathShare]:
    """The critical path by class, the longest first; times are what each node adds to it."""
    class_of: dict[int, str] = {}
    codes = {rank: class_codes(trace) for rank, trace in simulated.run.traces.items()}
    for node in path:
        rank, row = int(simulated.joint.rank[node]), int(simulated.joint.row[node])
        class_of[node] = CLASSES[codes[rank][row]]
    durations_us: dict[str, list[float]] = {}
    reached_us = 0.0
    for node in path:
        end_us = float(simulated.executions.end_us[node])
        durations_us.setdefault(class_of[node], []).append(end_us - reached_us)
        reached_us = end_us
    shares = [PathShare(name, len(durations), sum(durations)) for name, durations in durations_us.items()]
    return sorted(shares, key=lambda share: -share.total_us)


def compare_classes(
    first: Sequence[RankAccount], second: Sequence[RankAccount]
) -> list[tuple[str, int, float, int, float]]:
    """Two runs by class, means over their ranks: (class, count and us of the first, count and us of the second)."""

    def means(accounts: Sequence[RankAccount]) -> Mapping[str, tuple[float, float]]:
        total: dict[str, tuple[float, float]] = {}
        for account in accounts:
            for share in account.classes:
                count, us = total.get(share.name, (0.0, 0.0))
                total[share.name] = count + share.count / len(accounts), us + share.total_us / len(accounts)
        return total

    before, after = means(first), means(second)
    names = sorted({*before, *after}, key=lambda name: -abs(before.get(name, (0, 0))[1] - after.get(name, (0, 0))[1]))
    rows = []
    for name in names:
        (count, us), (count_after, us_after) = before.get(name, (0.0, 0.0)), after.get(name, (0.0, 0.0))
        rows.append((name, round(count), us, round(count_after), us_after))
    return rows
