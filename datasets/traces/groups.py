"""Collectives and messages over ranks: which node of one rank belongs to which of the others.

The k-th collective that a rank begins in a process group is the k-th of every member (as NCCL has it), the k-th message
from one rank to another with a tag the k-th that the other awaits. A group that nothing names is all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..files import write_atomically
from .dependencies import Edges, find_cycle, sorted_dependencies, topological_order
from .schema import CollectiveKind, NodeKind, TraceFileError
from .table import ExecutionTrace

GROUPS_FILE = "comm_group.json"


def write_groups(folder: Path, text: str) -> Path:
    """Write the groups beside the traces of a folder. TraceFileError where that cannot be."""
    return write_atomically(folder / GROUPS_FILE, lambda file: file.write_text(text), TraceFileError, "the groups ")


GROUP_LABEL = "group_name"
"""Our own attribute (string): what a process group is called, where ``pg_name`` is a number."""
UNKNOWN_KIND = -(1 << 62)  # in the place of a collective's kind
COLLECTIVE_NUMBERS = frozenset(kind.value for kind in CollectiveKind)


@dataclass(frozen=True, eq=False)
class RankedTraces:
    """The traces of a run: by rank, with the members of each process group by name."""

    traces: Mapping[int, ExecutionTrace]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: Mapping[int, Path] = field(default_factory=dict)

    def label(self, rank: int) -> str:
        """What to call a rank's trace in a message."""
        return str(self.files.get(rank, f"rank {rank}"))

    def group(self, name: str) -> tuple[int, ...]:
        """The ranks of a group."""
        return self.members.get(name, tuple(self.traces))


