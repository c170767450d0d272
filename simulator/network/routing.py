"""Ways through a fabric: the shortest, spread over equal ones by hash (ECMP) or evenly, or dimension by dimension.

All flows step together, one hop at a time: a flow at a node takes one of the links whose far end lies on a cheapest way
to its target. Which one is a hash of the flow, as Ethernet switches do it, so that equal paths fill evenly on average
and not exactly (RFC 2992); ``adaptive`` shares every flow evenly among them, as InfiniBand's adaptive routing and
packet spraying come close to; ``shortest`` always takes the first. A link inside a server counts half a hop: neighbours
there talk over NVLink, and a message to another rail crosses NVLink first and leaves by that rail's NIC, as NCCL's PXN
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .distances import Distances
from .onward import Onward
from .topology import Topology, TopologyError

CHUNK = 262_144  # flows stepped together
INSIDE = ("nvlink", "pcie")  # kinds of link that stay inside a server


@dataclass(frozen=True, eq=False)
class Paths:
    """Links of each flow in order, as CSR: ``links[start[i]:start[i + 1]]``."""

    start: np.ndarray
    links: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    def latency_us(self, topology: Topology) -> np.ndarray:
        """Sum of link latencies of each flow."""
        return self._total(topology.latency_us[self.links])

    def bottleneck_gbps(self, topology: Topology) -> np.ndarray:
        """Least bandwidth on each flow's path; infinite for a flow that stays where it is."""
        out = np.full(len(self), np.inf)
        np.minimum.at(out, self.owner, topology.bandwidth_gbps[self.links])
        return out

    @property
    def owner(self) -> np.ndarray:
        """The flow of each entry of ``links``."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    def _total(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.owner, values, minlength=len(self))


class Crossings(NamedTuple):
    """Links used and how many flows cross each (fractions when adaptive); the longest and the mean latency of flows."""

    links: np.ndarray
    flows: np.ndarray
    longest_us: float
    mean_us: float


class Router:
    """Paths on one fabric; what costs of ways are found out is kept.

    ``policy`` is ``adaptive``, ``ecmp``, ``shortest`` or ``dimension_order`` (products of dimensions only);
    TopologyError otherwise.
    """

    def __init__(self, topology: Topology, policy: str = "ecmp", seed: int = 0) -> None:
        if policy not in POLICIES:
            raise TopologyError(f"unknown routing {policy!r}; known: {', '.join(POLICIES)}")
        if policy == "dimension_order" and topology.coordinates is None:
            raise TopologyError(f"{topology.name} has no dimensions to route in order; use ecmp or shortest")
        self.topology, self.policy, self.seed = topology, policy, seed
        self._onward = _onward(topology)

    @property
    def distances(self) -> Distances:
        """Costs of ways between nodes."""
        return self._onward.distances

    def paths(self, source: np.ndarray, target: np.ndarray, flow: np.ndarray | None = None) -> Paths:
        """Paths from rank ``source[i]`` to ``target[i]``; ``flow`` [n] tells flows of one pair apart for ECMP.

        TopologyError when a rank is not in the fabric or cannot be reached.
        """
        source, target = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
        self._check(source, target)
        return self.ways(source, target, flow)

    def ways(self, source: np.ndarray, target: np.ndarray, flow: np.ndarray | None = None) -> Paths:
        """Paths between nodes of any sort, switches too."""
        flow = np.zeros(len(source), dtype=np.int64) if flow is None else np.asarray(flow, dtype=np.int64)
        parts = [
            self._hops(source[at : at + CHUNK], target[at : at + CHUNK], flow[at : at + CHUNK])
            for at in range(0, len(source), CHUNK)
        ]
        links = np.concatenate([links for links, _ in parts]) if parts else np.zeros(0, dtype=np.int64)
        lengths = np.concatenate([length for _, length in parts]) if parts else np.zeros(0, dtype=np.int64)
        return Paths(np.concatenate([[0], np.cumsum(lengths)]), links)

    def crossings(self, source: np.ndarray, target: np.ndarray) -> Crossings:
        """What these flows load when all send alike."""
        if self.policy != "adaptive":
            paths = self.paths(source, target)
            links, counts = np.unique(paths.links, return_counts=True)
            latency = paths.latency_us(self.topology)
            longest, mean = (float(latency.max()), float(latency.mean())) if len(latency) else (0.0, 0.0)
            return Crossings(links, counts.astype(np.float64), longest, mean)
        self._check(source, target)
        load = np.zeros(self.topology.links)
        longest = total = 0.0
        for at in range(0, len(source), CHUNK):
            found = self._spread(source[at : at + CHUNK], target[at : at + CHUNK], load)
            longest, total = max(longest, found[0]), total + found[1]
        links = np.flatnonzero(load)
        return Crossings(links, load[links], longest, total / max(len(source), 1))

    def each(self, source: np.ndarray, target: np.ndarray) -> list[Crossings]:
        """What every single flow loads: as :meth:`crossings` flow by flow, but at once."""
        self._check(source, target)
        parts = [self._each(source[at : at + CHUNK], target[at : at + CHUNK]) for at in range(0, len(source), CHUNK)]
        return [found for part in parts for found in part]

    def _each(self, source: np.ndarray, target: np.ndarray) -> list[Crossings]:
        if self.policy != "adaptive":
            paths = self.paths(source, target)
            latency = paths.latency_us(self.topology)
            flow, links, shares = paths.owner, paths.links, np.ones(len(paths.links))
        else:
            flow, links, shares, latency = self._spread_each(source, target)
        bounds = np.searchsorted(flow, np.arange(len(source) + 1))
        return [
            Crossings(links[begin:end], shares[begin:end], longest, longest)
            for begin, end, longest in zip(bounds[:-1].tolist(), bounds[1:].tolist(), latency.tolist(), strict=True)
        ]

    def _spread_each(
        self, source: np.ndarray, target: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Flow, link and share of every entry, sorted by flow, and the longest latency of each flow."""
        topology, size = self.topology, len(self.topology.nodes)
        flow = np.flatnonzero(source != target)
        here, share, latency = source[flow], np.ones(len(flow)), np.zeros(len(flow))
        total = np.zeros(len(source))
        entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        while len(flow):
            owner, link, count = self._next(target[flow] * size + here)
            part, flow, later = share[owner] / count[owner], flow[owner], latency[owner] + topology.latency_us[link]
            entries.append((flow, link, part))
            here = topology.target[link]
            arrived = here == target[flow]
            np.maximum.at(total, flow[arrived], later[arrived])
            keys, which = np.unique((flow * size + here)[~arrived], return_inverse=True)
            flow, here = keys // size, keys % size
            share = np.bincount(which, part[~arrived], minlength=len(keys)).astype(np.float64)
            latency = np.zeros(len(keys))
            np.maximum.at(latency, which, later[~arrived])
        empty = np.zeros(0, dtype=np.int64)
        flows, links = (np.concatenate([empty, *(each[side] for each in entries)]) for side in (0, 1))
        shares = np.concatenate([np.zeros(0), *(each[2] for each in entries)])
        order = np.argsort(flows, kind="stable")
        return flows[order], links[order], shares[order], total

    def _spread(self, source: np.ndarray, target: np.ndarray, load: np.ndarray) -> tuple[float, float]:
        """Add to ``load`` [links] what each carries of flows that divide evenly; their longest and total latency."""
        topology, size = self.topology, len(self.topology.nodes)
        walking = source != target
        pairs, which = np.unique((target * size + source)[walking], return_inverse=True)
        amount = np.bincount(which, minlength=len(pairs)).astype(np.float64)
        latency = np.zeros(len(pairs))
        longest = total = 0.0
        while len(pairs):
            owner, link, count = self._next(pairs)
            part = amount[owner] / count[owner]
            load += np.bincount(link, part, minlength=topology.links)
            total += float(part @ topology.latency_us[link])
            reached = pairs[owner] // size * size + topology.target[link]
            later = latency[owner] + topology.latency_us[link]
            arrived = reached // size == reached % size
            longest = max(longest, float(later[arrived].max(initial=0.0)))
            pairs, which = np.unique(reached[~arrived], return_inverse=True)
            amount = np.bincount(which, part[~arrived], minlength=len(pairs)).astype(np.float64)
            latency = np.zeros(len(pairs))
            np.maximum.at(latency, which, later[~arrived])
        return longest, total

    def _next(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Links on a cheapest way for pairs (target x nodes + node): pair, link; and links of each pair.

        TopologyError when a target cannot be reached.
        """
        target, here = np.divmod(pairs, len(self.topology.nodes))
        owner, link = self._onward.links(here, target)
        return owner, link, np.bincount(owner, minlength=len(here))

    def _check(self, source: np.ndarray, target: np.ndarray) -> None:
        for rank in (source, target):
            if len(rank) and (rank.min() < 0 or rank.max() >= self.topology.ranks):
                raise TopologyError(f"rank {rank.max()} exceeds {self.topology.name} with {self.topology.ranks} ranks")

    def _hops(self, source: np.ndarray, target: np.ndarray, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hash_of = _mixed(source * 1_000_003 + target * 7919 + flow * 104_729 + self.seed)
        here, walking = source.copy(), np.flatnonzero(source != target)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        while len(walking):
            if len(steps) > len(self.topology.nodes):
                raise TopologyError(f"{self.topology.name} routes in a circle")
            link = POLICIES[self.policy](self, here[walking], target[walking], hash_of[walking] + len(steps))
            steps.append((walking, link))
            here[walking] = self.topology.target[link]
            walking = walking[here[walking] != target[walking]]
        if not steps:
            return np.zeros(0, dtype=np.int64), np.zeros(len(source), dtype=np.int64)
        owner, links = (np.concatenate([step[side] for step in steps]) for side in (0, 1))
        return links[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=len(source))


@lru_cache(maxsize=4)
def _onward(topology: Topology) -> Onward:
    """What leads on in a topology, which all routers on it share."""
    near = topology.of_kind(INSIDE)
    cost = np.where(near, 1, 2) if near.any() else np.ones(topology.links, dtype=np.int64)
    return Onward(topology, Distances(topology, cost, near | topology.of_kind(("nic",))))


def _equal_cost(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """One of the links on a cheapest way, the ``choice``-th modulo their number."""
    # flows at one node to one target share their links
    pairs, which = np.unique(target * len(router.topology.nodes) + here, return_inverse=True)
    owner, link, count = router._next(pairs)
    link = link[np.lexsort((link, owner))]
    first = np.cumsum(count) - count
    return np.asarray(link[first[which] + choice % count[which]])


def _first(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    return _equal_cost(router, here, target, np.zeros_like(choice))


def _dimension_order(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Correct the first differing coordinate first (Dally and Seitz, 1987), by the shortest way along that line."""
    coordinates = router.topology.coordinates
    assert coordinates is not None
    inside = here < len(coordinates)
    corner = target.copy()  # where the line of the first differing dimension meets the target's coordinate
    differs = coordinates[here[inside]] != coordinates[target[inside]]
    axis = differs.argmax(axis=1)
    wanted = coordinates[here[inside]].copy()
    rows = np.arange(len(axis))
    wanted[rows, axis] = coordinates[target[inside], axis]
    corner[inside] = np.ravel_multi_index(tuple(wanted.T), tuple(coordinates.max(axis=0) + 1), order="F")
    return _equal_cost(router, here, corner, np.zeros_like(choice))


POLICIES: dict[str, Callable[[Router, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "adaptive": _equal_cost,
    "ecmp": _equal_cost,
    "shortest": _first,
    "dimension_order": _dimension_order,
}


def _mixed(values: np.ndarray) -> np.ndarray:
    """Well-spread non-negative numbers from neighbouring ones (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
