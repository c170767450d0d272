"""How many rows each expert of a mixture gets: even, or spread by a power law as routers and benchmarks have it.

A rank's time depends on its experts' loads: an expert without a row reads no weights, a busy one is a long chain of
tiles. :func:`expert_loads` gives them in a few classes, so that a million ops are answered in one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CLASSES = 16  # of experts, finer towards the busiest
FEW_RATIO = 200.0  # busiest over least busy expert when there are fewer rows than experts
SHARE_OF_TOKENS = 0.8  # that the busiest expert's load may reach, over one of the least busy


def power_law(rank: Any, tokens: Any, topk: Any, experts: Any, skew: Any) -> Any:
    """Relative load at the quantile ``place`` (0 to 1) of a density that falls as load^-(skew / 100).

    Loads reach from 1 to 0.8 tokens, where there are fewer rows than experts over a factor of 200.
    """
    ratio = np.where(tokens * topk > experts, np.maximum(SHARE_OF_TOKENS * tokens, 2.0), FEW_RATIO)
    power = 1.0 - np.asarray(skew) / 100.0
    power = np.where(np.abs(power) < 1e-6, 1e-6, power)
    return (1.0 + rank * (ratio**power - 1.0)) ** (1.0 / power)


def expert_loads(tokens: Any, topk: Any, experts: Any, ep: Any, skew: Any) -> tuple[np.ndarray, np.ndarray]:
    """Experts of the busiest rank in classes: how many, and rows of each, both [classes, n] for dims [n].

    Without skew every expert has the same as far as rows reach. With it, a token may draw an expert twice; the
    busiest rank has the busiest expert, and as much more as the largest sum of ``ep`` random groups has.
    """
    tokens, topk, experts, ep, skew = (
        np.asarray(value, dtype=np.float64) for value in (tokens, topk, experts, ep, skew)
    )
    local = np.maximum(experts / ep, 1.0)
    rows = np.maximum(tokens * topk / ep, 1.0)
    edges = (experts + 1.0) ** (np.arange(CLASSES + 1.0).reshape(-1, *([1] * experts.ndim)) / CLASSES) - 1.0
    count, middle = np.diff(edges, axis=0), 0.5 * (edges[1:] + edges[:-1])
    load = power_law(1.0 - middle / experts, tokens, topk, experts, skew)
    mean = (count * load).sum(0) / experts
    deviation = np.sqrt(np.maximum((count * load**2).sum(0) / experts - mean**2, 0.0))
    top = power_law(1.0 - 0.5 / experts, tokens, topk, experts, skew)
    largest = local * mean + _largest_of(ep) * deviation * np.sqrt(local)
    usual = np.maximum(experts * mean - top, 0.0) / np.maximum(experts - 1.0, 1.0)
    others = np.maximum(largest - top, (local - 1.0) * usual)
    scale = others / np.maximum((local - 1.0) * mean, 1e-9)
    unit = tokens * topk / (experts * mean)
    some = np.concatenate([np.ones_like(count[:1]), count * (local - 1.0) / experts])
    value = np.concatenate([np.broadcast_to(top, count[:1].shape), load * np.where(local > 1.0, scale, 0.0)]) * unit
    even = np.minimum(local, rows)
    skewed = skew > 0
    return np.where(skewed, some, even / len(some)), np.where(skewed, value, rows / even)


def rows_and_touched(count: Any, rows: Any) -> tuple[Any, Any]:
    """All rows of a rank and the experts that have one, from the classes of :func:`expert_loads`."""
    return (count * rows).sum(0), (count * np.minimum(rows, 1.0)).sum(0)


def _largest_of(groups: Any) -> Any:
    """Expected largest of so many standard normal values, 0 of one."""
    return 0.56 * np.log2(groups) ** 0.78
