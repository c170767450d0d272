"""Any search from what it found to its answer: ranks, ties and why, the front, one change of the best.

A :class:`Search` is what a kind of search says of itself as data and functions; everything else is alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.step import Answer
from ..trace.models import resolve
from .objectives import KNOWN
from .outcome import SearchOutcome
from .question import SearchQuestion
from .rank import Row, front, ranked, tie
from .result import SearchReport

SETTLED = 4  # tied rows whose ops are compared
MEASURED_NEXT = 5
LEAST_S = 1e-6  # of difference between tied points: less settles nothing


@dataclass(frozen=True)
class Search:
    """What one search is: its request and axes, and what is said of its rows.

    ``changes`` are the axes in which two rows differ, ``reason`` is why one is better than another in an objective.
    ``report`` is the whole report of a row: one for all rows that are the same in ``alike``. ``around`` says what each
    change of the best row costs (entries with ``cost`` None cannot be), of it, what was found and the rows that are
    ranked; ``notes`` why there is no answer. ``shown`` is a row as the answer has it; rows that will be shown are told
    ``ahead``, all at once.
    """

    request: SearchQuestion
    axes: Mapping[str, Sequence[Any]]
    changes: Callable[[Row, Row], Mapping[str, tuple[Any, Any]]]
    reason: Callable[[Row, Row, str], str]
    alike: tuple[str, ...]
    report: Callable[[Row], Answer]
    around: Callable[[Row, SearchOutcome, Sequence[Row]], list[dict[str, Any]]]
    notes: Callable[[SearchOutcome], list[str]]
    shown: Callable[[Row], Row] = dict
    ahead: Callable[[Sequence[Row]], None] = lambda _: None

    def tie(self, one: Row, other: Row) -> str:
        """Why two rows cannot be told apart (:func:`.rank.tie`)."""
        return tie(one, other, self.request.objectives[0], self.request.noise_floor)


@dataclass(frozen=True)
class Counted:
    """How many combinations of axes there were, how many points, what left out how many, and who chose points."""

    combinations: int
    points: int
    left_out: Mapping[str, int]
    sampler: str = "exhaustive"


def answer(search: Search, outcome: SearchOutcome, counted: Counted, started: float) -> SearchReport:
    """The report of what was found by a search that ``started`` then."""
    request, timed = search.request, outcome.timed
    good = request.good(timed)
    order = ranked(good, request.objectives)
    best = explained(search, order)
    tied = [row for row in order if row is order[0] or search.tie(order[0], row) == "noise"]
    around = search.around(best[0], outcome, good) if best else []
    return SearchReport(
        model=resolve(request.fixed.model).name,
        sampler=counted.sampler,
        objectives=request.objectives,
        constraints=request.limits(),
        axes={name: list(values) for name, values in search.axes.items() if len(values) > 1},
        combinations=counted.combinations,
        points=counted.points,
        left_out=dict(counted.left_out),
        evaluated=len(timed),
        pruned=outcome.count,
        pruned_by=dict(outcome.pruned),
        best=tuple(best),
        pareto=tuple(front(good, request.objectives)),
        ties=max(len(tied) - 1, 0),
        sensitivity=tuple(sorted(around, key=cheapness)),
        measure_next=tuple(settled(search, tied)),
        notes=() if good else tuple(search.notes(outcome)),
        wall_time_s=time.perf_counter() - started,
        rows=tuple(outcome.rows),
        chips=tuple(best_of_chips(search, order)),
    )


def explained(search: Search, order: Sequence[Row]) -> list[dict[str, Any]]:
    """The best rows with rank, tie with the row before, what differs from the next and why each is better than that."""
    top = search.request.top
    search.ahead(order[: top + 1])
    rows = [search.shown(row) for row in order[: top + 1]]
    best = []
    for at, row in enumerate(rows[:top]):
        before = search.tie(rows[at - 1], row) if at else ""
        text, differs = "", {}
        if at + 1 < len(rows):
            text = search.reason(row, rows[at + 1], telling(row, rows[at + 1], search.request.objectives))
            differs = {name: list(pair) for name, pair in search.changes(row, rows[at + 1]).items()}
        best.append({"rank": at + 1, **row, "tie": before, "reason": text, "differs_from_next": differs})
    return best


def telling(one: Row, other: Row, objectives: Sequence[str]) -> str:
    """The first objective in which two rows differ; the first of all where they do in none."""
    differ = (name for name in objectives if one.get(KNOWN[name].figure) != other.get(KNOWN[name].figure))
    return next(differ, objectives[0])


def best_of_chips(search: Search, order: Sequence[Row]) -> list[Row]:
    """The best row of each cluster, or of the two that pools stand on, with its rank among all, where there are
    several."""
    firsts: dict[tuple[str, str], Row] = {}
    for at, row in enumerate(order):
        firsts.setdefault((row["cluster"], row.get("prefill_cluster", "")), {"rank": at + 1, **row})
    several = len(firsts) > 1 or len(search.axes.get("cluster", ())) > 1
    return [search.shown(row) for row in firsts.values()] if several else []


def settled(search: Search, tied: Sequence[Row]) -> list[dict[str, Any]]:
    """The measurements that say most of rows that cannot be told apart: ops whose time differs most between them.

    An op that all of them spend as much time on settles nothing.
    """
    distinct: dict[tuple[Any, ...], Row] = {}
    for row in tied:
        distinct.setdefault(tuple(row[name] for name in search.alike), row)
    if len(distinct) < 2:
        return []
    reports = [search.report(row) for row in list(distinct.values())[:SETTLED]]
    spent: dict[tuple[Any, ...], tuple[Mapping[str, Any], list[float]]] = {}
    for position, report in enumerate(reports):
        for op in report.measure_next:
            key = tuple(sorted(op.op.items()))
            spent.setdefault(key, (op.op, [0.0] * len(reports)))[1][position] = op.time_s
    spread = [(max(times) - min(times), dict(op)) for op, times in spent.values()]
    spread.sort(key=lambda op: -op[0])
    return [{"op": op, "difference_s": seconds} for seconds, op in spread[:MEASURED_NEXT] if seconds > LEAST_S]


def cost_of(best: Row, row: Row, objective: str) -> float | None:
    """How many times worse than the best an objective of a row is, less one: 0.02 is 2 % worse; None: not known."""
    figure, sign, *_ = KNOWN[objective]
    least, value = best.get(figure), row.get(figure)
    if not least or value is None:
        return None
    ratio: float = value / least if sign > 0 else least / value if value else float("inf")
    return ratio - 1.0


def cheapness(entry: Mapping[str, Any]) -> tuple[bool, float]:
    """What changes are ordered by: what they cost; those that cannot be last."""
    return entry["cost"] is None, entry["cost"] or 0.0


def told(gains: Mapping[str, float], text: Callable[[float], str], most: int) -> list[str]:
    """The largest of some gains in words, as ``2 ms less bubble``."""
    largest = sorted(gains.items(), key=lambda gain: -abs(gain[1]))[:most]
    return [f"{text(gain)} {'less' if gain > 0 else 'more'} {name}" for name, gain in largest]
