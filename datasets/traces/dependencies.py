"""Dependencies as edges between rows, and the order in which rows can run.

Loops run as machine code where numba is installed and there are many nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .schema import TraceFileError
from .table import ExecutionTrace, SparseRows

COMPILED_FROM = 20_000  # nodes from which loading numba pays
BLOCK = 1 << 20  # dependencies that are looked up at a time: memory for millions of them stays small


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges between rows (int32): ``parent`` ends before ``child`` begins; ``data``: whether it gates execution.

    ``dangling`` [k, 2] are rows and the ids of data's parents that no node has; ``lost`` [k, 2] those of control, which
    the reference tools do not read: their own examples have some.
    """

    nodes: int
    parent: np.ndarray
    child: np.ndarray
    data: np.ndarray
    dangling: np.ndarray
    lost: np.ndarray

    @property
    def children(self) -> SparseRows:
        """The children of each row."""
        return sparse(self.parent, self.child, self.nodes)

    @property
    def parents(self) -> SparseRows:
        """The parents of each row."""
        return sparse(self.child, self.parent, self.nodes)


def sparse(row: np.ndarray, value: np.ndarray, rows: int) -> SparseRows:
    """Values by their row, in order within one."""
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=offsets[1:])
    if len(row) < 2 or bool(np.all(row[1:] >= row[:-1])):
        return SparseRows(offsets, value)
    if len(row) < COMPILED_FROM:
        return SparseRows(offsets, value[np.argsort(row, kind="stable")])
    made = np.empty_like(value)
    compiled(scatter)(row, value, offsets[:-1].copy(), made)
    return SparseRows(offsets, made)


def scatter(row: np.ndarray, value: np.ndarray, free: np.ndarray, made: np.ndarray) -> None:
    """Values to the places of their rows in ``made``; ``free`` [rows], the first place of each, is used up."""
    for at in range(len(row)):
        made[free[row[at]]] = value[at]
        free[row[at]] += 1


def edges(trace: ExecutionTrace, control: bool = True) -> Edges:
    """The dependencies of a trace; without ``control`` those of data alone, as ASTRA-sim's feeder has them."""
    order = None if np.all(trace.ids[1:] > trace.ids[:-1]) else np.argsort(trace.ids, kind="stable")
    ids = trace.ids if order is None else trace.ids[order]
    kinds = (trace.control, trace.data) if control and len(trace.control.values) else (trace.data,)
    child, wanted = (_together([getattr(rows, name) for rows in kinds]) for name in ("rows", "values"))
    data = np.ones(len(child), bool)
    data[: len(child) - len(trace.data.values)] = False
    parent, found = np.empty(len(wanted), np.int32), np.empty(len(wanted), bool)
    for begin in range(0, len(wanted), BLOCK):
        part = slice(begin, begin + BLOCK)
        place = np.minimum(np.searchsorted(ids, wanted[part]), max(len(ids) - 1, 0))
        found[part] = ids[place] == wanted[part] if len(ids) else False
        parent[part] = place if order is None else order[place]
    none = np.zeros((0, 2), np.uint64)
    if found.all():
        return Edges(len(trace), parent, child, data, none, none)
    missing = np.stack([child[~found].astype(np.uint64), wanted[~found]], axis=1)
    of_data = data[~found]
    return Edges(len(trace), parent[found], child[found], data[found], missing[of_data], missing[~of_data])


def _together(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns one after another; the column itself where it is alone."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def kahn(offsets: np.ndarray, children: np.ndarray, waiting: np.ndarray, rank: np.ndarray, order: np.ndarray) -> int:
    """Rows into ``order``, of those that are ready the one of the lowest ``rank`` first; how many there are.

    ``waiting`` are the parents that each row has; it is used up. A row in a cycle never comes.
    """
    ready = [(np.int64(0), np.int64(0))]
    ready.pop()
    for first in range(len(waiting)):
        if waiting[first] == 0:
            heapq.heappush(ready, (np.int64(rank[first]), np.int64(first)))
    count = 0
    while len(ready) > 0:
        row = heapq.heappop(ready)[1]
        order[count] = row
        count += 1
        for place in range(offsets[row], offsets[row + 1]):
            child = children[place]
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, (np.int64(rank[child]), np.int64(child)))
    return count


def ordered(found: Edges, rank: np.ndarray | None = None) -> np.ndarray:
    """Rows in an order that keeps the dependencies; those in or behind a cycle are missing."""
    if rank is None:
        if np.all(found.parent < found.child):
            return np.arange(found.nodes)
        rank = np.arange(found.nodes)
    children = found.children
    waiting = np.bincount(found.child, minlength=found.nodes).astype(np.int64)
    order = np.empty(found.nodes, np.int64)
    loop = compiled(kahn) if found.nodes >= COMPILED_FROM else kahn
    count = loop(children.offsets, children.values.astype(np.int64), waiting, rank.astype(np.int64), order)
    return order[:count]


def cycle(found: Edges, order: np.ndarray) -> list[int]:
    """The rows of one cycle, each the parent of the next; none where every row has its place in the order."""
    left = np.ones(found.nodes, bool)
    left[order] = False
    if not left.any():
        return []
    inside = left[found.parent] & left[found.child]
    parents = sparse(found.child[inside], found.parent[inside], found.nodes)
    at, seen = int(np.argmax(left)), dict[int, int]()
    while at not in seen:
        seen[at] = len(seen)
        at = int(parents.row(at)[0])
    return list(seen)[seen[at] :][::-1]


def topological(trace: ExecutionTrace, name: str, rank: np.ndarray | None = None) -> tuple[Edges, np.ndarray]:
    """Edges of a trace's data, which alone gate execution, and its rows in order.

    TraceFileError for a cycle or a parent that is not there.
    """
    found = edges(trace, control=False)
    if len(found.dangling):
        row, wanted = found.dangling[0].tolist()
        raise TraceFileError(f"{name}: node {trace.ids[row]} depends on {wanted}, which is no node of this trace")
    order = ordered(found, rank)
    if around := cycle(found, order):
        raise TraceFileError(f"{name}: {_around(trace, around)}")
    return found, order


def _around(trace: ExecutionTrace, around: list[int]) -> str:
    shown = [str(trace.ids[row]) for row in around[:6]] + (["…"] if len(around) > 6 else [])
    return f"nodes depend on each other in a circle: {' -> '.join([*shown, shown[0]])}"


@cache
def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop as machine code, kept on disk after the first time; as it stands without numba."""
    try:
        import numba
    except ImportError:
        return loop
    made: Callable[..., Any] = numba.njit(cache=True)(loop)
    return made
