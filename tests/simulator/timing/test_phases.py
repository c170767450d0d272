"""Phases of a chunk: what runs in each, what may be put off, what pairs hide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, make_op
from opcast.simulator.engines import build_engine
from opcast.simulator.graph import Node
from opcast.simulator.passes.quantize import quantize
from opcast.simulator.question.calibration import StepCalibration, calibrated, load_calibration, run_kind
from opcast.simulator.question.plan import Parallel, Plan, Stack, load_stack
from opcast.simulator.timing.costs import cost_graphs, scale_of
from opcast.simulator.timing.phases import PhaseTime, PhaseTimes, gap_of, lead_of, pair_phases, select_nodes, time_phase
from opcast.simulator.trace import Workload, trace

DEVICE = load_device("h100_sxm")
PLAN = Plan(Parallel(), load_cluster("dgx_h100"), replace(load_stack("torch"), gap_us=0.0))
WIDE = {"hidden_size": 2048, "intermediate_size": 8192}
TIMES = st.builds(
    lambda compute, tp, ep: PhaseTime(compute + tp + ep, compute, {"tp": tp, "ep": ep}),
    *(st.floats(0, 1000) for _ in range(3)),
)


@pytest.fixture(scope="module")
def costs(small_model):
    graph = trace(small_model("llama"), Workload("train", batch=2, seq_len=32, attention="fused"))
    return cost_graphs([graph], DEVICE, build_engine(DEVICE, [], []))[0]


def test_every_node_is_in_one_phase(costs) -> None:
    chosen = [set(select_nodes(costs, phase).tolist()) for phase in ("forward", "backward", "optimizer")]
    assert set.union(*chosen) == set(range(len(costs.nodes)))
    assert sum(map(len, chosen)) == len(costs.nodes)


def test_half_of_the_backward_products_make_gradients_of_weights(costs) -> None:
    times = PhaseTimes(costs, PLAN, DEVICE)
    assert 0 < times["weight"].total_us < times["backward"].total_us
    products = [i for i in select_nodes(costs, "backward") if costs.nodes[i].op and costs.nodes[i].op.kind == "gemm"]
    us = float((costs.kernel_us[products] * costs.repeats[products]).sum())
    assert times["weight"].total_us == pytest.approx(us / 2, rel=0.15)


def test_launches_that_are_not_hidden_count_as_host_time(costs) -> None:
    eager = PhaseTimes(costs, PLAN, DEVICE)["forward"]
    graphed = PhaseTimes(costs, replace(PLAN, stack=replace(PLAN.stack, cuda_graph=True)), DEVICE)["forward"]
    assert eager.host_us > 0
    assert graphed.host_us == pytest.approx(0, abs=1e-6)
    assert graphed.total_us == pytest.approx(eager.total_us - eager.host_us)


def test_gaps_slow_the_device_and_not_a_host_that_is_behind(costs) -> None:
    gaps = replace(PLAN, stack=replace(PLAN.stack, gap_us=2.0))
    graphs = replace(gaps, options={"cuda_graph": True})
    count = float(costs.repeats[select_nodes(costs, "forward")].sum())

    def added_us(host_us: float, plan: Plan = gaps) -> float:
        timed = replace(costs, host_us=np.full(len(costs.nodes), host_us))
        return time_phase(timed, "forward", plan, DEVICE).total_us - time_phase(timed, "forward", PLAN, DEVICE).total_us

    assert added_us(0.0) == pytest.approx(2.0 * count)
    assert added_us(1e5) == pytest.approx(2.0)
    assert added_us(0.0, graphs) == pytest.approx(0.0, abs=1e-9)
    assert gap_of(gaps, replace(DEVICE, vendor="cpu")) == 0.0


def test_the_host_keeps_its_lead_from_forward_to_backward_but_in_a_pipeline(costs) -> None:
    """Forward bound by the device, backward by the host: together they take what the longer of both sums does."""
    forward, backward = (select_nodes(costs, phase) for phase in ("forward", "backward"))
    host, kernel = np.ones(len(costs.nodes)), np.ones(len(costs.nodes))
    kernel[forward], host[backward] = 50.0, 200.0
    slow = replace(costs, kernel_us=kernel, host_us=host)
    alone, piped = PhaseTimes(slow, PLAN, DEVICE), PhaseTimes(slow, replace(PLAN, parallel=Parallel(pp=2)), DEVICE)
    lead = lead_of(slow, PLAN, DEVICE)
    issued = float(host[forward] @ costs.repeats[forward])
    assert lead == pytest.approx(alone["forward"].total_us - issued)
    assert piped["backward"].total_us - alone["backward"].total_us == pytest.approx(lead)
    both = float(host @ costs.repeats) - float(host[select_nodes(costs, "optimizer")].sum())
    assert alone["forward"].total_us + alone["backward"].total_us == pytest.approx(both, rel=0.01)
    assert piped["forward"].total_us == alone["forward"].total_us


@settings(deadline=None)
@given(TIMES, TIMES, st.floats(0, 0.5))
def test_a_pair_takes_no_longer_than_its_parts_and_no_less_than_their_compute(forward, backward, slowdown) -> None:
    stack = Stack(compute_slowdown=slowdown)
    both = pair_phases(forward, backward, replace(PLAN, stack=stack))
    compute = forward.compute_us + backward.compute_us
    assert compute - 1e-6 <= both.total_us <= forward.total_us + backward.total_us + 1e-6
    assert both.total_us == pytest.approx(both.compute_us + sum(both.exposed_us.values()) + both.host_us)


def test_the_nearest_constant_counts(costs) -> None:
    product = next(node for node in costs.nodes if node.op and node.op.kind == "gemm")
    assert scale_of(product, {"gemm": 1.2, "*": 2.0}) == 1.2
    assert scale_of(product, {"*": 2.0}) == 2.0
    assert scale_of(product, {"attention": 3.0}) == 1.0


def test_constants_of_a_framework_go_before_those_of_the_calibration(costs) -> None:
    known = replace(PLAN, calibrated={"train": StepCalibration({"gemm": 1.2, "rest": 1.5})})
    own = replace(known, stack=replace(known.stack, scale={"h100_sxm": {"gemm": 1.3}}))
    product = next(node for node in costs.nodes if node.op and node.op.kind == "gemm")
    other = next(node for node in costs.nodes if node.op and KINDS[node.op.kind].family == "norm")
    assert scale_of(product, *known.scales("h100_sxm", "train")) == 1.2
    assert scale_of(product, *known.scales("h100_sxm", "decode")) == 1.0
    assert scale_of(product, *own.scales("h100_sxm", "train")) == 1.3
    assert scale_of(product, *own.scales("l40s", "train")) == 1.2
    assert scale_of(other, *own.scales("h100_sxm", "train")) == 1.5
    for all_of_them in ({"*": 2.0}, {"norm": 2.0}):  # names that calibrations do not have
        own = replace(known, stack=replace(known.stack, scale={"h100_sxm": all_of_them}))
        assert scale_of(other, *own.scales("h100_sxm", "train")) == 2.0


def test_a_step_that_quantizes_nothing_is_as_fast_as_one_without(small_model) -> None:
    graph = trace(small_model("llama", layers=2, **WIDE), Workload("train", 1, 512, attention="fused"), "bf16")
    plan = replace(PLAN, stack=load_stack("megatron"))
    nothing = replace(plan, quantization="fp8", options={"quantize_skip": ".*"})
    whole = replace(plan, quantization="fp8")

    def took(plan: Plan) -> float:
        engine, passed = build_engine(DEVICE, [], []), quantize(graph, plan)
        return float(cost_graphs([passed], DEVICE, engine)[0].kernel_us.sum())

    assert took(nothing) == took(plan)
    assert took(whole) < took(plan)


def test_effects_of_a_format_are_of_the_ops_that_have_it() -> None:
    """What a recipe leaves in 16 bits is as slow as without one, under the calibration that ships."""
    known = calibrated(load_calibration("shipped"), run_kind("megatron", DEVICE, "train"))
    plan = replace(PLAN, stack=load_stack("megatron"), calibrated={"train": known})
    nothing = replace(plan, quantization="fp8", options={"quantize_skip": ".*"})
    node = {
        dtype: Node(make_op("gemm", m=64, n=64, k=64, dtype=dtype), "aten.mm", "", "forward", (), (), 0)
        for dtype in ("bf16", "fp16", "fp8")
    }
    factor = {dtype: scale_of(each, *nothing.scales(DEVICE.id, "train")) for dtype, each in node.items()}
    assert factor["bf16"] == scale_of(node["bf16"], *plan.scales(DEVICE.id, "train"))
    assert factor["bf16"] == factor["fp16"] == known.factor("gemm 16bit")
    assert factor["fp8"] == known.factor("gemm fp8") != factor["bf16"]
