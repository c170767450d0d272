"""A profile, and the host trace of the same run where there is one, as one execution trace.

Edges: the order of a thread, of a stream, launch to kernel, kernel to the call that waits for it, a collective to the
compute whose result it takes and back, and a thread to the one that it goes on from. An edge is kept where the parent
ended before the child began, so that the trace has no cycle; what no edge explains is a gap of its own. Simulated as
recorded, nodes run when they ran.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..ops import Op, OpError, make_op
from ..sources.kineto import Event, kernels_of_calls
from ..sources.kineto_ops import Unmapped, op_of
from .builder import Attribute, TraceBuilder
from .classes import BLIND, GAP, NOTE, OP, PROCESSOR, SHARE
from .gaps import FLOAT_ROUNDING_US, fill_gaps
from .matching import HostMatch, match_host
from .profiles import (
    COPIES,
    LAUNCHES,
    ON_DEVICE,
    OWN_OP,
    SYNCHRONIZING_CALLS,
    Profile,
    collective_of,
    continuations,
    correlation,
    end_us,
    is_collective,
    lane,
    last_before,
    read_profile,
    size_of_call,
)
from .reading import read_trace
from .schema import NodeKind, TraceFileError
from .table import ExecutionTrace

THREAD_WAITS_US = 100.0  # a thread that does nothing for so long goes on from another


@dataclass(frozen=True)
class LinkReport:
    """What was linked: nodes; kernels, and those whose launch is known; host events, and those that the host trace has.

    ``gap_us`` is time that no edge explains, over all threads and streams; ``note`` says what of the device is missing.
    """

    nodes: int
    kernels: int
    launched: int
    operators: int
    matched: int
    edges: Mapping[str, int]
    gap_us: float
    note: str = ""


class _Edges:
    """Edges as they are found, by sort; only those whose parent has ended."""

    def __init__(self, start: np.ndarray, end: np.ndarray) -> None:
        self.start, self.end = start, end
        self.pairs: list[tuple[int, int]] = []
        self.counts: Counter[str] = Counter()

    def add(self, sort: str, child: int, parent: int) -> bool:
        if child == parent or self.end[parent] > self.start[child] + FLOAT_ROUNDING_US:
            return False
        self.pairs.append((child, parent))
        self.counts[sort] += 1
        return True


def link_profile(
    profile: Profile, host: HostMatch | None = None, origin_us: float | None = None
) -> tuple[ExecutionTrace, LinkReport]:
    """The execution trace of a profile, and what was linked. Times count from ``origin_us`` (default: its first event).

    TraceFileError for a profile in which nothing can be told apart.
    """
    host_events = [*profile.host, *continuations(profile.host)]
    events = [*host_events, *profile.device]
    if not events:
        raise TraceFileError(f"{profile.path} has no events")
    origin = profile.begin_us if origin_us is None else origin_us
    begin = np.array([float(event["ts"]) for event in events])
    stop = np.array([end_us(event) for event in events])
    lanes: dict[tuple[str, ...], list[int]] = {}
    order = np.lexsort((-stop, begin))
    for row in order.tolist():
        lanes.setdefault(lane(events[row]), []).append(row)
    launcher = _launch_calls(events, len(host_events))
    start, end, kernel_waited_for = _node_times(events, lanes, launcher, begin, stop)
    edges = _Edges(start, end)
    for rows in lanes.values():
        for before, after in itertools.pairwise(rows):
            edges.add("order", after, before)
    for kernel, call in launcher.items():
        edges.add("launch", kernel, call)
    for call, kernel in kernel_waited_for.items():
        edges.add("wait", call, kernel)
    streams = {key: rows for key, rows in lanes.items() if key[0] == "device"}
    _link_streams(events, streams, launcher, begin, edges)
    _link_threads({key: rows for key, rows in lanes.items() if key[0] == "host"}, edges)
    pairs = np.array(edges.pairs, np.int64).reshape(-1, 2)
    tie = np.empty(len(events), np.int64)
    tie[order] = np.arange(len(events))
    everything = np.ones(len(events), bool)
    timed = fill_gaps(start - origin, end - origin, pairs[:, 0], pairs[:, 1], everything, tie)
    trace = _build_trace(profile, events, host, lanes, timed)
    matched = sum(row in host.rows for row in range(len(profile.host))) if host else 0
    report = LinkReport(len(trace), len(profile.device), len(launcher), len(profile.host), matched, dict(edges.counts),
                        float(np.sum((timed.end - timed.start)[timed.gap])), profile.note)  # fmt: skip
    return trace, report


def _launch_calls(events: list[Event], hosts: int) -> dict[int, int]:
    """The call that launched each device event, by row, where the profile tells."""
    calls = {correlation(event): row for row, event in enumerate(events[:hosts])
             if event.get("cat") in LAUNCHES and correlation(event) is not None}  # fmt: skip
    calls_of_kernels = {row: calls.get(correlation(event)) for row, event in enumerate(events[hosts:], hosts)}
    return {row: call for row, call in calls_of_kernels.items() if call is not None}


def _node_times(
    events: list[Event], lanes: Mapping[tuple[str, ...], list[int]], launcher: Mapping[int, int], begin: np.ndarray,
    stop: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:  # fmt: skip
    """Start and end of each node, and the kernel that each waiting call waits for.

    A thread's event ends where the next begins, a launch where its kernel begins; a call that waits for a kernel begins
    when that has ended. Of kernels of one stream that overlap the later begins when the
    earlier has ended.
    """
    start, end = begin.copy(), stop.copy()
    for key, rows in lanes.items():
        for before, after in itertools.pairwise(rows):
            if key[0] == "device":
                start[after] = max(begin[after], end[before])
                end[after] = max(stop[after], start[after])
            else:
                end[before] = min(end[before], max(begin[after], begin[before]))
    for kernel, call in launcher.items():
        if begin[kernel] >= begin[call]:
            end[call] = min(end[call], begin[kernel])
    kernels = sorted(launcher, key=lambda row: stop[row])
    ends = [float(stop[row]) for row in kernels]
    kernel_waited_for = {}
    for row, event in enumerate(events):
        if event.get("cat") in LAUNCHES and SYNCHRONIZING_CALLS.match(event["name"]):
            index = last_before(ends, float(stop[row]))
            while index >= 0 and begin[launcher[kernels[index]]] > begin[row]:
                index -= 1
            if index >= 0 and ends[index] > begin[row]:
                kernel_waited_for[row] = kernels[index]
                start[row] = min(ends[index], end[row]) if end[row] > ends[index] else end[row]
    ended = {
        call: kernel for call, kernel in kernel_waited_for.items() if end[kernel] <= start[call] + FLOAT_ROUNDING_US
    }
    return start, end, ended


def _link_streams(
    events: list[Event], streams: Mapping[tuple[str, ...], list[int]], launcher: Mapping[int, int], begin: np.ndarray,
    edges: _Edges,
) -> None:  # fmt: skip
    """Collectives wait for what was launched on other streams before them; compute for collectives that have ended.

    Of the second sort an edge is drawn where a stream was told to wait (``StreamWaitEvent``) since its last kernel.
    """
    launched: dict[tuple[str, ...], tuple[list[float], list[int]]] = {}
    for key, rows in streams.items():
        launches = sorted((float(begin[launcher[row]]), row) for row in rows if row in launcher)
        launched[key] = [at for at, _ in launches], [row for _, row in launches]
    stream_waits = sorted(float(e["ts"]) for e in events if e.get("cat") in LAUNCHES and "StreamWaitEvent" in e["name"])
    for key, (times, rows) in launched.items():
        before = -np.inf
        for at, row in zip(times, rows, strict=True):
            last_wait = last_before(stream_waits, at)
            if is_collective(events[row]) or (last_wait >= 0 and stream_waits[last_wait] > before):
                for other_key, (other_times, other_rows) in launched.items():
                    last = last_before(other_times, at)
                    if other_key != key and other_key[:2] == key[:2] and last >= 0:
                        edges.add("stream", row, other_rows[last])
            before = at


def _link_threads(threads: Mapping[tuple[str, ...], list[int]], edges: _Edges) -> None:
    """A thread that did nothing for long goes on from what ended last on another one."""
    ends = {key: sorted((float(edges.end[row]), row) for row in rows) for key, rows in threads.items()}
    for key, rows in threads.items():
        for before, row in zip([None, *rows[:-1]], rows, strict=True):
            if before is not None and edges.start[row] - edges.end[before] < THREAD_WAITS_US:
                continue
            best = None
            for other_key, other_ends in ends.items():
                index = last_before([end for end, _ in other_ends], float(edges.start[row])) if other_key != key else -1
                while index >= 0 and edges.start[other_ends[index][1]] >= edges.start[row]:
                    index -= 1  # took no time at this very moment: neither of the two came first
                if index >= 0 and (best is None or other_ends[index] > best):
                    best = other_ends[index]
            if best is not None:
                edges.add("thread", row, best[1])


# --- nodes ---------------------------------------------------------------------------------------------


def _build_trace(
    profile: Profile,
    events: list[Event],
    host: HostMatch | None,
    lanes: Mapping[tuple[str, ...], list[int]],
    timed: Any,
) -> ExecutionTrace:
    numbers = {key: number for number, key in enumerate(sorted(lanes))}
    lane_of = {row: key for key, rows in lanes.items() for row in rows}
    ops = _kernel_ops(profile)
    about: list[Attribute] = [("schema", "string", "linked"), ("source", "string", profile.path.name)]
    about += [(NOTE, "string", profile.note)] if profile.note else []
    if profile.blind:
        about.append((BLIND, "bool", True))
    elif not any(event.get("cat") in ON_DEVICE and not is_collective(event) for event in events):
        about.append((PROCESSOR, "bool", True))
    builder = TraceBuilder([*about, *([("rank", "int32", profile.rank)] if profile.rank is not None else [])])
    parents: list[list[int]] = [[] for _ in timed.row]
    for child, parent in timed.parents.T.tolist():
        parents[child].append(parent + 1)
    columns = zip(timed.row.tolist(), timed.gap.tolist(), timed.start.tolist(), timed.end.tolist(), strict=True)
    for index, (row, gap, start, end) in enumerate(columns):
        event, key = events[row], lane_of[row]
        on_host = key[0] == "host"
        processor_op = event["args"].get(OWN_OP)
        attributes: list[Attribute] = [
            ("is_cpu_op", "bool", on_host and (gap or processor_op is None)),
            *_lane_attributes(key, numbers[key]),
        ]
        times = {"start_us": start, "duration_us": max(end - start, 0.0), "data": parents[index]}
        if gap:
            builder.add(index + 1, GAP, attributes=[*attributes, (OP, "string", GAP)], **times)
        elif on_host:
            host_node = host.host_node(row) if host else None
            sides: dict[str, Any] = {}
            if host_node is not None:
                sides = {"inputs": host_node.inputs, "outputs": host_node.outputs}
            if host_node is None and event["args"].get("Input Dims"):
                sides = {"inputs": ["[]", repr(event["args"]["Input Dims"]), repr(event["args"].get("Input type", []))]}
            extra = [] if host_node is None else list(host_node.attributes)
            attributes.append(("inclusive_us", "double", float(event["dur"])))
            attributes += _op_attributes(processor_op) if processor_op is not None else []
            builder.add(index + 1, event["name"], attributes=[*attributes, *extra], **sides, **times)
        else:
            kind, extra = _device_node(event, ops.get(correlation(event)))
            builder.add(index + 1, event["name"], kind, attributes=[*attributes, *extra], **times)
    return builder.trace()


def _lane_attributes(key: tuple[str, ...], number: int) -> list[Attribute]:
    if key[0] == "host":
        return [("tid", "uint64", number)]
    return [("stream", "int64", int(key[2]) if key[2].isdigit() else number)]


def _device_node(event: Event, op: tuple[Op, float] | None) -> tuple[NodeKind, list[Attribute]]:
    kind = collective_of(event)
    if kind is not None:
        attributes: list[Attribute] = [("comm_type", "int64", kind), ("comm_size", "int64", size_of_call(event))]
        group = event["args"].get("Process Group Name")
        return NodeKind.COMM_COLL, [*attributes, *([("pg_name", "string", str(group))] if group is not None else [])]
    if is_collective(event):  # RCCL's names do not tell which, where the profiler kept no arguments
        return NodeKind.COMM_COLL, []
    if event.get("cat") in COPIES:
        size_bytes = event["args"].get("bytes")
        has_size = isinstance(size_bytes, int) and size_bytes >= 0
        size: list[Attribute] = [("tensor_size", "uint64", size_bytes)] if has_size else []
        name = event["name"].lower()
        return (NodeKind.MEM_LOAD if "htod" in name else NodeKind.MEM_STORE if "dtoh" in name else NodeKind.COMP), size
    if op is None:
        return NodeKind.COMP, []
    kernel_op, share = op
    return NodeKind.COMP, [*_op_attributes(kernel_op), (SHARE, "double", share)]


def _op_attributes(op: Op) -> list[Attribute]:
    return [("num_ops", "int64", int(op.cost.flops)), ("tensor_size", "uint64", int(op.cost.bytes)),
            (OP, "string", json.dumps(op.to_dict()))]  # fmt: skip


def _kernel_ops(profile: Profile) -> dict[Any, tuple[Op, float]]:
    """The op of each kernel that belongs to one, by correlation, and the kernel's share of its time."""
    kernels = [e for e in profile.device if correlation(e) is not None and not is_collective(e)]
    op_of_kernel: dict[Any, tuple[Op, float]] = {}
    for call, members in kernels_of_calls([*profile.host, *profile.device], kernels):
        total_us = sum(float(event["dur"]) for event in members)
        try:
            op = op_of(call) if call.name else None
            if op is None or not total_us:
                continue
            call_op = make_op(op.kind, op.dtype, op.out_dtype, **op.dims)
        except (Unmapped, OpError):
            continue
        for event in members:
            op_of_kernel[correlation(event)] = call_op, float(event["dur"]) / total_us
    return op_of_kernel


