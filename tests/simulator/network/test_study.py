"""Fidelities side by side, and what faults cost."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault, read_drawing
from opcast.simulator.network.fidelity import load_over_time, simulate
from opcast.simulator.network.shapes import Dimension, product
from opcast.simulator.network.study import Study, run_trials, with_faults
from opcast.simulator.network.topology import TopologyError

RING = Fabric(product([Dimension("ring", 8, 50.0, 0.5)]), "shortest")
SWITCH = Fabric(product([Dimension("switch", 8, 50.0, 0.5, "ib")]))
ALL = Transfer("all_reduce", tuple(range(8)), 1e9, "ring")


def studied(fabric: Fabric, transfers: list[Transfer], fidelity: str = "analytical", **drawing: Any) -> Study:
    """What faults at places that settings draw do to the last end of some transfers."""
    faults = read_drawing(drawing, "faults_study").faults(fabric.topology)
    return run_trials(faults, lambda broken: simulate(with_faults(fabric, broken), transfers, fidelity).total_us)


def test_formula_and_flow_agree_on_what_runs_alone() -> None:
    for each in (ALL, Transfer("all_to_all", tuple(range(8)), 1e9), Transfer("send", (0, 3), 1e9)):
        one, other = (simulate(SWITCH, [each], fidelity) for fidelity in ("analytical", "flow"))
        assert one.end_us == pytest.approx(other.end_us, rel=0.01)
        assert one.carried_bytes == pytest.approx(other.carried_bytes)


def test_formula_and_flow_agree_on_what_contends_all_along() -> None:
    four = [ALL._replace(size_bytes=64 * 2.0**20)] * 4
    one, other = (simulate(RING, four, fidelity).total_us for fidelity in ("analytical", "flow"))
    alone = simulate(RING, four[:1]).total_us
    assert one == pytest.approx(other, rel=0.05)
    assert other == pytest.approx(4 * alone, rel=0.05)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.permutations(range(8)), st.floats(1e3, 1e9)), min_size=1, max_size=6))
def test_contention_never_helps_and_links_never_carry_more_than_they_can(drawn) -> None:
    sends = [Transfer("send", tuple(order[:2]), size) for order, size in drawn]
    for fidelity in ("analytical", "flow"):
        found = simulate(SWITCH, sends, fidelity)
        alone = [simulate(SWITCH, [each], fidelity).total_us for each in sends]
        assert (found.end_us >= np.array(alone) * (1 - 2e-3)).all()
    assert found.utilisation(SWITCH.topology.bandwidth_gbps).max() <= 1.002


def test_the_formula_follows_the_flows_where_many_contend() -> None:
    joined = dataclasses.replace(load_cluster("dgx_h100"), nodes=8)
    thin = dataclasses.replace(joined, topology={"shape": "fat_tree", "radix": 16, "oversubscription": 4})
    made, rng = build_fabric(thin, load_device("h100_sxm")), np.random.default_rng(0)
    drawn = []
    for kind in rng.choice(["all_reduce", "all_gather", "all_to_all", "send"], 48).tolist():
        ranks = rng.choice(64, 2 if kind == "send" else int(rng.choice([4, 8, 16])), replace=False)
        drawn.append(Transfer(kind, tuple(ranks.tolist()), float(rng.uniform(1e6, 1e8))))
    one, other = (simulate(made, drawn, fidelity).end_us for fidelity in ("analytical", "flow"))
    off = np.abs(one / other - 1.0)
    assert np.median(off) < 0.10
    assert np.quantile(off[[each.collective != "send" for each in drawn]], 0.9) < 0.25


def test_transfers_that_follow_do_not_contend() -> None:
    chain = [Transfer("send", (0, 1), 5e7), Transfer("send", (0, 1), 5e7, after=(0,))]
    for fidelity in ("analytical", "flow"):
        assert simulate(SWITCH, chain, fidelity).end_us == pytest.approx([1001.0, 2002.0])


def test_load_over_time_adds_up_to_what_was_carried() -> None:
    chain = [Transfer("send", (0, 1), 5e7), Transfer("send", (0, 1), 1e8, after=(0,)), Transfer("send", (2, 3), 5e7)]
    found = simulate(SWITCH, chain)
    load = load_over_time(SWITCH, chain, found, 30)
    assert load.shape == (30, SWITCH.topology.links)
    bytes_a_bin = SWITCH.topology.bandwidth_gbps * 1e3 * found.total_us / 30
    assert (load * bytes_a_bin).sum(axis=0) == pytest.approx(found.carried_bytes)
    assert load.max() <= 1.0 + 1e-9
    (idle,) = SWITCH.topology.find("gpu2->switch0.0")
    assert load[-1, idle] == 0.0


def test_an_unknown_fidelity_is_named() -> None:
    with pytest.raises(TopologyError, match="network='exact' is not one of analytical, flow, packet"):
        simulate(SWITCH, [ALL], "exact")


def test_each_cable_of_a_ring_matters_alike_when_it_slows() -> None:
    found = studied(RING, [ALL], everywhere=True, bandwidth=0.5)
    assert len(found.where) == 8
    assert found.slowdown == pytest.approx(2.0, rel=1e-3)
    assert found.partitioned == 0


def test_a_cable_of_a_switch_that_breaks_partitions() -> None:
    found = studied(SWITCH, [ALL], everywhere=True, gone=True)
    assert found.partitioned == 8
    assert found.to_dict()["slowdown"]["p50"] is None


def test_the_most_critical_link_is_the_one_that_everything_crosses() -> None:
    pair = [Transfer("send", (2, 3), 1e9), Transfer("send", (1, 3), 1e9)]
    found = studied(RING, pair, "flow", everywhere=True, bandwidth=0.1)
    assert found.critical(1)[0][0] == "gpu2-gpu3"
    assert found.slowdown.max() == pytest.approx(10.0, rel=0.01)


def test_random_studies_repeat_and_only_touch_the_kinds_asked_for() -> None:
    cluster = dataclasses.replace(load_cluster("dgx_h100"), nodes=4)
    made = build_fabric(cluster, load_device("h100_sxm"))
    step = [Transfer("all_reduce", tuple(range(32)), 1e9, "ring")]
    start = time.process_time()
    first, again = (studied(made, step, samples=100, count=2, seed=7, kinds=["ib"]) for _ in range(2))
    assert time.process_time() - start < 5.0
    assert first.time_us.tolist() == again.time_us.tolist()
    assert not any("nvswitch" in place for places in first.where for place in places)
    assert 1.0 <= first.quantiles()[0.5] <= first.quantiles()[1.0] <= 2.1
    with pytest.raises(TopologyError, match="no links of kind 'optics'"):
        studied(made, step, kinds=["optics"], gone=True)


def test_a_slow_node_is_a_fault_of_all_its_links() -> None:
    slow = Fault("gpu3", bandwidth_factor=0.25)
    assert simulate(with_faults(SWITCH, [slow]), [ALL]).total_us == pytest.approx(
        4 * simulate(SWITCH, [ALL]).total_us, rel=0.01
    )
