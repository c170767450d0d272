"""vLLM's balance of data-parallel ranks: by counts that are old when they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.counted import by_counts, tell

NAMES = ("waiting", "count", "fresh", "told_waiting", "told_running", "known_waiting", "known_running")


def ranks_of(*counts: tuple[int, int, int]) -> SimpleNamespace:
    """As much of a state as the balance reads: ranks with so many that wait, run, and came in since the step began."""
    nothing = dict.fromkeys(NAMES, 0)
    ranks = [SimpleNamespace(**nothing | dict(zip(NAMES, each, strict=False))) for each in counts]
    return SimpleNamespace(ranks=ranks, totals=[SimpleNamespace(now_us=0.0, told=0, told_us=0.0)])


def chosen(state: SimpleNamespace, now_us: float) -> int:
    state.totals[0].now_us = now_us
    return by_counts(state, SimpleNamespace(choosy=0), 0, 0, len(state.ranks))


def test_requests_of_a_burst_take_turns_as_each_is_counted_where_it_went():
    state = ranks_of((0, 0, 0), (0, 0, 0), (0, 0, 0))
    assert [chosen(state, 0.0) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_counts_of_a_step_are_known_a_tenth_of_a_second_after_the_last_ones_and_not_before():
    state = ranks_of((0, 3, 0), (2, 1, 2))  # two on the second came in during the step: it does not tell them
    state.totals[0].now_us = 70e3
    tell(state, 0, 2)
    assert [chosen(state, at_us) for at_us in (80e3, 99e3)] == [0, 1]  # as nothing is known, they take turns
    tell(state, 0, 2)  # as before
    assert chosen(state, 169e3) == 1  # since 120 ms: 3 run on the first, 1 on the second
    assert (state.ranks[1].known_waiting, state.ranks[1].known_running) == (1, 1)
    state.ranks[1].count, state.totals[0].now_us = 4, 170e3
    tell(state, 0, 2)
    assert chosen(state, 219e3) == 0  # 3 to 5: the second's four are not known yet
    assert chosen(state, 221e3) == 0  # 3 to 4, and what was added to the first is forgotten


def test_who_waits_weighs_four_times_who_runs():
    state = ranks_of((1, 0, 0), (0, 3, 0))
    state.totals[0].now_us = 1.0
    tell(state, 0, 2)
    assert chosen(state, 200e3) == 1
    assert chosen(state, 201e3) == 0


def test_ranks_without_a_seat_left_get_requests_while_others_have_one(played: Callable[..., Any]):
    traffic = RequestTraffic(
        arrival="closed", concurrency=16, requests=160, input=Lengths(mean=100), output=Lengths(mean=150)
    )
    known = ServingRequest(
        law=IterationLaw(base_us=20e3, decode_us=10.0, prefill_token_us=10.0),
        kv=KvMemory(4000, 16),
        traffic=traffic,
        scheduler=Scheduler("vllm", max_seqs=8),
        attention_dp=2,
        router="least_outstanding",
    )
    old = replace(known, router="vllm_dp")
    waits = {request.router: played(request).report.ttft_ms.mean for request in (known, old)}
    roomy = played(replace(old, scheduler=Scheduler("vllm", max_seqs=16))).report.ttft_ms.mean
    assert waits["vllm_dp"] > 2 * waits["least_outstanding"]
    assert roomy < 1.2 * waits["least_outstanding"]
