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
from .gaps import ROUNDED_US, filled
from .matching import HostMatch, match
from .profiles import (
    COPIES,
    LAUNCHES,
    ON_DEVICE,
    OWN_OP,
    WAITS,
    Profile,
    collective_of,
    continued,
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
        if child == parent or self.end[parent] > self.start[child] + ROUNDED_US:
            return False
        self.pairs.append((child, parent))
        self.counts[sort] += 1
        return True


def link(
    profile: Profile, host: HostMatch | None = None, origin_us: float | None = None
) -> tuple[ExecutionTrace, LinkReport]:
    """The execution trace of a profile, and what was linked. Times count from ``origin_us`` (default: its first event).

    TraceFileError for a profile in which nothing can be told apart.
    """
    host_events = [*profile.host, *continued(profile.host)]
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
    launcher = _launchers(events, len(host_events))
    start, end, waited = _own_times(events, lanes, launcher, begin, stop)
    found = _Edges(start, end)
    for rows in lanes.values():
        for before, after in itertools.pairwise(rows):
            found.add("order", after, before)
    for kernel, call in launcher.items():
        found.add("launch", kernel, call)
    for call, kernel in waited.items():
        found.add("wait", call, kernel)
    streams = {key: rows for key, rows in lanes.items() if key[0] == "device"}
    _across_streams(events, streams, launcher, begin, found)
    _across_threads({key: rows for key, rows in lanes.items() if key[0] == "host"}, found)
    pairs = np.array(found.pairs, np.int64).reshape(-1, 2)
    tie = np.empty(len(events), np.int64)
    tie[order] = np.arange(len(events))
    everything = np.ones(len(events), bool)
    timed = filled(start - origin, end - origin, pairs[:, 0], pairs[:, 1], everything, tie)
    trace = _built(profile, events, host, lanes, timed)
    matched = sum(row in host.rows for row in range(len(profile.host))) if host else 0
    report = LinkReport(len(trace), len(profile.device), len(launcher), len(profile.host), matched, dict(found.counts),
                        float(np.sum((timed.end - timed.start)[timed.gap])), profile.note)  # fmt: skip
    return trace, report


def _launchers(events: list[Event], hosts: int) -> dict[int, int]:
    """The call that launched each device event, by row, where the profile tells."""
    calls = {correlation(event): row for row, event in enumerate(events[:hosts])
             if event.get("cat") in LAUNCHES and correlation(event) is not None}  # fmt: skip
    found = {row: calls.get(correlation(event)) for row, event in enumerate(events[hosts:], hosts)}
    return {row: call for row, call in found.items() if call is not None}


def _own_times(
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
    waited = {}
    for row, event in enumerate(events):
        if event.get("cat") in LAUNCHES and WAITS.match(event["name"]):
            place = last_before(ends, float(stop[row]))
            while place >= 0 and begin[launcher[kernels[place]]] > begin[row]:
                place -= 1
            if place >= 0 and ends[place] > begin[row]:
                waited[row] = kernels[place]
                start[row] = min(ends[place], end[row]) if end[row] > ends[place] else end[row]
    return start, end, {call: kernel for call, kernel in waited.items() if end[kernel] <= start[call] + ROUNDED_US}


def _across_streams(
    events: list[Event], streams: Mapping[tuple[str, ...], list[int]], launcher: Mapping[int, int], begin: np.ndarray,
    found: _Edges,
) -> None:  # fmt: skip
    """Collectives wait for what was launched on other streams before them; compute for collectives that have ended.

    Of the second sort an edge is drawn where a stream was told to wait (``StreamWaitEvent``) since its last kernel.
    """
    launched: dict[tuple[str, ...], tuple[list[float], list[int]]] = {}
    for key, rows in streams.items():
        own = sorted((float(begin[launcher[row]]), row) for row in rows if row in launcher)
        launched[key] = [at for at, _ in own], [row for _, row in own]
    told = sorted(float(e["ts"]) for e in events if e.get("cat") in LAUNCHES and "StreamWaitEvent" in e["name"])
    for key, (times, rows) in launched.items():
        before = -np.inf
        for at, row in zip(times, rows, strict=True):
            place = last_before(told, at)
            if is_collective(events[row]) or (place >= 0 and told[place] > before):
                for other, (other_times, other_rows) in launched.items():
                    last = last_before(other_times, at)
                    if other != key and other[:2] == key[:2] and last >= 0:
                        found.add("stream", row, other_rows[last])
            before = at


def _across_threads(threads: Mapping[tuple[str, ...], list[int]], found: _Edges) -> None:
    """A thread that did nothing for long goes on from what ended last on another one."""
    ends = {key: sorted((float(found.end[row]), row) for row in rows) for key, rows in threads.items()}
    for key, rows in threads.items():
        for before, row in zip([None, *rows[:-1]], rows, strict=True):
            if before is not None and found.start[row] - found.end[before] < THREAD_WAITS_US:
                continue
            best = None
            for other, known in ends.items():
                place = last_before([end for end, _ in known], float(found.start[row])) if other != key else -1
                while place >= 0 and found.start[known[place][1]] >= found.start[row]:
                    place -= 1  # took no time at this very moment: neither of the two came first
                if place >= 0 and (best is None or known[place] > best):
                    best = known[place]
            if best is not None:
                found.add("thread", row, best[1])


# --- nodes ---------------------------------------------------------------------------------------------


def _built(
    profile: Profile,
    events: list[Event],
    host: HostMatch | None,
    lanes: Mapping[tuple[str, ...], list[int]],
    timed: Any,
) -> ExecutionTrace:
    numbers = {key: number for number, key in enumerate(sorted(lanes))}
    lane_of = {row: key for key, rows in lanes.items() for row in rows}
    ops = _ops(profile)
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
    for place, (row, gap, start, end) in enumerate(columns):
        event, key = events[row], lane_of[row]
        on_host = key[0] == "host"
        own = event["args"].get(OWN_OP)
        at: list[Attribute] = [("is_cpu_op", "bool", on_host and (gap or own is None)), *_where(key, numbers[key])]
        times = {"start_us": start, "duration_us": max(end - start, 0.0), "data": parents[place]}
        if gap:
            builder.add(place + 1, GAP, attributes=[*at, (OP, "string", GAP)], **times)
        elif on_host:
            told = host.told(row) if host else None
            sides: dict[str, Any] = {} if told is None else {"inputs": told.inputs, "outputs": told.outputs}
            if told is None and event["args"].get("Input Dims"):
                sides = {"inputs": ["[]", repr(event["args"]["Input Dims"]), repr(event["args"].get("Input type", []))]}
            more = [] if told is None else list(told.attributes)
            at.append(("inclusive_us", "double", float(event["dur"])))
            at += _op_told(own) if own is not None else []
            builder.add(place + 1, event["name"], attributes=[*at, *more], **sides, **times)
        else:
            kind, more = _device_node(event, ops.get(correlation(event)))
            builder.add(place + 1, event["name"], kind, attributes=[*at, *more], **times)
    return builder.trace()


def _where(key: tuple[str, ...], number: int) -> list[Attribute]:
    if key[0] == "host":
        return [("tid", "uint64", number)]
    return [("stream", "int64", int(key[2]) if key[2].isdigit() else number)]


def _device_node(event: Event, op: tuple[Op, float] | None) -> tuple[NodeKind, list[Attribute]]:
    kind = collective_of(event)
    if kind is not None:
        told: list[Attribute] = [("comm_type", "int64", kind), ("comm_size", "int64", size_of_call(event))]
        group = event["args"].get("Process Group Name")
        return NodeKind.COMM_COLL, [*told, *([("pg_name", "string", str(group))] if group is not None else [])]
    if is_collective(event):  # RCCL's names do not tell which, where the profiler kept no arguments
        return NodeKind.COMM_COLL, []
    if event.get("cat") in COPIES:
        moved = event["args"].get("bytes")
        size: list[Attribute] = [("tensor_size", "uint64", moved)] if isinstance(moved, int) and moved >= 0 else []
        name = event["name"].lower()
        return (NodeKind.MEM_LOAD if "htod" in name else NodeKind.MEM_STORE if "dtoh" in name else NodeKind.COMP), size
    if op is None:
        return NodeKind.COMP, []
    made, share = op
    return NodeKind.COMP, [*_op_told(made), (SHARE, "double", share)]


def _op_told(op: Op) -> list[Attribute]:
    return [("num_ops", "int64", int(op.cost.flops)), ("tensor_size", "uint64", int(op.cost.bytes)),
            (OP, "string", json.dumps(op.to_dict()))]  # fmt: skip


def _ops(profile: Profile) -> dict[Any, tuple[Op, float]]:
    """The op of each kernel that belongs to one, by correlation, and the kernel's share of its time."""
    kernels = [e for e in profile.device if correlation(e) is not None and not is_collective(e)]
    found: dict[Any, tuple[Op, float]] = {}
    for call, members in kernels_of_calls([*profile.host, *profile.device], kernels):
        total_us = sum(float(event["dur"]) for event in members)
        try:
            op = op_of(call) if call.name else None
            if op is None or not total_us:
                continue
            made = make_op(op.kind, op.dtype, op.out_dtype, **op.dims)
        except (Unmapped, OpError):
            continue
        for event in members:
            found[correlation(event)] = made, float(event["dur"]) / total_us
    return found


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
    read = [read_profile(path) for path in profiles]
    ranks = [each.rank if each.rank is not None else place for place, each in enumerate(read)]
    if len(set(ranks)) < len(ranks):
        ranks = list(range(len(read)))
    origin = min(each.begin_us for each in read)
    groups: dict[str, tuple[int, ...]] = {}
    traces, reports = {}, {}
    for place, (rank, profile) in enumerate(zip(ranks, read, strict=True)):
        found = match(profile.host, read_trace(hosts[place]), hosts[place]) if hosts else None
        traces[rank], reports[rank] = link(profile, found, origin)
        groups |= {name: members for name, members in profile.groups.items() if rank in members}
    return traces, reports, groups
