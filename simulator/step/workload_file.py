"""A step that a file of SimAI describes: compute as the file has it, collectives as opcast's network times them.

The lines run as SimAI runs them: forward from the first to the last, each communication waited for; then backwards, the
input gradient's communication beside the weight gradient's compute, and the weight gradient's beside everything that
follows, one after the other. Checkpointed lines run forward again before their backward. Waiting of pipeline stages is
the share ``(pp - 1) / (ga vpp)`` of a stage's work, and nothing hides sends between stages
(SimAI, https://github.com/aliyun/SimAI, as its analytical mode adds up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...datasets.clusters import Cluster
from ...datasets.counts import counted
from ...datasets.ops import Op, bus_factor, make_op
from ..engines import Engine, FusedEngine, ask
from ..engines.flow import FlowEngine
from ..formats.simai import LISTS, PHASES, FormatError, LayerPhase, SimaiWorkload, WorkloadLayer, group_ranks
from ..network.faults import Fault, read_drawing
from ..network.study import Study, run_trials
from ..network.topology import TopologyError
from ..question.plan import Group, Parallel, Plan

GROUPS = {"tp": "TP", "ep": "EP", "dp": "DP", "edp": "DP", "pp": "PP"}  # as a file of bus bandwidths calls them


class FileCollective(NamedTuple):
    """A distinct collective of a workload: how often it runs and what one takes, us."""

    group: str
    collective: str
    ranks: int
    size_bytes: int
    times: int
    time_us: float
    low_us: float
    high_us: float
    engine: str
    algbw_gbps: float
    busbw_gbps: float


@dataclass
class Account:
    """What a device has done so far, us: compute, exposed communication by group, and the time it is."""

    now: float = 0.0
    compute: float = 0.0
    data_free: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)

    def computes(self, ns: int) -> None:
        """Time passes computing."""
        self.now += ns / 1e3
        self.compute += ns / 1e3

    def waits(self, until: float, group: str) -> None:
        """Time passes until a communication is done."""
        self.exposed[group] = self.exposed.get(group, 0.0) + max(until - self.now, 0.0)
        self.now = max(self.now, until)


def plan_of(workload: SimaiWorkload, cluster: Cluster) -> Plan:
    """The layout of a workload on a cluster; experts are cut like tensors.

    FormatError where the cluster has more or fewer GPUs.
    """
    degrees, devices = workload.degrees, cluster.devices
    if degrees["gpus"] != devices:
        nodes, remainder = divmod(degrees["gpus"], cluster.devices_per_node)
        hint = f"; take cluster.nodes={nodes}" if not remainder else ""
        raise FormatError(f"the workload is for {counted(degrees['gpus'], 'GPU')}, {cluster.id} has {devices}{hint}")
    for phase in PHASES:
        for scope in ("", "EP", "DP_EP") if degrees["ep"] > 1 else ("",):
            group_ranks(workload, phase, LayerPhase(0, scope=scope))
    return Plan(Parallel(tp=degrees["tp"], pp=degrees["pp"], ep=degrees["ep"], etp=degrees["tp"]), cluster)


Key = tuple[str, str, int]  # group, collective, bytes


@dataclass(frozen=True)
class FileStep:
    """A step of a workload file as it runs under a plan: its collectives, the account of a stage, its waiting (us)."""

    workload: SimaiWorkload
    plan: Plan
    communications: Mapping[Key, FileCollective]
    account: Account
    bubble_us: float
    total_us: float


def run_file(
    workload: SimaiWorkload,
    plan: Plan,
    engine: Engine,
    busbw: Mapping[str, Mapping[str, float]] | None = None,
    vpp: int | None = None,
) -> FileStep:
    """One step. ``busbw`` (GB/s by group and collective) goes before the engine's answers.

    ``vpp`` replaces the virtual stages of the file, where AICB writes the number of layers.
    """
    if vpp is not None:
        workload = replace(workload, degrees={**workload.degrees, "vpp": vpp})
    collectives = communications(workload, plan, engine, busbw or {})
    total, account, bubble = step(workload, {key: collective.time_us for key, collective in collectives.items()})
    return FileStep(workload, plan, collectives, account, bubble, total)


def group_of(phase: str, work: LayerPhase) -> str:
    """The process group of a line's communication."""
    return {"EP": "ep", "DP_EP": "edp"}.get(work.scope, "dp" if phase == "weight_gradient" else "tp")


