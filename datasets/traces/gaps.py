"""Time in which a node is kept though its parents have ended: a node of its own, so that it is there when simulated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FLOAT_ROUNDING_US = 1e-6  # less than this is what sums of floats leave


class TimedNodes(NamedTuple):
    """Nodes in the order of their starts: ``row`` [n] is which of the given ones, ``gap`` [n] whether it is the gap
    before that. ``parents`` [2, k]: (node, node that it waits for), each once."""

    row: np.ndarray
    gap: np.ndarray
    start: np.ndarray
    end: np.ndarray
    parents: np.ndarray


def fill_gaps(
    start: np.ndarray, end: np.ndarray, child: np.ndarray, parent: np.ndarray, may_wait: np.ndarray, tie: np.ndarray
) -> TimedNodes:
    """Nodes with a gap before each of those in ``may_wait`` [n] that begins later than its parents have ended.

    A gap takes the parents of its node and is its only one. Times in us; a node without parents waits from 0 on. Nodes
    without length that begin together follow each other by ``tie`` [n].
    """
    n = len(start)
    ready = np.zeros(n)
    np.maximum.at(ready, child, end[parent])
    late = np.flatnonzero((start - ready > FLOAT_ROUNDING_US) & may_wait)
    gap = np.full(n, -1)
    gap[late] = n + np.arange(len(late))
    child = np.concatenate([np.where(gap[child] >= 0, gap[child], child), late])
    parent = np.concatenate([parent, gap[late]])
    row = np.concatenate([np.arange(n), late])
    start, end = np.concatenate([start, ready[late]]), np.concatenate([end, start[late]])
    order = np.lexsort((np.concatenate([tie, tie[late]]), end, start))
    position = np.empty(len(row), np.int64)
    position[order] = np.arange(len(row))
    pairs = np.stack([position[child], position[parent]])
    pairs = np.unique(pairs[:, pairs[0] > pairs[1]], axis=1)  # of nodes without length one may seem to follow itself
    return TimedNodes(row[order], order >= n, start[order], end[order], pairs)
