"""A fabric as explicit directed links between ranks and switches, and the check that it is one.

Ranks come first: node i below ``ranks`` is rank i. A full-duplex cable is two links. Bandwidths are GB/s (1e9 bytes)
of one direction, latencies the microseconds from one end to the other, the switch behind it included.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

GBPS, LATENCY_US = (1e-3, 1e6), (0.0, 1e6)  # what a link can have: anything else is a slip of units
EXAMPLES = {
    "nodes": "{name: gpu0, rank: true}",
    "links": "{from: gpu0, to: switch, bandwidth_gbps: 50, latency_us: 1}",
    "dimensions": "{shape: ring, size: 8, bandwidth_gbps: 50}",
}


class TopologyError(ValueError):
    """A fabric that cannot be: disconnected, a rank or node that is not there, a negative rate. One line says which."""


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """``source``, ``target`` int64 [links] index ``nodes``; ``bandwidth_gbps``, ``latency_us`` float64 [links].

    ``kind`` [links] names what a link is made of (nvlink, pcie, ib, roce, fabric). ``coordinates`` int64 [nodes, dims]
    place the ranks of a product of dimensions, for dimension-order routing; None for other fabrics. ``health`` is the
    share of its bandwidth that each link has left [links]; None where nothing is worn.
    """

    name: str
    ranks: int
    nodes: tuple[str, ...]
    source: np.ndarray
    target: np.ndarray
    bandwidth_gbps: np.ndarray
    latency_us: np.ndarray
    kind: tuple[str, ...]
    coordinates: np.ndarray | None = None
    health: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, {self.ranks} ranks, {len(self.nodes)} nodes, {self.links} links)"

    @property
    def links(self) -> int:
        return len(self.source)

    @cached_property
    def index(self) -> dict[str, int]:
        """Node by name."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def outgoing(self) -> tuple[np.ndarray, np.ndarray]:
        """Links by their source as CSR: ``start`` [nodes + 1] and the links in that order."""
        order = np.argsort(self.source, kind="stable")
        return np.searchsorted(self.source[order], np.arange(len(self.nodes) + 1)), order

    def of_kind(self, kinds: Sequence[str]) -> np.ndarray:
        """Which links are of some kinds [links]."""
        key = tuple(kinds)
        if key not in self._by_kind:
            self._by_kind[key] = np.array([kind in key for kind in self.kind], dtype=bool)
        return self._by_kind[key]

    @cached_property
    def _by_kind(self) -> dict[tuple[str, ...], np.ndarray]:
        return {}

    @cached_property
    def reverse(self) -> np.ndarray:
        """The link the other way of each link, -1 where there is none [links]."""
        size = len(self.nodes)
        forth, back = self.source * size + self.target, self.target * size + self.source
        order = np.argsort(forth, kind="stable")
        position = np.minimum(np.searchsorted(forth[order], back), max(self.links - 1, 0))
        return np.where(forth[order][position] == back, order[position], -1)

    def link_name(self, link: int) -> str:
        return f"{self.nodes[self.source[link]]}->{self.nodes[self.target[link]]}"

    def find(self, name: str) -> np.ndarray:
        """Links called ``a->b``, or both directions of ``a-b``. TopologyError names what is missing."""
        ends = name.split("->") if "->" in name else name.split("-") if name not in self.index else []
        if len(ends) == 1:
            raise TopologyError(
                f"{self.name} has no node {name!r}; it has {_list_some(self.nodes)}; a link is a->b or a-b"
            )
        if len(ends) != 2:
            raise TopologyError(f"link {name!r} must be written as a->b, or a-b for both directions")
        for end in ends:
            if end not in self.index:
                raise TopologyError(f"{self.name} has no node {end!r}; it has {_list_some(self.nodes)}")
        first, second = (self.index[end] for end in ends)
        matches = (self.source == first) & (self.target == second)
        if "->" not in name:
            matches |= (self.source == second) & (self.target == first)
        if not matches.any():
            raise TopologyError(
                f"{self.name} has no link {name}; {ends[0]} reaches {_list_some(self._neighbours(first))}"
            )
        return np.flatnonzero(matches)

    def links_of_node(self, node: str) -> np.ndarray:
        """Links into and out of a node."""
        if node not in self.index:
            raise TopologyError(f"{self.name} has no node {node!r}; it has {_list_some(self.nodes)}")
        index = self.index[node]
        return np.flatnonzero((self.source == index) | (self.target == index))

    def keep(self, links: np.ndarray) -> Topology:
        """This fabric with only some of its links (bool [links])."""
        kept = np.flatnonzero(links)
        return dataclasses.replace(
            self,
            source=self.source[kept],
            target=self.target[kept],
            bandwidth_gbps=self.bandwidth_gbps[kept],
            latency_us=self.latency_us[kept],
            kind=tuple(self.kind[link] for link in kept),
            health=None if self.health is None else self.health[kept],
        )

    def parts(self) -> list[list[str]]:
        """Ranks by what can reach each other, the largest part first: more than one entry is a partition."""
        label = connected_labels(self.source, self.target, len(self.nodes), directed=True)[: self.ranks]
        groups = [[self.nodes[rank] for rank in np.flatnonzero(label == number)] for number in np.unique(label)]
        return sorted(groups, key=len, reverse=True)

    def check(self) -> Topology:
        """The fabric itself. TopologyError for a partition, an impossible figure, a doubled name or link."""
        if self.ranks < 1 or self.ranks > len(self.nodes):
            raise TopologyError(
                f"{self.name} has {self.ranks} ranks among {len(self.nodes)} nodes; give ranks rank: true"
            )
        if len(self.index) != len(self.nodes):
            duplicate = next(name for position, name in enumerate(self.nodes) if self.index[name] != position)
            raise TopologyError(f"{self.name} has two nodes called {duplicate!r}")
        figures = ("bandwidth_gbps", self.bandwidth_gbps, GBPS), ("latency_us", self.latency_us, LATENCY_US)
        for what, values, (minimum, maximum) in figures:
            wrong = ~((values >= minimum) & (values <= maximum))
            if wrong.any():
                link = int(np.flatnonzero(wrong)[0])
                raise TopologyError(
                    f"link {self.link_name(link)} of {self.name} has {what}={values[link]:g}; "
                    f"it must lie between {minimum:.9g} and {maximum:.9g}"
                )
        loops = self.source == self.target
        if loops.any():
            raise TopologyError(f"{self.name} links {self.nodes[self.source[loops][0]]} to itself")
        unlinked = np.setdiff1d(np.arange(self.ranks, len(self.nodes)), np.concatenate([self.source, self.target]))
        if len(unlinked):
            raise TopologyError(
                f"{self.name} has no link to {self.nodes[unlinked[0]]!r}: add one, or take the node out"
            )
        partitions = self.parts()
        if len(partitions) > 1:
            raise TopologyError(
                f"{self.name} is not connected: {_list_some(partitions[-1])} cannot reach {_list_some(partitions[0])}"
            )
        return self

    def _neighbours(self, node: int) -> list[str]:
        return [self.nodes[node_index] for node_index in self.target[self.source == node]]


