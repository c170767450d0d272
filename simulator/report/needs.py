"""What a step asks of its device: every op with the time that it takes, how sure that is, and who said so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...datasets.ops import Op
from ..step.state import State
from .ledger import ledger_of


@dataclass(frozen=True)
class Need:
    """An op of a step: microseconds in the whole workload, and factors that bound them."""

    op: Op
    us: float
    low: float
    high: float
    engine: str
    inside: bool


def needs(state: State) -> list[Need]:
    """The distinct ops of a workload, those with most time first; operators without a kind are left out."""
    ledger = ledger_of(list(state.executions()))
    need_of_op: dict[Op, Need] = {}
    columns = (ledger.us.tolist(), ledger.low.tolist(), ledger.high.tolist(), ledger.engine.tolist())
    for node, time_us, low, high, engine, inside in zip(ledger.nodes, *columns, ledger.inside.tolist(), strict=True):
        if node.op is not None:
            earlier_us = need_of_op[node.op].us if node.op in need_of_op else 0.0
            need_of_op[node.op] = Need(node.op, earlier_us + time_us, low, high, engine, bool(inside))
    return sorted(need_of_op.values(), key=lambda need: -need.us)


def shares(steps: Iterable[Iterable[Need]]) -> dict[Op, float]:
    """Each op's share of the time of all steps, every step counting alike. Sums to 1."""
    share_of_op: dict[Op, float] = {}
    steps_needs = [list(step) for step in steps]
    for step in steps_needs:
        step_us = sum(need.us for need in step) or 1.0
        for need in step:
            share_of_op[need.op] = share_of_op.get(need.op, 0.0) + need.us / step_us / len(steps_needs)
    return dict(sorted(share_of_op.items(), key=lambda item: -item[1]))
