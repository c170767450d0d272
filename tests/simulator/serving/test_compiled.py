"""What machine code of the event loop is made of, and that it says what Python says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from opcast.simulator.question.adapters import ServedAdapters
from opcast.simulator.question.expert_balance import ExpertBalance
from opcast.simulator.question.fleet import Autoscale, ColdStart, ReplicaFailures
from opcast.simulator.question.image_requests import ImageRequests
from opcast.simulator.question.kv_tiers import KvTiers
from opcast.simulator.question.request_classes import Admission, RequestClass
from opcast.simulator.question.serving import (
    POLICIES,
    DecodePool,
    IterationLaw,
    KvMemory,
    Scheduler,
    SecondKind,
    ServingRequest,
    ServingTargets,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import adapter_costs, compiled, expert_drift, images, loop, serve
from opcast.simulator.serving.replica import by_hand

LAW = IterationLaw(base_us=5000.0, decode_us=20.0, decode_context_us=0.02, prefill_token_us=60.0)
TRAFFIC = RequestTraffic(
    rate=20.0,
    requests=60,
    input=Lengths("uniform", low=1, high=300),
    output=Lengths("uniform", low=1, high=40),
)
USUAL = ServingRequest(law=LAW, kv=KvMemory(60, 16, 131072.0), traffic=TRAFFIC, replicas=2)
SHARED = replace(TRAFFIC, prefixes=3, prefix_tokens=200, turns=2)
CLASSES = (RequestClass("chat", 1.0, 0), RequestClass("batch", 2.0, 1))
CACHED = Scheduler(prefix_caching=True)
EXPERTS = ExpertBalance(drift=40, step_interval=20, window_size=10, ranks=4, experts=16, token_us=9.0)
FEATURES: dict[str, dict[str, Any]] = {
    "priorities": {
        "traffic": replace(TRAFFIC, classes=CLASSES),
        "scheduler": Scheduler(queue="priority", max_seqs=3),
    },
    "admission": {"admission": Admission(max_requests=6, max_queue=3, rate=15.0)},
    "tiers": {"traffic": SHARED, "scheduler": CACHED, "tiers": KvTiers(host_gib=0.2, ssd_gib=0.2, remote_gib=1.0)},
    "a decode pool": {"decode_pool": DecodePool(1, kv=USUAL.kv, link_gbps=10.0, link_us=5.0)},
    "ranks": {"attention_dp": 2, "router": "vllm_dp"},
    "adapters": {"lora": ServedAdapters(9, max_loras=2, adapter_us=50.0, token_us=1.0)},
    "two kinds and scorers": {
        "traffic": SHARED,
        "scheduler": CACHED,
        "second_kind": SecondKind(replicas=1),
        "router": "scorers",
    },
    "an autoscaler": {
        "autoscale": Autoscale("queue", target=1.0, max_replicas=4, interval_s=0.1),
        "cold_start": ColdStart(seconds=0.2),
    },
    "failures": {
        "failures": ReplicaFailures(mtbf_h=1 / 3600, repair_s=0.2),
        "cold_start": ColdStart(seconds=0.2),
        "slo": ServingTargets(ttft_ms=500.0),
    },
    "uneven experts": {
        "eplb": ExpertBalance(drift=40, step_interval=20, window_size=10, ranks=4, experts=16, token_us=9.0)
    },
    "images": {"images": ImageRequests(0.5, encode_ms=3.0, embedding_bytes=8192.0)},
}


def compiled_functions() -> dict[str, Callable[..., Any]]:
    """Functions that are told to numba, by module and name."""
    return {
        f"{module.__name__}.{name}": function
        for module in (*compiled.PARTS, loop)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name not in compiled.PLAIN
    }


def test_all_that_the_loop_calls_is_compiled() -> None:
    known = compiled_functions()
    links = {link for chain in compiled.CHAINS for link in chain}
    seen, waiting = set(), [loop.run]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = [function.__globals__.get(name) for name in function.__code__.co_names]
        for called in filter(inspect.isfunction, (*names, *cells)):
            name = f"{called.__module__}.{called.__name__}"
            assert name in known or called in links, f"{name}, called by {function.__name__}, is not in PARTS"
            waiting.append(called)
    assert len(seen) > 100


def served(request: ServingRequest, machine_code: bool, monkeypatch: pytest.MonkeyPatch) -> serve.ServedTraffic:
    """The traffic of a request, all of it kept, by machine code or in plain Python."""
    replica = by_hand(LAW, request.kv.blocks, 16, request.kv.bytes_per_token)
    if request.lora.exist:
        replica = replace(replica, adapters=adapter_costs.by_hand(request.lora))
    if request.eplb.exist:
        replica = replace(replica, moving_experts=expert_drift.by_hand(request.eplb))
    if request.images.exist:
        replica = replace(replica, encoder=images.costs_of(request.images, None))
    with monkeypatch.context() as patch:
        patch.setattr(serve, "worth_compiling", lambda outputs: machine_code)
        return serve.serve(request, replica, None, serve.Keeping(iterations=2000, requests=True))


@pytest.mark.slow
def test_machine_code_says_what_python_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all policies and features, so that no two processes compile."""
    pytest.importorskip("numba")
    asked = {name: replace(USUAL, **values) for name, values in FEATURES.items()}
    usual = served(USUAL, False, monkeypatch).requests.tobytes()
    for policy, caching in product(POLICIES, (False, True)):
        traffic = replace(TRAFFIC, prefixes=2 * caching, prefix_tokens=64 * caching)
        scheduler = Scheduler(policy, chunk=200, prefix_caching=caching, ignore_eos=not caching)
        asked[f"{policy}, caching {caching}"] = replace(USUAL, scheduler=scheduler, traffic=traffic)
    for name, request in asked.items():
        slow, fast = (served(request, machine_code, monkeypatch) for machine_code in (False, True))
        assert fast.requests.tobytes() == slow.requests.tobytes(), name
        assert name not in FEATURES or slow.requests.tobytes() != usual, f"{name} change nothing here"
        assert fast.iterations.tobytes() == slow.iterations.tobytes(), name
        assert replace(fast.report, wall_time_s=0.0) == replace(slow.report, wall_time_s=0.0), name


def test_plain_python_tells_the_contents_of_many_requests_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of the request after the 1,023rd are numbers of more than 31 bits."""
    traffic = RequestTraffic(rate=1000.0, requests=1200, input=Lengths("fixed", 40), output=Lengths("fixed", 2))
    traffic = replace(traffic, prefixes=1100, prefix_tokens=20)
    report = served(replace(USUAL, traffic=traffic, scheduler=CACHED), False, monkeypatch).report
    assert report.completed == 1200
