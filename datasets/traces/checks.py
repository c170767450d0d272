"""What is wrong with traces: of one rank by itself, then of the ranks together.

Each finding is one line with node and file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from .dependencies import Edges, dependency_edges, find_cycle, topological_order
from .groups import GROUPS_FILE, RankedTraces, group_members, is_number, join_calls, join_ranks
from .reading import rank_files, read_trace
from .schema import ARMS, FEEDER_ARMS, CollectiveKind, NodeKind, TraceFileError, arm_name
from .table import ExecutionTrace

FINDING_LIMIT = 20  # findings of one kind in one file; the rest is counted
NO_NUMBER = (
    "ASTRA-sim reads group names as whole numbers (std::stoi) and stops there; "
    "`opcast trace convert` of the folder numbers them"
)
TIMESTAMP_ROUNDING_US = 1.0  # what a start and a duration in whole microseconds may be off by


def find_problems(path: Path) -> list[str]:
    """Every problem of a trace, or of a folder of them; empty where they can be simulated."""
    problems, traces, files = list[str](), dict[int, ExecutionTrace](), rank_files(path)
    for rank, file in files.items():
        try:
            traces[rank] = read_trace(file)
        except TraceFileError as error:
            problems.append(str(error))
    for rank, trace in traces.items():
        problems += check_trace(trace, str(files[rank]))
    try:
        members = group_members(path)
    except TraceFileError as error:
        return [*problems, str(error)]
    problems += check_group_names(members, path)
    if not problems:
        problems = check_ranks(RankedTraces(traces, members, files))
    return problems


def check_ranks(run: RankedTraces) -> list[str]:
    """What does not fit together over ranks whose own traces are sound."""
    problems: list[str] = []
    join_calls(run, problems)
    if not problems:
        try:
            join_ranks(run)
        except TraceFileError as error:
            problems.append(str(error))
    return problems


def check_group_names(members: Mapping[str, Sequence[int]], path: Path) -> list[str]:
    """Groups of ``comm_group.json`` whose names are no numbers: ASTRA-sim stops there."""
    names = [name for name in members if not is_number(name)]
    if not names:
        return []
    file = path / GROUPS_FILE if path.is_dir() else path.parent / GROUPS_FILE
    more = f" and {len(names) - 1:,} more groups" if names[1:] else ""
    return [f"{file}: group {names[0]!r}{more}: {NO_NUMBER}"]


def check_trace(trace: ExecutionTrace, name: str) -> list[str]:
    """What is wrong with one rank's trace."""
    problems = check_structure(trace, name, control=True)
    return problems if not len(trace) else [*problems, *_check_arms(trace, name), *_check_communication(trace, name)]


def check_structure(trace: ExecutionTrace, name: str, control: bool) -> list[str]:
    """What keeps a trace from being run: kinds and ids of nodes, dependencies, streams, times.

    Without ``control`` circles are of data alone, which alone gate execution: in the reference's own example there are
    circles through control dependencies.
    """
    if not len(trace):
        return [f"{name} holds no nodes"]
    problems = [*_check_kinds(trace, name), *_check_ids(trace, name)]
    dependencies = dependency_edges(trace, control)
    for row, parent_id in dependencies.dangling[:FINDING_LIMIT].tolist():
        problems.append(f"{name}: node {trace.ids[row]} depends on {parent_id}, which is no node of this trace")
    problems += _count_rest(len(dependencies.dangling), name, "dependencies on nodes that are not there")
    if rows_in_cycle := find_cycle(dependencies, topological_order(dependencies)):
        ids = " -> ".join(str(trace.ids[row]) for row in [*rows_in_cycle[:6], rows_in_cycle[0]])
        problems.append(f"{name}: nodes depend on each other in a circle: {ids}")
    return [*problems, *_check_streams(trace, name), *_check_times(trace, name, dependencies)]


def _count_rest(count: int, name: str, what: str) -> list[str]:
    return [f"{name}: {count - FINDING_LIMIT:,} more {what}"] if count > FINDING_LIMIT else []


def _check_kinds(trace: ExecutionTrace, name: str) -> Iterator[str]:
    unknown = np.flatnonzero((trace.kind <= NodeKind.INVALID) | (trace.kind > max(NodeKind)))
    for row in unknown[:FINDING_LIMIT].tolist():
        kind = int(trace.kind[row])
        kinds = ", ".join(f"{kind.value} {kind.name}" for kind in NodeKind if kind)
        yield f"{name}: node {trace.ids[row]} has type {kind}, which is none of {kinds}"
    yield from _count_rest(len(unknown), name, "nodes of no known type")


def _check_ids(trace: ExecutionTrace, name: str) -> Iterator[str]:
    ids, counts = np.unique(trace.ids, return_counts=True)
    twice = ids[counts > 1]
    for id in twice[:FINDING_LIMIT].tolist():
        rows = np.flatnonzero(trace.ids == id)[:2].tolist()
        yield f"{name}: node {id} is there twice ({trace.name_of(rows[0])!r} and {trace.name_of(rows[1])!r})"
    yield from _count_rest(len(twice), name, "ids that are there twice")


