"""Batches that repeat, counted without a look at their requests, are the same as those formed one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.kv_tiers import KvTiers
from opcast.simulator.question.serving import (
    POLICIES,
    ROUTERS,
    DecodePool,
    IterationLaw,
    KvMemory,
    Scheduler,
    ServingRequest,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import blocks, loop, setup
from opcast.simulator.serving.state import NONE

LAW = IterationLaw(base_us=5000.0, decode_us=20.3, decode_context_us=0.021, prefill_token_us=60.7, sample_us=3.1)
SUMS = ("ranks", "totals", "gaps", "spans", "sizes", "seats")
OWN = {"again", "given_us", "left", "refused", "runs", "spare"}  # of what only batches that repeat write
Play = Callable[..., Any]


@st.composite
def requests(draw: st.DrawFn) -> ServingRequest:
    """Traffic of all loads through all schedulers, pools and ranks, in memory that is scarce or not."""
    policy = draw(st.sampled_from(POLICIES))
    block_tokens = draw(st.sampled_from([1, 3, 16, 32]))
    trtllm = policy.startswith("trtllm")
    scheduler = Scheduler(
        policy,
        max_seqs=draw(st.sampled_from([1, 3, 8, 64])),
        max_tokens=400,
        preemption=draw(st.sampled_from(["recompute", "swap"])),
        watermark=draw(st.sampled_from([None, 0.05])),
        async_scheduling=draw(st.sampled_from([None, True, False])),
        wait_iterations=draw(st.sampled_from([0, 4])) if trtllm or policy == "sglang" else 0,
        prefix_caching=draw(st.booleans()),
    )
    arrival = draw(st.sampled_from(["poisson", "bursty", "closed"]))
    turns = 1 if arrival == "closed" else draw(st.sampled_from([1, 1, 3]))
    prefixes = draw(st.sampled_from([0, 2]))
    traffic = RequestTraffic(
        seed=draw(st.integers(0, 1000)),
        rate=1.0 if arrival == "closed" else draw(st.sampled_from([2.0, 20.0, 200.0])),
        arrival=arrival,
        concurrency=5 if arrival == "closed" else 0,
        turns=turns,
        prefixes=prefixes,
        prefix_tokens=40 * min(prefixes, 1),
        requests=20,
        input=Lengths("uniform", low=1, high=200),
        output=Lengths("uniform", low=1, high=50),
    )
    pool = draw(st.sampled_from([0, 0, 2]))
    return ServingRequest(
        law=LAW,
        kv=KvMemory(draw(st.sampled_from([300, 1000, 8000])) // block_tokens, block_tokens, 131072.0),
        scheduler=scheduler,
        traffic=traffic,
        replicas=draw(st.integers(1, 3)),
        attention_dp=1 if pool else draw(st.sampled_from([1, 1, 3])),
        router=draw(st.sampled_from(ROUTERS)),
        decode_pool=DecodePool(replicas=pool),
        tiers=KvTiers(host_gib=draw(st.sampled_from([0.0, 0.02, 1.0])) if scheduler.prefix_caching else 0.0),
    )


def both_ways(request: ServingRequest, played: Play) -> int:
    """Compare; returns how many iterations were repeated."""
    repeated = 0
    repeat = loop.repeat

    def counted(*arguments: Any) -> bool:
        nonlocal repeated
        done = repeat(*arguments)
        repeated += done
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "repeat", counted)
        quick = played(request)
        patch.setattr(setup, "looked_at", lambda request: True)
        plain = played(request)
    assert quick.requests.tobytes() == plain.requests.tobytes()
    assert quick.iterations.tobytes() == plain.iterations.tobytes()
    for name in SUMS:
        ours, theirs = getattr(quick.state, name), getattr(plain.state, name)
        for field in [each for each in ours.dtype.names or () if each not in OWN]:
            assert (ours[field] == theirs[field]).all(), (name, field)
        assert ours.dtype.names or (ours == theirs).all(), name
    assert free_contents(quick.state) == free_contents(plain.state)
    return repeated


def free_contents(state: Any) -> list[list[int]]:
    """What is in the free blocks of each rank, in the order in which they are taken; NONE for nothing."""
    found = []
    for rank in range(len(state.ranks) if len(state.runs) else 0):
        contents = [NONE] * int(state.ranks[rank]["bare"])
        run = end = blocks.ring_end(state, rank)
        while (run := int(state.runs[run]["after"])) != end:
            last, count = int(state.runs[run]["last"]), int(state.runs[run]["count"])
            contents += range(last, last - count, -1)
        found.append(contents)
    return found


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "faster_transformer"])
def test_every_policy_repeats_batches(policy: str, played: Play) -> None:
    traffic = RequestTraffic(
        rate=30.0,
        requests=30,
        input=Lengths("uniform", low=1, high=200),
        output=Lengths("uniform", low=10, high=100),
    )
    for prefixes in (0, 3):
        asked = replace(traffic, prefixes=prefixes, prefix_tokens=20 * prefixes)
        scheduler = Scheduler(policy, prefix_caching=prefixes > 0)
        request = ServingRequest(law=LAW, kv=KvMemory(150, 16), scheduler=scheduler, traffic=asked)
        assert both_ways(request, played) > 50


@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_iterations_and_requests_are_the_same_to_the_last_bit(played: Play, request: ServingRequest) -> None:
    both_ways(request, played)
