"""How experts are shared out over GPUs by their loads: DeepSeek's expert parallelism load balancer (EPLB), as vLLM has
it (``distributed/eplb/policy/default.py``, 0.33.0).

Groups of experts are packed onto nodes, then the busiest experts of each node get copies, one at a time, then copies
are packed onto GPUs; each time the heaviest goes onto the lightest that has a place. Where groups do not come out even
over nodes, all experts are one group on one node.
"""

from __future__ import annotations

import numpy as np


def packs(weights: np.ndarray, count: int) -> np.ndarray:
    """Things of these weights [n], in ``count`` packs of as many things and weights as alike as possible: the things of
    each, int [count, n / count], in the order in which they come into it."""
    size = len(weights) // count
    if size == 1:
        return np.arange(count)[:, None]
    sums, members = np.zeros(count), [[] for _ in range(count)]  # type: ignore[var-annotated]
    for thing in np.argsort(-weights, kind="stable").tolist():
        lightest = int(np.argmin(sums))
        members[lightest].append(thing)
        sums[lightest] += weights[thing]
        if len(members[lightest]) == size:
            sums[lightest] = np.inf
    return np.array(members)


def copies(weights: np.ndarray, slots: int) -> np.ndarray:
    """Which thing each of so many slots holds, int [slots]: one of each, then again and again that of the largest
    weight by its copies."""
    counts, holds = np.ones(len(weights), np.int64), list(range(len(weights)))
    while len(holds) < slots:
        holds.append(int(np.argmax(weights / counts)))
        counts[holds[-1]] += 1
    return np.array(holds)


def rebalanced(loads: np.ndarray, slots: int, gpus: int, groups: int = 1, nodes: int = 1) -> np.ndarray:
    """The expert in each of so many slots, GPU by GPU, for these loads of experts [experts]: int [slots]."""
    if groups % nodes:
        groups, nodes = 1, 1
    size = len(loads) // groups
    by_node = packs(loads.reshape(groups, size).sum(axis=1), nodes)
    holds = []
    for node_groups in by_node:
        experts = (node_groups[:, None] * size + np.arange(size)).ravel()
        chosen = copies(loads[experts], slots // nodes)
        per_copy = loads[experts] / np.bincount(chosen, minlength=len(experts))
        holds.append(experts[chosen[packs(per_copy[chosen], gpus // nodes)]].ravel())
    return np.concatenate(holds)


def imbalance(loads: np.ndarray, holds: np.ndarray, gpus: int) -> float:
    """How many times as many tokens the busiest GPU has as the mean; copies of an expert share its tokens evenly."""
    per_copy = loads / np.bincount(holds, minlength=len(loads))
    by_gpu = per_copy[holds].reshape(gpus, -1).sum(axis=1)
    return float(by_gpu.max() / by_gpu.mean())


def most_new(before: np.ndarray, after: np.ndarray, gpus: int) -> int:
    """The most experts that any GPU gets that it did not have."""
    pairs = zip(before.reshape(gpus, -1).tolist(), after.reshape(gpus, -1).tolist(), strict=True)
    return max(len(set(new) - set(old)) for old, new in pairs)
