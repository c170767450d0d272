"""``opcast profile campaign=active``: measures in rounds what makes the planned steps wrong, within a budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets.backends import DEFAULT_BACKEND
from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.loading import load
from ..datasets.ops import KINDS, Op
from ..datasets.store import Store
from ..harness.plan import CampaignPlan, Case
from ..models.active import Subject, forecast, plan_round
from ..models.features import feature_names
from ..models.table import MeasurementTable, tables
from .show import BadInputError, say

if TYPE_CHECKING:
    from collections.abc import Callable

NO_STEPS = 'campaign=active needs the steps that you plan: steps=["workload=train model=llama3_8b"]'
CASE_S = 0.3  # of a measurement beside its repetitions: allocation, warm-up


@dataclass(frozen=True)
class Budget:
    """``active.…`` of ``opcast profile``: how much may be measured, and when more is not worth it."""

    points: int = 400
    minutes: float | None = None
    per_round: int = 60
    stop_gain: float = 0.02  # a round that is to take less than this share of the expected error is not measured

    def __post_init__(self) -> None:
        if self.points < 1 or self.per_round < 1 or (self.minutes is not None and self.minutes <= 0):
            raise BadInputError("active.points, active.per_round and active.minutes must be above 0")
        if not 0 <= self.stop_gain < 1:
            raise BadInputError(f"active.stop_gain={self.stop_gain} must be a share from 0 to below 1")


@dataclass(frozen=True)
class RoundResult:
    """One round: what it measured, the error that was expected of an op before it, and what was then found.

    Errors are relative; ``found_error`` is the median over the round's measurements against what would have been said.
    """

    points: int
    spent_s: float
    expected_error: float
    expected_after: float
    found_error: float | None


def budget_of(config: Mapping[str, Any]) -> Budget:
    """The checked budget of a configuration."""
    return load(Budget, dict(config.get("active") or {}), BadInputError, "active", "setting")


def run(
    base: CampaignPlan,
    shares: Mapping[Op, float],
    store: Store,
    device: Device,
    budget: Budget,
    measure: Callable[[CampaignPlan], Any],
) -> tuple[list[RoundResult], str]:
    """Rounds until the budget is spent or the next is worth too little; and why it ended.

    ``base`` has the candidates and settings; ``measure`` runs a plan into the store.
    """
    if not shares:
        raise BadInputError(NO_STEPS)
    candidates = by_kind((*base.cases, *asked_cases(shares, base)), {op.kind for op in shares})
    points_left, started = budget.points, time.monotonic()
    results: list[RoundResult] = []
    while points_left > 0:
        rest_s = float("inf") if budget.minutes is None else budget.minutes * 60 - (time.monotonic() - started)
        if rest_s <= 0:
            return results, "the time is spent"
        subjects, open_cases = subjects_of(candidates, shares, store, device, base.settings.case_budget_s)
        chosen = plan_round(subjects, min(budget.per_round, points_left), rest_s)
        cases = [open_cases[kind][i] for kind, picks in chosen.picks.items() for i in picks]
        if not cases:
            return results, "every candidate is measured" if rest_s == float("inf") else "the time is spent"
        if results and chosen.gain < budget.stop_gain:
            return results, f"another {len(cases)} points are expected to take {chosen.gain:.1%} of the error away"
        before = {kind: subjects[kind] for kind in chosen.picks}
        measure(replace(base, cases=tuple(cases), canaries=()))
        surprises = [
            _surprises(before[kind], picks, open_cases[kind], store, device) for kind, picks in chosen.picks.items()
        ]
        errors = np.abs(np.concatenate(surprises)) if surprises else np.zeros(0)
        error = float(np.expm1(np.median(errors))) if len(errors) else None
        points_left -= len(cases)
        spent = time.monotonic() - started
        results.append(RoundResult(len(cases), spent, chosen.before, chosen.after, error))
        error_text = "" if error is None else f", {error:.1%} found"
        expected = f"error {chosen.before:.1%} expected{error_text}, then {chosen.after:.1%}"
        say(f"round {len(results)}: {counted(len(cases), 'point')}, {expected}")
    return results, "the points are spent"


def asked_cases(shares: Mapping[Op, float], base: CampaignPlan) -> list[Case]:
    """The ops of the steps themselves, in both cache states, on the backend that their kind is measured on."""
    usual: dict[str, str] = {}
    for case in base.cases:
        usual.setdefault(case.op.kind, case.backend)
    return [Case(op, usual.get(op.kind, DEFAULT_BACKEND), cache) for op in shares for cache in ("cold", "warm")]


def by_kind(cases: Sequence[Case], kinds: set[str]) -> dict[str, list[Case]]:
    """Distinct candidates of the kinds that the steps run."""
    by_kind_: dict[str, dict[Case, None]] = {}
    for case in cases:
        if case.op.kind in kinds:
            by_kind_.setdefault(case.op.kind, {})[case] = None
    return {kind: list(unique) for kind, unique in by_kind_.items()}


def subjects_of(
    candidates: Mapping[str, Sequence[Case]], shares: Mapping[Op, float], store: Store, device: Device, case_s: float
) -> tuple[dict[str, Subject], dict[str, list[Case]]]:
    """What is known and asked of each kind, and the candidates that have no row yet, in the subject's order."""
    done = store.done(device.id)
    subjects, open_cases = {}, {}
    for kind, cases in candidates.items():
        unmeasured = [case for case in cases if case.key not in done]
        shares_of_kind = [(op, share) for op, share in shares.items() if op.kind == kind]
        if not unmeasured or not shares_of_kind:
            continue
        states = [Case(op, "", cache) for op, _ in shares_of_kind for cache in ("cold", "warm")]
        measured = _known(kind, store, device)
        subjects[kind] = Subject(
            feature_names(kind),
            _features(kind, unmeasured, device),
            np.full(len(unmeasured), case_s + CASE_S),
            _features(kind, states, device),
            np.repeat([share / 2 for _, share in shares_of_kind], 2),
            *measured,
        )
        open_cases[kind] = unmeasured
    return subjects, open_cases


