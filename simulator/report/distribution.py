"""The distribution of a predicted time, from its value and the interval that is to hold it: two half log-normals."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # that are told


def quantiles(value: float, low: float, high: float, coverage: float) -> dict[str, float]:
    """Quantiles of a time of which ``low`` to ``high`` is the central interval: two half log-normals."""
    return {f"p{round(100 * q):02d}": quantile(q, value, low, high, coverage) for q in QUANTILES}


def quantile(q: float, value: float, low: float, high: float, coverage: float) -> float:
    """The time that is not exceeded with probability ``q``."""
    z = NormalDist().inv_cdf(q)
    return value * math.exp(z * _sigma(value, low, high, coverage, z))


def factors(z: np.ndarray, value: float, low: float, high: float, coverage: float) -> np.ndarray:
    """How many times as long as expected, at so many standard deviations above what is likely."""
    if high <= low:
        return np.ones(len(z))
    above, below = (_sigma(value, low, high, coverage, side) for side in (1.0, -1.0))
    return np.exp(np.where(z > 0, above * z, below * z))


def probability_within(limit: float, value: float, low: float, high: float, coverage: float) -> float:
    """P(time <= limit)."""
    if limit <= 0.0 or value <= 0.0:
        return 0.0 if value > 0.0 else 1.0
    distance = math.log(limit / value)
    sigma = _sigma(value, low, high, coverage, distance)
    return NormalDist().cdf(distance / sigma) if sigma > 0.0 else float(distance >= 0.0)


def _sigma(value: float, low: float, high: float, coverage: float, side: float) -> float:
    bound = high / value if side >= 0.0 else value / max(low, 1e-12)
    return math.log(max(bound, 1.0)) / NormalDist().inv_cdf(0.5 + coverage / 2)
