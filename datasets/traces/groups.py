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

from .dependencies import Edges, ordered, topological
from .schema import CollectiveKind, NodeKind, TraceFileError
from .table import ExecutionTrace

GROUPS_FILE = "comm_group.json"
UNTOLD = -(1 << 62)  # in the place of a collective's kind
KNOWN = frozenset(each.value for each in CollectiveKind)


@dataclass(frozen=True, eq=False)
class RankedTraces:
    """The traces of a run: by rank, with the members of each process group by name."""

    traces: Mapping[int, ExecutionTrace]
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    files: Mapping[int, Path] = field(default_factory=dict)

    def called(self, rank: int) -> str:
        """What to call a rank's trace in a message."""
        return str(self.files.get(rank, f"rank {rank}"))

    def group(self, name: str) -> tuple[int, ...]:
        """The ranks of a group."""
        return self.members.get(name, tuple(self.traces))


@dataclass(frozen=True)
class JoinedCall:
    """A collective, or a message, of several ranks: ``rows`` of their traces by rank. ``kind`` None: a message."""

    group: str
    place: int
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
        found = json.loads(path.read_text())
        made = {str(name): tuple(int(rank) for rank in ranks) for name, ranks in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TraceFileError(f"{path} must be {{group: [ranks]}}: {str(error)[:80]}") from None
    bad = [name for name, ranks in made.items() if len(set(ranks)) < len(ranks) or not ranks]
    if bad:
        raise TraceFileError(f"{path}: group {bad[0]} has no rank, or one twice")
    return made


def of_rank(run: RankedTraces, rank: int) -> Iterator[tuple[str, int, int, int, int]]:
    """Communication of one rank in the order in which it begins: (group or peers, kind, size, row, node kind).

    A collective that does not say what it is belongs to no other rank's: it runs as recorded.
    """
    trace = run.traces[rank]
    apart = np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV, NodeKind.COMM_COLL))
    apart &= ~trace.column("is_cpu_op", False, "bool").astype(bool)
    if not apart.any():
        return
    found, order = topological(trace, run.called(rank), begins(trace))
    del found
    kinds, sizes = trace.column("comm_type", UNTOLD, "int64"), trace.column("comm_size", -1, "int64")
    apart &= (trace.kind != NodeKind.COMM_COLL) | (kinds != UNTOLD)
    groups = trace.text("pg_name")
    ends = {name: trace.column(name, -1, "int32") for name in ("comm_src", "comm_dst", "comm_tag")}
    for row in order[apart[order]].tolist():
        if trace.kind[row] == NodeKind.COMM_COLL:
            name = trace.words[groups[row]] if groups[row] >= 0 else ""
            yield name, int(kinds[row]), int(sizes[row]), row, NodeKind.COMM_COLL
        else:
            sends = trace.kind[row] == NodeKind.COMM_SEND
            source, target = (rank, int(ends["comm_dst"][row])) if sends else (int(ends["comm_src"][row]), rank)
            tag = max(int(ends["comm_tag"][row]), 0)
            yield f"{source}>{target}#{tag}", -1, int(sizes[row]), row, int(trace.kind[row])


def begins(trace: ExecutionTrace) -> np.ndarray:
    """The order of ready nodes [n]: by recorded start where there is any, else by id."""
    by = (trace.ids, trace.exact_start_us) if trace.start_us.any() else (trace.ids,)
    made = np.empty(len(trace), np.int64)
    made[np.lexsort(by)] = np.arange(len(trace))
    return made


def joined_calls(run: RankedTraces, complain: list[str] | None = None) -> list[JoinedCall]:
    """All collectives and messages. What does not fit together raises TraceFileError, or is added to ``complain``.

    A rank's node that stands alone because other ranks' traces are not there is a call of its own group all the same.
    """
    seen: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
    for rank in run.traces:
        for name, kind, size, row, node_kind in of_rank(run, rank):
            call = kind if node_kind == NodeKind.COMM_COLL else -2
            seen.setdefault(name if call != -2 else f"p2p {name}", {}).setdefault(rank, []).append((call, size, row))
    wrong: list[str] = [] if complain is None else complain
    made = [call for name, by_rank in seen.items() for call in _of_group(run, name, by_rank, wrong)]
    if wrong and complain is None:
        raise TraceFileError(wrong[0])
    return made


