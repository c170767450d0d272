"""Steps of known runs, simulated: what was measured, and the shares of the prediction by cell of ops and regime."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.truth import InferenceRow, Row, TrainingRow
from ..question.calibration import RunKind, StepCalibration, cell_of, load_calibration, run_kind
from ..question.plan import Plan
from ..step.state import Executed, State
from ..timing.modifiers import Run, modify
from ..timing.phases import select_nodes
from .answers import CACHED, Engines, inference_quantities, simulated_case, training_quantities
from .cases import Question, ValidationSettings, inference_case, training_case

FIXED = "fixed"  # what follows no family: sends between stages, data loading, gaps of CUDA graphs
NO_FACTOR = ("shard_copies", "collective_checks")  # host's time that the calibration's factor was not fitted on
THROUGHPUT = "throughput"
TIMED = ("step_time", "e2e", THROUGHPUT, "ttft", "tpot")  # what a row is observed by: the first that it has

Part = tuple[str, str]  # cell (family and format of ops), regime


@dataclass(frozen=True)
class ObservedStep:
    """A run and its prediction: ``parts`` are the shares of the predicted time, by cell and regime; they sum to 1.

    ``applied`` is ln of the factors that the prediction was made with already.
    """

    id: str
    table: str
    group: str
    settings: Mapping[str, RunKind]
    predicted: float
    measured: float
    parts: Mapping[Part, float] = field(default_factory=dict)
    applied: Mapping[Part, float] = field(default_factory=dict)

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
    found = []
    for row in rows:
        if isinstance(row, (TrainingRow, InferenceRow)) and (timed := quantity(row)):
            try:
                case = training_case(row, setting) if isinstance(row, TrainingRow) else inference_case(row, setting)
                found.append(_observed(table, row, timed, replace_plan(case, changed), setting, engines))
            except ValueError as error:
                if not type(error).__module__.startswith("opcast"):
                    raise
        progress(1)
    return found


def replace_plan(case: Question, changed: Callable[[Plan], Plan]) -> Question:
    """The question under another plan."""
    return replace(case, plan=changed(case.plan))


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
        known = plan.calibrated[regime] if regime in plan.calibrated else StepCalibration()
        applied[cell, regime] = math.log(known.factor(cell) / (usual if cell == "host" else 1.0))
    return ObservedStep(f"{table} {row.id}", table, group_of(row), settings, predicted, measured, parts, applied)


def parts_of(state: State, left_out: str = "", only: str = "") -> dict[Part, float]:
    """Shares of the time of a workload that follow each cell's factor, by regime.

    Kernels of a family count as far as they are not hidden: compute by its share of computing time, collectives by what
    is exposed. Bubbles follow what fills the pipeline. ``left_out`` is a phase that does not count, ``only`` the one
    kind of step that does.
    """
    found: dict[Part, float] = {}
    graphs = state.plan.stack.cuda_graph or bool(state.plan.settings.cuda_graph)  # gaps between kernels, no host
    for step in state.steps:
        if only and step.kind != only:
            continue
        own: dict[str, float] = {}
        for stage in step.speaking:
            for each in step.executions(stage):
                for family, us in _families(each, state.plan) if each.phase != left_out else ():
                    family = FIXED if family == "host" and graphs else family
                    own[family] = own.get(family, 0.0) + us
        worked, whole = sum(own.values()), step.total_us * step.times
        sends = float(step.pipeline.sending_us[step.busiest]) * step.times if step.trains else 0.0
        fixed = min(sends + step.overhead_us * step.times, whole / 2)
        for family, us in own.items():
            found[family, step.kind] = found.get((family, step.kind), 0.0) + us / worked * (whole - fixed)
        found[FIXED, step.kind] = found.get((FIXED, step.kind), 0.0) + fixed
    total = sum(found.values())
    return {part: us / total for part, us in found.items() if us > 0.0}


def _families(each: Executed, plan: Plan) -> Iterator[tuple[str, float]]:
    """Microseconds of a phase by cell: computing, exposed communication, waiting for the host.

    What hosts take for collectives beside issuing them (:mod:`..timing.hosts`) follows no factor.
    """
    chosen = select_nodes(each.costs, each.phase)
    busy: dict[bool, dict[str, float]] = {False: {}, True: {}}
    weights = (each.costs.kernel_us[chosen] * each.costs.repeats[chosen]).tolist()
    for place, us in zip(chosen.tolist(), weights, strict=True):
        cell = cell_of(each.costs.nodes[place].op)
        side = busy[cell.startswith("collective")]
        side[cell] = side.get(cell, 0.0) + us
    times: dict[bool, float] = {False: each.time.compute_us, True: sum(each.time.exposed_us.values())}
    for waited, by_cell in busy.items():
        whole = sum(by_cell.values())
        for cell, us in by_cell.items():
            yield cell, us / whole * times[waited] * each.times if whole else 0.0
    apart = _apart(each, chosen, plan)
    yield "host", each.time.host_us * each.times * (1.0 - apart)
    yield FIXED, each.time.host_us * each.times * apart


def _apart(each: Executed, chosen: np.ndarray, plan: Plan) -> float:
    """The share of the host's time in a phase that no factor on the host reaches."""
    if not (plan.stack.check_us or plan.stack.share_us):
        return 0.0
    costs = each.costs
    nothing = replace(costs, host_us=np.zeros(len(costs.nodes)))
    run = Run(plan, plan.figures, lambda now: 0.0, [({}, {})])
    alone = modify([nothing], run, NO_FACTOR)[0].host_us
    whole = float(costs.host_us[chosen] @ costs.repeats[chosen])
    return float(alone[chosen] @ costs.repeats[chosen]) / whole if whole else 0.0


def table_of(observed: Sequence[ObservedStep]) -> np.ndarray:
    """How much each run weighs: many runs of one table say less than as many of several [runs]."""
    names = [each.table for each in observed]
    counts = {name: names.count(name) for name in set(names)}
    return np.array([min(1.0, (10.0 / counts[name]) ** 0.5) for name in names])
