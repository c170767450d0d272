"""Which devices form the process groups of a plan, under a rank order: neighbours in a group need not be in a node.

Groups are given as in :class:`..question.plan.Group`: ``ranks`` members at a distance of ``stride``. The order says on
which device of the cluster each rank runs; the usual one is rank i on device i.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .topology import TopologyError


def process_groups(
    devices: int, ranks: int, stride: int = 1, order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Every group of ``ranks`` members ``stride`` apart, as devices. TopologyError when they do not divide up."""
    if ranks < 1 or stride < 1 or devices % (ranks * stride):
        raise TopologyError(f"groups of {ranks} ranks, {stride} apart, do not divide {devices} devices")
    device_of_rank = np.arange(devices) if order is None else np.asarray(order, dtype=np.int64)
    if sorted(device_of_rank.tolist()) != list(range(devices)):
        raise TopologyError(f"a rank order names each of the {devices} devices once")
    members = device_of_rank.reshape(-1, ranks, stride).swapaxes(1, 2).reshape(-1, ranks)
    return [tuple(group) for group in members.tolist()]


def order_by_node(members: np.ndarray, devices_per_node: int) -> np.ndarray:
    """The same groups as NCCL orders them: ranks of a node next to each other, nodes as they come [groups, ranks]."""
    nodes = members // devices_per_node
    order = np.argsort(nodes, axis=1, kind="stable")
    position = np.broadcast_to(np.arange(members.shape[1]), members.shape)
    in_order = np.take_along_axis(nodes, order, axis=1)
    begins = np.ones(members.shape, dtype=bool)
    begins[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    start = np.maximum.accumulate(np.where(begins, position, 0), axis=1)
    first = np.empty_like(order)  # where the node of each rank came first
    np.put_along_axis(first, order, np.take_along_axis(order, start, axis=1), axis=1)
    key = first * (int(members.max(initial=0)) + 1) + members
    return np.take_along_axis(members, np.argsort(key, axis=1), axis=1)


def ranks_per_node(groups: np.ndarray, devices_per_node: int) -> np.ndarray:
    """How many members of a group share a node, for every group and each of its nodes [pairs of group and node]."""
    nodes = np.sort(groups // devices_per_node, axis=1)
    begins = np.ones(nodes.shape, dtype=bool)
    begins[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
    return np.diff(np.flatnonzero(begins), append=nodes.size)


def fills_nodes(members: np.ndarray, per_node: int, devices_per_node: int) -> bool:
    """Whether all groups hold exactly ``per_node`` ranks of every node that they are on, next to each other."""
    if members.shape[1] % per_node or (ranks_per_node(members, devices_per_node) != per_node).any():
        return False
    nodes = (members // devices_per_node).reshape(-1, per_node)
    return bool((nodes == nodes[:, :1]).all())
