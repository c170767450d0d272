"""A fabric as explicit directed links between ranks and switches, and the check that it is one.

Ranks come first: node i below ``ranks`` is rank i. A full-duplex cable is two links. Bandwidths are GB/s (1e9 bytes)
of one direction, latencies the microseconds from one end to the other, the switch behind it included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


class TopologyError(ValueError):
    """A fabric that cannot be: disconnected, a rank or node that is not there, a negative rate. One line says which."""


@dataclass(frozen=True, eq=False)
class Topology:
    """``source``, ``target`` int64 [links] index ``nodes``; ``bandwidth_gbps``, ``latency_us`` float64 [links].

    ``kind`` [links] names what a link is made of (nvlink, pcie, ib, roce, fabric). ``coordinates`` int64 [nodes, dims]
    place the ranks of a product of dimensions, for dimension-order routing; None for other fabrics.
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
        at = np.minimum(np.searchsorted(forth[order], back), max(self.links - 1, 0))
        return np.where(forth[order][at] == back, order[at], -1)

    def link_name(self, link: int) -> str:
        return f"{self.nodes[self.source[link]]}->{self.nodes[self.target[link]]}"

    def find(self, name: str) -> np.ndarray:
        """Links called ``a->b``, or both directions of ``a-b``. TopologyError names what is missing."""
        ends = name.split("->") if "->" in name else name.split("-") if name not in self.index else []
        if len(ends) != 2:
            raise TopologyError(f"link {name!r} must be written as a->b, or a-b for both directions")
        for end in ends:
            if end not in self.index:
                raise TopologyError(f"{self.name} has no node {end!r}; it has {_few(self.nodes)}")
        first, second = (self.index[end] for end in ends)
        found = (self.source == first) & (self.target == second)
        if "->" not in name:
            found |= (self.source == second) & (self.target == first)
        if not found.any():
            raise TopologyError(f"{self.name} has no link {name}; {ends[0]} reaches {_few(self._neighbours(first))}")
        return np.flatnonzero(found)

    def touching(self, node: str) -> np.ndarray:
        """Links into and out of a node."""
        if node not in self.index:
            raise TopologyError(f"{self.name} has no node {node!r}; it has {_few(self.nodes)}")
        at = self.index[node]
        return np.flatnonzero((self.source == at) | (self.target == at))

    def replace(self, **changes: Any) -> Topology:
        """This fabric with some figures changed; not checked again."""
        return dataclasses.replace(self, **changes)

    def keep(self, links: np.ndarray) -> Topology:
        """This fabric with only some of its links (bool [links])."""
        chosen = np.flatnonzero(links)
        return self.replace(
            source=self.source[chosen],
            target=self.target[chosen],
            bandwidth_gbps=self.bandwidth_gbps[chosen],
            latency_us=self.latency_us[chosen],
            kind=tuple(self.kind[link] for link in chosen),
        )

    def parts(self) -> list[list[str]]:
        """Ranks by what can reach each other, the largest part first: more than one entry is a partition."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        size = len(self.nodes)
        matrix = coo_array((np.ones(self.links), (self.source, self.target)), (size, size))
        label = connected_components(matrix, directed=True, connection="strong")[1][: self.ranks]
        groups = [[self.nodes[rank] for rank in np.flatnonzero(label == part)] for part in np.unique(label)]
        return sorted(groups, key=len, reverse=True)

    def check(self) -> Topology:
        """The fabric itself. TopologyError for a partition, an impossible figure, a doubled name or link."""
        if self.ranks < 1 or self.ranks > len(self.nodes):
            raise TopologyError(f"{self.name} has {self.ranks} ranks and {len(self.nodes)} nodes")
        if len(self.index) != len(self.nodes):
            doubled = next(name for position, name in enumerate(self.nodes) if self.index[name] != position)
            raise TopologyError(f"{self.name} has two nodes called {doubled!r}")
        for what, values in (("bandwidth_gbps", self.bandwidth_gbps), ("latency_us", self.latency_us)):
            wrong = ~(np.isfinite(values) & ((values > 0) if what == "bandwidth_gbps" else (values >= 0)))
            if wrong.any():
                link = int(np.flatnonzero(wrong)[0])
                raise TopologyError(f"link {self.link_name(link)} of {self.name} has {what}={values[link]:g}")
        loops = self.source == self.target
        if loops.any():
            raise TopologyError(f"{self.name} links {self.nodes[self.source[loops][0]]} to itself")
        parts = self.parts()
        if len(parts) > 1:
            raise TopologyError(f"{self.name} is not connected: {_few(parts[-1])} cannot reach {_few(parts[0])}")
        return self

    def _neighbours(self, node: int) -> list[str]:
        return [self.nodes[each] for each in self.target[self.source == node]]


def connect(
    name: str,
    ranks: int,
    nodes: Sequence[str],
    cables: Iterable[tuple[np.ndarray, np.ndarray, float, float, str]],
    coordinates: np.ndarray | None = None,
) -> Topology:
    """A fabric from full-duplex cables: (ends a [n], ends b [n], GB/s each way, latency us, kind) of each sort."""
    parts = list(cables)
    sizes = [len(a) for a, *_ in parts]
    whole = np.zeros(0, dtype=np.int64)
    first = np.concatenate([whole, *(np.asarray(a, dtype=np.int64) for a, *_ in parts)])
    second = np.concatenate([whole, *(np.asarray(b, dtype=np.int64) for _, b, *_ in parts)])
    bandwidth = np.repeat([part[2] for part in parts], sizes)
    latency = np.repeat([part[3] for part in parts], sizes)
    kinds = [part[4] for part, size in zip(parts, sizes, strict=True) for _ in range(size)]
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


def from_dict(values: Mapping[str, Any]) -> Topology:
    """User's fabric: ``{name, nodes: [{name, rank}], links: [{from, to, bandwidth_gbps, latency_us, kind, one_way}]}``.

    Nodes with ``rank: true`` are ranks, in their order. TopologyError names a missing or unknown key, an unknown node,
    a link given twice, or what :meth:`Topology.check` finds.
    """
    _keys("topology", values, {"nodes", "links"}, {"name"})
    described = [_keys(f"node {i}", node, {"name"}, {"rank"}) for i, node in enumerate(values["nodes"])]
    ranks = [str(node["name"]) for node in described if node.get("rank")]
    names = ranks + [str(node["name"]) for node in described if not node.get("rank")]
    index = {name: position for position, name in enumerate(names)}
    ends, figures, kinds = [], [], []
    for i, raw in enumerate(values["links"]):
        link = _keys(f"link {i}", raw, {"from", "to", "bandwidth_gbps"}, {"latency_us", "kind", "one_way"})
        for end in (link["from"], link["to"]):
            if end not in index:
                raise TopologyError(f"link {i} names the unknown node {end!r}; known: {_few(names)}")
        pair = (index[link["from"]], index[link["to"]])
        for a, b in [pair] if link.get("one_way") else [pair, pair[::-1]]:
            if (a, b) in ends:
                raise TopologyError(f"{names[a]}->{names[b]} is given twice: add the bandwidths up instead")
            ends.append((a, b))
            figures.append((_number(i, link, "bandwidth_gbps"), _number(i, link, "latency_us")))
            kinds.append(str(link.get("kind", "fabric")))
    pairs, rates = np.array(ends, dtype=np.int64).reshape(-1, 2), np.array(figures, dtype=np.float64).reshape(-1, 2)
    return Topology(
        str(values.get("name", "topology")),
        len(ranks),
        tuple(names),
        pairs[:, 0],
        pairs[:, 1],
        rates[:, 0],
        rates[:, 1],
        tuple(kinds),
    ).check()


def _keys(what: str, values: Any, needed: set[str], optional: set[str]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise TopologyError(f"{what} must be a mapping with {', '.join(sorted(needed))}")
    missing, unknown = needed - set(values), set(values) - needed - optional
    if missing or unknown:
        word, names = ("lacks", missing) if missing else ("has an unknown key", unknown)
        raise TopologyError(f"{what} {word} {', '.join(sorted(map(str, names)))}")
    return values


def _number(link: int, values: Mapping[str, Any], name: str) -> float:
    try:
        return float(values.get(name, 0.0))
    except (TypeError, ValueError):
        raise TopologyError(f"link {link} has {name}={values[name]!r}, which is no number") from None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")
