"""What NCCL does with a collective: which algorithm, protocol and channels it takes, by its own model of itself.

NCCL does not measure before it chooses. It estimates every algorithm and protocol as ``latency + bytes / bandwidth``
from a table of constants (``src/graph/tuning.cc``, 2.23 to 2.29) and takes the least, so bus bandwidth drops where the
table changes hands too early. :func:`estimates` says what that table says; how long the chosen one then really takes
is for :mod:`.nccl_times`. Protocols: LL carries a flag with every four bytes, LL128 one with every 120, Simple moves
plain bytes and waits for them (Hu et al., "Demystifying NCCL", arXiv 2507.04786). All arrays are [n].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...datasets.clusters import NCCL_PROTOCOLS as PROTOCOLS

Array = np.ndarray
LL, LL128, SIMPLE = range(3)
KIB, MIB = 2**10, 2**20
# us before the first byte moves, then us a hop, by protocol
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
HOP_US = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
TABLE_NIC_US = 2.0  # latency of the fabric that the table's network hops include
NVLS_US, NVLS_TREE_US = 25.0, 20.9  # inside a node, and a level of the tree between nodes
COLLNET_US = 31.0  # the switch's sum on its way: NCCL's tuner, hardware latency of collnet (src/graph/tuning.cc)
# of a data sheet's rate that NCCL counts on: 20 of 25 GB/s an NVLink, 24 of 32 of PCIe 4.0 (kvDictPciGen, topo.cc)
LINK_SHARE = {"nvlink": 0.8, "pcie": 0.75}
LARGE_RING_LATENCY_FACTOR = 1.4  # ring latencies of large all-reduces across nodes
MIN_SIMPLE_PEER_BYTES = 16 * KIB  # to each peer, from which an exchange no longer goes by LL
# of a tree's bandwidth, by protocol and power of two from 64 bytes
TREE_SHARE = np.array(
    [
        [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1],
        [0.9] * 7 + [0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
    ]
)


class Generation(NamedTuple):
    """NCCL's figures for GPUs of one generation, GB/s; triples are for one node, two, and more.

    ``paths`` rings of at most ``path_gbps`` are what NCCL finds among NVLinks, each run by two of the ``channels``
    (thread blocks) or more; ``ring_128`` and ``tree_128`` are the most that one carries by LL128, ``tree`` by any
    protocol, ``low_latency`` the most of all by LL inside a node (beyond: :data:`LOW_LATENCY_GBPS`). ``nvls`` is the
    share of links that in-switch reduction reaches.
    """

    paths: int
    path_gbps: float
    channels: int
    low_latency: float
    ring_128: float
    tree: tuple[float, float, float]
    tree_128: tuple[float, float, float]
    nvls: float = 0.0
    nvls_tree: tuple[float, float, float] = (0.0, 0.0, 0.0)
    nvls_channels: int = 16


GENERATIONS = {
    "volta": Generation(6, 20.0, 12, 39.0, 20.0, (26.5, 18.5, 10.0), (20.0, 20.0, 20.0)),
    "ampere": Generation(12, 40.0, 24, 87.7, 20.0, (24.0, 23.6, 17.8), (20.0, 20.0, 20.0)),
    "hopper": Generation(12, 60.0, 24, 141.0, 36.7, (38.7, 41.4, 36.0), (36.7, 36.7, 29.0), 0.85, (0.0, 57.7, 45.5)),
    "blackwell": Generation(
        8, 90.0, 32, 282.0, 40.0, (70.0, 42.8, 24.0), (55.6, 31.7, 20.0), 0.74, (0.0, 96.0, 43.8), 32
    ),
}
# GB/s by LL of two nodes and of more, by the maker of their processors: "for multi-node, we look at CPU type"
LOW_LATENCY_GBPS = {"amd": (22.5, 19.0), "intel": (39.0, 20.4), "arm": (39.0, 20.4)}  # NCCL has a row for AMD, one else
# us that a ring over nodes takes at least for each hop inside one, as its sends are posted (getNetOverhead)
POST_US = {"amd": 2.0, "intel": 1.0, "arm": 1.0}
SIMPLE_POSTS = 3.0  # of them for a hop of Simple
DEFAULT_GENERATION = "ampere"  # of GPUs that NCCL has no figures for: nothing reduces in switches


class GroupShapes(NamedTuple):
    """What n groups run over: ranks, ranks that share a node; a rank's GB/s inside it and its share of the NICs.

    ``inside`` names the hops inside a node, ``nic_us`` is the latency of the fabric, ``generation`` that of the GPUs;
    ``in_network`` says whether switches of the fabric reduce. ``algorithm``, ``protocol`` and ``channels`` are what
    NCCL is told to take, as by NCCL_ALGO, NCCL_PROTO and NCCL_MAX_NCHANNELS; empty or 0: its own choice. Without
    ``nvls`` it may not reduce in NVSwitches (NCCL_NVLS_ENABLE=0). ``mesh_links`` are the links of a rank where each
    goes to one other device of its node; 0: a switch joins them. ``host`` is the maker of the nodes' processors.
    """

    ranks: Array
    per_node: Array
    inside_gbps: float
    outside_gbps: float
    inside: str = "nvlink"
    nic_us: float = TABLE_NIC_US
    generation: str = "hopper"
    in_network: bool = False
    algorithm: str = ""
    protocol: str = ""
    channels: int = 0
    nvls: bool = True
    mesh_links: int = 0
    host: str = "amd"

    @property
    def near_gbps(self) -> Array:
        """GB/s of a rank to all others of its group inside its node: without a switch only their links count."""
        share = np.minimum((np.maximum(self.per_node, 2.0) - 1.0) / max(self.mesh_links, 1), 1.0)
        return self.inside_gbps * (share if self.mesh_links else np.ones_like(self.per_node))

    @property
    def pair_gbps(self) -> float:
        """GB/s between two ranks of a node."""
        return self.inside_gbps / max(self.mesh_links, 1)

    @property
    def nodes(self) -> Array:
        """Nodes that each group spans."""
        return np.ceil(self.ranks / self.per_node)

    @property
    def figures(self) -> Generation:
        """NCCL's figures for these GPUs; the usual ones for GPUs it has none for."""
        return GENERATIONS.get(self.generation, GENERATIONS[DEFAULT_GENERATION])

    @property
    def low_latency_gbps(self) -> Array:
        """GB/s of all channels by LL, as NCCL counts."""
        return figure_for_nodes((self.figures.low_latency, *LOW_LATENCY_GBPS[self.host]), self)

    def post_us(self, protocol: int) -> Array:
        """Least us of a hop inside a node, in a ring over nodes."""
        return np.where(self.nodes > 1, POST_US[self.host] * (SIMPLE_POSTS if protocol == SIMPLE else 1.0), 0.0)

    def at(self, index: Array) -> GroupShapes:
        """Some of the groups."""
        return self._replace(ranks=self.ranks[index], per_node=self.per_node[index])


