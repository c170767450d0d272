"""Distributions of an answer, shares by source, strictness."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.ops import make_op
from opcast.simulator.report import distribution, trust

VALUES = st.tuples(st.floats(0.01, 100), st.floats(1.01, 3), st.floats(1.01, 3)).map(
    lambda t: (t[0], t[0] / t[1], t[0] * t[2])
)


@settings(deadline=None)
@given(VALUES, st.floats(0.5, 0.99))
def test_the_interval_holds_its_share_of_the_probability(triple, coverage) -> None:
    value, low, high = triple
    below = distribution.probability_within(low, value, low, high, coverage)
    above = 1 - distribution.probability_within(high, value, low, high, coverage)
    assert below == pytest.approx((1 - coverage) / 2, abs=1e-6)
    assert above == pytest.approx((1 - coverage) / 2, abs=1e-6)
    assert distribution.probability_within(value, value, low, high, coverage) == pytest.approx(0.5)


@settings(deadline=None)
@given(VALUES, st.floats(0.01, 0.99))
def test_quantile_and_probability_are_inverse(triple, q) -> None:
    value, low, high = triple
    at = distribution.quantile(q, value, low, high, 0.9)
    assert distribution.probability_within(at, value, low, high, 0.9) == pytest.approx(q, abs=1e-6)


def test_quantiles_rise() -> None:
    found = list(distribution.quantiles(10, 8, 15, 0.9).values())
    assert found == sorted(found)
    assert found[2] == 10
    assert found[0] == pytest.approx(8)
    assert found[-1] == pytest.approx(15)


def test_shares_by_source_add_up() -> None:
    parts = [("measured", True, 1.0), ("learned", True, 2.0), ("learned", False, 3.0), ("network", True, 4.0)]
    found = trust.shares(parts)
    assert found == pytest.approx({"measured": 0.1, "interpolated": 0.2, "extrapolated": 0.3, "analytical": 0.4})


def test_what_to_measure_is_what_weighs_most() -> None:
    small, large = (make_op("gemm", m=m, n=64, k=64, dtype="bf16") for m in (64, 128))
    parts = [(small, "analytical", False, 1.0), (large, "learned", False, 5.0), (small, "learned", True, 4.0)]
    found = trust.missing_measurements(parts)
    assert [each.op["m"] for each in found] == [128, 64]
    assert found[0].share == pytest.approx(0.5)


def test_strict_names_the_shapes() -> None:
    op = make_op("gemm", m=64, n=64, k=64, dtype="bf16")
    parts = [(op, "learned", False, 5.0), (op, "measured", True, 4.0)]
    shares = trust.shares((engine, inside, us) for _, engine, inside, us in parts)
    trust.check_strict(shares, trust.missing_measurements(parts), 0.6)
    with pytest.raises(trust.TrustError, match=r"56% .* allows 50%.*gemm.*m=64"):
        trust.check_strict(shares, trust.missing_measurements(parts), 0.5)


def test_out_of_memory_is_likelier_the_fuller() -> None:
    chances = [trust.probability_oom(peak, 80.0) for peak in (40.0, 79.0, 80.0, 81.0, 120.0)]
    assert chances == sorted(chances)
    assert chances[2] == pytest.approx(0.5)


def test_out_of_memory_goes_by_the_errors_of_the_framework() -> None:
    """SimuMax's Megatron steps are told to a few percent; nanotron's peaks are often a fifth away."""
    sure, unsure, any_other = (
        trust.probability_oom(70.0, 80.0, name) for name in ("megatron_core", "nanotron", "never heard of")
    )
    assert 0.001 < sure < any_other < unsure < 0.5
    assert any_other == trust.probability_oom(70.0, 80.0)
    assert trust.probability_oom(90.0, 80.0, "megatron_core") > trust.probability_oom(90.0, 80.0, "nanotron") > 0.5
