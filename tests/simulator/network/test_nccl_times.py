"""The formulas of collectives: their bandwidth terms in closed form, their limits, and what must grow with what."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import known_clusters, load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.nccl import GENERATIONS, GroupShapes, algorithm_names, estimates
from opcast.simulator.network.nccl_times import Tuning, candidates, collective_us, list_choices
from opcast.simulator.network.tunings import PCIE_TUNINGS, TUNINGS

IDEAL = Tuning(ring=1.0, exchange=1.0, network=1.0, far_exchange=1.0, copy=np.inf)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
HUGE = 1e13  # bytes: latency no longer counts
KIB, MIB = 2.0**10, 2.0**20


def group(ranks: float, per_node: float, link: float = 450.0, nic: float = 50.0, **more) -> GroupShapes:
    return GroupShapes(np.array([float(ranks)]), np.array([float(per_node)]), link, nic, **more)


def us(kind: str, size: float, groups: GroupShapes, tuning: Tuning, algorithm: str = "") -> float:
    return float(collective_us(kind, np.array([size]), groups, tuning, algorithm)[0])


@pytest.mark.parametrize(
    ("kind", "ranks", "per_node", "gbps"),
    [
        ("all_reduce", 8, 8, 450 / (2 * 7 / 8)),
        ("all_reduce", 64, 8, 8 * 50 / (2 * 63 / 64)),  # eight rings, each in and out by its own NIC
        ("all_reduce", 64, 1, 50 / (2 * 63 / 64)),
        ("all_reduce", 64, 2, 100 / (2 * 63 / 64)),
        ("all_gather", 64, 8, 8 * 50 / (63 / 64)),
        ("reduce_scatter", 16, 1, 50 / (15 / 16)),
        ("all_to_all", 8, 8, 450 / (7 / 8)),
        ("all_to_all", 64, 8, 50 / (56 / 64)),
        ("broadcast", 32, 8, 400),
        ("send_recv", 4, 1, 50),
        ("send_recv", 4, 4, 450),
    ],
)
def test_large_messages_move_at_the_rate_of_the_algorithm(kind: str, ranks: int, per_node: int, gbps: float) -> None:
    ring = "" if kind in ("all_to_all", "send_recv") else "ring"
    assert HUGE / us(kind, HUGE, group(ranks, per_node), IDEAL, ring) / 1e3 == pytest.approx(gbps, rel=1e-3)


def test_a_tree_over_two_nodes_sends_each_byte_once_each_way() -> None:
    ring, tree = (us("all_reduce", HUGE, group(2, 1), IDEAL, name) for name in ("ring/Simple", "tree/Simple"))
    assert tree == pytest.approx(ring / 0.92, rel=1e-3)


def test_waits_and_moves_inside_nodes_hide_each_other_as_a_norm_and_hops_between_them_do_not() -> None:
    def ring_us(size: float, per_node: int, overlap: float, step_us: float = 5.0) -> float:
        tuning = dataclasses.replace(IDEAL, bulk_us=0.0, overlap=overlap, step_us=step_us)
        return us("all_reduce", size, group(8, per_node), tuning, "ring/Simple")

    waits_us, both_us = ring_us(0.0, 8, 1.0), ring_us(8 * MIB, 8, 1.0)
    assert 0.0 < waits_us < both_us
    assert ring_us(8 * MIB, 8, 2.0) == pytest.approx(np.hypot(waits_us, both_us - waits_us))
    waits_us, near_us = ring_us(0.0, 4, 1.0, 10.0), ring_us(0.0, 4, 1.0, 20.0) - ring_us(0.0, 4, 1.0, 10.0)
    bytes_us, far_us = ring_us(8 * MIB, 4, 1.0, 10.0) - waits_us, waits_us - near_us
    assert ring_us(8 * MIB, 4, 2.0, 10.0) == pytest.approx(np.hypot(near_us, bytes_us) + far_us)
    assert ring_us(8 * MIB, 4, 0.8, 10.0) == ring_us(8 * MIB, 4, 1.0, 10.0)  # never more than the sum


@pytest.mark.parametrize("name", ["a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200_sxm"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_twice_the_bytes_take_little_more_than_twice_as_long_where_protocols_hand_over(kind: str, name: str) -> None:
    """B200's table of one node has a step there, too: 44 us for 8 MiB, 104 for 16; by NCCL's table 256 A100 on AMD's
    hosts take LL128 for 4 GiB alone."""
    device = load_device(name)
    for ranks in (16, 64, 256):
        groups = group(ranks, 8, device.link_gbps, 50.0, generation=device.architecture)
        taken = np.array([us(kind, MIB * 2.0**power, groups, TUNINGS[name]) for power in range(14)])
        assert (taken[1:] <= 2.7 * taken[:-1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_costs_nothing_and_no_bytes_cost_latency_only(kind: str) -> None:
    assert us(kind, 1e9, group(1, 1), Tuning()) == 0.0
    assert 5.0 < us(kind, 0.0, group(16, 8), Tuning()) < 100.0


sizes = st.floats(0.0, 1e10)
layouts = st.sampled_from([(2, 2), (8, 8), (16, 8), (2, 1), (64, 1), (64, 2), (1024, 8), (96, 8)])
tunings = st.sampled_from([Tuning(nvls=0.55), *TUNINGS.values(), *PCIE_TUNINGS.values()])
generations = st.sampled_from(sorted(GENERATIONS))


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, st.floats(1.0, 10.0), layouts, tunings, generations)
def test_more_bytes_never_take_less_by_one_algorithm(
    kind: str, size: float, factor: float, layout: tuple[int, int], tuning: Tuning, generation: str
) -> None:
    groups = group(*layout, generation=generation)
    small, large = (candidates(kind, np.array([s]), groups, tuning) for s in (size, size * factor))
    for name in small:
        if not name.startswith("nvls"):  # larger chunks make its turns fewer
            assert small[name][0] <= large[name][0] * (1 + 1e-12)


@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize("name", known_clusters())
def test_a_bigger_message_is_hardly_faster_where_protocols_hand_over(name: str, nodes: int) -> None:
    """NCCL keeps LL for too long at times: its own table of H200 falls to 0.81 in one node."""
    cluster = dataclasses.replace(load_cluster(name), nodes=nodes)
    engine = NetworkEngine(load_device(cluster.device), cluster)
    size = 2.0 ** np.arange(8, 32, 0.25)
    for kind in KINDS:
        columns = {"size_bytes": size, "ranks": np.full(len(size), cluster.devices)}
        groups = engine.groups({**columns, "ranks_per_node": np.full(len(size), cluster.devices_per_node)})
        taken = collective_us(kind, size, groups, engine.tuning)
        assert (np.maximum.accumulate(taken) <= 1.45 * taken).all(), kind


def test_between_nodes_the_maker_of_the_processors_says_how_long_ll_is_kept() -> None:
    """NCCL's ``llMaxBws`` and ``getNetOverhead``: "for multi-node, we look at CPU type"; inside a node at the GPU."""
    size = MIB * 2.0 ** np.arange(-4, 6)

    def last_by_ll(host: str, ranks: float, generation: str) -> float:
        many = np.full(len(size), ranks)
        groups = GroupShapes(many, np.full(len(size), 8.0), 900.0, 50.0, generation=generation, host=host)
        return max(size[[name == "ring/LL" for name in list_choices("all_gather", size, groups)]])

    for generation in ("hopper", "blackwell"):
        assert last_by_ll("amd", 16.0, generation) < last_by_ll("intel", 16.0, generation)
        assert last_by_ll("arm", 16.0, generation) == last_by_ll("intel", 16.0, generation)
        assert last_by_ll("amd", 8.0, generation) == last_by_ll("intel", 8.0, generation)
    assert last_by_ll("intel", 32.0, "hopper") == last_by_ll("intel", 32.0, "blackwell")


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, layouts, st.floats(1.0, 4.0), tunings)
def test_faster_links_never_take_longer_by_one_algorithm(
    kind: str, size: float, layout: tuple[int, int], factor: float, tuning: Tuning
) -> None:
    slow, fast = (
        candidates(kind, np.array([size]), group(*layout, link=450 * f, nic=50 * f), tuning) for f in (1.0, factor)
    )
    assert all(fast[name][0] <= slow[name][0] * (1 + 1e-12) for name in slow)


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, layouts, generations, st.sampled_from(("nvlink", "pcie")))
def test_what_nccl_believes_to_be_fastest_answers(
    kind: str, size: float, layout: tuple[int, int], generation: str, inside: str
) -> None:
    groups = group(*layout, generation=generation, inside=inside)
    believed = estimates(kind, np.array([size]), groups)
    taken = list_choices(kind, np.array([size]), groups)[0]
    assert believed[taken][0] == min(cost[0] for cost in believed.values())
    assert us(kind, size, groups, Tuning()) == candidates(kind, np.array([size]), groups, Tuning())[taken][0]


