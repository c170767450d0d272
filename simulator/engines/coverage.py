"""The one coverage of all intervals: whatever an engine knows of its errors is brought to it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...models.intervals import COVERAGE, wider

__all__ = ["COVERAGE", "apart", "between_labs", "brought", "widened"]

# Half of what 90 % of another lab's timings of the same ops are off by, in ln units, beside what a table's own noise
# explains: Vidur's products on H100 0.40, A100 0.21, A40 0.15, Nsight's on A100 0.2; norms, softmaxes and element-wise
# kernels of LLMCompass and of PyTorch's profiler 0.1 to 0.6. Other machines, clocks, data, versions and timers.
BETWEEN_LABS = {
    **dict.fromkeys(("gemm", "attention", "moe"), 0.2),
    **dict.fromkeys(("norm", "pointwise"), 0.35),
}
HARNESS = "harness"  # the source of rows that were timed on the machine itself


def widened(factor: float, coverage: float) -> float:
    """The factor each way that holds :data:`COVERAGE` of cases, of one that holds ``coverage`` of them.

    The logarithm of the error is taken to be half normal on each side, as :mod:`..report.distribution` does.
    """
    return float(factor ** wider(coverage))


def brought(
    latency_us: np.ndarray, low_us: np.ndarray, high_us: np.ndarray, coverage: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [n] that hold :data:`COVERAGE` of cases, of those that hold ``coverage``; each side for itself."""
    if coverage == COVERAGE:
        return low_us, high_us
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (latency_us * (each / latency_us) ** wider(coverage) for each in (low_us, high_us))
    return np.where(latency_us > 0, low, low_us), np.where(latency_us > 0, high, high_us)


def apart(family: str, card: Mapping[str, Any]) -> float:
    """How far labs are apart on a family of ops: 0 for a predictor of rows that opcast timed itself."""
    sources = card.get("sources", {}).get("source") or (HARNESS,)
    return 0.0 if HARNESS in sources else BETWEEN_LABS.get(family, 0.0)


def between_labs(
    latency_us: np.ndarray, low_us: np.ndarray, high_us: np.ndarray, lab: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds [n] that hold timings of another lab than the table's too, ``lab`` in ln units apart."""
    if not lab:
        return low_us, high_us
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (np.hypot(np.log(each / latency_us), lab) for each in (low_us, high_us))
    held = latency_us > 0
    return np.where(held, latency_us * np.exp(-low), low_us), np.where(held, latency_us * np.exp(high), high_us)
