"""What the errors of a step's ops share, by who answered."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.datasets.ops import make_op
from opcast.models.choice import LAW, OWN
from opcast.simulator.engines import Witness
from opcast.simulator.graph import Node
from opcast.simulator.report.ledger import Ledger
from opcast.simulator.timing.latencies import IN_STEP_CPU, IN_STEP_PRODUCTS, SHARED


def ledger(clause: str, engine: str, inside: bool = True, count: int = 9) -> Ledger:
    """As many products of different shapes, 10 us each, known within a fifth."""
    ops = [make_op("gemm", m=64, n=64 * (i + 1), k=64) for i in range(count)]
    nodes = [Node(op, "linear", "", "forward", (), (), 0) for op in ops]
    witness = np.empty(count, dtype=object)
    witness[:] = [Witness(clause, "", "")] * count
    ones = np.ones(count)
    names = np.full(count, engine, dtype=object)
    return Ledger(
        nodes, 0 * ones, 10 * ones, ones, 0.8 * ones, 1.2 * ones, names, np.full(count, inside, dtype=bool), witness
    )


def own_width(of: Ledger, one_sign: bool = False) -> float:
    """Half-width that ops bring, as a share of the time."""
    high = of.interval(1.0, one_sign)[1] - 1.0
    return float(np.sqrt(high**2 - (IN_STEP_CPU if one_sign else IN_STEP_PRODUCTS) ** 2))


def test_predictors_of_own_rows_err_op_by_op_within_them() -> None:
    narrow = own_width(ledger(OWN, "learned"))
    assert narrow == pytest.approx(0.2 * np.sqrt(SHARED + (1.0 - SHARED) / 9))
    assert narrow < 0.75 * own_width(ledger(OWN, "learned", inside=False))


@pytest.mark.parametrize(("clause", "engine", "inside"), [(OWN, "learned", False), (LAW, "analytical", True)])
def test_what_else_answers_may_be_off_for_all_ops_alike(clause: str, engine: str, inside: bool) -> None:
    assert own_width(ledger(clause, engine, inside)) == pytest.approx(0.2)


def test_other_work_on_a_cpu_lengthens_all_calls() -> None:
    found = ledger(OWN, "learned")
    assert own_width(found, one_sign=True) > own_width(found)
    assert own_width(found, one_sign=True) == pytest.approx(own_width(ledger(LAW, "analytical")))
