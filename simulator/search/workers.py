"""Many points simulated, here or by a crew (:mod:`.spread`), with the same answers in the same order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...datasets.collecting import collect_seldom
from ...datasets.own_warnings import own_warnings
from .evaluate import Evaluator
from .outcome import Row
from .spread import Crew

GROUP = 4  # points that a process takes at a time, so that they share what is alike in them
KEPT_EVERY_S = 2.0  # rows, so that a search that is ended loses no more than these seconds


def groups(points: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of points in groups that are simulated one after the other: those that share most are together."""
    order = sorted(range(len(points)), key=lambda at: (*_shared(points[at]), at))
    return [order[first : first + GROUP] for first in range(0, len(order), GROUP)]


def _shared(point: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("cluster", "precision", "tp", "cp", "ep", "etp", "micro_batch", "recompute", "zero_stage", "pp")
    return tuple(str(point[name]) for name in names)


class Workers:
    """Runs an :class:`Evaluator` over many points, in this process or by a crew. Answers come in the order of the
    points, whatever the crew."""

    def __init__(self, evaluator: Evaluator, crew: Crew | None = None) -> None:
        self.evaluator = evaluator
        self.crew = crew
        self.setup = evaluator.setup

    def rows(
        self,
        points: Sequence[Mapping[str, Any]],
        advance: Callable[[int], None],
        keep: Callable[[Sequence[Row]], None] | None = None,
    ) -> list[Row]:
        """The row of every point. ``keep`` is given those that are new every :data:`KEPT_EVERY_S` seconds, and the
        last."""
        return self._run("row", points, groups(points), advance, keep)

    def probes(self, points: Sequence[Mapping[str, Any]], advance: Callable[[int], None]) -> list[Any]:
        """The probe (:meth:`.evaluate.Evaluator.probe`) of every family that a point stands for."""
        return self._run("probe", points, [[at] for at in range(len(points))], advance)

    def _run(
        self,
        what: str,
        points: Sequence[Mapping[str, Any]],
        parts: Sequence[Sequence[int]],
        advance: Callable[[int], None],
        keep: Callable[[Sequence[Any]], None] | None = None,
    ) -> list[Any]:
        answers_by_point: list[Any] = [None] * len(points)
        new, kept_s = [], time.monotonic()
        answers = spread(self.evaluator, self.crew, what, [[points[at] for at in chunk] for chunk in parts])
        for places, part_answers in zip(parts, answers, strict=True):
            for at, answer in zip(places, part_answers, strict=True):
                answers_by_point[at] = answer
            advance(len(places))
            new += part_answers
            if keep is not None and time.monotonic() - kept_s >= KEPT_EVERY_S:
                keep(new)
                new, kept_s = [], time.monotonic()
        if keep is not None:
            keep(new)
        return answers_by_point


def spread(evaluator: Any, crew: Crew | None, what: str, parts: Sequence[Sequence[Any]]) -> Iterable[list[Any]]:
    """What an evaluator's method ``what`` says of each point of each part, here or by a crew.

    A process of the crew makes its own evaluator and workbench of the request's JSON. A model that is a function cannot
    be handed to another process and is simulated here.
    """
    request = evaluator.setup.request
    if crew is None or crew.alone or callable(request.fixed.model) or len(parts) < 2:
        return ([getattr(evaluator, what)(point) for point in chunk] for chunk in parts)
    kinds, text = (type(evaluator), type(request), type(evaluator.bench)), request.to_json()
    return crew.apply(in_process, [(kinds, text, what, list(chunk)) for chunk in parts])


_HERE: dict[str, Any] = {}


@own_warnings()
def in_process(kinds: tuple[Any, Any, Any], text: str, what: str, points: Sequence[Any]) -> list[Any]:
    """The same in a process of its own, which keeps the evaluator of the last search."""
    if text not in _HERE:
        _HERE.clear()
        gc.freeze()  # graphs that are kept are no garbage: to look through them again and again takes 5 % of the time
        collect_seldom()
        evaluator_kind, request_kind, bench_kind = kinds
        request = request_kind.from_json(text)
        _HERE[text] = evaluator_kind.of(request, bench_kind(request.fixed.sources))
    return [getattr(_HERE[text], what)(point) for point in points]
