"""Tokens guessed ahead: how many are kept, what they take, and that nothing is lost or overflows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.serving import (
    POLICIES,
    IterationLaw,
    KvMemory,
    Scheduler,
    ServingRequest,
    Speculation,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.iteration import drafting_us, iteration_us
from opcast.simulator.serving.replica import by_hand

LAW = IterationLaw(base_us=5000.0, decode_us=20.0, decode_context_us=0.02, prefill_token_us=60.0, sample_us=10.0)
MANY = RequestTraffic(arrival="closed", concurrency=8, requests=40, input=Lengths(mean=100), output=Lengths(mean=200))
SHORT = RequestTraffic(
    rate=20.0, requests=40, input=Lengths("uniform", low=1, high=300), output=Lengths("uniform", low=1, high=40)
)
USUAL = ServingRequest(law=LAW, kv=KvMemory(400, 16), traffic=MANY, speculation=Speculation(3, 0.7, 0.0))
Play = Callable[..., Any]


def test_as_many_are_kept_as_their_chances_say(played: Play) -> None:
    chain = 1 + 0.7 + 0.7**2 + 0.7**3
    report = played(USUAL).report
    assert report.tokens_per_decode == pytest.approx(chain, rel=0.03)
    by_place = replace(USUAL, speculation=Speculation(3, (0.9, 0.5, 0.0), 0.0))
    assert played(by_place).report.tokens_per_decode == pytest.approx(1 + 0.9 + 0.45, rel=0.03)
    assert played(replace(USUAL, speculation=Speculation())).report.tokens_per_decode == 1.0


def test_certain_guesses_take_as_many_iterations_fewer_and_none_at_all_take_as_many(played: Play) -> None:
    def iterations(speculation: Speculation) -> int:
        return int(played(replace(in_step, speculation=speculation)).report.iterations)

    in_step = replace(USUAL, traffic=replace(MANY, in_step=True))
    plain = iterations(Speculation())
    assert iterations(Speculation(3, 0.0, 0.0)) == plain
    assert iterations(Speculation(3, 1.0, 0.0)) == pytest.approx(plain / 4, rel=0.03)


def test_a_pass_checks_all_guesses_and_reads_each_cache_once() -> None:
    tables = by_hand(LAW, 100, 16, 0.0).tables
    plain, checked = (iteration_us(tables, 4, 400, 0, 0.0, 0, 4, drafts) for drafts in (0, 3))
    assert checked - plain == pytest.approx(3 * 4 * 10.0)  # by this law only samples cost by the token
    assert drafting_us(tables, 4, 400, 0.5) == pytest.approx(0.5 * (5000 + 4 * 20 + 400 * 0.02) + 4 * 10.0)


def test_a_draft_that_takes_long_makes_tokens_slower(played: Play) -> None:
    def tpot(share: float) -> float:
        return float(played(replace(USUAL, speculation=Speculation(3, 0.7, share))).report.tpot_ms.mean)

    assert tpot(0.0) < tpot(0.1) < tpot(2.0)
    assert tpot(0.03) < played(replace(USUAL, speculation=Speculation())).report.tpot_ms.mean < tpot(2.0)


@settings(
    max_examples=10,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(40, 120),
    seed=st.integers(0, 99),
    caching=st.booleans(),
    swap=st.booleans(),
)
def test_nothing_is_lost_and_memory_holds(played: Play, policy, blocks, seed, caching, swap) -> None:
    scheduler = Scheduler(
        policy, max_tokens=500, chunk=200, prefix_caching=caching, preemption="swap" if swap else "recompute"
    )
    request = replace(USUAL, kv=KvMemory(blocks, 16), scheduler=scheduler, traffic=replace(SHORT, seed=seed))
    served = played(request)
    rows, state = served.requests, served.state
    assert served.report.completed == len(rows) == 40
    assert state.totals["output_tokens"][0] == rows["output_tokens"].sum()
    assert (state.ranks["free"] == blocks).all()
    assert (served.iterations["blocks"] <= blocks).all()
    for name in ("outstanding", "waiting", "count", "work"):
        assert (state.ranks[name] == 0).all(), name
    if not caching and not served.report.preemptions:
        assert state.totals["computed_tokens"][0] == (rows["input_tokens"] + rows["output_tokens"] - 1).sum()
        assert served.report.itl_ms.count == np.maximum(rows["output_tokens"] - 1, 0).sum()


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"tokens": -1}, "speculation.tokens=-1"),
        ({"tokens": 99}, "at most 16"),
        ({"tokens": 2, "acceptance": 1.2}, "speculation.acceptance=1.2"),
        ({"tokens": 2, "acceptance": (0.5,)}, "1 numbers for speculation.tokens=2"),
        ({"tokens": 2, "draft_share": -1.0}, "speculation.draft_share=-1"),
    ],
)
def test_guesses_that_cannot_be_are_one_line(given_: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Speculation(**given_)
