"""The prefix cache below the GPU: what is found there, and how long it takes to load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.kv_tiers import LOADS, KvTiers
from opcast.simulator.question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.state import NONE
from opcast.simulator.serving.tiers import AFTER, COUNT, LAST, NEXT, SHELF

LAW = IterationLaw(base_us=1000.0, prefill_token_us=100.0)
TOKEN = 1e6  # bytes of a token: a GB/s is 1,000 of them a second
GIB = 2**30
Play = Callable[..., Any]


def two_turns(tmp_path: Any, between: int = 1) -> RequestTraffic:
    """A prompt of 1,600 tokens that comes twice, and others of the same size in between, one every ten seconds."""
    path = tmp_path / "turns.csv"
    prefixes = ["a", *(f"other{index}" for index in range(between)), "a"]
    rows = [f"{10 * index},1601,2,{prefix},1600" for index, prefix in enumerate(prefixes)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,prefix_id,prefix_tokens", *rows]))
    return RequestTraffic(trace=str(path))


def asked(traffic: RequestTraffic, **tiers: Any) -> ServingRequest:
    """A GPU whose cache holds one of the prompts."""
    return ServingRequest(
        law=LAW,
        kv=KvMemory(101, 16, TOKEN),
        scheduler=Scheduler(prefix_caching=True, max_tokens=4096),
        traffic=traffic,
        tiers=KvTiers(**tiers),
    )


def last_ttft_ms(result: Any) -> float:
    last = result.requests[-1]
    return float(last["first_token_us"] - last["arrival_us"]) / 1e3


@pytest.mark.parametrize(
    ("tiers", "expected_ms"),
    [
        ({}, 1 + 160.1),  # all of it is computed: 1,601 tokens of 0.1 ms
        ({"load": "async"}, 160.0 + 1 + 0.1),  # 1,600 tokens of 0.1 ms at 10 GB/s, then one token
        ({"load": "blocking"}, 160.0 + 1 + 0.1),
        ({"load": "layers"}, 160.0 + 1.1 / 32),  # one of 32 layers is computed after the last was loaded
        ({"load": "blocking", "host_gbps": 40.0}, 40.0 + 1 + 0.1),
    ],
)
def test_a_prompt_that_the_gpu_forgot_comes_from_host_memory(
    played: Play, tmp_path: Any, tiers: dict[str, Any], expected_ms: float
) -> None:
    host = {"host_gib": 100.0, "host_gbps": 10.0} if tiers else {}
    result = played(asked(two_turns(tmp_path), **host | tiers))
    assert last_ttft_ms(result) == pytest.approx(expected_ms, abs=0.02)
    figures = result.report.kv_tiers
    assert figures.get("host", {}).get("tokens_found", 0) == (1600 if tiers else 0)
    assert result.requests[-1]["hit_tokens"] == (1600 if tiers else 0)


def test_a_cache_that_the_gpu_still_has_is_not_loaded(played: Play, tmp_path: Any) -> None:
    result = played(asked(two_turns(tmp_path, between=0), host_gib=100.0))
    assert result.report.kv_tiers["gpu"]["tokens_found"] == 1600
    assert result.report.kv_tiers["host"]["tokens_found"] == 0


def test_host_memory_forgets_what_was_used_longest_ago(played: Play, tmp_path: Any) -> None:
    """Room for two prompts: with one in between it is there, with two it is not; the drives have it."""
    gib = 2 * 1616 * TOKEN / GIB
    assert played(asked(two_turns(tmp_path, 1), host_gib=gib)).report.kv_tiers["host"]["tokens_found"] == 1600
    lost = played(asked(two_turns(tmp_path, 2), host_gib=gib)).report.kv_tiers["host"]
    assert lost["tokens_found"] == 0
    assert lost["tokens_evicted"] > 0
    below = played(asked(two_turns(tmp_path, 2), host_gib=gib, host_gbps=10.0, ssd_gib=100.0, ssd_gbps=5.0))
    figures = below.report.kv_tiers  # the last two blocks are in host memory still, where the first are not
    assert (figures["ssd"]["tokens_found"], figures["host"]["tokens_found"]) == (1568, 32)
    assert last_ttft_ms(below) == pytest.approx(1568 / 5 + 1.1, abs=0.02)  # the drives are the slower of both links


@pytest.mark.parametrize("load", LOADS)
def test_what_was_loaded_once_moves_to_the_pool_that_decodes(played: Play, tmp_path: Any, load: str) -> None:
    base = asked(two_turns(tmp_path), host_gib=100.0, host_gbps=10.0, load=load)
    result = played(replace(base, decode_pool=DecodePool(1, kv=base.kv, link_gbps=100.0, link_us=0.0)))
    assert result.report.completed == 3
    assert result.report.kv_tiers["host"]["tokens_found"] == 1600
    assert result.report.kv_tiers["host"]["loads"] == 1


def test_a_shared_store_is_found_by_other_replicas(played: Play, tmp_path: Any) -> None:
    base = asked(two_turns(tmp_path, 0), host_gib=100.0)
    own = played(replace(base, replicas=2)).report.kv_tiers
    assert own["host"]["tokens_found"] == 0
    tiers = KvTiers(host_gib=100.0, host_gbps=100.0, remote_gib=100.0, remote_gbps=20.0)
    shared = replace(base, replicas=2, tiers=tiers)
    result = played(shared)
    assert result.report.kv_tiers["remote"]["tokens_found"] == 1600
    assert last_ttft_ms(result) == pytest.approx(80.0 + 0.02 + 1.1, abs=0.02)


def test_two_loads_wait_for_each_other_and_others_run_meanwhile(played: Play, tmp_path: Any) -> None:
    path = tmp_path / "two.csv"
    rows = ["0,1601,2,a,1600", "10,1601,2,b,1600", "20,1601,2,c,1600", "30,1601,2,d,1600"]
    rows += ["40,1601,2,a,1600", "40,1601,2,b,1600", "40.01,17,2,,0"]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,prefix_id,prefix_tokens", *rows]))
    usual = asked(RequestTraffic(trace=str(path)), host_gib=100.0, host_gbps=10.0, load="async")
    request = replace(usual, kv=KvMemory(204, 16, TOKEN))
    times = [(row["first_token_us"] - row["arrival_us"]) / 1e3 for row in played(request).requests[-3:]]
    assert times[0] == pytest.approx(160 + 1.1, abs=0.1)
    assert times[1] == pytest.approx(320 + 1.1, abs=0.1)
    assert times[2] < 10


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(["vllm", "sarathi", "sglang", "trtllm", "vllm_v0", "lightllm", "orca"]),
    load=st.sampled_from(LOADS),
    host=st.sampled_from([0.5, 3.0, 50.0]),
    blocks=st.sampled_from([70, 300]),
    seed=st.integers(0, 99),
    replicas=st.integers(1, 2),
)
def test_everybody_is_served_and_tokens_are_conserved(
    played: Play, policy: str, load: str, host: float, blocks: int, seed: int, replicas: int
) -> None:
    if load == "async" and policy not in ("vllm", "sarathi"):
        load = "layers"
    traffic = RequestTraffic(
        rate=20.0,
        requests=60,
        turns=4,
        think_s=0.5,
        seed=seed,
        input=Lengths("uniform", low=1, high=100),
        output=Lengths("uniform", low=1, high=20),
    )
    request = ServingRequest(
        law=LAW,
        kv=KvMemory(blocks, 16, TOKEN),
        scheduler=Scheduler(policy, prefix_caching=True),
        traffic=traffic,
        replicas=replicas,
        tiers=KvTiers(host_gib=host, ssd_gib=2.0, remote_gib=5.0, load=load),
    )
    result = played(request)
    report, totals = result.report, result.state.totals[0]
    assert report.completed == 60
    below = sum(each["tokens_found"] for name, each in report.kv_tiers.items() if name in ("host", "ssd", "remote"))
    if not report.preemptions:
        needed = int((result.requests["input_tokens"] + result.requests["output_tokens"] - 1).sum())
        assert totals["computed_tokens"] + totals["hit_tokens"] + below == needed
    shelves = result.state.shelves
    assert (shelves["used"] <= shelves["blocks"]).all()
    assert (result.state.ranks["free"] == blocks).all()
    found, count = [], 0
    for shelf, row in enumerate(shelves):  # each place stands once in a bucket and once in a ring
        ring = []
        place = int(result.state.places[shelf, AFTER])
        while place != shelf:
            ring.append(place)
            place = int(result.state.places[place, AFTER])
        spans = [(int(place[LAST] - place[COUNT]) + 1, int(place[LAST])) for place in result.state.places[ring]]
        assert sum(last - first + 1 for first, last in spans) == row["used"]
        assert len({key for first, last in spans for key in range(first, last + 1)}) == row["used"]
        assert (result.state.places[ring, SHELF] == shelf).all()
        count += len(ring)
    for bucket in result.state.shelved:
        place = int(bucket) - 1
        while place != NONE:
            found.append(place)
            place = int(result.state.places[place, NEXT])
    assert len(found) == len(set(found)) == count


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"ssd_gib": 1.0}, "tiers.host_gib"),
        ({"host_gib": 1.0, "load": "later"}, "tiers.load"),
        ({"host_gib": -1.0}, "tiers.host_gib"),
        ({"host_gib": 1.0, "host_gbps": 0.0}, "tiers.host_gbps=0"),
    ],
)
def test_tiers_that_cannot_be(tiers: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        KvTiers(**tiers)


def test_tiers_need_a_prefix_cache_and_bytes(played: Play) -> None:
    values: dict[str, Any] = {"law": LAW, "kv": KvMemory(10), "tiers": KvTiers(host_gib=1.0)}
    with pytest.raises(RequestError, match="prefix_caching=true"):
        ServingRequest(**values)
    with pytest.raises(RequestError, match=r"kv\.bytes_per_token"):
        played(ServingRequest(**values, scheduler=Scheduler(prefix_caching=True), traffic=RequestTraffic(turns=2)))
    wrong = Scheduler("sglang", prefix_caching=True)
    asked_async = {"kv": KvMemory(10, 16, 1.0), "tiers": KvTiers(host_gib=1.0, load="async")}
    with pytest.raises(RequestError, match=r"tiers\.load=async"):
        played(ServingRequest(**values | asked_async, scheduler=wrong, traffic=RequestTraffic(turns=2)))


def test_a_tier_smaller_than_a_block_is_one_line(played: Play) -> None:
    with pytest.raises(RequestError, match=r"tiers\.host_gib=1e-06 holds not one block"):
        played(asked(RequestTraffic(turns=2, requests=4), host_gib=1e-6))


def test_prompts_that_share_nothing_have_tiers_too(played: Play) -> None:
    tiers = played(asked(RequestTraffic(requests=4), host_gib=1.0)).report.kv_tiers
    assert tiers["host"]["tokens_found"] == 0
