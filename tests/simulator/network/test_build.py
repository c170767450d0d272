"""From clusters to fabrics, and the user's own topology."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from opcast.datasets.clusters import known_clusters, load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.build import SHAPES, fabric, read
from opcast.simulator.network.fabric import Fabric
from opcast.simulator.network.faults import Fault
from opcast.simulator.network.law import collective_us
from opcast.simulator.network.topology import TopologyError
from opcast.simulator.network.tunings import tuning

GIB = 2.0**30
H100 = load_device("h100_sxm")
CLUSTER = dataclasses.replace(load_cluster("dgx_h100"), nodes=4)


def shaped(**topology) -> Fabric:
    return fabric(dataclasses.replace(CLUSTER, topology=topology), H100)


@pytest.mark.parametrize("name", known_clusters())
def test_explicit_links_and_the_formula_agree_on_large_collectives(name: str) -> None:
    cluster = dataclasses.replace(load_cluster(name), nodes=2)
    device = load_device(cluster.device)
    made = fabric(cluster, device)
    ranks = np.array([cluster.devices])
    groups = NetworkEngine(device, cluster).groups(
        {"ranks": ranks, "ranks_per_node": np.array([cluster.devices_per_node])}
    )
    for kind in ("all_reduce", "all_gather"):
        formula = collective_us(kind, np.array([4 * GIB]), groups, tuning(device, cluster.link), "ring")[0]
        assert made.latency_us(kind, range(cluster.devices), 4 * GIB, "ring") == pytest.approx(formula, rel=0.15)


@pytest.mark.parametrize(
    "topology",
    [
        {"shape": "rails", "radix": 32},
        {"shape": "fat_tree", "radix": 16, "oversubscription": 3.0},
        {"shape": "dual_plane"},
        {"shape": "dragonfly", "groups": 2, "routers": 2, "global_gbps": 200, "local_gbps": 200},
        {"shape": "switch", "routing": "ecmp"},
        {},
    ],
)
def test_every_shape_joins_all_devices(topology: dict) -> None:
    made = shaped(**topology)
    assert made.topology.ranks == 32
    assert np.isfinite(made.latency_us("all_reduce", range(32), GIB))


def test_every_shape_is_tried() -> None:
    assert set(SHAPES) == {"rails", "fat_tree", "dual_plane", "dragonfly", "switch"}


def test_oversubscription_slows_what_crosses_the_spine() -> None:
    full, third = (shaped(shape="fat_tree", radix=16, oversubscription=o) for o in (1.0, 3.0))
    times = [each.latency_us("all_to_all", range(32), GIB) for each in (full, third)]
    assert 1.5 < times[1] / times[0] < 3.5


def test_faults_are_applied_by_name() -> None:
    slow = fabric(CLUSTER, H100, [Fault("gpu0-leaf0", bandwidth_factor=0.5)])
    assert slow.latency_us("all_reduce", range(32), GIB, "ring") > 1.9 * shaped(shape="rails").latency_us(
        "all_reduce", range(32), GIB, "ring"
    )


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"shape": "star"}, "cluster.topology.shape='star' is not one of fat_tree, rails"),
        ({"shape": "rails", "radius": 4}, "shape rails has no setting 'radius'; it has radix, oversubscription"),
        ({"shape": "switch", "radix": 4}, "shape switch has no setting 'radix'; it has none"),
        ({"routing": "scenic"}, "unknown routing 'scenic'"),
        ({"file": "/nowhere.yaml"}, "cannot read the topology /nowhere.yaml"),
        ({"shape": "fat_tree", "radix": 2}, "radix >= 4"),
    ],
)
def test_bad_settings_are_named(topology: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        shaped(**topology)


def test_a_users_topology_serves_as_long_as_it_has_enough_ranks(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "dimensions:\n- {shape: switch, size: 8, bandwidth_gbps: 450}\n- {shape: ring, size: 4, bandwidth_gbps: 50}\n"
    )
    assert shaped(file=str(file)).topology.ranks == 32
    small = dataclasses.replace(CLUSTER, nodes=5, topology={"file": str(file)})
    with pytest.raises(TopologyError, match="has 32 ranks, dgx_h100 needs 40"):
        fabric(small, H100)
    file.write_text("dimensions:\n- {shape: switch, size: 8}\n")
    with pytest.raises(TopologyError, match="dimension 0 has or lacks 'bandwidth_gbps'"):
        read(file)
    file.write_text("[")
    with pytest.raises(TopologyError, match="cannot read the topology"):
        read(file)
    file.write_text("5")
    with pytest.raises(TopologyError, match="must hold nodes and links, or dimensions"):
        read(file)


def test_a_file_of_nodes_and_links_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(
        "nodes:\n- {name: a, rank: true}\n- {name: b, rank: true}\n"
        "links:\n- {from: a, to: b, bandwidth_gbps: 50, latency_us: 1}\n"
    )
    made = read(file)
    assert (made.name, made.ranks, made.links) == ("pair", 2, 2)
