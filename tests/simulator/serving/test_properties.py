"""What must hold of any traffic: nothing that is faster makes anybody wait longer, and who comes first is served first.

With requests that come one by one a faster machine may still serve a single request later, because other batches form.
With all of them there from the start batches do not depend on time, and then nobody may be later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.serving import (
    POLICIES,
    DecodePool,
    IterationLaw,
    KvMemory,
    Scheduler,
    ServingRequest,
)
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.host import HostTime
from opcast.simulator.serving.iteration import iteration_us
from opcast.simulator.serving.replica import ServedReplica, by_hand
from opcast.simulator.serving.serve import Keeping, serve
from opcast.simulator.serving.surrogate import random_batches, surrogate
from opcast.simulator.serving.tabulate import Extent
from opcast.simulator.workbench import Workbench

LAW = IterationLaw(5000.0, 20.0, 0.02, 60.0, 0.001, 0.01, 3.0)
AT_ONCE = RequestTraffic(
    arrival="closed",
    concurrency=20,
    requests=20,
    input=Lengths("uniform", low=1, high=300),
    output=Lengths("uniform", low=1, high=40),
)
BETWEEN = 0.005  # what a table may be off between its points
TIMES = ("admitted_us", "first_token_us", "finish_us")
Play = Callable[..., Any]


def no_later(faster: np.ndarray, slower: np.ndarray) -> bool:
    """Whether every request is admitted, begun and ended no later."""
    return all((faster[name] <= slower[name] * (1 + 1e-9) + 1e-6).all() for name in TIMES)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(POLICIES),
    term=st.sampled_from(sorted(vars(LAW))),
    share=st.floats(0.0, 1.0),
    blocks=st.integers(30, 200),
    swap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_iterations_that_take_less_make_nobody_later(played: Play, policy, term, share, blocks, swap, seed) -> None:
    scheduler = Scheduler(policy, chunk=200, max_seqs=8, preemption="swap" if swap else "recompute")
    slow = ServingRequest(
        law=LAW, kv=KvMemory(blocks, 16, 131072.0), scheduler=scheduler, traffic=replace(AT_ONCE, seed=seed)
    )
    fast = replace(slow, law=replace(LAW, **{term: share * getattr(LAW, term)}))
    assert no_later(played(fast).requests, played(slow).requests)


@pytest.mark.slow
def test_twice_the_bandwidth_makes_no_batch_and_nobody_slower(small_model: Any, tmp_path: Any) -> None:
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical"), calibration="none"))
    h100, extent = load_device("h100_sxm"), Extent(sequences=16, tokens=256, context=1024)
    step = SimulateRequest(
        model=small_model(
            "llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, max_position_embeddings=4096
        ),
        cluster=replace(load_cluster("dgx_h100"), devices_per_node=1),
        device=h100,
        stack=load_stack("vllm"),
        sources=bench.sources,
    )
    twice = replace(
        step, device=replace(h100, id="h100_twice", memory_gbps=2 * h100.memory_gbps, l2_gbps=2 * h100.l2_gbps)
    )
    slow, fast = (surrogate(each, bench, extent).tables for each in (step, twice))
    for work in random_batches(extent, 30):
        batch = work.iteration
        numbers = (
            *(batch.decoding, batch.decode_context, batch.prefill_tokens, batch.prefill_pairs, batch.prefill_context),
            batch.decoding + len(work.prompts),
        )
        assert iteration_us(fast, *numbers) <= (1 + BETWEEN) * iteration_us(slow, *numbers)
    served = [rows(tables) for tables in (fast, slow)]
    assert no_later(*served)
    assert served[0]["finish_us"].max() < 0.8 * served[1]["finish_us"].max()


def rows(tables: Any) -> np.ndarray:
    """What becomes of requests that come at once, under iterations of these tables."""
    replica: ServedReplica = replace(by_hand(LAW, 200, 16, 1e5), tables=tables, host=HostTime())
    request = ServingRequest(law=LAW, kv=KvMemory(200, 16, 1e5), traffic=AT_ONCE, scheduler=Scheduler(max_tokens=256))
    found: np.ndarray = serve(request, replica, None, Keeping(requests=True)).requests
    return found


def test_a_pool_that_decodes_on_chips_of_its_own(small_model: Any, tmp_path: Any) -> None:
    """Chips that are called otherwise but are the same say the same to the last bit; more bandwidth decodes faster."""
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical"), calibration="none"))
    h100 = load_device("h100_sxm")
    step = SimulateRequest(
        model=small_model("llama", hidden_size=2048, intermediate_size=8192, max_position_embeddings=2048),
        cluster=load_cluster("dgx_h100"),
        device=h100,
        stack=load_stack("vllm"),
        sources=bench.sources,
    )
    traffic = RequestTraffic(rate=20.0, requests=30, input=Lengths(mean=300), output=Lengths(mean=20))
    request = ServingRequest(step=step, traffic=traffic, decode_pool=DecodePool(1), intervals=False)
    wider = replace(h100, id="h100_wider", memory_gbps=1.4 * h100.memory_gbps, l2_gbps=1.4 * h100.l2_gbps)
    alike, same, faster = (
        bench.serving(replace(request, decode_pool=replace(request.decode_pool, step=decode))).report
        for decode in (None, step, replace(step, device=wider))
    )
    assert replace(same, wall_time_s=0.0) == replace(alike, wall_time_s=0.0)
    assert faster.tpot_ms.mean < same.tpot_ms.mean
    prefills = [{k: v for k, v in each.pools["prefill"].items() if k != "utilisation"} for each in (faster, same)]
    assert prefills[0] == prefills[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_forever_while_others_keep_coming(played: Play, policy: str) -> None:
    """One long request among short ones that come as fast as they are served: it ends long before they do."""
    lengths = {"input": Lengths("empirical", values=(20,) * 39 + (900,)), "output": Lengths(mean=8)}
    traffic = RequestTraffic(arrival="closed", concurrency=12, requests=150, seed=3, **lengths)
    scheduler = Scheduler(policy, max_seqs=8, max_tokens=1000, chunk=256)
    found = played(ServingRequest(law=LAW, kv=KvMemory(80, 16), traffic=traffic, scheduler=scheduler)).requests
    long = found[found["input_tokens"] == 900]
    assert len(long)
    assert (long["admitted_us"] - long["arrival_us"] < 0.1 * found["finish_us"].max()).all()
