"""Process groups under a rank order, and what all of them together do to a fabric."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.fabric import Transfer
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.mapping import fills_nodes, order_by_node, process_groups
from opcast.simulator.network.topology import TopologyError

FABRIC = build_fabric(dataclasses.replace(load_cluster("dgx_h100"), nodes=4), load_device("h100_sxm"))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.randoms())
def test_every_device_is_in_one_group(ranks: int, stride: int, blocks: int, random) -> None:
    devices = ranks * stride * blocks
    order = list(range(devices))
    random.shuffle(order)
    groups = process_groups(devices, ranks, stride, order)
    assert sorted(device for group in groups for device in group) == list(range(devices))
    assert {len(group) for group in groups} == {ranks}


def test_members_are_a_stride_apart() -> None:
    assert process_groups(8, 2, 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert process_groups(8, 2, 1, [7, 6, 5, 4, 3, 2, 1, 0]) == [(7, 6), (5, 4), (3, 2), (1, 0)]


def test_bad_groups_and_orders_are_refused() -> None:
    with pytest.raises(TopologyError, match="groups of 3 ranks, 1 apart, do not divide 8 devices"):
        process_groups(8, 3)
    with pytest.raises(TopologyError, match="names each of the 4 devices once"):
        process_groups(4, 2, 1, [0, 0, 1, 2])


@given(st.integers(1, 6), st.integers(1, 8), st.randoms())
def test_nccl_puts_ranks_of_a_node_next_to_each_other(groups: int, ranks: int, random) -> None:
    devices = list(range(groups * ranks))
    random.shuffle(devices)
    members = np.array(devices).reshape(groups, ranks)
    found = order_by_node(members, 4)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(members, axis=1))
    for before, after in zip((members // 4).tolist(), found.tolist(), strict=True):
        nodes = list(dict.fromkeys(before))  # as they come
        assert after == sorted(after, key=lambda device: (nodes.index(device // 4), device))


def test_groups_lie_in_rows_only_where_all_nodes_hold_as_many() -> None:
    assert fills_nodes(np.array([[0, 1, 4, 5], [2, 3, 6, 7]]), 2, 4)
    assert not fills_nodes(np.array([[0, 4, 1, 5], [2, 3, 6, 7]]), 2, 4)
    assert not fills_nodes(np.array([[0, 1, 2, 4], [3, 5, 6, 7]]), 1, 4)
    assert not fills_nodes(np.array([[0, 1, 2, 3, 4, 5]]), 2, 4)


def at_once(groups: list[tuple[int, ...]], algorithm: str | None = None) -> float:
    return simulate(FABRIC, [Transfer("all_reduce", group, 2.0**28, algorithm) for group in groups]).total_us


def test_a_bad_mapping_costs_what_nvlink_would_have_carried() -> None:
    spread = np.arange(32).reshape(4, 8).T.ravel()  # neighbours in rank on different nodes
    good, bad = (at_once(process_groups(32, 4, 1, order)) for order in (None, spread))
    assert bad > 4 * good


def test_groups_on_rails_of_their_own_do_not_slow_each_other() -> None:
    groups = process_groups(32, 4, 8)
    assert at_once(groups, "ring") == pytest.approx(at_once(groups[:1], "ring"), rel=0.01)
