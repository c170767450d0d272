"""What is wrong with traces: of one rank by itself, then of the ranks together.

Each finding is one line with node and file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .dependencies import Edges, cycle, edges, ordered
from .groups import RankedTraces, group_members, joined, joined_calls
from .reading import rank_files, read_trace
from .schema import ARMS, FEEDER, CollectiveKind, NodeKind, TraceFileError, arm_name
from .table import ExecutionTrace

MOST = 20  # findings of one kind in one file; the rest is counted
ROUNDED_US = 1.0  # what a start and a duration in whole microseconds may be off by


def problems(path: Path) -> list[str]:
    """Every problem of a trace, or of a folder of them; empty where they can be simulated."""
    found, traces, files = list[str](), dict[int, ExecutionTrace](), rank_files(path)
    for rank, file in files.items():
        try:
            traces[rank] = read_trace(file)
        except TraceFileError as error:
            found.append(str(error))
    for rank, trace in traces.items():
        found += of_trace(trace, str(files[rank]))
    try:
        members = group_members(path)
    except TraceFileError as error:
        return [*found, str(error)]
    if not found:
        found = of_ranks(RankedTraces(traces, members, files))
    return found


def of_ranks(run: RankedTraces) -> list[str]:
    """What does not fit together over ranks whose own traces are sound."""
    found: list[str] = []
    joined_calls(run, found)
    if not found:
        try:
            joined(run)
        except TraceFileError as error:
            found.append(str(error))
    return found


def of_trace(trace: ExecutionTrace, name: str) -> list[str]:
    """What is wrong with one rank's trace."""
    found = structure(trace, name, control=True)
    return found if not len(trace) else [*found, *_arms(trace, name), *_communication(trace, name)]


def structure(trace: ExecutionTrace, name: str, control: bool) -> list[str]:
    """What keeps a trace from being run: kinds and ids of nodes, dependencies, streams, times.

    Without ``control`` circles are of data alone, which alone gate execution: in the reference's own example there are
    circles through control dependencies.
    """
    if not len(trace):
        return [f"{name} holds no nodes"]
    found = [*_kinds(trace, name), *_ids(trace, name)]
    linked = edges(trace, control)
    for row, wanted in linked.dangling[:MOST].tolist():
        found.append(f"{name}: node {trace.ids[row]} depends on {wanted}, which is no node of this trace")
    found += _rest(len(linked.dangling), name, "dependencies on nodes that are not there")
    if around := cycle(linked, ordered(linked)):
        shown = " -> ".join(str(trace.ids[row]) for row in [*around[:6], around[0]])
        found.append(f"{name}: nodes depend on each other in a circle: {shown}")
    return [*found, *_streams(trace, name), *_times(trace, name, linked)]


def _rest(count: int, name: str, what: str) -> list[str]:
    return [f"{name}: {count - MOST:,} more {what}"] if count > MOST else []


def _kinds(trace: ExecutionTrace, name: str) -> Iterator[str]:
    unknown = np.flatnonzero((trace.kind <= NodeKind.INVALID) | (trace.kind > max(NodeKind)))
    for row in unknown[:MOST].tolist():
        kind = int(trace.kind[row])
        known = ", ".join(f"{each.value} {each.name}" for each in NodeKind if each)
        yield f"{name}: node {trace.ids[row]} has type {kind}, which is none of {known}"
    yield from _rest(len(unknown), name, "nodes of no known type")


def _ids(trace: ExecutionTrace, name: str) -> Iterator[str]:
    ids, counts = np.unique(trace.ids, return_counts=True)
    twice = ids[counts > 1]
    for each in twice[:MOST].tolist():
        rows = np.flatnonzero(trace.ids == each)[:2].tolist()
        yield f"{name}: node {each} is there twice ({trace.name_of(rows[0])!r} and {trace.name_of(rows[1])!r})"
    yield from _rest(len(twice), name, "ids that are there twice")


def _arms(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Attributes that ASTRA-sim's feeder would read as 0, because they stand in another arm of the value."""
    for attribute, arm in FEEDER.items():
        number = trace.names.get(attribute, -1)
        places = np.flatnonzero((trace.attributes.name == number) & (trace.attributes.arm != ARMS[arm].field))
        if len(places):
            row = int(np.searchsorted(trace.attributes.offsets, places[0], "right") - 1)
            field = int(trace.attributes.arm[places[0]])
            is_now = arm_name(field) if field else "nothing"
            more = f", and {len(places) - 1:,} more nodes" if len(places) > 1 else ""
            yield f"{name}: node {trace.ids[row]}{more}: {attribute} is of kind {is_now}; readers want {arm} and take 0"


def _communication(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Communication that does not say what it is."""
    collective = trace.kind == NodeKind.COMM_COLL
    kinds = trace.column("comm_type", -1, "int64")
    bad = np.flatnonzero(collective & ~np.isin(kinds, [each.value for each in CollectiveKind]))
    for row in bad[:MOST].tolist():
        told = f"has comm_type {kinds[row]}, which is no collective" if kinds[row] != -1 else "has no comm_type"
        yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) {told}; known are 0 to {max(CollectiveKind)}"
    yield from _rest(len(bad), name, "collectives of no known kind")
    sizes = trace.column("comm_size", -1, "int64")
    messages = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV))
    sized = (collective & (kinds != CollectiveKind.BARRIER)) | messages
    for row in np.flatnonzero(sized & (sizes < 0))[:MOST].tolist():
        yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) has no comm_size, or one below 0"
    for kind, end in ((NodeKind.COMM_SEND, "comm_dst"), (NodeKind.COMM_RECV, "comm_src")):
        lost = np.flatnonzero((trace.kind == kind) & (trace.column(end, -1, "int32") < 0))
        for row in lost[:MOST].tolist():
            yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) has no {end}: the rank at its other end"


def _streams(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Nodes that ran beside each other on one stream, which runs one at a time."""
    if not trace.start_us.any():
        return
    streams, end = trace.column("stream", -1, "int64"), trace.exact_start_us + trace.exact_us
    apart = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV))
    rows = np.flatnonzero((streams >= 0) & ~apart & (trace.exact_us > 0))
    rows = rows[np.lexsort((trace.exact_start_us[rows], streams[rows]))]
    before, after = rows[:-1], rows[1:]
    bad = (streams[before] == streams[after]) & (trace.exact_start_us[after] < end[before] - ROUNDED_US)
    for one, other in zip(before[bad][:MOST].tolist(), after[bad][:MOST].tolist(), strict=True):
        yield (f"{name}: node {trace.ids[other]} ({trace.name_of(other)!r}) begins on stream {streams[other]} while "
               f"node {trace.ids[one]} ({trace.name_of(one)!r}) still runs there")  # fmt: skip
    yield from _rest(int(bad.sum()), name, "nodes that run beside another on their stream")


def _times(trace: ExecutionTrace, name: str, found: Edges) -> Iterator[str]:
    """Nodes that began before a node that they wait for."""
    if not trace.start_us.any():
        return
    start = trace.exact_start_us
    bad = found.data & (start[found.parent] > start[found.child] + ROUNDED_US) & (start[found.child] > 0)
    for child, parent in zip(found.child[bad][:MOST].tolist(), found.parent[bad][:MOST].tolist(), strict=True):
        yield (f"{name}: node {trace.ids[child]} ({trace.name_of(child)!r}) depends on node {trace.ids[parent]}, which "
               f"began {start[parent] - start[child]:.6g} us later")  # fmt: skip
    yield from _rest(int(bad.sum()), name, "nodes that began before what they depend on")
