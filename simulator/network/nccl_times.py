"""Collectives by formula: what the algorithm and protocol that NCCL takes (:mod:`.nccl`) cost on these links.

Every ``algorithm/protocol`` costs ``start + hops and bytes``. A ring turns through every rank and crosses each node's
NICs once a channel, so that m ranks of a node send through m NICs; a tree goes along a chain inside the node and up
and down a binary tree between nodes; NVLS lets NVSwitches reduce. Inside a node bytes of Simple move while its steps
wait, more or less (``overlap``); hops between nodes add up. Few bytes use few channels, and only as many of their
threads as there are words, so that LL takes about as long for 32 KiB as for 256. All arrays are [n], one entry a
collective; sizes follow nccl-tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.ops import bus_factor
from .nccl import (
    BASE_US,
    HOP_US,
    KIB,
    LL,
    LL128,
    PROTOCOLS,
    SIMPLE,
    TABLE_NIC_US,
    Array,
    GroupShapes,
    algorithm_names,
    choose_algorithms,
    ring_hops,
    tree_gbps,
)

LL_PEER_GBPS = 6.0  # to each peer of an exchange: LL has one channel for it
LL_CHANNEL_BYTES = 4 * KIB  # bytes a rank that fill a channel: 512 threads, eight bytes each
LL_MIN_CHANNEL_SHARE = 96 / 512  # of a channel's threads
PROTOCOL_SHARE = (0.5, 0.92, 1.0)  # of a link's bytes that are data, by protocol
TREE_SHARE = (1 / 3.8, 0.92 * 0.92, 0.92)
GATHER_SHARE = {"all_gather": 1.0, "broadcast": 1.0, "all_reduce": 0.5}  # share of turns that store what they pass on
LONE_RANK_LL128_SHARE = 0.7  # of the rate: ranks alone in their node send and receive through one NIC
NVLS_NODE_US = 19.0  # a level of NVLS between nodes: assumed, beside 18 and 20.9 of NCCL's tuner
NVLS_CHUNK_BYTES = 128 * KIB
NVLS_CHUNK_STEPS = (
    (64, 64 * KIB),
    (8, 32 * KIB),
    (2, 16 * KIB),
)  # below so many turns of all channels, chunks are halved
EXCHANGE_CHUNK_BYTES = 512 * KIB  # of a channel, that leaves before the next one can


@dataclass(frozen=True)
class Tuning:
    """What measurements say of one kind of device and fabric: waits in us, and shares of nominal rates.

    ``base``, ``hop``, ``line_hop``, ``far_hop`` scale NCCL's latencies: launch, hops of LL and of LL128 inside a node,
    hops between nodes. Simple starts after ``bulk_us`` and waits ``step_us`` a step, of which bytes hide the more the
    larger ``overlap``. ``ring``, ``ll``, ``nvls``, ``exchange`` are the shares of a device's link that rings, LL,
    in-switch reduction and direct exchange reach, ``copy`` the rate at which a rank copies its own part against that
    link; LL128 reaches ``line`` of ``ring``. By LL one channel carries ``channel_gbps``, and bytes that are stored and
    passed on count ``gather`` times.
    NVLS starts after ``nvls_us`` and waits ``nvls_wait_us`` for each turn of its channels that small chunks cost it;
    exchanges by Simple start after ``exchange_us``, pay ``fill`` of their first chunks twice, and ``peer_us`` a peer.
    Four cards on PCIe reach each other through the host at ``beyond`` of a pair's rate, and every doubling divides it
    by ``2**crowd``: 0 where each has its own way, 1 where all share one. ``network`` and ``far_exchange`` are shares
    of the NICs.
    """

    base: float = 1.0
    hop: float = 1.4
    line_hop: float = 1.0
    bulk_us: float = 12.0
    step_us: float = 5.0
    overlap: float = 1.0
    ring: float = 0.85
    copy: float = 1.3
    ll: float = 0.35
    line: float = 0.8
    channel_gbps: float = 15.0
    gather: float = 1.2
    nvls: float = 0.0
    nvls_us: float = 30.0
    nvls_wait_us: float = 9.0
    exchange: float = 0.7
    exchange_us: float = 13.0
    fill: float = 0.3
    peer_us: float = 0.3
    beyond: float = 1.0
    crowd: float = 0.0
    far_hop: float = 1.0
    network: float = 0.92
    far_exchange: float = 0.8
    far_peer_us: float = 0.8

    def alone(self, cards: Array) -> Array:
        """What is left to each of so many cards on PCIe of the rate that a pair has."""
        return np.where(cards > 2, self.beyond * (4.0 / np.maximum(cards, 3.0)) ** self.crowd, 1.0)


def collective_us(kind: str, size_bytes: Array, groups: GroupShapes, tuning: Tuning, algorithm: str = "") -> Array:
    """Time of each collective by what NCCL takes, or by the ``algorithm`` named; 0 for a single rank.

    ``algorithm`` is one, or one with its protocol (``ring/LL``): infinite where it cannot run. ValueError for one that
    the kind does not have.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    family, _, protocol = algorithm.partition("/")
    if algorithm:
        names = algorithm_names(kind, groups)
        if algorithm not in {name.partition("/")[0] for name in names}.union(names):
            raise ValueError(f"{kind} has no algorithm {algorithm!r}; it has {', '.join(names)}")
        groups = groups._replace(algorithm=family, protocol=protocol)
    names, choice = choose_algorithms(kind, size, groups)
    allowed = np.array([not algorithm or name.startswith(f"{family}/") for name in names])[choice]
    return np.where(allowed | (groups.ranks <= 1), choice_us(names, choice, kind, size, groups, tuning), np.inf)


