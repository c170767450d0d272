"""What faults cost: one at every place or some at random, how much slower all gets, and which links matter most.

RAPID-LLM (arXiv 2512.19606) draws this as a distribution of step slowdowns over fault positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .fabric import Fabric, Transfer
from .faults import Fault, PartitionError, apply, draw, places
from .fidelity import simulate

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # that are told
Measure = Callable[[Fabric], float]  # us that a whole step, or its communication, takes on a fabric


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

    def quantiles(self, at: Sequence[float] = QUANTILES) -> dict[float, float]:
        """Slowdown at each share of the trials that did not fall apart."""
        whole = self.slowdown[np.isfinite(self.time_us)]
        return {q: float(np.quantile(whole, q)) if len(whole) else float("inf") for q in at}

    def critical(self, count: int = 10) -> list[tuple[str, float]]:
        """Places by the mean slowdown of trials in which they failed, the worst first."""
        found: dict[str, list[float]] = {}
        for failed, slowdown in zip(self.where, self.slowdown.tolist(), strict=True):
            for place in failed:
                found.setdefault(place, []).append(slowdown)
        ranked = sorted(((place, float(np.mean(each))) for place, each in found.items()), key=lambda x: (-x[1], x[0]))
        return ranked[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: a slowdown without end, where ranks are cut off, is null."""
        slowdown = {"max" if q == 1.0 else f"p{round(100 * q):02d}": finite(x) for q, x in self.quantiles().items()}
        return {
            "healthy_us": self.healthy_us,
            "trials": len(self.where),
            "partitioned": self.partitioned,
            "slowdown": slowdown,
            "critical": [{"where": place, "slowdown": finite(slowdown)} for place, slowdown in self.critical()],
            "samples": [finite(each) for each in np.sort(self.slowdown).tolist()],
        }


def finite(value: float) -> float | None:
    """The value for JSON, which knows no infinity."""
    return value if np.isfinite(value) else None


def transfers_time(transfers: Sequence[Transfer], fidelity: str = "analytical") -> Measure:
    """Measures a fabric by when the last of some transfers ends."""
    return lambda fabric: simulate(fabric, transfers, fidelity).total_us


def everywhere(fabric: Fabric, like: Fault, measure: Measure, kinds: Sequence[str] = ()) -> Study:
    """A fault like ``like`` at each cable in turn (only of some ``kinds`` when given)."""
    found = places(fabric.topology, kinds)
    return _trials(fabric, [[dataclasses.replace(like, where=place)] for place in found], measure)


def at_random(
    fabric: Fabric,
    count: int,
    like: Fault,
    measure: Measure,
    trials: int = 100,
    seed: int = 0,
    kinds: Sequence[str] = (),
) -> Study:
    """``count`` faults like ``like`` at random cables, again and again; the same seed draws the same."""
    seeds = np.random.SeedSequence(seed).generate_state(trials)
    drawn = [draw(fabric.topology, count, like, int(each), kinds) for each in seeds]
    return _trials(fabric, drawn, measure)


def _trials(fabric: Fabric, drawn: Sequence[Sequence[Fault]], measure: Measure) -> Study:
    return trials(drawn, lambda faults: measure(with_faults(fabric, faults)))


def trials(drawn: Sequence[Sequence[Fault]], measure: Callable[[Sequence[Fault]], float]) -> Study:
    """What ``measure`` says of the faults of each trial, us, beside none; infinite where they cut ranks off."""

    def time_us(faults: Sequence[Fault]) -> float:
        try:
            return measure(faults)
        except PartitionError:
            return float("inf")

    where = tuple(tuple(fault.where for fault in faults) for faults in drawn)
    return Study(measure(()), where, np.array([time_us(faults) for faults in drawn], dtype=np.float64))


def with_faults(fabric: Fabric, faults: Sequence[Fault]) -> Fabric:
    """The same fabric with faults. Where only bandwidths fall, routes stay as they were found."""
    if not faults:
        return fabric
    return fabric.on(apply(fabric.topology, faults), all(fault.soft for fault in faults))