def algorithm_names(kind: str, groups: GroupShapes) -> list[str]:
    """Every ``algorithm/protocol`` that NCCL has for a kind of collective on such links."""
    if kind in ("all_to_all", "send_recv"):
        return ["direct/LL", "direct/Simple"]
    protocols = PROTOCOLS if groups.inside == "nvlink" else ("LL", "Simple")
    names = [f"ring/{protocol}" for protocol in protocols]
    if kind == "all_reduce":
        names += [f"tree/{protocol}" for protocol in protocols]
        if groups.nvls and groups.inside == "nvlink" and groups.figures.nvls > 0.0:
            names.append("nvls/Simple")
        if groups.in_network:
            names.append("collnet/Simple")
    return names


def choose_algorithms(kind: str, size: Array, groups: GroupShapes) -> tuple[list[str], Array]:
    """All :func:`algorithm_names`, and which one NCCL takes for each collective: a requested one, if it can run."""
    names = algorithm_names(kind, groups)
    estimated = estimates(kind, size, groups)
    requested = groups.algorithm, groups.protocol
    if not any(requested):
        return names, np.argmin([estimated[name] for name in names], axis=0)
    for algorithm, protocol in (requested, (groups.algorithm, ""), ("", groups.protocol)):
        allowed = [name for name in names if _is_requested(name, algorithm, protocol)]
        if allowed:
            able = np.isfinite(np.min([estimated[name] for name in allowed], axis=0))
            others = [name for name in names if name not in allowed]
            estimated |= {name: np.where(able, np.inf, estimated[name]) for name in others}
            break
    return names, np.argmin([estimated[name] for name in names], axis=0)


