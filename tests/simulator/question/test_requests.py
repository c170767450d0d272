"""Requests: what they refuse, that they go through JSON and back, and the hash that they are known by."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.models.power import Limits
from opcast.simulator.network.faults import Drawing, Fault
from opcast.simulator.network.transfers import Transfer
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.network import NetworkChoice
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.question.predictions import PredictRequest
from opcast.simulator.question.requests import (
    CalibrateRequest,
    SimulateRequest,
    ValidateRequest,
    WorkloadFile,
    plan_of,
)
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.stragglers import Straggler
from opcast.simulator.question.work import Work, WorkloadError

DGX = replace(load_cluster("dgx_h100"), nodes=4)
small = st.integers(1, 64)
words = st.text("abcxyz_0", min_size=1, max_size=8)
faults = st.builds(
    Fault,
    where=words,
    bandwidth_factor=st.floats(0.01, 0.9),
    extra_latency_us=st.floats(0, 50),
    retransmission=st.floats(0, 0.5),
)
drawings = st.builds(
    Drawing, samples=small, at_once=small, seed=st.integers(0, 99), like=faults, kinds=st.just(("ib",))
)
networks = st.builds(
    NetworkChoice,
    fidelity=st.sampled_from(["auto", "flow"]),
    faults=st.lists(faults, max_size=2).map(tuple),
    fault_draw=st.none() | drawings,
    faults_study=st.none() | drawings,
)
sources = st.builds(Sources, store=words, backend=st.none() | words, order=st.just(("learned", "analytical")))
predictions = st.builds(
    PredictRequest,
    ops=st.lists(
        st.builds(make_op, st.just("gemm"), m=small, n=small, k=small, dtype=st.sampled_from(["bf16", "fp16"])),
        max_size=3,
    ).map(tuple),
    device=st.sampled_from(["cpu", "h100_sxm", "one_of_mine"]),
    cluster=st.builds(lambda nodes, rate: replace(DGX, nodes=nodes, nic_gbps=rate), small, st.floats(1, 100)),
    cache=st.sampled_from(["warm", "cold"]),
    limits=st.builds(Limits, cap_w=st.none() | st.floats(1, 1000)),
    group=st.none() | st.lists(small, min_size=1, max_size=4).map(tuple),
    network=networks,
    sources=sources,
)
steps = st.builds(
    SimulateRequest,
    model=st.sampled_from(["llama3_8b", {"model_type": "llama", "hidden_size": 64, "rope_scaling": None}]),
    work=st.builds(Work, seq_len=small, global_batch=small, data_loading_ms=st.floats(0, 9)),
    device=st.sampled_from(["h100_sxm", "cpu"]),
    cluster=st.just(DGX),
    parallel=st.builds(Parallel, tp=small, pp=small, stages=st.lists(small, max_size=3).map(tuple)),
    stack=st.none() | st.sampled_from(["megatron", "torch"]).map(load_stack),
    quantization=st.sampled_from(["", "fp8"]),
    offload=st.sampled_from([(), ("optimizer",)]),
    options=st.dictionaries(words, small | st.booleans() | words, max_size=2),
    stragglers=st.lists(st.builds(Straggler, slowdown=st.floats(1, 3), node=small), max_size=2).map(tuple),
    price_per_gpu_hour=st.none() | st.floats(0, 9),
    power_cap_w=st.none() | st.floats(1, 900),
    network=networks,
    sources=sources,
)


alone = st.builds(
    SimulateRequest,
    model=st.just("llama3_8b"),
    device=st.sampled_from(["h100_sxm", "cpu"]),
    work=st.builds(Work, kind=st.sampled_from(["train", "decode"]), batch=small),
    recompute=st.sampled_from(["none", "full"]),
    price_per_gpu_hour=st.none() | st.floats(0, 9),
    power_cap_w=st.none() | st.floats(1, 900),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(predictions | steps | alone)
def test_requests_go_through_json_and_back(request: PredictRequest | SimulateRequest) -> None:
    again = type(request).from_json(request.to_json())
    assert again == request
    assert again.to_json() == request.to_json()
    assert again.key() == request.key()


def test_transfers_files_and_tables_go_through_json_too() -> None:
    moved = (Transfer("all_reduce", (0, 1), 1e6), Transfer("send", (0, 8), 1e3, None, 5.0, (0,)))
    for request in (
        PredictRequest(transfers=moved, names=("a", "b"), cluster=DGX),
        SimulateRequest(file=WorkloadFile("text\nof a file", "mine", vpp=2), cluster=DGX),
        CalibrateRequest(("steps.csv", "more.csv"), 20),
        ValidateRequest("steps.csv", 20, device={"memory_gbps": 2400.0}, stack=load_stack("megatron")),
    ):
        assert type(request).from_json(request.to_json()) == request


def test_the_key_fills_in_defaults_and_ignores_order_and_kind_of_numbers() -> None:
    one = SimulateRequest("llama3_8b", cluster=replace(DGX, nic_gbps=50), work=Work(seq_len=64))
    two = SimulateRequest.from_json(
        json.dumps({"work": {"seq_len": 64, "kind": "train"}, "model": "llama3_8b", "cluster": DGX.to_dict()})
    )
    assert one == two
    assert one.key() == two.key()
    assert one.key() != replace(one, quantization="fp8").key()
    named = SimulateRequest.from_json('{"model": "llama3_8b", "cluster": "dgx_h100", "stack": "megatron"}')
    assert (named.cluster, named.stack) == (load_cluster("dgx_h100"), load_stack("megatron"))
    assert PredictRequest(device="l4").key() == PredictRequest(device=load_device("l4")).key()


def test_the_key_is_the_same_in_another_process() -> None:
    request = PredictRequest((make_op("gemm", m=1, n=2, k=3),), "h100_sxm", network=NetworkChoice())
    code = (
        "from opcast.simulator.question.predictions import PredictRequest as P\n"
        f"print(P.from_json({request.to_json()!r}).key())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == request.key()


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (SimulateRequest, {"model": "llama3_8b", "tensor": 8}, "simulate request has no field 'tensor'"),
        (
            SimulateRequest,
            {"model": "a", "work": {"seq_length": 8}},
            "no field 'seq_length'; did you mean seq_len",
        ),
        (SimulateRequest, {"model": "a", "cluster": "dgx_h10"}, "unknown cluster 'dgx_h10'; did you mean dgx_h100"),
        (SimulateRequest, {"model": "a", "parallel": {"tp": "many"}}, "parallel.tp='many' must be a whole number"),
        (SimulateRequest, {"model": 5}, "model=5 must be a name, a path"),
        (SimulateRequest, {}, "a step needs a model"),
        (SimulateRequest, {"model": "a", "network": {"fault": []}}, "network='fault' is not one of fidelity, faults"),
        (
            SimulateRequest,
            {"model": "a", "parallel": {"tp": 8}},
            "parallel.tp=8 needs a cluster: name one with cluster=",
        ),
        (SimulateRequest, {"model": "a", "cluster": "dgx_h100", "stragglers": [{"slowdown": 2}]}, "stragglers has"),
        (PredictRequest, {"network": "flow"}, "network=flow needs a cluster"),
        (PredictRequest, {"group": [0, 1]}, r"group=\[0, 1\] needs a cluster"),
        (PredictRequest, {"cache": "hot"}, "cache='hot' is not one of warm, cold"),
        (PredictRequest, {"ops": [{"kind": "gem", "m": 1}]}, "unknown op 'gem'; did you mean gemm"),
        (PredictRequest, {"ops": ["gemm"]}, "an op is a mapping with its kind"),
        (PredictRequest, {"limits": {"cap_w": -1}}, "power_cap_w=-1 must be a positive number"),
        (ValidateRequest, {}, "name a table"),
        (ValidateRequest, {"truth": "a.csv", "limit": 0}, "limit=0 must be a whole number of at least 1"),
    ],
)
def test_what_no_request_can_be_is_said_in_one_line(cls: Any, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        cls.from_dict(values)
    assert "\n" not in str(caught.value)
    assert type(caught.value).__module__.startswith("opcast")


def test_what_would_be_ignored_is_refused() -> None:
    plan: dict[str, Any] = {"parallel": Parallel(), "cluster": load_cluster("dgx_h100"), "stack": load_stack("vllm")}
    with pytest.raises(PlanError, match="kv_dtype=int8 disagree"):
        Plan(**plan, kv_dtype="int8", options={"kv_dtype": "fp8"})
    assert Plan(**plan, kv_dtype="fp8", options={"kv_dtype": "fp8"}).kv_dtype == "fp8"
    with pytest.raises(WorkloadError, match="image_px=64 is the size"):
        Work(kind="prefill", image_px=64)


def test_a_function_has_no_json_and_says_so() -> None:
    with pytest.raises(RequestError, match="cannot be written as JSON: name it as module:"):
        SimulateRequest(lambda: None).to_json()
    with pytest.raises(RequestError, match="is no JSON"):
        SimulateRequest.from_json("{")


def test_a_device_alone_is_a_cluster_of_one_with_pytorch() -> None:
    device = load_device("h100_sxm")
    plan = plan_of(SimulateRequest("llama3_8b", device=device, price_per_gpu_hour=2.0), device)
    assert (plan.cluster.devices, plan.stack.id, plan.precision) == (1, "torch", "bf16")
    assert plan.cluster.price_per_device_hour == 2.0
    assert plan_of(SimulateRequest("llama3_8b", cluster=DGX), device).stack.id == "megatron"
    assert plan_of(SimulateRequest("llama3_8b", Work("decode"), cluster=DGX), device).stack.id == "trtllm"
    slow = SimulateRequest("llama3_8b", cluster=DGX, stragglers=(Straggler(1.5, node=3), Straggler(2.0, device=31)))
    assert plan_of(slow, device).slow_devices == {**dict.fromkeys(range(24, 31), 1.5), 31: 2.0}


@pytest.mark.parametrize(
    ("work", "tokens"),
    [
        (Work("train", seq_len=32768), "32,768"),
        (Work("prefill", input_len=1_000_000), "1,000,000"),
        (Work("decode", input_len=8192), "8,193"),
        (Work("generate", input_len=8000, output_len=193), "8,193"),
        (Work("batch", prompts=((8, 9000),)), "9,008"),
    ],
)
def test_sequences_beyond_a_models_context_are_said(work: Work, tokens: str) -> None:
    device = load_device("h100_sxm")
    (note,) = plan_of(SimulateRequest("llama3_8b", work, device=device), device).notes
    assert f"{tokens} tokens are more than the 8,192 of the model's configuration" in note
    assert ("engines refuse" in note) == (work.kind != "train")
    within = replace(work, seq_len=8192, input_len=8000, output_len=192, prompts=work.prompts and ((8, 8184),))
    assert not plan_of(SimulateRequest("llama3_8b", within, device=device), device).notes
