"""Costs of the cheapest ways between nodes of a fabric: exact, without a table of all pairs.

Whoever wants to reach a server enters it by one of a few links. So the cost to any of its nodes follows from those to
the *hubs* at the far ends of these links and from ways inside the server, and thousands of GPUs under one switch need
but one row of costs. Rows come from searches breadth first, level by level, from 64 hubs in every word.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .topology import Topology

UNREACHABLE = 15_000  # the cost of what cannot be reached
MAX_SERVER_NODES = 256  # nodes of a server; what is joined more widely is a fabric of its own
HUBS_PER_BLOCK = 512  # hubs searched from at once
MAX_TABLE_COSTS = 100_000_000  # costs up to which all hubs are searched from at once
LOOKAHEAD_COST = 4  # cost beyond what is asked for that is found out too
MIN_NODES_PER_HUB = 4  # nodes a hub at least: fewer are not worth it, and each node is its own


class Distances:
    """Costs of ways over links of ``cost`` (small whole numbers); ``near`` are the links inside servers [links]."""

    def __init__(self, topology: Topology, cost: np.ndarray, near: np.ndarray) -> None:
        self.topology, self.cost = topology, cost
        nodes = len(topology.nodes)
        entry_links = self._number_servers(_label_servers(topology, near))
        hubs = np.unique(topology.source[entry_links])
        if MIN_NODES_PER_HUB * len(hubs) > nodes:
            entry_links = self._number_servers(np.arange(nodes))[:0]
        self._find_entries(entry_links)
        crossing = self.server[topology.source] != self.server[topology.target]
        self._detour = 2 * int(cost[crossing].min(initial=UNREACHABLE // 2))  # the least to leave a server and return
        self._column = np.full(nodes, -1, dtype=np.int64)  # of each hub in the table
        self._table = np.zeros((nodes, 0), dtype=np.int16)  # cost from every node to each hub
        self._reach = np.zeros(0, dtype=np.int64)  # up to which the costs to each hub are known
        self._column_count = 0
        if len(entry_links) and nodes * len(hubs) <= MAX_TABLE_COSTS:
            self._add_columns(hubs)

    def between(self, node: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Cost from each node ``node`` to ``target`` [n]; ``UNREACHABLE`` where there is no way."""
        best = np.full(len(node), UNREACHABLE, dtype=np.int16)
        same = np.flatnonzero(self.server[node] == self.server[target])
        best[same] = self._inside[self._row[node[same]] + self.slot_in_server[target[same]]]
        other = np.flatnonzero(best > self._detour)
        best[other] = np.minimum(best[other], self.from_hubs(node[other], target[other]))
        return best

    def from_hubs(self, node: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The same over ways that enter the target's server last from outside."""
        server = self.server[target]
        self._add_columns(np.unique(self.hubs[:, np.unique(server)]))
        while True:
            best = np.full(len(node), UNREACHABLE, dtype=np.int16)
            columns = [self._column[hub[server]] for hub in self.hubs]
            for column, entry in zip(columns, self.entry, strict=True):
                np.minimum(best, self._table[node, column] + entry[target], out=best)
            if (self._reach >= UNREACHABLE).all():
                return best
            lacks = [
                self._reach[column] + entry[target] < best for column, entry in zip(columns, self.entry, strict=True)
            ]
            if not any(lack.any() for lack in lacks):
                return best
            missing = [(node[lack], column[lack]) for column, lack in zip(columns, lacks, strict=True)]
            self._learn(*(np.concatenate([pair[side] for pair in missing]) for side in (0, 1)))

    def signature(self) -> np.ndarray:
        """Hubs of each node and costs from them: nodes with the same are alike from outside [nodes, ..]."""
        return np.concatenate([self.hubs[:, self.server], self.entry]).T

    def _number_servers(self, label: np.ndarray) -> np.ndarray:
        """Number servers by the labels of nodes, and nodes in them; the links that enter servers with ranks."""
        topology = self.topology
        self.server = np.unique(label, return_inverse=True)[1].reshape(-1)
        self._members = np.argsort(self.server, kind="stable")
        self._count = np.bincount(self.server)
        self._first = np.cumsum(self._count) - self._count
        self.slot_in_server = np.empty_like(self.server)
        self.slot_in_server[self._members] = expand_counts(self._count)[1]
        with_ranks = np.bincount(self.server[: topology.ranks], minlength=len(self._count)) > 0
        source, target = self.server[topology.source], self.server[topology.target]
        return np.flatnonzero((source != target) & with_ranks[target])

    def _find_entries(self, links: np.ndarray) -> None:
        """Find costs inside servers, and hubs [most, servers] with the costs from them [most, nodes]."""
        topology, nodes, servers = self.topology, len(self.server), len(self._count)
        within = self.server[topology.source] == self.server[topology.target]
        square = self._count**2
        self._row = (np.cumsum(square) - square)[self.server] + self.slot_in_server * self._count[self.server]
        self._inside = np.full(int(square.sum()), UNREACHABLE, dtype=np.int16)
        ends = topology.source[within], topology.target[within]
        for cost, node, bits in search_levels(*ends, self.cost[within], self.slot_in_server):
            row, to = np.nonzero(bits)
            self._inside[self._row[node[row]] + to] = cost
        gate = topology.target[links]
        ways, way = np.unique(self.server[gate] * nodes + topology.source[links], return_inverse=True)
        owner, hub = np.divmod(ways, nodes)
        slot = np.arange(len(ways)) - np.searchsorted(owner, owner)
        self.hubs = np.repeat(self._members[self._first][None], int(slot.max(initial=0)) + 1, axis=0)
        self.hubs[slot, owner] = hub
        self.entry = np.full((len(self.hubs), nodes), UNREACHABLE, dtype=np.int16)
        closed = np.bincount(owner, minlength=servers) == 0  # what no link enters is reached from its first node
        self.entry[0, self._members[self._first[closed]]] = 0
        link, to = expand_counts(self._count[self.server[gate]])
        costs = self.cost[links][link] + self._inside[self._row[gate[link]] + to]
        node = self._members[self._first[self.server[gate[link]]] + to]
        np.minimum.at(self.entry, (slot[way.reshape(-1)][link], node), np.minimum(costs, UNREACHABLE).astype(np.int16))

    def _add_columns(self, hubs: np.ndarray) -> None:
        """Give each of these hubs a column of the table."""
        missing = hubs[self._column[hubs] < 0]
        last = self._column_count + len(missing)
        if last > self._table.shape[1]:
            wider = np.full((len(self._table), max(last, 2 * self._column_count)), UNREACHABLE, dtype=np.int16)
            wider[:, : self._column_count] = self._table[:, : self._column_count]
            self._table = wider
        self._column[missing] = np.arange(self._column_count, last)
        self._reach = np.concatenate([self._reach, np.full(len(missing), -1)])
        self._column_count = last

    def _learn(self, here: np.ndarray, column: np.ndarray) -> None:
        """Find the costs from nodes to the hubs of columns, and those of all nodes that are about as near [n]."""
        hub = np.full(self._column_count, -1)
        hub[self._column[self._column >= 0]] = np.flatnonzero(self._column >= 0)
        for block in np.unique(column // HUBS_PER_BLOCK).tolist():
            in_block = column // HUBS_PER_BLOCK == block
            pending_nodes, pending_columns = here[in_block], column[in_block]
            block_columns = np.arange(block * HUBS_PER_BLOCK, min((block + 1) * HUBS_PER_BLOCK, self._column_count))
            block_columns = block_columns[self._reach[block_columns] < UNREACHABLE]
            bit = np.full(len(self._table), -1)
            bit[hub[block_columns]] = block_columns % HUBS_PER_BLOCK
            table = self._table[:, block * HUBS_PER_BLOCK : (block + 1) * HUBS_PER_BLOCK]
            until = reach = UNREACHABLE
            for cost, node, bits in search_levels(self.topology.source, self.topology.target, self.cost, bit):
                if cost > until:
                    reach = cost - 1
                    break
                costs = table[node, : bits.shape[1]]
                costs[bits[:, : costs.shape[1]]] = cost
                table[node, : bits.shape[1]] = costs
                waits = self._table[pending_nodes, pending_columns] >= UNREACHABLE
                pending_nodes, pending_columns = pending_nodes[waits], pending_columns[waits]
                if until == UNREACHABLE and not len(pending_nodes):
                    until = max(cost + LOOKAHEAD_COST, 2 * int(self._reach[block_columns].max()))
            self._reach[block_columns] = reach


def expand_counts(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each i as often as ``count[i]`` says, and the numbers from 0 on for each."""
    owner = np.repeat(np.arange(len(count)), count)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)


def search_levels(
    source: np.ndarray, target: np.ndarray, cost: np.ndarray, bit: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Cost, nodes that reach roots at that cost, and which roots [nodes, bits]; ``bit`` [nodes] is -1 but for roots.

    Roots that reach nothing in common may share a bit.
    """
    order = np.argsort(source, kind="stable")
    steps = sorted(set(cost.tolist()))
    links = {step: (source[index], target[index]) for step in steps for index in [order[cost[order] == step]]}
    roots = np.flatnonzero(bit >= 0)
    near = np.zeros((len(bit), int(bit.max()) // 64 + 1), dtype=np.uint64)
    near[roots, bit[roots] // 64] = np.uint64(1) << (bit[roots] % 64).astype(np.uint64)
    yield 0, roots, bit[roots][:, None] == np.arange(64 * near.shape[1])
    fresh, distance = {0: near.copy()}, 0
    while steps and any(level.any() for level in fresh.values()):
        distance += 1
        reached = np.zeros_like(near)
        for step in steps:
            if distance - step in fresh:
                _relax(reached, fresh[distance - step], *links[step])
        reached &= ~near
        near |= reached
        fresh = {level: words for level, words in (fresh | {distance: reached}).items() if level > distance - steps[-1]}
        nodes = np.flatnonzero(reached.any(axis=1))
        if len(nodes):
            words = reached[nodes].astype("<u8").view(np.uint8)
            yield distance, nodes, np.unpackbits(words, axis=1, bitorder="little").view(bool)


def _relax(reached: np.ndarray, level: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """Add to ``reached`` what the far ends of links reached at a level."""
    active = np.take(level.any(axis=1), target)
    if active.any():
        source, target = source[active], target[active]
        begin = np.flatnonzero(np.concatenate([[True], source[1:] != source[:-1]]))
        reached[source[begin]] |= np.bitwise_or.reduceat(level[target], begin, axis=0)


def _label_servers(topology: Topology, near: np.ndarray) -> np.ndarray:
    """A label of each node, the same for those that ``near`` links join to some ranks, but not too many [nodes]."""
    label = np.arange(len(topology.nodes))
    source, target = topology.source[near], topology.target[near]
    while True:
        before = label.copy()
        np.minimum.at(label, source, before[target])
        np.minimum.at(label, target, before[source])
        if (label == before).all():
            break
    single = (np.bincount(label, minlength=len(label))[label] > MAX_SERVER_NODES) | (label >= topology.ranks)
    return np.where(single, np.arange(len(label)), label)
