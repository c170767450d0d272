"""Intervals with stated coverage: split-conformal on log residuals, per size band, wider outside the envelope.

For a new op like those of calibration, the chance that its true latency lies inside is at least the stated coverage
(Vovk et al., "Algorithmic Learning in a Random World", sec. 2.2; per band: Mondrian, sec. 4.5). Residuals must come
from models that had not seen the op's group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MIN_BAND = 40  # residuals a band needs for a quantile that means something
MAX_BANDS = 6
MAX_WIDENING = 20.0


@dataclass(frozen=True, eq=False)
class Intervals:
    """Half-widths of log latency by size band: band i holds analytical times in [edges[i-1], edges[i]) us."""

    coverage: float
    edges: np.ndarray  # float64 [bands - 1], ascending
    half_width: np.ndarray  # float64 [bands], in ln units

    def widths(self, analytical_us: np.ndarray, excess: np.ndarray) -> np.ndarray:
        """Half-width in ln units of each op; ``excess`` is how many envelope radii it lies outside (0 inside)."""
        band = np.searchsorted(self.edges, analytical_us, side="right")
        return self.half_width[band] * (1.0 + np.minimum(excess, MAX_WIDENING))

    def arrays(self) -> dict[str, np.ndarray]:
        return {"coverage": np.array(self.coverage), "edges": self.edges, "half_width": self.half_width}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Intervals:
        return cls(float(arrays["coverage"]), arrays["edges"], arrays["half_width"])


def calibrate(residuals: np.ndarray, analytical_us: np.ndarray, coverage: float = 0.9) -> Intervals:
    """Intervals from held-out residuals ln(measured / predicted) [n] and the ops' analytical times [n].

    Bands hold equal numbers of ops. ValueError for a coverage outside (0, 1) or no residuals.
    """
    if not 0.0 < coverage < 1.0:
        raise ValueError(f"coverage={coverage} must lie between 0 and 1, for instance 0.9")
    if not len(residuals):
        raise ValueError("an interval needs at least one held-out residual")
    bands = int(np.clip(len(residuals) // MIN_BAND, 1, MAX_BANDS))
    edges = np.unique(np.quantile(analytical_us, np.arange(1, bands) / bands))
    band = np.searchsorted(edges, analytical_us, side="right")
    pooled = quantile(np.abs(residuals), coverage)
    widths = np.full(len(edges) + 1, pooled)
    for index in range(len(widths)):
        own = np.abs(residuals[band == index])
        if len(own) >= MIN_BAND // 2:
            widths[index] = quantile(own, coverage)
    return Intervals(coverage, edges, widths)


def quantile(scores: np.ndarray, coverage: float) -> float:
    """The ceil((n + 1) coverage)-th smallest score (finite-sample conformal quantile), at most the largest."""
    rank = int(np.ceil((len(scores) + 1) * coverage))
    return float(np.sort(scores)[min(rank, len(scores)) - 1])