# --- runs of several ranks -----------------------------------------------------------------------------


def link_files(
    profiles: Sequence[Path], hosts: Sequence[Path] = ()
) -> tuple[dict[int, ExecutionTrace], dict[int, LinkReport], dict[str, tuple[int, ...]]]:
    """The traces of a run's profiles by rank, with a host trace of each where they are given, and its process groups.

    A profile's rank is what it says, else its place. Times count from the first event of all: ranks of one run share a
    clock. TraceFileError where files and host traces are not as many, or two are of one rank.
    """
    if hosts and len(hosts) != len(profiles):
        raise TraceFileError(f"{len(profiles)} profiles, but {len(hosts)} host traces: name one for each")
    read_profiles = [read_profile(path) for path in profiles]
    ranks = [profile.rank if profile.rank is not None else index for index, profile in enumerate(read_profiles)]
    if len(set(ranks)) < len(ranks):
        ranks = list(range(len(read_profiles)))
    origin = min(profile.begin_us for profile in read_profiles)
    groups: dict[str, tuple[int, ...]] = {}
    traces, reports = {}, {}
    for index, (rank, profile) in enumerate(zip(ranks, read_profiles, strict=True)):
        host_match = match_host(profile.host, read_trace(hosts[index]), hosts[index]) if hosts else None
        traces[rank], reports[rank] = link_profile(profile, host_match, origin)
        groups |= {name: members for name, members in profile.groups.items() if rank in members}
    return traces, reports, groups
