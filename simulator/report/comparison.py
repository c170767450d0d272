"""Predicted beside measured: what a run on real hardware says about a simulated step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from .answer import InferenceReport, StepReport, ape


@dataclass(frozen=True)
class OpComparison:
    """One executed node of one workload: what was predicted and what it took, in microseconds."""

    workload: str
    kind: str
    source: str
    path: str
    phase: str
    detail: str  # the op with its dims, as text
    predicted_us: float
    low_us: float
    high_us: float
    measured_us: float


@dataclass(frozen=True)
class StepComparison:
    """One workload: the simulated step, and every timed run of the real one, in milliseconds."""

    workload: str
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_runs_ms: tuple[float, ...]
    report: StepReport | InferenceReport

    @classmethod
    def of(cls, workload: str, report: StepReport | InferenceReport, seconds: Sequence[float], *more: Any) -> Self:
        """A report beside the seconds of real runs; ``more`` are the fields of a subclass."""
        if isinstance(report, StepReport):
            predicted, low, high = (1e3 * time_s for time_s in (report.step_time_s, report.low_s, report.high_s))
        else:
            predicted, low, high = report.e2e_ms, report.low_ms, report.high_ms
        return cls(workload, predicted, low, high, tuple(1e3 * run_s for run_s in seconds), report, *more)

    @property
    def inside(self) -> bool:
        """Whether the measured median lies in the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    def times_ms(self) -> dict[str, float]:
        """What is said of the step in JSON."""
        return {name: getattr(self, name) for name in ("predicted_ms", "low_ms", "high_ms", "measured_ms")}

    @property
    def measured_ms(self) -> float:
        """Median of the runs."""
        return statistics.median(self.measured_runs_ms)

    @property
    def error(self) -> float:
        """APE of the step, in percent."""
        return ape(self.predicted_ms, self.measured_ms)

    @property
    def spread(self) -> float:
        """Half the distance from the 10th to the 90th percentile of the runs over their median, in percent."""
        if len(self.measured_runs_ms) < 2:
            return 0.0
        deciles = statistics.quantiles(self.measured_runs_ms, n=10, method="inclusive")
        return (deciles[-1] - deciles[0]) / 2 / self.measured_ms * 100.0


@dataclass(frozen=True)
class Comparison:
    """The whole of a quickstart: machine, measurements, predictors, steps and ops."""

    device: Mapping[str, Any]  # Device.to_dict()
    model: str
    parameters: int
    precision: str
    environment: Mapping[str, Any]  # torch, opcast_version, node, threads …
    campaign: Mapping[str, Any]  # cases, ok, failed, wall_time_s …
    training: Mapping[str, Mapping[str, Any]]  # kind -> n, test_median_ape, coverage, roofline_median_ape, predictor …
    steps: Sequence[StepComparison]
    ops: Sequence[OpComparison]

    def errors(self) -> dict[str, float]:
        """APE of each workload's step, in percent."""
        return {step.workload: step.error for step in self.steps}

    def op_errors(self) -> dict[str, float]:
        """Median APE over the executed nodes of each kind, in percent."""
        by_kind: dict[str, list[float]] = {}
        for op in self.ops:
            by_kind.setdefault(op.kind, []).append(ape(op.predicted_us, op.measured_us))
        return {kind: statistics.median(errors) for kind, errors in sorted(by_kind.items())}

    def family_totals(self, workload: str) -> dict[str, tuple[float, float, int]]:
        """kind -> (predicted ms, measured ms, nodes) of one workload."""
        totals: dict[str, tuple[float, float, int]] = {}
        for op in self.ops:
            if op.workload == workload:
                predicted, measured, count = totals.get(op.kind, (0.0, 0.0, 0))
                totals[op.kind] = (predicted + op.predicted_us / 1e3, measured + op.measured_us / 1e3, count + 1)
        return totals
