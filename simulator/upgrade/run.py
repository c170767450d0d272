"""From a question about an upgrade to its report: the ops of a step, what they may move by, what to measure first.

The move of an op is one that all ops of its kind and library share, and one of its own; both are normal in logarithms
(:mod:`.libraries`). An op that is measured is known. Each one measured also tells of the shared move of the others:
with n of them its variance falls to 1 / (1 / common^2 + n / within^2).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from ...datasets.ops import KINDS, Op
from ..engines.chain import caller_of
from ..report.needs import Need, needs
from ..report.worth import BEGIN_S, case_s, once_measured
from .answer import UpgradeReport, UpgradeRow
from .libraries import ReleaseMoves, library_of, moves_of, touched
from .request import UpgradeRequest

if TYPE_CHECKING:
    from ..engines.bench import Bench


@dataclass
class KindGroup:
    """Ops of one kind and library, those with the largest share first, and how many of them are measured."""

    kind: str
    library: str
    touched: bool
    moves: ReleaseMoves
    ops: list[Op]
    shares: list[float]
    measured: int = 0

    @property
    def case_s(self) -> float:
        """Seconds of one op: cold and warm, of a collective once."""
        return case_s(self.kind)

    def variance(self, measured: int | None = None) -> float:
        """Of the step's logarithm, because of these ops, once so many are measured."""
        if not self.touched:
            return 0.0
        count = self.measured if measured is None else measured
        others = self.shares[count:]
        common = 1.0 / (1.0 / self.moves.common**2 + count / self.moves.within**2)
        return sum(others) ** 2 * common + sum(share**2 for share in others) * self.moves.within**2

    @property
    def worth(self) -> float:
        """Variance that the next op takes away, for each second."""
        if not self.touched or self.measured >= len(self.ops):
            return 0.0
        return (self.variance() - self.variance(self.measured + 1)) / self.case_s


def plan_upgrade(request: UpgradeRequest, bench: Bench) -> UpgradeReport:
    """The report of an upgrade. The errors of a step."""
    started = time.perf_counter()
    report: Any = bench.simulate(request.step)
    state = report.state
    caller = caller_of(state.plan.stack, state.device)
    groups = groups_of(needs(state), caller, request.changes, state.device.vendor)
    chosen, seconds = choose(groups, 60.0 * request.minutes - BEGIN_S)
    middle_s, low_s, high_s = report.times_s
    z = NormalDist().inv_cdf(0.5 + report.coverage / 2.0)
    spreads = [
        z * math.sqrt(sum(group.variance(0) for group in groups)),
        z * math.sqrt(sum(group.variance() for group in groups)),
    ]
    before_low, before_high = wider((middle_s, low_s, high_s), spreads[0])
    known_low, known_high, _ = once_measured(state, dict.fromkeys(chosen))
    after_low, after_high = wider((middle_s, known_low, known_high), spreads[1])
    rows = sorted((row_of(group) for group in groups), key=lambda row: (-row.before_percent, -row.share))
    return UpgradeReport(
        model=report.model,
        workload=report.workload,
        device=report.device,
        changes=request.changes,
        step_time_s=middle_s,
        coverage=report.coverage,
        low_s=low_s,
        high_s=high_s,
        unmeasured_low_s=before_low,
        unmeasured_high_s=before_high,
        measured_low_s=after_low,
        measured_high_s=after_high,
        rows=tuple(rows),
        measure=tuple(op.to_dict() for op in chosen),
        seconds=seconds,
        notes=notes_of(request, groups, chosen),
        wall_time_s=time.perf_counter() - started,
    )


def groups_of(step_needs: Sequence[Need], caller: Any, changes: Sequence[str], vendor: str) -> list[KindGroup]:
    """The ops of a step by kind and library, with their shares of the time of all kernels."""
    total_us = sum(need.us for need in step_needs) or 1.0
    groups: dict[tuple[str, str], KindGroup] = {}
    for need in step_needs:
        if KINDS[need.op.kind].family == "host":
            continue
        library = library_of(need.op, caller, vendor)
        key = need.op.kind, library
        if key not in groups:
            groups[key] = KindGroup(*key, touched(library, need.op.kind, changes), moves_of(need.op.kind), [], [])
        groups[key].ops.append(need.op)
        groups[key].shares.append(need.us / total_us)
    return list(groups.values())


def choose(groups: Sequence[KindGroup], budget_s: float) -> tuple[list[Op], float]:
    """Ops that take most of the variance away for their time, until the budget is spent; and the seconds of all."""
    chosen: list[Op] = []
    seconds = 0.0
    waiting = [(-group.worth, number) for number, group in enumerate(groups) if group.worth > 0.0]
    heapq.heapify(waiting)
    while waiting:
        _, number = heapq.heappop(waiting)
        group = groups[number]
        if seconds + group.case_s > budget_s:
            continue
        chosen.append(group.ops[group.measured])
        group.measured += 1
        seconds += group.case_s
        if group.worth > 0.0:
            heapq.heappush(waiting, (-group.worth, number))
    return chosen, seconds


def row_of(group: KindGroup) -> UpgradeRow:
    """One group for people."""
    return UpgradeRow(
        kind=group.kind,
        library=group.library,
        touched=group.touched,
        share=sum(group.shares),
        ops=len(group.ops),
        move_percent=100.0 * math.hypot(group.moves.common, group.moves.within) if group.touched else 0.0,
        before_percent=100.0 * math.sqrt(group.variance(0)),
        after_percent=100.0 * math.sqrt(group.variance()),
        measured=group.measured,
        seconds=group.measured * group.case_s,
    )


def wider(times: tuple[float, float, float], spread: float) -> tuple[float, float]:
    """An interval that also holds a move of the whole step by ``spread`` in logarithms, which is independent of it."""
    middle, low, high = times
    below, above = math.log(middle / low), math.log(high / middle)
    return middle * math.exp(-math.hypot(below, spread)), middle * math.exp(math.hypot(above, spread))


def notes_of(request: UpgradeRequest, groups: Sequence[KindGroup], chosen: Sequence[Op]) -> tuple[str, ...]:
    """What the answer leaves out or cannot know."""
    notes = []
    touched_ops = sum(len(group.ops) for group in groups if group.touched)
    if not touched_ops:
        notes.append(f"no kernel of this step is of {', '.join(request.changes)}: there is nothing to measure")
    elif len(chosen) < touched_ops:
        notes.append(f"{touched_ops - len(chosen)} ops do not fit into {request.minutes:g} minutes, or hardly matter")
    if any(KINDS[op.kind].collective for op in chosen):
        notes.append("collectives are measured where their ranks are: on one GPU they are left out")
    notes.append("time of the host is not in it: nobody published how far releases move it")
    return tuple(notes)