@dataclass(frozen=True)
class GroupNumbers:
    """Numbers of process groups, as ASTRA-sim needs for names: it reads ``pg_name`` and the keys of
    ``comm_group.json`` by C++'s ``std::stoi`` (``Workload::initialize_comm_groups`` in its Workload.cc). From 1 on,
    because PyTorch's group 0 is that of all ranks."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)

    def number(self, label: str, ranks: Sequence[int]) -> str:
        """The number of a group by what it is called; a new one where it has none yet."""
        number = self.numbers.setdefault(label, str(len(self.numbers) + 1))
        self.members[number] = tuple(ranks)
        return number

    def written(self) -> str:
        """The text of ``comm_group.json``."""
        return groups_text(self.members)


def groups_text(members: Mapping[str, Sequence[int]]) -> str:
    """The text of ``comm_group.json``: numbers in their order, then names."""
    ordered = sorted(members.items(), key=lambda item: (not is_number(item[0]), len(item[0]), item[0]))
    return json.dumps({name: list(ranks) for name, ranks in ordered}) + "\n"


def is_number(name: str) -> bool:
    """Whether ``std::stoi`` reads a whole name, and readers in Python, too: digits of an int of 32 bits."""
    return name.isascii() and name.isdigit() and int(name) < 1 << 31


@dataclass(frozen=True)
class JoinedCall:
    """A collective, or a message, of several ranks: ``rows`` of their traces by rank. ``kind`` None: a message."""

    group: str
    index: int
    kind: CollectiveKind | None
    size_bytes: int
    ranks: tuple[int, ...]
    rows: Mapping[int, int]


def group_members(folder: Path) -> dict[str, tuple[int, ...]]:
    """What a folder's ``comm_group.json`` says of groups; none where there is no such file."""
    path = folder / GROUPS_FILE if folder.is_dir() else folder.parent / GROUPS_FILE
    if not path.exists():
        return {}
    try:
        ranks_by_group = json.loads(path.read_text())
        members = {str(name): tuple(int(rank) for rank in ranks) for name, ranks in ranks_by_group.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceFileError(f"{path} must be {{group: [ranks]}}: {str(error)[:80]}") from None
    bad = [name for name, ranks in members.items() if len(set(ranks)) < len(ranks) or not ranks]
    if bad:
        raise TraceFileError(f"{path}: group {bad[0]} has no rank, or one twice")
    return members


def communication_of(run: RankedTraces, rank: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Communication of one rank in the order in which it begins: (group or peers, kind, size, row, node kind).

    A collective that does not say what it is belongs to no other rank's: it runs as recorded.
    """
    trace = run.traces[rank]
    communicates = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV, NodeKind.COMM_COLL))
    communicates &= ~trace.column("is_cpu_op", False, "bool").astype(bool)
    if not communicates.any():
        return
    edges, order = sorted_dependencies(trace, run.label(rank), start_order(trace))
    del edges
    kinds, sizes = trace.column("comm_type", UNKNOWN_KIND, "int64"), trace.column("comm_size", -1, "int64")
    communicates &= (trace.kind != NodeKind.COMM_COLL) | (kinds != UNKNOWN_KIND)
    groups = trace.text("pg_name")
    ends = {name: trace.column(name, -1, "int32") for name in ("comm_src", "comm_dst", "comm_tag")}
    for row in order[communicates[order]].tolist():
        if trace.kind[row] == NodeKind.COMM_COLL:
            name = trace.words[groups[row]] if groups[row] >= 0 else ""
            yield name, int(kinds[row]), int(sizes[row]), row, NodeKind.COMM_COLL
        else:
            sends = trace.kind[row] == NodeKind.COMM_SEND
            source, target = (rank, int(ends["comm_dst"][row])) if sends else (int(ends["comm_src"][row]), rank)
            tag = max(int(ends["comm_tag"][row]), 0)
            yield f"{source}>{target}#{tag}", -1, int(sizes[row]), row, int(trace.kind[row])


def start_order(trace: ExecutionTrace) -> np.ndarray:
    """The order of ready nodes [n]: by recorded start where there is any, else by id."""
    keys = (trace.ids, trace.exact_start_us) if trace.start_us.any() else (trace.ids,)
    position = np.empty(len(trace), np.int64)
    position[np.lexsort(keys)] = np.arange(len(trace))
    return position


def join_calls(run: RankedTraces, problems: list[str] | None = None) -> list[JoinedCall]:
    """All collectives and messages. What does not fit together raises TraceFileError, or is added to ``problems``.

    A rank's node that stands alone because other ranks' traces are not there is a call of its own group all the same.
    """
    by_group: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
    for rank in run.traces:
        for name, kind, size, row, node_kind in communication_of(run, rank):
            call = kind if node_kind == NodeKind.COMM_COLL else -2
            by_group.setdefault(name if call != -2 else f"p2p {name}", {}).setdefault(rank, []).append(
                (call, size, row)
            )
    complaints: list[str] = [] if problems is None else problems
    joined = [call for name, by_rank in by_group.items() for call in _join_group(run, name, by_rank, complaints)]
    if complaints and problems is None:
        raise TraceFileError(complaints[0])
    return joined


def _join_group(
    run: RankedTraces, name: str, by_rank: Mapping[int, Sequence[tuple[int, int, int]]], problems: list[str]
) -> Iterator[JoinedCall]:
    message = name.startswith("p2p ")
    if message:
        ends = name[4:].partition("#")[0].split(">")
        members: tuple[int, ...] = (int(ends[0]), int(ends[1]))
    else:
        members = run.group(name)
    present = [rank for rank in members if rank in run.traces]
    strangers = sorted(set(by_rank) - set(members))
    label = f"messages {name[4:]}" if message else f"group {name!r}" if name else "the group of all ranks"
    if strangers:
        row = by_rank[strangers[0]][0][2]
        node = run.traces[strangers[0]].ids[row]
        problems.append(
            f"{run.label(strangers[0])}: node {node} is of {label}, which rank {strangers[0]} is no member of"
        )
        return
    if len(run.traces) > 1 and len(present) < len(members):
        missing = sorted(set(members) - set(present))
        first = next(iter(by_rank))
        node = run.traces[first].ids[by_rank[first][0][2]]
        problems.append(f"{run.label(first)}: node {node} is of {label}, but there is no trace of rank {missing[0]}")
        return
    longest = max(len(calls) for calls in by_rank.values())
    for index in range(longest):
        rows = {rank: by_rank[rank][index] for rank in present if index < len(by_rank.get(rank, ()))}
        if problem := _mismatch(run, label, index, rows, present):
            problems.append(problem)
            return
        kind, size, _ = next(iter(rows.values()))
        if kind != -2 and kind not in COLLECTIVE_NUMBERS:
            rank = next(iter(rows))
            node = run.traces[rank].ids[rows[rank][2]]
            problems.append(f"{run.label(rank)}: node {node} has comm_type {kind}, which is no collective")
            return
        yield JoinedCall(name, index, None if kind == -2 else CollectiveKind(kind), max(size, 0), members,
                         {rank: row for rank, (_, _, row) in rows.items()})  # fmt: skip


def _mismatch(
    run: RankedTraces, label: str, index: int, rows: Mapping[int, tuple[int, int, int]], present: Sequence[int]
) -> str:
    """What keeps ranks from meeting at the place-th call of a group; empty where nothing does."""

    def describe(rank: int) -> str:
        kind, size, row = rows[rank]
        what = (
            "a message" if kind == -2 else CollectiveKind(kind).name if kind in COLLECTIVE_NUMBERS else f"type {kind}"
        )
        return f"{what} of {size:,} bytes in {run.label(rank)} (node {run.traces[rank].ids[row]})"

    first = next(iter(rows))
    absent = [rank for rank in present if rank not in rows]
    if absent:
        return (
            f"deadlock at call {index + 1} of {label}: {describe(first)} waits for rank {absent[0]}, which has no more"
        )
    for rank in rows:
        if rows[rank][:2] != rows[first][:2]:
            return f"deadlock at call {index + 1} of {label}: {describe(first)}, but {describe(rank)}"
    return ""


@dataclass(frozen=True, eq=False)
class JoinedRun:
    """All ranks as one graph in which a joined call is one node.

    ``node`` by rank: the node of each row. ``call`` [nodes]: the place among ``calls``, -1 for others. ``rank`` and
    ``row`` [nodes]: where a node comes from, of a call one of its members.
    """

    calls: Sequence[JoinedCall]
    node: Mapping[int, np.ndarray]
    call: np.ndarray
    rank: np.ndarray
    row: np.ndarray
    edges: Edges


def join_ranks(run: RankedTraces) -> JoinedRun:
    """The graph of all ranks. TraceFileError for calls that do not fit together, and for ranks that wait for each other
    in a circle: the deadlock, and where it is."""
    calls = join_calls(run)
    nodes, ranks_of, rows_of, parents, children, data = {}, [], [], [], [], []
    count = len(calls)
    for rank, trace in run.traces.items():
        nodes[rank] = np.full(len(trace), -1, np.int32)
    for index, call in enumerate(calls):
        for rank, row in call.rows.items():
            nodes[rank][row] = index
    for rank, trace in run.traces.items():
        own_rows = np.flatnonzero(nodes[rank] < 0)
        nodes[rank][own_rows] = np.arange(count, count + len(own_rows), dtype=np.int32)
        count += len(own_rows)
        ranks_of.append(np.full(len(own_rows), rank, np.int32))
        rows_of.append(own_rows.astype(np.int32))
        edges, _ = sorted_dependencies(trace, run.label(rank))
        is_alone = not calls and len(run.traces) == 1  # rows are the nodes
        parents.append(edges.parent if is_alone else nodes[rank][edges.parent])
        children.append(edges.child if is_alone else nodes[rank][edges.child])
        data.append(edges.data)
        del edges
    firsts = [next(iter(call.rows.items())) for call in calls]
    no_rows = np.zeros(0, np.int32)
    rank_of = np.concatenate([np.array([member[0] for member in firsts], np.int32), *ranks_of])
    row_of = np.concatenate([np.array([member[1] for member in firsts], np.int32), *rows_of])
    del ranks_of, rows_of
    call_of = np.full(count, -1, np.int32)
    call_of[: len(calls)] = np.arange(len(calls))
    no_pairs = np.zeros((0, 2), np.uint64)
    ends = [columns[0] if len(columns) == 1 else np.concatenate([no_rows, *columns]) for columns in (parents, children)]
    gates = data[0] if len(data) == 1 else np.concatenate([no_rows.astype(bool), *data])
    all_edges = Edges(count, ends[0], ends[1], gates, no_pairs, no_pairs)
    graph = JoinedRun(calls, nodes, call_of, rank_of, row_of, all_edges)
    if nodes_in_cycle := find_cycle(all_edges, topological_order(all_edges)):
        raise TraceFileError(_deadlock(run, graph, nodes_in_cycle))
    return graph


def _deadlock(run: RankedTraces, joined: JoinedRun, nodes_in_cycle: Sequence[int]) -> str:
    """The calls on a circle of waiting."""
    calls = [joined.calls[joined.call[node]] for node in nodes_in_cycle if joined.call[node] >= 0]
    steps = []
    for call in calls[:4]:
        rank, row = next(iter(call.rows.items()))
        what = call.kind.name if call.kind is not None else "message"
        node = run.traces[rank].ids[row]
        steps.append(f"{what} (call {call.index + 1} of group {call.group!r}, node {node} in {run.label(rank)})")
    return f"deadlock: ranks wait for each other in a circle: {' -> '.join([*steps, '…'] if len(calls) > 4 else steps)}"
