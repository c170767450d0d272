"""The formulas of collectives: their bandwidth terms in closed form, their limits, and what must grow with what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opcast.simulator.network.law import Groups, Tuning, candidates, choice, collective_us

IDEAL = Tuning(ring=1.0, exchange=1.0, network=1.0, far_exchange=1.0, copy=np.inf)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
HUGE = 1e13  # bytes: latency no longer counts


def group(ranks: float, per_node: float, inside: float = 450.0, outside: float = 50.0, **more) -> Groups:
    return Groups(np.array([float(ranks)]), np.array([float(per_node)]), inside, outside, **more)


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
    time = collective_us(kind, np.array([HUGE]), group(ranks, per_node), IDEAL, ring)[0]
    assert HUGE / time / 1e3 == pytest.approx(gbps, rel=1e-3)


def test_a_tree_over_two_nodes_sends_each_byte_once_each_way() -> None:
    ring, tree = (
        collective_us("all_reduce", np.array([HUGE]), group(2, 1), IDEAL, name)[0] for name in ("ring", "tree")
    )
    assert tree == pytest.approx(ring / 0.92, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_costs_nothing_and_no_bytes_cost_latency_only(kind: str) -> None:
    assert collective_us(kind, np.array([1e9]), group(1, 1), Tuning())[0] == 0.0
    floor = collective_us(kind, np.array([0.0]), group(16, 8), Tuning())[0]
    assert 5.0 < floor < 100.0


sizes = st.floats(0.0, 1e10)
layouts = st.sampled_from([(2, 2), (8, 8), (16, 8), (2, 1), (64, 1), (64, 2), (1024, 8), (96, 8)])


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, st.floats(1.0, 10.0), layouts)
def test_more_bytes_never_take_less(kind: str, size: float, factor: float, layout: tuple[int, int]) -> None:
    times = [collective_us(kind, np.array([s]), group(*layout), Tuning(nvls=0.55))[0] for s in (size, size * factor)]
    assert times[0] <= times[1] * (1 + 1e-12)


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, layouts, st.floats(1.0, 4.0))
def test_faster_links_never_take_longer(kind: str, size: float, layout: tuple[int, int], factor: float) -> None:
    slow, fast = (
        collective_us(kind, np.array([size]), group(*layout, inside=450 * f, outside=50 * f), Tuning(nvls=0.55))[0]
        for f in (1.0, factor)
    )
    assert fast <= slow * (1 + 1e-12)


@settings(deadline=None)
@given(st.sampled_from(KINDS), sizes, layouts)
def test_the_fastest_of_all_algorithms_answers(kind: str, size: float, layout: tuple[int, int]) -> None:
    costs = candidates(kind, np.array([size]), group(*layout), Tuning())
    best = collective_us(kind, np.array([size]), group(*layout), Tuning())[0]
    assert best == min(cost[0] for cost in costs.values())
    assert costs[choice(kind, np.array([size]), group(*layout), Tuning())[0]][0] == best


def test_few_bytes_go_by_ll_and_trees_and_many_by_simple_rings_or_switches() -> None:
    across, inside = group(512, 8), group(8, 8)
    assert choice("all_reduce", np.array([1024.0]), across, Tuning()) == ["tree/LL"]
    assert choice("all_reduce", np.array([1e9]), across, Tuning(nvls=0.0))[0].endswith("/Simple")
    assert choice("all_reduce", np.array([1e9]), inside, Tuning(nvls=0.55)) == ["nvls/Simple"]
    assert choice("all_gather", np.array([1024.0]), across, Tuning()) == ["ring/LL"]


def test_switches_that_reduce_halve_the_bytes_of_large_groups() -> None:
    plain, reducing = (
        collective_us("all_reduce", np.array([HUGE]), group(64, 1, in_network=each), IDEAL)[0] for each in (False, True)
    )
    assert reducing == pytest.approx(plain / (2 * 63 / 64), rel=1e-3)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="all_gather has no algorithm 'tree'; it has ring/LL"):
        collective_us("all_gather", np.array([1.0]), group(8, 8), Tuning(), "tree")
