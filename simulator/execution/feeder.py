"""When the nodes of a run execute: ready nodes wait for their lanes, and a policy says which goes first.

A lane runs one node at a time: of each rank one for each thread of its host, one for each stream it names, else one for
compute and one for communication. Messages need none. A collective is one node of all its ranks, ready when the last of
them is. The loop runs as machine code where numba is installed and there are many nodes. It is deterministic: ties go
by time, then policy, then the order in which nodes became ready.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...datasets.traces.dependencies import COMPILE_FROM_NODES, sparse
from ...datasets.traces.groups import JoinedRun, RankedTraces
from ...datasets.traces.machine_code import compile_loop
from ...datasets.traces.schema import COMMUNICATION, NodeKind, TraceFileError
from ...datasets.traces.table import ExecutionTrace, SparseRows
from .policies import policy_of

COMPUTE, NETWORK, STREAM = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Executions:
    """Start and end of each node of a run in microseconds [nodes]; ``ready_us`` is when its last parent ended."""

    start_us: np.ndarray
    end_us: np.ndarray
    ready_us: np.ndarray

    @property
    def total_us(self) -> float:
        """When the last node ends."""
        return float(self.end_us.max(initial=0.0))


def merge_heaps(a: Any, b: Any, first_key: np.ndarray, turn: np.ndarray, left: np.ndarray, right: np.ndarray) -> Any:
    """The root of two skew heaps of nodes made one (Sleator and Tarjan 1986); -1 is an empty one."""
    top = np.int64(-1)
    while a >= 0 and b >= 0:
        if first_key[b] < first_key[a] or (first_key[b] == first_key[a] and turn[b] < turn[a]):
            a, b = b, a
        after = right[a]
        right[a] = top
        top, a = a, after
    root = a if a >= 0 else b
    while top >= 0:
        after = right[top]
        right[top] = left[top]
        left[top] = root
        root, top = top, after
    return root


def feed(
    offsets: np.ndarray, children: np.ndarray, waiting: np.ndarray, lane_offsets: np.ndarray, lanes: np.ndarray,
    duration: np.ndarray, first_key: np.ndarray, busy: np.ndarray, root: np.ndarray, left: np.ndarray,
    right: np.ndarray, position_of: np.ndarray, turn: np.ndarray, ready: np.ndarray, start: np.ndarray, end: np.ndarray,
    window: int, queue_offsets: np.ndarray, queue: np.ndarray, rank_offsets: np.ndarray, ranks: np.ndarray,
) -> int:  # fmt: skip
    """Run everything; returns how many nodes ran.

    ``busy`` [lanes] says which lanes run something, ``root`` [lanes] the first node that waits for each: skew heaps
    over ``left`` and ``right`` [nodes], ordered by ``first_key``, then by who was ready first, then by ``position_of``
    [nodes]. All of these are used up. With a ``window`` each rank has so many unfinished nodes at the most, taken in
    turn from ``queue`` (that of rank r from ``queue_offsets[r]`` on); ``ranks`` are those of each node.
    """
    events = [(0.0, np.int64(0))]
    events.pop()
    fresh = [np.int64(0)]
    fresh.pop()
    touched = [np.int64(0)]
    touched.pop()
    count, turns, now = 0, 0, 0.0
    next_in_queue = queue_offsets[:-1].copy()
    for rank in range(len(next_in_queue) if window else 0):
        while next_in_queue[rank] < min(queue_offsets[rank] + window, queue_offsets[rank + 1]):
            waiting[queue[next_in_queue[rank]]] -= 1
            next_in_queue[rank] += 1
    for first in range(len(waiting)):
        if waiting[first] == 0:
            fresh.append(np.int64(first))  # noqa: PERF401  (machine code)
    while True:
        for new in fresh:
            turn[new] = np.int64(turns) * len(waiting) + position_of[new]
            ready[new] = now
            if lane_offsets[new] == lane_offsets[new + 1]:
                start[new], end[new] = now, now + duration[new]
                heapq.heappush(events, (end[new], new))
            else:
                lane = lanes[lane_offsets[new]]
                root[lane] = merge_heaps(root[lane], new, first_key, turn, left, right)
                touched.append(np.int64(lane))
        fresh.clear()
        turns += 1
        while len(touched) > 0:
            lane = touched.pop()
            while not busy[lane] and root[lane] >= 0:
                best = root[lane]
                root[lane] = merge_heaps(left[best], right[best], first_key, turn, left, right)
                left[best] = right[best] = -1
                busy_lane = -1
                for i in range(lane_offsets[best], lane_offsets[best + 1]):
                    if busy[lanes[i]]:
                        busy_lane = lanes[i]
                if busy_lane >= 0:
                    root[busy_lane] = merge_heaps(root[busy_lane], best, first_key, turn, left, right)
                    continue
                for i in range(lane_offsets[best], lane_offsets[best + 1]):
                    busy[lanes[i]] = True
                start[best], end[best] = now, now + duration[best]
                heapq.heappush(events, (end[best], best))
        if len(events) == 0:
            return count
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            done = heapq.heappop(events)[1]
            count += 1
            for i in range(lane_offsets[done], lane_offsets[done + 1]):
                busy[lanes[i]] = False
                touched.append(np.int64(lanes[i]))
            for i in range(offsets[done], offsets[done + 1]):
                child = children[i]
                waiting[child] -= 1
                if waiting[child] == 0:
                    fresh.append(np.int64(child))
            if window:
                for i in range(rank_offsets[done], rank_offsets[done + 1]):
                    rank = ranks[i]
                    if next_in_queue[rank] < queue_offsets[rank + 1]:
                        later = queue[next_in_queue[rank]]
                        next_in_queue[rank] += 1
                        waiting[later] -= 1
                        if waiting[later] == 0:
                            fresh.append(np.int64(later))


def execute(
    run: RankedTraces, joint: JoinedRun, duration_us: np.ndarray, policy: str = "fifo", window: int = 0
) -> Executions:  # fmt: skip
    """Run a joined run whose nodes take so long [nodes]. ``policy``: as :func:`.policies.policy_of` has it.

    ``window``: so many nodes of a rank that have not ended are known to the feeder at a time, in the order of the file
    (0: all). TraceFileError for a window in which each node waits for one behind it.
    """
    n = joint.edges.nodes
    lanes = lanes_of(run, joint)
    keys = policy_of(policy)(run, joint)
    children = joint.edges.children
    waiting = np.bincount(joint.edges.child, minlength=n).astype(np.int32)
    count = int(lanes.values.max(initial=-1)) + 1
    left, right, turn = np.full(n, -1, np.int32), np.full(n, -1, np.int32), np.full(n, -1, np.int64)
    ready, start, end = np.zeros(n), np.zeros(n), np.zeros(n)
    loop = compile_loop(feed, (merge_heaps,)) if n >= COMPILE_FROM_NODES else feed
    child_offsets, child = _narrow_offsets(children.offsets), children.values
    lane_offsets, lane = _narrow_offsets(lanes.offsets), lanes.values
    del children, lanes
    busy, root = np.zeros(count, np.bool_), np.full(count, -1, np.int64)
    lasts = duration_us.astype(np.float64, copy=False)
    admitted = _window_queues(run, joint, window)
    if window:
        waiting += np.diff(admitted[2]).astype(np.int32)
    ran_count = loop(child_offsets, child, waiting, lane_offsets, lane, lasts, keys, busy, root, left, right, joint.row,
                     turn, ready, start, end, window, *admitted)  # fmt: skip
    if ran_count < n:
        stuck_node = int(np.argmax(turn < 0))
        rank, row = int(joint.rank[stuck_node]), int(joint.row[stuck_node])
        raise TraceFileError(f"{run.label(rank)}: node {run.traces[rank].ids[row]} waits for one that comes more than "
                             f"{window:,} nodes later: give a larger window")  # fmt: skip
    return Executions(start, end, ready)


def _window_queues(run: RankedTraces, joint: JoinedRun, window: int) -> tuple[np.ndarray, ...]:
    """Of :func:`feed`: each rank's nodes in the order of its file, the ranks of each node; empty without windows."""
    if not window:
        no_queue = np.zeros(1, np.int64)
        return no_queue, no_queue, no_queue, no_queue
    nodes = [joint.node[rank] for rank in run.traces]
    queue = np.concatenate(nodes).astype(np.int64)
    number = np.repeat(np.arange(len(nodes)), [len(rank_nodes) for rank_nodes in nodes])
    ranks_of_node = sparse(queue, number, joint.edges.nodes)
    return (
        np.cumsum([0, *(len(rank_nodes) for rank_nodes in nodes)]),
        queue,
        ranks_of_node.offsets,
        ranks_of_node.values,
    )


