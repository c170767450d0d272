"""Costs of the cheapest ways between nodes of a fabric: exact, without a table of all pairs.

Whoever wants to reach a server enters it by one of a few links. So the cost to any of its nodes follows from those to
the *hubs* at the far ends of these links and from ways inside the server, and thousands of GPUs under one switch need
but one row of costs. Rows come from searches breadth first, level by level, from 64 hubs in every word.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .topology import Topology

FAR = 15_000  # the cost of what cannot be reached
LARGEST = 256  # nodes of a server; what is joined more widely is a fabric of its own
BLOCK = 512  # hubs searched from at once
MOST = 100_000_000  # costs up to which all hubs are searched from at once
FURTHER = 4  # cost beyond what is asked for that is found out too
FEW = 4  # nodes a hub at least: fewer are not worth it, and each node is its own


class Distances:
    """Costs of ways over links of ``cost`` (small whole numbers); ``near`` are the links inside servers [links]."""

    def __init__(self, topology: Topology, cost: np.ndarray, near: np.ndarray) -> None:
        self.topology, self.cost = topology, cost
        nodes = len(topology.nodes)
        entered = self._divide(_joined(topology, near))
        hubs = np.unique(topology.source[entered])
        if FEW * len(hubs) > nodes:
            entered = self._divide(np.arange(nodes))[:0]
        self._enter(entered)
        crossing = self.server[topology.source] != self.server[topology.target]
        self._detour = 2 * int(cost[crossing].min(initial=FAR // 2))  # the least to leave a server and return
        self._column = np.full(nodes, -1, dtype=np.int64)  # of each hub in the table
        self._table = np.zeros((nodes, 0), dtype=np.int16)  # cost from every node to each hub
        self._reach = np.zeros(0, dtype=np.int64)  # up to which the costs to each hub are known
        self._known = 0
        if len(entered) and nodes * len(hubs) <= MOST:
            self._take(hubs)

    def between(self, here: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Cost from each node ``here`` to ``target`` [n]; ``FAR`` where there is no way."""
        best = np.full(len(here), FAR, dtype=np.int16)
        same = np.flatnonzero(self.server[here] == self.server[target])
        best[same] = self._inside[self._row[here[same]] + self.place[target[same]]]
        other = np.flatnonzero(best > self._detour)
        best[other] = np.minimum(best[other], self.from_hubs(here[other], target[other]))
        return best

    def from_hubs(self, here: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The same over ways that enter the target's server last from outside."""
        server = self.server[target]
        self._take(np.unique(self.hubs[:, np.unique(server)]))
        while True:
            best = np.full(len(here), FAR, dtype=np.int16)
            columns = [self._column[hub[server]] for hub in self.hubs]
            for column, entry in zip(columns, self.entry, strict=True):
                np.minimum(best, self._table[here, column] + entry[target], out=best)
            if (self._reach >= FAR).all():
                return best
            lacks = [
                self._reach[column] + entry[target] < best for column, entry in zip(columns, self.entry, strict=True)
            ]
            if not any(each.any() for each in lacks):
                return best
            missing = [(here[lack], column[lack]) for column, lack in zip(columns, lacks, strict=True)]
            self._learn(*(np.concatenate([pair[side] for pair in missing]) for side in (0, 1)))

    def signature(self) -> np.ndarray:
        """Hubs of each node and costs from them: nodes with the same are alike from outside [nodes, ..]."""
        return np.concatenate([self.hubs[:, self.server], self.entry]).T

    def _divide(self, label: np.ndarray) -> np.ndarray:
        """Number servers by the labels of nodes, and nodes in them; the links that enter servers with ranks."""
        topology = self.topology
        self.server = np.unique(label, return_inverse=True)[1].reshape(-1)
        self._members = np.argsort(self.server, kind="stable")
        self._count = np.bincount(self.server)
        self._first = np.cumsum(self._count) - self._count
        self.place = np.empty_like(self.server)
        self.place[self._members] = counted(self._count)[1]
        with_ranks = np.bincount(self.server[: topology.ranks], minlength=len(self._count)) > 0
        source, target = self.server[topology.source], self.server[topology.target]
        return np.flatnonzero((source != target) & with_ranks[target])

    def _enter(self, links: np.ndarray) -> None:
        """Find costs inside servers, and hubs [most, servers] with the costs from them [most, nodes]."""
        topology, nodes, servers = self.topology, len(self.server), len(self._count)
        within = self.server[topology.source] == self.server[topology.target]
        square = self._count**2
        self._row = (np.cumsum(square) - square)[self.server] + self.place * self._count[self.server]
        self._inside = np.full(int(square.sum()), FAR, dtype=np.int16)
        ends = topology.source[within], topology.target[within]
        for cost, node, bits in search(*ends, self.cost[within], self.place):
            row, to = np.nonzero(bits)
            self._inside[self._row[node[row]] + to] = cost
        gate = topology.target[links]
        ways, way = np.unique(self.server[gate] * nodes + topology.source[links], return_inverse=True)
        owner, hub = np.divmod(ways, nodes)
        slot = np.arange(len(ways)) - np.searchsorted(owner, owner)
        self.hubs = np.repeat(self._members[self._first][None], int(slot.max(initial=0)) + 1, axis=0)
        self.hubs[slot, owner] = hub
        self.entry = np.full((len(self.hubs), nodes), FAR, dtype=np.int16)
        closed = np.bincount(owner, minlength=servers) == 0  # what no link enters is reached from its first node
        self.entry[0, self._members[self._first[closed]]] = 0
        link, to = counted(self._count[self.server[gate]])
        costs = self.cost[links][link] + self._inside[self._row[gate[link]] + to]
        node = self._members[self._first[self.server[gate[link]]] + to]
        np.minimum.at(self.entry, (slot[way.reshape(-1)][link], node), np.minimum(costs, FAR).astype(np.int16))

    def _take(self, hubs: np.ndarray) -> None:
        """Give each of these hubs a column of the table."""
        missing = hubs[self._column[hubs] < 0]
        last = self._known + len(missing)
        if last > self._table.shape[1]:
            wider = np.full((len(self._table), max(last, 2 * self._known)), FAR, dtype=np.int16)
            wider[:, : self._known] = self._table[:, : self._known]
            self._table = wider
        self._column[missing] = np.arange(self._known, last)
        self._reach = np.concatenate([self._reach, np.full(len(missing), -1)])
        self._known = last

    def _learn(self, here: np.ndarray, column: np.ndarray) -> None:
        """Find the costs from nodes to the hubs of columns, and those of all nodes that are about as near [n]."""
        hub = np.full(self._known, -1)
        hub[self._column[self._column >= 0]] = np.flatnonzero(self._column >= 0)
        for block in np.unique(column // BLOCK).tolist():
            mine = column // BLOCK == block
            asked, of = here[mine], column[mine]
            wanted = np.arange(block * BLOCK, min((block + 1) * BLOCK, self._known))
            wanted = wanted[self._reach[wanted] < FAR]
            bit = np.full(len(self._table), -1)
            bit[hub[wanted]] = wanted % BLOCK
            table = self._table[:, block * BLOCK : (block + 1) * BLOCK]
            until = reach = FAR
            for cost, node, bits in search(self.topology.source, self.topology.target, self.cost, bit):
                if cost > until:
                    reach = cost - 1
                    break
                costs = table[node, : bits.shape[1]]
                costs[bits[:, : costs.shape[1]]] = cost
                table[node, : bits.shape[1]] = costs
                waits = self._table[asked, of] >= FAR
                asked, of = asked[waits], of[waits]
                if until == FAR and not len(asked):
                    until = max(cost + FURTHER, 2 * int(self._reach[wanted].max()))
            self._reach[wanted] = reach


def counted(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each i as often as ``count[i]`` says, and the numbers from 0 on for each."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)


def search(
    source: np.ndarray, target: np.ndarray, cost: np.ndarray, bit: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Cost, nodes that reach roots at that cost, and which roots [nodes, bits]; ``bit`` [nodes] is -1 but for roots.

    Roots that reach nothing in common may share a bit.
    """
    order = np.argsort(source, kind="stable")
    steps = sorted(set(cost.tolist()))
    links = {step: (source[each], target[each]) for step in steps for each in [order[cost[order] == step]]}
    roots = np.flatnonzero(bit >= 0)
    near = np.zeros((len(bit), int(bit.max()) // 64 + 1), dtype=np.uint64)
    near[roots, bit[roots] // 64] = np.uint64(1) << (bit[roots] % 64).astype(np.uint64)
    yield 0, roots, bit[roots][:, None] == np.arange(64 * near.shape[1])
    fresh, now = {0: near.copy()}, 0
    while steps and any(level.any() for level in fresh.values()):
        now += 1
        found = np.zeros_like(near)
        for step in steps:
            if now - step in fresh:
                _relax(found, fresh[now - step], *links[step])
        found &= ~near
        near |= found
        fresh = {level: words for level, words in (fresh | {now: found}).items() if level > now - steps[-1]}
        nodes = np.flatnonzero(found.any(axis=1))
        if len(nodes):
            words = found[nodes].astype("<u8").view(np.uint8)
            yield now, nodes, np.unpackbits(words, axis=1, bitorder="little").view(bool)


def _relax(found: np.ndarray, level: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """Add to ``found`` what the far ends of links reached at a level."""
    active = np.take(level.any(axis=1), target)
    if active.any():
        source, target = source[active], target[active]
        begin = np.flatnonzero(np.concatenate([[True], source[1:] != source[:-1]]))
        found[source[begin]] |= np.bitwise_or.reduceat(level[target], begin, axis=0)


def _joined(topology: Topology, near: np.ndarray) -> np.ndarray:
    """A label of each node, the same for those that ``near`` links join to some ranks, but not too many [nodes]."""
    label = np.arange(len(topology.nodes))
    source, target = topology.source[near], topology.target[near]
    while True:
        before = label.copy()
        np.minimum.at(label, source, before[target])
        np.minimum.at(label, target, before[source])
        if (label == before).all():
            break
    apart = (np.bincount(label, minlength=len(label))[label] > LARGEST) | (label >= topology.ranks)
    return np.where(apart, np.arange(len(label)), label)
