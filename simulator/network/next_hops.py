"""Which links lead on: those of a node that lie on a cheapest way to a target, found out once for all targets alike.

Outside of a target's server only its hubs count (:mod:`.distances`). So targets that share them at the same costs are
one *kind*, such as all GPUs of a rail under the same leaf, and what leads on to a kind is kept. The step into a server
and those inside it are looked at one by one.
"""

from __future__ import annotations

import numpy as np

from .distances import UNREACHABLE, Distances, expand_counts
from .topology import Topology, TopologyError

SERVER_LINK_KINDS = ("nvlink", "pcie")  # kinds of link that stay inside a server

OwnedLinks = tuple[np.ndarray, np.ndarray]  # positions in what was asked, and a link for each


class NextHops:
    """Links that lead on from nodes to targets, on ways of cost ``distances``."""

    def __init__(self, topology: Topology, distances: Distances) -> None:
        self.topology, self.distances = topology, distances
        self._nodes = len(topology.nodes)
        self._sample_of_kind, self._kind = np.unique(
            distances.signature(), axis=0, return_index=True, return_inverse=True
        )[1:]
        source, target = distances.server[topology.source], distances.server[topology.target]
        crossing = np.flatnonzero(source != target)
        key = target[crossing] * self._nodes + topology.source[crossing]
        order = np.argsort(key, kind="stable")
        self._gate, self._gates = key[order], crossing[order]  # links by the server they enter and where they begin
        self._key = self._begin = self._count = self._links = np.zeros(0, dtype=np.int64)
        self._remaining = np.zeros(0, dtype=np.int16)
        self._near = topology.of_kind(SERVER_LINK_KINDS)
        cheap = np.flatnonzero(distances.cost == distances.cost.min(initial=UNREACHABLE))
        pairs = topology.source[cheap] * self._nodes + topology.target[cheap]
        self._cheapest = cheap[np.argsort(pairs, kind="stable")]
        self._pairs = np.sort(pairs)

    def links(self, node: np.ndarray, target: np.ndarray) -> OwnedLinks:
        """Links that lead on from ``node`` to ``target`` [n]. TopologyError where there is no way."""
        direct = self._direct(node, target)
        if (direct >= 0).all():
            return np.arange(len(node)), direct
        server = self.distances.server
        inside = server[node] == server[target]
        near, far = np.flatnonzero(inside), np.flatnonzero(~inside)
        groups = [(near[owner], link) for owner, link in [self._links_inside(node[near], target[near])] if len(near)]
        if len(far):
            row = self._find_rows(self._kind.reshape(-1)[target[far]], node[far])
            self._check(self._remaining[row], node[far], target[far])
            owner, link = _expand_ranges(self._begin[row], self._count[row], self._links)
            passes = server[self.topology.target[link]] != server[target[far]][owner]
            groups.append((far[owner[passes]], link[passes]))
            key = server[target[far]] * self._nodes + node[far]
            first = np.searchsorted(self._gate, key)
            count = np.searchsorted(self._gate, key, side="right") - first
            groups.append(self._nearer(far, self._remaining[row], target, *_expand_ranges(first, count, self._gates)))
        owner, link = (np.concatenate([group[side] for group in groups]) for side in (0, 1)) if groups else (near, near)
        return self._by_rail(owner, link, ~inside)

    def _direct(self, node: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The link from ``node`` to ``target`` where nothing can be cheaper, else -1 [n]."""
        key = node * self._nodes + target
        position = np.minimum(np.searchsorted(self._pairs, key), max(len(self._pairs) - 1, 0))
        if not len(self._pairs):
            return np.full(len(key), -1)
        return np.where(self._pairs[position] == key, self._cheapest[position], -1)

    def _by_rail(self, owner: np.ndarray, link: np.ndarray, far: np.ndarray) -> OwnedLinks:
        """Without links to a NIC where equal ways to another server begin inside: rails change at the sender (PXN)."""
        inside = self._near[link]
        changes = np.bincount(owner[inside], minlength=len(far)) > 0
        used = inside | ~(changes & far)[owner]
        return owner[used], link[used]

    def _links_inside(self, node: np.ndarray, target: np.ndarray) -> OwnedLinks:
        """Of nodes that share their target's server."""
        remaining = self.distances.between(node, target)
        self._check(remaining, node, target)
        return self._nearer(np.arange(len(node)), remaining, target, *self._outgoing_links(node))

    def _nearer(
        self, query: np.ndarray, remaining: np.ndarray, target: np.ndarray, owner: np.ndarray, link: np.ndarray
    ) -> OwnedLinks:
        """Those of the links that come nearer by what they cost; ``remaining`` and ``owner`` count in ``query``."""
        head = self.topology.target[link]
        keep = self.distances.between(head, target[query[owner]]) == remaining[owner] - self.distances.cost[link]
        return query[owner[keep]], link[keep]

    def _find_rows(self, kind: np.ndarray, node: np.ndarray) -> np.ndarray:
        """Where it is kept what leads on from nodes to kinds of targets [n]."""
        key = kind * self._nodes + node
        row = np.searchsorted(self._key, key)
        stored = row < len(self._key)
        stored[stored] = self._key[row[stored]] == key[stored]
        if not stored.all():
            self._add_rows(np.unique(key[~stored]))
            row = np.searchsorted(self._key, key)
        return row

    def _add_rows(self, key: np.ndarray) -> None:
        sample, node = self._sample_of_kind[key // self._nodes], key % self._nodes
        remaining = self.distances.from_hubs(node, sample)
        owner, link = self._outgoing_links(node)
        head = self.topology.target[link]
        keep = self.distances.from_hubs(head, sample[owner]) == remaining[owner] - self.distances.cost[link]
        owner, link = owner[keep], link[keep]
        count = np.bincount(owner, minlength=len(key))
        begin = len(self._links) + np.cumsum(count) - count
        position = np.searchsorted(self._key, key)
        self._key, self._remaining = (
            np.insert(self._key, position, key),
            np.insert(self._remaining, position, remaining),
        )
        self._begin, self._count = np.insert(self._begin, position, begin), np.insert(self._count, position, count)
        self._links = np.concatenate([self._links, link])

    def _outgoing_links(self, node: np.ndarray) -> OwnedLinks:
        """All links that leave each node."""
        start, order = self.topology.outgoing
        return _expand_ranges(start[node], start[node + 1] - start[node], order)

    def _check(self, remaining: np.ndarray, node: np.ndarray, target: np.ndarray) -> None:
        if (remaining >= UNREACHABLE).any():
            unreachable = int(np.flatnonzero(remaining >= UNREACHABLE)[0])
            names = self.topology.nodes
            raise TopologyError(f"{names[node[unreachable]]} cannot reach {names[target[unreachable]]}")


def _expand_ranges(begin: np.ndarray, count: np.ndarray, values: np.ndarray) -> OwnedLinks:
    """``count[i]`` values from ``begin[i]`` on for every i, and that i."""
    owner, offset = expand_counts(count)
    return owner, values[begin[owner] + offset]
