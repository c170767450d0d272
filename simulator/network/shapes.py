"""Fabrics by formula: N-dimensional products of simple shapes, and what stands in datacentres.

A product places ranks on a grid; along each dimension the ranks of a line are joined as a ring, mesh, torus, fully,
by a switch, as a king's moves or a hypercube. Datacentre builders name their switches and give every GPU its NIC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from .topology import Topology, TopologyError, build_topology

MAX_RANKS, MAX_LINKS = 1_000_000, 20_000_000


@dataclass(frozen=True)
class Dimension:
    """``size`` ranks along one dimension, GB/s and us of each of its links."""

    shape: str
    size: int
    bandwidth_gbps: float
    latency_us: float = 0.5
    kind: str = "fabric"


def product(dimensions: Sequence[Dimension], name: str = "") -> Topology:
    """Ranks on a grid, the first dimension fastest; each line of a dimension joined by its shape.

    TopologyError for an unknown shape or a size it cannot have.
    """
    sizes = [dimension.size for dimension in dimensions]
    if not sizes or min(sizes) < 1:
        raise TopologyError(f"a product needs sizes of at least 1, got {sizes}")
    count = math.prod(sizes)
    if count > MAX_RANKS:
        raise TopologyError(
            f"a product of {' x '.join(map(str, sizes))} ranks is too large; up to {MAX_RANKS:,} will do"
        )
    for dimension in dimensions:
        if dimension.shape not in (*PAIRS, "switch"):
            raise TopologyError(f"unknown shape {dimension.shape!r}; known: {', '.join(sorted([*PAIRS, 'switch']))}")
        if dimension.shape == "fully_connected" and count * dimension.size > MAX_LINKS:
            raise TopologyError(
                f"fully_connected of {dimension.size} in {count} ranks has too many links; take a switch"
            )
    grid = np.stack(np.unravel_index(np.arange(count), sizes, order="F"), axis=1)
    stride = np.concatenate([[1], np.cumprod(sizes)])
    nodes = [f"gpu{rank}" for rank in range(count)]
    cables = []
    for axis, dimension in enumerate(dimensions):
        lines = np.flatnonzero(grid[:, axis] == 0)  # the first rank of every line along this dimension
        if dimension.size == 1:
            continue
        if dimension.shape == "switch":
            switches = len(nodes) + np.arange(len(lines))
            nodes += [f"switch{axis}.{line}" for line in range(len(lines))]
            members = lines[:, None] + stride[axis] * np.arange(dimension.size)
            ends = members.ravel(), np.repeat(switches, dimension.size)
            cables.append((*ends, dimension.bandwidth_gbps, dimension.latency_us, dimension.kind))
            continue
        pairs = _pairs(dimension)
        ends = tuple((lines[:, None] + stride[axis] * pairs[:, side]).ravel() for side in (0, 1))
        cables.append((*ends, dimension.bandwidth_gbps, dimension.latency_us, dimension.kind))
    axes = [axis for column, dimension in enumerate(dimensions) for axis in _dimension_axes(dimension, grid[:, column])]
    title = name or " x ".join(f"{dimension.shape}({dimension.size})" for dimension in dimensions)
    return build_topology(title, count, nodes, cables, np.stack(axes, axis=1))


def _dimension_axes(dimension: Dimension, position: np.ndarray) -> list[np.ndarray]:
    """Coordinates of ranks along one dimension, the fastest first: two of a square, a bit each of a hypercube."""
    if dimension.shape in ("mesh", "torus"):
        side = _side(dimension.shape, dimension.size)
        return [position % side, position // side]
    if dimension.shape == "hypercube" and dimension.size > 1:
        return [position >> bit & 1 for bit in range(dimension.size.bit_length() - 1)]
    return [position]


def _pairs(dimension: Dimension) -> np.ndarray:
    pairs = sorted({tuple(sorted(pair)) for pair in PAIRS[dimension.shape](dimension.size)})
    return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=np.int64).reshape(-1, 2)


def _line(n: int) -> Iterator[tuple[int, int]]:
    yield from zip(range(n - 1), range(1, n), strict=True)


def _ring(n: int) -> Iterator[tuple[int, int]]:
    yield from _line(n)
    yield n - 1, 0


def _side(shape: str, n: int) -> int:
    side = round(n**0.5)
    if side * side != n:
        raise TopologyError(f"a {shape} is square: {n} is no square number, {side * side} is the nearest")
    return side


def _grid(shape: str, n: int, wraps: bool, diagonals: bool) -> Iterator[tuple[int, int]]:
    side = _side(shape, n)
    moves = [(0, 1), (1, 0)] + ([(1, 1), (1, -1)] if diagonals else [])
    for row in range(side):
        for column in range(side):
            for down, right in moves:
                neighbour = row + down, column + right
                if wraps:
                    neighbour = neighbour[0] % side, neighbour[1] % side
                if 0 <= neighbour[0] < side and 0 <= neighbour[1] < side:
                    yield row * side + column, neighbour[0] * side + neighbour[1]


def _hypercube(n: int) -> Iterator[tuple[int, int]]:
    if n & (n - 1):
        raise TopologyError(f"a hypercube has a power of two of ranks, not {n}")
    for rank in range(n):
        for bit in range(n.bit_length() - 1):
            yield rank, rank ^ (1 << bit)


PAIRS: dict[str, Callable[[int], Iterator[tuple[int, int]]]] = {
    "line": _line,
    "ring": _ring,
    "fully_connected": lambda n: combinations(range(n), 2),
    "mesh": lambda n: _grid("mesh", n, False, False),
    "torus": lambda n: _grid("torus", n, True, False),
    "king_mesh": lambda n: _grid("king_mesh", n, False, True),
    "hypercube": _hypercube,
}


@dataclass(frozen=True)
class Port:
    """One rank's way out: GB/s each direction and us to the switch."""

    bandwidth_gbps: float
    latency_us: float
    kind: str = "ib"