def build_topology(
    name: str,
    ranks: int,
    nodes: Sequence[str],
    cables: Iterable[tuple[np.ndarray, np.ndarray, float, float, str]],
    coordinates: np.ndarray | None = None,
) -> Topology:
    """A fabric from full-duplex cables: (ends a [n], ends b [n], GB/s each way, latency us, kind) of each sort."""
    cable_groups = list(cables)
    sizes = [len(a) for a, *_ in cable_groups]
    none = np.zeros(0, dtype=np.int64)
    first = np.concatenate([none, *(np.asarray(a, dtype=np.int64) for a, *_ in cable_groups)])
    second = np.concatenate([none, *(np.asarray(b, dtype=np.int64) for _, b, *_ in cable_groups)])
    bandwidth = np.repeat([group[2] for group in cable_groups], sizes)
    latency = np.repeat([group[3] for group in cable_groups], sizes)
    kinds = [group[4] for group, size in zip(cable_groups, sizes, strict=True) for _ in range(size)]
    return Topology(
        name,
        ranks,
        tuple(nodes),
        np.concatenate([first, second]),
        np.concatenate([second, first]),
        np.concatenate([bandwidth, bandwidth]).astype(np.float64),
        np.concatenate([latency, latency]).astype(np.float64),
        tuple(kinds + kinds),
        coordinates,
    ).check()


