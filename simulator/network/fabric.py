"""A fabric that answers how long collectives and transfers take: alone by formula, together by fair sharing.

:class:`Fabric` keeps what is dear to compute: routes, and for each collective over a group its latency and the bytes
that its fullest link carries. Alone, a phase takes ``steps x latency + bytes of the fullest link / bandwidth``, which
is what the flow model gives too; so the analytical answer is two numbers a (collective, algorithm, group), and costs
microseconds once they are known. Together, in :func:`Fabric.flow`, all activities share links max-min fairly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from . import reduction
from .collectives import CHANNEL_ALGORITHMS, SERVER_ORDERED_ALGORITHMS, Move, Plan, algorithms, plan
from .folding import run_folded
from .routing import Router
from .sharing import Activities, SharedTimes, run_activities
from .timeline_sharing import Usage
from .topology import Topology, TopologyError
from .transfers import Transfer

MAX_DIRECT_RANKS = 64  # ranks up to which reductions are tried as direct exchanges
SAMPLE_RANKS = 64  # ranks between which rings are looked for
RATE_TOLERANCE = 1e-6  # relative difference of two rates that counts as none

_Key = tuple[str, str, tuple[int, ...]]  # collective, algorithm, group


class TransferCost(NamedTuple):
    """Of a plan for one byte: microseconds before and beside the bytes, and microseconds a byte on the fullest link."""

    latency_us: float
    us_per_byte: float


class TransferStep(NamedTuple):
    """A phase of a transfer: us before its bytes, bytes that a pair moves, and bytes over each link that it uses."""

    latency_us: float
    pair_bytes: float
    links: np.ndarray
    moved_bytes: np.ndarray


@dataclass
class Fabric:
    """A topology with its routes. ``per_node`` ranks of a group in a row share a server (0: none).

    With ``server`` (devices of one, in a row) that is found out for each group and ``per_node`` is not used.

    The first byte of a transfer moves ``start_us`` after its ranks are ready. ``nvls`` is what reductions in NVSwitches
    reach of a link's rate (0: there are none); with ``in_network`` the fabric's switches reduce too.

    ``healthy`` is the fabric before its faults. What goes round a fault is also held to the ways and links that it had
    there: NCCL gives a rank the channels of its own NIC, and a fault opens no others, nor does it undo what hashes
    of routes collided.
    """

    topology: Topology
    policy: str = "adaptive"
    per_node: int = 0
    seed: int = 0
    start_us: float = 0.0
    nvls: float = 0.0
    in_network: bool = False
    server: int = 0
    healthy: Fabric | None = field(default=None, repr=False)
    _router: Router = field(init=False)
    _usage: dict[_Key, list[list[_Usage]]] = field(default_factory=dict)
    _constrained_usage: dict[_Key, list[list[_Usage]]] = field(default_factory=dict)
    _costs: dict[_Key, TransferCost] = field(default_factory=dict)
    _parent: Fabric | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._router = Router(self.topology, self.policy, self.seed)

    def on(self, topology: Topology, same_routes: bool = False) -> Fabric:
        """The same as faults leave its ``topology``; ``same_routes`` when that has the same links at other bandwidths.

        Adaptive routes then shift away from worn links, others stay.
        """
        fabric = self._copy_settings(topology)
        fabric.healthy = self
        if same_routes:
            fabric._router, fabric._usage = self._router.on(topology), self._usage
            if self.policy != "adaptive" or topology.health is None:
                fabric.healthy = self.healthy
                return fabric
            worn = topology.health < 1.0
            crossing = (key for key, phases in self._usage.items() if any(_worn_crossings(phases, worn)))
            fabric._usage = {key: self._usage[key] for key in self._usage.keys() - set(crossing)}
        return fabric

    def with_group_size(self, per_node: int) -> Fabric:
        """The same, with the same routes, for groups that hold ``per_node`` ranks of each server in a row."""
        fabric = self._copy_settings(self.topology)
        fabric.per_node, fabric.server, fabric._router = per_node, 0, self._router
        fabric.healthy = self.healthy and self.healthy.with_group_size(per_node)
        return fabric

    def _copy_settings(self, topology: Topology) -> Fabric:
        settings = self.policy, self.per_node, self.seed, self.start_us, self.nvls, self.in_network, self.server
        return Fabric(topology, *settings, _parent=self._parent or self)

    @cached_property
    def bandwidth_gbps(self) -> np.ndarray:
        """Rates that transfers are held to: of all links, then of those before faults."""
        bandwidth = self.topology.bandwidth_gbps
        return bandwidth if self.healthy is None else np.concatenate([bandwidth, self.healthy.bandwidth_gbps])

    @cached_property
    def _by_rail(self) -> bool:
        """Whether a ring through each GPU's NIC is at least as fast as one in the order of ranks: not on flat fabrics.

        NCCL searches the links for its rings; a few servers show which it finds.
        """
        if self._parent is not None:
            return self._parent._by_rail
        size = self.server or self.per_node
        ranks = range(min(max(2, SAMPLE_RANKS // size) * size, self.topology.ranks // size * size))
        rails, flat = (self._us_per_byte(plan("all_gather", "ring", ranks, 1.0, per_node)) for per_node in (size, 0))
        return rails <= flat * (1.0 + RATE_TOLERANCE)

    def _us_per_byte(self, phases: Plan) -> float:
        """What a single phase takes for a byte."""
        load = np.zeros(self.topology.links)
        for usage in self._route([move for phase in phases for move in phase]):
            load[usage.links] += usage.weights * usage.size
        return float((load / self.topology.bandwidth_gbps).max(initial=0.0)) / 1e3

    def order_by_server(self, group: Sequence[int]) -> tuple[int, ...]:
        """The group server by server, in the order of their first ranks: NCCL walks it so in any order of ranks."""
        ranks = np.asarray(group, dtype=np.int64)
        if not self.server or len(ranks) < 3:
            return tuple(ranks.tolist())
        _, first, which = np.unique(ranks // self.server, return_index=True, return_inverse=True)
        return tuple(ranks[np.argsort(first[which], kind="stable")].tolist())

    def ranks_per_server(self, group: Sequence[int]) -> int:
        """Ranks of an arranged group that lie in a row in each server; of unequal numbers what divides them all."""
        if not self.server:
            return self.per_node
        servers = np.asarray(group, dtype=np.int64) // self.server
        ends = np.flatnonzero(np.concatenate([[True], servers[1:] != servers[:-1], [True]]))
        return int(np.gcd.reduce(np.diff(ends)))

    def latency_us(
        self, collective: str, group: Sequence[int], size_bytes: float, algorithm: str | None = None
    ) -> float:
        """Alone on the fabric, by the fastest algorithm unless one is named. A single rank costs nothing."""
        names = (algorithm,) if algorithm else self.algorithms(collective, group)
        costs = [self.cost(collective, name, group) for name in names]
        return min(cost.latency_us + cost.us_per_byte * size_bytes for cost in costs)

    def algorithm(self, transfer: Transfer) -> str:
        """The transfer's algorithm, or the fastest when it leaves the choice open."""
        if transfer.algorithm or transfer.collective == "send":
            return transfer.algorithm or "path"
        return self.fastest(transfer.collective, transfer.group, transfer.size_bytes)

    def fastest(self, collective: str, group: Sequence[int], size_bytes: float, among: Sequence[str] = ()) -> str:
        """The algorithm that is fastest alone, of all that the group can run or ``among`` some."""
        names = among or self.algorithms(collective, group)
        costs = [self.cost(collective, name, group) for name in names]
        return names[int(np.argmin([cost.latency_us + cost.us_per_byte * size_bytes for cost in costs]))]

    def algorithms(self, collective: str, group: Sequence[int]) -> tuple[str, ...]:
        """What a group of this size can run: halving needs a power of two, hierarchical whole servers."""
        if collective == "send":
            return ("path",)
        n, per_node = len(group), self.ranks_per_server(self.order_by_server(group))
        whole_servers = per_node > 1 and n > per_node and n % per_node == 0
        small = collective == "all_to_all" or n <= MAX_DIRECT_RANKS
        possible = {"halving_doubling": n & (n - 1) == 0, "hierarchical": whole_servers, "direct": small}
        names = tuple(name for name in algorithms(collective) if possible.get(name, True))
        if collective == "all_reduce" and n > 1:
            names += ("nvls",) if self.nvls > 0.0 and (whole_servers or 2 < n == per_node) else ()
            names += ("collnet",) if self.in_network and n > per_node else ()
        return names

    def cost(self, collective: str, algorithm: str, group: Sequence[int]) -> TransferCost:
        """Latency and time a byte of a collective alone. TopologyError for a rank or algorithm that is not there."""
        key = (collective, algorithm, tuple(group))
        if key not in self._costs:
            latency, slope = 0.0, 0.0
            capacity = self.bandwidth_gbps * 1e3
            for phase in self._phases(*key):
                load = np.zeros(len(capacity))
                for usage in phase:
                    np.add.at(load, usage.links, usage.weights * usage.size)
                latency += max((usage.latency_us for usage in phase), default=0.0)
                slope += float(np.max(load / capacity, initial=0.0))
            start = self.start_us if self._phases(*key) else 0.0
            self._costs[key] = TransferCost(start + latency, slope)
        return self._costs[key]

    def add_load(
        self, load: np.ndarray, collective: str, algorithm: str, group: Sequence[int], size_bytes: float
    ) -> None:
        """Add to ``load`` [links] the bytes that a transfer moves over each link."""
        key = collective, algorithm, tuple(group)
        self._route_missing([key])
        for phase in self._usage[key]:
            for usage in phase:
                load[usage.links] += usage.weights * usage.size * size_bytes

    def steps(self, transfer: Transfer) -> list[TransferStep]:
        """The phases of a transfer, one after the other; nothing for a single rank."""
        steps: list[TransferStep] = []
        for phase in self._phases(transfer.collective, self.algorithm(transfer), tuple(transfer.group)):
            size = max(usage.size for usage in phase) * transfer.size_bytes
            links = np.concatenate([usage.links for usage in phase])
            moved_bytes = np.concatenate([usage.weights * usage.size for usage in phase]) * transfer.size_bytes
            links, which = np.unique(links, return_inverse=True)
            wait_us = max(usage.latency_us for usage in phase) + (0.0 if steps else self.start_us)
            steps.append(TransferStep(wait_us, size, links, np.bincount(which, moved_bytes, minlength=len(links))))
        return steps

    def usage(self, collective: str, algorithm: str, groups: Iterable[Sequence[int]]) -> Usage:
        """What one byte of the same collective moves in all groups, routed at once."""
        load = np.zeros(self.topology.links)
        rank_groups = [tuple(map(int, group)) for group in groups]
        if collective == "all_reduce" and algorithm in reduction.SWITCH_ALGORITHMS:
            for group in rank_groups:
                self.add_load(load, collective, algorithm, group, 1.0)
            return Usage(load, float(load.max(initial=0.0)))
        pairs: dict[float, list[Move]] = {}
        for group in rank_groups:
            for phase in self.plan(collective, algorithm, group):
                for move in phase:
                    pairs.setdefault(move.size_bytes, []).append(move)
        for size, moves in pairs.items():
            ends = (np.concatenate([move.source for move in moves]), np.concatenate([move.target for move in moves]))
            crossings = self._router.crossings(*ends)
            load[crossings.links] += crossings.flows * size
        return Usage(load, max(pairs, default=0.0))

    def flow(self, transfers: Sequence[Transfer], folded: bool = False) -> tuple[np.ndarray, np.ndarray, SharedTimes]:
        """Start and end of each transfer, us [n], and the run of the links, when all share the fabric.

        ``folded`` runs transfers that must do the same once (:mod:`.folding`).
        """
        activities, first, last = self.activities(transfers)
        share = run_folded if folded else run_activities
        outcome = share(activities, self.bandwidth_gbps)
        outcome = replace(outcome, carried_bytes=outcome.carried_bytes[: self.topology.links])
        start = outcome.start_us[np.array(first, dtype=np.int64)]
        end = np.array([outcome.end_us[ending].max() for ending in last])
        return start, end, outcome

    def activities(self, transfers: Sequence[Transfer]) -> tuple[Activities, list[int], list[list[int]]]:
        """What transfers move over the links, and by transfer its first activity and those that end it."""
        names = [self.algorithm(transfer) for transfer in transfers]
        keys = [
            (transfer.collective, name, tuple(transfer.group)) for transfer, name in zip(transfers, names, strict=True)
        ]
        self._route_missing(keys)
        rows: list[_Usage] = []
        sizes: list[float] = []
        releases: list[float] = []
        waits: list[list[int]] = []
        first: list[int] = []
        last: list[list[int]] = []
        for transfer, key in zip(transfers, keys, strict=True):
            before = [activity for earlier in transfer.after for activity in last[earlier]]
            first.append(len(rows))
            phases = self._phases(*key)
            for phase in [[_Usage.waiting(self.start_us)], *phases] if phases else [[_NOTHING]]:
                phase_rows = list(range(len(rows), len(rows) + len(phase)))
                rows += phase
                sizes += [usage.size * transfer.size_bytes for usage in phase]
                releases += [transfer.release_us] * len(phase)
                waits += [before] * len(phase)
                before = phase_rows
            last.append(before)
        return _join_activities(rows, sizes, releases, waits), first, last

    def _phases(self, collective: str, algorithm: str, group: tuple[int, ...]) -> list[list[_Usage]]:
        """What holds a transfer: its moves on the links, and on those that they would take before faults."""
        key = collective, algorithm, group
        self._route_missing([key])
        if self.healthy is None:
            return self._usage[key]
        if key not in self._constrained_usage:
            phase_pairs = zip(self._usage[key], self.healthy._phases(*key), strict=True)
            links = self.topology.links
            self._constrained_usage[key] = [
                [usage.beside(original, links) for usage, original in zip(*phases, strict=True)]
                for phases in phase_pairs
            ]
        return self._constrained_usage[key]

    def _route_missing(self, keys: Iterable[_Key]) -> None:
        """Find the ways of all that is not known yet at once: one by one takes far longer."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self._usage]
        if self.healthy is not None:
            self.healthy._route_missing(fresh)
        plans: list[tuple[list[_Usage], Plan]] = []
        for collective, algorithm, group in fresh:
            if algorithm in reduction.SWITCH_ALGORITHMS and collective == "all_reduce":
                trees, moves = self._plan_in_switch(algorithm, group)
                plans.append((trees, [moves]))
            else:
                plans.append(([], self.plan(collective, algorithm, group)))
        routed_usage = iter(self._route([move for _, phases in plans for phase in phases for move in phase]))
        for key, (trees, phases) in zip(fresh, plans, strict=True):
            self._usage[key] = [trees + [next(routed_usage) for _ in phase] for phase in phases]

    def _plan_in_switch(self, algorithm: str, group: tuple[int, ...]) -> tuple[list[_Usage], list[Move]]:
        """What switches that reduce carry, and the moves beside."""
        self._check_ranks(group)
        group = self.order_by_server(group)
        trees, moves = reduction.plan_reduction(
            self.topology, algorithm, group, self.ranks_per_server(group), self.nvls > 0.0
        )
        usage = []
        for tree in trees:
            weight = 1.0 / (self.nvls or 1.0) if tree.inside else 1.0
            usage.append(_Usage(tree.links, np.full(len(tree.links), weight), tree.share, tree.latency_us))
        return usage, moves

    def _check_ranks(self, group: tuple[int, ...]) -> None:
        outside = [rank for rank in group if not 0 <= rank < self.topology.ranks]
        if outside:
            raise TopologyError(f"rank {outside[0]} exceeds {self.topology.name} with {self.topology.ranks} ranks")

    def plan(self, collective: str, algorithm: str, group: tuple[int, ...]) -> Plan:
        """Phases of a transfer of one byte. TopologyError for a rank or algorithm that is not there."""
        self._check_ranks(group)
        if collective != "send":
            ranks = (
                self.order_by_server(group)
                if algorithm in SERVER_ORDERED_ALGORITHMS and collective != "send_recv"
                else group
            )
            rows = self.ranks_per_server(ranks)
            apart = algorithm in CHANNEL_ALGORITHMS and 1 < rows < len(ranks) and not self._by_rail
            return plan(collective, algorithm, ranks, 1.0, 0 if apart else rows)
        if len(group) != 2:
            raise TopologyError(f"a send has two ranks, not {len(group)}")
        ends = np.array(group[:1]), np.array(group[1:])
        return [[Move(*ends, 1.0)]] if group[0] != group[1] else []

    def _route(self, moves: list[Move]) -> list[_Usage]:
        if not moves:
            return []
        source, target = (np.concatenate([getattr(move, end) for move in moves]) for end in ("source", "target"))
        owner = np.repeat(np.arange(len(moves)), [len(move.source) for move in moves])
        found = self._router.by_owner(source, target, owner, len(moves))
        return [
            _Usage(
                each.links, each.flows, move.size_bytes, move.steps * (each.mean_us if move.round else each.longest_us)
            )
            for move, each in zip(moves, found, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Usage:
    """One move on the links: how often each is crossed, the bytes a pair moves for one byte of the collective."""

    links: np.ndarray
    weights: np.ndarray
    size: float
    latency_us: float

    @classmethod
    def waiting(cls, us: float) -> _Usage:
        """Time that passes without any byte on the links."""
        return cls(np.zeros(0, np.int64), np.zeros(0), 0.0, us)

    def beside(self, other: _Usage, links: int) -> _Usage:
        """This move, held to links that another fabric has too: they are numbered from ``links`` on."""
        joined = np.concatenate([self.links, links + other.links]), np.concatenate([self.weights, other.weights])
        return _Usage(*joined, self.size, max(self.latency_us, other.latency_us))


_NOTHING = _Usage.waiting(0.0)


def _worn_crossings(phases: list[list[_Usage]], worn: np.ndarray) -> Iterator[bool]:
    return (bool(worn[usage.links].any()) for phase in phases for usage in phase)


def _join_activities(
    rows: list[_Usage], sizes: list[float], releases: list[float], waits: list[list[int]]
) -> Activities:
    def starts(lengths: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    none = np.zeros(0, dtype=np.int64)
    return Activities(
        starts([len(row.links) for row in rows]),
        np.concatenate([none, *(row.links for row in rows)]),
        np.concatenate([np.zeros(0), *(row.weights for row in rows)]),
        np.array(sizes, dtype=np.float64),
        np.array([row.latency_us for row in rows]),
        np.array(releases, dtype=np.float64),
        starts([len(each) for each in waits]),
        np.array([each for row in waits for each in row], dtype=np.int64),
    )
