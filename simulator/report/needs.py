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
    found: dict[Op, Need] = {}
    columns = (ledger.us.tolist(), ledger.low.tolist(), ledger.high.tolist(), ledger.engine.tolist())
    for node, us, low, high, engine, inside in zip(ledger.nodes, *columns, ledger.inside.tolist(), strict=True):
        if node.op is not None:
            before = found[node.op].us if node.op in found else 0.0
            found[node.op] = Need(node.op, before + us, low, high, engine, bool(inside))
    return sorted(found.values(), key=lambda need: -need.us)


def shares(steps: Iterable[Iterable[Need]]) -> dict[Op, float]:
    """Each op's share of the time of all steps, every step counting alike. Sums to 1."""
    found: dict[Op, float] = {}
    told = [list(step) for step in steps]
    for step in told:
        whole = sum(need.us for need in step) or 1.0
        for need in step:
            found[need.op] = found.get(need.op, 0.0) + need.us / whole / len(told)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
