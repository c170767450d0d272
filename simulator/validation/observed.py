"""Steps of known runs, simulated: what was measured, and the shares of the prediction by cell of ops and regime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.own_errors import refusal
from ...datasets.truth import InferenceRow, Row, TrainingRow
from ...datasets.truth.halves import half_of
from ..question.calibration import RunKind, StepCalibration, load_calibration, run_kind
from ..question.plan import Plan
from ..report.parts import Part, parts_of
from .answers import CACHED, Engines, inference_quantities, simulated_case, training_quantities
from .cases import Question, ValidationSettings, inference_case, training_case

THROUGHPUT = "throughput"
TIMED = ("step_time", "e2e", THROUGHPUT, "ttft", "tpot")  # what a row is observed by: the first that it has


@dataclass(frozen=True)
class ObservedStep:
    """A run and its prediction: ``parts`` are the shares of the predicted time, by cell and regime; they sum to 1.

    ``applied`` is ln of the factors that the prediction was made with already, ``half`` that of its source
    (:mod:`....datasets.truth.halves`).
    """

    id: str
    table: str
    group: str
    settings: Mapping[str, RunKind]
    predicted: float
    measured: float
    parts: Mapping[Part, float] = field(default_factory=dict)
    applied: Mapping[Part, float] = field(default_factory=dict)
    half: str = ""

    @property
    def setting(self) -> RunKind:
        """What its first kind of step is made of."""
        return next(iter(self.settings.values()))

    @property
    def framework(self) -> str:
        """Who ran it."""
        return self.setting.framework

    @property
    def has_experts(self) -> bool:
        """Whether its model is a mixture of experts."""
        return any(cell.startswith("experts") for cell, _ in self.parts)

    @property
    def chip(self) -> str:
        """On what."""
        return self.setting.chip


def group_of(row: TrainingRow | InferenceRow) -> str:
    """The model under one layout: rows that share it are never on both sides of a split."""
    recompute = row.recompute if isinstance(row, TrainingRow) else ""
    return f"{row.model} {row.layout} {row.hardware.devices} {recompute}"


def observe(
    table: str,
    rows: Sequence[Row],
    setting: ValidationSettings,
    engines: Engines,
    changed: Callable[[Plan], Plan] = lambda plan: plan,
    progress: Callable[[int], None] = lambda done: None,
) -> list[ObservedStep]:
    """Every row of a table that has a time and can be simulated; ``changed`` says under which plan."""
    steps = []
    for row in rows:
        if isinstance(row, (TrainingRow, InferenceRow)) and (timed := quantity(row)):
            try:
                case = training_case(row, setting) if isinstance(row, TrainingRow) else inference_case(row, setting)
                steps.append(_observed(table, row, timed, replace(case, plan=changed(case.plan)), setting, engines))
            except ValueError as error:
                refusal(error)
        progress(1)
    return steps


def quantity(row: TrainingRow | InferenceRow) -> str:
    """What a row is observed by; "" where it has no time, or did not fit."""
    if row.measured.get("fits", 1.0) == 0.0:
        return ""
    return next((name for name in TIMED if row.measured.get(name, 0.0) > 0.0), "")


def measured_of(row: TrainingRow | InferenceRow) -> float:
    """What :func:`quantity` names, as a time: one over a throughput."""
    timed = quantity(row)
    return 1.0 / row.measured[timed] if timed == THROUGHPUT else row.measured[timed]


def _observed(
    table: str,
    row: TrainingRow | InferenceRow,
    timed: str,
    case: Question,
    setting: ValidationSettings,
    engines: Engines,
) -> ObservedStep:
    report = simulated_case(case, setting, engines)
    quantities = training_quantities if isinstance(row, TrainingRow) else inference_quantities
    predicted, measured = quantities(report, row)[timed].value, measured_of(row)
    if timed == THROUGHPUT:
        predicted = 1.0 / predicted
    assert report.state is not None
    state = report.state
    device, plan = state.device, state.plan
    kinds = list(dict.fromkeys(step.kind for step in state.steps))
    settings = {kind: run_kind(plan.stack.framework, device, plan.regime(kind)) for kind in kinds}
    left_out = "optimizer" if row.options.get("optimizer") == "none" else ""
    only = {"ttft": "prefill", "tpot": "decode"}.get(timed, "") if len(kinds) > 1 else ""
    if row.options.get("prompt") == CACHED and "decode" in kinds:
        only = "decode"
    parts = parts_of(state, left_out, only)
    usual = load_calibration(plan.calibration).host.get(plan.stack.framework, 1.0)
    applied = {}
    for cell, regime in parts:
        calibration = plan.calibrated[regime] if regime in plan.calibrated else StepCalibration()
        applied[cell, regime] = math.log(calibration.factor(cell) / (usual if cell == "host" else 1.0))
    half = half_of(row.source or table)
    return ObservedStep(f"{table} {row.id}", table, group_of(row), settings, predicted, measured, parts, applied, half)


def table_of(observed: Sequence[ObservedStep]) -> np.ndarray:
    """How much each run weighs: many runs of one table say less than as many of several [runs]."""
    names = [step.table for step in observed]
    counts = {name: names.count(name) for name in set(names)}
    return np.array([min(1.0, (10.0 / counts[name]) ** 0.5) for name in names])
