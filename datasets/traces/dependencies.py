"""Dependencies as edges between rows, and the order in which rows can run.

Loops run as machine code where numba is installed and there are many nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .machine_code import compile_loop
from .schema import TraceFileError
from .table import ExecutionTrace, SparseRows, concatenate

COMPILE_FROM_NODES = 20_000  # nodes from which loading numba pays
EDGES_PER_LOOKUP = 1 << 20  # dependencies that are looked up at a time: memory for millions of them stays small


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
    if len(row) < COMPILE_FROM_NODES:
        return SparseRows(offsets, value[np.argsort(row, kind="stable")])
    values = np.empty_like(value)
    compile_loop(scatter)(row, value, offsets[:-1].copy(), values)
    return SparseRows(offsets, values)


def scatter(row: np.ndarray, value: np.ndarray, free: np.ndarray, values: np.ndarray) -> None:
    """Sort ``value`` by row into ``values``; ``free`` [rows] is each row's next free index, and is used up."""
    for at in range(len(row)):
        values[free[row[at]]] = value[at]
        free[row[at]] += 1


def dependency_edges(trace: ExecutionTrace, control: bool = True) -> Edges:
    """The dependencies of a trace; without ``control`` those of data alone, as ASTRA-sim's feeder has them."""
    order = None if np.all(trace.ids[1:] > trace.ids[:-1]) else np.argsort(trace.ids, kind="stable")
    ids = trace.ids if order is None else trace.ids[order]
    kinds = (trace.control, trace.data) if control and len(trace.control.values) else (trace.data,)
    child, parent_ids = (concatenate([getattr(rows, name) for rows in kinds]) for name in ("rows", "values"))
    data = np.ones(len(child), bool)
    data[: len(child) - len(trace.data.values)] = False
    parent, is_known = np.empty(len(parent_ids), np.int32), np.empty(len(parent_ids), bool)
    for begin in range(0, len(parent_ids), EDGES_PER_LOOKUP):
        block = slice(begin, begin + EDGES_PER_LOOKUP)
        nearest = np.minimum(np.searchsorted(ids, parent_ids[block]), max(len(ids) - 1, 0))
        is_known[block] = ids[nearest] == parent_ids[block] if len(ids) else False
        parent[block] = nearest if order is None else order[nearest]
    no_pairs = np.zeros((0, 2), np.uint64)
    if is_known.all():
        return Edges(len(trace), parent, child, data, no_pairs, no_pairs)
    unknown = np.stack([child[~is_known].astype(np.uint64), parent_ids[~is_known]], axis=1)
    is_data = data[~is_known]
    return Edges(len(trace), parent[is_known], child[is_known], data[is_known], unknown[is_data], unknown[~is_data])


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
        for index in range(offsets[row], offsets[row + 1]):
            child = children[index]
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, (np.int64(rank[child]), np.int64(child)))
    return count


def topological_order(edges: Edges, rank: np.ndarray | None = None) -> np.ndarray:
    """Rows in an order that keeps the dependencies; those in or behind a cycle are missing."""
    if rank is None:
        if np.all(edges.parent < edges.child):
            return np.arange(edges.nodes)
        rank = np.arange(edges.nodes)
    children = edges.children
    waiting = np.bincount(edges.child, minlength=edges.nodes).astype(np.int64)
    order = np.empty(edges.nodes, np.int64)
    loop = compile_loop(kahn) if edges.nodes >= COMPILE_FROM_NODES else kahn
    count = loop(children.offsets, children.values.astype(np.int64), waiting, rank.astype(np.int64), order)
    return order[:count]


def find_cycle(edges: Edges, order: np.ndarray) -> list[int]:
    """The rows of one cycle, each the parent of the next; none where every row has its place in the order."""
    is_left = np.ones(edges.nodes, bool)
    is_left[order] = False
    if not is_left.any():
        return []
    within = is_left[edges.parent] & is_left[edges.child]
    parents = sparse(edges.child[within], edges.parent[within], edges.nodes)
    node, visits = int(np.argmax(is_left)), dict[int, int]()
    while node not in visits:
        visits[node] = len(visits)
        node = int(parents.row(node)[0])
    return list(visits)[visits[node] :][::-1]


def sorted_dependencies(trace: ExecutionTrace, name: str, rank: np.ndarray | None = None) -> tuple[Edges, np.ndarray]:
    """Edges of a trace's data, which alone gate execution, and its rows in order.

    TraceFileError for a cycle or a parent that is not there.
    """
    edges = dependency_edges(trace, control=False)
    if len(edges.dangling):
        row, parent_id = edges.dangling[0].tolist()
        raise TraceFileError(f"{name}: node {trace.ids[row]} depends on {parent_id}, which is no node of this trace")
    order = topological_order(edges, rank)
    if rows_in_cycle := find_cycle(edges, order):
        raise TraceFileError(f"{name}: {_describe_cycle(trace, rows_in_cycle)}")
    return edges, order


def _describe_cycle(trace: ExecutionTrace, rows: list[int]) -> str:
    ids = [str(trace.ids[row]) for row in rows[:6]] + (["…"] if len(rows) > 6 else [])
    return f"nodes depend on each other in a circle: {' -> '.join([*ids, ids[0]])}"
