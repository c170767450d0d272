"""A closed loop in steady state against what it must be where that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.serving.closed_form import BURST, ClosedLoop, closed_form
from opcast.simulator.serving.iteration import linear_tables

LAW = linear_tables(1000.0, decode_us=10.0, decode_context_us=0.01, prefill_token_us=20.0, prefill_pair_us=0.001)
LOOP = ClosedLoop(concurrency=16, input_len=1000, output_len=500)


def test_one_client_decodes_alone_and_waits_for_its_own_prompt():
    ttft, tpot = closed_form(LAW, replace(LOOP, concurrency=1))
    step, prompt = 1000 + 10 + 0.01 * 1250, 1000 + 20 * 1000 + 0.001 * 1000 * 1001 / 2
    assert tpot == pytest.approx(step + (prompt - step) / 500)
    assert ttft == pytest.approx((1 - BURST) * (prompt + tpot / 2) + BURST * prompt)


def test_prompts_in_between_make_decodes_longer_and_more_so_where_decodes_wait():
    alone = closed_form(linear_tables(1000.0, decode_us=10.0, decode_context_us=0.01), LOOP)[1]
    mixed, apart = closed_form(LAW, LOOP)[1], closed_form(LAW, replace(LOOP, mixed=False))[1]
    assert alone < mixed < apart
    assert mixed - alone == pytest.approx(16 / 500 * (20 * 1000 + 0.001 * 1000 * 1001 / 2), rel=0.05)


def test_requests_that_do_not_fit_wait_in_proportion():
    ttft, tpot = closed_form(LAW, replace(LOOP, kv_tokens=8 * 1250))
    half, half_tpot = closed_form(LAW, replace(LOOP, concurrency=8))
    assert tpot == pytest.approx(half_tpot)
    assert ttft - half == pytest.approx(500 * tpot + half, rel=0.1)
    assert closed_form(LAW, replace(LOOP, kv_tokens=8 * 1250, reserves=True))[1] < tpot


@given(st.integers(1, 300), st.integers(1, 300))
def test_more_clients_never_have_shorter_times(one, other):
    few, many = sorted((one, other))
    for place in (0, 1):
        times = [closed_form(LAW, replace(LOOP, concurrency=count))[place] for count in (few, many)]
        assert times[0] <= times[1] * (1 + 1e-9)


def test_chunks_of_a_long_prompt_hold_decodes_in_each():
    whole = closed_form(LAW, replace(LOOP, input_len=4000))
    cut = closed_form(LAW, replace(LOOP, input_len=4000, max_tokens=1024))
    assert cut[0] > whole[0]
    assert cut[1] == pytest.approx(whole[1], rel=0.05)
