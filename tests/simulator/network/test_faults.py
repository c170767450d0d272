"""Faults: what they do to links, routes and times, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from opcast.simulator.network.fabric import Fabric
from opcast.simulator.network.faults import Fault, apply_faults, draw_faults, faults_from_dicts, read_drawing
from opcast.simulator.network.shapes import Dimension, Port, Servers, fat_tree, product
from opcast.simulator.network.topology import TopologyError

RING = product([Dimension("ring", 8, 50.0, 1.0)])
TREE = fat_tree(Servers(16, 1, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8)


def all_reduce(topology) -> float:
    return Fabric(topology, "shortest").latency_us("all_reduce", range(8), 1e9, "ring")


def test_a_soft_fault_slows_what_crosses_it() -> None:
    slow = apply_faults(RING, [Fault("gpu0-gpu1", bandwidth_factor=0.5)])
    assert all_reduce(slow) == pytest.approx(2.0 * all_reduce(RING), rel=1e-3)
    later = apply_faults(RING, [Fault("gpu0->gpu1", extra_latency_us=5.0)])
    assert later.latency_us.sum() == RING.latency_us.sum() + 5.0
    lossy = apply_faults(RING, [Fault("gpu0->gpu1", retransmission=0.1)])
    assert lossy.bandwidth_gbps.min() == pytest.approx(45.0)


def test_a_dead_cable_of_a_ring_is_routed_around() -> None:
    broken = apply_faults(RING, [Fault("gpu0-gpu1", gone=True)])
    assert broken.links == RING.links - 2
    assert all_reduce(broken) > all_reduce(RING)


def test_a_dead_spine_leaves_less_bandwidth_and_a_dead_leaf_a_partition() -> None:
    spine = next(name for name in TREE.nodes if name.startswith("spine"))
    size = range(16)
    whole, less = (
        Fabric(t).cost("all_to_all", "direct", size).us_per_byte
        for t in (TREE, apply_faults(TREE, [Fault(spine, gone=True)]))
    )
    assert less >= whole
    with pytest.raises(TopologyError, match=r"faults partition .*: gpu.* cannot reach the other ranks"):
        apply_faults(TREE, [Fault("leaf0", gone=True)])


def test_random_faults_follow_the_seed_and_differ_from_each_other() -> None:
    like = Fault("", bandwidth_factor=0.5)
    first, again, other = (draw_faults(TREE, 5, like, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({fault.where for fault in first}) == 5
    assert all(fault.bandwidth_factor == 0.5 for fault in first)
    apply_faults(TREE, first)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"where": "gpu0-gpu4", "gone": True}, "has no link gpu0-gpu4; gpu0 reaches gpu"),
        ({"where": "gpu0-gpu99", "gone": True}, "has no node 'gpu99'"),
        ({"node": "gpu0", "bandwidth": 0.0}, "fault at gpu0: bandwidth=0 must lie between 0.001 and 1"),
        ({"where": "gpu0-gpu1", "bandwidth_factor": -1}, "bandwidth=-1 must lie between"),
        ({"link": "gpu0-gpu1", "bandwidth": "half"}, "bandwidth='half' must be a number"),
        ({"where": "gpu0-gpu1", "extra_latency_us": -1}, "extra_latency_us=-1 must not be negative"),
        ({"where": "gpu0-gpu1", "retransmission": 1.0}, "retransmission=1 must lie between 0 and 0.999"),
        ({"where": "gpu0-gpu1", "speed": 1}, "a fault has no setting 'speed'"),
        ({"gone": True}, "a fault lacks its link or node, such as"),
        ({"link": 3, "gone": True}, "a fault is at 3; it must name a link, such as"),
        ({"link": "gpu0-gpu1"}, "fault at gpu0-gpu1 does nothing: give bandwidth: 0.5"),
        ({"link": "gpu0-gpu1", "node": "gpu0", "gone": True}, "says one thing twice: name a link or a node"),
        ({"link": "gpu0-gpu1", "bandwidth": 0.5, "gone": True}, "what is gone has no other figures"),
    ],
)
def test_faults_that_cannot_be_are_named(values: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        apply_faults(RING, faults_from_dicts([values]))


def test_more_faults_than_cables_are_refused() -> None:
    with pytest.raises(TopologyError, match="9 faults are more than the 8 places"):
        draw_faults(RING, 9, Fault("", gone=True), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 2, "samples": 5}, "fault_draw draws its places and has no 'samples': use faults_study.samples"),
        ({"link": "gpu0-gpu1", "gone": True}, "fault_draw draws its places and has no 'link'"),
        ({"bandwidth": 2}, "fault_draw: a fault: bandwidth=2 must lie between"),
        ({"kinds": 5}, r"fault_draw.kinds=5 must be kinds of links"),
        ({"seed": True}, "fault_draw.seed=True must be a whole number"),
    ],
)
def test_draws_that_cannot_be_are_named(settings: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        read_drawing(settings, "fault_draw")


def test_switches_can_be_drawn_too() -> None:
    drawn = {draw_faults(TREE, 1, Fault(gone=True), seed, ("switch",))[0].where for seed in range(50)}
    assert drawn == {"leaf0", "leaf1", "leaf2", "leaf3", "spine0", "spine1"}


def test_slower_links_never_make_anything_faster() -> None:
    rng = np.random.default_rng(0)
    before = Fabric(TREE).cost("all_reduce", "ring", range(16)).us_per_byte
    for seed in rng.integers(0, 1000, 10):
        after = Fabric(apply_faults(TREE, draw_faults(TREE, 3, Fault("", bandwidth_factor=0.3), int(seed))))
        assert after.cost("all_reduce", "ring", range(16)).us_per_byte >= before * (1 - 1e-9)


@pytest.mark.parametrize("where", ["leaf0-spine0", "leaf1-spine0", "gpu0-leaf0"])
def test_adaptive_routes_shift_away_from_worn_links(where: str) -> None:
    ends = np.arange(4), np.arange(4, 8)  # from one leaf to another over two spines
    before, hashed = Fabric(TREE), Fabric(TREE, "ecmp")
    worn = before.on(apply_faults(TREE, [Fault(where, bandwidth_factor=0.5)]), True)
    found = worn._router.crossings(*ends)
    up = found.flows[np.isin(found.links, TREE.find("leaf0->spine0"))]
    assert up == pytest.approx(4.0 * (0.5 if "gpu" in where else 0.5 / 1.5))
    assert found.flows.sum() == pytest.approx(before._router.crossings(*ends).flows.sum())
    as_before = hashed.on(worn.topology, True)._router.crossings(*ends)
    assert as_before.flows.tolist() == hashed._router.crossings(*ends).flows.tolist()


def test_a_worn_spine_costs_what_it_carried_not_half_of_all() -> None:
    exchange = Fabric(TREE)
    exchange.cost("all_to_all", "direct", range(16))
    worn = exchange.on(apply_faults(TREE, [Fault("leaf0-spine0", bandwidth_factor=0.5)]), True)
    before, after = (each.cost("all_to_all", "direct", range(16)).us_per_byte for each in (exchange, worn))
    assert 1.0 <= after / before <= 4 / 3 + 1e-9  # two spines, of which one is half there