def _check_arms(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Attributes that ASTRA-sim's feeder would read as 0, because they stand in another arm of the value."""
    for attribute, arm in FEEDER_ARMS.items():
        number = trace.names.get(attribute, -1)
        indices = np.flatnonzero((trace.attributes.name == number) & (trace.attributes.arm != ARMS[arm].field))
        if len(indices):
            row = int(np.searchsorted(trace.attributes.offsets, indices[0], "right") - 1)
            field = int(trace.attributes.arm[indices[0]])
            actual = arm_name(field) if field else "nothing"
            more_nodes = f", and {len(indices) - 1:,} more nodes" if len(indices) > 1 else ""
            yield (
                f"{name}: node {trace.ids[row]}{more_nodes}: {attribute} is of kind {actual}; "
                f"readers want {arm} and take 0"
            )


def _check_communication(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Communication that does not say what it is."""
    collective = trace.kind == NodeKind.COMM_COLL
    kinds = trace.column("comm_type", -1, "int64")
    bad = np.flatnonzero(collective & ~np.isin(kinds, [kind.value for kind in CollectiveKind]))
    for row in bad[:FINDING_LIMIT].tolist():
        fault = f"has comm_type {kinds[row]}, which is no collective" if kinds[row] != -1 else "has no comm_type"
        yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) {fault}; known are 0 to {max(CollectiveKind)}"
    yield from _count_rest(len(bad), name, "collectives of no known kind")
    groups = trace.text("pg_name")
    no_number = {number for number in np.unique(groups[groups >= 0]).tolist() if not is_number(trace.words[number])}
    unread = np.flatnonzero(np.isin(groups, list(no_number)))
    if len(unread):
        more_nodes = f" and {len(unread) - 1:,} more nodes" if unread[1:].size else ""
        label = trace.words[groups[unread[0]]]
        yield f"{name}: node {trace.ids[unread[0]]}{more_nodes}: pg_name {label!r}: {NO_NUMBER}"
    sizes = trace.column("comm_size", -1, "int64")
    messages = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV))
    sized = (collective & (kinds != CollectiveKind.BARRIER)) | messages
    for row in np.flatnonzero(sized & (sizes < 0))[:FINDING_LIMIT].tolist():
        yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) has no comm_size, or one below 0"
    for kind, end in ((NodeKind.COMM_SEND, "comm_dst"), (NodeKind.COMM_RECV, "comm_src")):
        no_peer = np.flatnonzero((trace.kind == kind) & (trace.column(end, -1, "int32") < 0))
        for row in no_peer[:FINDING_LIMIT].tolist():
            yield f"{name}: node {trace.ids[row]} ({trace.name_of(row)!r}) has no {end}: the rank at its other end"


def _check_streams(trace: ExecutionTrace, name: str) -> Iterator[str]:
    """Nodes that ran beside each other on one stream, which runs one at a time."""
    if not trace.start_us.any():
        return
    streams, end = trace.column("stream", -1, "int64"), trace.exact_start_us + trace.exact_us
    is_message = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV))
    rows = np.flatnonzero((streams >= 0) & ~is_message & (trace.exact_us > 0))
    rows = rows[np.lexsort((trace.exact_start_us[rows], streams[rows]))]
    before, after = rows[:-1], rows[1:]
    bad = (streams[before] == streams[after]) & (trace.exact_start_us[after] < end[before] - TIMESTAMP_ROUNDING_US)
    for first, second in zip(before[bad][:FINDING_LIMIT].tolist(), after[bad][:FINDING_LIMIT].tolist(), strict=True):
        yield (f"{name}: node {trace.ids[second]} ({trace.name_of(second)!r}) begins on stream {streams[second]} while "
               f"node {trace.ids[first]} ({trace.name_of(first)!r}) still runs there")  # fmt: skip
    yield from _count_rest(int(bad.sum()), name, "nodes that run beside another on their stream")


def _check_times(trace: ExecutionTrace, name: str, dependencies: Edges) -> Iterator[str]:
    """Nodes that began before a node that they wait for."""
    if not trace.start_us.any():
        return
    start = trace.exact_start_us
    bad = (
        dependencies.data
        & (start[dependencies.parent] > start[dependencies.child] + TIMESTAMP_ROUNDING_US)
        & (start[dependencies.child] > 0)
    )
    for child, parent in zip(
        dependencies.child[bad][:FINDING_LIMIT].tolist(), dependencies.parent[bad][:FINDING_LIMIT].tolist(), strict=True
    ):
        yield (f"{name}: node {trace.ids[child]} ({trace.name_of(child)!r}) depends on node {trace.ids[parent]}, which "
               f"began {start[parent] - start[child]:.6g} us later")  # fmt: skip
    yield from _count_rest(int(bad.sum()), name, "nodes that began before what they depend on")
