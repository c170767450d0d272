"""Errors, ranks, spreads and the constant-MFU baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.devices import load_device
from opcast.datasets.truth import TrainingRow, read_table
from opcast.simulator.validation.baseline import constant_mfu
from opcast.simulator.validation.metrics import errors, intervals, score, spearman, spread, verdicts

POSITIVE = st.floats(0.01, 1e6)
PAIRS = st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=50)


@settings(deadline=None)
@given(PAIRS)
def test_errors_are_those_of_the_textbook(pairs: list[tuple[float, float]]) -> None:
    made = errors(pairs)
    each = sorted(abs(p - m) / m * 100 for p, m in pairs)
    assert made["n"] == len(pairs)
    assert made["max_ape"] == pytest.approx(each[-1])
    assert made["mean_ape"] == pytest.approx(sum(each) / len(each))
    assert each[0] - 1e-9 <= made["median_ape"] <= made["p90_ape"] + 1e-9 <= made["max_ape"] + 2e-9
    assert abs(made["bias"]) <= made["mean_ape"] * (1 + 1e-9)


def test_a_known_case() -> None:
    made = errors([(11.0, 10.0), (9.0, 10.0), (13.0, 10.0)])
    assert made == pytest.approx(
        {"n": 3, "median_ape": 10, "mean_ape": 50 / 3, "p90_ape": 26, "max_ape": 30, "bias": 10}
    )


def test_intervals_are_counted_and_measured() -> None:
    found = intervals([(9.0, 12.0, 10.0, 11.0), (9.0, 12.0, 10.0, 12.5), (18.0, 22.0, 20.0, 18.0)])
    widths, miss = (0.3, 0.3, 0.2), (12.5 - 12.0) / 10 * 2 / 0.1
    said = {"coverage": 2 / 3, "interval_width": sum(widths) / 3, "interval_score": (sum(widths) + miss) / 3}
    assert found == pytest.approx(said)
    made = score(
        {"step_time": [(10.0, 11.0)], "tpot": [(1.0, 1.0)]}, {"step_time": [(9.0, 12.0, 10.0, 11.0)], "tpot": []}
    )
    assert made["step_time"]["coverage"] == 1.0
    assert "coverage" not in made["tpot"]


def test_verdicts_count_both_kinds() -> None:
    made = verdicts([(1, 1), (1, 0), (0, 0), (0, 0)])
    assert made["accuracy"] == 75
    assert made["accuracy_fits"] == 100
    assert made["accuracy_oom"] == pytest.approx(200 / 3)
    assert "accuracy_oom" not in verdicts([(1, 1)])
    assert set(score({"fits": [(1, 1)], "step_time": [(1, 2)], "ttft": []})) == {"fits", "step_time"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=40))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import spearmanr

    made = spearman([(float(a), float(b)) for a, b in pairs])
    left, right = np.array(pairs).T
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        assert made is None
    else:
        assert made == pytest.approx(spearmanr(left, right).statistic, abs=1e-9)


def test_spread_of_repeats() -> None:
    assert spread([[1.0], [2.0]]) is None
    made = spread([[1.0, 1.1], [5.0], [2.0, 2.0, 2.0]])
    assert made is not None
    assert made["groups"] == 2
    assert made["n"] == 5
    assert made["median_ape"] == 0
    assert made["p90_ape"] == pytest.approx(10, abs=1)


@pytest.mark.reference
@pytest.mark.parametrize(("name", "median"), [("llm_foundry_mpt", 8), ("nanotron_h100", 70), ("vtrain_a100", 52)])
def test_a_constant_mfu_is_as_bad_as_it_is_known_to_be(name: str, median: float, reference_data: Path) -> None:
    rows = [r for r in read_table(reference_data / "truth" / f"train_{name}.csv").rows if isinstance(r, TrainingRow)]
    pairs = constant_mfu(rows, {row.hardware.device: load_device(row.hardware.device) for row in rows})
    assert errors(list(pairs.values()))["median_ape"] == pytest.approx(median, rel=0.15)
