"""Distributions in bins of equal ratio: memory does not grow with what is counted.

A bin is 0.1 % wide, from a microsecond to a year; a percentile is wrong by less than that. Below a microsecond all is
one bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RATIO = 0.001  # between neighbouring bins
BINS = int(math.log(365 * 24 * 3600e6) / RATIO) + 2


def bin_of(value_us: float) -> int:
    """The bin of a value."""
    if value_us < 1.0:
        return 0
    return min(1 + int(math.log(value_us) / RATIO), BINS - 1)


class Histogram:
    """Values that were counted, their exact count, mean, least and most, and their percentiles."""

    def __init__(self, counts: np.ndarray | None = None, sums: Sequence[float] = (0.0, 0.0, math.inf, 0.0)) -> None:
        self.counts = np.zeros(BINS, np.int64) if counts is None else counts
        self.count, self.sum, self.least, self.most = sums

    def add(self, values_us: np.ndarray) -> None:
        """Count values."""
        if not len(values_us):
            return
        where = 1 + (np.log(np.maximum(values_us, 1.0)) / RATIO).astype(np.int64)
        self.counts += np.bincount(np.where(values_us < 1, 0, np.minimum(where, BINS - 1)), minlength=BINS)
        self.count += len(values_us)
        self.sum += float(values_us.sum())
        self.least = min(self.least, float(values_us.min()))
        self.most = max(self.most, float(values_us.max()))

    @property
    def mean(self) -> float:
        """Their mean; 0 where there are none."""
        return self.sum / self.count if self.count else 0.0

    def percentiles(self, shares: np.ndarray) -> np.ndarray:
        """The values below which ``shares`` [n] of 100 lie: middles of their bins, never beyond what was counted."""
        if not self.count:
            return np.zeros(len(shares))
        reached = np.cumsum(self.counts)
        last = np.searchsorted(reached, self.count, side="left")
        places = np.minimum(np.searchsorted(reached, shares / 100 * self.count, side="left"), last)
        middles = np.where(places == 0, 0.5, np.exp((places - 0.5) * RATIO))
        return np.clip(middles, self.least, self.most)

    def share_within(self, limit_us: float) -> float:
        """The share of values of at most a limit."""
        if not self.count:
            return 1.0
        return 1.0 if limit_us >= self.most else float(self.counts[: bin_of(limit_us)].sum() / self.count)

    def cdf(self, points: int = 100) -> list[tuple[float, float]]:
        """Values (microseconds) and the share of those at most as large, at so many even steps of the share."""
        if not self.count:
            return []
        shares = np.linspace(0, 100, points + 1)
        return list(zip(self.percentiles(shares).tolist(), (shares / 100).tolist(), strict=True))
