"""Steps whose communication shares the links: what contends waits, what does not takes as long as alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.simulator.contention.link_usage import communicates
from opcast.simulator.contention.traffic import collect_communication
from opcast.simulator.engines import FusedEngine, build_engine
from opcast.simulator.engines.flow import FlowEngine, flow_engine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.faults import Fault
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.report.ledger import ledger_of
from opcast.simulator.simulate import simulate
from opcast.simulator.step.state import Step
from opcast.tests.simulator.contention.oracle import event_by_event
from opcast.tests.simulator.contention.tiny import H100, TINY

WORK = Work(seq_len=512, micro_batch=1, global_batch=64)


def cluster(nodes: int = 4, nic_gbps: float = 50.0, **topology: Any) -> Cluster:
    shape = {"shape": "fat_tree", "radix": 16, **topology}
    return replace(load_cluster("dgx_h100"), nodes=nodes, topology=shape, nic_gbps=nic_gbps)


def step(graphs: Path, joined: Cluster, **degrees: Any) -> tuple[Step, FusedEngine, Any]:
    degrees = {"tp": 4, "pp": 2, "zero_stage": 1, **degrees}
    made = Plan(Parallel(**degrees), joined, load_stack("megatron"))
    engine = build_engine(H100, [], [], cluster=joined)
    engine = FusedEngine([FlowEngine(NetworkEngine(H100, joined), engine, made), *engine.engines])
    report = simulate(TINY, WORK, made, H100, engine, graphs)
    assert report.state is not None
    return report.state.steps[0], engine, report


def test_starts_and_lengths_agree(graphs: Path) -> None:
    placed, _, _ = step(graphs, cluster(oversubscription=8, nic_gbps=5.0))
    shared = placed.shared
    assert shared is not None
    assert shared.apart_us < shared.total_us == placed.total_us
    said = collect_communication(placed)
    count = len(said.collectives.slot)
    took = (shared.end_us - shared.start_us)[:count]
    assert said.collectives.lasts_us.sum() == pytest.approx(took.sum(), rel=0.03)


def test_one_dimension_alone_has_nothing_in_its_way(graphs: Path) -> None:
    placed, _, _ = step(graphs, cluster(2), tp=8, pp=1)
    assert placed.shared is not None
    assert placed.shared.total_us == pytest.approx(placed.shared.apart_us, rel=1e-9)
    assert placed.shared.rounds == 1


def test_sends_and_gradients_wait_for_each_other_on_thin_spines(graphs: Path) -> None:
    times = []
    for oversubscription in (1, 4, 8):
        placed, _, _ = step(graphs, cluster(nic_gbps=5.0, oversubscription=oversubscription))
        assert placed.shared is not None
        times.append(placed.total_us)
        assert placed.total_us >= placed.shared.apart_us * (1 - 1e-3)
    assert times == sorted(times)
    assert times[2] > 1.02 * times[0]


def test_links_carry_the_bytes_of_the_ops(graphs: Path) -> None:
    """One rank a node: a device sends (n - 1)/n of every buffer that is gathered or reduced through its NIC."""
    placed, engine, _ = step(graphs, cluster(4), tp=8, pp=1)
    flows, shared = flow_engine(engine), placed.shared
    assert flows is not None
    assert shared is not None
    assert flows.topology.of_kind(("ib",)).any()
    ledger = ledger_of(list(placed.executions(0)))
    sent = 0.0
    for node, times in zip(ledger.nodes, ledger.count.tolist(), strict=True):
        op = node.op.to_dict() if communicates(node.op) and node.op else {}
        if op and op["ranks"] == 4 and op["ranks_per_node"] == 1:
            sent += times * op["size_bytes"] * {"all_reduce": 1.5}.get(op["kind"], 0.75)
    load = shared.load() * flows.topology.bandwidth_gbps * 1e3 * shared.total_us
    leaves = np.array(["leaf" in flows.topology.nodes[node] for node in flows.topology.target])
    ranks = flows.topology.source < flows.topology.ranks
    nics = np.array(["nic" in flows.topology.nodes[node] for node in flows.topology.source])
    out = load[leaves & (ranks | nics)]
    assert sent > 0
    assert out.sum() == pytest.approx(32 * sent, rel=0.02)


def test_the_report_tells_load_over_time(graphs: Path) -> None:
    placed, _, report = step(graphs, cluster(oversubscription=4))
    found = report.network
    hot, over = found["hot_links"], found["over_time"]
    assert found["contention_s"] == pytest.approx((placed.total_us - placed.shared.apart_us) * 1e-6)  # type: ignore[union-attr]
    assert [link["link"] for link in hot] == list(over["links"])
    for link in hot:
        assert np.mean(over["links"][link["link"]]) == pytest.approx(link["busy"], rel=1e-3)
        assert link["busy"] <= link["peak"] <= 1.0 + 1e-6
    assert {kind: np.mean(each) for kind, each in over["kinds"].items()} == pytest.approx(
        {kind: each["mean"] for kind, each in found["busy"].items()}, rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize("degrees", [{"schedule": "zb-h1"}, {"vpp": 2}, {"zero_stage": 3}, {"schedule": "dualpipe"}])
def test_every_schedule_shares_its_links(graphs: Path, degrees: dict[str, Any]) -> None:
    placed, _, _ = step(graphs, cluster(oversubscription=8, nic_gbps=5.0), **degrees)
    shared = placed.shared
    assert shared is not None
    assert shared.residual < 0.01
    assert (shared.end_us >= shared.start_us).all()
    assert shared.end_us.max() <= 1.05 * shared.total_us
    assert shared.total_us >= shared.apart_us * (1 - 1e-3)


def test_inference_shares_links_too(graphs: Path) -> None:
    """Two stages behind thin spines: prompts in flight send while others do."""
    joined = cluster(4, nic_gbps=0.5, oversubscription=8)
    made = Plan(Parallel(tp=4, pp=8), joined, load_stack("trtllm"), micro_batches=8)
    engine = build_engine(H100, [], [], cluster=joined)
    flows = FlowEngine(NetworkEngine(H100, joined), engine, made)
    work = Work(kind="prefill", batch=8, input_len=512)
    alone = simulate(TINY | {"num_hidden_layers": 8}, work, made, H100, engine, graphs)
    report = simulate(TINY | {"num_hidden_layers": 8}, work, made, H100, FusedEngine([flows, *engine.engines]), graphs)
    assert alone.state.main.shared is None
    shared = report.state.main.shared
    assert shared is not None
    assert shared.total_us >= shared.apart_us * (1 - 1e-3)
    assert report.e2e_ms == pytest.approx(shared.total_us * 1e-3)
    load = shared.load()
    assert 0.0 < load.max() <= 1.0
    crossing = np.array(["spine" in flows.topology.link_name(link) for link in range(flows.topology.links)])
    assert load[crossing].max() > 0.0
    assert report.network["hot_links"]


def test_the_fixed_point_is_what_one_run_from_event_to_event_finds(graphs: Path) -> None:
    joined = cluster(4, nic_gbps=1.0, oversubscription=8)
    stack = replace(load_stack("megatron"), overlap=("pp",), gradient_clipping=False)
    made = Plan(Parallel(tp=1, pp=2), joined, stack)
    engine = build_engine(H100, [], [], cluster=joined)
    flows = FlowEngine(NetworkEngine(H100, joined), engine, made)
    report = simulate(TINY, WORK, made, H100, FusedEngine([flows, *engine.engines]), graphs)
    assert report.state is not None
    placed = report.state.steps[0]
    shared = placed.shared
    assert shared is not None
    assert shared.total_us > 1.001 * shared.apart_us  # something was in the way
    found_us = event_by_event(placed, flows.topology.bandwidth_gbps)
    assert found_us == pytest.approx(placed.pipeline.makespan_us, rel=5e-3)


def test_a_fault_in_one_stage_does_not_hurry_others(graphs: Path) -> None:
    """Small messages: most of a collective's time is no bytes, so a slow link hardly stretches it."""
    joined = cluster(2)
    made = Plan(Parallel(tp=8, pp=2), joined, load_stack("trtllm"))
    work = Work(kind="decode", batch=4, input_len=128)
    took = []
    for faults in ((), (Fault("gpu0-nvswitch0", bandwidth_factor=0.5),)):
        engine = build_engine(H100, [], [], cluster=joined)
        flows = FlowEngine(NetworkEngine(H100, joined), engine, made, faults)
        report = simulate(TINY, work, made, H100, FusedEngine([flows, *engine.engines]), graphs)
        took.append(report.e2e_ms)
    assert took[1] >= took[0]