def _features(kind: str, cases: Sequence[Case], device: Device) -> np.ndarray:
    """float32 [n, f], in the order of the cases."""
    return _table(kind, cases, device, np.ones(len(cases))).frame().matrix


def _table(kind: str, cases: Sequence[Case], device: Device, latency_us: np.ndarray) -> MeasurementTable:
    names = [dim.name for dim in _dims(kind)]
    dims = np.array([case.op.dims for case in cases], dtype=np.int64).reshape(len(cases), len(names))
    columns = {name: dims[:, i] for i, name in enumerate(names)}
    dtype, out_dtype = (np.array([getattr(case.op, name) for case in cases]) for name in ("dtype", "out_dtype"))
    caches = np.array([case.cache for case in cases])
    return MeasurementTable(kind, device, "", columns, dtype, out_dtype, caches, latency_us)


def _dims(kind: str) -> Any:
    return KINDS[kind].dims


def _known(kind: str, store: Store, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Features and ln(measured / analytical) of all rows of a kind, whatever backend."""
    if kind not in store.kinds():
        return np.zeros((0, len(feature_names(kind))), dtype=np.float32), np.zeros(0)
    tables_with_rows = [table for table in tables(kind, store.read(kind, device.id), device) if len(table)]
    frames = [table.frame() for table in tables_with_rows]
    if not frames:
        return np.zeros((0, len(feature_names(kind))), dtype=np.float32), np.zeros(0)
    ratios = [np.log(table.latency_us / ops.analytical_us) for table, ops in zip(tables_with_rows, frames, strict=True)]
    return np.concatenate([ops.matrix for ops in frames]), np.concatenate(ratios)


def _surprises(
    before: Subject, picks: Sequence[int], cases: Sequence[Case], store: Store, device: Device
) -> np.ndarray:
    """ln(measured / what would have been said) of a round's measurements of one kind that went well."""
    kind = cases[0].op.kind
    if kind not in store.kinds():
        return np.zeros(0)
    chosen = [cases[i] for i in picks]
    rows = store.lookup(kind, device.id, "cold"), store.lookup(kind, device.id, "warm")
    surprises = []
    for case in chosen:
        exact = rows[case.cache == "warm"].get((*case.op.dims, case.op.dtype, case.op.out_dtype), [])
        surprises.append(next((row.latency_us for row in exact if row.backend == case.backend), np.nan))
    latency = np.array(surprises)
    good = np.isfinite(latency)
    if not good.any():
        return np.zeros(0)
    table = _table(kind, chosen, device, np.where(good, latency, 1.0))
    truth = np.log(table.latency_us / table.frame().analytical_us)
    return (truth - forecast(before, np.array(picks)))[good]
