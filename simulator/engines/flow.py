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
from ...datasets.ops import KINDS, Op, iterate_groups
from ..network.build import build_fabric, build_nonblocking_fabric
from ..network.fabric import Fabric, Transfer
from ..network.faults import Fault, apply_faults
from ..network.fidelity import simulate
from ..network.mapping import fills_nodes, order_by_node, process_groups
from ..network.nccl_times import list_choices
from ..network.next_hops import SERVER_LINK_KINDS
from ..network.packet import check_devices
from ..network.reduction import SWITCH_ALGORITHMS as IN_SWITCH
from ..network.timeline_sharing import Usage
from ..network.topology import Topology, TopologyError
from ..question.plan import Plan
from .answers import Answers, Columns, Engine
from .fused import FusedEngine
from .network import NetworkEngine

FAMILIES = ("collective", "expert_parallel")
PACKET_SAMPLE_BYTES = 2**17  # whose packets are moved, and of half as many: other sizes lie on the line through both
MIN_STRETCH = 1e-6  # that a stretch may differ from 1


Key = tuple[str, int, int]  # collective/algorithm, ranks, the fewest of them in a node
PacketTimes = dict[tuple[int, str, str, int, int, int, str], tuple[float, float]]


class ConcurrentGroups(NamedTuple):
    """Groups that run at once: of one parallel dimension in one stage, ``per_node`` ranks of a node in a row.

    ``members`` are devices [groups, ranks]; ``name`` tells dimensions apart, ``stage`` their stages.
    """

    collective: str
    name: str
    ranks: int
    per_node: int
    members: np.ndarray
    stage: int = 0


