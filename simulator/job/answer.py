"""The answer about a whole job: what most lives lie between, what the time goes into, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..report.answer import StepReport
from ..report.display import display_html
from ..report.step import plain
from .lives import LifeTrace
from .schedule import PhaseSteps

CHANCES = (10, 50, 90)


@dataclass(frozen=True)
class LifeSpread:
    """A figure over all lives: one in ten is below ``p10``, half are below ``p50``, nine in ten below ``p90``."""

    p10: float
    p50: float
    p90: float
    mean: float


def spread_of(values: np.ndarray) -> LifeSpread:
    """The spread of a figure of each life."""
    p10, p50, p90 = (float(value) for value in np.percentile(values, CHANCES))
    return LifeSpread(p10, p50, p90, float(values.mean()))


@dataclass(frozen=True)
class PlannedCheckpoints:
    """Checkpoints of a job: size, how many, how often, what they cost; the best interval by Daly and by simulation."""

    size_gb: float
    count: int
    interval_minutes: float
    blocking_s: float
    durable_s: float
    load_s: float
    write_gbps: float
    read_gbps: float
    daly_minutes: float | None
    best_minutes: float | None


@dataclass(frozen=True)
class PlanReport:
    """A training job over ``lives``.

    ``goodput`` is the share of the time in steps that counted; ``interruptions`` are those that lost work, which come
    every ``mtbf_hours``. ``undisturbed_days`` is a job that nothing interrupts, with steps as expected. ``parts`` are
    shares of the mean life that add up to 1. ``cost``, ``kwh`` and ``co2_kg`` are None where a price, watts or the
    grid's grams are not known. ``given_up`` is the share of lives that would not end. ``traces`` and ``histogram`` are
    for pictures; JSON has neither.
    """

    model: str
    device: str
    devices: int
    nodes: int
    layout: tuple[str, ...]
    tokens: float
    steps: int
    step_time_s: float
    step_low_s: float
    step_high_s: float
    step_coverage: float | None
    phases: tuple[PhaseSteps, ...]
    days: LifeSpread
    gpu_hours: LifeSpread
    cost: LifeSpread | None
    kwh: LifeSpread | None
    co2_kg: LifeSpread | None
    goodput: LifeSpread
    interruptions: LifeSpread
    lost_hours: LifeSpread
    down_hours: LifeSpread
    undisturbed_days: float
    parts: Mapping[str, float]
    mtbf_hours: float | None
    rate_spread: float
    rates_from: str
    causes: Mapping[str, float]
    checkpoint: PlannedCheckpoints
    gpu_w: float | None
    lives: int
    seed: int
    given_up: float
    notes: tuple[str, ...]
    wall_time_s: float
    histogram: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    traces: tuple[LifeTrace, ...] = field(default=(), repr=False)
    step: StepReport | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what pictures are made of, and the report of the step, are left out."""
        values: dict[str, Any] = plain(self, drop=("histogram", "traces", "step", "phases"))
        first, last = self.phases[0], self.phases[-1]
        ends = {"first": first, "last": last} if len(self.phases) > 1 else {"all": last}
        values["phases"] = {name: plain(phase) | {"tokens": phase.tokens} for name, phase in ends.items()}
        values["phases"]["count"] = len(self.phases)
        return values

    def _repr_html_(self) -> str:
        facts = [
            ("days", f"{self.days.p50:.3g} ({self.days.p10:.3g} to {self.days.p90:.3g})"),
            ("GPU-hours", f"{self.gpu_hours.p50:,.0f}"),
            ("goodput", f"{self.goodput.p50:.1%}"),
            ("interruptions", f"{self.interruptions.p50:,.0f}"),
        ]
        return display_html(f"{self.model} on {self.devices:,} x {self.device}", facts)
