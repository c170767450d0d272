"""Which links lead on: those of a node that lie on a cheapest way to a target, found out once for all targets alike.

Outside of a target's server only its hubs count (:mod:`.distances`). So targets that share them at the same costs are
one *kind*, such as all GPUs of a rail under the same leaf, and what leads on to a kind is kept. The step into a server
and those inside it are looked at one by one.
"""

from __future__ import annotations

import numpy as np

from .distances import FAR, Distances, counted
from .topology import Topology, TopologyError

INSIDE = ("nvlink", "pcie")  # kinds of link that stay inside a server

Owned = tuple[np.ndarray, np.ndarray]  # positions in what was asked, and a link for each


class Onward:
    """Links that lead on from nodes to targets, on ways of cost ``distances``."""

    def __init__(self, topology: Topology, distances: Distances) -> None:
        self.topology, self.distances = topology, distances
        self._nodes = len(topology.nodes)
        self._like, self._kind = np.unique(distances.signature(), axis=0, return_index=True, return_inverse=True)[1:]
        source, target = distances.server[topology.source], distances.server[topology.target]
        crossing = np.flatnonzero(source != target)
        key = target[crossing] * self._nodes + topology.source[crossing]
        order = np.argsort(key, kind="stable")
        self._gate, self._gates = key[order], crossing[order]  # links by the server they enter and where they begin
        self._key = self._begin = self._count = self._links = np.zeros(0, dtype=np.int64)
        self._left = np.zeros(0, dtype=np.int16)
        self._near = topology.of_kind(INSIDE)
        cheap = np.flatnonzero(distances.cost == distances.cost.min(initial=FAR))
        pairs = topology.source[cheap] * self._nodes + topology.target[cheap]
        self._cheapest = cheap[np.argsort(pairs, kind="stable")]
        self._pairs = np.sort(pairs)

    def links(self, here: np.ndarray, target: np.ndarray) -> Owned:
        """Links that lead on from ``here`` to ``target`` [n]. TopologyError where there is no way."""
        direct = self._direct(here, target)
        if (direct >= 0).all():
            return np.arange(len(here)), direct
        server = self.distances.server
        inside = server[here] == server[target]
        near, far = np.flatnonzero(inside), np.flatnonzero(~inside)
        parts = [(near[owner], link) for owner, link in [self._within(here[near], target[near])] if len(near)]
        if len(far):
            at = self._known(self._kind.reshape(-1)[target[far]], here[far])
            self._check(self._left[at], here[far], target[far])
            owner, link = _spread(self._begin[at], self._count[at], self._links)
            passes = server[self.topology.target[link]] != server[target[far]][owner]
            parts.append((far[owner[passes]], link[passes]))
            key = server[target[far]] * self._nodes + here[far]
            first = np.searchsorted(self._gate, key)
            count = np.searchsorted(self._gate, key, side="right") - first
            parts.append(self._nearer(far, self._left[at], target, *_spread(first, count, self._gates)))
        owner, link = (np.concatenate([part[side] for part in parts]) for side in (0, 1)) if parts else (near, near)
        return self._by_rail(owner, link, ~inside)

    def _direct(self, here: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The link from ``here`` to ``target`` where nothing can be cheaper, else -1 [n]."""
        key = here * self._nodes + target
        at = np.minimum(np.searchsorted(self._pairs, key), max(len(self._pairs) - 1, 0))
        if not len(self._pairs):
            return np.full(len(key), -1)
        return np.where(self._pairs[at] == key, self._cheapest[at], -1)

    def _by_rail(self, owner: np.ndarray, link: np.ndarray, far: np.ndarray) -> Owned:
        """Without links to a NIC where equal ways to another server begin inside: rails change at the sender (PXN)."""
        kept = self._near[link]
        changes = np.bincount(owner[kept], minlength=len(far)) > 0
        chosen = kept | ~(changes & far)[owner]
        return owner[chosen], link[chosen]

    def _within(self, here: np.ndarray, target: np.ndarray) -> Owned:
        """Of nodes that share their target's server."""
        left = self.distances.between(here, target)
        self._check(left, here, target)
        return self._nearer(np.arange(len(here)), left, target, *self._out_of(here))

    def _nearer(
        self, asked: np.ndarray, left: np.ndarray, target: np.ndarray, owner: np.ndarray, link: np.ndarray
    ) -> Owned:
        """Those of the links that come nearer by what they cost; ``left`` and ``owner`` count in ``asked``."""
        head = self.topology.target[link]
        keep = self.distances.between(head, target[asked[owner]]) == left[owner] - self.distances.cost[link]
        return asked[owner[keep]], link[keep]

    def _known(self, kind: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Where it is kept what leads on from nodes to kinds of targets [n]."""
        key = kind * self._nodes + here
        at = np.searchsorted(self._key, key)
        known = at < len(self._key)
        known[known] = self._key[at[known]] == key[known]
        if not known.all():
            self._learn(np.unique(key[~known]))
            at = np.searchsorted(self._key, key)
        return at

    def _learn(self, key: np.ndarray) -> None:
        like, here = self._like[key // self._nodes], key % self._nodes
        left = self.distances.from_hubs(here, like)
        owner, link = self._out_of(here)
        head = self.topology.target[link]
        keep = self.distances.from_hubs(head, like[owner]) == left[owner] - self.distances.cost[link]
        owner, link = owner[keep], link[keep]
        count = np.bincount(owner, minlength=len(key))
        begin = len(self._links) + np.cumsum(count) - count
        place = np.searchsorted(self._key, key)
        self._key, self._left = np.insert(self._key, place, key), np.insert(self._left, place, left)
        self._begin, self._count = np.insert(self._begin, place, begin), np.insert(self._count, place, count)
        self._links = np.concatenate([self._links, link])

    def _out_of(self, here: np.ndarray) -> Owned:
        """All links that leave each node."""
        start, order = self.topology.outgoing
        return _spread(start[here], start[here + 1] - start[here], order)

    def _check(self, left: np.ndarray, here: np.ndarray, target: np.ndarray) -> None:
        if (left >= FAR).any():
            lost = int(np.flatnonzero(left >= FAR)[0])
            names = self.topology.nodes
            raise TopologyError(f"{names[here[lost]]} cannot reach {names[target[lost]]}")


def _spread(begin: np.ndarray, count: np.ndarray, values: np.ndarray) -> Owned:
    """``count[i]`` values from ``begin[i]`` on for every i, and that i."""
    owner, offset = counted(count)
    return owner, values[begin[owner] + offset]
