"""Low-rank adapters: who waits for a place, what is loaded, what a batch takes longer; laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.adapters import ServedAdapters
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.request_classes import RequestClass
from opcast.simulator.question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.adapter_costs import less_memory, most_in_host, most_loras
from opcast.simulator.serving.kv import KvBudget, KvError

LAW = IterationLaw(base_us=1000.0, prefill_token_us=10.0, decode_us=5.0)
GIB = 2**30
Play = Callable[..., Any]
TRAFFIC = RequestTraffic(
    rate=60.0, requests=25, input=Lengths("uniform", low=1, high=200), output=Lengths("uniform", low=1, high=20)
)


def asked(traffic: RequestTraffic = TRAFFIC, policy: str = "vllm", **lora: Any) -> ServingRequest:
    return ServingRequest(
        law=LAW, kv=KvMemory(200, 16), scheduler=Scheduler(policy), traffic=traffic, lora=ServedAdapters(**lora)
    )


@pytest.fixture
def served(played: Play) -> Play:
    """As ``played``, with the costs of adapters."""
    from opcast.simulator.serving import serve as serving
    from opcast.simulator.serving.adapter_costs import by_hand
    from opcast.simulator.serving.replica import by_hand as replica_by_hand

    def play(request: ServingRequest) -> Any:
        replica = replica_by_hand(LAW, request.kv.blocks, 16, request.kv.bytes_per_token)
        costs = by_hand(request.lora) if request.lora.exist else None
        return serving.serve(request, replace(replica, adapters=costs), None, serving.Keeping(0, True))

    return play


def figures(report: Any) -> dict[str, Any]:
    return {name: value for name, value in report.to_dict().items() if name not in ("wall_time_s", "adapters")}


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), policy=st.sampled_from(["vllm", "sglang", "sarathi", "trtllm"]))
def test_none_rank_0_and_free_ones_change_nothing(served: Play, seed: int, policy: str) -> None:
    traffic = replace(TRAFFIC, seed=seed)
    without = figures(served(asked(traffic, policy)).report)
    for lora in ({"adapters": 9, "rank": 0}, {"adapters": 9, "share": 0.0}, {"adapters": 9, "max_loras": 9}):
        assert figures(served(asked(traffic, policy, **lora)).report) == without


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 99),
    policy=st.sampled_from(["vllm", "sglang", "sarathi", "trtllm", "vllm_v0", "lightllm", "orca"]),
    adapters=st.integers(1, 12),
    most=st.integers(1, 4),
    host=st.integers(4, 12),
    queue=st.sampled_from(["fcfs", "priority"]),
    pools=st.booleans(),
)
def test_everybody_is_served_by_no_more_adapters_than_fit(
    served: Play, seed: int, policy: str, adapters: int, most: int, host: int, queue: str, pools: bool
) -> None:
    lora = {"adapters": adapters, "max_loras": most, "max_cpu_loras": host, "gib": 0.1, "share": 0.8}
    classes = (RequestClass("first"), RequestClass("later", priority=1)) if queue == "priority" else ()
    request = asked(replace(TRAFFIC, seed=seed, classes=classes), policy, **lora, adapter_us=50.0, token_us=1.0)
    request = replace(request, scheduler=replace(request.scheduler, queue=queue))
    if pools:
        request = replace(request, decode_pool=DecodePool(1, kv=request.kv, link_gbps=100.0))
    result = served(request)
    seen = result.report.adapters
    assert result.report.completed == 25
    assert seen["in_batch"] <= min(most, adapters)
    assert seen["loads"] >= seen["loads_from_disk"] >= min(1, seen["asked_for"])
    assert sum(row["requests"] for row in seen["by_adapter"]) == np.count_nonzero(result.requests["adapter"] >= 0)
    places = result.state.adapter_places[:, : min(most, adapters)]
    for rank, on_gpu in enumerate(places):
        named = on_gpu[on_gpu > 0] - 1
        assert len(set(named)) == len(named)
        assert (result.state.adapters[rank, :, 2] > 0).sum() == len(named)


def last_ttft_ms(result: Any) -> float:
    row = result.requests[-1]
    return float(row["first_token_us"] - row["arrival_us"]) / 1e3


def test_a_load_is_bytes_over_bandwidth_and_the_disk_comes_before(served: Play) -> None:
    one = RequestTraffic(requests=1, input=Lengths(mean=100), output=Lengths(mean=1))
    base_ms = last_ttft_ms(served(asked(one)))
    lora = {"adapters": 1, "gib": 10e9 / GIB, "host_gbps": 100.0, "disk_gbps": 5.0}
    result = served(asked(one, **lora))
    assert last_ttft_ms(result) == pytest.approx(base_ms + 100 + 2000)
    assert result.report.adapters["load_ms"] == pytest.approx(2100)


def test_an_iteration_takes_longer_by_its_adapters_and_tokens(served: Play) -> None:
    one = RequestTraffic(requests=1, input=Lengths(mean=100), output=Lengths(mean=1))
    base_ms = last_ttft_ms(served(asked(one)))
    result = served(asked(one, adapters=1, adapter_us=700.0, token_us=3.0))
    assert last_ttft_ms(result) == pytest.approx(base_ms + 0.7 + 0.3)


def test_one_place_serves_one_adapter_after_the_other_and_others_pass(served: Play, tmp_path: Any) -> None:
    """Two adapters at the same time with one place: the second waits for the first; with two both run."""
    both = RequestTraffic(requests=20, rate=1e5, input=Lengths(mean=10), output=Lengths(mean=50))
    one_place = served(asked(both, adapters=2, popularity="uniform", max_loras=1))
    two_places = served(asked(both, adapters=2, popularity="uniform", max_loras=2))
    assert one_place.report.adapters["waited"] > 0
    assert two_places.report.adapters["waited"] == 0
    assert one_place.report.duration_s > 1.5 * two_places.report.duration_s
    assert one_place.report.adapters["in_batch"] == 1.0


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 20), gbps=st.sampled_from([1.0, 10.0, 100.0]))
def test_of_one_request_at_a_time_a_faster_link_is_never_slower(served: Play, seed: int, gbps: float) -> None:
    apart = RequestTraffic(
        rate=0.1, arrival="constant", requests=8, seed=seed, input=Lengths(mean=9), output=Lengths(mean=3)
    )
    lora = {"adapters": 5, "gib": 1.0, "max_cpu_loras": 5}
    slow, fast = (served(asked(apart, **lora, host_gbps=rate, disk_gbps=rate)).requests for rate in (gbps, 2 * gbps))
    assert (fast["first_token_us"] <= slow["first_token_us"]).all()


def test_tokens_of_one_adapter_are_no_prefix_for_another(served: Play) -> None:
    alike = RequestTraffic(
        rate=2.0, requests=60, prefixes=1, prefix_tokens=160, input=Lengths(mean=161), output=Lengths(mean=2)
    )
    request = replace(asked(alike, adapters=1), scheduler=Scheduler(prefix_caching=True))
    one = served(request).report
    many = served(replace(request, lora=ServedAdapters(20, popularity="uniform", max_loras=20))).report
    assert one.prefix_hit_share > 0.9
    assert many.prefix_hit_share < 0.8
    turns = replace(alike, turns=3, input=Lengths(mean=200))
    by_session = served(replace(request, traffic=turns, lora=ServedAdapters(20, max_loras=20))).report
    assert 0.3 < by_session.prefix_hit_share < 1


def test_memory_of_adapters_is_taken_from_keys_and_values() -> None:
    kv = KvBudget(1000, 16, 1e6)
    assert less_memory(kv, 8 * 1.6e7 * 2, "adapters", "lora.max_loras").blocks == 1000 - 16  # blocks of 16 MB
    assert less_memory(kv, 1.0, "adapters", "lora.max_loras").blocks == 999
    assert less_memory(kv, 0.0, "adapters", "lora.max_loras") == kv
    with pytest.raises(KvError, match=r"lora\.max_loras"):
        less_memory(kv, 1.6e10, "adapters", "lora.max_loras")


def test_limits_that_nobody_set_are_those_of_the_engine() -> None:
    lora = ServedAdapters(100)
    assert (most_loras(lora, "vllm"), most_in_host(lora, "vllm")) == (1, 1)
    assert (most_loras(lora, "sglang"), most_in_host(lora, "sglang")) == (8, 100)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"adapters": 5000}, r"lora\.adapters=5,000"),
        ({"popularity": "often"}, r"lora\.popularity=often must be uniform"),
        ({"share": 1.5}, r"lora\.share=1.5"),
        ({"max_loras": 4, "max_cpu_loras": 2}, r"lora\.max_cpu_loras=2 must be at least"),
        ({"disk_gbps": 0}, r"lora\.disk_gbps=0"),
        ({"adapter_us": 5.0}, "give both"),
        ({"modules": "heads"}, r"lora\.modules"),
    ],
)
def test_what_cannot_be_is_one_line(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ServedAdapters(**lora)
