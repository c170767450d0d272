"""Routes: they arrive, by a shortest way, over links that exist; and how flows spread over equal ways."""

from __future__ import annotations

from dataclasses import replace

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.routing import Router
from opcast.simulator.network.shapes import Dimension, Port, Servers, fat_tree, product
from opcast.simulator.network.topology import TopologyError

FABRICS = [
    product([Dimension("ring", 5, 50.0)]),
    product([Dimension("torus", 16, 50.0)]),
    product([Dimension("fully_connected", 4, 300.0), Dimension("ring", 4, 50.0)]),
    product([Dimension("switch", 4, 300.0), Dimension("hypercube", 8, 50.0)]),
    fat_tree(Servers(16, 4, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8),
    fat_tree(Servers(16, 4, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 16, rails=True),
]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FABRICS), st.sampled_from(["ecmp", "shortest"]), st.data())
def test_every_path_arrives_by_a_cheapest_way(fabric, policy: str, data) -> None:
    rank = st.integers(0, fabric.ranks - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(rank, rank), min_size=1, max_size=20)))
    router = Router(fabric, policy, seed=data.draw(st.integers(0, 9)))
    paths = router.paths(pairs[:, 0], pairs[:, 1], np.arange(len(pairs)))
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from(
        zip(fabric.source.tolist(), fabric.target.tolist(), router.distances.cost.tolist(), strict=True)
    )
    for i, (source, target) in enumerate(pairs.tolist()):
        links = paths.links[paths.start[i] : paths.start[i + 1]]
        ends = [source, *fabric.target[links].tolist()]
        assert fabric.source[links].tolist() == ends[:-1]
        assert ends[-1] == target
        assert router.distances.cost[links].sum() == networkx.shortest_path_length(graph, source, target, "weight")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(FABRICS), st.data())
def test_what_flows_in_flows_out_when_spread(fabric, data) -> None:
    rank = st.integers(0, fabric.ranks - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(rank, rank), min_size=1, max_size=20)))
    found = Router(fabric, "adaptive").crossings(pairs[:, 0], pairs[:, 1])
    net = np.zeros(len(fabric.nodes))
    np.add.at(net, fabric.target[found.links], found.flows)
    np.add.at(net, fabric.source[found.links], -found.flows)
    wanted = np.zeros(len(fabric.nodes))
    np.add.at(wanted, pairs[:, 1], 1.0)
    np.add.at(wanted, pairs[:, 0], -1.0)
    assert net == pytest.approx(wanted)


def test_even_spread_is_what_many_hashed_flows_come_to() -> None:
    fabric = fat_tree(Servers(16, 1, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8)
    source, target = np.repeat(0, 40_000), np.repeat(15, 40_000)
    hashed = Router(fabric, "ecmp").paths(source, target, np.arange(40_000))
    even = Router(fabric, "adaptive").crossings(source[:1], target[:1])
    counts = np.bincount(hashed.links, minlength=fabric.links)[even.links] / 40_000
    assert counts == pytest.approx(even.flows, abs=0.02)
    assert len(even.links) == 6  # up by either of two spines


def test_dimension_order_corrects_the_first_dimension_first() -> None:
    fabric = product([Dimension("ring", 5, 50.0), Dimension("ring", 5, 50.0)])
    paths = Router(fabric, "dimension_order").paths(np.array([0]), np.array([7]))
    assert fabric.target[paths.links].tolist() == [1, 2, 7]


@pytest.mark.parametrize(
    ("shape", "target", "way"),
    [
        ("mesh", 15, [1, 2, 3, 7, 11, 15]),  # along the row, then down the column
        ("torus", 10, [1, 2, 6, 10]),
        ("hypercube", 13, [1, 5, 13]),  # bit by bit, the lowest first: e-cube routing
        ("king_mesh", 15, [5, 10, 15]),  # one dimension: kings take the diagonal
    ],
)
def test_squares_and_cubes_have_dimensions_of_their_own(shape: str, target: int, way: list[int]) -> None:
    fabric = product([Dimension(shape, 16, 50.0)])
    paths = Router(fabric, "dimension_order").paths(np.array([0]), np.array([target]))
    assert fabric.target[paths.links].tolist() == way


def test_latencies_add_up_along_a_path() -> None:
    fabric = product([Dimension("ring", 8, 50.0, 0.5)])
    found = Router(fabric, "adaptive").crossings(np.array([0, 0]), np.array([4, 1]))
    assert (found.longest_us, found.mean_us) == (2.0, 1.25)
    assert Router(fabric).paths(np.array([0]), np.array([3])).latency_us(fabric).tolist() == [1.5]


def test_inside_a_server_nvlink_is_taken_and_other_rails_are_reached_through_it() -> None:
    fabric = fat_tree(Servers(4, 4, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 16, rails=True)
    kinds = lambda a, b: [fabric.kind[link] for link in Router(fabric).paths(np.array([a]), np.array([b])).links]  # noqa: E731
    assert kinds(0, 3) == ["nvlink", "nvlink"]
    assert sorted(kinds(0, 7)) == ["ib", "ib", "nvlink", "nvlink"]


@pytest.mark.parametrize("policy", ["ecmp", "adaptive"])
def test_a_rank_that_is_not_there_is_named(policy: str) -> None:
    with pytest.raises(TopologyError, match="rank 9 exceeds"):
        Router(FABRICS[0], policy).crossings(np.array([0]), np.array([9]))


def test_unknown_policies_are_named() -> None:
    with pytest.raises(TopologyError, match="unknown routing 'random'; known: adaptive, ecmp"):
        Router(FABRICS[0], "random")
    with pytest.raises(TopologyError, match="has no dimensions to route in order"):
        Router(FABRICS[-1], "dimension_order")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(FABRICS), st.sampled_from(["adaptive", "ecmp"]), st.data())
def test_flows_found_at_once_are_those_found_one_by_one(fabric, policy: str, data) -> None:
    rank = st.integers(0, fabric.ranks - 1)
    pairs = np.array(data.draw(st.lists(st.tuples(rank, rank), min_size=1, max_size=10)))
    router = Router(fabric, policy)
    every_flow = router.by_owner(pairs[:, 0], pairs[:, 1], np.arange(len(pairs)), len(pairs))
    for (source, target), found in zip(pairs, every_flow, strict=True):
        alone = router.crossings(np.array([source]), np.array([target]))
        spread, expected = np.zeros(fabric.links), np.zeros(fabric.links)
        spread[found.links], expected[alone.links] = found.flows, alone.flows
        assert spread == pytest.approx(expected)
        assert found.longest_us == pytest.approx(alone.longest_us)


@pytest.mark.parametrize("policy", ["adaptive", "ecmp", "shortest"])
def test_a_message_to_another_rail_changes_rails_at_the_sender(policy: str) -> None:
    made = build_fabric(replace(load_cluster("dgx_h100"), nodes=2), load_device("h100_sxm"))
    topology = made.topology
    router = Router(topology, policy)
    found = router.crossings(np.array([0]), np.array([8 + 3]))
    nics = {topology.link_name(link): share for link, share in zip(found.links.tolist(), found.flows, strict=True)}
    out = {name: share for name, share in nics.items() if name.startswith("nic") and "leaf" in name}
    assert out == {"nic3->leaf3": 1.0}
    assert nics["nic11->gpu11"] == 1.0
