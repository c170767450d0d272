"""Many points simulated, here or by a crew (:mod:`.spread`), with the same answers in the same order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...datasets.own_warnings import own_warnings
from ..question.sources import Sources
from .bounds import probe
from .evaluate import Bench, Evaluator, Row
from .request import SearchRequest, asked
from .spread import Crew

GROUP = 4  # points that a process takes at a time, so that they share what is alike in them
COLLECTING = 50_000, 20, 100  # of a process that simulates: thresholds of Python's garbage collector


def groups(points: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of points in groups that are simulated one after the other: those that share most are together."""
    order = sorted(range(len(points)), key=lambda at: (*_shared(points[at]), at))
    return [order[first : first + GROUP] for first in range(0, len(order), GROUP)]


def _shared(point: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("cluster", "precision", "tp", "cp", "ep", "etp", "micro_batch", "recompute", "zero_stage", "pp")
    return tuple(str(point[name]) for name in names)


class Workers:
    """Runs an :class:`Evaluator` over many points, in this process or by a crew (``bench_of`` makes theirs).

    Answers come in the order of the points, whatever the crew. A model that is a function cannot be handed to another
    process and is simulated here.
    """

    def __init__(
        self, evaluator: Evaluator, crew: Crew | None = None, bench_of: Callable[[Sources], Bench] | None = None
    ) -> None:
        request = evaluator.made.request
        self.evaluator = evaluator
        self.bench_of = bench_of
        here = crew is None or bench_of is None or callable(request.base.model)
        self.crew = Crew() if here or crew is None else crew
        self.text = "" if self.crew.alone else request.to_json()

    def rows(self, points: Sequence[Mapping[str, Any]], advance: Callable[[int], None]) -> list[Row]:
        """The row of every point."""
        return self._run("row", points, groups(points), advance)

    def probes(self, points: Sequence[Mapping[str, Any]], advance: Callable[[int], None]) -> list[Any]:
        """The probe (:func:`.bounds.probe`) of every family that a point stands for."""
        return self._run("probe", points, [[at] for at in range(len(points))], advance)

    def _run(
        self,
        what: str,
        points: Sequence[Mapping[str, Any]],
        parts: Sequence[Sequence[int]],
        advance: Callable[[int], None],
    ) -> list[Any]:
        found: list[Any] = [None] * len(points)
        for places, made in zip(parts, self._made(what, [[points[at] for at in part] for part in parts]), strict=True):
            for at, each in zip(places, made, strict=True):
                found[at] = each
            advance(len(places))
        return found

    def _made(self, what: str, parts: Sequence[Sequence[Mapping[str, Any]]]) -> Iterable[list[Any]]:
        if self.crew.alone or len(parts) < 2:
            return (answers(self.evaluator, what, part) for part in parts)
        return self.crew.apply(in_process, [(self.bench_of, self.text, what, list(part)) for part in parts])


def answers(evaluator: Evaluator, what: str, points: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The rows or probes of some points."""
    if what == "row":
        return [evaluator.row(point) for point in points]
    return [probe(evaluator, point) for point in points]


_HERE: dict[str, Evaluator] = {}


@own_warnings()
def in_process(
    bench_of: Callable[[Sources], Bench], text: str, what: str, points: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """The same in a process of its own, which keeps the evaluator of the last search."""
    if text not in _HERE:
        _HERE.clear()
        gc.freeze()  # graphs that are kept are no garbage: to look through them again and again takes 5 % of the time
        gc.set_threshold(*COLLECTING)
        request = SearchRequest.from_json(text)
        _HERE[text] = Evaluator(asked(request), bench_of(request.base.sources))
    return answers(_HERE[text], what, points)
