"""Steps on clusters whose links are simulated: flows, faults, stragglers, and the study of faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.datasets.ops import make_op
from opcast.jobs import cli
from opcast.simulator.contention.fault_study import FaultedStep, study_faults
from opcast.simulator.engines import FusedEngine, ask, build_engine
from opcast.simulator.engines.flow import FlowEngine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault
from opcast.simulator.network.folding import classify, run_folded
from opcast.simulator.network.mapping import process_groups
from opcast.simulator.network.sharing import Activities, run_activities
from opcast.simulator.network.topology import TopologyError
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.report.answer import StepReport
from opcast.simulator.simulate import simulate
from opcast.tests.simulator.contention.tiny import H100, TINY

WORK = Work(seq_len=512, micro_batch=1, global_batch=32)


def cluster(nodes: int = 8, **topology: Any) -> Cluster:
    return replace(load_cluster("dgx_h100"), nodes=nodes, topology={"shape": "fat_tree", "radix": 16, **topology})


def flows(joined: Cluster, parallel: Parallel | None = None, faults: tuple[Fault, ...] = ()) -> FlowEngine:
    formula = NetworkEngine(H100, joined)
    return FlowEngine(formula, formula, Plan(parallel or Parallel(), joined), faults)


def step(graphs: Path, joined: Cluster, network: str = "flow", faults: tuple[Fault, ...] = (), **plan: Any) -> Any:
    """The report of a step and its engine."""
    made = Plan(Parallel(tp=4, pp=2, zero_stage=1), joined, load_stack("megatron"), **plan)
    engine = build_engine(H100, [], [], cluster=joined)
    if network == "flow":
        engine = FusedEngine([FlowEngine(NetworkEngine(H100, joined), engine, made, faults), *engine.engines])
    return simulate(TINY, WORK, made, H100, engine, graphs), engine


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "algorithm"),
    [
        ("all_reduce", 8, 8, "ring"),
        ("all_reduce", 16, 4, "tree"),
        ("all_gather", 32, 2, "ring"),
        ("all_reduce", 64, 1, "nvls"),
        ("all_to_all", 16, 4, "direct"),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_folded_groups_take_the_same_time_as_all_of_them(
    kind: str, ranks: int, stride: int, algorithm: str, broken: bool
) -> None:
    faults = (Fault("nic5-leaf0", bandwidth_factor=0.3), Fault("leaf1-spine2", bandwidth_factor=0.5)) if broken else ()
    engine = flows(cluster(oversubscription=2), faults=faults)
    fabric: Fabric = engine._view(max(1, 8 // stride))
    sent = [Transfer(kind, group, 2.0**24, algorithm) for group in process_groups(64, ranks, stride)]
    start, end, whole = fabric.flow(sent)
    folded_start, folded_end, folded = fabric.flow(sent, folded=True)
    np.testing.assert_allclose(folded_end, end, rtol=2e-3)  # near ends may share an event
    np.testing.assert_allclose(folded_start, start, rtol=2e-3)
    np.testing.assert_allclose(folded.carried_bytes, whole.carried_bytes, rtol=1e-9)


def test_folding_keeps_what_differs_apart_and_is_exact() -> None:
    rng = np.random.default_rng(3)
    count, links = 40, 12
    used = [np.sort(rng.choice(links, 3, replace=False)) for _ in range(count // 2)]
    none = np.zeros(count + 1, dtype=np.int64)
    activities = Activities(
        3 * np.arange(count + 1),
        np.concatenate([each for each in used for _ in range(2)]),
        np.ones(3 * count),
        np.repeat(rng.integers(1, 4, count // 2) * 1e6, 2),
        np.zeros(count),
        np.zeros(count),
        none,
        np.zeros(0, dtype=np.int64),
    )
    capacity = rng.uniform(1.0, 3.0, links)
    assert classify(activities, capacity).activity.max() + 1 <= count // 2  # twins are one
    found, whole = run_folded(activities, capacity, 0.0), run_activities(activities, capacity, 0.0)
    np.testing.assert_allclose(found.end_us, whole.end_us, rtol=1e-9)
    np.testing.assert_allclose(found.carried_bytes, whole.carried_bytes, rtol=1e-9)


def test_full_bisection_takes_as_long_as_the_formula_says() -> None:
    engine = flows(cluster(), Parallel(tp=8))
    ops = [
        make_op(kind, size_bytes=2**28, ranks=8, ranks_per_node=1, link="ib") for kind in ("all_reduce", "all_gather")
    ]
    np.testing.assert_allclose(ask(engine, ops).latency_us, ask(engine.network, ops).latency_us, rtol=0.02)
    assert set(ask(engine, ops).engine) == {"flow"}


def test_an_oversubscribed_fabric_slows_what_crosses_it_alone() -> None:
    engine = flows(cluster(oversubscription=4), Parallel(tp=8, pp=2))
    sends = make_op("send_recv", size_bytes=2**26, ranks=2, ranks_per_node=1, link="ib")
    inside = make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, link="nvlink")
    crossing, near = ask(engine, [sends, inside]).latency_us / ask(engine.network, [sends, inside]).latency_us
    assert crossing == pytest.approx(8 / 3, rel=0.02)  # a leaf has eight ranks and sends up at the rate of three
    assert near == 1.0


def test_a_fault_is_felt_by_the_groups_that_use_its_link() -> None:
    calm = flows(cluster(), Parallel(tp=8))
    data = make_op("all_reduce", size_bytes=2**28, ranks=8, ranks_per_node=1, link="ib")
    tensor = make_op("all_reduce", size_bytes=2**28, ranks=8, ranks_per_node=8, link="nvlink")
    usual = ask(calm, [data, tensor]).latency_us
    nic = ask(calm.with_faults([Fault("nic3-leaf0", bandwidth_factor=0.5)]), [data, tensor]).latency_us / usual
    nvlink = ask(calm.with_faults([Fault("gpu3-nvswitch0", bandwidth_factor=0.5)]), [data, tensor]).latency_us / usual
    assert nic == pytest.approx([2.0, 1.0], rel=0.02)
    assert nvlink == pytest.approx([1.0, 2.0], rel=0.05)


def test_a_step_on_full_bisection_agrees_with_the_formula(graphs: Path) -> None:
    formula, _ = step(graphs, cluster(4), "analytical")
    flowing, _ = step(graphs, cluster(4))
    assert flowing.step_time_s == pytest.approx(formula.step_time_s, rel=0.05)
    load = flowing.state.main.shared.load()
    assert 0.0 < load.max() < 1.0
    assert "flow" in flowing.provenance


def test_the_study_says_what_a_whole_simulation_says(graphs: Path) -> None:
    joined = cluster(4)
    base, engine = step(graphs, joined)
    fault = Fault("nic9-leaf1", bandwidth_factor=0.1)
    slow, _ = step(graphs, joined, faults=(fault,))
    degraded = FaultedStep(base.state.steps[0], engine)
    assert degraded.step_us([fault]) == pytest.approx(slow.step_time_s * 1e6, rel=1e-5)  # contention as without it
    assert degraded.step_us([]) == pytest.approx(base.step_time_s * 1e6, rel=1e-9)
    assert slow.step_time_s > base.step_time_s
    assert degraded.step_us([Fault("nic9-leaf1", gone=True), Fault("gpu9-nvswitch1", gone=True)]) == np.inf
    one = study_faults(base.state, engine, {"samples": 12, "seed": 4, "bandwidth_factor": 0.2})
    again = study_faults(base.state, engine, {"samples": 12, "seed": 4, "bandwidth_factor": 0.2})
    assert one.where == again.where
    assert (one.time_us == again.time_us).all()
    assert (one.slowdown >= 1.0 - 1e-9).all()
    assert one.slowdown.max() > 1.0


def test_the_study_of_slow_devices_says_what_a_whole_simulation_says(graphs: Path) -> None:
    base, engine = step(graphs, cluster(4))
    found = study_faults(base.state, engine, {"everywhere": True, "straggler": 1.5, "kinds": ["node"]})
    assert found.where == (("node 0",), ("node 1",), ("node 2",), ("node 3",))
    for node, slowdown in enumerate(found.slowdown.tolist()):
        whole, _ = step(graphs, cluster(4), slow_devices={8 * node: 1.5})
        assert slowdown == pytest.approx(whole.step_time_s / base.step_time_s, rel=0.01)
    drawn = study_faults(base.state, engine, {"samples": 8, "straggler": 1.5, "count": 2})
    assert set(drawn.slowdown.round(6)) <= {*found.slowdown.round(6), drawn.slowdown.max().round(6)}


def test_a_straggler_slows_its_stage_and_the_step(graphs: Path) -> None:
    joined = cluster(4)
    usual, _ = step(graphs, joined, "analytical")
    last: StepReport
    one, _ = step(graphs, joined, "analytical", slow_devices={20: 1.5})
    last, _ = step(graphs, joined, "analytical", slow_devices=dict.fromkeys(range(32), 1.5))
    assert usual.step_time_s < one.step_time_s < last.step_time_s
    assert one.stages[0].busy_s == pytest.approx(usual.stages[0].busy_s)  # device 20 of 32 is in the second of two
    assert one.stages[1].busy_s > usual.stages[1].busy_s
    assert last.step_time_s < 1.5 * usual.step_time_s  # communication takes as long as before


CALL = "simulate workload=train model=tiny_llama_100m cluster=dgx_h100 cluster.nodes=2 parallel.tp=8".split()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("network=fast", "network='fast' is not one of"),
        ("faults=[{link: nic0-leaf99, bandwidth: 0.5}]", "has no node 'leaf99'"),
        ("faults=[{node: gpu999, gone: true}]", "has no node 'gpu999'"),
        ("faults=[{link: nic0-leaf0, bandwidth: -1}]", "bandwidth=-1 must lie between"),
        ("faults=[{link: nic0-leaf0, gone: true},{link: gpu0-nvswitch0, gone: true}]", "gpu0 cannot reach"),
        ("fault_draw={count: 2000}", "2000 faults are more than"),
        ("faults_study={samples: 0}", "faults_study.samples=0 must be"),
        ("faults_study={straggler: 1.2, kinds: [ib]}", "with straggler they are device or node"),
        ("faults_study={straggler: 1.2, gone: true}", "study one after the other"),
        ("stragglers=[{node: 2, slowdown: 1.2}]", "dgx_h100 has nodes 0 to 1"),
        ("stragglers=[{device: 1, slowdown: 0.5}]", "must be a number of at least 1"),
    ],
)
def test_bad_input_is_one_line(setting: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*CALL, setting]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_packets_are_for_small_clusters() -> None:
    formula = NetworkEngine(H100, cluster(16))
    with pytest.raises(TopologyError, match="128 devices are too many"):
        FlowEngine(formula, formula, fidelity="packet")