def _narrow_offsets(offsets: np.ndarray) -> np.ndarray:
    """Offsets in 32 bits: runs of more than two thousand million dependencies are not simulated in one piece."""
    return offsets.astype(np.int32) if offsets[-1] < 1 << 31 else offsets


def lane_keys(trace: ExecutionTrace) -> np.ndarray:
    """The lane of each node of a rank [n]: thread, stream, or what it is without one; -1 for messages."""
    host = trace.column("is_cpu_op", False, "bool").astype(bool)
    keys = np.where(np.isin(trace.kind, COMMUNICATION) & ~host, NETWORK, COMPUTE)
    on_thread = host
    rows, threads = trace.attribute("tid", "uint64")
    on_thread[rows] = True
    if on_thread.any():
        keys[on_thread] = -2
        keys[rows] = -2 - threads.astype(np.int64)
    rows, streams = trace.attribute("stream", "int64")
    has_stream = streams >= 0
    keys[rows[has_stream]] = STREAM + streams[has_stream]
    keys[np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV))] = -1
    return keys


def lanes_of(run: RankedTraces, joint: JoinedRun) -> SparseRows:
    """The lanes of each node of a joined run, numbered over all ranks."""
    nodes, lanes, count = [], [], 0
    for rank, trace in run.traces.items():
        keys = lane_keys(trace)
        has_lane = keys != -1
        rank_lanes = np.unique(keys[has_lane])
        nodes.append(joint.node[rank][has_lane])
        lanes.append((count + np.searchsorted(rank_lanes, keys[has_lane])).astype(np.int32))
        count += len(rank_lanes)
    return sparse(np.concatenate(nodes), np.concatenate(lanes), joint.edges.nodes)