def estimates(kind: str, size: Array, groups: GroupShapes) -> dict[str, Array]:
    """What NCCL believes that each ``algorithm/protocol`` takes, us [n]; infinite where one cannot run.

    It does not know the fabric's latency.
    """
    names = algorithm_names(kind, groups)
    if names[0].startswith("direct"):
        few = size / np.maximum(groups.ranks if kind == "all_to_all" else 1.0, 1.0) <= MIN_SIMPLE_PEER_BYTES
        return {name: np.where(few == name.endswith("/LL"), 0.0, 1.0) for name in names}
    times_us, (layouts, layout) = {}, _distinct_groups(groups)
    for name in names:
        algorithm, _, protocol_name = name.partition("/")
        protocol = PROTOCOLS.index(protocol_name)
        latency, gbps = (values[layout] for values in ESTIMATES[algorithm](kind, layouts, protocol))
        if algorithm == "tree":
            gbps = gbps * _tree_share(size, protocol)
        elif name == "ring/Simple" and kind == "all_reduce":
            per_thread = size / (groups.figures.channels * np.maximum(groups.ranks, 1.0))
            latency = latency * np.where(
                (layouts.nodes > 1)[layout] & (per_thread >= 64), LARGE_RING_LATENCY_FACTOR, 1.0
            )
        times_us[name] = latency + size / (gbps * 1e3)
    return times_us


def _distinct_groups(groups: GroupShapes) -> tuple[GroupShapes, Array]:
    """The different groups, and which of them each one is."""
    codes = groups.ranks * 2.0**20 + groups.per_node
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    return groups.at(first), place.reshape(-1)


def _is_requested(name: str, algorithm: str, protocol: str) -> bool:
    own_algorithm, _, own_protocol = name.partition("/")
    return (not algorithm or own_algorithm == algorithm) and (not protocol or own_protocol == protocol)


def links_gbps(groups: GroupShapes) -> Array:
    """GB/s that NCCL counts on round a ring: of links inside nodes or of NICs, whichever is less."""
    inside = groups.near_gbps * LINK_SHARE[groups.inside]
    outside = np.where(groups.nodes > 1, groups.outside_gbps * groups.per_node, np.inf)
    return np.minimum(np.where(groups.per_node > 1, inside, np.inf), outside)


def figure_for_nodes(figures: tuple[float, float, float], groups: GroupShapes) -> Array:
    """The figure for one node, two or more."""
    return np.array(figures)[np.clip(groups.nodes, 1, 3).astype(np.int64) - 1]


def ring_hops(kind: str, groups: GroupShapes) -> tuple[Array, Array]:
    """Hops round a ring inside nodes, and those between nodes: twice round to reduce and gather."""
    turns = 2.0 if kind == "all_reduce" else 1.0
    last = 0.0 if kind == "broadcast" else 1.0
    far = np.where(groups.nodes > 1, turns * (groups.nodes - last), 0.0)
    return turns * (groups.ranks - last) - far, far


