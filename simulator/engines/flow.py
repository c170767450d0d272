"""Collectives of a cluster whose links are shared for real: all groups of a parallel dimension at once, by fair flows.

The formula (:mod:`.network`), a predictor or a measurement knows how long a collective takes where nothing is in its
way; flows on explicit links know how much longer it takes on *this* fabric. So an answer is the first times the
*stretch*: the slowest group's time when all groups of its dimension run at once, over its time on a switch that never
blocks. Oversubscription, colliding routes, faults and a topology of one's own show; what NCCL's protocols do to small
messages stays as calibrated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, Op
from ..network.build import fabric
from ..network.fabric import Fabric, Transfer
from ..network.faults import Fault, apply
from ..network.fidelity import simulate
from ..network.law import choice
from ..network.mapping import process_groups
from ..network.reduction import ALGORITHMS as IN_SWITCH
from ..network.routing import INSIDE
from ..network.topology import Topology, TopologyError
from ..plan import GROUPS, Plan
from .answers import Answers, Columns, Engine
from .network import NetworkEngine

FAMILIES = ("collective", "expert_parallel")
PACKET_DEVICES = 64  # ns-3 moves every packet
PACKET_BYTES = 2**17  # whose packets are moved, and of half as many: other sizes lie on the line through both
NOTHING = 1e-6  # that a stretch may differ from 1


class Groups(NamedTuple):
    """All groups of one parallel dimension: neighbours lie ``stride`` devices apart, ``together`` ranks in a node."""

    collective: str
    ranks: int
    stride: int
    together: int
    members: tuple[tuple[int, ...], ...]


@dataclass
class Known:
    """What an engine has found out and its like with other faults need not find again."""

    views: dict[int, Fabric] = field(default_factory=dict)
    ideal_us: dict[tuple[str, int, int, int, str, int], float] = field(default_factory=dict)
    stretch: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    packet_us: dict[tuple[int, str, int, int, int, str], tuple[float, float]] = field(default_factory=dict)
    used: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class FlowEngine:
    """Answers collectives as ``beneath`` does, times the stretch on the cluster's fabric with its ``faults``.

    ``network`` is the formula and has device and cluster; ``plan`` says how far apart the ranks of each group are
    (without one, groups of a node are neighbours and others as close as their number in a node allows). Collectives
    inside nodes are only touched by faults inside nodes. ``fidelity`` is ``flow`` or ``packet``.
    """

    network: NetworkEngine
    beneath: Engine
    plan: Plan | None = None
    faults: tuple[Fault, ...] = ()
    fidelity: str = "flow"
    known: Known = field(default_factory=Known, compare=False, repr=False)
    name: str = "flow"
    _stretches: dict[tuple[str, int, int, int], float] = field(default_factory=dict, compare=False, repr=False)
    _views: dict[int, Fabric] = field(default_factory=dict, compare=False, repr=False)
    _loads: dict[tuple[str, int, int, int, int], np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        devices = self.network.cluster.devices
        if self.fidelity == "packet" and devices > PACKET_DEVICES:
            raise TopologyError(
                f"network=packet moves every packet: {devices} devices are too many (up to {PACKET_DEVICES}); "
                "take network=flow"
            )

    def with_faults(self, faults: Sequence[Fault]) -> FlowEngine:
        """The same cluster with other faults; what is known without any stays known."""
        made = replace(self, faults=tuple(faults), _stretches={}, _views={}, _loads={})
        made.__dict__["base"], made.__dict__["_open"] = self.base, self._open
        return made

    @cached_property
    def base(self) -> Fabric:
        """The fabric without faults."""
        return fabric(self.network.cluster, self.network.device)

    @cached_property
    def topology(self) -> Topology:
        """Links that still stand. TopologyError for an unknown link or node, or ranks that are cut off."""
        return apply(self.base.topology, self.faults) if self.faults else self.base.topology

    @cached_property
    def touched(self) -> np.ndarray:
        """Which links of the healthy fabric a fault touches [links]."""
        base, touched = self.base.topology, np.zeros(self.base.topology.links, dtype=bool)
        for fault in self.faults:
            touched[base.touching(fault.where) if fault.where in base.index else base.find(fault.where)] = True
        return touched

    @cached_property
    def faults_inside(self) -> bool:
        """Whether a fault touches a link inside a node."""
        kinds = self.base.topology.kind
        return any(kinds[link] in INSIDE for link in np.flatnonzero(self.touched).tolist())

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """TopologyError for a fabric that falls apart or lacks a link that a fault names."""
        if KINDS[kind].family not in FAMILIES:
            return Answers.declined(len(next(iter(columns.values()))))
        answers = self.beneath.answer(kind, columns, dtype, out_dtype, cache)
        moved = out_dtype if kind == "ep_combine" else dtype
        stretch = self.stretch(kind, columns, moved)
        measured = answers.engine == "measured"
        if self.faults and measured.any():
            stretch = np.where(measured, stretch / self.with_faults(()).stretch(kind, columns, moved), stretch)
        elif measured.any():
            stretch[measured] = 1.0  # on this very fabric
        for values in (answers.latency_us, answers.low_us, answers.high_us):
            values *= stretch
        answers.engine[(answers.engine == self.network.name) | (np.abs(stretch - 1.0) > NOTHING)] = self.name
        return answers

    def stretch(self, kind: str, columns: Columns, dtype: str) -> np.ndarray:
        """How many times longer each of n ops takes than on a fabric that never blocks [n]."""
        found = np.ones(len(columns["ranks"]))
        for i, key in enumerate(self._keys(kind, columns, dtype)):
            _, ranks, together, _ = key
            if ranks > 1 and (ranks > together or self.faults_inside):
                found[i] = self._stretch(key)
        return found

    def load(self, op: Op, first: int, last: int) -> np.ndarray:
        """Bytes that each link of the fabric carries when the groups of devices ``first`` to ``last`` run an op."""
        columns = {name: np.array([value]) for name, value in zip(KINDS[op.kind].names, op.dims, strict=True)}
        what, ranks, together, size = self._keys(
            op.kind, columns, op.dtype if op.kind != "ep_combine" else op.out_dtype
        )[0]
        key = what, ranks, together, first, last
        if key not in self._loads:
            self._loads[key] = np.zeros(self.topology.links)
            for groups, algorithm in self._all(what, ranks, together):
                members = [group for group in groups.members if first <= group[0] < last]
                self._loads[key] = self._view(together).load(groups.collective, algorithm, members)
                break  # of several dimensions with groups alike, one ran it
        return self._loads[key] * size

    def sends(self, first: int, other: int, count: int) -> np.ndarray:
        """Bytes that each link carries when each of ``count`` devices sends one to its like on another stage, and back.

        Stages begin with the devices ``first`` and ``other``.
        """
        there = [(first + i, other + i) for i in range(count)]
        return self._view(1).load("send", "path", [*there, *(pair[::-1] for pair in there)])

    def _keys(self, kind: str, columns: Columns, dtype: str) -> list[tuple[str, int, int, int]]:
        """(kind/algorithm, ranks, ranks in a node, bytes) of each op.

        The exchange of routed tokens is the all-to-all that sends each of them to all its experts.
        """
        ranks = np.asarray(columns["ranks"])
        if KINDS[kind].family == "collective":
            collective, sizes = kind, np.asarray(columns["size_bytes"])
        else:
            sent = columns["tokens"] * columns["hidden"] * np.minimum(columns["topk"], ranks)
            collective, sizes = "all_to_all", np.round(sent * itemsize(dtype)).astype(np.int64)
        groups, tuning = self.network.groups(columns), self.network.tuning
        names = [name.partition("/")[0] for name in choice(collective, sizes, groups, tuning)]
        near = groups.per_node.astype(np.int64).tolist()
        whats = [f"{collective}/{name}" for name in names]
        return list(zip(whats, ranks.tolist(), near, sizes.tolist(), strict=True))

    def _all(self, what: str, ranks: int, together: int) -> Iterator[tuple[Groups, str]]:
        """The groups of each dimension that may be meant, and the algorithm that they run."""
        collective, _, algorithm = what.partition("/")
        for groups in self._groups(collective, ranks, together):
            if groups.collective in ("send", "send_recv"):
                yield groups, "path" if groups.collective == "send" else "ring"
                continue
            able = self._view(together).algorithms(collective, groups.members[0])
            fits = algorithm in able and (algorithm not in IN_SWITCH or self._reduces(groups, algorithm))
            yield groups, algorithm if fits else able[0]

    def _groups(self, collective: str, ranks: int, together: int) -> Iterator[Groups]:
        """The process groups of each dimension with so many ranks, so many of them in a node."""
        devices, per_node = self.network.cluster.devices, self.network.cluster.devices_per_node
        if self.plan is not None and collective == "send_recv" and ranks == 2 and self.plan.parallel.pp > 1:
            stage = self.plan.group("pp").stride
            if (stage < per_node) == (together > 1):
                last = devices if self.plan.parallel.vpp > 1 else devices - stage
                yield Groups("send", 2, stage, together, tuple((r, (r + stage) % devices) for r in range(last)))
        strides = self._strides(ranks, together)
        usual = 1 if together >= min(ranks, per_node) else per_node // together
        for stride in strides or ([] if collective == "send_recv" and ranks == 2 and self.plan else [usual]):
            whole = devices // (ranks * stride) * ranks * stride
            if whole:
                yield Groups(collective, ranks, stride, together, tuple(process_groups(whole, ranks, stride)))

    def _reduces(self, groups: Groups, algorithm: str) -> bool:
        """Whether the switches that an algorithm reduces in are there for all groups; packets are never reduced."""
        if self.fidelity == "packet":
            return False
        if not any(fault.gone for fault in self.faults):
            return True
        try:
            for group in groups.members:
                self._view(groups.together).cost(groups.collective, algorithm, group)
        except TopologyError:
            return False
        return True

    def _strides(self, ranks: int, together: int) -> list[int]:
        """Distances of neighbours in groups of so many ranks, so many of them in a node, as the plan has them."""
        if self.plan is None:
            return []
        named = [self.plan.group(name) for name in GROUPS if name != "pp"]
        sizes = [(group.ranks, group.stride) for group in named]
        shard = self.plan.parallel.shard
        if shard:
            sizes += [(shard, group.stride) for group in named]
            sizes += [(group.ranks // shard, group.stride * shard) for group in named]
        per_node = self.network.cluster.devices_per_node
        near = [(n, max(1, min(n, per_node // stride)), stride) for n, stride in sizes]
        return list(dict.fromkeys(stride for n, here, stride in near if (n, here) == (ranks, together)))

    def _view(self, together: int) -> Fabric:
        """The fabric for groups with so many ranks of a node in a row."""
        base = self.known.views.setdefault(together, self.base.grouped(together))
        if not self.faults:
            return base
        if together not in self._views:
            if all(fault.soft for fault in self.faults):
                self._views[together] = base.on(self.topology, True)
            else:
                self._views[together] = self._faulty.grouped(together)
        return self._views[together]

    @cached_property
    def _faulty(self) -> Fabric:
        return self.base.on(self.topology)

    @cached_property
    def _open(self) -> Fabric:
        """The cluster's nodes on one switch that never blocks."""
        cluster = replace(self.network.cluster, topology={"shape": "switch", "routing": "adaptive"})
        return fabric(cluster, self.network.device)

    def _stretch(self, key: tuple[str, int, int, int]) -> float:
        if not self.faults:
            return self._remembered(self.known.stretch, key)
        if self._apart(*key[:3]):
            return self.with_faults(())._remembered(self.known.stretch, key)
        return self._remembered(self._stretches, key)

    def _remembered(self, table: dict[tuple[str, int, int, int], float], key: tuple[str, int, int, int]) -> float:
        if key not in table:
            table[key] = max((self._slower(*each, key[3]) for each in self._all(*key[:3])), default=1.0)
        return table[key]

    def _apart(self, what: str, ranks: int, together: int) -> bool:
        """Whether an op's bytes never cross a link that has a fault; hashed routes move when one of a set is gone."""
        if self.base.policy != "adaptive" and any(fault.gone for fault in self.faults):
            return False
        key = what, ranks, together
        if key not in self.known.used:
            calm = self.with_faults(())
            loads = [
                calm._view(together).load(groups.collective, algorithm, groups.members)
                for groups, algorithm in calm._all(*key)
            ]
            self.known.used[key] = np.sum(loads, axis=0) > 0
        return not bool((self.known.used[key] & self.touched).any())

    def _slower(self, groups: Groups, algorithm: str, size: int) -> float:
        """Time of the slowest group over that where nothing blocks; there, only groups of its nodes are in its way."""
        key = (*groups[:4], algorithm, size)
        if key not in self.known.ideal_us:
            per_node = self.network.cluster.devices_per_node
            nodes = {device // per_node for device in groups.members[0]}
            near = tuple(each for each in groups.members if any(device // per_node in nodes for device in each))
            open_view = self.known.views.setdefault(-groups.together, self._open.grouped(groups.together))
            self.known.ideal_us[key] = self._time(open_view, groups._replace(members=near), algorithm, size)
        ideal = self.known.ideal_us[key]
        return self._time(self._view(groups.together), groups, algorithm, size) / ideal if ideal > 0 else 1.0

    def _time(self, on: Fabric, groups: Groups, algorithm: str, size: int) -> float:
        """When the slowest group is done, us."""
        sent = [Transfer(groups.collective, each, float(size), algorithm) for each in groups.members]
        if self.fidelity != "packet":
            return float(on.flow(sent, folded=True)[1].max())
        key = id(on), *groups[:4], algorithm
        if key not in self.known.packet_us:
            parts = (PACKET_BYTES // 2, PACKET_BYTES)
            half, whole = (
                simulate(on, [each._replace(size_bytes=part) for each in sent], "packet").total_us for part in parts
            )
            self.known.packet_us[key] = half, whole
        half, whole = self.known.packet_us[key]
        return half + (whole - half) * max(size / (PACKET_BYTES // 2) - 1.0, 0.0)
