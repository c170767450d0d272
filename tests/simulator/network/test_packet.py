"""The flow model against ns-3, packet by packet, on small cases."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opcast import predict
from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import bus_factor
from opcast.simulator.network import packet
from opcast.simulator.network.build import build_fabric as fabric_of
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.faults import Fault, apply_faults
from opcast.simulator.network.shapes import Dimension, product
from opcast.simulator.network.topology import TopologyError, read_fabric

MIB = 2**20
PYTHON = os.environ.get("OPCAST_NS3_PYTHON") or (sys.executable if importlib.util.find_spec("ns3") else "")
needs_ns3 = pytest.mark.skipif(not PYTHON, reason="needs ns-3: pip install --no-deps ns3, or set OPCAST_NS3_PYTHON")

SWITCH = product([Dimension("switch", 8, 12.5, 0.5, "ib")])
RING = product([Dimension("ring", 8, 12.5, 0.5)])
EIGHT = tuple(range(8))
SERVERS = fabric_of(replace(load_cluster("dgx_h100"), nodes=4), load_device("h100_sxm")).topology


def dumbbell():
    """Two leaves of four hosts; one uplink of the same rate as a host's cable."""
    nodes = [{"name": f"h{i}", "rank": True} for i in range(8)] + [{"name": "left"}, {"name": "right"}]
    hosts = [
        {"from": f"h{i}", "to": "left" if i < 4 else "right", "bandwidth_gbps": 12.5, "latency_us": 0.5}
        for i in range(8)
    ]
    return read_fabric(
        {"nodes": nodes, "links": [*hosts, {"from": "left", "to": "right", "bandwidth_gbps": 12.5, "latency_us": 1.0}]}
    )


CASES = {
    "incast": (SWITCH, [Transfer("send", (rank, 0), 1 * MIB) for rank in range(1, 8)]),
    "ring all-reduce": (RING, [Transfer("all_reduce", EIGHT, 4 * MIB, "ring")]),
    "all-to-all": (SWITCH, [Transfer("all_to_all", EIGHT, 4 * MIB, "direct")]),
    "two jobs on one uplink": (
        dumbbell(),
        [Transfer("all_reduce", (0, 4), 4 * MIB, "ring"), Transfer("all_reduce", (1, 5), 4 * MIB, "ring")],
    ),
    "soft fault": (
        apply_faults(RING, [Fault("gpu2-gpu3", bandwidth_factor=0.5)]),
        [Transfer("all_reduce", EIGHT, 4 * MIB, "ring")],
    ),
    "hard fault": (
        apply_faults(RING, [Fault("gpu2-gpu3", gone=True)]),
        [Transfer("all_gather", EIGHT, 8 * MIB, "ring")],
    ),
    "a worn NIC in a ring of servers": (
        apply_faults(SERVERS, [Fault("nic0-leaf0", bandwidth_factor=0.5)]),
        [Transfer("all_reduce", (0, 8, 16, 24), 2 * MIB, "ring")],
    ),
    "a chain": (SWITCH, [Transfer("broadcast", EIGHT, 4 * MIB, "ring")]),
    "short and long flows": (
        dumbbell(),
        [Transfer("send", (0, 4), 2 * MIB), Transfer("send", (1, 5), 6 * MIB), Transfer("send", (2, 3), 4 * MIB)],
    ),
    "one after the other": (
        SWITCH,
        [Transfer("all_gather", EIGHT, 4 * MIB, "ring"), Transfer("send", (0, 3), 2 * MIB, after=(0,))],
    ),
}  # fmt: skip


@needs_ns3
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_flows_take_what_packets_take(case: str) -> None:
    topology, transfers = CASES[case]
    fabric = Fabric(topology, "shortest")
    packets = packet.simulate(fabric, transfers, PYTHON)
    flows = fabric.flow(transfers)[1]
    assert flows == pytest.approx(packets, rel=0.08)


def test_what_packets_cannot_do_is_said() -> None:
    fabric = Fabric(RING)
    with pytest.raises(TopologyError, match="not at a time: leave out release_us"):
        packet.simulate(fabric, [Transfer("send", (0, 1), 1.0, release_us=5.0)])
    uneven = apply_faults(RING, [Fault("gpu0->gpu1", bandwidth_factor=0.5)])
    with pytest.raises(TopologyError, match="both directions of gpu"):
        packet.simulate(Fabric(uneven), [Transfer("send", (0, 1), 1.0)])


@pytest.mark.skipif(importlib.util.find_spec("ns3") is not None, reason="ns-3 is here")
def test_without_ns3_the_package_is_named() -> None:
    with pytest.raises(TopologyError, match=r"needs ns-3: .* -m pip install .*\[packet\]"):
        packet.simulate(Fabric(RING), [Transfer("send", (0, 1), 1.0)])


def test_a_ring_goes_step_by_step() -> None:
    messages: list[packet.Message] = []
    (phase,) = Fabric(RING).plan("all_reduce", "ring", EIGHT)
    ends = packet._expand(messages, phase, 8.0, ())
    assert len(messages) == 14 * 8
    assert np.unique([m.size_bytes for m in messages]).tolist() == [1.0]
    assert len(ends) == len(messages)
    for m in messages[8:]:
        (before,) = m.after
        assert messages[before].target == m.source


@needs_ns3
@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=2)
@example(8, "all_reduce", 8, False)
@given(
    st.sampled_from([2, 3, 4]),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_packets_are_no_faster_than_their_links(nodes: int, collective: str, mib: int, all_groups: bool) -> None:
    found = predict(
        collective, size_bytes=mib * MIB, group=list(range(0, 8 * nodes, 8)), cluster="dgx_h100", nodes=nodes,
        algorithm="ring", network="packet", all_groups=all_groups,
    )  # fmt: skip
    nic = SERVERS.bandwidth_gbps[SERVERS.find("nic0->leaf0")][0]
    assert found.network["busbw_gbps"] <= nic
    assert found.network["links_us"] >= mib * MIB * bus_factor(collective, nodes) / (nic * 1e3)
    assert found.network["stretch"] == pytest.approx(1.0, rel=0.01)  # rails do not block
