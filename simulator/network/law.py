"""Collectives by formula, as NCCL times them: algorithms and protocols, latency per hop, bytes over the slowest link.

Each (algorithm, protocol) costs ``base + hops x latency + bytes / rate``; the fastest answers, as NCCL itself picks by
such a table (``src/graph/tuning.cc``: its latencies and protocol rates are used here). A ring turns through every rank
and crosses each node's NICs once a channel, so that m ranks of a node send through m NICs; a tree goes along a chain
inside the node and up and down a binary tree between nodes; NVLS lets NVSwitches reduce. Protocols: LL carries a flag
with every four bytes, LL128 one with every 120, Simple moves plain bytes and waits for them (Hu et al., "Demystifying
NCCL", arXiv 2507.04786). All arrays are [n], one entry a collective; sizes follow nccl-tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...datasets.ops import bus_factor

Array = np.ndarray
PROTOCOLS = ("LL", "LL128", "Simple")
# us before the first byte moves, then us a hop, by protocol: NCCL's own table
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
HOP_US = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
TABLE_NIC_US = 2.0  # latency of the fabric that the table's network hops include
LL_INSIDE_HOP = 1.8  # hops inside a node wait longer under LL when the group leaves the node
LL_GBPS = {"volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0), "hopper": (141.0, 45.0, 35.0)}  # 1, 2, more nodes
LL_PEER_GBPS = 6.0  # to each peer of an exchange: LL has one channel for it
RING_SHARE = (0.5, 0.92, 1.0)
TREE_SHARE = (0.92 / 3.8, 0.92 * 0.92, 0.92)
LONE_LL128 = 0.7  # of the rate: ranks alone in their node send and receive through one NIC
NVLS_NODE_US = 19.0


@dataclass(frozen=True)
class Tuning:
    """What measurements say of one kind of device and fabric: factors on latencies, shares of nominal rates.

    ``base``, ``hop``, ``far_hop`` scale launch, hops inside a node and hops between nodes; ``ring``, ``nvls``,
    ``exchange`` are the shares of a device's link that rings, in-switch reduction and direct exchange reach, ``copy``
    the rate at which a rank copies its own part against that link; ``network`` and ``far_exchange`` the shares of the
    NICs. ``bulk_us`` and ``nvls_us`` pass until Simple and NVLS are under way, ``peer_us`` with every further peer of
    an exchange.
    """

    base: float = 1.0
    hop: float = 1.0
    bulk_us: float = 2.0
    ring: float = 0.8
    copy: float = 1.2
    nvls: float = 0.0
    nvls_us: float = 50.0
    exchange: float = 0.75
    peer_us: float = 0.4
    far_hop: float = 1.0
    network: float = 0.92
    far_exchange: float = 0.8
    far_peer_us: float = 0.8


class Groups(NamedTuple):
    """What n groups run over: ranks, ranks that share a node; a rank's GB/s inside it and its share of the NICs.

    ``inside`` names the hops inside a node, ``nic_us`` is the latency of the fabric, ``low_latency_gbps`` the most that
    LL carries in one node, two, and more; ``in_network`` says whether switches of the fabric reduce.
    """

    ranks: Array
    per_node: Array
    inside_gbps: float
    outside_gbps: float
    inside: str = "nvlink"
    nic_us: float = TABLE_NIC_US
    low_latency_gbps: tuple[float, float, float] = LL_GBPS["hopper"]
    in_network: bool = False

    @property
    def nodes(self) -> Array:
        """Nodes that each group spans."""
        return np.ceil(self.ranks / self.per_node)


def collective_us(kind: str, size_bytes: Array, groups: Groups, tuning: Tuning, algorithm: str = "") -> Array:
    """Time of each collective by the fastest algorithm and protocol, or by the one named; 0 for a single rank."""
    costs = candidates(kind, np.asarray(size_bytes, dtype=np.float64), groups, tuning)
    chosen = [cost for name, cost in costs.items() if not algorithm or algorithm in (name, name.partition("/")[0])]
    if not chosen:
        raise ValueError(f"{kind} has no algorithm {algorithm!r}; it has {', '.join(costs)}")
    return np.where(groups.ranks > 1, np.min(chosen, axis=0), 0.0)


def choice(kind: str, size_bytes: Array, groups: Groups, tuning: Tuning) -> list[str]:
    """The ``algorithm/protocol`` that :func:`collective_us` takes for each."""
    costs = candidates(kind, np.asarray(size_bytes, dtype=np.float64), groups, tuning)
    names = list(costs)
    return [names[i] for i in np.argmin(np.stack(list(costs.values())), axis=0)]


def candidates(kind: str, size: Array, groups: Groups, tuning: Tuning) -> dict[str, Array]:
    """Time of each collective by every ``algorithm/protocol`` of its kind; infinite where one cannot run."""
    if kind == "all_to_all":
        return {f"direct/{name}": _exchange(size, groups, tuning, p) for p, name in enumerate(PROTOCOLS) if p != 1}
    if kind == "send_recv":
        return {f"direct/{name}": _neighbours(size, groups, tuning, p) for p, name in enumerate(PROTOCOLS) if p != 1}
    costs = {f"ring/{name}": _ring(kind, size, groups, tuning, p) for p, name in enumerate(PROTOCOLS)}
    if kind == "all_reduce":
        costs |= {f"tree/{name}": _tree(size, groups, tuning, p) for p, name in enumerate(PROTOCOLS)}
        if tuning.nvls > 0.0:
            costs["nvls/Simple"] = _in_switch(size, groups, tuning)
        if groups.in_network:
            costs["collnet/Simple"] = _in_network(size, groups, tuning)
    return costs


def _ring(kind: str, size: Array, g: Groups, t: Tuning, protocol: int) -> Array:
    """Through all ranks once (twice to reduce and gather): Thakur, Rabenseifner and Gropp, 2005."""
    turns = 2.0 if kind == "all_reduce" else 1.0
    last = 0.0 if kind == "broadcast" else 1.0
    far = np.where(g.nodes > 1, turns * (g.nodes - last), 0.0)
    steps = turns * (g.ranks - last) - far
    latency = _latency("ring", protocol, steps, far, g, t)
    own = np.where((g.nodes > 1) | (last == 0.0), 0.0, size / g.ranks / (g.inside_gbps * t.copy))
    return latency + (size * bus_factor(kind, g.ranks) / _rate(g, t, RING_SHARE[protocol], protocol) + own) / 1e3


def _tree(size: Array, g: Groups, t: Tuning, protocol: int) -> Array:
    """Along a chain inside each node, up and down two binary trees between nodes (Sanders, Speck and Traeff, 2009)."""
    far = 2.0 * np.ceil(np.log2(g.nodes))
    latency = _latency("tree", protocol, 2.0 * (g.per_node - 1.0), far, g, t)
    crossings = np.where(g.nodes == 2, 1.0, 2.0)  # of two nodes each is a leaf once and a root once
    share = TREE_SHARE[protocol]
    inside = np.where(g.per_node > 1, 2.0 * size / (g.inside_gbps * t.ring * share), 0.0)
    outside = np.where(g.nodes > 1, crossings * size / (g.outside_gbps * g.per_node * t.network * share), 0.0)
    return latency + np.maximum(inside, outside) / 1e3


def _in_switch(size: Array, g: Groups, t: Tuning) -> Array:
    """NVSwitches reduce inside each node, a tree joins equal GPUs of all nodes (NVLS and NVLSTree of NCCL)."""
    levels = np.ceil(np.log2(g.nodes))
    latency = t.nvls_us + 2.0 * levels * (NVLS_NODE_US + g.nic_us - TABLE_NIC_US) * t.far_hop
    crossings = np.where(g.nodes == 2, 1.0, 2.0)
    outside = np.where(g.nodes > 1, crossings * size / (g.outside_gbps * g.per_node * t.network), 0.0)
    time = latency + np.maximum(size / (g.inside_gbps * t.nvls), outside) / 1e3
    return np.where(g.per_node > 2, time, np.inf)


def _in_network(size: Array, g: Groups, t: Tuning) -> Array:
    """The fabric's switches reduce (SHARP): each byte leaves a node once and comes back once."""
    latency = BASE_US["tree"][0] * t.base + 2.0 * (HOP_US["network"]["tree"][2] + g.nic_us - TABLE_NIC_US) * t.far_hop
    inside = np.where(g.per_node > 1, size / (g.inside_gbps * (t.nvls or t.ring / 2.0)), 0.0)
    time = latency + np.maximum(inside, size / (g.outside_gbps * g.per_node * t.network)) / 1e3
    return np.where(g.nodes > 1, time, np.inf)


