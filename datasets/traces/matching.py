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

ENOUGH = 0.9
KEPT = ("rf_id", "seq_id", "fw_parent", "scope", "op_schema")
ROOTS = "[pytorch|"


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

    def told(self, place: int) -> HostNode | None:
        """What the host trace tells of an event."""
        row = self.rows.get(place)
        if row is None:
            return None
        words = self.trace.words
        sides = [
            [words[number] for number in column[row] if number >= 0]
            for column in (self.trace.inputs, self.trace.outputs)
        ]
        kept = [each for each in self.trace.attributes.items(row, words) if each[0] in KEPT]
        return HostNode(
            sides[0] or ["[]"] * 3, sides[1] or ["[]"] * 3, [*kept, ("host_id", "uint64", int(self.trace.ids[row]))]
        )


def match(events: Sequence[Event], trace: ExecutionTrace, path: Path) -> HostMatch:
    """Match a profile's host events to a host trace. TraceFileError where they are of different runs."""
    operators = [place for place, event in enumerate(events) if event.get("cat") in OPERATORS]
    best: tuple[float, HostMatch] | None = None
    for how, rows in _ways(events, operators, trace):
        same = sum(trace.name_of(row) == events[place]["name"] for place, row in rows.items())
        possible = min(len(operators), _operators(trace))
        share = same / max(possible, len(rows), 1)
        agreed = {place: row for place, row in rows.items() if trace.name_of(row) == events[place]["name"]}
        if share >= ENOUGH:
            return HostMatch(trace, agreed, how)
        if best is None or share > best[0]:
            best = share, HostMatch(trace, agreed, how)
    if best is None or best[0] < 0.5:
        share = best[0] if best else 0.0
        raise TraceFileError(
            f"{path} is no host trace of this profile's run: {share:.0%} of its operators have their like"
        )
    return best[1]


def _operators(trace: ExecutionTrace) -> int:
    return sum(not trace.name_of(row).startswith(ROOTS) for row in range(len(trace)))


def _ways(
    events: Sequence[Event], operators: Sequence[int], trace: ExecutionTrace
) -> Iterator[tuple[str, dict[int, int]]]:
    ids = trace.column("rf_id", 0, "uint64").astype(np.int64)
    by_id = {int(each): row for row, each in enumerate(ids.tolist()) if each > 0}
    for how, name in (("record function id", "Record function id"), ("external id", "External id")):
        yield how, {
            place: by_id[found] for place in operators
            if isinstance(found := events[place]["args"].get(name), int) and found in by_id
        }  # fmt: skip
    yield "order of names", _by_order(events, operators, trace, ids)


def _by_order(
    events: Sequence[Event], operators: Sequence[int], trace: ExecutionTrace, ids: np.ndarray
) -> dict[int, int]:
    """Threads paired by how alike their sequences of names are, then operators by the longest common runs of names."""
    threads: dict[object, list[int]] = {}
    for place in sorted(operators, key=lambda place: (float(events[place]["ts"]), -float(events[place]["dur"]))):
        threads.setdefault(events[place].get("tid"), []).append(place)
    told: dict[int, list[int]] = {}
    tids = trace.column("tid", 0, "uint64").astype(np.int64)
    for row in np.argsort(ids, kind="stable").tolist():
        if not trace.name_of(row).startswith(ROOTS):
            told.setdefault(int(tids[row]), []).append(row)
    found: dict[int, int] = {}
    left = dict(told)
    for places in sorted(threads.values(), key=len, reverse=True):
        names = [events[place]["name"] for place in places]
        best: list[tuple[int, int]] = []
        which = None
        for key, rows in left.items():
            others = [trace.name_of(row) for row in rows]
            blocks = difflib.SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
            pairs = [(places[b.a + i], rows[b.b + i]) for b in blocks for i in range(b.size)]
            if len(pairs) > len(best):
                best, which = pairs, key
        if which is not None:
            left.pop(which)
            found.update(best)
    return found
