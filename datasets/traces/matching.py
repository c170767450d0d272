"""Which operator of a profile is which node of PyTorch's host trace: that has the tensors, the profile has the times.

Three ways, from the surest to the last resort: the record function's id that newer profiles keep, the external id that
some keep as that, and the order of names on each thread. The first by which nine of ten names agree is taken.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..sources.kineto import OPERATORS, Event
from .builder import Attribute
from .schema import TraceFileError
from .table import ExecutionTrace

ENOUGH_AGREEMENT = 0.9
HOST_ATTRIBUTES = ("rf_id", "seq_id", "fw_parent", "scope", "op_schema")
ROOT_PREFIX = "[pytorch|"


@dataclass(frozen=True)
class HostNode:
    """What the host trace tells of an operator."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Sequence[Attribute]


@dataclass(frozen=True, eq=False)
class HostMatch:
    """``rows``: the host trace's row of an event of the profile, by their places; ``how`` they were matched."""

    trace: ExecutionTrace
    rows: Mapping[int, int]
    how: str

    def host_node(self, index: int) -> HostNode | None:
        """What the host trace tells of an event."""
        row = self.rows.get(index)
        if row is None:
            return None
        words = self.trace.words
        sides = [
            [words[number] for number in column[row] if number >= 0]
            for column in (self.trace.inputs, self.trace.outputs)
        ]
        attributes = [
            attribute for attribute in self.trace.attributes.items(row, words) if attribute[0] in HOST_ATTRIBUTES
        ]
        return HostNode(
            sides[0] or ["[]"] * 3,
            sides[1] or ["[]"] * 3,
            [*attributes, ("host_id", "uint64", int(self.trace.ids[row]))],
        )


def match_host(events: Sequence[Event], trace: ExecutionTrace, path: Path) -> HostMatch:
    """Match a profile's host events to a host trace. TraceFileError where they are of different runs."""
    operators = [index for index, event in enumerate(events) if event.get("cat") in OPERATORS]
    best: tuple[float, HostMatch] | None = None
    for how, rows in _candidate_matches(events, operators, trace):
        agreeing = sum(trace.name_of(row) == events[index]["name"] for index, row in rows.items())
        possible = min(len(operators), _operator_count(trace))
        share = agreeing / max(possible, len(rows), 1)
        agreeing_rows = {index: row for index, row in rows.items() if trace.name_of(row) == events[index]["name"]}
        if share >= ENOUGH_AGREEMENT:
            return HostMatch(trace, agreeing_rows, how)
        if best is None or share > best[0]:
            best = share, HostMatch(trace, agreeing_rows, how)
    if best is None or best[0] < 0.5:
        share = best[0] if best else 0.0
        raise TraceFileError(
            f"{path} is no host trace of this profile's run: {share:.0%} of its operators have their like"
        )
    return best[1]


def _operator_count(trace: ExecutionTrace) -> int:
    return sum(not trace.name_of(row).startswith(ROOT_PREFIX) for row in range(len(trace)))


def _candidate_matches(
    events: Sequence[Event], operators: Sequence[int], trace: ExecutionTrace
) -> Iterator[tuple[str, dict[int, int]]]:
    ids = trace.column("rf_id", 0, "uint64").astype(np.int64)
    by_id = {int(id): row for row, id in enumerate(ids.tolist()) if id > 0}
    for how, name in (("record function id", "Record function id"), ("external id", "External id")):
        yield how, {
            index: by_id[value] for index in operators
            if isinstance(value := events[index]["args"].get(name), int) and value in by_id
        }  # fmt: skip
    yield "order of names", _match_by_order(events, operators, trace, ids)


def _match_by_order(
    events: Sequence[Event], operators: Sequence[int], trace: ExecutionTrace, ids: np.ndarray
) -> dict[int, int]:
    """Threads paired by how alike their sequences of names are, then operators by the longest common runs of names."""
    threads: dict[object, list[int]] = {}
    for index in sorted(operators, key=lambda index: (float(events[index]["ts"]), -float(events[index]["dur"]))):
        threads.setdefault(events[index].get("tid"), []).append(index)
    rows_by_tid: dict[int, list[int]] = {}
    tids = trace.column("tid", 0, "uint64").astype(np.int64)
    for row in np.argsort(ids, kind="stable").tolist():
        if not trace.name_of(row).startswith(ROOT_PREFIX):
            rows_by_tid.setdefault(int(tids[row]), []).append(row)
    row_of_event: dict[int, int] = {}
    unmatched = dict(rows_by_tid)
    for indices in sorted(threads.values(), key=len, reverse=True):
        names = [events[index]["name"] for index in indices]
        best: list[tuple[int, int]] = []
        best_tid = None
        for tid, rows in unmatched.items():
            row_names = [trace.name_of(row) for row in rows]
            blocks = difflib.SequenceMatcher(None, names, row_names, autojunk=False).get_matching_blocks()
            pairs = [(indices[b.a + i], rows[b.b + i]) for b in blocks for i in range(b.size)]
            if len(pairs) > len(best):
                best, best_tid = pairs, tid
        if best_tid is not None:
            unmatched.pop(best_tid)
            row_of_event.update(best)
    return row_of_event
