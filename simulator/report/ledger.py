"""What ran, as columns: a row for every stored node, phase and variant of a micro-batch, over the whole workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...datasets.ops import Op
from ...models.choice import OWN
from ..engines import Witness
from ..graph import Node
from ..step.state import Executed, State
from ..timing.latencies import SHARED, step_interval
from ..timing.phases import select_nodes
from .energy import DrawnEnergy, drawn_by

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Ledger:
    """Columns of n rows: the node, the stage that ran it, microseconds and number of executions in the whole workload,
    factors that bound the time, who answered, whether inside what that one knows, and whose measurements those are.
    """

    nodes: Sequence[Node]
    stage: np.ndarray
    us: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray
    engine: np.ndarray
    inside: np.ndarray
    witness: np.ndarray

    def kinds(self) -> list[str]:
        """The kind of op of every row; of an operator without kind its own name."""
        return [node.op.kind if node.op else node.source for node in self.nodes]

    def by_kind(self) -> Iterator[tuple[str, float, float, tuple[str, ...], dict[Witness, float]]]:
        """(kind, executions, microseconds, engines, microseconds by who knows) of every kind."""
        rows_of_kind: dict[str, list[int]] = {}
        for row, kind in enumerate(self.kinds()):
            rows_of_kind.setdefault(kind, []).append(row)
        for kind, rows in rows_of_kind.items():
            engines, witnesses = tuple(sorted(set(self.engine[rows]))), self.witness[rows].tolist()
            times_us = self.us[rows]
            yield kind, float(self.count[rows].sum()), float(times_us.sum()), engines, _sum_by_name(witnesses, times_us)

    def shared(self) -> np.ndarray:
        """What the error of every row shares with others of its kind, of its variance.

        Predictors of own rows were asked about rows that were left out. Whatever else answers, or they beyond their
        rows, may be off for all ops alike.
        """
        of_own_rows = np.array([who.clause == OWN for who in self.witness.tolist()], dtype=bool)
        return np.where(of_own_rows & (self.engine == "learned") & self.inside, SHARED, 1.0)

    def by_phase(self) -> dict[str, float]:
        """Microseconds by phase."""
        return _sum_by_name([node.phase for node in self.nodes], self.us)

    def by_engine(self) -> dict[str, float]:
        """Microseconds by who answered."""
        return _sum_by_name(self.engine.tolist(), self.us)

    def by_source(self) -> dict[str, float]:
        """Microseconds by whose measurements answered."""
        return _sum_by_name([witness.source for witness in self.witness.tolist()], self.us)

    def drawn_energy(self, state: State, stages: int) -> DrawnEnergy:
        """What a device draws in kernels, the mean of so many stages."""
        ops = [node.op for node in self.nodes]
        call_us = self.us / np.maximum(self.count, 1e-9)
        return drawn_by(ops, self.us / stages, call_us, state.device, state.registries, state.backend)

    def answers(self) -> Iterator[tuple[str, bool, float]]:
        """(engine, inside, microseconds) of every row."""
        return zip(self.engine.tolist(), self.inside.tolist(), self.us.tolist(), strict=True)

    def questions(self) -> Iterator[tuple[Op | None, str, bool, float]]:
        """(op, engine, inside, microseconds) of every row."""
        for node, (engine, inside, us) in zip(self.nodes, self.answers(), strict=True):
            yield node.op, engine, inside, us

    def unmapped(self) -> tuple[str, ...]:
        """Operators that no kind covers, with how often they run."""
        counts: Counter[str] = Counter()
        for node, count in zip(self.nodes, self.count.tolist(), strict=True):
            if node.op is None:
                counts[node.source] += count
        return tuple(f"{name} x{round(count)}" for name, count in counts.most_common())

    def interval(self, total_us: float, one_sign: bool = False) -> tuple[float, float]:
        """Bounds of the whole: errors of one kind of op go together as far as they share, different kinds do not.

        ``one_sign``: whatever answers, errors of one kind go together: other work on a CPU lengthens all calls.
        """
        work = float(self.us.sum())
        if not work:
            return total_us, total_us
        ops = [node.op or node.source for node in self.nodes]
        shared = 1.0 if one_sign else self.shared()
        low, high = step_interval(self.kinds(), ops, self.us, self.low, self.high, work, shared, one_sign)
        return total_us * low / work, total_us * high / work


def _sum_by_name(names: Sequence[Name], us: np.ndarray) -> dict[Name, float]:
    totals: dict[Name, float] = {}
    for name, value in zip(names, us.tolist(), strict=True):
        totals[name] = totals.get(name, 0.0) + value
    return totals


def ledger_of(executions: Sequence[Executed]) -> Ledger:
    """The ledger of what stages executed."""
    nodes: list[Node] = []
    columns: list[tuple[np.ndarray, ...]] = []
    for execution in executions:
        costs, chosen = execution.costs, select_nodes(execution.costs, execution.phase)
        nodes += [costs.nodes[i] for i in chosen.tolist()]
        count = costs.repeats[chosen] * execution.times
        columns.append(
            (
                np.full(len(chosen), execution.stage),
                costs.kernel_us[chosen] * count,
                count,
                costs.low[chosen],
                costs.high[chosen],
                costs.engine[chosen],
                costs.in_envelope[chosen],
                costs.witness[chosen],
            )
        )
    return Ledger(nodes, *(np.concatenate(column) for column in zip(*columns, strict=True)))
