"""Replicas that come and go, fail and come back; replicas of two kinds; weighted scorers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.fleet import LOST, Autoscale, ColdStart, ReplicaFailures, ScorerWeights
from opcast.simulator.question.serving import (
    ROUTERS,
    IterationLaw,
    KvMemory,
    Scheduler,
    SecondKind,
    ServingRequest,
    ServingTargets,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.report.served import ServingReport
from opcast.simulator.serving.arrivals import daily
from opcast.simulator.serving.autoscale import Autoscaler
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.requests_table import columns
from opcast.simulator.serving.scalers.queue import by_queue
from opcast.simulator.serving.scalers.signals import FleetSignals
from opcast.simulator.serving.scalers.sla import largest_rate
from opcast.simulator.serving.scalers.utilisation import by_utilisation
from opcast.simulator.serving.setup import rules

LAW = IterationLaw(base_us=10_000.0, prefill_token_us=50.0)
START = ColdStart(seconds=0.2)
SLO = ServingTargets(ttft_ms=200.0)
OF_TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms")
Play = Callable[..., Any]
examples = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def asked(**given: Any) -> ServingRequest:
    usual: dict[str, Any] = {
        "law": LAW,
        "kv": KvMemory(60, 16),
        "traffic": RequestTraffic(
            rate=60.0,
            requests=40,
            input=Lengths("uniform", low=1, high=100),
            output=Lengths("uniform", low=1, high=20),
        ),
        "scheduler": Scheduler(max_seqs=4),
        "replicas": 3,
        "slo": SLO,
    }
    return ServingRequest(**usual | given)


def same(one: ServingReport, other: ServingReport) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in (*OF_TIMES, "completed", "iterations", "goodput"))


@examples
@given(router=st.sampled_from(ROUTERS), caching=st.booleans(), seed=st.integers(0, 99))
def test_a_fleet_in_which_nothing_happens_is_the_one_without(played: Play, router, caching, seed) -> None:
    """No failure within the run, and as many replicas at least as at most: to the bit."""
    usual = asked(router=router, scheduler=Scheduler(max_seqs=4, prefix_caching=caching))
    usual = replace(usual, traffic=replace(usual.traffic, seed=seed))
    report = played(usual).report
    never = replace(usual, failures=ReplicaFailures(mtbf_h=1e12), cold_start=START)
    fixed = replace(usual, autoscale=Autoscale("queue", target=1.0, min_replicas=3, interval_s=0.1), cold_start=START)
    assert same(report, played(never).report)
    scaled = played(fixed).report
    assert same(report, scaled)
    assert scaled.fleet["mean_replicas"] == pytest.approx(3)
    assert scaled.fleet["gpu_hours"] == pytest.approx(3 * report.duration_s / 3600)


@examples
@given(
    router=st.sampled_from(ROUTERS),
    lost=st.sampled_from(LOST),
    policy=st.sampled_from(("vllm", "sglang", "trtllm", "lightllm", "faster_transformer")),
    caching=st.booleans(),
    seed=st.integers(0, 99),
    scaled=st.booleans(),
)
def test_every_request_is_served_rejected_or_failed(played: Play, router, lost, policy, caching, seed, scaled) -> None:
    """And blocks are all free at the end, whatever fails: a replica every 0.15 s, where requests take as long."""
    request = asked(
        router=router,
        scheduler=Scheduler(policy, max_seqs=4, prefix_caching=caching),
        failures=ReplicaFailures(mtbf_h=0.15 / 3600 * 3, repair_s=0.05, requests=lost, seed=seed),
        autoscale=Autoscale("utilisation", target=2.0, max_replicas=5, interval_s=0.1) if scaled else Autoscale(),
        cold_start=ColdStart(seconds=0.05),
    )
    served = played(request)
    report = served.report
    assert report.fleet["failures"] > 0
    assert report.completed + report.rejected + report.failed == report.requests == len(served.requests)
    assert (report.failed > 0) == (lost == "fail" and report.fleet["lost_requests"] > 0)
    assert (served.state.ranks["free"] == served.setup.rules.blocks).all()
    assert not served.state.ranks["outstanding"].any()
    assert not served.state.ranks["prompt_tokens"].any()
    ended = served.requests[served.requests["rank"] >= 0]
    assert (ended["first_token_us"] >= ended["arrival_us"]).all()
    assert (ended["finish_us"] >= ended["first_token_us"]).all()


def one_at_a_time(**given: Any) -> ServingRequest:
    """A request that takes a second: a prompt in 10 ms, then 99 tokens of 10 ms."""
    traffic = RequestTraffic("constant", rate=0.5, requests=1, input=Lengths(mean=1), output=Lengths(mean=100))
    return asked(law=IterationLaw(base_us=10_000.0), traffic=traffic, replicas=1, **given)


@pytest.mark.parametrize("lost", LOST)
def test_what_a_failure_costs_one_request(played: Play, lost: str) -> None:
    """A retry takes the whole second again; who migrates goes on behind its tokens after the time without a replica."""
    failing = ReplicaFailures(mtbf_h=1.0 / 3600, repair_s=0.3, requests=lost, seed=22)
    request = one_at_a_time(failures=failing, cold_start=ColdStart(seconds=0.2))
    served = played(request)
    at_us = first_failure_us(request)
    assert 0.02e6 < at_us < 1e6
    assert first_failure_us(request, 2) > at_us + 0.5e6 + 1e6  # the second comes after all is over
    done_tokens = int(at_us // 10_000)
    (row,) = served.requests
    if lost == "fail":
        assert (served.report.failed, served.report.completed, row["rank"]) == (1, 0, -1)
        assert columns(served.requests, 0.0, 0.0)["rejected_by"].tolist() == ["failure"]
    elif lost == "retry":
        assert row["finish_us"] == pytest.approx(at_us + 0.5e6 + 1e6)
        assert row["first_token_us"] == pytest.approx(at_us + 0.5e6 + 10_000)
    else:
        assert row["finish_us"] == pytest.approx(at_us + 0.5e6 + 10_000 * (100 - done_tokens))
        assert row["first_token_us"] == pytest.approx(10_000)
    assert served.report.fleet["lost_requests"] == 1


def first_failure_us(request: ServingRequest, count: int = 1) -> float:
    """When the first replica fails for the ``count``-th time, by its own random numbers."""
    seed = int(np.random.default_rng(request.failures.seed).integers(1, 2147483646, 1)[0])
    at_us = 0.0
    for _ in range(count):
        seed = seed * 48271 % 2147483647
        at_us -= np.log(seed / 2147483647) * (request.failures.mtbf_h or 0.0) * 3600e6
    return at_us


@examples
@given(fewer=st.integers(1, 3), more=st.integers(1, 3), requests=st.integers(1, 24))
def test_more_replicas_serve_no_fewer_in_the_same_time(played: Play, fewer: int, more: int, requests: int) -> None:
    """All at once, one at a time on each, 100 ms each: the last ends after ceil(requests / replicas) of them."""
    traffic = RequestTraffic(
        "closed", concurrency=requests, requests=requests, input=Lengths(mean=1), output=Lengths(mean=10)
    )
    usual = asked(law=IterationLaw(base_us=10_000.0), traffic=traffic, scheduler=Scheduler(max_seqs=1))
    for replicas in (fewer, fewer + more):
        fixed = Autoscale("queue", target=1e9, min_replicas=replicas, interval_s=0.05)
        served = played(replace(usual, replicas=replicas, autoscale=fixed, cold_start=START))
        assert served.report.duration_s == pytest.approx(0.1 * ceil(requests / replicas))


def test_replicas_start_after_their_cold_start_and_drain_before_they_stop(played: Play) -> None:
    """Ten requests at once, then one late: looks at 1 s see 10 waiting and running, and start one for each pair."""
    traffic = RequestTraffic("constant", rate=5.0, requests=40, input=Lengths(mean=1), output=Lengths(mean=100))
    scale = Autoscale("utilisation", target=2.0, max_replicas=4, interval_s=1.0, down_window_s=0.0)
    request = asked(
        law=IterationLaw(base_us=10_000.0), traffic=traffic, replicas=1, router="least_outstanding", autoscale=scale,
        cold_start=ColdStart(seconds=1.5),
    )  # fmt: skip
    served = played(request)
    rows = served.report.fleet_over_time
    begun = next(row for row in rows if row["starting"] > 0 or row["desired"] > 1)
    ready = next(row for row in rows if row["ready"] > 1)
    assert ready["s"] - begun["s"] == pytest.approx(2.0)  # 1.5 s, seen at the next look
    assert any(row["draining"] for row in rows) or rows[-1]["ready"] > 1
    assert served.report.completed == 40
    assert 1 < served.report.fleet["mean_replicas"] < 4


SEEN = FleetSignals(60.0, 15.0, 4, 4, 0, 8.0, 0.5, 0.9, 20, 150, 1000.0, 100.0, 0.0)


@pytest.mark.parametrize(
    ("change", "target", "wish"),
    [
        ({}, 8.0, 4),
        ({"requests": 8.7}, 8.0, 4),  # within the tolerance
        ({"requests": 9.0}, 8.0, 5),
        ({"requests": 3.0}, 8.0, 2),
        ({"requests": 16.0, "replicas": 6, "starting": 2}, 8.0, 8),
        ({"requests": 12.0, "replicas": 6, "starting": 2}, 8.0, 6),  # those that start are enough
        ({"requests": 10.0, "replicas": 6, "starting": 2}, 8.0, 6),
    ],
)
def test_kubernetes_formula(change: dict[str, float], target: float, wish: int) -> None:
    assert by_utilisation(replace(SEEN, **change), Autoscale("utilisation", target=target)) == wish


@pytest.mark.parametrize(("waiting", "wish"), [(20, 4), (21, 4), (23, 5), (40, 8), (0, 0)])
def test_the_depth_of_queues(waiting: int, wish: int) -> None:
    assert by_queue(replace(SEEN, waiting=waiting), Autoscale("queue", target=5.0)) == wish


def test_windows_and_steps(played: Play) -> None:
    request = asked(autoscale=Autoscale("queue", target=1.0, max_replicas=50, down_window_s=30.0), cold_start=START)
    served = played(request)
    scaler = Autoscaler(request, served.setup, served.replica)
    wishes = [(3, 20), (7, 20), (14, 20), (20, 1), (20, 2), (20, 1), (2, 2)]
    steps = [
        scaler.steadied(replace(SEEN, time_s=15.0 * at, replicas=now), wish) for at, (now, wish) in enumerate(wishes)
    ]
    assert steps == [7, 14, 20, 20, 2, 2, 2]  # four more, twice as many; 20 of the look 15 s ago; then the most of two


def test_the_planner_finds_the_largest_batch_within_its_targets() -> None:
    """Iterations of 10 ms + 1 ms a sequence keep 50 ms between tokens up to 40 of them, which end 40 / (100 x 50 ms)
    requests a second; twice as many KV blocks as 20 sequences need leave it at 20."""
    law = IterationLaw(base_us=10_000.0, decode_us=1_000.0)
    replica = by_hand(law, 100_000, 16, 0.0)
    wide = rules(Scheduler(max_seqs=256, max_tokens=8192), replica)
    assert largest_rate(1000.0, 100.0, 0.0, wide, replica, (1e9, 50.0)) == pytest.approx(40 / (100 * 0.05))
    narrow = wide._replace(blocks=20 * 1050 // 16 + 1)
    assert largest_rate(1000.0, 100.0, 0.0, narrow, replica, (1e9, 50.0)) == pytest.approx(20 / (100 * 0.03))
    assert largest_rate(1000.0, 100.0, 0.0, wide, replica, (1e9, 5.0)) == pytest.approx(1 / (100 * 0.011))


def test_a_day_has_its_mean_and_is_quiet_at_first() -> None:
    times = daily(np.arange(1, 100_001) * 0.01, 0.8, 1000.0)
    assert times[-1] == pytest.approx(1000.0)
    counts, _ = np.histogram(times, 10, (0.0, 1000.0))
    assert counts[0] < 0.3 * 10_000 < 1.7 * 10_000 < counts[4]
    np.testing.assert_allclose(counts, counts[::-1], atol=2)


def test_replicas_of_two_kinds_add_up_and_the_faster_serves_more(played: Play) -> None:
    slow = by_hand(IterationLaw(base_us=40_000.0, prefill_token_us=200.0), 30, 16, 0.0)
    request = asked(
        router="least_outstanding",
        second_kind=SecondKind(replicas=2, law=IterationLaw(base_us=40_000.0), kv=KvMemory(30, 16), max_seqs=2),
    )
    served = played(request, slow)
    kinds = served.report.kinds
    assert kinds["first"]["completed"] + kinds["second"]["completed"] == served.report.completed == 40
    tokens = sum(kind["output_tokens"] for kind in kinds.values())
    assert tokens == served.requests["output_tokens"].sum()
    assert kinds["first"]["completed"] / 3 > kinds["second"]["completed"] / 2 > 0
    assert (kinds["first"]["kv_tokens"], kinds["second"]["kv_tokens"]) == (960, 480)


@pytest.mark.parametrize("router", ROUTERS)
def test_two_kinds_that_are_alike_are_one(played: Play, router: str) -> None:
    usual = asked(router=router, replicas=4)
    other = replace(usual, replicas=3, second_kind=SecondKind(replicas=1))
    assert same(played(usual).report, played(other).report)


def test_a_request_too_long_for_one_kind_goes_to_the_other(played: Play) -> None:
    """Seven blocks do not fit into the second kind's five: none of them is rejected, and none goes there."""
    traffic = RequestTraffic(rate=60.0, requests=20, input=Lengths(mean=100), output=Lengths(mean=5))
    small = by_hand(LAW, 5, 16, 0.0)
    request = asked(traffic=traffic, second_kind=SecondKind(replicas=3, law=LAW, kv=KvMemory(5, 16)))
    served = played(request, small)
    assert served.report.completed == 20
    assert (served.requests["rank"] < 3).all()
    too_long = replace(traffic, input=Lengths(mean=2000))
    rejected = played(replace(request, traffic=too_long), small).report
    assert rejected.rejected == 20
    assert rejected.rejections["kv_memory"]["most_tokens"] == 60 * 16