def read_fabric(values: Mapping[str, Any]) -> Topology:
    """User's fabric: ``{name, nodes: [{name, rank}], links: [{from, to, bandwidth_gbps, latency_us, kind, one_way}]}``.

    Nodes with ``rank: true`` are ranks, in their order. TopologyError names a missing or unknown key, an unknown node,
    a link given twice, or what :meth:`Topology.check` finds.
    """
    check_keys("topology", values, {"nodes", "links"}, {"name"})
    entries = [
        check_keys(f"node {i}", node, {"name"}, {"rank"}) for i, node in enumerate(check_list("nodes", values["nodes"]))
    ]
    is_rank = [read_word(f"node {i}", node, "rank", bool, False) for i, node in enumerate(entries)]
    entry_names = [str(read_word(f"node {i}", node, "name", (str, int), "")) for i, node in enumerate(entries)]
    names = [n for n, rank in zip(entry_names, is_rank, strict=True) if rank]
    ranks = len(names)
    names += [n for n, rank in zip(entry_names, is_rank, strict=True) if not rank]
    index = {name: position for position, name in enumerate(names)}
    ends: dict[tuple[int, int], tuple[float, float, str]] = {}
    for i, raw in enumerate(check_list("links", values["links"])):
        what = f"link {i}"
        link = check_keys(what, raw, {"from", "to", "bandwidth_gbps"}, {"latency_us", "kind", "one_way"})
        pair = _end(what, link["from"], index), _end(what, link["to"], index)
        one_way = read_word(what, link, "one_way", bool, False)
        figures = read_number(what, link, "bandwidth_gbps"), read_number(what, link, "latency_us", 0.0)
        for a, b in dict.fromkeys([pair] if one_way else [pair, pair[::-1]]):
            if (a, b) in ends:
                raise TopologyError(f"{names[a]}->{names[b]} is given twice: add the bandwidths up instead")
            ends[a, b] = (*figures, str(read_word(what, link, "kind", str, "fabric")))
    pairs = np.array(list(ends), dtype=np.int64).reshape(-1, 2)
    rates = np.array([figures[:2] for figures in ends.values()], dtype=np.float64).reshape(-1, 2)
    return Topology(
        str(values.get("name", "topology")),
        ranks,
        tuple(names),
        pairs[:, 0],
        pairs[:, 1],
        rates[:, 0],
        rates[:, 1],
        tuple(figures[2] for figures in ends.values()),
    ).check()


def check_list(what: str, values: Any) -> Sequence[Any]:
    """A YAML value that must be a list, of ``links`` an empty one too; TopologyError otherwise."""
    if not isinstance(values, (list, tuple)) or (not values and what != "links"):
        problem = "empty" if values is None or values == [] else f"{_shorten(values)}, which is no list"
        raise TopologyError(f"{what} is {problem}; give one mapping a line, such as - {EXAMPLES[what]}")
    return values


def read_number(what: str, values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A figure of a mapping as float; TopologyError when it is none."""
    value = values.get(name, default)
    if isinstance(value, str):  # YAML 1.1 takes 1e3 for a word
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TopologyError(f"{what} has {name}={_shorten(value)}, which is no number")
    return float(value)


def _end(what: str, node: Any, index: Mapping[str, int]) -> int:
    name = str(node)
    if isinstance(node, bool) or not isinstance(node, (str, int)) or name not in index:
        raise TopologyError(f"{what} names the unknown node {_shorten(node)}; known: {_list_some(list(index))}")
    return index[name]


def connected_labels(source: np.ndarray, target: np.ndarray, nodes: int, *, directed: bool) -> np.ndarray:
    """A number for each node [nodes]: equal for nodes that links join, there and back where ``directed``."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = source.astype(np.int32), target.astype(np.int32)  # of 64 bits, SciPy 1.11.1 numbers all nodes alike
    matrix = coo_array((np.ones(len(source)), ends), (nodes, nodes))
    return np.asarray(connected_components(matrix, directed=directed, connection="strong")[1])


def read_word(what: str, values: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A value of a mapping that must be of one kind; TopologyError otherwise."""
    value = values.get(name, default)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        expected = "true or false" if kind is bool else "a name"
        raise TopologyError(f"{what} has {name}={_shorten(value)}, which must be {expected}")
    return value


def check_keys(what: str, values: Any, needed: set[str], optional: set[str]) -> Mapping[str, Any]:
    """``values`` when they are a mapping with all ``needed`` keys and only known ones; TopologyError otherwise."""
    if not isinstance(values, Mapping):
        raise TopologyError(f"{what} is {_shorten(values)}, but must be a mapping with {', '.join(sorted(needed))}")
    missing, unknown = needed - set(values), set(values) - needed - optional
    if missing or unknown:
        problem, names = ("lacks", missing) if missing else ("has an unknown key", unknown)
        hint = "" if missing else f"; known: {', '.join(sorted(needed | optional))}"
        raise TopologyError(f"{what} {problem} {', '.join(sorted(map(str, names)))}{hint}")
    return values


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
