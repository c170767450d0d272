"""The one coverage of all intervals: whatever an engine knows of its errors is brought to it here."""

from __future__ import annotations

import numpy as np

from ...models.intervals import COVERAGE, wider
from ...models.labs import apart, kernels_apart

__all__ = ["COVERAGE", "above_roofline", "apart", "kernels_apart", "rescale_bounds", "widen_factor", "widen_for_labs"]


def widen_factor(factor: float, coverage: float) -> float:
    """The factor each way that holds :data:`COVERAGE` of cases, of one that holds ``coverage`` of them.

    The logarithm of the error is taken to be half normal on each side, as :mod:`..report.distribution` does.
    """
    return float(factor ** wider(coverage))


def rescale_bounds(
    latency_us: np.ndarray, low_us: np.ndarray, high_us: np.ndarray, coverage: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [n] that hold :data:`COVERAGE` of cases, of those that hold ``coverage``; each side for itself."""
    if coverage == COVERAGE:
        return low_us, high_us
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (latency_us * (bound / latency_us) ** wider(coverage) for bound in (low_us, high_us))
    return np.where(latency_us > 0, low, low_us), np.where(latency_us > 0, high, high_us)


def widen_for_labs(
    latency_us: np.ndarray, low_us: np.ndarray, high_us: np.ndarray, lab: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [n] that hold timings of another lab than the table's too, which are ``lab`` [n] in ln units apart."""
    if not lab.any():
        return low_us, high_us
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (np.hypot(np.log(bound / latency_us), lab) for bound in (low_us, high_us))
    positive = latency_us > 0
    return np.where(positive, latency_us * np.exp(-low), low_us), np.where(positive, latency_us * np.exp(high), high_us)


def above_roofline(
    latency_us: np.ndarray, low_us: np.ndarray, roofline_us: np.ndarray, engine: np.ndarray | str
) -> np.ndarray:
    """Lower bounds [n] in us, none below the roofline [n] of its op: no error of a prediction lets a device beat it.

    What was measured keeps its bounds, and so does a prediction that is below the roofline itself: it learned from rows
    that were, at clocks above the datasheet's.
    """
    bounded = (latency_us >= roofline_us) & (np.asarray(engine) != "measured")
    return np.where(bounded, np.maximum(low_us, roofline_us), low_us)