def test_few_bytes_go_by_ll_and_trees_and_many_by_simple_rings_or_switches() -> None:
    across, inside, old = group(512, 8), group(8, 8), group(512, 8, generation="ampere")
    assert list_choices("all_reduce", np.array([1024.0]), across) == ["tree/LL"]
    assert list_choices("all_reduce", np.array([1e10]), old) == ["ring/Simple"]
    assert list_choices("all_reduce", np.array([1e9]), inside) == ["nvls/Simple"]
    assert list_choices("all_gather", np.array([1024.0]), across) == ["ring/LL"]


@pytest.mark.parametrize(
    ("kind", "ranks", "generation", "link", "switches"),
    [  # where nccl-tests shows bus bandwidth drop, 2.27 on A100 and 2.29 on the others
        ("all_gather", 4, "hopper", 450, {2 * MIB: "ring/LL", 4 * MIB: "ring/Simple"}),
        ("all_gather", 8, "hopper", 450, {4 * MIB: "ring/LL", 8 * MIB: "ring/LL128", 32 * MIB: "ring/Simple"}),
        ("all_reduce", 8, "hopper", 450, {1 * MIB: "ring/LL", 2 * MIB: "nvls/Simple"}),
        ("all_gather", 8, "blackwell", 900, {8 * MIB: "ring/LL", 16 * MIB: "ring/Simple"}),
        ("all_reduce", 4, "blackwell", 900, {4 * MIB: "ring/LL", 8 * MIB: "ring/Simple"}),
        ("all_reduce", 2, "ampere", 300, {512 * KIB: "ring/LL", 1 * MIB: "ring/Simple"}),
        ("reduce_scatter", 4, "ampere", 300, {1 * MIB: "ring/LL", 2 * MIB: "ring/Simple"}),
    ],
)
def test_protocols_hand_over_where_measurements_show_it(
    kind: str, ranks: int, generation: str, link: float, switches: dict[float, str]
) -> None:
    size = np.array(list(switches))
    many = np.full(len(size), float(ranks))
    assert list_choices(kind, size, GroupShapes(many, many, link, 1.0, generation=generation)) == list(
        switches.values()
    )


