"""Costs of ways by hubs and searches of whole words, against Dijkstra's algorithm over all links."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.distances import UNREACHABLE, Distances
from opcast.simulator.network.routing import Router
from opcast.simulator.network.shapes import Dimension, Port, Servers, dragonfly, product
from opcast.simulator.network.topology import Topology


def cluster(name: str, nodes: int, **topology: object) -> Topology:
    made = load_cluster(name)
    return build_fabric(dataclasses.replace(made, nodes=nodes, topology=topology), load_device(made.device)).topology


def check(topology: Topology) -> Distances:
    """The costs of a sample of ways are those of Dijkstra's algorithm."""
    found = Router(topology).distances
    size = len(topology.nodes)
    targets = np.unique(np.random.default_rng(0).integers(0, size, 200))
    ends = topology.target.astype(np.int32), topology.source.astype(np.int32)  # SciPy 1.11.1 takes no others
    backwards = csr_array((found.cost, ends), (size, size))
    wanted = shortest_path(backwards, method="D", indices=targets)
    here, target = np.tile(np.arange(size), len(targets)), np.repeat(targets, size)
    cost = found.between(here, target).reshape(len(targets), size)
    np.testing.assert_array_equal(np.where(cost >= UNREACHABLE, np.inf, cost), wanted)
    return found


@pytest.mark.parametrize(
    "topology",
    [
        cluster("dgx_h100", 40, shape="rails", radix=16),
        cluster("dgx_h100", 15, shape="fat_tree", radix=8),
        cluster("dgx_h100", 12, shape="dual_plane", radix=16),
        cluster("dgx_h100", 1),
        cluster("gb200_nvl72", 3),
        cluster("pcie_4xl40s", 6, shape="fat_tree"),
        dragonfly(Servers(24, 4, Port(300.0, 0.5, "nvlink"), Port(50.0, 1.0)), 4, 3, 100.0, 50.0),
        product([Dimension("switch", 8, 450.0, 0.5, "nvlink"), Dimension("ring", 9, 50.0)]),
        product([Dimension("torus", 16, 50.0), Dimension("line", 3, 50.0)]),
        product([Dimension("fully_connected", 20, 50.0)]),
        product([Dimension("switch", 300, 50.0, 1.0, "nvlink")]),
    ],
    ids=lambda topology: topology.name,
)
def test_costs_are_those_of_dijkstra(topology: Topology) -> None:
    check(topology)


def test_broken_links_and_parts_cut_off() -> None:
    topology = cluster("dgx_h100", 12, shape="fat_tree", radix=8)
    rng = np.random.default_rng(1)
    for _ in range(5):
        check(topology.keep(rng.random(topology.links) > 0.3))  # one direction of a cable may go


def test_costs_are_found_out_as_far_as_they_are_asked_for() -> None:
    topology = product([Dimension("ring", 500, 50.0)])
    found, every = Router(topology).distances, np.arange(500)
    np.testing.assert_array_equal(found.between(every, (every + 1) % 500), 1)
    assert found._table.min() == 0
    assert (found._table == UNREACHABLE).mean() > 0.9  # of the costs to others nothing is known
    np.testing.assert_array_equal(found.between(every, (every + 60) % 500), 60)
    np.testing.assert_array_equal(found.between(every, (every + 250) % 500), 250)
    check(topology)


def test_thousands_of_ranks_need_a_row_for_each_leaf() -> None:
    topology = cluster("dgx_h100", 512)
    found = Router(topology).distances
    every = np.arange(topology.ranks)
    found.between(np.roll(every, 1), every)
    leaves = sum(name.startswith("leaf") for name in topology.nodes)
    assert found._column_count <= leaves < topology.ranks / 8