@dataclass(frozen=True)
class Servers:
    """``count`` servers of ``gpus`` joined inside (``inside``: by a switch, or ``fully_connected``).

    Each GPU has its own NIC, or the server has ``nics`` that GPUs share in equal parts. ``lanes`` are what stands
    between a GPU and its NIC, usually PCIe; without them a NIC of its own is part of the GPU.
    """

    count: int
    gpus: int
    inside: Port
    nic: Port
    joined: str = "switch"
    nics: int = 0
    lanes: Port | None = None

    @property
    def ranks(self) -> int:
        return self.count * self.gpus

    @property
    def ports(self) -> int:
        """Ways out of one server."""
        return self.nics or self.gpus


Cables = list[tuple[np.ndarray, np.ndarray, float, float, str]]


def _lay_servers(servers: Servers) -> tuple[list[str], Cables, np.ndarray]:
    """Nodes and cables of all servers up to their NICs, and nodes from which cables leave: ports [count x ports]."""
    nodes = [f"gpu{rank}" for rank in range(servers.ranks)]
    cables: Cables = []
    port, ranks = servers.inside, np.arange(servers.ranks)
    if servers.gpus > 1 and servers.joined == "switch":
        first = len(nodes)
        nodes += [f"nvswitch{server}" if port.kind == "nvlink" else f"root{server}" for server in range(servers.count)]
        cables.append((ranks, first + ranks // servers.gpus, port.bandwidth_gbps, port.latency_us, port.kind))
    elif servers.gpus > 1:
        pairs = np.array(list(combinations(range(servers.gpus), 2)))
        base = servers.gpus * np.arange(servers.count)[:, None]
        ends = (base + pairs[:, 0]).ravel(), (base + pairs[:, 1]).ravel()
        cables.append((*ends, port.bandwidth_gbps / (servers.gpus - 1), port.latency_us, port.kind))
    if servers.ports == servers.gpus and servers.lanes is None:
        return nodes, cables, ranks
    if servers.gpus % servers.ports:
        raise TopologyError(
            f"{servers.gpus} GPUs do not share {servers.ports} NICs in equal parts; take one a GPU, or a part of that"
        )
    first, gpus_per_nic = len(nodes), servers.gpus // servers.ports
    nodes += [f"nic{nic}" for nic in range(servers.count * servers.ports)]
    lanes = servers.lanes or Port(servers.nic.bandwidth_gbps, 0.0, "nic")
    cables.append((ranks, first + ranks // gpus_per_nic, lanes.bandwidth_gbps, lanes.latency_us, lanes.kind))
    return nodes, cables, first + np.arange(servers.count * servers.ports)


def fat_tree(servers: Servers, radix: int = 64, oversubscription: float = 1.0, rails: bool = False) -> Topology:
    """A two- or three-level Clos of switches with ``radix`` ports, as wide as ranks need.

    ``oversubscription`` is a leaf's bandwidth down over up. With ``rails``, GPU i of every server is on the leaves of
    rail i, so that equal GPUs of a pod of servers are one switch apart (rail-optimized, as in NVIDIA's SuperPOD
    reference architecture); otherwise a leaf takes whole servers. TopologyError when three levels do not suffice.
    """
    nodes, cables, ports = _lay_servers(servers)
    down = _down_ports(radix, oversubscription)
    above = _lay_switches(nodes, cables, ports, _leaf_of(servers, down, rails), servers.nic, radix, oversubscription)
    return build_topology(f"{'rails' if rails else 'fat tree'}, {above}", servers.ranks, nodes, cables)


def _down_ports(radix: int, oversubscription: float) -> int:
    """Ports of a leaf that go down."""
    if radix < 4 or oversubscription < 1.0:
        raise TopologyError(f"a fat tree needs radix >= 4 and oversubscription >= 1, got {radix}, {oversubscription:g}")
    return max(1, int(radix * oversubscription / (1.0 + oversubscription)))


def _lay_switches(
    nodes: list[str],
    cables: Cables,
    ports: np.ndarray,
    leaf: np.ndarray,
    port: Port,
    radix: int,
    oversubscription: float,
) -> str:
    """Append the leaves of ``ports`` (``leaf`` numbers them) and the levels above; returns how many levels that are."""
    down, leaves, first = _down_ports(radix, oversubscription), int(leaf.max()) + 1, len(nodes)
    nodes += [f"leaf{i}" for i in range(leaves)]
    cables.append((ports, first + leaf, port.bandwidth_gbps, port.latency_us, port.kind))
    if leaves == 1:
        return "one level"
    up_gbps = down * port.bandwidth_gbps / oversubscription
    if leaves <= radix:
        count = max(1, min(radix - down, int(np.ceil(leaves * (radix - down) / radix))))
        _join_switches(nodes, cables, np.arange(first, first + leaves), "spine", count, up_gbps, port)
        return "two levels"
    half = radix // 2
    pods = int(np.ceil(leaves / half))
    if pods > radix:
        raise TopologyError(f"{len(ports)} ports need more than three levels of radix {radix}; raise the radix")
    spines = []
    for pod in range(pods):
        pod_leaves = first + np.arange(pod * half, min((pod + 1) * half, leaves))
        spines.append(_join_switches(nodes, cables, pod_leaves, f"spine{pod}.", half, up_gbps, port))
    cores = len(nodes)
    nodes += [f"core{i}" for i in range(half)]  # core i stands for the plane that joins spine i of every pod
    for pod_spines in spines:
        cables.append((pod_spines, cores + np.arange(half), up_gbps, port.latency_us, port.kind))
    return "three levels"


def _leaf_of(servers: Servers, down: int, rails: bool) -> np.ndarray:
    """Leaf of each port."""
    port, ports = np.arange(servers.count * servers.ports), servers.ports
    if rails:
        groups = int(np.ceil(servers.count / down))
        return port % ports * groups + port // ports // down
    if ports <= down:
        return port // ports // (down // ports)  # whole servers a leaf
    leaves_per_server = -(-ports // down)  # leaves a server
    return port // ports * leaves_per_server + port % ports * leaves_per_server // ports


def _join_switches(
    nodes: list[str], cables: Cables, lower: np.ndarray, name: str, count: int, total_gbps: float, port: Port
) -> np.ndarray:
    """``count`` new switches, each joined to all ``lower`` ones, which send ``total_gbps`` up in all."""
    first = len(nodes)
    nodes += [f"{name}{i}" for i in range(count)]
    upper = first + np.arange(count)
    cables.append((np.repeat(lower, count), np.tile(upper, len(lower)), total_gbps / count, port.latency_us, port.kind))
    return upper


def dual_tor(servers: Servers, radix: int = 64, oversubscription: float = 1.0, rails: bool = False) -> Topology:
    """Each NIC's two ports, at half the rate, on two leaves under the same spines: losing one cuts nobody off."""
    nodes, cables, ports = _lay_servers(servers)
    half = replace(servers.nic, bandwidth_gbps=servers.nic.bandwidth_gbps / 2.0)
    leaf = _leaf_of(servers, _down_ports(radix, oversubscription), rails)
    leaves = np.concatenate([leaf, leaf + leaf.max() + 1])
    above = _lay_switches(nodes, cables, np.tile(ports, 2), leaves, half, radix, oversubscription)
    return build_topology(f"dual ToR, {above}", servers.ranks, nodes, cables)


def dual_plane(servers: Servers, radix: int = 64, oversubscription: float = 1.0, rails: bool = False) -> Topology:
    """Each NIC's two ports, at half the rate, on leaves of two planes that meet nowhere (Alibaba HPN, SIGCOMM 2024).

    Losing one leaf halves a server's bandwidth and cuts nobody off.
    """
    nodes, cables, ports = _lay_servers(servers)
    half = replace(servers.nic, bandwidth_gbps=servers.nic.bandwidth_gbps / 2.0)
    leaf = _leaf_of(servers, _down_ports(radix, oversubscription), rails)
    for plane in "ab":
        first = len(nodes)
        above = _lay_switches(nodes, cables, ports, leaf, half, radix, oversubscription)
        nodes[first:] = [f"{name}.{plane}" for name in nodes[first:]]
    return build_topology(f"dual plane, {above}", servers.ranks, nodes, cables)


def dragonfly(servers: Servers, groups: int, routers: int, global_gbps: float, local_gbps: float) -> Topology:
    """``groups`` of ``routers``, each to each inside, one cable between every two groups (Kim et al., ISCA 2008)."""
    if groups < 1 or routers < 1 or servers.count % (groups * routers):
        raise TopologyError(f"{servers.count} servers do not divide over {groups} groups x {routers} routers")
    nodes, cables, ports = _lay_servers(servers)
    first, port = len(nodes), servers.nic
    nodes += [f"router{g}.{r}" for g in range(groups) for r in range(routers)]
    home = first + np.arange(len(ports)) // (len(ports) // (groups * routers))
    cables.append((ports, home, port.bandwidth_gbps, port.latency_us, port.kind))
    if routers > 1:
        pairs = np.array(list(combinations(range(routers), 2)))
        base = first + routers * np.arange(groups)[:, None]
        ends = (base + pairs[:, 0]).ravel(), (base + pairs[:, 1]).ravel()
        cables.append((*ends, local_gbps, port.latency_us, port.kind))
    if groups > 1:
        far = np.array(list(combinations(range(groups), 2)))
        first_router = first + far[:, 0] * routers + (far[:, 1] - 1) % routers
        second_router = first + far[:, 1] * routers + far[:, 0] % routers
        cables.append((first_router, second_router, global_gbps, port.latency_us, port.kind))
    return build_topology("dragonfly", servers.ranks, nodes, cables)
