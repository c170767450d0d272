"""Collectives on explicit links: closed forms alone, contention together, and ASTRA-sim's times beside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.network.collectives import ALGORITHMS, algorithms, plan
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.packet import with_algorithm
from opcast.simulator.network.routing import Router
from opcast.simulator.network.shapes import (
    Dimension,
    Port,
    Servers,
    dragonfly,
    dual_plane,
    fat_tree,
    product,
)
from opcast.simulator.network.topology import Topology, TopologyError, read_fabric

GIB = 2.0**30
SWITCH = Fabric(product([Dimension("switch", 8, 50.0, 0.5, "ib")]))
RING = Fabric(product([Dimension("ring", 8, 50.0, 0.5)]))
MESH = Fabric(product([Dimension("fully_connected", 8, 50.0, 0.5)]))


def expected(bytes_a_link: float, hops: float) -> float:
    return bytes_a_link / 50e3 + hops


@pytest.mark.parametrize(
    ("fabric", "collective", "algorithm", "bytes_a_link", "latency"),
    [
        (SWITCH, "all_reduce", "ring", 2 * 7 / 8, 14 * 1.0),
        (RING, "all_reduce", "ring", 2 * 7 / 8, 14 * 0.5),
        (RING, "all_gather", "ring", 7 / 8, 7 * 0.5),
        (SWITCH, "reduce_scatter", "ring", 7 / 8, 7 * 1.0),
        (SWITCH, "all_reduce", "halving_doubling", 2 * 7 / 8, 6 * 1.0),
        (MESH, "all_reduce", "direct", 2 / 8, 2 * 0.5),
        (MESH, "all_to_all", "direct", 1 / 8, 0.5),
        (SWITCH, "all_to_all", "direct", 7 / 8, 1.0),
        (SWITCH, "all_to_all", "pairwise", 7 / 8, 1.0),
        (SWITCH, "send_recv", "ring", 1.0, 1.0),
        (RING, "broadcast", "ring", 1.0, 7 * 0.5),
    ],
)
def test_alone_on_an_ideal_fabric_a_collective_takes_its_closed_form(
    fabric: Fabric, collective: str, algorithm: str, bytes_a_link: float, latency: float
) -> None:
    time = fabric.latency_us(collective, range(8), GIB, algorithm)
    assert time == pytest.approx(expected(bytes_a_link * GIB, latency), rel=1e-9)
    _, end, _ = fabric.flow([Transfer(collective, tuple(range(8)), GIB, algorithm)])
    assert end[0] == pytest.approx(time, rel=0.01)


def switched(n: int) -> Fabric:
    return Fabric(product([Dimension("switch", n, 50.0, 0.5, "ib")]))


def ringed(n: int) -> Fabric:
    return Fabric(product([Dimension("ring", n, 50.0, 0.5)]))


def meshed(n: int) -> Fabric:
    return Fabric(product([Dimension("fully_connected", n, 50.0, 0.5)]))


def power(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def levels(n: int) -> int:
    return (n - 1).bit_length()


def tree_bytes(n: int) -> float:
    """Of the buffer over the fullest link: an inner node of one tree is a leaf of the other."""
    return {2: 1.0, 3: 1.5}.get(n, 2.0)


# fabric, algorithm, and of n ranks: what share of the buffer the fullest link carries, hops one after the other
CLOSED = {
    ("all_reduce", "ring", switched): lambda n: (2 * (n - 1) / n, 2 * (n - 1) * 1.0),
    ("all_reduce", "ring", ringed): lambda n: (2 * (n - 1) / n, 2 * (n - 1) * 0.5),
    ("all_gather", "ring", ringed): lambda n: ((n - 1) / n, (n - 1) * 0.5),
    ("reduce_scatter", "ring", switched): lambda n: ((n - 1) / n, (n - 1) * 1.0),
    ("all_reduce", "tree", switched): lambda n: (tree_bytes(n), 2 * levels(n) * 1.0),
    ("all_reduce", "direct", meshed): lambda n: (2 / n, 2 * 0.5),
    ("all_reduce", "direct", switched): lambda n: (2 * (n - 1) / n, 2 * 1.0),
    ("all_to_all", "direct", meshed): lambda n: (1 / n, 0.5),
    ("all_to_all", "pairwise", switched): lambda n: ((n - 1) / n, 1.0),
    ("broadcast", "ring", switched): lambda n: (1.0, (n - 1) * 1.0),
    ("reduce", "ring", switched): lambda n: (1.0, (n - 1) * 1.0),
    ("gather", "direct", switched): lambda n: ((n - 1) / n, 1.0),
    ("scatter", "direct", switched): lambda n: ((n - 1) / n, 1.0),
    ("send_recv", "ring", switched): lambda n: (1.0, 1.0),
    ("all_reduce", "halving_doubling", switched): lambda n: (
        2 * (power(n) - 1) / power(n) + (2 if n > power(n) else 0),
        2 * (levels(power(n)) + (n > power(n))),
    ),
}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(list(CLOSED)), st.integers(2, 64), st.floats(0.0, 30.0), st.randoms())
def test_flow_and_formula_take_the_closed_form(case, n: int, exponent: float, random) -> None:
    collective, algorithm, kind = case
    share, hops = CLOSED[case](n)
    fabric, size = kind(n), 2.0**exponent
    group = list(range(n))
    if kind is not ringed:
        random.shuffle(group)  # places on a switch or a full mesh are alike
    wanted = share * size / 50e3 + hops
    assert fabric.latency_us(collective, group, size, algorithm) == pytest.approx(wanted, rel=1e-9)
    for fidelity in ("flow", "analytical"):
        found = simulate(fabric, [Transfer(collective, tuple(group), size, algorithm)], fidelity)
        assert found.total_us == pytest.approx(wanted, rel=0.01)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.integers(2, 8), st.floats(0.0, 30.0), st.booleans())
def test_two_levels_take_the_sum_of_their_closed_forms(near: int, far: int, exponent: float, whole: bool) -> None:
    fabric = Fabric(
        product([Dimension("switch", near, 400.0, 0.25), Dimension("switch", far, 50.0, 0.5)]), per_node=near
    )
    size, collective = 2.0**exponent, "all_reduce" if whole else "all_gather"
    turns = 2 if whole else 1
    inside = (near - 1) / near * size / 400e3 + (near - 1) * 0.5
    between = turns * ((far - 1) / far * size / near / 50e3 + (far - 1) * 1.0)
    wanted = turns * inside + between
    assert fabric.latency_us(collective, range(near * far), size, "hierarchical") == pytest.approx(wanted, rel=1e-9)
    _, end, _ = fabric.flow([Transfer(collective, tuple(range(near * far)), size, "hierarchical")])
    assert end[0] == pytest.approx(wanted, rel=0.01)


@st.composite
def random_fabrics(draw) -> Topology:
    """Connected graphs of ranks and switches with cables of any rate."""
    ranks, switches = draw(st.integers(2, 8)), draw(st.integers(1, 5))
    names = [f"gpu{i}" for i in range(ranks)] + [f"s{i}" for i in range(switches)]
    cables = {(f"s{draw(st.integers(0, i - 1))}", f"s{i}") for i in range(1, switches)}
    cables |= {(f"gpu{i}", f"s{draw(st.integers(0, switches - 1))}") for i in range(ranks)}
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda pair: pair[0] < pair[1])
    cables |= draw(st.sets(pairs, max_size=4))
    links = [
        {"from": a, "to": b, "bandwidth_gbps": draw(st.sampled_from([10, 25, 50])), "latency_us": 1}
        for a, b in sorted(cables)
    ]
    return read_fabric({"nodes": [{"name": n, "rank": n.startswith("gpu")} for n in names], "links": links})


INSIDE, OUTSIDE = Port(400.0, 0.5, "nvlink"), Port(50.0, 1.0)
BUILT = [
    product([Dimension("torus", 9, 50.0), Dimension("ring", 3, 25.0)]),
    product([Dimension("king_mesh", 9, 50.0)]),
    fat_tree(Servers(4, 4, INSIDE, OUTSIDE, lanes=Port(60.0, 0.0, "nic")), 8, 2.0, rails=True),
    fat_tree(Servers(8, 4, INSIDE, OUTSIDE, nics=2), 4),
    dual_plane(Servers(4, 2, INSIDE, OUTSIDE), 8),
    dragonfly(Servers(8, 2, INSIDE, OUTSIDE), 4, 2, 25.0, 25.0),
]


@settings(deadline=None, max_examples=80)
@given(
    st.one_of(st.sampled_from(BUILT), random_fabrics()), st.sampled_from(["adaptive", "ecmp", "shortest"]), st.data()
)
def test_bytes_are_conserved_at_every_node_and_over_all_links(topology: Topology, policy: str, data) -> None:
    fabric = Fabric(topology, policy, server=data.draw(st.sampled_from([0, 2, 4])))
    collective = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    group = data.draw(st.permutations(range(topology.ranks)))[: data.draw(st.integers(1, topology.ranks))]
    able = [name for name in fabric.algorithms(collective, group) if name in ALGORITHMS[collective]]
    algorithm = data.draw(st.sampled_from(able))
    size = 1e6
    _, _, run = fabric.flow([Transfer(collective, tuple(group), size, algorithm)])
    moves = [move for phase in fabric.plan(collective, algorithm, tuple(group)) for move in phase]
    wanted, most = np.zeros(len(topology.nodes)), 0.0
    for move in moves:
        np.add.at(wanted, move.target, move.size_bytes * size)
        np.add.at(wanted, move.source, -move.size_bytes * size)
        paths = Router(topology, "shortest").paths(move.source, move.target)
        most += len(paths.links) * move.size_bytes * size
    gained = np.zeros(len(topology.nodes))
    np.add.at(gained, topology.target, run.carried_bytes)
    np.add.at(gained, topology.source, -run.carried_bytes)
    assert gained == pytest.approx(wanted, abs=1.0)  # switches keep nothing, ranks what is theirs
    if topology.of_kind(("nvlink",)).any():
        assert run.carried_bytes.sum() >= most * 0.5  # equally cheap ways may have fewer links
    else:
        assert run.carried_bytes.sum() == pytest.approx(most, rel=1e-6)


def test_a_double_tree_moves_at_most_twice_the_bytes_and_fewer_hops() -> None:
    fabric = Fabric(product([Dimension("switch", 64, 50.0, 0.5, "ib")]))
    cost = fabric.cost("all_reduce", "tree", range(64))
    assert cost.us_per_byte * 50e3 == pytest.approx(2.0)
    assert cost.latency_us == 12.0


def test_eight_gpus_of_a_server_use_eight_nics() -> None:
    fabric = Fabric(fat_tree(Servers(4, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0))), per_node=8)
    whole = fabric.cost("all_reduce", "ring", range(32)).us_per_byte
    rail = fabric.cost("all_reduce", "ring", range(0, 32, 8)).us_per_byte
    assert whole == pytest.approx(2 * 31 / 32 / (8 * 50e3), rel=1e-6)
    assert rail == pytest.approx(2 * 3 / 4 / 50e3, rel=1e-6)


SERVERS = fat_tree(Servers(4, 8, Port(400.0, 0.5, "nvlink"), Port(50.0, 1.0)), rails=True)


def test_switches_of_a_server_halve_what_its_links_carry() -> None:
    fabric = Fabric(SERVERS, per_node=8, nvls=1.0)
    assert fabric.cost("all_reduce", "nvls", range(8)).us_per_byte == pytest.approx(1 / 400e3)
    assert fabric.cost("all_reduce", "ring", range(8)).us_per_byte == pytest.approx(1.75 / 400e3)
    assert fabric.fastest("all_reduce", range(8), GIB) == "nvls"
    assert Fabric(SERVERS, per_node=8).fastest("all_reduce", range(8), GIB) != "nvls"


def test_switches_of_the_fabric_send_each_byte_out_once() -> None:
    fabric = Fabric(SERVERS, per_node=8, nvls=1.0, in_network=True)
    assert fabric.cost("all_reduce", "collnet", range(32)).us_per_byte == pytest.approx(1 / (8 * 50e3))
    assert fabric.cost("all_reduce", "collnet", range(0, 32, 8)).us_per_byte == pytest.approx(1 / 50e3)
    one, other = (fabric.cost("all_reduce", name, range(32)).us_per_byte for name in ("nvls", "ring"))
    assert one == pytest.approx(other, rel=0.1)  # trees between servers move as much as rings
    assert "collnet" not in Fabric(SERVERS, per_node=8, nvls=1.0).algorithms("all_reduce", range(32))


def test_switches_of_the_fabric_reduce_for_servers_whose_own_do_not() -> None:
    """Before Hopper GPUs of a server exchange shares directly: 7/8 of the buffer over NVLink there, and back."""
    fabric = Fabric(SERVERS, per_node=8, in_network=True)
    assert "collnet" in fabric.algorithms("all_reduce", range(32))
    assert fabric.cost("all_reduce", "collnet", range(32)).us_per_byte == pytest.approx(1.75 / 400e3)
    assert fabric.fastest("all_reduce", range(32), GIB) == "collnet"


def test_packets_go_from_rank_to_rank() -> None:
    fabric = Fabric(SERVERS, per_node=8, nvls=1.0)
    free = Transfer("all_reduce", tuple(range(8)), GIB)
    assert fabric.algorithm(free) == "nvls"
    assert with_algorithm(fabric, free).algorithm in ("ring", "direct")
    with pytest.raises(TopologyError, match="nvls reduces in switches; name ring"):
        simulate(fabric, [free._replace(algorithm="nvls")], "packet", "no python")


def test_a_reduction_needs_a_switch() -> None:
    with pytest.raises(TopologyError, match="share no NVSwitch"):
        Fabric(product([Dimension("ring", 8, 50.0)]), per_node=8, nvls=1.0).cost("all_reduce", "nvls", range(8))
    with pytest.raises(TopologyError, match="no switch outside"):
        Fabric(product([Dimension("ring", 8, 50.0)]), in_network=True).cost("all_reduce", "collnet", range(8))


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_a_flat_ring_takes_its_closed_form_however_servers_are_laid_over_it(collective: str, per_node: int) -> None:
    fabric = Fabric(product([Dimension("ring", 16, 50.0, 0.5)]), server=per_node)
    share, steps = {"all_reduce": (30 / 16, 30), "all_gather": (15 / 16, 15), "broadcast": (1.0, 15)}[collective]
    for fidelity in ("analytical", "flow"):
        found = simulate(fabric, [Transfer(collective, tuple(range(16)), GIB / 4, "ring")], fidelity).total_us
        assert found == pytest.approx(expected(share * GIB / 4, 0.5 * steps), rel=0.01)


def test_servers_keep_a_ring_through_each_nic_where_each_gpu_has_one() -> None:
    joined = fat_tree(Servers(4, 4, Port(450.0, 0.5, "fabric"), Port(50.0, 1.0)), 8, rails=True)
    found = Fabric(joined, server=4).cost("all_reduce", "ring", range(16)).us_per_byte
    assert found == pytest.approx(30 / 16 / 4 / 50e3, rel=0.01)


def test_the_order_of_ranks_matters() -> None:
    fabric = Fabric(product([Dimension("ring", 8, 50.0, 0.5)]), policy="shortest")
    good = fabric.latency_us("all_reduce", range(8), GIB, "ring")
    bad = fabric.latency_us("all_reduce", (0, 4, 1, 5, 2, 6, 3, 7), GIB, "ring")
    assert bad > 2.0 * good


def test_jobs_that_share_an_uplink_share_its_bandwidth() -> None:
    fabric = Fabric(fat_tree(Servers(2, 4, Port(450.0, 0.5, "nvlink"), Port(50.0, 0.0)), 8, 3.0))
    sends = [Transfer("send", (rank, rank + 4), 1e9) for rank in range(4)]  # 200 GB/s through uplinks of 100
    for together, gbps in ((1, 50.0), (2, 50.0), (4, 25.0)):
        assert fabric.flow(sends[:together])[1] == pytest.approx(1e6 / gbps, rel=1e-6)


def test_incast_takes_the_time_of_the_last_link() -> None:
    incast = [Transfer("send", (rank, 0), 64 * 2.0**20) for rank in range(1, 8)]
    _, end, run = SWITCH.flow(incast)
    assert end.max() == pytest.approx(7 * 64 * 2.0**20 / 50e3 + 1.0)
    assert run.carried_bytes.sum() == pytest.approx(2 * 7 * 64 * 2.0**20)


def test_one_transfer_waits_for_another() -> None:
    start, end, _ = SWITCH.flow([Transfer("send", (0, 1), 5e4), Transfer("send", (0, 1), 5e4, after=(0,))])
    assert start.tolist() == [0.0, end[0]]
    assert end.tolist() == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize("collective", sorted(ALGORITHMS))
def test_one_rank_costs_nothing_and_no_bytes_cost_latency_only(collective: str) -> None:
    assert SWITCH.latency_us(collective, [3], GIB) == 0.0
    assert 0.0 < SWITCH.latency_us(collective, range(8), 0.0) < 20.0
    for fidelity in ("flow", "analytical", "packet"):  # nothing is sent, so nobody has to run ns-3
        assert simulate(SWITCH, [Transfer(collective, (3,), GIB)], fidelity, "no python").end_us.tolist() == [0.0]
    for name in algorithms(collective):
        fabric = Fabric(SERVERS, per_node=8, start_us=3.0)
        alone = fabric.latency_us(collective, range(32), 0.0, name)
        assert 3.0 < alone < 500.0
        none = [Transfer(collective, tuple(range(32)), 0.0, name)]
        assert simulate(fabric, none, "flow").total_us == pytest.approx(alone)
        assert simulate(fabric, none, "analytical").total_us == pytest.approx(alone)


ONE_LEVEL = fat_tree(Servers(4, 8, Port(400.0, 0.5, "nvlink"), Port(50.0, 1.0)))
GROUPS = {  # of four servers of eight: what NCCL finds of them, and through how many NICs a server sends
    "whole": (list(range(32)), 8),
    "backwards": (list(range(31, -1, -1)), 8),
    "interleaved": ([8 * (i % 4) + i // 4 for i in range(32)], 8),
    "halves": ([8 * s + i for s in range(4) for i in range(4)], 4),
    "shifted": (list(range(4, 20)), 4),
    "rail": (list(range(0, 32, 8)), 1),
    "8 and 4": (list(range(12)), 4),
    "8 and 3": (list(range(11)), 1),
}


@pytest.mark.parametrize("name", GROUPS)
def test_any_group_uses_the_nics_of_its_servers(name: str) -> None:
    group, nics = GROUPS[name]
    fabric, n = Fabric(ONE_LEVEL, server=8, nvls=1.0, in_network=True), len(group)
    share = 2 * (n - 1) / n
    assert fabric.cost("all_reduce", "ring", group).us_per_byte == pytest.approx(share / (nics * 50e3), rel=0.01)
    for each in sorted(ALGORITHMS):
        for algorithm in fabric.algorithms(each, group):
            assert 0.0 < fabric.latency_us(each, group, GIB, algorithm) < 1e6


@pytest.mark.parametrize("root", [0, 3, 31])
def test_a_broadcast_starts_at_its_root_and_a_reduction_ends_there(root: int) -> None:
    group = [root, *(rank for rank in range(32) if rank != root)]
    fabric = Fabric(SERVERS, server=8)
    for collective, ends in (("broadcast", "source"), ("reduce", "target")):
        (moves,) = fabric.plan(collective, "ring", tuple(group))
        assert len(moves) == 8  # a chain through each NIC
        for move in moves:
            other = move.target if ends == "source" else move.source
            assert set(getattr(move, ends).tolist()) - set(other.tolist()) == {root}
            assert len(set(other.tolist())) == 31
    assert fabric.latency_us("broadcast", group, GIB, "ring") == pytest.approx(GIB / (8 * 50e3), rel=0.05)


def received(collective: str, algorithm: str, n: int) -> np.ndarray:
    total = np.zeros(n)
    for phase in plan(collective, algorithm, range(n), 1.0, 2 if algorithm == "hierarchical" else 0):
        for move in phase:
            np.add.at(total, move.target, move.size_bytes)
    return total


@settings(deadline=None)
@given(st.sampled_from(["all_gather", "reduce_scatter", "all_to_all"]), st.sampled_from([2, 4, 8, 16]), st.data())
def test_every_rank_receives_what_the_others_have_for_it(collective: str, n: int, data) -> None:
    algorithm = data.draw(st.sampled_from([a for a in algorithms(collective) if a != "hierarchical"]))
    assert received(collective, algorithm, n) == pytest.approx((n - 1) / n)


@settings(deadline=None)
@given(st.integers(2, 40))
def test_trees_reach_every_rank_and_reduce_what_each_has(n: int) -> None:
    (moves,) = plan("all_reduce", "tree", range(n), 1.0)
    for tree in moves:
        edges = set(zip(tree.source.tolist(), tree.target.tolist(), strict=True))
        assert len(edges) == 2 * (n - 1)
        assert all((b, a) in edges for a, b in edges)
        reached, before = {0}, 0
        while len(reached) > before:
            before, reached = len(reached), reached | {b for a, b in edges if a in reached}
        assert len(reached) == n


@pytest.mark.parametrize(
    ("collective", "algorithm", "group", "message"),
    [
        ("gossip", None, (0, 1), "unknown collective 'gossip'"),
        ("all_reduce", "star", (0, 1), "all_reduce has no algorithm 'star'; it has ring, tree"),
        ("all_reduce", "ring", (0, 99), "rank 99 exceeds switch.8. with 8 ranks"),
        ("all_reduce", "ring", (0, 1, 0), "names rank 0 twice"),
        ("all_gather", "halving_doubling", (0, 1, 2), "power of two"),
        ("send", None, (0, 1, 2), "a send has two ranks"),
    ],
)
def test_bad_transfers_are_named(collective: str, algorithm: str | None, group: tuple[int, ...], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        SWITCH.flow([Transfer(collective, group, 1.0, algorithm)])


SUM_GBPS = 1600.0  # memory that ASTRA-sim reads twice and writes once to sum what arrives, when chunks do not overlap


@pytest.mark.reference
def test_rings_take_the_time_of_astra_sim(reference_data: Path) -> None:
    import pandas as pd

    rows = pd.read_csv(reference_data / "truth" / "astra_collectives.csv")
    rows = rows[(rows.backend == "congestion_aware") & (rows.status == "ok") & (rows.pattern == "single_collective")]
    rows = rows[(rows.topology == "Ring") & (rows.algorithm_per_dim == "ring") & (rows.collective != "all_to_all")]
    ratios = []
    for row in rows.itertuples():
        n, gbps = int(row.npus), float(row.bandwidth_GBps_per_dim) * GIB / 1e9
        fabric = Fabric(product([Dimension("ring", n, gbps, float(row.latency_ns_per_dim) / 1e3)]), "shortest")
        cost = fabric.cost(row.collective, "ring", range(n))
        size = row.size_bytes * (n if row.collective == "all_gather" else 1)
        serial = row.active_chunks == 1  # then each chunk waits for the last, latencies and sums included
        time = cost.us_per_byte * size + cost.latency_us * (row.dataset_splits if serial else 1)
        if serial and row.collective != "all_gather":
            time += 3.0 * (n - 1) / n * size / (SUM_GBPS * 1e3)
        ratios.append(time / (row.simulated_ns / 1e3))
    assert len(ratios) > 50
    assert np.abs(np.array(ratios) - 1.0).max() < 0.10