def list_choices(kind: str, size_bytes: Array, groups: GroupShapes) -> list[str]:
    """The ``algorithm/protocol`` that :func:`collective_us` takes for each."""
    names, choice = choose_algorithms(kind, np.asarray(size_bytes, dtype=np.float64), groups)
    return [names[index] for index in choice.tolist()]


def candidates(kind: str, size_bytes: Array, groups: GroupShapes, tuning: Tuning) -> dict[str, Array]:
    """Time of each collective by every ``algorithm/protocol`` of its kind."""
    size, names = np.asarray(size_bytes, dtype=np.float64), algorithm_names(kind, groups)
    shape = np.broadcast(size, groups.ranks).size
    return {name: choice_us(names, np.full(shape, i), kind, size, groups, tuning) for i, name in enumerate(names)}


def choice_us(
    names: Sequence[str], choice: Array, kind: str, size: Array, groups: GroupShapes, tuning: Tuning
) -> Array:
    """Time of each collective by the ``algorithm/protocol`` ``names[choice]`` [n]; 0 for a single rank."""
    size, ranks, per_node = np.broadcast_arrays(size, groups.ranks, groups.per_node)
    groups, out = groups._replace(ranks=ranks, per_node=per_node), np.zeros(len(size))
    for i, name in enumerate(names):
        index = np.flatnonzero((choice == i) & (ranks > 1))
        if len(index):
            algorithm, _, protocol = name.partition("/")
            time = TIMES["exchange" if kind == "all_to_all" else algorithm]
            out[index] = time(kind, size[index], groups.at(index), tuning, PROTOCOLS.index(protocol))
    return out