def _ring(kind: str, g: GroupShapes, protocol: int) -> tuple[Array, Array]:
    near, far = ring_hops(kind, g)
    hop = np.where(g.per_node > 1, HOP_US["network"]["ring"][protocol], HOP_US["network"]["tree"][protocol])
    near_us = np.maximum(HOP_US[g.inside]["ring"][protocol], g.post_us(protocol))
    latency = BASE_US["ring"][protocol] + near * near_us + far * hop
    bus = links_gbps(g)
    if protocol == LL:
        bus = np.minimum(bus / 2.0, g.low_latency_gbps)
    elif protocol == LL128:
        bus = np.minimum(bus * 0.92, g.figures.paths * g.figures.ring_128)
    return latency, bus * g.ranks / np.maximum(near + far, 1.0)


def _tree(kind: str, g: GroupShapes, protocol: int) -> tuple[Array, Array]:
    near, far = HOP_US[g.inside]["tree"][protocol], HOP_US["network"]["tree"][protocol]
    levels = np.floor(np.log2(np.maximum(g.nodes, 1.0)))
    latency = BASE_US["tree"][protocol] + 2.0 * ((g.per_node - 1.0) * near + levels * far)
    bus = np.minimum(links_gbps(g) * 0.92, tree_gbps(g, SIMPLE))
    if protocol == LL:
        bus = np.minimum(bus / 3.8, g.low_latency_gbps)
    elif protocol == LL128:
        share = np.where(g.nodes > 1, 120.0 / 128.0, 7.0 / 9.0)
        bus = np.minimum(bus * share, tree_gbps(g, LL128))
    return latency, bus / 2.0


def tree_gbps(g: GroupShapes, protocol: int) -> Array:
    """GB/s that all channels of a tree carry at most, as NCCL counts: up and down together."""
    if protocol == LL:
        return g.low_latency_gbps
    return g.figures.paths * figure_for_nodes(g.figures.tree_128 if protocol == LL128 else g.figures.tree, g)


def _tree_share(size: Array, protocol: int) -> Array:
    """Of a tree's bandwidth, at a size: NCCL corrects its model so."""
    shares = np.append(TREE_SHARE[protocol], 1.0)
    power = np.log2(np.maximum(size / 64.0, 1.0)).astype(np.int64)
    return shares[np.minimum(power, len(shares) - 1)]


def _in_switch(kind: str, g: GroupShapes, protocol: int) -> tuple[Array, Array]:
    """Every rank of a node heads one path; a switch's links are shared by all heads, and once more by its own."""
    heads = np.maximum(g.per_node, 1.0)
    path = np.minimum(g.inside_gbps * LINK_SHARE["nvlink"] / (heads + 1.0), g.figures.path_gbps)
    head_gbps = 2.0 * path * g.figures.nvls * (heads - 1.0) / heads
    wide = np.where(g.nodes > 2, 1.0, 2.0) * g.outside_gbps
    head_gbps = np.where(
        g.nodes > 1, np.minimum(np.minimum(head_gbps, wide), figure_for_nodes(g.figures.nvls_tree, g)), head_gbps
    )
    latency = NVLS_US + 2.0 * np.floor(np.log2(np.maximum(g.nodes, 1.0))) * NVLS_TREE_US
    able = (g.per_node > 2) & (head_gbps > 0.0)
    rate = heads * np.where(able, head_gbps, 1.0) * g.ranks / (2.0 * np.maximum(g.ranks - 1.0, 1.0))
    return np.where(able, latency, np.inf), rate


def _in_network(kind: str, g: GroupShapes, protocol: int) -> tuple[Array, Array]:
    latency = 2.0 * (HOP_US[g.inside]["tree"][SIMPLE] + 0.4 * (g.per_node - 1.0)) + COLLNET_US
    return np.where(g.nodes > 1, latency, np.inf), links_gbps(g) * 0.85


ESTIMATES = {"ring": _ring, "tree": _tree, "nvls": _in_switch, "collnet": _in_network}