@pytest.mark.parametrize(("ranks", "algorithm"), [(4, "ring"), (5, "ring"), (6, "nvls"), (7, "nvls"), (8, "nvls")])
def test_switches_of_b200_reduce_from_six_ranks_on(ranks: int, algorithm: str) -> None:
    # nccl-tests with NVLS on, largest buffers: rings for four and five GPUs, NVLS for six and more
    taken = list_choices("all_reduce", np.array([64 * MIB]), group(ranks, ranks, 900, generation="blackwell"))
    assert taken[0].startswith(algorithm)


def test_what_nccl_is_told_to_take_is_taken_where_it_is_there() -> None:
    told = group(16, 8, algorithm="tree", protocol="LL128")
    assert list_choices("all_reduce", np.array([1e9]), told) == ["tree/LL128"]
    assert list_choices("all_gather", np.array([1e9]), told) == ["ring/LL128"]
    assert list_choices("all_to_all", np.array([1e9]), told) == list_choices(
        "all_to_all", np.array([1e9]), group(16, 8)
    )
    assert list_choices("all_reduce", np.array([1e9]), group(2, 2, algorithm="nvls"))[0].startswith("ring")
    assert list_choices("all_to_all", np.array([1e9]), group(8, 8, protocol="LL")) == ["direct/LL"]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "send_recv"])
