"""The time of a rank by what happens in it: each instant belongs to one thing, so that the parts are the whole.

Work of the device comes first; then communication that moves data, then waiting for a late rank inside a collective,
whatever stream or thread these run on; what is left is idle. So a stream that stands still while a collective runs on
another is communication, not idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, class_codes, is_network, is_work
from ...datasets.traces.table import ExecutionTrace
from .analysis import covered_us, recorded_times

WAITING = "waiting"


@dataclass(frozen=True)
class NetworkTime:
    """Microseconds in which a sort of communication runs, and those of them that work of the device hides."""

    total_us: float = 0.0
    hidden_us: float = 0.0

    @property
    def exposed_us(self) -> float:
        """Communication alone."""
        return self.total_us - self.hidden_us


@dataclass(frozen=True)
class Instants:
    """A rank's time: work by name, communication by class (and :data:`WAITING`), and time in which neither runs."""

    work_us: Mapping[str, float]
    network: Mapping[str, NetworkTime]
    idle_us: float


class IntervalUnion:
    """The union of intervals as a function: how much of it lies before a time."""

    def __init__(self, start: np.ndarray, end: np.ndarray) -> None:
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
        before = reached_before(end)
        begin = np.maximum(start, before)
        adds = end > begin
        self.begin, self.end = begin[adds], end[adds]
        self.sums = np.concatenate([[0.0], np.cumsum(self.end - self.begin)])

    def before(self, times: np.ndarray) -> np.ndarray:
        """Covered time before each of ``times`` [n]."""
        if not len(self.begin):
            return np.zeros(len(times))
        index = np.searchsorted(self.begin, times, "right")
        last = np.maximum(index - 1, 0)
        inside = np.clip(times - self.begin[last], 0.0, self.end[last] - self.begin[last])
        return np.where(index > 0, self.sums[last] + inside, 0.0)

    def inside(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Covered time inside each interval [n]."""
        return self.before(end) - self.before(start)


def reached_before(end: np.ndarray) -> np.ndarray:
    """How far the intervals before each reach, of intervals in the order of their starts [n]."""
    return np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end


def instants(trace: ExecutionTrace, names: list[str], waited_us: np.ndarray) -> Instants:
    """The time of a trace as recorded. ``names`` [nodes] are those of work; ``waited_us`` [nodes] how long each
    collective waits, from its start on, for another rank."""
    codes, (start, end) = class_codes(trace), recorded_times(trace)
    work, network = is_work(trace, codes), is_network(codes)
    works: Counter[str] = Counter()
    rows = np.flatnonzero(work)
    rows = rows[np.argsort(start[rows], kind="stable")]
    own_us = np.maximum(end[rows] - np.maximum(start[rows], reached_before(end[rows])), 0.0)
    for row, us in zip(rows.tolist(), own_us.tolist(), strict=True):
        works[names[row]] += us
    moving = start + np.minimum(waited_us, end - start)
    busy = IntervalUnion(start[work], end[work])
    network_times = _moving_times(codes, moving, end, np.flatnonzero(network), busy)
    waits = network & (moving > start)
    if waits.any():
        moves = IntervalUnion(moving[network], end[network])
        either = IntervalUnion(
            np.concatenate([start[work], moving[network]]), np.concatenate([end[work], end[network]])
        )
        alone = IntervalUnion(start[waits], moving[waits])
        hidden = either.inside(alone.begin, alone.end) - moves.inside(alone.begin, alone.end)
        waiting_us = alone.end - alone.begin - moves.inside(alone.begin, alone.end)
        network_times[WAITING] = NetworkTime(float(waiting_us.sum()), float(hidden.sum()))
    total = float(end.max() - start.min()) if len(trace) else 0.0
    return Instants(works, network_times, total - covered_us(start[work | network], end[work | network]))


def _moving_times(
    codes: np.ndarray, start: np.ndarray, end: np.ndarray, rows: np.ndarray, busy: IntervalUnion
) -> dict[str, NetworkTime]:
    """Time in which data moves, by class: of calls that overlap the later one's is what the earlier leaves."""
    rows = rows[np.argsort(start[rows], kind="stable")]
    begin = np.minimum(np.maximum(start[rows], reached_before(end[rows])), end[rows])
    hidden = busy.inside(begin, end[rows])
    network_times = {}
    for code in np.unique(codes[rows]).tolist():
        is_class = codes[rows] == code
        network_times[CLASSES[code]] = NetworkTime(
            float((end[rows] - begin)[is_class].sum()), float(hidden[is_class].sum())
        )
    return network_times
