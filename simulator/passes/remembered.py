"""Passes that were run before: two plans that differ in nothing that a pass looked at get the very same graph.

A search asks for thousands of plans of one model, and most of their passes do the same work. So a pass is run on a plan
that notes what is read of it. Where another plan has the same to say, the graph made before is handed out again; graphs
are never changed, so that many may share one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from ..graph import Graph
from ..question.plan import Parallel, Plan

KEPT = 192  # graphs that a pass was run on
MADE = 32  # graphs that are kept of what one pass made of one graph: a search has few plans that differ to a pass
Question = tuple[Any, ...]
_FIELDS = {each.name for each in fields(Plan)} - {"parallel"}
_DEGREES = {each.name for each in fields(Parallel)}
_ANSWERS = ("group", "members", "stage_devices", "neighbours", "scales")  # asked as a whole, whatever they look at
_KNOWN: OrderedDict[tuple[int, Callable[[Graph, Plan], Graph]], _Entry] = OrderedDict()


class _Entry:
    """What a pass made of a graph: the graph itself (so that its id stays its own), and by what was read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: deque[tuple[dict[Question, Any], Graph]] = deque(maxlen=MADE)


class _Degrees(Parallel):
    """Degrees that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        own = object.__getattribute__(self, "__dict__")
        if name in _DEGREES and "noted" in own:  # a changed copy has nothing to note: all was read when it was made
            own["noted"]["parallel", name] = value
        return value


class _Noting(Plan):
    """A plan that notes what is read of it and what it answers."""

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in _ANSWERS and "noted" in own:
            return lambda *given: _asked(own["noted"], own["plan"], name, given)
        value = object.__getattribute__(self, name)
        if name in _FIELDS and "noted" in own:
            own["noted"]["plan", name] = value
        return value


def _asked(noted: dict[Question, Any], plan: Plan, name: str, given: tuple[Any, ...]) -> Any:
    found = getattr(plan, name)(*given)
    noted[(name, *given)] = found
    return found


def _noting(plan: Plan, noted: dict[Question, Any]) -> Plan:
    degrees, made = object.__new__(_Degrees), object.__new__(_Noting)
    degrees.__dict__.update(plan.parallel.__dict__, noted=noted)
    made.__dict__.update(plan.__dict__, parallel=degrees, plan=plan, noted=noted)
    return made


def _says(plan: Plan, question: Question) -> Any:
    what, *given = question
    if what == "parallel":
        return getattr(plan.parallel, given[0])
    return getattr(plan, given[0]) if what == "plan" else getattr(plan, what)(*given)


def _same(plan: Plan, noted: dict[Question, Any]) -> bool:
    for question, before in noted.items():
        now = _says(plan, question)
        if now is not before and (type(now) is not type(before) or not _equal(now, before)):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def run(each: Callable[[Graph, Plan], Graph], graph: Graph, plan: Plan) -> Graph:
    """The graph after a pass, the one made before where the plan says the same."""
    key = id(graph), each
    entry = _KNOWN.get(key)
    if entry is None:
        entry = _KNOWN[key] = _Entry(graph)
        if len(_KNOWN) > KEPT:
            _KNOWN.popitem(last=False)
    _KNOWN.move_to_end(key)
    for noted, made in entry.made:
        if _same(plan, noted):
            return made
    noted = {}
    made = each(graph, _noting(plan, noted))
    entry.made.append((noted, made))
    return made
