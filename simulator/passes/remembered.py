"""Passes that were run before: two plans that differ in nothing that a pass looked at get the very same graph.

A search asks for thousands of plans of one model, and most of their passes do the same work. So a pass is run on a plan
that notes what is read of it. Where another plan has the same to say, the graph made before is handed out again; graphs
are never changed, so that many may share one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields
from inspect import isfunction
from typing import Any

import numpy as np

from ..graph import Graph
from ..question.plan import Parallel, Plan

KEPT = 192  # graphs that a pass was run on
MADE = 32  # graphs that are kept of what one pass made of one graph: a search has few plans that differ to a pass
Question = tuple[Any, ...]
_FIELDS = {each.name for each in fields(Plan)} - {"parallel"}
_DEGREES = {each.name for each in fields(Parallel)}
# Methods are asked as a whole, whatever they look at: all that a plan has.
_ANSWERS = frozenset(name for name, member in vars(Plan).items() if isfunction(member) and not name.startswith("_"))
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
        attributes = object.__getattribute__(self, "__dict__")
        if name in _DEGREES and "noted" in attributes:  # a changed copy has nothing to note: all was read before
            attributes["noted"]["parallel", name] = value
        return value


class _Noting(Plan):
    """A plan that notes what is read of it and what it answers."""

    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if name in _ANSWERS and "noted" in attributes:
            return lambda *arguments: _ask(attributes["noted"], attributes["plan"], name, arguments)
        value = object.__getattribute__(self, name)
        if name in _FIELDS and "noted" in attributes:
            attributes["noted"]["plan", name] = value
        return value


def _ask(noted: dict[Question, Any], plan: Plan, name: str, arguments: tuple[Any, ...]) -> Any:
    answer = getattr(plan, name)(*arguments)
    noted[(name, *arguments)] = answer
    return answer


def _noting(plan: Plan, noted: dict[Question, Any]) -> Plan:
    degrees, noting = object.__new__(_Degrees), object.__new__(_Noting)
    degrees.__dict__.update(plan.parallel.__dict__, noted=noted)
    noting.__dict__.update(plan.__dict__, parallel=degrees, plan=plan, noted=noted)
    return noting


def _says(plan: Plan, question: Question) -> Any:
    what, *arguments = question
    if what == "parallel":
        return getattr(plan.parallel, arguments[0])
    return getattr(plan, arguments[0]) if what == "plan" else getattr(plan, what)(*arguments)


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


def run(graph_pass: Callable[[Graph, Plan], Graph], graph: Graph, plan: Plan) -> Graph:
    """The graph after a pass, the one made before where the plan says the same."""
    key = id(graph), graph_pass
    entry = _KNOWN.get(key)
    if entry is None:
        entry = _KNOWN[key] = _Entry(graph)
        if len(_KNOWN) > KEPT:
            _KNOWN.popitem(last=False)
    _KNOWN.move_to_end(key)
    for noted, result in entry.made:
        if _same(plan, noted):
            return result
    noted = {}
    result = graph_pass(graph, _noting(plan, noted))
    entry.made.append((noted, result))
    return result
