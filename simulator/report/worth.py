"""What measuring a step's own ops is worth: how narrow its interval becomes.

Nothing is measured here. Ops that a campaign reaches in its time get the bounds of rows that were measured on the chip
itself, and the interval of the step is put together again as for such rows: with what a step adds to its ops and the
law of clocks, but without what is not known of other chips and laboratories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...datasets.ops import KINDS, Op
from ...models.power import PRODUCTS
from ..engines.measured import MIN_FACTOR
from ..step.state import State
from ..timing.clocks import KNOWN
from .account import interval, widen_for_host
from .ledger import Ledger, ledger_of

CASE_S = 0.3 + 0.3  # of a GPU's case: repetitions (conf/campaign/model.yaml), and allocation beside them
BEGIN_S = 60.0  # of a campaign, before its first case: torch, a context, long products that tell the clock (judged)


@dataclass(frozen=True)
class MeasuringWorth:
    """The interval of a workload once ``share`` of its kernels' time was measured in ``seconds``."""

    low_s: float
    high_s: float
    share: float
    seconds: float


def case_s(kind: str) -> float:
    """Seconds that an op of a kind takes a campaign: cold and warm, of a collective once."""
    return CASE_S * (1 if KINDS[kind].collective else 2)


def worth_of(state: State, minutes: float) -> MeasuringWorth:
    """What so many minutes of measuring make of the interval of a workload; it never becomes wider."""
    ledger = ledger_of(list(state.executions()))
    chosen, seconds = within(order_of([node.op for node in ledger.nodes], ledger), 60.0 * minutes - BEGIN_S)
    return MeasuringWorth(*once_measured(state, chosen), seconds)


def once_measured(state: State, chosen: Mapping[Op, Any]) -> tuple[float, float, float]:
    """The interval of a workload in seconds once some ops are measured, and their share of the time of its kernels."""
    executions = list(state.executions())
    ledger = ledger_of(executions)
    ops = [node.op for node in ledger.nodes]
    reached = np.array([op in chosen for op in ops], dtype=bool)
    today = widen_for_host(interval(state, ledger), state, executions)
    after = today
    if chosen:
        measured = replace(ledger, low=bounds(ops, reached, ledger.low, -1), high=bounds(ops, reached, ledger.high, 1))
        after = widen_for_host(measured.interval(state.total_us, state.device.synchronous), state, executions)
    low, high = max(after[0], today[0]), min(after[1], today[1])
    share = float(ledger.us[reached].sum() / max(ledger.us.sum(), 1e-9))
    return low * 1e-6, high * 1e-6, share


def order_of(ops: Sequence[Op | None], ledger: Ledger) -> list[Op]:
    """The ops of a step by how unsure they leave it, for each second that they take to measure."""
    unsure_us: dict[Op, float] = {}
    for op, width_us in zip(ops, (ledger.us * (ledger.high - ledger.low)).tolist(), strict=True):
        if op is not None:
            unsure_us[op] = unsure_us.get(op, 0.0) + width_us
    return sorted(unsure_us, key=lambda op: -unsure_us[op] / case_s(op.kind))


def within(ops: Sequence[Op], budget_s: float) -> tuple[Mapping[Op, None], float]:
    """As many of the ops, in order, as a budget has time for; and what they take."""
    chosen: dict[Op, None] = {}
    seconds = 0.0
    for op in ops:
        if seconds + case_s(op.kind) <= budget_s:
            chosen[op] = None
            seconds += case_s(op.kind)
    return chosen, seconds


def bounds(ops: Sequence[Op | None], reached: np.ndarray, factors: np.ndarray, sign: int) -> np.ndarray:
    """Bounds [n] as factors: those of rows of the chip itself for ops that are reached, else as they are."""
    row = math.log(MIN_FACTOR)
    product = math.hypot(row, KNOWN[0])
    widths = np.array([product if op is not None and KINDS[op.kind].family in PRODUCTS else row for op in ops])
    return np.where(reached, np.exp(sign * widths), factors)
