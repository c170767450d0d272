"""Choosing measurements: what is counted as known is what measuring it would teach, and the choice beats chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.models.active import FEWEST, Subject, believe, expected_error, forecast, plan_round

NAMES = ["size_m", "size_n", "dtype_bits"]


def subject(seed: int = 0, known: int = 0, count: int = 120) -> Subject:
    """A smooth ratio over two sizes, asked for in one corner."""
    random = np.random.default_rng(seed)
    places = random.uniform(0, 10, (count + known, 2))
    features = np.column_stack([places, np.full(len(places), 16.0)]).astype(np.float32)
    corner = np.column_stack([random.uniform(7, 10, (20, 2)), np.full(20, 16.0)]).astype(np.float32)
    target = ratio(features[count:])
    share = np.full(20, 1 / 20)
    return Subject(NAMES, features[:count], np.ones(count), corner, share, features[count:], target, seed)


def ratio(features: np.ndarray) -> np.ndarray:
    return 0.3 * np.sin(features[:, 0] / 2) + 0.2 * np.cos(features[:, 1] / 3)


def test_counting_a_candidate_as_measured_is_what_measuring_it_teaches() -> None:
    own = subject(known=20)
    belief = believe(own)
    before = belief.doubt()
    gains = belief.gains()
    position = int(np.argmax(gains))
    belief.choose(position)
    assert before - belief.doubt() == pytest.approx(gains[position], rel=1e-6)
    known = np.concatenate([own.measured, own.candidates[position : position + 1]])
    again = replace(own, measured=known, target=np.append(own.target, 0.0))
    exact = type(belief)(again, belief.scales, belief.amplitude)
    np.testing.assert_allclose(belief.variance, exact.variance, atol=1e-8)
    np.testing.assert_allclose(belief.cross, exact.cross, atol=1e-8)


def test_a_round_looks_where_the_steps_spend_their_time() -> None:
    own = subject()
    made = plan_round({"gemm": own}, 15)
    chosen = own.candidates[list(made.picks["gemm"]), :2]
    assert len(set(made.picks["gemm"])) == 15
    assert chosen.mean() > own.candidates[:, :2].mean() + 1.0
    assert made.after < made.before
    belief = believe(own)
    for position in np.random.default_rng(3).permutation(120)[:15]:
        belief.choose(int(position))
    assert made.after < expected_error({"gemm": belief})


def test_a_kind_of_little_share_and_a_dear_measurement_wait() -> None:
    first, second = subject(1), subject(2)
    small = replace(second, share=second.share * 0.01)
    picks = plan_round({"gemm": first, "gelu": small}, 40).picks
    assert len(picks["gemm"]) > len(picks["gelu"]) >= FEWEST
    dear = replace(second, cost_s=np.full(120, 5.0))
    made = plan_round({"gemm": first, "gelu": dear}, 100, seconds=60.0)
    assert made.cost_s <= 60.0
    assert FEWEST <= len(made.picks["gelu"]) < len(made.picks["gemm"])


def test_forecasts_come_from_what_is_known() -> None:
    assert not forecast(subject(), np.arange(3)).any()
    own = subject(known=60)
    off = forecast(own, np.arange(120)) - ratio(own.candidates)
    assert np.median(np.abs(off)) < 0.02


def test_nothing_to_choose_from_ends_the_round() -> None:
    own = subject()
    made = plan_round({"gemm": own}, 500)
    assert len(made.picks["gemm"]) <= 120
    assert not plan_round({}, 10).picks
