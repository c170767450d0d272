"""Fabrics by hand and by formula: what is checked, and what builders build."""

from __future__ import annotations

from typing import Any

import networkx
import numpy as np
import pytest

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
from opcast.simulator.network.topology import TopologyError, read_fabric

GPUS = [{"name": "a", "rank": True}, {"name": "b", "rank": True}, {"name": "s"}]
CABLES = [
    {"from": "a", "to": "s", "bandwidth_gbps": 50, "latency_us": 1},
    {"from": "b", "to": "s", "bandwidth_gbps": 50, "latency_us": 1},
]


def test_a_users_fabric_has_two_links_a_cable_and_ranks_first() -> None:
    made = read_fabric({"name": "mine", "nodes": GPUS[::-1], "links": CABLES})
    assert made.nodes == ("b", "a", "s")
    assert made.ranks == 2
    assert sorted(made.link_name(i) for i in range(made.links)) == ["a->s", "b->s", "s->a", "s->b"]


@pytest.mark.parametrize(
    ("nodes", "links", "message"),
    [
        (GPUS, CABLES[:1], "mine is not connected: b cannot reach a"),
        (GPUS, [CABLES[0], {**CABLES[1], "to": "x"}], "link 1 names the unknown node 'x'; known: a, b, s"),
        (GPUS, [*CABLES, {**CABLES[0], "from": "s", "to": "a"}], "s->a is given twice: add the bandwidths up"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": -5}], "link b->s of mine has bandwidth_gbps=-5"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": "fast"}], "bandwidth_gbps='fast', which is no number"),
        (GPUS, [CABLES[0], {**CABLES[1], "latency_us": -1}], "has latency_us=-1"),
        (GPUS, [CABLES[0], {**CABLES[1], "speed": 5}], "link 1 has an unknown key speed"),
        (GPUS, [CABLES[0], {"from": "b", "to": "s"}], "link 1 lacks bandwidth_gbps"),
        ([*GPUS, {"name": "a"}], CABLES, "two nodes called 'a'"),
        ([{"name": "a"}], [], "mine has 0 ranks"),
        (GPUS, [*CABLES, {"from": "a", "to": "a", "bandwidth_gbps": 1}], "links a to itself|given twice"),
        (GPUS, ["a-s"], "link 0 is 'a-s', but must be a mapping"),
        ([*GPUS, {"name": "t"}], CABLES, "mine has no link to 't'"),
        ([*GPUS, {"rank": True}], CABLES, "node 3 lacks name"),
        ([*GPUS, {"name": "c", "rank": "maybe"}], CABLES, "node 3 has rank='maybe', which must be true or false"),
        ([*GPUS, {"name": ["c"]}], CABLES, "node 3 has name="),
        (None, CABLES, "nodes is empty; give one mapping a line"),
        (5, CABLES, "nodes is 5, which is no list"),
        (GPUS, {"a": "s"}, "links is {'a': 's'}, which is no list"),
        (GPUS, [{**CABLES[0], "to": ["s"]}], "link 0 names the unknown node"),
        (GPUS, [{**CABLES[0], "one_way": 1}], "link 0 has one_way=1, which must be true or false"),
        (GPUS, [{**CABLES[0], "kind": 3}], "link 0 has kind=3, which must be a name"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": float("nan")}], "bandwidth_gbps=nan; it must lie between"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": 0}], "bandwidth_gbps=0; it must lie between 0.001 and"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": 1e300}], "bandwidth_gbps=1e\\+300; it must lie between"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": True}], "bandwidth_gbps=True, which is no number"),
        (GPUS, [CABLES[0], {**CABLES[1], "bandwidth_gbps": None}], "bandwidth_gbps=None, which is no number"),
        (GPUS, [CABLES[0], {**CABLES[1], "latency_us": 1e12}], "latency_us=1e\\+12; it must lie between 0 and 1000000"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(nodes: Any, links: Any, message: str) -> None:
    with pytest.raises(TopologyError, match=message) as caught:
        read_fabric({"name": "mine", "nodes": nodes, "links": links})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "size", "links"),
    [
        ("ring", 8, 16), ("ring", 2, 2), ("line", 5, 8), ("fully_connected", 6, 30), ("switch", 6, 12),
        ("mesh", 9, 24), ("torus", 9, 36), ("torus", 4, 8), ("king_mesh", 9, 40), ("hypercube", 8, 24),
    ],
)  # fmt: skip
def test_simple_shapes_have_their_number_of_links(shape: str, size: int, links: int) -> None:
    assert product([Dimension(shape, size, 50.0)]).links == links


def test_a_product_joins_every_line_of_each_dimension() -> None:
    made = product([Dimension("fully_connected", 4, 300.0), Dimension("ring", 3, 50.0), Dimension("switch", 2, 25.0)])
    assert made.ranks == 24
    assert made.links == 6 * 12 + 8 * 6 + 12 * 4
    assert sum(made.bandwidth_gbps == 25.0) == 48


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ("hypercube", 6, "power of two"),
        ("mesh", 8, "9 is the nearest"),
        ("star", 4, "known"),
        ("star", 1, "unknown shape 'star'"),
        ("ring", -3, "sizes of at least 1, got"),
        ("ring", 10**10, "10000000000 ranks is too large"),
        ("fully_connected", 100_000, "has too many links; take a switch"),
    ],
)
def test_impossible_sizes_and_shapes_are_refused(shape: str, size: int, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        product([Dimension(shape, size, 50.0)])


SERVERS = Servers(16, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0))


