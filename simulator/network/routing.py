"""Ways through a fabric: the shortest, spread over equal ones by hash (ECMP) or evenly, or dimension by dimension.

All flows step together, one hop at a time: a flow at a node takes one of the links whose far end lies on a cheapest way
to its target. Which one is a hash of the flow, as Ethernet switches do it, so that equal paths fill evenly on average
and not exactly (RFC 2992); ``adaptive`` shares every flow evenly among them, as InfiniBand's adaptive routing and
packet spraying come close to, and sends less where links are worn; ``shortest`` always takes the first. A link inside a
server counts half a hop: neighbours there talk over NVLink, and a message to another rail crosses NVLink first and
leaves by that rail's NIC, as NCCL's PXN does.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .distances import Distances
from .next_hops import SERVER_LINK_KINDS, NextHops
from .topology import Topology, TopologyError

FLOWS_PER_CHUNK = 262_144  # flows stepped together
DENSE_KEYS_PER_ENTRY = 8  # possible keys an entry up to which sums are taken over all of them


Entries = tuple[np.ndarray, np.ndarray]  # keys and values


@dataclass(frozen=True, eq=False)
class Paths:
    """Links of each flow in order, as CSR: ``links[start[i]:start[i + 1]]``."""

    start: np.ndarray
    links: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    def latency_us(self, topology: Topology) -> np.ndarray:
        """Sum of link latencies of each flow."""
        return np.bincount(self.owner, topology.latency_us[self.links], minlength=len(self))

    @property
    def owner(self) -> np.ndarray:
        """The flow of each entry of ``links``."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))


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

    @cached_property
    def _next_hops(self) -> NextHops:
        return _build_next_hops(self.topology)

    def on(self, topology: Topology) -> Router:
        """The same ways where links have other bandwidths."""
        router = copy(self)
        router.topology = topology
        return router

    @property
    def distances(self) -> Distances:
        """Costs of ways between nodes."""
        return self._next_hops.distances

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
        chunks = [
            self._hops(
                source[first : first + FLOWS_PER_CHUNK],
                target[first : first + FLOWS_PER_CHUNK],
                flow[first : first + FLOWS_PER_CHUNK],
            )
            for first in range(0, len(source), FLOWS_PER_CHUNK)
        ]
        links = np.concatenate([links for links, _ in chunks]) if chunks else np.zeros(0, dtype=np.int64)
        lengths = np.concatenate([length for _, length in chunks]) if chunks else np.zeros(0, dtype=np.int64)
        return Paths(np.concatenate([[0], np.cumsum(lengths)]), links)

    def crossings(self, source: np.ndarray, target: np.ndarray) -> Crossings:
        """What these flows load when all send alike."""
        return self.by_owner(source, target, np.zeros(len(source), dtype=np.int64), 1)[0]

    def by_owner(self, source: np.ndarray, target: np.ndarray, owner: np.ndarray, owners: int) -> list[Crossings]:
        """What the flows of each owner load when all of them send alike; ``owner`` [n] counts from 0 to ``owners``."""
        self._check(source, target)
        spread = self._evenly if self.policy == "adaptive" else self._by_hash
        longest, total = np.zeros(owners), np.zeros(owners)
        chunks = [
            spread(
                source[first : first + FLOWS_PER_CHUNK],
                target[first : first + FLOWS_PER_CHUNK],
                owner[first : first + FLOWS_PER_CHUNK],
                longest,
                total,
            )
            for first in range(0, len(source), FLOWS_PER_CHUNK)
        ]
        key, flows = _sum_entries(chunks, owners * self.topology.links)
        flow_owner, links = np.divmod(key, self.topology.links)
        bounds = np.searchsorted(flow_owner, np.arange(owners + 1)).tolist()
        mean = total / np.maximum(np.bincount(owner, minlength=owners), 1)
        return [
            Crossings(links[begin:end], flows[begin:end], *latency)
            for begin, end, *latency in zip(bounds, bounds[1:], longest.tolist(), mean.tolist(), strict=False)
        ]

    def _by_hash(
        self, source: np.ndarray, target: np.ndarray, owner: np.ndarray, longest: np.ndarray, total: np.ndarray
    ) -> Entries:
        """Flows by owner and link (owner x links + link); adds up their ``longest`` and ``total`` latency [owners]."""
        paths = self.ways(source, target)
        latency = paths.latency_us(self.topology)
        np.maximum.at(longest, owner, latency)
        total += np.bincount(owner, latency, minlength=len(total))
        key = owner[paths.owner] * self.topology.links + paths.links
        return _sum_entries([(key, np.ones(len(key)))], len(total) * self.topology.links)

    def _evenly(
        self, source: np.ndarray, target: np.ndarray, owner: np.ndarray, longest: np.ndarray, total: np.ndarray
    ) -> Entries:
        """The same of flows that divide among all links that lead on."""
        topology, size, space = self.topology, len(self.topology.nodes), len(total) * self.topology.links
        walking = source != target
        state, which = np.unique(((owner * size + target) * size + source)[walking], return_inverse=True)
        amount, latency = np.bincount(which, minlength=len(state)).astype(np.float64), np.zeros(len(state))
        entries: list[Entries] = []
        while len(state):
            aim, here = np.divmod(state, size)
            state_index, link = self._next_hops.links(here, aim % size)
            aim, carried = (
                aim[state_index],
                amount[state_index] * self._shares(state_index, link, (aim % size)[state_index]),
            )
            flow_owner, latency_after = aim // size, latency[state_index] + topology.latency_us[link]
            entries.append(_sum_entries([(flow_owner * topology.links + link, carried)], space))
            total += np.bincount(flow_owner, carried * topology.latency_us[link], minlength=len(total))
            head = topology.target[link]
            arrived = head == aim % size
            np.maximum.at(longest, flow_owner[arrived], latency_after[arrived])
            onward = ~arrived
            state, which = np.unique((aim * size + head)[onward], return_inverse=True)
            amount = np.bincount(which, carried[onward], minlength=len(state)).astype(np.float64)
            latency = np.zeros(len(state))
            np.maximum.at(latency, which, latency_after[onward])
        return _sum_entries(entries, space)

    def _shares(self, query: np.ndarray, link: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Share of its flow that each of the links that lead on takes: even, or by what is left of the ways [links]."""
        count = np.bincount(query)[query]
        divided = np.flatnonzero(count > 1)
        if self.topology.health is None or not len(divided):
            return 1.0 / count
        healthy = np.ones(len(link))
        healthy[divided] = self._healthy_share(link[divided], target[divided])
        return healthy / np.bincount(query, healthy)[query]

    def _healthy_share(self, link: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Share of bandwidth that is left over links and from their ends to targets: on average of equal ways [n]."""
        size, head = len(self.topology.nodes), self.topology.target[link]
        assert self.topology.health is not None
        healthy, onward_links = self.topology.health[link], head != target
        if onward_links.any():
            pairs, which = np.unique(target[onward_links] * size + head[onward_links], return_inverse=True)
            aim, here = np.divmod(pairs, size)
            query, onward = self._next_hops.links(here, aim)
            ways = self._healthy_share(onward, aim[query])
            healthy[onward_links] = np.minimum(
                healthy[onward_links], (np.bincount(query, ways) / np.bincount(query))[which]
            )
        return healthy

    def _check(self, source: np.ndarray, target: np.ndarray) -> None:
        for rank in (source, target):
            if len(rank) and (rank.min() < 0 or rank.max() >= self.topology.ranks):
                raise TopologyError(f"rank {rank.max()} exceeds {self.topology.name} with {self.topology.ranks} ranks")

    def _hops(self, source: np.ndarray, target: np.ndarray, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flow_hash = _mix_words(source * 1_000_003 + target * 7919 + flow * 104_729 + self.seed)
        here, walking = source.copy(), np.flatnonzero(source != target)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        while len(walking):
            if len(steps) > len(self.topology.nodes):
                raise TopologyError(f"{self.topology.name} routes in a circle")
            link = POLICIES[self.policy](self, here[walking], target[walking], flow_hash[walking] + len(steps))
            steps.append((walking, link))
            here[walking] = self.topology.target[link]
            walking = walking[here[walking] != target[walking]]
        if not steps:
            return np.zeros(0, dtype=np.int64), np.zeros(len(source), dtype=np.int64)
        owner, links = (np.concatenate([step[side] for step in steps]) for side in (0, 1))
        return links[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=len(source))


@lru_cache(maxsize=4)
def _build_next_hops(topology: Topology) -> NextHops:
    """What leads on in a topology, which all routers on it share."""
    near = topology.of_kind(SERVER_LINK_KINDS)
    cost = np.where(near, 1, 2) if near.any() else np.ones(topology.links, dtype=np.int64)
    return NextHops(topology, Distances(topology, cost, near | topology.of_kind(("nic",))))


def _equal_cost_link(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """One of the links on a cheapest way, the ``choice``-th modulo their number."""
    # flows at one node to one target share their links
    pairs, which = np.unique(target * len(router.topology.nodes) + here, return_inverse=True)
    aim, here = np.divmod(pairs, len(router.topology.nodes))
    owner, link = router._next_hops.links(here, aim)
    link, count = link[np.lexsort((link, owner))], np.bincount(owner, minlength=len(pairs))
    first = np.cumsum(count) - count
    return np.asarray(link[first[which] + choice % count[which]])


def _first_link(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    return _equal_cost_link(router, here, target, np.zeros_like(choice))


def _dimension_order_link(router: Router, here: np.ndarray, target: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Correct the first differing coordinate first (Dally and Seitz, 1987), by the shortest way along that line."""
    coordinates = router.topology.coordinates
    assert coordinates is not None
    inside = here < len(coordinates)
    corner = target.copy()  # where the line of the first differing dimension meets the target's coordinate
    differs = coordinates[here[inside]] != coordinates[target[inside]]
    axis = differs.argmax(axis=1)
    corner_coordinates = coordinates[here[inside]].copy()
    rows = np.arange(len(axis))
    corner_coordinates[rows, axis] = coordinates[target[inside], axis]
    corner[inside] = np.ravel_multi_index(tuple(corner_coordinates.T), tuple(coordinates.max(axis=0) + 1), order="F")
    return _equal_cost_link(router, here, corner, np.zeros_like(choice))


POLICIES: dict[str, Callable[[Router, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "adaptive": _equal_cost_link,
    "ecmp": _equal_cost_link,
    "shortest": _first_link,
    "dimension_order": _dimension_order_link,
}


def _sum_entries(entries: list[Entries], space: int) -> Entries:
    """Entries in the order of their keys (below ``space``), values of equal ones added up."""
    key = np.concatenate([np.zeros(0, dtype=np.int64), *(entry[0] for entry in entries)])
    values = np.concatenate([np.zeros(0), *(entry[1] for entry in entries)])
    if space <= DENSE_KEYS_PER_ENTRY * len(key):
        sums = np.bincount(key, values, minlength=space)
        used = np.flatnonzero(sums)
        return used, sums[used]
    unique, which = np.unique(key, return_inverse=True)
    return unique, np.bincount(which, values, minlength=len(unique)).astype(np.float64)


def _mix_words(values: np.ndarray) -> np.ndarray:
    """Well-spread non-negative numbers from neighbouring ones (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
