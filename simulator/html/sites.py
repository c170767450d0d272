"""Compared operators put together for reading: call sites over all layers, errors weighted by time."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..report.comparison import OpComparison

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
LEVELS = (0.10, 0.25, 0.50, 0.75, 0.90)


@dataclass(frozen=True)
class Site:
    """One call of a module in all its layers: per-call medians in microseconds, the range of the measured calls.

    ``share`` is its part of the measured time of all sites, ``error`` the signed error of its whole time in percent,
    ``off_us`` predicted minus measured over all calls.
    """

    workload: str
    kind: str
    source: str
    path: str
    phase: str
    detail: str
    calls: int
    predicted_us: float
    low_us: float
    high_us: float
    measured_us: float
    fastest_us: float
    slowest_us: float
    share: float
    error: float
    off_us: float


def call_site(path: str) -> str:
    """A module path with its layer numbers left open, so that one call in every layer has one name."""
    return _NUMBER.sub("*", path)


def sites(ops: Sequence[OpComparison]) -> list[Site]:
    """The call sites of some compared operators, the longest first."""
    groups: dict[tuple[str, ...], list[OpComparison]] = {}
    for op in ops:
        key = (op.workload, op.kind, op.source, call_site(op.path), op.phase, op.detail)
        groups.setdefault(key, []).append(op)
    total = sum(op.measured_us for op in ops)
    all_sites = [_site(key, group, total) for key, group in groups.items()]
    return sorted(all_sites, key=lambda site: -site.share)


def _site(key: tuple[str, ...], group: Sequence[OpComparison], total_us: float) -> Site:
    workload, kind, source, path, phase, detail = key
    predicted, measured = sum(op.predicted_us for op in group), sum(op.measured_us for op in group)
    return Site(
        workload=workload,
        kind=kind,
        source=source,
        path=path,
        phase=phase,
        detail=detail,
        calls=len(group),
        predicted_us=statistics.median(op.predicted_us for op in group),
        low_us=statistics.median(op.low_us for op in group),
        high_us=statistics.median(op.high_us for op in group),
        measured_us=statistics.median(op.measured_us for op in group),
        fastest_us=min(op.measured_us for op in group),
        slowest_us=max(op.measured_us for op in group),
        share=measured / total_us,
        error=(predicted / measured - 1.0) * 100.0,
        off_us=predicted - measured,
    )


@dataclass(frozen=True, eq=False)
class Errors:
    """Signed errors [n] in percent with the measured microseconds [n] they weigh."""

    percent: np.ndarray
    weights: np.ndarray

    @property
    def weight(self) -> float:
        """Measured microseconds in all."""
        return float(self.weights.sum())

    def quantiles(self) -> list[float]:
        """Errors at p10, p25, median, p75 and p90 of the measured time."""
        order = np.argsort(self.percent, kind="stable")
        reached = np.cumsum(self.weights[order]) / self.weight
        places = np.minimum(np.searchsorted(reached, np.array(LEVELS) - 1e-12), len(order) - 1)
        return [float(value) for value in self.percent[order][places]]

    def within(self, percent: float) -> float:
        """Fraction of the measured time whose error is at most this large."""
        return float(self.weights[np.abs(self.percent) <= percent].sum() / self.weight)


def errors_of(ops: Sequence[OpComparison]) -> Errors:
    """The errors of some compared operators."""
    predicted = np.array([op.predicted_us for op in ops])
    measured = np.array([op.measured_us for op in ops])
    return Errors((predicted / measured - 1.0) * 100.0, measured)


def errors_by_kind(ops: Sequence[OpComparison]) -> dict[str, Errors]:
    """The errors of each kind, the kind with the most time first."""
    by_kind: dict[str, list[OpComparison]] = {}
    for op in ops:
        by_kind.setdefault(op.kind, []).append(op)
    errors_of_kind = {kind: errors_of(group) for kind, group in by_kind.items()}
    return dict(sorted(errors_of_kind.items(), key=lambda item: -item[1].weight))
