"""Pools that prefill on other GPUs than those that decode: counted, priced, played and started."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.plan import Parallel
from opcast.simulator.question.request_classes import ServingTargets
from opcast.simulator.question.serving import DecodePool, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.search.served.launch import launch_serving
from opcast.simulator.search.served.request import ServedSearchRequest
from opcast.simulator.serving.connect import replicas_of
from opcast.simulator.serving.serve import serve
from opcast.simulator.workbench import Workbench

WIDER = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
SLO = ServingTargets(ttft_ms=4.0, tpot_ms=0.5)
PRICES = {"dgx_h100": 2.0, "dgx_h200": 3.0}
Asking = Callable[..., ServedSearchRequest]


@pytest.fixture(scope="module")
def mixing(serving: Asking) -> Asking:
    """A function: axes and other settings -> prompts on a node of H100 or H200, answers on a node of H200."""

    def make(axes: dict[str, Any], **own: Any) -> ServedSearchRequest:
        return serving({"prefill_cluster": tuple(PRICES), **axes}, cluster="dgx_h200", **{"prices": PRICES, **own})

    return make


def test_unlike_gpus_are_counted_and_priced(mixing: Asking, bench: Workbench) -> None:
    found = bench.search(mixing({}, confirm=0))
    mixed = [row for row in found.rows if row["prefill_cluster"]]
    alike = [row for row in found.rows if row["pools"] == "apart" and not row["prefill_cluster"]]
    assert {row["cluster"] for row in found.rows} == {"dgx_h200"}  # H100 only prefills
    assert {row["prefill_cluster"] for row in mixed} == {"dgx_h100"}
    assert len(mixed) == len(alike) > 0
    for row in mixed:
        first, second = row["prefill_replicas"] * row["prefill_tp"], row["replicas"] * row["tp"]
        assert max(first, second) <= 8
        assert row["devices"] == first + second
        assert row["hourly_cost"] == pytest.approx(2.0 * first + 3.0 * second)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 16)  # idle ones of both nodes, too
    for row in alike:
        assert row["devices"] <= 8
        assert row["hourly_cost"] == pytest.approx(3.0 * row["devices"])
    assert max(row["devices"] for row in mixed) > 8  # each pool has a node of its own


def test_each_pool_is_as_fast_as_its_own_gpus(mixing: Asking, bench: Workbench) -> None:
    fixed = {"tp": 1, "batch": 8, "ratio": "1:1", "pools": "apart"}
    times = {
        (prefill, decode): bench.search(
            mixing({**fixed, "cluster": decode, "prefill_cluster": prefill}, confirm=0, prices={})
        ).best[0]
        for prefill in PRICES
        for decode in PRICES
    }
    for other in PRICES:
        assert times["dgx_h100", other]["decode_ms"] == times["dgx_h200", other]["decode_ms"]
        assert times["dgx_h200", other]["ttft_ms"] < times["dgx_h100", other]["ttft_ms"] * 1.001
        assert times[other, "dgx_h200"]["decode_ms"] < times[other, "dgx_h100"]["decode_ms"]


def test_a_pick_serves_what_the_event_loop_serves_on_these_gpus(mixing: Asking, bench: Workbench) -> None:
    """The same question to ``opcast serving``, whose tables have more points, with as many clients on the host."""
    request = mixing({"tp": 1, "batch": 8, "ratio": "2:3", "prefill_cluster": "dgx_h100", "pools": "apart"}, confirm=1)
    best = bench.search(request).best[0]
    assert (best["prefill_cluster"], best["cluster"]) == ("dgx_h100", "dgx_h200")
    one, degrees = request.step, Parallel(tp=1)
    question = ServingRequest(
        step=replace(one, cluster=load_cluster("dgx_h100"), parallel=degrees),
        replicas=2,
        decode_pool=DecodePool(
            replicas=3, step=replace(one, parallel=degrees), max_seqs=8, link_gbps=50.0, link_us=20.0
        ),
        scheduler=Scheduler(policy="vllm", max_tokens=512, max_seqs=256),
        traffic=RequestTraffic(
            rate=best["confirmed"]["rate"],
            requests=2400,
            warmup=240,
            input=Lengths(mean=256),
            output=Lengths(mean=64),
            seed=0,
        ),
    )
    served = serve(question, *replicas_of(question, bench), clients=best["concurrency"] / 2).report
    assert served.devices == best["devices"] == 5
    assert best["confirmed"]["ttft_ms"] == pytest.approx(served.ttft_ms.mean, rel=0.05)
    assert best["confirmed"]["tpot_ms"] == pytest.approx(served.tpot_ms.mean, rel=0.05)


def test_a_rate_may_be_served_by_two_kinds_of_gpu(mixing: Asking, bench: Workbench) -> None:
    found = bench.search(mixing({}, slo=SLO, confirm=0, rate=5.0, objectives=("hourly_cost",)))
    pairs = {(row["cluster"], row["prefill_cluster"]) for row in found.chips}
    assert pairs == {("dgx_h200", ""), ("dgx_h200", "dgx_h100")}
    assert "on dgx_h100, decode" in next(row["way"] for row in found.chips if row["prefill_cluster"])


@pytest.mark.parametrize("framework", ["vllm", "sglang", "dynamo"])
def test_unlike_pools_are_started_on_nodes_of_their_own(framework: str, mixing: Asking, bench: Workbench) -> None:
    request = mixing({"tp": 1, "batch": 8, "ratio": "2:3", "prefill_cluster": "dgx_h100", "pools": "apart"}, confirm=0)
    best = bench.search(request).best[0]
    text = launch_serving(request, best, framework)
    assert "(dgx_h100 and dgx_h200)" in text
    assert re.findall(r"^(\d)\)\n# (\w+)$", text, re.M) == [("0", "dgx_h100"), ("1", "dgx_h200")]
    for other in ("kubernetes", "llm-d", "dynamo-kubernetes"):
        with pytest.raises(ValueError, match="take framework=dynamo"):
            launch_serving(request, best, other)


def test_two_ways_on_unlike_gpus_are_compared(mixing: Asking, bench: Workbench) -> None:
    one, other = "pools=apart batch=8 prefill_cluster=dgx_h100", "pools=apart batch=8 prefill_cluster=dgx_h200"
    found = bench.compare(mixing({"tp": 1}), one, other)
    assert [(step.settings, step.one, step.other) for step in found.settings] == [("prefill_cluster", "dgx_h100", "")]


def test_what_prefills_needs_pools_apart(mixing: Asking) -> None:
    with pytest.raises(RequestError, match="is of pools apart"):
        mixing({"pools": "together"})
    with pytest.raises(ValueError, match="nosuch"):
        mixing({"prefill_cluster": "nosuch"})
