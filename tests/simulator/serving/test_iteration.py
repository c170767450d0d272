"""The law of one iteration: tables, and a linear law held as tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.serving.iteration import at_point, at_points, iteration_us, linear_tables

whole = st.integers(1, 100_000)


@given(st.tuples(*[st.integers(0, 1000)] * 7), st.integers(0, 500), whole, st.integers(0, 9000), whole, whole)
def test_a_linear_law_is_its_own_sum(law, decodes, context, tokens, pairs, cached) -> None:
    decode_context = context if decodes else 0
    pairs, cached = (pairs, cached) if tokens else (0, 0)
    expected = 0.0
    if decodes + tokens:
        parts = (1, decodes, decode_context, tokens, pairs, cached, decodes)
        expected = float(np.dot(law, parts))
    made = iteration_us(linear_tables(*law), decodes, decode_context, tokens, pairs, cached, decodes)
    assert made == pytest.approx(expected, rel=1e-12, abs=1e-6)


@given(st.floats(-5, 40))
def test_tables_are_linear_between_their_points_and_beyond_their_ends(place: float) -> None:
    axis, values = np.array([0.0, 2.0, 10.0, 30.0]), np.array([1.0, 5.0, 6.0, 0.0])
    expected = np.interp(place, axis, values)
    if place < 0:
        expected = 1.0 + 2.0 * place
    if place > 30:
        expected = -0.3 * (place - 30)
    assert at_point(axis, values, place) == pytest.approx(expected, abs=1e-9)
    grid = np.stack([values, 3 * values])
    assert at_points(np.array([0.0, 1.0]), axis, grid, 0.5, place) == pytest.approx(2 * expected, abs=1e-9)


def test_a_pass_over_prompts_takes_no_less_than_its_kernels_take_the_host() -> None:
    law = linear_tables(100.0, decode_us=10.0, prefill_token_us=1.0)
    issued = law._replace(kernels=np.array([300.0, 300.0]), issue_us=80.0)
    for prompt, us in ((0, 100 + 40), (1000, 24_000), (30_000, 100 + 40 + 30_000)):
        batch = (4, 0, prompt, 0.0, 0, 0)
        assert iteration_us(issued, *batch) == pytest.approx(us)
        assert iteration_us(law, *batch) == pytest.approx(100 + 40 + prompt)
    assert iteration_us(issued, 0, 0, 0, 0.0, 0, 0) == 0
