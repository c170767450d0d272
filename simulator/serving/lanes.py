"""The ends of all batches in flight, as a tree of minima: which one ends next is known without looking at all."""

from __future__ import annotations

import numpy as np


def tree_of(lanes: int) -> np.ndarray:
    """The tree of so many lanes, none of them busy. Its second half are the ends, lane by lane."""
    size = 1
    while size < lanes:
        size *= 2
    return np.full(2 * size, np.inf)


def set_end(tree: np.ndarray, lane: int, end_us: float) -> None:
    """Lane ``lane`` ends at ``end_us``; infinity where it is idle."""
    node = len(tree) // 2 + lane
    tree[node] = end_us
    node //= 2
    while node >= 1:
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
        node //= 2


def next_end(tree: np.ndarray) -> int:
    """The lane that ends first; of several the one of the lowest number. Its end is ``tree[1]``."""
    half = len(tree) // 2
    node = 1
    while node < half:
        node *= 2
        if tree[node] > tree[node + 1]:
            node += 1
    return node - half