def _exchange(size: Array, g: Groups, t: Tuning, protocol: int) -> Array:
    """Every rank to every other at once: inside over the node's links, out over its share of the NICs."""
    near, far = g.per_node - 1.0, g.ranks - g.per_node
    latency = _latency("ring", protocol, np.where(far > 0, 0.0, 1.0), np.where(far > 0, 1.0, 0.0), g, t)
    latency = latency + near * t.peer_us + far * t.far_peer_us
    near_gbps, far_gbps = g.inside_gbps * t.exchange, g.outside_gbps * np.where(g.nodes > 2, t.far_exchange, t.network)
    own = 1.0 / (g.inside_gbps * t.copy)
    per_byte = np.maximum(near / near_gbps + own, far / far_gbps)
    if protocol == 0:
        per_byte = np.maximum(per_byte / RING_SHARE[0], 1.0 / LL_PEER_GBPS)
    return latency + size / g.ranks * per_byte / 1e3


def _neighbours(size: Array, g: Groups, t: Tuning, protocol: int) -> Array:
    """Each rank sends to the next: one hop over the slowest link between neighbours."""
    far = np.where(g.nodes > 1, 1.0, 0.0)
    latency = _latency("ring", protocol, 1.0 - far, far, g, t)
    rate = np.where(far > 0, g.outside_gbps * t.network, g.inside_gbps * t.exchange)
    rate = np.minimum(rate * RING_SHARE[0], LL_PEER_GBPS) if protocol == 0 else rate
    return latency + size / (rate * 1e3)


