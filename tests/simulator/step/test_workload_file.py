"""Workloads of SimAI: steps by hand, parts that add up, a step that is written and run again stays itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import bus_factor
from opcast.simulator.engines import build_engine
from opcast.simulator.formats.simai import (
    FormatError,
    LayerPhase,
    SimaiWorkload,
    WorkloadLayer,
    read_workload,
    write_workload,
)
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work as Asked
from opcast.simulator.report.simai import workload as written
from opcast.simulator.report.workload_file import FileReport
from opcast.simulator.simulate import simulate, simulate_workload
from opcast.simulator.step.workload_file import plan_of

H100 = load_device("h100_sxm")
CLUSTER = replace(load_cluster("dgx_h100"), nodes=4)
ENGINE = build_engine(H100, [], [], cluster=CLUSTER)
BUSBW = {"TP": {"all_reduce": 100.0}, "DP": {"all_reduce": 10.0}, "EP": {"all_to_all": 50.0}, "PP": {"busbw": 40.0}}
DEGREES = {"tp": 8, "ep": 1, "pp": 1, "vpp": 1, "ga": 1, "gpus": 32}
QUIET = LayerPhase(0)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}


def run(
    layers: list[WorkloadLayer], busbw: Any = BUSBW, pp_bytes: int = 0, lists: Any = None, **degrees: int
) -> FileReport:
    made = SimaiWorkload({**DEGREES, **degrees}, layers, pp_bytes, lists=lists or {})
    return simulate_workload(made, plan_of(made, CLUSTER), ENGINE, busbw=busbw)


def tp_us(size: int) -> float:
    return size * float(bus_factor("all_reduce", 8)) / 100e3


def test_forward_communication_is_waited_for() -> None:
    found = run([WorkloadLayer("a", LayerPhase(5000, "all_reduce", 10**6), LayerPhase(7000), LayerPhase(2000))])
    assert found.step_time_s == pytest.approx((5 + 7 + 2 + tp_us(10**6)) * 1e-6)
    assert found.breakdown["by_parallelism"] == {"tp": pytest.approx(tp_us(10**6) * 1e-6)}
    assert (found.low_s, found.high_s) == (found.step_time_s, found.step_time_s)
    assert found.provenance == {"busbw": 1.0}


def test_the_weight_gradients_compute_runs_beside_the_input_gradients_communication() -> None:
    both = run([WorkloadLayer("a", QUIET, LayerPhase(1000, "all_reduce", 10**6), LayerPhase(4000))])
    assert both.step_time_s == pytest.approx((1 + max(4, tp_us(10**6))) * 1e-6)
    short = run([WorkloadLayer("a", QUIET, LayerPhase(1000, "all_reduce", 10**4), LayerPhase(4000))])
    assert short.step_time_s == pytest.approx(5e-6)
    assert short.breakdown["exposed_comm_s"] == 0.0


def test_gradients_are_reduced_beside_the_backward_pass_and_one_after_the_other() -> None:
    last = WorkloadLayer("last", QUIET, QUIET, LayerPhase(1000, "all_reduce", 10**6))
    first = WorkloadLayer("first", QUIET, LayerPhase(50_000), LayerPhase(0, "all_reduce", 10**6))
    each = 10**6 * float(bus_factor("all_reduce", 4)) / 10e3
    found = run([first, last])
    assert found.step_time_s == pytest.approx((1 + each + each) * 1e-6)
    assert found.breakdown["compute_s"] == pytest.approx(51e-6)
    assert found.breakdown["by_parallelism"]["dp"] == pytest.approx((1 + 2 * each - 51) * 1e-6)


def test_stages_wait_and_send() -> None:
    layers = [WorkloadLayer("a", LayerPhase(60_000), LayerPhase(60_000), QUIET)]
    found = run(layers, pp_bytes=400_000, pp=2, ga=4, tp=4)
    assert found.breakdown["bubble_s"] == pytest.approx(120e-6 / 4)
    assert found.breakdown["by_parallelism"]["pp"] == pytest.approx(2 * 4 * 10e-6)
    assert found.step_time_s == pytest.approx((120 + 30 + 80) * 1e-6)


def test_checkpointed_lines_run_forward_again() -> None:
    layers = [WorkloadLayer(str(i), LayerPhase(1000), LayerPhase(1000), QUIET) for i in range(4)]
    again = run(layers, lists={"checkpoints": (0,), "checkpoint_initiates": (3,)})
    assert again.step_time_s - run(layers).step_time_s == pytest.approx(3e-6)


busy = st.tuples(st.integers(0, 10**6), st.sampled_from(["all_reduce", "all_gather"]), st.integers(0, 2**28))
works = st.one_of(busy.map(lambda each: LayerPhase(*each)), st.integers(0, 10**6).map(LayerPhase))
rows = st.lists(st.tuples(works, works, works).map(lambda each: WorkloadLayer("x", *each)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=30)
@given(rows, st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 8))
def test_parts_add_up_to_the_step(layers: list[WorkloadLayer], tp: int, pp: int, ga: int) -> None:
    found = run(layers, {}, 2**20, tp=tp, pp=pp, ga=ga)
    parts = found.breakdown
    assert parts["compute_s"] + parts["exposed_comm_s"] + parts["bubble_s"] == pytest.approx(found.step_time_s)
    computed = sum(getattr(each, phase).compute_ns for each in layers for phase in each._fields[1:4])
    assert parts["compute_s"] == pytest.approx(computed * 1e-9)
    assert found.low_s <= found.step_time_s + 1e-12
    assert found.high_s >= found.step_time_s - 1e-12


def test_a_workload_for_other_gpus_is_refused() -> None:
    made = SimaiWorkload({**DEGREES, "gpus": 64}, [])
    with pytest.raises(FormatError, match=r"for 64 GPUs, dgx_h100 has 32; take cluster\.nodes=8"):
        plan_of(made, CLUSTER)
    with pytest.raises(FormatError, match="do not divide"):
        plan_of(SimaiWorkload({**DEGREES, "tp": 5}, []), CLUSTER)


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tp=4, pp=2, zero_stage=1, sequence_parallel=True),
        Parallel(tp=1, zero_stage=1),
        Parallel(tp=8, pp=4),
    ],
)
def test_a_step_that_is_written_and_run_again_takes_as_long(parallel: Parallel, tmp_path: Path) -> None:
    plan = Plan(parallel, CLUSTER, load_stack("megatron"))
    report = simulate(LLAMA, Asked(seq_len=2048, global_batch=64), plan, H100, ENGINE, tmp_path)
    text = write_workload(written(report.state.steps[0]))
    made = read_workload(text)
    assert made.degrees["ga"] == report.parallel["micro_batches"]
    again = simulate_workload(made, plan_of(made, CLUSTER), ENGINE)
    assert again.step_time_s == pytest.approx(report.step_time_s, rel=0.06)


def test_what_simai_has_no_word_for_is_refused(tmp_path: Path) -> None:
    plan = Plan(Parallel(cp=2), CLUSTER, load_stack("megatron"))
    report = simulate(LLAMA, Asked(seq_len=2048, global_batch=32), plan, H100, ENGINE, tmp_path)
    with pytest.raises(FormatError, match=r"parallel\.cp=2 cannot be written"):
        written(report.state.steps[0])