@dataclass
class FlowMemo:
    """What an engine has found out and its like with other faults need not find again."""

    views: dict[int, Fabric] = field(default_factory=dict)
    ideal_us: dict[tuple[str, str, int, int, int, str, int], float] = field(default_factory=dict)
    stretch: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    packet_us: PacketTimes = field(default_factory=dict)
    used: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)
    groups: dict[tuple[str, int, int], list[ConcurrentGroups]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlowEngine:
    """Answers collectives as ``beneath`` does, times the stretch on the cluster's fabric with its ``faults``.

    ``network`` is the formula and has device and cluster; ``plan`` says which devices form each group (without one,
    groups of a node are neighbours and others as close as their number in a node allows). Collectives
    inside nodes are only touched by faults inside nodes. ``fidelity`` is ``flow`` or ``packet``.
    """

    network: NetworkEngine
    beneath: Engine
    plan: Plan | None = None
    faults: tuple[Fault, ...] = ()
    fidelity: str = "flow"
    known: FlowMemo = field(default_factory=FlowMemo, compare=False, repr=False)
    name: str = "flow"
    _stretches: dict[tuple[str, int, int, int], float] = field(default_factory=dict, compare=False, repr=False)
    _views: dict[int, Fabric] = field(default_factory=dict, compare=False, repr=False)
    _usages: dict[tuple[str, int, int, bytes], Usage] = field(default_factory=dict, compare=False, repr=False)
    _packet_us: PacketTimes = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.fidelity == "packet":
            check_devices(self.network.cluster.devices)

    def with_faults(self, faults: Sequence[Fault]) -> FlowEngine:
        """The same cluster with other faults; what is known without any stays known."""
        engine = replace(self, faults=tuple(faults), _stretches={}, _views={}, _usages={}, _packet_us={})
        engine.__dict__["base"], engine.__dict__["_nonblocking"] = self.base, self._nonblocking
        return engine

    @cached_property
    def base(self) -> Fabric:
        """The fabric without faults."""
        return build_fabric(self.network.cluster, self.network.device)

    @cached_property
    def topology(self) -> Topology:
        """Links that still stand. TopologyError for an unknown link or node, or ranks that are cut off."""
        return apply_faults(self.base.topology, self.faults) if self.faults else self.base.topology

    @cached_property
    def touched(self) -> np.ndarray:
        """Which links of the healthy fabric a fault touches [links]."""
        base, touched = self.base.topology, np.zeros(self.base.topology.links, dtype=bool)
        for fault in self.faults:
            touched[fault.links(base)] = True
        return touched

    @cached_property
    def faults_inside(self) -> bool:
        """Whether a fault touches a link inside a node."""
        kinds = self.base.topology.kind
        return any(kinds[link] in SERVER_LINK_KINDS for link in np.flatnonzero(self.touched).tolist())

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """TopologyError for a fabric that falls apart or lacks a link that a fault names."""
        if KINDS[kind].family not in FAMILIES:
            return Answers.declined(len(next(iter(columns.values()))))
        answers = self.beneath.answer(kind, columns, dtype, out_dtype, cache)
        moved_dtype = out_dtype if kind == "ep_combine" else dtype
        stretch = self.stretch(kind, columns, moved_dtype)
        measured = answers.engine == "measured"
        if self.faults and measured.any():
            stretch = np.where(measured, stretch / self.with_faults(()).stretch(kind, columns, moved_dtype), stretch)
        elif measured.any():
            stretch[measured] = 1.0  # on this very fabric
        if self.network.cluster.has_own_links:
            by_own_links = ~measured & (np.abs(stretch - 1.0) > MIN_STRETCH)
            us = self._own_links_us(kind, columns, dtype, out_dtype)
            stretch = np.where(by_own_links, us / answers.latency_us, stretch)
        for values in (answers.latency_us, answers.low_us, answers.high_us):
            values *= stretch
        changed = (answers.engine == self.network.name) | (np.abs(stretch - 1.0) > MIN_STRETCH)
        return replace(answers, engine=np.where(changed, self.name, answers.engine))

    def _own_links_us(self, kind: str, columns: Columns, dtype: str, out_dtype: str) -> np.ndarray:
        """Latency without bytes and what the links take at the rates that a file gives them, of n ops [n], us."""
        moved_dtype = out_dtype if kind == "ep_combine" else dtype
        moving = [
            max(
                (
                    self._time(self._view(groups.per_node), groups, name, key[3])
                    for groups, name in self._groups_and_algorithms(*key[:3])
                ),
                default=0.0,
            )
            for key in self._keys(kind, columns, moved_dtype)
        ]
        return self.network.still_us(kind, columns, dtype, out_dtype) + np.array(moving)

    def stretch(self, kind: str, columns: Columns, dtype: str) -> np.ndarray:
        """How many times longer each of n ops takes than on a fabric that never blocks [n]."""
        stretch = np.ones(len(columns["ranks"]))
        for i, key in enumerate(self._keys(kind, columns, dtype)):
            _, ranks, per_node, _ = key
            if ranks > 1 and (ranks > per_node or self.faults_inside):
                stretch[i] = self._stretch(key)
            elif ranks > 1 and self.network.cluster.has_own_links:  # slower links than the device's show
                stretch[i] = max(1.0, self._stretch(key))
        return stretch

    def stretches(self, ops: Sequence[Op]) -> np.ndarray:
        """How many times longer each op takes than on a fabric that never blocks [ops]."""
        stretches = np.ones(len(ops))
        for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
            stretches[positions] = self.stretch(kind, columns, out_dtype if kind == "ep_combine" else dtype)
        return stretches

    def usage(self, op: Op, devices: np.ndarray) -> tuple[Key, Usage, float]:
        """What the groups of these devices move at once for an op: its pattern, usage of links, and bytes.

        Ops of the same pattern differ in their bytes alone.
        """
        columns = {name: np.array([value]) for name, value in zip(KINDS[op.kind].names, op.dims, strict=True)}
        moved_dtype = op.out_dtype if op.kind == "ep_combine" else op.dtype
        algorithm_key, ranks, per_node, size = self._keys(op.kind, columns, moved_dtype)[0]
        key = algorithm_key, ranks, per_node, devices.tobytes()
        if key not in self._usages:
            self._usages[key] = Usage(np.zeros(self.topology.links), 0.0)
            for groups, algorithm in self._groups_and_algorithms(algorithm_key, ranks, per_node):
                running = groups.members[np.isin(groups.members[:, 0], devices)]
                if len(running):  # of several dimensions with groups alike, one ran it
                    self._usages[key] = self._view(groups.per_node).usage(groups.collective, algorithm, running)
                    break
        return (algorithm_key, ranks, per_node), self._usages[key], size

    def sends(self, source: np.ndarray, target: np.ndarray) -> Usage:
        """What moves when each device ``source`` sends to its like ``target``."""
        return self._view(1).usage("send", "path", np.stack([source, target], axis=1))

    def still_us(self, ops: Sequence[Op]) -> np.ndarray:
        """How long each op takes without any byte, by the formula: latency that uses no link [ops]."""
        latency_us = np.zeros(len(ops))
        for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
            latency_us[positions] = self.network.still_us(kind, columns, dtype, out_dtype)
        return latency_us

    def _keys(self, kind: str, columns: Columns, dtype: str) -> list[tuple[str, int, int, int]]:
        """(kind/algorithm, ranks, ranks in a node, bytes) of each op.

        The exchange of routed tokens moves what :meth:`.network.NetworkEngine.answer` says: to every node that wants
        them on the sender's rail, then inside it; in low-latency mode straight to every expert.
        """
        groups = self.network.groups(columns)
        ranks, near = groups.ranks, groups.per_node
        if KINDS[kind].family == "collective":
            collective, sizes = kind, np.asarray(columns["size_bytes"])
            names = [name.partition("/")[0] for name in list_choices(collective, sizes, groups)]
        else:
            direct, nodes = np.asarray(columns["mode"]) > 0, groups.nodes
            copies_limit = np.where(nodes > 1, nodes, ranks)
            copies = np.where(
                direct,
                np.minimum(columns["topk"], ranks),
                copies_limit - (1 - 1 / copies_limit) ** columns["topk"] * copies_limit,
            )
            sent = columns["tokens"] * columns["hidden"] * itemsize(dtype) * copies
            collective, sizes = "all_to_all", np.round(sent).astype(np.int64)
            names = np.where(direct | (nodes == 1), "direct", "hierarchical").tolist()
        algorithm_keys = [f"{collective}/{name}" for name in names]
        columns_ = (ranks.astype(np.int64), near.astype(np.int64), sizes)
        return list(zip(algorithm_keys, *(column.tolist() for column in columns_), strict=True))

    def _groups_and_algorithms(
        self, algorithm_key: str, ranks: int, per_node: int
    ) -> Iterator[tuple[ConcurrentGroups, str]]:
        """The groups of each dimension that may be meant, and the algorithm that they run."""
        collective, _, algorithm = algorithm_key.partition("/")
        for groups in self._groups(collective, ranks, per_node):
            if groups.collective in ("send", "send_recv"):
                yield groups, "path" if groups.collective == "send" else "ring"
                continue
            algorithms = self._view(groups.per_node).algorithms(collective, groups.members[0].tolist())
            fits = algorithm in algorithms and (algorithm not in IN_SWITCH or self._reduces(groups, algorithm))
            yield groups, algorithm if fits else algorithms[0]

    def _groups(self, collective: str, ranks: int, per_node: int) -> Iterator[ConcurrentGroups]:
        """The process groups of each dimension with so many ranks, the fewest in a node ``per_node``."""
        key = collective, ranks, per_node
        if key not in self.known.groups:
            groups = self._find_groups(*key)
            self.known.groups[key] = list(
                {(group.collective, group.members.tobytes()): group for group in groups}.values()
            )
        yield from self.known.groups[key]

    def _find_groups(self, collective: str, ranks: int, per_node: int) -> Iterator[ConcurrentGroups]:
        plan, cluster = self.plan, self.network.cluster
        is_send = plan is not None and collective == "send_recv" and ranks == 2
        if plan and is_send and plan.parallel.pp > 1:
            stages = plan.members("pp")
            last = stages.shape[1] if plan.parallel.vpp > 1 else stages.shape[1] - 1
            for stage in range(last):
                pairs = stages[:, [stage, (stage + 1) % stages.shape[1]]]
                inside = pairs[:, 0] // cluster.devices_per_node == pairs[:, 1] // cluster.devices_per_node
                if inside.all() == (per_node > 1):
                    yield ConcurrentGroups("send", "pp", 2, per_node, pairs, stage)
        plan_groups = [group for group in (plan.groups if plan else ()) if group[1:3] == (ranks, per_node)]
        members = {
            f"{group.name}/{group.apart}": plan.members(group.name, ranks, group.apart) for group in plan_groups if plan
        }
        if not plan_groups and not is_send:
            stride = 1 if per_node >= min(ranks, cluster.devices_per_node) else cluster.devices_per_node // per_node
            covered_devices = cluster.devices // (ranks * stride) * ranks * stride
            members[""] = np.array(process_groups(covered_devices, ranks, stride), dtype=np.int64).reshape(-1, ranks)
        for name, devices in members.items():
            if collective != "send_recv":
                devices = order_by_node(devices, cluster.devices_per_node)
            in_a_row = per_node if fills_nodes(devices, per_node, cluster.devices_per_node) else 1
            stage_of = self._stage_of[devices[:, 0]] if name else np.zeros(len(devices), dtype=np.int64)
            for stage in np.unique(stage_of).tolist():
                yield ConcurrentGroups(collective, name, ranks, in_a_row, devices[stage_of == stage], stage)

    @cached_property
    def _stage_of(self) -> np.ndarray:
        """The pipeline stage of every device [devices]."""
        stages = np.zeros(self.network.cluster.devices, dtype=np.int64)
        for stage in range(self.plan.parallel.pp if self.plan else 0):
            stages[self.plan.stage_devices(stage)] = stage  # type: ignore[union-attr]
        return stages

    def _reduces(self, groups: ConcurrentGroups, algorithm: str) -> bool:
        """Whether the switches that an algorithm reduces in are there for all groups; packets are never reduced."""
        if self.fidelity == "packet":
            return False
        if not any(fault.gone for fault in self.faults):
            return True
        try:
            for group in groups.members.tolist():
                self._view(groups.per_node).cost(groups.collective, algorithm, group)
        except TopologyError:
            return False
        return True

    def _view(self, per_node: int) -> Fabric:
        """The fabric for groups with so many ranks of a node in a row."""
        base = self.known.views.setdefault(per_node, self.base.with_group_size(per_node))
        if not self.faults:
            return base
        if per_node not in self._views:
            self._views[per_node] = base.on(self.topology, all(fault.soft for fault in self.faults))
        return self._views[per_node]

    @cached_property
    def _nonblocking(self) -> Fabric:
        """The cluster's nodes on one switch that never blocks."""
        return build_nonblocking_fabric(self.network.cluster, self.network.device)

    def _stretch(self, key: tuple[str, int, int, int]) -> float:
        if not self.faults:
            return self._recall_stretch(self.known.stretch, key)
        if self._avoids_faults(*key[:3]):
            return self.with_faults(())._recall_stretch(self.known.stretch, key)
        return self._recall_stretch(self._stretches, key)

    def _recall_stretch(self, table: dict[tuple[str, int, int, int], float], key: tuple[str, int, int, int]) -> float:
        if key not in table:
            table[key] = max(
                (self._group_stretch(*pair, key[3]) for pair in self._groups_and_algorithms(*key[:3])), default=1.0
            )
        return table[key]

    def _avoids_faults(self, algorithm_key: str, ranks: int, per_node: int) -> bool:
        """Whether an op's bytes never cross a link that has a fault; hashed routes move when one of a set is gone."""
        if self.base.policy != "adaptive" and any(fault.gone for fault in self.faults):
            return False
        key = algorithm_key, ranks, per_node
        if key not in self.known.used:
            healthy = self.with_faults(())
            loads = [
                healthy._view(groups.per_node).usage(groups.collective, algorithm, groups.members).load
                for groups, algorithm in healthy._groups_and_algorithms(*key)
            ]
            self.known.used[key] = np.sum(loads, axis=0) > 0
        return not bool((self.known.used[key] & self.touched).any())

    def _group_stretch(self, groups: ConcurrentGroups, algorithm: str, size: int) -> float:
        """Time of the slowest group over that where nothing blocks; there, only groups of its nodes are in its way."""
        key = (*groups[:4], 0 if self._groups_alike else groups.stage, algorithm, size)
        if key not in self.known.ideal_us:
            per_node = self.network.cluster.devices_per_node
            nodes = groups.members // per_node
            near = np.isin(nodes, nodes[0]).any(axis=1)
            open_view = self.known.views.setdefault(
                -groups.per_node, self._nonblocking.with_group_size(groups.per_node)
            )
            near_groups = groups._replace(members=groups.members[near]) if self._groups_alike else groups
            self.known.ideal_us[key] = self._time(open_view, near_groups, algorithm, size)
        ideal_us = self.known.ideal_us[key]
        return self._time(self._view(groups.per_node), groups, algorithm, size) / ideal_us if ideal_us > 0 else 1.0

    @property
    def _groups_alike(self) -> bool:
        """Whether all groups of a dimension lie in their nodes as the first does."""
        return self.plan is None or isinstance(self.plan.parallel.placement, str)

    def _time(self, fabric: Fabric, groups: ConcurrentGroups, algorithm: str, size: int) -> float:
        """When the slowest group is done, us."""
        transfers = [
            Transfer(groups.collective, tuple(group), float(size), algorithm) for group in groups.members.tolist()
        ]
        if self.fidelity != "packet":
            return float(fabric.flow(transfers, folded=True)[1].max())
        shared = any(fabric is view for view in self.known.views.values())
        packet_us = self.known.packet_us if shared else self._packet_us
        key = id(fabric), *groups[:4], groups.stage, algorithm
        if key not in packet_us:
            sizes = (PACKET_SAMPLE_BYTES // 2, PACKET_SAMPLE_BYTES)
            half, full = (
                simulate(
                    fabric, [transfer._replace(size_bytes=size_bytes) for transfer in transfers], "packet"
                ).total_us
                for size_bytes in sizes
            )
            packet_us[key] = half, full
        half, full = packet_us[key]
        return half + (full - half) * max(size / (PACKET_SAMPLE_BYTES // 2) - 1.0, 0.0)


def flow_engine(engine: Engine) -> FlowEngine | None:
    """The engine of flows among others."""
    engines = engine.engines if isinstance(engine, FusedEngine) else [engine]
    return next((candidate for candidate in engines if isinstance(candidate, FlowEngine)), None)