def _ring(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """Through all ranks once (twice to reduce and gather): Thakur, Rabenseifner and Gropp, 2005."""
    near, far = ring_hops(kind, g)
    copy_us = size / g.ranks / (_own_gbps(g, t) * t.copy * 1e3)
    bytes_us = size * bus_factor(kind, g.ranks) / (_ring_gbps(g, t, protocol, _channels(size / g.ranks, g)) * 1e3)
    if protocol == LL:
        bytes_us = bytes_us * (1.0 + (t.gather - 1.0) * GATHER_SHARE.get(kind, 0.0))
    ring_us = _overlapped_us(_hops_us("ring", protocol, near, far, g, t), bytes_us, g, t, protocol)
    return _start_us("ring", protocol, t) + ring_us + np.where((g.nodes > 1) | (kind == "broadcast"), 0.0, copy_us)


def _tree(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """Along a chain inside each node, up and down two binary trees between nodes (Sanders, Speck and Traeff, 2009)."""
    crossings = np.where(g.nodes == 2, 1.0, 2.0)  # of two nodes each is a leaf once and a root once
    share = TREE_SHARE[protocol]
    rate = _intra_node_gbps(g, t) * t.ring * share * _channel_share(g, g.figures.channels)
    if protocol == LL:
        rate = np.minimum(rate, t.channel_gbps * _channels(size, g))
    inside = np.where(g.per_node > 1, 2.0 * size / rate, 0.0)
    outside = np.where(g.nodes > 1, crossings * size / (g.outside_gbps * g.per_node * t.network * share), 0.0)
    outside = np.where(g.nodes > 1, np.maximum(outside, 2.0 * size / tree_gbps(g, protocol)), 0.0)
    hops = _hops_us("tree", protocol, 2.0 * (g.per_node - 1.0), 2.0 * np.ceil(np.log2(g.nodes)), g, t)
    return _start_us("tree", protocol, t) + _overlapped_us(hops, np.maximum(inside, outside) / 1e3, g, t, protocol)


def _nvls(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """NVSwitches reduce inside each node, a tree joins equal GPUs of all nodes (NVLS and NVLSTree of NCCL)."""
    levels = np.ceil(np.log2(g.nodes))
    latency = t.nvls_us + 2.0 * levels * (NVLS_NODE_US + g.nic_us - TABLE_NIC_US) * t.far_hop
    turn = g.figures.nvls_channels * g.per_node
    chunk = np.where(g.nodes > 1, NVLS_CHUNK_BYTES / 2.0, NVLS_CHUNK_BYTES)
    for turns, smaller in NVLS_CHUNK_STEPS:
        chunk = np.where(size < turns * turn * chunk, np.minimum(chunk, smaller), chunk)
    extra_turns = np.maximum(size / turn, chunk) * (1.0 / chunk - 1.0 / NVLS_CHUNK_BYTES)
    crossings = np.where(g.nodes == 2, 1.0, 2.0)
    outside = np.where(g.nodes > 1, crossings * size / (g.outside_gbps * g.per_node * t.network), 0.0)
    inside = size / (_intra_node_gbps(g, t) * (t.nvls or t.ring / 2.0) * _channel_share(g, g.figures.nvls_channels))
    return latency + np.maximum(extra_turns * t.nvls_wait_us + inside / 1e3, outside / 1e3)


def _collnet(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """The fabric's switches reduce (SHARP): each byte leaves a node once and comes back once."""
    latency = BASE_US["tree"][0] * t.base + 2.0 * (HOP_US["network"]["tree"][2] + g.nic_us - TABLE_NIC_US) * t.far_hop
    inside = np.where(g.per_node > 1, size / (_intra_node_gbps(g, t) * (t.nvls or t.ring / 2.0)), 0.0)
    return latency + np.maximum(inside, size / (g.outside_gbps * g.per_node * t.network)) / 1e3


def _exchange(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """Every rank to every other at once: inside over the node's links, out over its share of the NICs."""
    near, far = g.per_node - 1.0, g.ranks - g.per_node
    near_gbps = _intra_node_gbps(g, t) * t.exchange * _channel_share(g, g.figures.channels)
    far_gbps = g.outside_gbps * np.where(g.nodes > 2, t.far_exchange, t.network)
    first = t.fill * np.minimum(1.0, g.figures.channels * EXCHANGE_CHUNK_BYTES / np.maximum(size, 1.0))
    inside = near / near_gbps + 1.0 / (_own_gbps(g, t) * t.copy)
    pay = np.where(far > 0, 1.0, 1.0 + first)
    simple_us = _simple_start_us(g, t) + size / g.ranks * np.maximum(inside * pay, far / far_gbps) / 1e3
    words = np.maximum(near / near_gbps, far / far_gbps) / PROTOCOL_SHARE[LL]
    ll_us = _ll_start_us(g, t) + size / g.ranks * np.maximum(1.0 / LL_PEER_GBPS, words) / 1e3
    return near * t.peer_us + far * t.far_peer_us + _faster_protocol_us(ll_us, simple_us, protocol, g)


def _send_recv(kind: str, size: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """Each rank sends to the next: one hop over the slowest link between neighbours, and few channels for it."""
    near = g.pair_gbps * (t.alone(g.per_node) if g.inside == "pcie" else np.ones_like(g.per_node))
    rate = np.where(g.nodes > 1, g.outside_gbps * t.far_exchange, near * t.exchange)
    simple_us = _simple_start_us(g, t) + size / (rate * _channel_share(g, g.figures.channels)) / 1e3
    ll_us = _ll_start_us(g, t) + size / np.minimum(rate * PROTOCOL_SHARE[LL], LL_PEER_GBPS) / 1e3
    return _faster_protocol_us(ll_us, simple_us, protocol, g)


def _ll_start_us(g: GroupShapes, t: Tuning) -> Array:
    """Start of an exchange by LL: one hop."""
    far = np.where(g.nodes > 1, 1.0, 0.0)
    near_us, far_us = _hops_us("ring", LL, 1.0 - far, far, g, t)
    return _start_us("ring", LL, t) + near_us + far_us


def _simple_start_us(g: GroupShapes, t: Tuning) -> Array:
    """Start of an exchange by Simple."""
    far = np.where(g.nodes > 1, 1.0, 0.0)
    return t.exchange_us + _hops_us("ring", SIMPLE, 0.0 * far, far, g, t)[1]


def _faster_protocol_us(ll_us: Array, simple_us: Array, protocol: int, g: GroupShapes) -> Array:
    """What is a little larger than LL's limit still goes by few threads, as LL does."""
    if g.protocol:
        return ll_us if protocol == LL else simple_us
    return np.minimum(ll_us, simple_us)


def _start_us(algorithm: str, protocol: int, t: Tuning) -> float:
    return t.bulk_us if protocol == SIMPLE else BASE_US[algorithm][protocol] * t.base


def _hops_us(algorithm: str, protocol: int, near: Array, far: Array, g: GroupShapes, t: Tuning) -> tuple[Array, Array]:
    """What ``near`` hops inside nodes wait, and ``far`` ones between them; beside far ones, near ones wait longer."""
    hop_us = HOP_US[g.inside][algorithm][protocol]
    simple = t.step_us * hop_us / HOP_US[g.inside]["ring"][SIMPLE]
    inside = (hop_us * t.hop, hop_us * t.line_hop, simple)[protocol]
    beside = (hop_us * t.hop, hop_us * max(t.line_hop, 1.0), simple)[protocol]
    if algorithm == "ring":
        beside = np.maximum(beside, g.post_us(protocol))
    outside = HOP_US["network"][algorithm][protocol] + g.nic_us - TABLE_NIC_US
    return near * np.where(far > 0, beside, inside), t.far_hop * far * outside


def _overlapped_us(waits_us: tuple[Array, Array], moves_us: Array, g: GroupShapes, t: Tuning, protocol: int) -> Array:
    """Waits of hops and moves of all steps: their sum, and of Simple and LL128 inside nodes a norm of both.

    A wait that hides behind bytes in one node was fitted so, and hides behind them in a ring of several, too; of
    a norm that is more than a sum a ring of several has the sum.
    """
    near_us, far_us = waits_us
    power = np.where(g.nodes > 1, max(t.overlap, 1.0), t.overlap) if protocol != LL else 1.0
    return (near_us**power + moves_us**power) ** (1.0 / power) + far_us


def _intra_node_gbps(g: GroupShapes, t: Tuning) -> Array:
    """GB/s of a rank to the others of its group inside its node."""
    return g.near_gbps * (t.alone(g.per_node) if g.inside == "pcie" else np.ones_like(g.per_node))


def _own_gbps(g: GroupShapes, t: Tuning) -> Array:
    """GB/s that a rank's copy of its own part is counted against: of all its links, whoever is in the group."""
    return g.inside_gbps * (t.alone(g.per_node) if g.inside == "pcie" else np.ones_like(g.per_node))


def _channel_share(g: GroupShapes, channels: int) -> float:
    """Share of its channels that NCCL may use."""
    return min(1.0, g.channels / channels) if g.channels else 1.0


def _channels(size: Array, g: GroupShapes) -> Array:
    """How many channels carry so many bytes by LL: NCCL takes a thread for every eight."""
    return np.clip(
        size / LL_CHANNEL_BYTES, LL_MIN_CHANNEL_SHARE, g.figures.channels * _channel_share(g, g.figures.channels)
    )


def _ring_gbps(g: GroupShapes, t: Tuning, protocol: int, channels: Array) -> Array:
    """GB/s round a ring: of the links inside or of the NICs that its ranks have, whichever is less."""
    share = (t.ll, t.ring * t.line, t.ring)[protocol] * _channel_share(g, g.figures.channels)
    inside = np.where(g.per_node > 1, _intra_node_gbps(g, t) * share, np.inf)
    lone = np.where((g.per_node > 1) | (protocol != LL128), PROTOCOL_SHARE[protocol], LONE_RANK_LL128_SHARE)
    outside = np.where(g.nodes > 1, g.outside_gbps * g.per_node * t.network * lone, np.inf)
    if protocol == LL:
        inside = np.minimum(inside, t.channel_gbps * channels)
        outside = np.where(g.nodes > 1, np.minimum(outside, g.low_latency_gbps), outside)
    return np.minimum(inside, outside)


TIMES = {
    "ring": _ring,
    "tree": _tree,
    "nvls": _nvls,
    "collnet": _collnet,
    "exchange": _exchange,
    "direct": _send_recv,
}