def _latency(algorithm: str, protocol: int, near: Array, far: Array, g: Groups, t: Tuning) -> Array:
    """Launch, ``near`` hops inside nodes and ``far`` ones between them; Simple also waits to get under way."""
    inside = HOP_US[g.inside][algorithm][protocol]
    outside = HOP_US["network"][algorithm][protocol] + g.nic_us - TABLE_NIC_US
    waits = np.where((far > 0) & (protocol == 0), LL_INSIDE_HOP, 1.0)
    start = t.bulk_us if protocol == 2 else 0.0
    return BASE_US[algorithm][protocol] * t.base + start + t.hop * near * inside * waits + t.far_hop * far * outside


def _rate(g: Groups, t: Tuning, share: float, protocol: int) -> Array:
    """GB/s round a ring: of the links inside or of the NICs that its ranks have, whichever is less."""
    inside = np.where(g.per_node > 1, g.inside_gbps * t.ring, np.inf)
    outside = np.where(g.nodes > 1, g.outside_gbps * g.per_node * t.network, np.inf)
    rate = np.minimum(inside, outside)
    if protocol == 1:
        return rate * np.where(g.per_node > 1, share, LONE_LL128)
    if protocol == 0:
        most = np.array(g.low_latency_gbps)[np.clip(g.nodes, 1, 3).astype(np.int64) - 1]
        return np.minimum(rate * share, most)
    return rate * share
