"""Reductions that switches carry out: NVLS in the NVSwitches of each server, SHARP-like in those of the fabric.

A reduction runs over a tree of links, the union of ways from its members to one switch: every link carries each byte
once upwards and once down again, whatever the number of members below it (Graham et al., "Scalable Hierarchical
Aggregation Protocol", COMHPC 2016).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .collectives import Phase, plan
from .distances import UNREACHABLE
from .routing import Router
from .topology import Topology, TopologyError

SWITCH_ALGORITHMS = ("nvls", "collnet")


class Tree(NamedTuple):
    """Links of a reduction, up and down, the share of the buffer that each carries, and the latency there and back.

    ``inside`` says that NVSwitches reduce, at less than the rate of their links.
    """

    links: np.ndarray
    share: float
    latency_us: float
    inside: bool


def plan_reduction(
    topology: Topology, algorithm: str, group: tuple[int, ...], per_node: int, multicast: bool = True
) -> tuple[list[Tree], Phase]:
    """Trees inside servers and, between them, trees of switches (``collnet``) or of GPUs (``nvls``), all at once.

    Groups hold ``per_node`` ranks of each server in a row; each GPU takes its share of the buffer out of the server.
    Where switches inside servers do not reduce (no ``multicast``: before Hopper), GPUs exchange their shares directly.
    TopologyError where there is no such switch.
    """
    ranks = np.asarray(group, dtype=np.int64)
    per_server = per_node if per_node > 1 and len(ranks) % per_node == 0 else 1
    servers = ranks.reshape(-1, min(per_server, len(ranks)))
    count = servers.shape[1]
    router = Router(topology, "shortest")
    trees: list[Tree] = []
    moves: Phase = []
    if count > 1 and (multicast or algorithm == "nvls"):
        trees = [_tree(router, server, find_nvswitch(topology, server), 1.0, True) for server in servers]
    elif count > 1:
        moves = [
            move for server in servers for phase in plan("all_reduce", "direct", server.tolist(), 1.0) for move in phase
        ]
    if len(servers) > 1:
        rails = [servers[:, position] for position in range(count)]
        if algorithm == "collnet":
            trees += [_tree(router, rail, _nearest_switch(router, rail), 1.0 / count, False) for rail in rails]
        else:
            moves += [move for rail in rails for move in plan("all_reduce", "tree", rail.tolist(), 1.0 / count)[0]]
    return trees, moves


def find_nvswitch(topology: Topology, server: np.ndarray) -> int:
    """The NVSwitch that all ranks of a server are on. TopologyError when there is none."""
    start, order = topology.outgoing
    shared: set[int] | None = None
    for rank in server.tolist():
        links = order[start[rank] : start[rank + 1]].tolist()
        switches = {int(topology.target[link]) for link in links if topology.kind[link] == "nvlink"}
        switches = {node for node in switches if node >= topology.ranks}
        shared = switches if shared is None else shared & switches
    if not shared:
        raise TopologyError(f"{topology.nodes[server[0]]} and its neighbours share no NVSwitch that could reduce")
    return min(shared)


def _nearest_switch(router: Router, ranks: np.ndarray) -> int:
    """The switch of the fabric that the farthest member is nearest to."""
    topology = router.topology
    nodes = np.arange(len(topology.nodes))
    costs = [router.distances.between(nodes, np.full(len(nodes), rank)) for rank in ranks.tolist()]
    farthest = np.max(costs, axis=0).astype(np.int64)
    farthest[farthest >= UNREACHABLE] = np.iinfo(np.int64).max
    inside = np.zeros(len(topology.nodes), dtype=bool)
    inside[topology.target[topology.of_kind(("nvlink", "pcie", "nic"))]] = True
    farthest[: topology.ranks] = np.iinfo(np.int64).max
    farthest[inside] = np.iinfo(np.int64).max
    best = int(np.argmin(farthest))
    if farthest[best] == np.iinfo(np.int64).max:
        raise TopologyError(f"{topology.name} has no switch outside its servers that could reduce")
    return best


def _tree(router: Router, members: np.ndarray, root: int, share: float, inside: bool) -> Tree:
    topology = router.topology
    up = router.ways(members, np.full(len(members), root))
    links = np.unique(up.links)
    down = topology.reverse[links]
    latency = 2.0 * float(up.latency_us(topology).max(initial=0.0))
    return Tree(np.concatenate([links, down]), share, latency, inside)
