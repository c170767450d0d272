"""No fault makes a collective faster, on any fabric, by any routes, in any group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault, fault_sites
from opcast.simulator.network.shapes import (
    Dimension,
    Port,
    Servers,
    dragonfly,
    dual_plane,
    dual_tor,
    fat_tree,
    product,
)
from opcast.simulator.network.study import with_faults
from opcast.simulator.network.topology import TopologyError

EIGHT_BY_TWO = Servers(8, 2, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0), lanes=Port(64.0, 0.0, "nic"))
FABRICS = [
    product([Dimension("ring", 9, 50.0)]),
    product([Dimension("torus", 16, 50.0)]),
    product([Dimension("king_mesh", 9, 50.0), Dimension("ring", 2, 25.0)]),
    product([Dimension("fully_connected", 4, 300.0, 0.5, "nvlink"), Dimension("ring", 4, 50.0)]),
    product([Dimension("switch", 4, 300.0, 0.5, "nvlink"), Dimension("hypercube", 4, 50.0)]),
    fat_tree(EIGHT_BY_TWO, 4),
    fat_tree(EIGHT_BY_TWO, 8, oversubscription=3.0),
    fat_tree(EIGHT_BY_TWO, 8, rails=True),
    dual_tor(EIGHT_BY_TWO, 8),
    dual_plane(EIGHT_BY_TWO, 8, rails=True),
    dragonfly(EIGHT_BY_TWO, 4, 2, 50.0, 25.0),
]
FAULTS = [Fault("", gone=True), Fault("", bandwidth_factor=0.3), Fault("", extra_latency_us=5.0)]
COLLECTIVES = ["all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"]


def rails() -> Fabric:
    return build_fabric(replace(load_cluster("dgx_h100"), nodes=4), load_device("h100_sxm"))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(FABRICS), st.sampled_from(["adaptive", "ecmp", "shortest"]), st.data())
def test_no_fault_makes_a_collective_faster(topology, policy: str, data) -> None:
    whole = Fabric(topology, policy, 2, data.draw(st.integers(0, 9)), 5.0, 0.6, server=2)
    ranks = st.integers(0, topology.ranks - 1)
    group = tuple(data.draw(st.lists(ranks, min_size=2, max_size=topology.ranks, unique=True)))
    collective = data.draw(st.sampled_from(COLLECTIVES))
    algorithm = data.draw(st.sampled_from(whole.algorithms(collective, group)))
    where = st.sampled_from(fault_sites(topology, (*set(topology.kind), "switch")))
    drawn = data.draw(st.lists(st.tuples(where, st.sampled_from(FAULTS)), min_size=1, max_size=3))
    try:
        before = whole.cost(collective, algorithm, group)
        worn = with_faults(whole, [replace(like, where=place) for place, like in drawn])
        after = worn.cost(collective, algorithm, group)
    except TopologyError:  # ranks that are cut off, or no switch that reduces
        assume(False)
    assert after.latency_us >= before.latency_us * (1.0 - 1e-9)
    assert after.us_per_byte >= before.us_per_byte * (1.0 - 1e-9)
    asked = [Transfer(collective, group, 2e7, algorithm)]
    healthy, found = (each.flow(asked)[1].max() for each in (whole, worn))
    assert found >= healthy * (1.0 - 2e-3)


@pytest.mark.parametrize("nodes", [[0, 8, 16, 24], [3, 11], [24, 0, 16, 8]])
def test_a_rail_that_is_gone_opens_no_other_rails_to_one_gpu_a_node(nodes: list[int]) -> None:
    whole = rails()
    worn = with_faults(whole, [Fault(f"leaf{nodes[0] % 8}", gone=True)])
    before, after = (each.cost("all_reduce", "ring", nodes) for each in (whole, worn))
    assert before.us_per_byte <= after.us_per_byte <= 1.4 * before.us_per_byte
    assert after.latency_us > before.latency_us


def test_whole_nodes_share_the_rails_that_are_left() -> None:
    whole = rails()
    worn = with_faults(whole, [Fault("leaf0", gone=True)])
    before, after = (each.cost("all_reduce", "ring", range(32)).us_per_byte for each in (whole, worn))
    assert after == pytest.approx(before * 8 / 7, rel=0.02)


def test_a_second_fault_is_no_relief() -> None:
    """From leaf to leaf over two spines, one of which another leaf has lost: without the other way it is free."""
    whole = Fabric(fat_tree(Servers(6, 1, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 4))
    asked = [Transfer("all_reduce", tuple(range(6)), 1e9, "ring")]
    first = with_faults(whole, [Fault("leaf2-spine0", gone=True)])
    second = with_faults(first, [Fault("leaf0-spine1", gone=True)])
    times = [each.flow(asked)[1].max() for each in (whole, first, second)]
    assert times == sorted(times)