def test_a_quarter_of_the_channels_carries_a_quarter(kind: str) -> None:
    all_of_them, few = (us(kind, HUGE, group(8, 8, channels=each, algorithm="ring"), IDEAL) for each in (0, 6))
    assert few == pytest.approx(4 * all_of_them, rel=1e-3)
    assert us(kind, HUGE, group(8, 8, channels=1000, algorithm="ring"), IDEAL) == all_of_them


def test_ll_takes_as_long_until_all_channels_are_in_use() -> None:
    size = np.array([64.0, 128.0, 256.0, 1024.0, 4096.0]) * KIB
    times = collective_us("all_reduce", size, group(8, 8), TUNINGS["h100_sxm"], "ring/LL")
    assert times[2] / times[0] < 1.02
    assert times[4] / times[3] > 2.0


def test_switches_that_reduce_halve_the_bytes_of_large_groups() -> None:
    plain, reducing = (
        us("all_reduce", HUGE, group(64, 1, in_network=each), IDEAL, name)
        for each, name in ((False, "ring"), (True, "collnet"))
    )
    assert reducing == pytest.approx(plain / (2 * 63 / 64), rel=1e-3)


def test_what_cannot_run_takes_for_ever_and_an_unknown_algorithm_is_named() -> None:
    assert np.isinf(us("all_reduce", 1e6, group(2, 2), Tuning(), "nvls"))
    assert us("all_reduce", 1e6, group(1, 1), Tuning(), "nvls") == 0.0
    with pytest.raises(ValueError, match="all_gather has no algorithm 'tree'; it has ring/LL"):
        us("all_gather", 1.0, group(8, 8), Tuning(), "tree")
    assert algorithm_names("all_reduce", group(8, 8, inside="pcie")) == [
        "ring/LL",
        "ring/Simple",
        "tree/LL",
        "tree/Simple",
    ]


def test_constants_are_all_of_them_used() -> None:
    size = np.repeat(2.0 ** np.arange(8, 33, 2), 4)
    ranks, per_node = np.tile([2.0, 8.0, 16.0, 64.0], 13), np.tile([2.0, 8.0, 8.0, 8.0], 13)
    start = Tuning(nvls=0.55, beyond=0.5, crowd=0.5)

    def times(tuning: Tuning) -> np.ndarray:
        over = [GroupShapes(ranks, per_node, 450.0, 50.0, inside) for inside in ("nvlink", "pcie")]
        return np.concatenate([each for g in over for k in KINDS for each in candidates(k, size, g, tuning).values()])

    usual = times(start)
    for field in dataclasses.fields(Tuning):
        changed = dataclasses.replace(start, **{field.name: getattr(start, field.name) * 1.5})
        assert not np.array_equal(times(changed), usual), field.name


def test_cards_on_pcie_share_links_of_their_host() -> None:
    shared = Tuning(beyond=0.5, crowd=1.0, ring=1.0, copy=np.inf)
    moved = [HUGE * (n - 1) / n / us("all_gather", HUGE, group(n, n, 32, inside="pcie"), shared) for n in (2, 4, 8)]
    assert moved[1] == pytest.approx(moved[0] / 2, rel=1e-3)
    assert moved[2] == pytest.approx(moved[0] / 4, rel=1e-3)
