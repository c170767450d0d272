"""Dependencies that others already imply, left out: a parent that another parent waits for, directly or not.

What runs when stays as it is. The search behind each node is bounded, so that a few implied ones may stay in traces
whose nodes wait for others of long ago.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .dependencies import COMPILED_FROM, Edges, compiled
from .table import ExecutionTrace, SparseRows

REACH = 256  # nodes that are looked at behind each node


def mark(
    offsets: np.ndarray, parents: np.ndarray, place_of: np.ndarray, reach: int, stack: np.ndarray, seen: np.ndarray,
    met: np.ndarray, implied: np.ndarray,
) -> None:  # fmt: skip
    """Set ``implied`` [edges] of parents that other parents of the same row imply, and of those named twice.

    ``place_of`` [rows] is an order that keeps the dependencies. ``stack``, ``seen`` and ``met`` are used up; the last
    two [rows] begin as -1.
    """
    for child in range(len(offsets) - 1):
        first, last = offsets[child], offsets[child + 1]
        if last - first < 2:
            continue
        lowest, top = place_of[parents[first]], 0
        for at in range(first, last):
            lowest = min(lowest, place_of[parents[at]])
            if top < len(stack):
                stack[top] = parents[at]
                top += 1
        left = max(reach, 2 * (last - first))
        while top > 0 and left > 0:
            top -= 1
            left -= 1
            node = stack[top]
            for at in range(offsets[node], offsets[node + 1]):
                behind = parents[at]
                if place_of[behind] >= lowest and seen[behind] != child:
                    seen[behind] = child
                    if top < len(stack):
                        stack[top] = behind
                        top += 1
        for at in range(first, last):
            implied[at] = seen[parents[at]] == child or met[parents[at]] == child
            met[parents[at]] = child


def implied(found: Edges, order: np.ndarray) -> np.ndarray:
    """Whether each edge is implied by others [edges]. Edges of data alone, by child, without cycles."""
    offsets = np.zeros(found.nodes + 1, np.int64)
    np.cumsum(np.bincount(found.child, minlength=found.nodes), out=offsets[1:])
    most = int(np.diff(offsets).max(initial=0))
    if most < 2:
        return np.zeros(len(found.parent), bool)
    place_of = np.empty(found.nodes, np.int32)
    place_of[order] = np.arange(found.nodes, dtype=np.int32)
    made = np.zeros(len(found.parent), bool)
    loop = compiled(mark) if len(found.parent) >= COMPILED_FROM else mark  # edges: a few nodes may have many
    stack, seen, met = (np.full(size, -1, np.int32) for size in (most + 4 * REACH, found.nodes, found.nodes))
    loop(offsets, found.parent, place_of, REACH, stack, seen, met, made)
    return made


def pruned(trace: ExecutionTrace, found: Edges, order: np.ndarray) -> tuple[ExecutionTrace, int]:
    """The trace without implied dependencies, and how many there were.

    ``found`` and ``order`` are of :func:`.dependencies.topological`.

    Of data those that other data imply, of control, which gates nothing, those that are there twice.
    """
    drop = implied(found, order)
    twice = _repeated(trace.control)
    made = replace(trace, data=_without(trace.data, drop), control=_without(trace.control, twice))
    return made, int(drop.sum()) + int(twice.sum())


def _repeated(given: SparseRows) -> np.ndarray:
    """Whether a row has each of its values already [values]."""
    rows, n = given.rows, len(given.values)
    order = np.lexsort((np.arange(n), given.values, rows))
    same = (rows[order][1:] == rows[order][:-1]) & (given.values[order][1:] == given.values[order][:-1])
    made = np.zeros(n, bool)
    made[order[1:][same]] = True
    return made


def _without(given: SparseRows, gone: np.ndarray) -> SparseRows:
    if not gone.any():
        return given
    kept = np.zeros(len(gone) + 1, np.int64)
    np.cumsum(~gone, out=kept[1:])
    return SparseRows(kept[given.offsets], given.values[~gone])
