"""What holds for every policy, load and memory: nothing is lost, nothing overflows, everybody is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from opcast.simulator.html.serving import page
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.serving import (
    POLICIES,
    ROUTERS,
    DecodePool,
    IterationLaw,
    KvMemory,
    Scheduler,
    ServingRequest,
    ServingTargets,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.requests_table import columns
from opcast.simulator.serving.serve import serve

LAW = IterationLaw(base_us=5000.0, decode_us=20.0, decode_context_us=0.02, prefill_token_us=60.0)
SHORT = RequestTraffic(
    rate=20.0,
    requests=60,
    input=Lengths("uniform", low=1, high=300),
    output=Lengths("uniform", low=1, high=40),
)
USUAL = ServingRequest(law=LAW, kv=KvMemory(200, 16, 131072.0), traffic=SHORT)
Play = Callable[..., Any]
GENERATE = [Phase.explicit, Phase.generate]  # a shrunk case would take minutes
patient = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def checked(served: Any, request: ServingRequest) -> Any:
    """The report, after all that must hold whatever was asked."""
    report, rows, state = served.report, served.requests, served.state
    assert report.completed + report.rejected == report.requests == len(rows)
    done = rows[rows["rank"] >= 0]
    assert state.totals["output_tokens"][0] == done["output_tokens"].sum()
    assert (state.ranks["work"] == 0).all()
    assert (state.ranks["outstanding"] == 0).all()
    assert (state.ranks["waiting"] == 0).all()
    assert (state.ranks["count"] == 0).all()
    blocks = request.kv.blocks or 0
    assert (state.ranks["free"] == blocks).all()
    assert (served.iterations["blocks"] <= blocks).all()
    assert report.kv_peak <= 1
    assert state.totals["free_slots"][0] == len(state.slots)
    times = done["arrival_us"], done["admitted_us"], done["first_token_us"], done["finish_us"]
    for earlier, later in pairwise(times):
        assert (later >= earlier).all()
    if not request.scheduler.prefix_caching and not report.preemptions:
        need = (done["input_tokens"] + done["output_tokens"] - 1).sum()
        assert state.totals["computed_tokens"][0] == need
        assert report.itl_ms.count == need - done["input_tokens"].sum()
    return report


@patient
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(40, 300),
    seed=st.integers(0, 99),
    seqs=st.integers(1, 30),
    tokens=st.integers(300, 900),
    replicas=st.integers(1, 3),
    dp=st.integers(1, 2),
    router=st.sampled_from(ROUTERS),
    caching=st.booleans(),
    swap=st.booleans(),
)
def test_nothing_is_lost_and_everybody_is_served(
    played: Play, policy, blocks, seed, seqs, tokens, replicas, dp, router, caching, swap
) -> None:
    scheduler = Scheduler(
        policy,
        max_tokens=tokens,
        max_seqs=seqs,
        chunk=200,
        prefix_caching=caching,
        preemption="swap" if swap else "recompute",
    )
    traffic = replace(SHORT, seed=seed, prefixes=3 * caching, prefix_tokens=100 * caching)
    kv = KvMemory(blocks, 16, 131072.0)
    request = ServingRequest(
        law=LAW, kv=kv, scheduler=scheduler, traffic=traffic, replicas=replicas, attention_dp=dp, router=router
    )
    checked(played(request), request)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_alone_is_its_prompt_and_its_decodes(played: Play, policy: str) -> None:
    traffic = RequestTraffic(requests=1, input=Lengths(mean=100), output=Lengths(mean=5))
    request = replace(USUAL, traffic=traffic, scheduler=Scheduler(policy, chunk=512))
    row = played(request).requests[0]
    prefill = 5000 + 60 * 100
    decodes = sum(5000 + 20 + 0.02 * (100 + made) for made in range(4))
    assert row["first_token_us"] - row["arrival_us"] == pytest.approx(prefill)
    assert row["finish_us"] - row["first_token_us"] == pytest.approx(decodes)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_static_batch_is_one_prefill_and_decodes(played: Play, policy: str) -> None:
    traffic = RequestTraffic(
        arrival="closed", concurrency=8, requests=8, input=Lengths(mean=50), output=Lengths(mean=4)
    )
    request = replace(USUAL, traffic=traffic, scheduler=Scheduler(policy, chunk=512))
    served = played(request)
    iterations = served.iterations
    assert list(iterations["prefill_tokens"]) == [400, 0, 0, 0]
    assert list(iterations["decodes"]) == [0, 8, 8, 8]
    assert served.report.ttft_ms.mean == pytest.approx((5000 + 60 * 400) / 1e3)


@pytest.mark.parametrize("policy", ["vllm", "vllm_v0", "sarathi", "sglang", "trtllm_max_utilization"])
def test_scarce_memory_preempts_and_still_serves(played: Play, policy: str) -> None:
    scheduler = Scheduler(policy, chunk=200, watermark=0.0, conservativeness=0.0)
    traffic = replace(SHORT, output=Lengths(mean=40))
    request = replace(USUAL, kv=KvMemory(24, 16), scheduler=scheduler, traffic=traffic)
    assert checked(played(request), request).preemptions > 0


def test_a_faster_iteration_serves_no_later(played: Play) -> None:
    slow = played(USUAL).report
    law = IterationLaw(**{name: value / 2 for name, value in vars(LAW).items()})
    fast = played(replace(USUAL, law=law)).report
    assert fast.ttft_ms.mean < slow.ttft_ms.mean
    assert fast.e2e_ms.p99 < slow.e2e_ms.p99
    assert fast.duration_s <= slow.duration_s


def test_requests_longer_than_context_or_memory_are_rejected_and_counted(played: Play) -> None:
    request = replace(USUAL, scheduler=Scheduler(max_model_len=200))
    report = checked(played(request), request)
    assert 0 < report.rejected < report.requests
    limit = {"requests": report.rejected, "most_tokens": 200, "setting": "scheduler.max_model_len"}
    assert report.rejections == {"context": limit}
    assert f"{report.rejected} longer than the context allows (200 tokens, scheduler" in report.notes[0]
    assert report.notes[0] in str(page(report, "t").sections[-1])
    request = replace(USUAL, kv=KvMemory(10, 16))
    served = played(request)
    rows = served.requests
    long = rows["input_tokens"] + rows["output_tokens"] > 160
    assert ((rows["rank"] < 0) == long).all()
    assert (columns(rows, 0.0, 0.0)["rejected_by"] == np.where(long, "kv_memory", "")).all()
    assert served.report.rejections["kv_memory"]["requests"] == long.sum()
    both = replace(USUAL, kv=KvMemory(12, 16), scheduler=Scheduler(policy="vllm_v0", max_model_len=250, max_tokens=200))
    report = checked(played(both), both)
    assert sum(limit["requests"] for limit in report.rejections.values()) == report.rejected
    assert set(report.rejections) == {"context", "iteration", "kv_memory"}


def test_overload_is_said_and_ends(played: Play) -> None:
    traffic = replace(SHORT, rate=2000.0, requests=300)
    report = played(replace(USUAL, traffic=traffic)).report
    assert report.completed == 300
    assert report.overload.startswith("overload: ")
    assert played(replace(USUAL, traffic=replace(SHORT, rate=1.0))).report.overload == ""
    sessions = replace(SHORT, rate=1200.0, requests=300, turns=3)
    assert played(replace(USUAL, traffic=sessions)).report.overload.startswith("overload: ")
    assert played(replace(USUAL, traffic=replace(sessions, rate=1.0))).report.overload == ""


def test_a_shared_prefix_is_computed_once(played: Play) -> None:
    traffic = replace(SHORT, prefixes=1, prefix_tokens=160, input=Lengths(mean=200), rate=5.0)
    request = replace(USUAL, traffic=traffic, scheduler=Scheduler(prefix_caching=True))
    served = played(request)
    assert (served.requests["hit_tokens"][1:] >= 160).all()
    assert served.requests["hit_tokens"][0] == 0
    without = played(replace(request, scheduler=Scheduler())).report
    assert served.report.ttft_ms.mean < without.ttft_ms.mean


def test_turns_of_a_session_find_what_was_said_before(played: Play) -> None:
    traffic = replace(SHORT, turns=4, think_s=0.5, requests=40, rate=4.0, input=Lengths(mean=40))
    request = replace(USUAL, traffic=traffic, kv=KvMemory(2000, 16), scheduler=Scheduler(prefix_caching=True))
    rows = played(request).requests
    assert len(rows) == 40
    assert (rows["hit_tokens"][rows["input_tokens"] > 100] > 30).all()


def test_clients_of_a_closed_loop_send_when_they_have_an_answer(played: Play) -> None:
    traffic = replace(SHORT, arrival="closed", rate=1.0, concurrency=5, requests=50)
    rows = played(replace(USUAL, traffic=traffic)).requests
    events = np.concatenate([rows["arrival_us"], rows["finish_us"]])
    change = np.concatenate([np.ones(50), -np.ones(50)])
    order = np.lexsort((change, events))
    assert np.cumsum(change[order]).max() == 5
    assert sorted(rows["arrival_us"])[5:] == sorted(rows["finish_us"])[:45]


def test_prompts_move_to_replicas_that_decode(played: Play) -> None:
    pool = DecodePool(replicas=1, link_gbps=10.0, link_us=100.0)
    request = replace(USUAL, decode_pool=pool)
    served = played(request, by_hand(LAW, 200, 16, 131072.0))
    report = checked(served, request)
    rows, iterations = served.requests, served.iterations
    several = rows["output_tokens"] > 1
    assert (rows["rank"] == np.where(several, 1, 0)).all()
    assert not iterations["decodes"][iterations["rank"] == 0].any()
    assert not iterations["prefill_tokens"][iterations["rank"] == 1].any()
    moved = rows["moved_us"][several]
    alone = 100 + rows["input_tokens"][several] * 131072.0 / 10e3
    assert (moved >= alone - 1e-6).all()
    assert np.isclose(moved, alone).any()
    assert report.kv_transfer_bytes == rows["input_tokens"][several].sum() * 131072.0
    layered = played(replace(request, decode_pool=replace(pool, layers=32)), by_hand(LAW, 200, 16, 131072.0))
    assert layered.report.kv_transfer_ms.mean < report.kv_transfer_ms.mean


@settings(
    max_examples=10,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(40, 120),
    seed=st.integers(0, 99),
    prefill=st.integers(1, 2),
    decode=st.integers(1, 2),
    link_gbps=st.sampled_from([0.5, 50.0]),
    layers=st.sampled_from([1, 32]),
    caching=st.booleans(),
    swap=st.booleans(),
)
def test_pools_lose_nothing_and_never_hold_more_than_there_is(
    played: Play, policy, blocks, seed, prefill, decode, link_gbps, layers, caching, swap
) -> None:
    scheduler = Scheduler(
        policy, max_tokens=500, chunk=200, prefix_caching=caching, preemption="swap" if swap else "recompute"
    )
    pool = DecodePool(decode, link_gbps=link_gbps, link_us=50.0, layers=layers, max_seqs=8)
    traffic = replace(SHORT, seed=seed, prefixes=3 * caching, prefix_tokens=100 * caching)
    request = ServingRequest(
        law=LAW,
        kv=KvMemory(blocks, 16, 131072.0),
        scheduler=scheduler,
        traffic=traffic,
        replicas=prefill,
        decode_pool=pool,
    )
    served = played(request, by_hand(LAW, blocks, 16, 131072.0))
    rows = served.requests
    assert served.report.completed == len(rows)
    assert (served.state.ranks["free"] == blocks).all()
    for name in ("outstanding", "waiting", "count", "work"):
        assert (served.state.ranks[name] == 0).all(), name
    assert (served.state.ranks["peak"] <= blocks).all()
    moved = rows[rows["output_tokens"] > 1]
    decoded = moved["finish_us"] - moved["prefilled_us"]
    assert (decoded >= moved["moved_us"]).all()
    assert (moved["moved_us"] >= 50 / layers - 1e-6).all()


@pytest.mark.parametrize("policy", ["vllm", "sglang", "trtllm"])
def test_a_cache_that_lands_holds_no_decode_up(played: Play, policy: str) -> None:
    """Where nothing but iterations takes time, each token comes one iteration after another, whoever arrives."""
    law = IterationLaw(base_us=5000.0, decode_us=0.0, decode_context_us=0.0, prefill_token_us=0.0)
    pool = DecodePool(replicas=1, link_gbps=1000.0, link_us=0.0)
    request = replace(USUAL, law=law, decode_pool=pool, scheduler=Scheduler(policy), replicas=2)
    rows = played(request, by_hand(law, 2000, 16, 1.0)).requests
    iterations = (rows["finish_us"] - rows["first_token_us"]) / 5000
    assert (iterations <= rows["output_tokens"] + 1).all()  # it waits for the end of the iteration that runs


def test_a_cache_waits_where_it_is_until_its_decoder_has_room(played: Play) -> None:
    lengths = {"input": Lengths(mean=150), "output": Lengths(mean=9)}
    traffic = RequestTraffic(arrival="closed", concurrency=6, requests=6, **lengths)
    pool = DecodePool(1, link_gbps=1000.0, link_us=1.0)
    request = replace(USUAL, traffic=traffic, decode_pool=pool, kv=KvMemory(200, 16, 1.0))
    roomy = played(request, by_hand(LAW, 200, 16, 1.0)).requests
    tight = played(request, by_hand(LAW, 12, 16, 1.0))
    assert (roomy["moved_us"] < 10).all()
    assert np.count_nonzero(tight.requests["moved_us"] > 20_000) == 5  # one after the other: only one fits
    assert tight.report.preemptions == 0
    assert (tight.state.ranks["free"] == [200, 12]).all()


def test_a_pool_has_ranks_of_its_own_and_sends_first_tokens_when_it_starts(played: Play) -> None:
    pool = DecodePool(1, link_gbps=10.0, link_us=100.0, attention_dp=2, max_seqs=1)
    usual = replace(USUAL, decode_pool=pool, traffic=replace(SHORT, output=Lengths(mean=8)))
    for first_token in ("decode", "prefill"):
        request = replace(usual, decode_pool=replace(pool, first_token=first_token))
        served = played(request, by_hand(LAW, 200, 16, 131072.0))
        rows = checked(served, request) and served.requests
        assert set(rows["rank"]) == {1, 2}
        assert {each["replicas"] for each in served.report.pools.values()} == {1.0}
        came = rows["prefilled_us"] + rows["moved_us"]
        assert (rows["first_token_us"] >= came - 1e-6).all() == (first_token == "decode")
        assert (rows["first_token_us"] == rows["prefilled_us"]).all() == (first_token == "prefill")


def test_ranks_share_the_work_of_experts(played: Play) -> None:
    lengths = {"input": Lengths(mean=100), "output": Lengths(mean=1)}
    traffic = RequestTraffic(arrival="closed", concurrency=1, requests=1, **lengths)
    request = replace(USUAL, attention_dp=2, traffic=traffic)
    replica = by_hand(LAW, 200, 16, 0.0)
    shared = replace(replica, tables=replica.tables._replace(expert_us=np.array([0.0, 40.0])))
    alone, half = (serve(request, each).report.ttft_ms.mean for each in (replica, shared))
    assert alone - half == pytest.approx(100 * 40 / 2 / 1e3)  # one of two ranks has tokens


def test_caches_contend_for_the_link_into_a_rank_too(played: Play) -> None:
    traffic = RequestTraffic(
        arrival="closed", concurrency=4, requests=4, input=Lengths(mean=100), output=Lengths(mean=3)
    )
    pool = DecodePool(1, link_gbps=1.0, link_us=0.0)
    request = replace(USUAL, traffic=traffic, replicas=4, decode_pool=pool, kv=KvMemory(200, 16, 1e5))
    rows = played(request, by_hand(LAW, 200, 16, 1e5)).requests
    assert np.allclose(np.sort(rows["moved_us"]), 1e4 * np.arange(1, 5))  # 10 ms each: four prompts end at once


def test_ranks_in_lockstep_wait_for_the_slowest(played: Play) -> None:
    served = played(replace(USUAL, attention_dp=2))
    pairs = served.iterations.reshape(-1, 2)
    assert (pairs["rank"] == [0, 1]).all()
    assert (pairs["end_us"][:, 0] == pairs["end_us"][:, 1]).all()


def test_goodput_counts_who_met_all_targets(played: Play) -> None:
    served = played(replace(USUAL, slo=ServingTargets(ttft_ms=40.0, tpot_ms=8.0)))
    rows = served.requests
    ttft = (rows["first_token_us"] - rows["arrival_us"]) / 1e3
    tpot = (rows["finish_us"] - rows["first_token_us"]) / 1e3 / np.maximum(rows["output_tokens"] - 1, 1)
    met = (ttft <= 40) & ((tpot <= 8) | (rows["output_tokens"] == 1))
    assert served.report.slo_attainment == pytest.approx(met.mean())
    assert 0 < met.mean() < 1
    assert served.report.ttft_ms.mean == pytest.approx(ttft.mean())
    assert served.report.ttft_ms.p90 == pytest.approx(np.percentile(ttft, 90, method="inverted_cdf"), rel=2e-3)


def test_a_policy_and_a_router_of_ones_own(played: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    request = replace(
        USUAL, replicas=3, scheduler=Scheduler("own_policies:one_at_a_time"), router="own_policies:always_last"
    )
    served = played(request)
    assert (served.requests["rank"] == 2).all()
    assert (served.iterations["decodes"] <= 1).all()
    checked(served, request)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"scheduler": Scheduler("own_policies:fails")}, "scheduler.policy=own_policies:fails failed: KeyError"),
        ({"scheduler": Scheduler("own_policies:idle")}, "own_policies:idle left 60 requests unserved"),
        ({"scheduler": Scheduler("own_policies:idler")}, "own_policies:idler cannot be loaded: .*did you mean idle"),
        ({"router": "own_policies:nowhere", "replicas": 2}, "nowhere returned 2, not a rank from 0 to 1"),
    ],
)
def test_what_functions_of_ones_own_do_wrong_is_one_line(
    played: Play, monkeypatch: pytest.MonkeyPatch, given_: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(RequestError, match=said):
        played(replace(USUAL, **given_))


@pytest.mark.parametrize("policy", ["vllm", "vllm_v0", "sarathi", "orca", "sglang", "trtllm"])
def test_nobody_starves_who_came_first_is_admitted_first(played: Play, policy: str) -> None:
    scheduler = Scheduler(policy, max_seqs=6, chunk=200)
    rows = played(replace(USUAL, scheduler=scheduler, kv=KvMemory(60, 16))).requests
    assert (np.diff(rows["admitted_us"][np.argsort(rows["arrival_us"], kind="stable")]) >= 0).all()


def test_twice_the_bandwidth_between_pools_never_makes_a_cache_later(played: Play) -> None:
    def moved(gbps: float) -> np.ndarray:
        request = replace(USUAL, decode_pool=DecodePool(1, link_gbps=gbps, link_us=0.0))
        return np.asarray(played(request, by_hand(LAW, 200, 16, 131072.0)).requests["moved_us"])

    for gbps in (0.25, 1.0, 4.0):
        assert (moved(2 * gbps) <= moved(gbps) + 1e-6).all()


def test_trtllm_holds_prompts_back_beside_decodes(played: Play) -> None:
    traffic = RequestTraffic(
        arrival="closed",
        concurrency=4,
        requests=24,
        input=Lengths(mean=100),
        output=Lengths("uniform", low=20, high=60),
    )
    trtllm = Scheduler(policy="trtllm")
    usual = replace(USUAL, kv=KvMemory(400, 32), traffic=traffic, scheduler=trtllm)
    waits = replace(usual, scheduler=replace(trtllm, wait_iterations=10, wait_share=1.0))
    few = replace(usual, scheduler=replace(trtllm, wait_iterations=10, wait_share=0.005))
    reports = [checked(played(each), each) for each in (usual, waits, few)]
    alone = reports[0].ttft_ms.p50
    assert reports[1].ttft_ms.p50 > alone + 8 * 5
    assert reports[1].ttft_ms.p99 < alone + 14 * 13
    assert reports[2].ttft_ms.p50 == alone


def test_sglang_looks_for_requests_after_so_many_decodes(played: Play) -> None:
    traffic = RequestTraffic(rate=5.0, requests=12, input=Lengths(mean=20), output=Lengths(mean=200))
    usual = replace(USUAL, kv=KvMemory(6000, 1), traffic=traffic, scheduler=Scheduler("sglang"))
    polls = replace(usual, scheduler=Scheduler("sglang", wait_iterations=10))
    seldom, often = (checked(played(each), each) for each in (polls, usual))
    assert often.ttft_ms.mean + 8 < seldom.ttft_ms.mean
    assert often.ttft_ms.p99 + 15 < seldom.ttft_ms.p99 < often.ttft_ms.p99 + 11 * 5.5


@pytest.mark.parametrize(("balance", "gather", "alike"), [(0, 0, False), (40, 0, True), (40, 3, True)])
def test_prompts_of_ranks_in_lockstep_come_together(played: Play, balance: int, gather: int, alike: bool) -> None:
    lengths = {"input": Lengths(mean=100), "output": Lengths("uniform", low=20, high=60)}
    traffic = RequestTraffic(arrival="closed", concurrency=8, requests=40, **lengths)
    scheduler = Scheduler("trtllm", balance_iterations=balance, gather_iterations=gather)
    request = replace(USUAL, attention_dp=2, router="least_outstanding", traffic=traffic, scheduler=scheduler)
    served = played(request)
    report = checked(served, request)
    pairs = served.iterations.reshape(-1, 2)["prefill_tokens"]
    together, some = (pairs > 0).all(axis=1).sum(), (pairs > 0).any(axis=1).sum()
    assert (together > 0.7 * some) == alike
    waited = report.ttft_ms.mean - played(replace(request, scheduler=Scheduler("trtllm"))).report.ttft_ms.mean
    assert (waited > 5 * (1 + gather)) == alike


@pytest.mark.parametrize("policy", ["vllm", "sglang", "vllm_v0", "trtllm"])
@pytest.mark.parametrize("blocks", [60, 4000])
def test_prompts_that_share_nothing_are_served_as_without_a_cache_or_by_it(
    played: Play, policy: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, scheduler = replace(USUAL.kv, blocks=blocks), Scheduler(policy, prefix_caching=True)
    request = replace(USUAL, kv=kv, scheduler=scheduler, traffic=replace(SHORT, requests=40))
    quick = played(request)
    monkeypatch.setattr("opcast.simulator.serving.serve.alike_without", lambda request: False)
    slow = played(request)
    assert quick.requests.tobytes() == slow.requests.tobytes()
    assert quick.iterations.tobytes() == slow.iterations.tobytes()
    assert bool(len(quick.state.runs)) == bool(quick.report.preemptions)
    assert len(slow.state.runs)


@pytest.mark.parametrize(
    ("scheduler", "blocks", "pool"),
    [
        (
            Scheduler("trtllm", max_seqs=1, prefix_caching=True),
            100,
            2,
        ),  # rows of the block table of caches on their way
        (Scheduler("trtllm_max_utilization", max_seqs=1, preemption="swap", async_scheduling=False), 100, 2),
        (Scheduler("splitwise", max_seqs=3), 82, 0),  # one request alone grows up to the blocks that stay free
        (Scheduler("vllm_v0", max_seqs=3, prefix_caching=True), 82, 0),
    ],
)
def test_scarce_memory_stops_nobody_for_good(played: Play, scheduler: Scheduler, blocks: int, pool: int) -> None:
    for seed in range(5):
        traffic = replace(
            SHORT, arrival="bursty", rate=200.0, requests=20, seed=seed, input=Lengths("uniform", high=200)
        )
        kv = KvMemory(blocks, 3, 131072.0)
        request = replace(USUAL, scheduler=scheduler, traffic=traffic, kv=kv, decode_pool=DecodePool(replicas=pool))
        report = played(request, None if not pool else by_hand(LAW, blocks, 3, 131072.0)).report
        assert report.completed + report.rejected == 20
