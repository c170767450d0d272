"""How long requests wait for a server that takes as long for each: the queue E_k/D/1, by Lindley's recursion.

``k`` replicas that take requests in turn each see every k-th of them. Where requests come by chance (Poisson), gaps of
a replica are Erlang's of ``k`` stages: the more replicas, the more regular. D. V. Lindley, "The theory of queues with a
single server" (1952): a request waits as long as the one before it did, and its service, less the gap between them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

STAGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
BUSY = (*(0.05 * n for n in range(18)), 0.875, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99)  # shares of the time
REQUESTS = 4000  # of a run, which starts empty as those of the event loop do
SEED = 0


@lru_cache
def waits(share: float) -> np.ndarray:
    """The mean, and what a ``share`` of the requests wait at most, in services [2, stages, busy]."""
    random = np.random.default_rng(SEED)
    busy = np.array(BUSY)[:, None]
    mean, most = np.zeros((len(STAGES), len(BUSY))), np.zeros((len(STAGES), len(BUSY)))
    for at, stages in enumerate(STAGES):
        gaps = random.gamma(stages, 1.0 / stages, REQUESTS)
        steps = np.concatenate([np.zeros((len(BUSY), 1)), np.cumsum(busy - gaps, axis=1)], axis=1)
        waiting = (steps - np.minimum.accumulate(steps, axis=1)) / np.maximum(busy, BUSY[1])
        mean[at], most[at] = waiting.mean(axis=1), np.quantile(waiting, share, axis=1)
    return np.maximum.accumulate(np.stack([mean, most]), axis=2)


def waiting(servers: np.ndarray, busy: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(the mean, what a ``share`` of the requests wait at most) in services, of so many servers that take turns and are
    busy for such shares of the time [places]; inf for those that are always busy."""
    across = np.interp(np.log(np.maximum(servers, 1)), np.log(STAGES), np.arange(len(STAGES)))
    above = np.minimum(across.astype(int), len(STAGES) - 2)
    down = across - above
    along = np.interp(busy, BUSY, np.arange(len(BUSY)))
    cell = np.minimum(along.astype(int), len(BUSY) - 2)
    side = along - cell
    cells = ((above, cell), (above, cell + 1), (above + 1, cell), (above + 1, cell + 1))
    shares = ((1 - down) * (1 - side), (1 - down) * side, down * (1 - side), down * side)
    tables = waits(share)
    both = sum(weight * tables[:, row, column] for (row, column), weight in zip(cells, shares, strict=True))
    mean, most = np.where(busy < 1, both, np.inf)
    return mean, most