def communications(
    workload: SimaiWorkload, plan: Plan, engine: Engine, busbw: Mapping[str, Mapping[str, float]]
) -> dict[Key, FileCollective]:
    """Every distinct collective of the lines with its time, and the send between stages."""
    counts: dict[Key, int] = {}
    for layer in workload.layers:
        for phase in PHASES:
            work: LayerPhase = getattr(layer, phase)
            if work.collective:
                key = group_of(phase, work), work.collective, work.size_bytes
                counts[key] = counts.get(key, 0) + 1
    if workload.degrees["pp"] > 1 and workload.pp_bytes:
        counts["pp", "send_recv", workload.pp_bytes] = 2 * turns(workload)
    groups = {name: plan.group(name) for name in {key[0] for key in counts}}
    ops = {key: _op(key, groups[key[0]]) for key in counts if groups[key[0]].ranks > 1}
    answers = ask(engine, list(ops.values()))
    index_of = {key: i for i, key in enumerate(ops)}
    collectives = {}
    for key, count in counts.items():
        name, collective, size = key
        ranks = groups[name].ranks if name != "pp" else 2
        us = low = high = 0.0
        who = "none"
        if key in index_of:
            at = index_of[key]
            us, low, high = (float(getattr(answers, column)[at]) for column in ("latency_us", "low_us", "high_us"))
            who = str(answers.engine[at])
            bandwidths = busbw.get(GROUPS[name], {})
            rate = bandwidths.get("busbw" if name == "pp" else collective)
            if rate:
                us = low = high = size * float(bus_factor(collective, ranks)) / (rate * 1e3)
                who = "busbw"
        alg = size / (us * 1e3) if us else 0.0
        bus = alg * float(bus_factor(collective, ranks))
        collectives[key] = FileCollective(name, collective, ranks, size, count, us, low, high, who, alg, bus)
    return collectives


def _op(key: Key, group: Group) -> Op:
    name, collective, size = key
    if name == "pp":
        near = min(group.ranks_per_node, 2)
        return make_op("send_recv", size_bytes=size, ranks=2, ranks_per_node=near, link=group.link)
    return make_op(collective, size_bytes=size, ranks=group.ranks, ranks_per_node=group.ranks_per_node, link=group.link)


def step(workload: SimaiWorkload, times: Mapping[Key, float]) -> tuple[float, Account, float]:
    """Microseconds of the whole step, the account of a stage, and how long it waits for other stages."""
    done = Account()
    layers, again = workload.layers, recompute_of(workload)
    for layer in layers:
        _forward(layer, times, done)
    for at in range(len(layers) - 1, -1, -1):
        for layer in layers[again[at] : at] if at in again else ():
            _forward(layer, times, done)
        _backward(layers[at], times, done)
    work = done.now
    done.waits(done.data_free, "dp")
    stages, batches = workload.degrees["pp"], turns(workload)
    bubble = work * (stages - 1) / batches
    sends = times.get(("pp", "send_recv", workload.pp_bytes), 0.0)
    if stages > 1 and sends:
        done.exposed["pp"] = 2.0 * batches * sends
    return done.now + bubble + done.exposed.get("pp", 0.0), done, bubble


def turns(workload: SimaiWorkload) -> int:
    """How often a stage runs forward: once a micro-batch and virtual stage."""
    return workload.degrees["ga"] * workload.degrees["vpp"]


def recompute_of(workload: SimaiWorkload) -> dict[int, int]:
    """By line whose backward starts with running forward again: the checkpoint that it starts from."""
    marks, starts = (sorted(workload.lists.get(name, ())) for name in LISTS)
    settings = {}
    for at in starts:
        before = [mark for mark in marks if mark <= at]
        if before and at < len(workload.layers):
            settings[at] = before[-1]
    return settings


def _forward(layer: WorkloadLayer, times: Mapping[Key, float], done: Account) -> None:
    work = layer.forward
    done.computes(work.compute_ns)
    if work.collective:
        done.waits(done.now + _time("forward", work, times), group_of("forward", work))


def _backward(layer: WorkloadLayer, times: Mapping[Key, float], done: Account) -> None:
    inputs, weights = layer.input_gradient, layer.weight_gradient
    done.computes(inputs.compute_ns)
    until = done.now + _time("input_gradient", inputs, times)
    done.computes(weights.compute_ns)
    if weights.collective:
        done.data_free = max(done.data_free, done.now) + _time("weight_gradient", weights, times)
    if inputs.collective:
        done.waits(until, group_of("input_gradient", inputs))


def _time(phase: str, work: LayerPhase, times: Mapping[Key, float]) -> float:
    return times[group_of(phase, work), work.collective, work.size_bytes] if work.collective else 0.0


def study(
    workload: SimaiWorkload,
    plan: Plan,
    flows: FlowEngine,
    engines: Sequence[Engine],
    settings: Mapping[str, Any],
    **options: Any,
) -> Study:
    """The step with faults at random places, or with ``everywhere`` at each in turn; ``flows`` is one of ``engines``.

    ``options`` are further arguments of :func:`run_file`. TopologyError for a setting that is not there.
    """
    drawing = read_drawing(settings, "faults_study")
    if drawing.straggler is not None:
        raise TopologyError(
            f"faults_study.straggler={drawing.straggler!r} cannot be: a workload file is studied with faults of links"
        )

    def measure(faults: Sequence[Fault]) -> float:
        broken = flows.with_faults((*flows.faults, *faults))
        engine = FusedEngine([broken if member is flows else member for member in engines])
        return run_file(workload, plan, engine, **options).total_us

    return run_trials(drawing.faults(flows.topology), measure)
