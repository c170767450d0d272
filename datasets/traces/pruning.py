"""Dependencies that others already imply, left out: a parent that another parent waits for, directly or not.

What runs when stays as it is. The search behind each node is bounded, so that a few implied ones may stay in traces
whose nodes wait for others of long ago.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .dependencies import COMPILE_FROM_NODES, Edges
from .machine_code import compile_loop
from .table import ExecutionTrace, SparseRows

SEARCH_LIMIT = 256  # ancestors that are looked at for each node


def mark_implied(
    offsets: np.ndarray, parents: np.ndarray, position_of: np.ndarray, reach: int, stack: np.ndarray,
    visited: np.ndarray, last_child: np.ndarray, implied: np.ndarray,
) -> None:  # fmt: skip
    """Set ``implied`` [edges] of parents that other parents of the same row imply, and of those named twice.

    ``position_of`` [rows] is an order that keeps the dependencies. ``stack``, ``seen`` and ``last_child`` are used up;
    the last two [rows] begin as -1.
    """
    for child in range(len(offsets) - 1):
        first, last = offsets[child], offsets[child + 1]
        if last - first < 2:
            continue
        lowest, top = position_of[parents[first]], 0
        for index in range(first, last):
            lowest = min(lowest, position_of[parents[index]])
            if top < len(stack):
                stack[top] = parents[index]
                top += 1
        remaining = max(reach, 2 * (last - first))
        while top > 0 and remaining > 0:
            top -= 1
            remaining -= 1
            node = stack[top]
            for index in range(offsets[node], offsets[node + 1]):
                ancestor = parents[index]
                if position_of[ancestor] >= lowest and visited[ancestor] != child:
                    visited[ancestor] = child
                    if top < len(stack):
                        stack[top] = ancestor
                        top += 1
        for index in range(first, last):
            implied[index] = visited[parents[index]] == child or last_child[parents[index]] == child
            last_child[parents[index]] = child


def find_implied(edges: Edges, order: np.ndarray) -> np.ndarray:
    """Whether each edge is implied by others [edges]. Edges of data alone, by child, without cycles."""
    offsets = np.zeros(edges.nodes + 1, np.int64)
    np.cumsum(np.bincount(edges.child, minlength=edges.nodes), out=offsets[1:])
    most_parents = int(np.diff(offsets).max(initial=0))
    if most_parents < 2:
        return np.zeros(len(edges.parent), bool)
    position_of = np.empty(edges.nodes, np.int32)
    position_of[order] = np.arange(edges.nodes, dtype=np.int32)
    is_implied = np.zeros(len(edges.parent), bool)
    loop = (
        compile_loop(mark_implied) if len(edges.parent) >= COMPILE_FROM_NODES else mark_implied
    )  # edges: a few nodes may have many
    stack, visited, last_child = (
        np.full(size, -1, np.int32) for size in (most_parents + 4 * SEARCH_LIMIT, edges.nodes, edges.nodes)
    )
    loop(offsets, edges.parent, position_of, SEARCH_LIMIT, stack, visited, last_child, is_implied)
    return is_implied


def prune(trace: ExecutionTrace, edges: Edges, order: np.ndarray) -> tuple[ExecutionTrace, int]:
    """The trace without implied dependencies, and how many there were.

    ``edges`` and ``order`` are of :func:`.dependencies.sorted_dependencies`.

    Of data those that other data imply, of control, which gates nothing, those that are there twice.
    """
    is_implied = find_implied(edges, order)
    is_repeated = _is_repeated(trace.control)
    smaller = replace(
        trace, data=_drop_values(trace.data, is_implied), control=_drop_values(trace.control, is_repeated)
    )
    return smaller, int(is_implied.sum()) + int(is_repeated.sum())


def _is_repeated(column: SparseRows) -> np.ndarray:
    """Whether a row has each of its values already [values]."""
    rows, n = column.rows, len(column.values)
    order = np.lexsort((np.arange(n), column.values, rows))
    is_same = (rows[order][1:] == rows[order][:-1]) & (column.values[order][1:] == column.values[order][:-1])
    is_repeated = np.zeros(n, bool)
    is_repeated[order[1:][is_same]] = True
    return is_repeated


def _drop_values(column: SparseRows, drop: np.ndarray) -> SparseRows:
    if not drop.any():
        return column
    kept_before = np.zeros(len(drop) + 1, np.int64)
    np.cumsum(~drop, out=kept_before[1:])
    return SparseRows(kept_before[column.offsets], column.values[~drop])
