"""Each part of a breakdown is what its name says, against sums over the graph's own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.graph import Node
from opcast.simulator.question.plan import Parallel, Plan
from opcast.simulator.question.stack import Stack
from opcast.simulator.question.work import Work
from opcast.simulator.report.answer import StepReport
from opcast.simulator.simulate import simulate

H100 = load_device("h100_sxm")
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}


def step(folder: Path, devices: int = 1, parallel: dict[str, Any] | None = None, **framework: Any) -> StepReport:
    """Eight sequences on some GPUs of one server, under a framework that overlaps nothing unless told so."""
    cluster = replace(load_cluster("dgx_h100"), devices_per_node=devices, nics_per_node=devices)
    plan = Plan(Parallel(**(parallel or {})), cluster, Stack(**framework))
    work = Work("train", seq_len=256, micro_batch=1, global_batch=8)
    plan = replace(plan, micro_batches=8 // plan.dp)
    report = simulate(MODEL, work, plan, H100, build_engine(H100, [], [], cluster=cluster), folder)
    assert isinstance(report, StepReport)
    return report


def kernels_us(report: StepReport, network: bool, optimizer: bool) -> float:
    """Microseconds of kernels of one step, by whether they communicate and belong to the optimizer."""

    def chosen(node: Node) -> bool:
        talks = node.op is not None and node.op.cost.unit == "network"
        return talks == network and (node.phase == "optimizer") == optimizer

    found = 0.0
    for each in report.state.executions():
        for node, us, repeat in zip(each.costs.nodes, each.costs.kernel_us, each.costs.repeats, strict=True):
            phases = {"backward": ("backward", "recompute")}.get(each.phase, (each.phase,))
            if node.phase in phases and chosen(node):
                found += float(us * repeat) * each.times
    return found


def test_without_hosts_and_overlap_the_parts_are_sums_of_kernels(tmp_path: Path) -> None:
    report = step(tmp_path, devices=4, cuda_graph=True)
    parts = report.breakdown
    assert parts.compute_s == pytest.approx(kernels_us(report, network=False, optimizer=False) * 1e-6)
    assert parts.optimizer_s == pytest.approx(kernels_us(report, network=False, optimizer=True) * 1e-6)
    reduced = sum(kernels_us(report, network=True, optimizer=each) for each in (False, True))
    assert reduced > 0.0
    assert parts.exposed_comm_s == pytest.approx(reduced * 1e-6)
    assert parts.by_parallelism == {"dp_cp": pytest.approx(parts.exposed_comm_s)}
    assert (parts.host_s, parts.bubble_s) == (pytest.approx(0.0, abs=1e-12), 0.0)


def test_what_runs_beside_computing_is_not_exposed(tmp_path: Path) -> None:
    """Hidden communication slows computing by ``compute_slowdown``, and is gone from the exposed part."""
    apart = step(tmp_path, devices=4, cuda_graph=True).breakdown
    beside = step(
        tmp_path, devices=4, cuda_graph=True, overlap=("dp",), compute_slowdown=0.0, communication_slowdown=0.0
    ).breakdown
    assert beside.exposed_comm_s < apart.exposed_comm_s
    assert beside.compute_s == pytest.approx(apart.compute_s, rel=1e-3)


def test_waiting_for_the_host_is_the_hosts(tmp_path: Path) -> None:
    fast, slow = step(tmp_path, cuda_graph=True), step(tmp_path, issue_us={"*": 1000.0})
    parts = slow.breakdown
    assert parts.compute_s == pytest.approx(fast.breakdown.compute_s, rel=1e-6)
    assert parts.host_s == pytest.approx(slow.step_time_s - parts.compute_s - parts.optimizer_s)
    assert parts.host_s > 0.9 * slow.step_time_s
    told = step(tmp_path, cuda_graph=True, step_overhead_us=5e4)
    assert told.breakdown.host_s == pytest.approx(0.05)


def test_a_stage_that_has_nothing_to_do_is_a_bubble(tmp_path: Path) -> None:
    report = step(tmp_path, devices=2, parallel={"pp": 2}, cuda_graph=True)
    parts, pipeline = report.breakdown, report.state.steps[0].pipeline
    busiest = report.state.steps[0].busiest
    waits = report.step_time_s - parts.compute_s - parts.optimizer_s - parts.exposed_comm_s
    assert parts.bubble_s == pytest.approx(waits)
    assert parts.bubble_s == pytest.approx(float(pipeline.bubble_us[busiest]) * 1e-6, rel=0.05)
    assert parts.compute_s == pytest.approx(float(pipeline.busy_us[busiest]) * 1e-6, rel=1e-6)
    assert [stage.layers for stage in report.stages] == [2, 2]
    assert all(0.0 < stage.bubble_s < report.step_time_s for stage in report.stages)
