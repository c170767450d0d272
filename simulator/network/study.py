"""What faults cost: one at every place or some at random, how much slower all gets, and which links matter most.

RAPID-LLM (arXiv 2512.19606) draws this as a distribution of step slowdowns over fault positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .fabric import Fabric
from .faults import Fault, PartitionError, apply_faults

REPORTED_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # that are told


@dataclass(frozen=True)
class Study:
    """Times of n trials beside the time without faults; infinite where the faults cut ranks off.

    ``where`` holds the places of each trial's faults.
    """

    healthy_us: float
    where: tuple[tuple[str, ...], ...]
    time_us: np.ndarray

    @property
    def slowdown(self) -> np.ndarray:
        """Time of each trial over the healthy time [n]."""
        return self.time_us / max(self.healthy_us, 1e-12)

    @property
    def partitioned(self) -> int:
        """Trials in which ranks were cut off."""
        return int(np.isinf(self.time_us).sum())

    def quantiles(self, at: Sequence[float] = REPORTED_QUANTILES) -> dict[float, float]:
        """Slowdown at each share of the trials that did not fall apart."""
        connected = self.slowdown[np.isfinite(self.time_us)]
        return {q: float(np.quantile(connected, q)) if len(connected) else float("inf") for q in at}

    def critical(self, count: int = 10) -> list[tuple[str, float]]:
        """Places by the mean slowdown of trials in which they failed, the worst first."""
        slowdowns: dict[str, list[float]] = {}
        for failed, slowdown in zip(self.where, self.slowdown.tolist(), strict=True):
            for place in failed:
                slowdowns.setdefault(place, []).append(slowdown)
        ranked = sorted(
            ((place, float(np.mean(values))) for place, values in slowdowns.items()), key=lambda x: (-x[1], x[0])
        )
        return ranked[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: a slowdown without end, where ranks are cut off, is null."""
        slowdown = {
            "max" if q == 1.0 else f"p{round(100 * q):02d}": finite_or_none(x) for q, x in self.quantiles().items()
        }
        return {
            "healthy_us": self.healthy_us,
            "trials": len(self.where),
            "partitioned": self.partitioned,
            "slowdown": slowdown,
            "critical": [{"where": place, "slowdown": finite_or_none(slowdown)} for place, slowdown in self.critical()],
            "samples": [finite_or_none(slowdown) for slowdown in np.sort(self.slowdown).tolist()],
        }


def finite_or_none(value: float) -> float | None:
    """The value for JSON, which knows no infinity."""
    return value if np.isfinite(value) else None


def run_trials(samples: Sequence[Sequence[Fault]], measure: Callable[[Sequence[Fault]], float]) -> Study:
    """What ``measure`` says of the faults of each trial, us, beside none; infinite where they cut ranks off."""

    def time_us(faults: Sequence[Fault]) -> float:
        try:
            return measure(faults)
        except PartitionError:
            return float("inf")

    where = tuple(tuple(fault.where for fault in faults) for faults in samples)
    return Study(measure(()), where, np.array([time_us(faults) for faults in samples], dtype=np.float64))


def with_faults(fabric: Fabric, faults: Sequence[Fault]) -> Fabric:
    """The same fabric with faults. Where only bandwidths fall, routes stay as they were found."""
    if not faults:
        return fabric
    return fabric.on(apply_faults(fabric.topology, faults), all(fault.soft for fault in faults))
