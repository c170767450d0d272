"""When a measurement has enough samples. A rule looks at the samples so far and says whether to stop.

A rule is any callable from an array of samples to bool, so a new one is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

StoppingRule = Callable[[np.ndarray], bool]


@lru_cache(maxsize=4096)
def median_ranks(count: int, confidence: float) -> tuple[int, int] | None:
    """Zero-based ranks of the order statistics that enclose the median with at least the given confidence.

    Any continuous distribution: the number of samples below its median is Binomial(count, 1/2) (David and
    Nagaraja, Order Statistics, sec. 7.1). None when even the whole range is not confident enough.
    """
    tail = (1 - confidence) / 2
    below, weight = 0.0, 0.5**count if count < 1000 else 0.0
    if not weight:
        low = math.floor(count / 2 - _normal_quantile(1 - tail) * math.sqrt(count) / 2) - 1
        return low, count - 1 - low
    low = -1
    for successes in range(count // 2 + 1):
        below += weight
        if below > tail:
            break
        low = successes
        weight *= (count - successes) / (successes + 1)
    return None if low < 0 else (low, count - 1 - low)


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)


def median_interval(samples: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the median from order statistics; infinite when there are too few samples."""
    ranks = median_ranks(len(samples), confidence)
    if ranks is None:
        return -math.inf, math.inf
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[ranks[0]]), float(ordered[ranks[1]])


def relative_width(samples: np.ndarray, confidence: float = 0.95) -> float:
    """Width of :func:`median_interval` over the median."""
    low, high = median_interval(samples, confidence)
    middle = float(np.median(samples)) if len(samples) else math.nan
    return (high - low) / middle if middle > 0 else math.inf


@dataclass(frozen=True)
class MedianWidth:
    """Stop when the median's confidence interval is no wider than ``width`` of the median."""

    width: float = 0.01
    confidence: float = 0.95
    minimum: int = 10

    def __call__(self, samples: np.ndarray) -> bool:
        return len(samples) >= self.minimum and relative_width(samples, self.confidence) <= self.width
