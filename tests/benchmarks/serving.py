"""How fast traffic is served: `python tests/benchmarks/serving.py [requests] [replicas]`.

Requests of 1,000 tokens in and 200 out on average, on replicas with the policy vllm, through the compiled loop, in
processor time of one core; beside it the same loop in plain Python on a small part, and Vidur's event loop on its own
2,000 requests in four set-ups (4 to 5 s on one core, recorded with the reference data), whose times opcast finds, too.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from opcast.simulator.question.adapters import ServedAdapters
from opcast.simulator.question.kv_tiers import KvTiers
from opcast.simulator.question.request_classes import Admission, RequestClass
from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.serve import serve

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")
LAW = IterationLaw(base_us=8000, decode_us=20, decode_context_us=0.02, prefill_token_us=40)
VIDUR_LAW = IterationLaw(base_us=5000.0, decode_us=20.02, decode_context_us=0.02, prefill_token_us=60.0)
VIDUR = {  # set-up of the reference data: policy, KV blocks, replicas, seconds of its event loop
    "vllm_1replica": ("vllm_v0", 4000, 1, 4.1),
    "vllm_1replica_tight": ("vllm_v0", 450, 1, 4.1),
    "sarathi_1replica": ("sarathi", 4000, 1, 4.0),
    "vllm_4replicas_lor": ("vllm_v0", 4000, 4, 4.9),
}


def timed(request: ServingRequest) -> tuple[float, float, serving.ServedTraffic]:
    """Seconds of the processor and of the wall."""
    law, kv = request.law, request.kv
    assert law is not None
    began, cpu = time.perf_counter(), time.process_time()
    served = serve(request, by_hand(law, kv.blocks, kv.block_tokens, kv.bytes_per_token))
    return time.process_time() - cpu, time.perf_counter() - began, served


def line(name: str, request: ServingRequest) -> None:
    """Run and print."""
    cpu_s, wall_s, served = timed(request)
    report = served.report
    tokens = report.output_tokens_per_s * report.duration_s
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:34} {cpu_s:8.2f} s CPU {wall_s:8.2f} s wall {report.requests / cpu_s:10,.0f} requests/s "
        f"{report.iterations / cpu_s:10,.0f} iterations/s {1e9 * cpu_s / tokens:6.0f} ns/token {memory:6,.0f} MB peak",
        flush=True,
    )


def beside_vidur(trace: Path) -> None:
    """The same trace through the same schedulers, the best of five runs (the first loads pandas)."""
    for name, (policy, blocks, replicas, theirs_s) in VIDUR.items():
        request = ServingRequest(
            law=VIDUR_LAW,
            kv=KvMemory(blocks, 16),
            scheduler=Scheduler(policy, max_tokens=4096, max_seqs=128, padded=True, watermark=0.01),
            traffic=RequestTraffic(trace=str(trace)),
            replicas=replicas,
            router="least_waiting",
        )
        cpu_s = min(timed(request)[0] for _ in range(5))
        print(f"{name}: {cpu_s:.4f} s CPU, Vidur {theirs_s} s: {theirs_s / cpu_s:.0f} times", flush=True)


def beside_usual(request: ServingRequest) -> None:
    """What priorities, limits of admission, prefix caching and tiers cost: a fifth of the requests, or a tenth, times
    as long as without, the best of three runs of each."""
    fewer = replace(request, traffic=replace(request.traffic, requests=request.traffic.requests // 5))
    classes = (RequestClass("chat", 1, 0), RequestClass("batch", 2, 1))
    shared = replace(fewer.traffic, prefixes=1000, prefix_tokens=400, requests=fewer.traffic.requests // 2)
    cached = replace(fewer, scheduler=replace(fewer.scheduler, prefix_caching=True), traffic=shared)
    cached = replace(cached, kv=replace(cached.kv, bytes_per_token=131072.0))
    caching, later = cached.scheduler, Lengths("uniform", low=100, high=300)
    turns = replace(fewer.traffic, turns=8, think_s=5.0, turn_input=later)
    agents = replace(turns, prefixes=20, prefix_tokens=400)
    ordered = replace(fewer.scheduler, queue="priority")
    pairs = {
        "classes and priorities": (
            fewer,
            replace(fewer, traffic=replace(fewer.traffic, classes=classes), scheduler=ordered),
        ),
        "adapters": (fewer, replace(fewer, lora=ServedAdapters(100, max_loras=8, adapter_us=10.0, token_us=0.1))),
        "limits of admission": (
            fewer,
            replace(fewer, admission=Admission(max_requests=10_000, max_queue=10_000, rate=1e9)),
        ),
        "prompts that share 400 tokens, cached": (
            fewer,
            replace(fewer, scheduler=caching, traffic=replace(fewer.traffic, prefixes=1000, prefix_tokens=400)),
        ),
        "sessions of eight turns, cached": (fewer, replace(fewer, scheduler=caching, traffic=turns)),
        "sessions that share 400 tokens, too": (fewer, replace(fewer, scheduler=caching, traffic=agents)),
        "tiers, beside a prefix cache": (cached, replace(cached, tiers=KvTiers(host_gib=100.0))),
        "three tiers": (cached, replace(cached, tiers=KvTiers(host_gib=100.0, ssd_gib=1000.0, remote_gib=1000.0))),
    }
    for name, (usual, more) in pairs.items():
        usual_s, more_s = (min(timed(each)[0] for _ in range(3)) for each in (usual, more))
        print(f"{name}: {more_s:.2f} s CPU, {usual_s:.2f} s without: {more_s / usual_s:.2f} times", flush=True)


def main() -> None:
    requests, replicas = (int(each) for each in (sys.argv[1:3] + ["1000000", "64"][len(sys.argv) - 1 :]))
    traffic = RequestTraffic(
        rate=7.0 * replicas,
        requests=requests,
        input=Lengths("uniform", low=500, high=1500),
        output=Lengths("uniform", low=100, high=300),
    )
    request = ServingRequest(
        law=LAW, kv=KvMemory(25_000, 16), scheduler=Scheduler(max_seqs=256), traffic=traffic, replicas=replicas
    )
    serving.worth_compiling = lambda outputs: True
    began = time.process_time()
    serve(replace(request, traffic=replace(traffic, requests=10)), by_hand(LAW, 25_000, 16, 0.0))
    print(f"loading or compiling the loop: {time.process_time() - began:.1f} s CPU", flush=True)
    line(f"{requests:,} on {replicas} replicas", request)
    line("the same, least_outstanding", replace(request, router="least_outstanding"))
    beside_usual(request)
    line("a tenth of the requests", replace(request, traffic=replace(traffic, requests=requests // 10)))
    trace = REFERENCE / "truth" / "vidur" / "trace.csv"
    if trace.is_file():
        beside_vidur(trace)
    serving.worth_compiling = lambda outputs: False
    line(
        "plain Python, 1,000 on 1 replica",
        replace(request, replicas=1, traffic=replace(traffic, rate=7.0, requests=1000)),
    )


if __name__ == "__main__":
    main()
