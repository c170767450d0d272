"""Stopping rules: what the order statistics promise, and when each rule says stop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.harness.stopping import MedianWidth, median_interval, median_ranks, relative_width

values = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=200).map(np.array)


@given(st.integers(1, 300), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_ranks_enclose_the_median_as_often_as_they_promise(count: int, confidence: float):
    ranks = median_ranks(count, confidence)
    below = [math.comb(count, k) / 2**count for k in range(count + 1)]
    if ranks is None:
        assert 1 - 2 * below[0] < confidence
        return
    low, high = ranks
    assert 0 <= low <= high < count
    assert low + high == count - 1

    def coverage(low: int) -> float:
        return sum(below[low + 1 : count - low])

    assert coverage(low) >= confidence - 1e-9
    if low + 1 <= high - 1:
        assert coverage(low + 1) < confidence, "a narrower interval would do"


def test_large_counts_agree_with_the_exact_ranks_to_one():
    exact, approximate = median_ranks(999, 0.95), median_ranks(1000, 0.95)
    assert abs(exact[0] - approximate[0]) <= 2


@pytest.mark.parametrize("draw", ["exponential", "lognormal", "uniform"])
def test_interval_covers_the_true_median(draw: str):
    random = np.random.default_rng(5)
    median = {"exponential": math.log(2), "lognormal": 1.0, "uniform": 0.5}[draw]
    hits = 0
    for _ in range(500):
        sample = getattr(random, draw)(size=25)
        low, high = median_interval(sample, 0.9)
        hits += low <= median <= high
    assert 0.88 <= hits / 500 <= 0.99


@given(values, st.randoms())
def test_interval_holds_the_sample_median_and_ignores_order(samples: np.ndarray, random):
    low, high = median_interval(samples)
    assert low <= np.median(samples) <= high
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert median_interval(np.array(shuffled)) == (low, high)


@given(values, st.floats(0.01, 1000))
def test_relative_width_has_no_unit(samples: np.ndarray, scale: float):
    first, second = relative_width(samples), relative_width(samples * scale)
    assert first == second == math.inf or first == pytest.approx(second)


@given(st.floats(0.1, 1e6), st.integers(1, 100), st.integers(6, 50))
def test_equal_samples_stop_as_soon_as_there_are_enough(value: float, count: int, minimum: int):
    assert MedianWidth(0.01, minimum=minimum)(np.full(count, value)) == (count >= minimum)


@given(st.lists(st.floats(100, 106), min_size=1, max_size=100).map(np.array), st.floats(0.001, 0.1), st.floats(1, 10))
def test_a_wider_tolerance_never_stops_later(samples: np.ndarray, width: float, factor: float):
    assert MedianWidth(factor * width)(samples) >= MedianWidth(width)(samples)


def test_one_outlier_does_not_keep_the_median_from_being_known():
    samples = np.r_[np.full(30, 10.0), 1e6]
    assert MedianWidth(0.01)(samples)


def test_two_equal_modes_are_never_precise():
    assert not MedianWidth(0.05)(np.tile([10.0, 20.0], 100))