def test_scorers_weigh_queues_memory_and_prefixes(played: Play) -> None:
    """By prefixes alone those of one content stay together where they once were; by queues alone they are spread."""
    traffic = RequestTraffic(
        "constant", rate=2.0, requests=40, prefixes=2, prefix_tokens=64, input=Lengths(mean=80), output=Lengths(mean=2)
    )
    usual = asked(traffic=traffic, router="scorers", scheduler=Scheduler(prefix_caching=True), kv=KvMemory(200, 16))
    sticky = played(replace(usual, scorers=ScorerWeights(0.0, 0.0, 1.0)))
    spread = played(replace(usual, scorers=ScorerWeights(1.0, 0.0, 0.0)))
    assert sticky.report.prefix_hit_share > spread.report.prefix_hit_share > 0
    assert len(set(sticky.requests["rank"].tolist())) <= 2
    assert len(set(spread.requests["rank"].tolist())) == 3


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"autoscale": Autoscale("queue", target=1.0)}, "cold_start.seconds=90"),
        (
            {"autoscale": Autoscale("queue", target=1.0, max_replicas=2), "cold_start": START},
            "replicas=3, those at first",
        ),
        ({"failures": ReplicaFailures(mtbf_h=1.0)}, "cold_start.seconds=90"),
    ],
)
def test_fleets_that_cannot_be(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        asked(**given_)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Autoscale("utilisation"), "needs a target"),
        (lambda: Autoscale("hpa"), "autoscale.policy"),
        (lambda: Autoscale("queue", target=0.0), "must be more than 0"),
        (lambda: Autoscale(max_replicas=1, min_replicas=2), "at least autoscale.min_replicas=2"),
        (lambda: ColdStart(seconds=1.0, store_gbps=1.0), "say the same"),
        (lambda: ReplicaFailures(mtbf_h=0.0), "none fails"),
        (lambda: ReplicaFailures(requests="drop"), "failures.requests"),
        (lambda: ScorerWeights(0.0, 0.0, 0.0), "every weight is 0"),
    ],
)
def test_settings_that_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        make()
