"""Spreads of predicted peaks: Student's distribution, an interval that holds 90 %, a file of known frameworks."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from opcast.simulator.memory.errors import ERRORS, error_spread, peak_interval, probability_within
from opcast.simulator.question.stack import STACK_DIRECTORY


@settings(deadline=None)
@given(st.floats(-3, 3), st.floats(0.001, 1))
def test_the_distribution_is_students(error: float, spread: float) -> None:
    assert probability_within(error, spread) == pytest.approx(stats.t.cdf(error / spread * math.sqrt(2), 4), abs=1e-9)


@settings(deadline=None)
@given(st.floats(0.1, 200), st.floats(0.001, 0.5))
def test_the_interval_holds_ninety_percent(peak: float, spread: float) -> None:
    low, high = peak_interval(peak, spread)
    assert probability_within(math.log(high / peak), spread) == pytest.approx(0.95, abs=1e-6)
    assert probability_within(math.log(low / peak), spread) == pytest.approx(0.05, abs=1e-6)


def test_without_a_spread_it_fits_or_not() -> None:
    assert [probability_within(error, 0.0) for error in (-0.1, 0.0, 0.1)] == [0.0, 0.5, 1.0]


def test_the_file_names_frameworks_that_exist() -> None:
    read = yaml.safe_load(ERRORS.read_text())
    assert read["stacks"]
    assert read["pooled"]["rows"] == sum(of["rows"] for of in read["stacks"].values())
    for name, of in read["stacks"].items():
        assert (STACK_DIRECTORY / f"{name}.yaml").is_file()
        assert of["tables"]
        assert error_spread(name) == of["spread"] > 0
    assert error_spread("of nobody") == error_spread() == read["pooled"]["spread"]