def bandwidth_between(made, first: str, second: str) -> float:
    """GB/s of all links from nodes whose name starts with one word to those of the other."""
    starts = [
        [made.nodes[end].startswith(word) for end in ends]
        for ends, word in ((made.source, first), (made.target, second))
    ]
    return float(made.bandwidth_gbps[np.array(starts[0]) & np.array(starts[1])].sum())


@pytest.mark.parametrize("oversubscription", [1.0, 3.0])
@pytest.mark.parametrize("radix", [16, 32, 64])
def test_a_fat_tree_sends_as_much_up_as_its_oversubscription_says(radix: int, oversubscription: float) -> None:
    made = fat_tree(SERVERS, radix, oversubscription)
    up = bandwidth_between(made, "leaf", "spine")
    used = 128 * 50.0
    down = int(radix * oversubscription / (1 + oversubscription))
    leaves = sum(name.startswith("leaf") for name in made.nodes)
    assert bandwidth_between(made, "gpu", "leaf") == used
    if leaves > 1:
        assert up == pytest.approx(leaves * down * 50.0 / oversubscription)


def test_rails_put_equal_gpus_on_one_leaf() -> None:
    made = fat_tree(SERVERS, 64, rails=True)
    gpu3 = [made.index[f"gpu{8 * server + 3}"] for server in range(16)]
    leaves = {
        int(made.target[link]) for gpu in gpu3 for link in np.flatnonzero(made.source == gpu) if made.kind[link] == "ib"
    }
    assert len(leaves) == 1


def test_a_third_level_joins_what_two_cannot() -> None:
    made = fat_tree(Servers(128, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 16)
    assert "three levels" in made.name
    with pytest.raises(TopologyError, match="more than three levels of radix 8"):
        fat_tree(Servers(128, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8)


@pytest.mark.parametrize("oversubscription", [1.0, 3.0])
def test_three_levels_are_oversubscribed_at_their_leaves_alone(oversubscription: float) -> None:
    down = int(16 * oversubscription / (1 + oversubscription))
    made = fat_tree(Servers(32 * down, 1, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 16, oversubscription)
    assert "three levels" in made.name
    assert bandwidth_between(made, "leaf", "spine") == pytest.approx(32 * down * 50.0 / oversubscription)
    assert bandwidth_between(made, "spine", "core") == pytest.approx(bandwidth_between(made, "leaf", "spine"))


@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize("builder", [dual_plane, dual_tor])
def test_losing_one_leaf_of_two_cuts_nobody_off(builder, rails: bool) -> None:
    made = builder(SERVERS, 32, 1.0, rails)
    leaf = next(name for name in made.nodes if name.startswith("leaf"))
    keep = np.ones(made.links, dtype=bool)
    keep[made.links_of_node(leaf)] = False
    assert len(made.keep(keep).parts()) == 1
    assert bandwidth_between(made, "gpu", "leaf") == 128 * 50.0
    # without servers' own links and GPUs' transit, planes meet nowhere, and leaves of dual ToRs under their spines
    outside = made.keep(np.array([kind == "ib" for kind in made.kind]))
    inner = outside.keep((outside.source >= made.ranks) & (outside.target >= made.ranks))
    switches = [i for i, name in enumerate(made.nodes) if not name.startswith(("gpu", "nvswitch"))]
    graph = networkx.Graph(zip(inner.source.tolist(), inner.target.tolist(), strict=True))
    assert sorted(graph) == switches
    assert networkx.number_connected_components(graph) == (2 if builder is dual_plane else 1)


def test_nics_stand_behind_pcie() -> None:
    made = fat_tree(Servers(2, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0), lanes=Port(64.0, 0.0, "nic")))
    assert [made.link_name(link) for link in made.links_of_node("nic9")] == [
        "gpu9->nic9",
        "nic9->leaf0",
        "nic9->gpu9",
        "leaf0->nic9",
    ]
    assert bandwidth_between(made, "gpu", "nic") == 16 * 64.0
    assert bandwidth_between(made, "nic", "leaf") == 16 * 50.0
    shared = fat_tree(Servers(2, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0), nics=4, lanes=Port(64.0, 0.0, "nic")))
    assert shared.find("gpu3->nic1").size == 1
    assert bandwidth_between(shared, "nic", "leaf") == 8 * 50.0


def test_a_dragonfly_has_one_cable_between_every_two_groups() -> None:
    made = dragonfly(SERVERS, 4, 2, 100.0, 200.0)
    assert sum(made.bandwidth_gbps == 100.0) == 4 * 3
    with pytest.raises(TopologyError, match="16 servers do not divide over 3 groups"):
        dragonfly(SERVERS, 3, 1, 100.0, 200.0)