def _of_group(
    run: RankedTraces, name: str, by_rank: Mapping[int, Sequence[tuple[int, int, int]]], wrong: list[str]
) -> Iterator[JoinedCall]:
    message = name.startswith("p2p ")
    if message:
        ends = name[4:].partition("#")[0].split(">")
        members: tuple[int, ...] = (int(ends[0]), int(ends[1]))
    else:
        members = run.group(name)
    present = [rank for rank in members if rank in run.traces]
    strangers = sorted(set(by_rank) - set(members))
    called = f"messages {name[4:]}" if message else f"group {name!r}" if name else "the group of all ranks"
    if strangers:
        row = by_rank[strangers[0]][0][2]
        node = run.traces[strangers[0]].ids[row]
        wrong.append(
            f"{run.called(strangers[0])}: node {node} is of {called}, which rank {strangers[0]} is no member of"
        )
        return
    if len(run.traces) > 1 and len(present) < len(members):
        missing = sorted(set(members) - set(present))
        first = next(iter(by_rank))
        node = run.traces[first].ids[by_rank[first][0][2]]
        wrong.append(f"{run.called(first)}: node {node} is of {called}, but there is no trace of rank {missing[0]}")
        return
    longest = max(len(calls) for calls in by_rank.values())
    for place in range(longest):
        rows = {rank: by_rank[rank][place] for rank in present if place < len(by_rank.get(rank, ()))}
        if line := _mismatch(run, called, place, rows, present):
            wrong.append(line)
            return
        kind, size, _ = next(iter(rows.values()))
        if kind != -2 and kind not in KNOWN:
            rank = next(iter(rows))
            node = run.traces[rank].ids[rows[rank][2]]
            wrong.append(f"{run.called(rank)}: node {node} has comm_type {kind}, which is no collective")
            return
        yield JoinedCall(name, place, None if kind == -2 else CollectiveKind(kind), max(size, 0), members,
                         {rank: row for rank, (_, _, row) in rows.items()})  # fmt: skip


def _mismatch(
    run: RankedTraces, called: str, place: int, rows: Mapping[int, tuple[int, int, int]], present: Sequence[int]
) -> str:
    """What keeps ranks from meeting at the place-th call of a group; empty where nothing does."""

    def shown(rank: int) -> str:
        kind, size, row = rows[rank]
        what = "a message" if kind == -2 else CollectiveKind(kind).name if kind in KNOWN else f"type {kind}"
        return f"{what} of {size:,} bytes in {run.called(rank)} (node {run.traces[rank].ids[row]})"

    first = next(iter(rows))
    absent = [rank for rank in present if rank not in rows]
    if absent:
        return f"deadlock at call {place + 1} of {called}: {shown(first)} waits for rank {absent[0]}, which has no more"
    for rank in rows:
        if rows[rank][:2] != rows[first][:2]:
            return f"deadlock at call {place + 1} of {called}: {shown(first)}, but {shown(rank)}"
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


def joined(run: RankedTraces) -> JoinedRun:
    """The graph of all ranks. TraceFileError for calls that do not fit together, and for ranks that wait for each other
    in a circle: the deadlock, and where it is."""
    from .dependencies import cycle

    calls = joined_calls(run)
    nodes, ranks_of, rows_of, parents, children, data = {}, [], [], [], [], []
    count = len(calls)
    for rank, trace in run.traces.items():
        nodes[rank] = np.full(len(trace), -1, np.int32)
    for place, call in enumerate(calls):
        for rank, row in call.rows.items():
            nodes[rank][row] = place
    for rank, trace in run.traces.items():
        own = np.flatnonzero(nodes[rank] < 0)
        nodes[rank][own] = np.arange(count, count + len(own), dtype=np.int32)
        count += len(own)
        ranks_of.append(np.full(len(own), rank, np.int32))
        rows_of.append(own.astype(np.int32))
        found, _ = topological(trace, run.called(rank))
        same = not calls and len(run.traces) == 1  # rows are the nodes
        parents.append(found.parent if same else nodes[rank][found.parent])
        children.append(found.child if same else nodes[rank][found.child])
        data.append(found.data)
        del found
    firsts = [next(iter(call.rows.items())) for call in calls]
    none = np.zeros(0, np.int32)
    rank_of = np.concatenate([np.array([each[0] for each in firsts], np.int32), *ranks_of])
    row_of = np.concatenate([np.array([each[1] for each in firsts], np.int32), *rows_of])
    del ranks_of, rows_of
    call_of = np.full(count, -1, np.int32)
    call_of[: len(calls)] = np.arange(len(calls))
    lost = np.zeros((0, 2), np.uint64)
    ends = [each[0] if len(each) == 1 else np.concatenate([none, *each]) for each in (parents, children)]
    gates = data[0] if len(data) == 1 else np.concatenate([none.astype(bool), *data])
    whole = Edges(count, ends[0], ends[1], gates, lost, lost)
    made = JoinedRun(calls, nodes, call_of, rank_of, row_of, whole)
    if around := cycle(whole, ordered(whole)):
        raise TraceFileError(_deadlock(run, made, around))
    return made


def _deadlock(run: RankedTraces, made: JoinedRun, around: Sequence[int]) -> str:
    """The calls on a circle of waiting."""
    on = [made.calls[made.call[node]] for node in around if made.call[node] >= 0]
    shown = []
    for call in on[:4]:
        rank, row = next(iter(call.rows.items()))
        what = call.kind.name if call.kind is not None else "message"
        node = run.traces[rank].ids[row]
        shown.append(f"{what} (call {call.place + 1} of group {call.group!r}, node {node} in {run.called(rank)})")
    return f"deadlock: ranks wait for each other in a circle: {' -> '.join([*shown, '…'] if len(on) > 4 else shown)}"
