"""From the placed tasks of a cluster to the report of a step: rates, breakdown, provenance, interval.

The stage that is busy longest speaks for the step: its tasks, its waiting and its optimizer add up to the step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...datasets.devices import Device
from ..graph import Graph, Node
from ..network.together import Shared
from ..passes.pipeline import Chunk
from ..question.plan import Plan
from ..question.work import COVERAGE, Work
from ..timing.costs import Costs
from ..timing.latencies import step_interval
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, ChunkTimes, PhaseTime, selected
from ..timing.placement import Sends
from ..timing.schedule.orders import BACKWARD, FORWARD, INPUT, Orders, parts_of
from ..timing.schedule.pipeline import PipelineTimes
from . import distribution, trust
from .answer import Breakdown, Memory, OpShare, StageShare, StepReport
from .energy import cost, energy


@dataclass(frozen=True)
class ClusterStep:
    """Everything that a report is made from.

    ``times`` and ``saved_gib`` (what a micro-batch keeps from forward to backward) are by the identity of a chunk's
    graph, ``memories`` by stage; ``shared`` is what the links saw of it, where they were simulated.
    """

    graph: Graph
    plan: Plan
    device: Device
    work: Work
    chunks: Sequence[Chunk]
    times: Mapping[int, ChunkTimes]
    orders: Orders
    pipeline: PipelineTimes
    memories: Sequence[Memory]
    saved_gib: Mapping[int, float]
    sends: Sends
    shared: Shared | None = None

    @cached_property
    def memory(self) -> Memory:
        """Peak memory of the stage that needs most."""
        return max(self.memories, key=lambda memory: memory.peak_gib)

    @cached_property
    def busiest(self) -> int:
        """The stage that works longest, its optimizer included."""
        optimizer = [optimizer_time(self, stage) for stage in range(self.orders.stages)]
        return int(np.argmax(self.pipeline.busy_us + np.array(optimizer)))


@dataclass(frozen=True)
class Executed:
    """A phase of a chunk that a stage ran ``times`` times."""

    phase: str
    time: PhaseTime
    costs: Costs
    times: int


def training_report(step: ClusterStep, wall_time_s: float) -> StepReport:
    """The report of a training step."""
    stage = step.busiest
    executed = list(executions(step, stage))
    total_us = step_us(step)
    low_us, high_us = interval(executed, total_us)
    seconds, devices = total_us * 1e-6, step.plan.cluster.devices
    parts = breakdown(step, executed, stage, total_us)
    timed = list(by_node(executed))
    spent = energy(step.device, devices, *busy_seconds(timed), seconds)
    price = cost(step.plan.cluster.price_per_device_hour, devices, seconds)
    tokens = step.work.global_batch * step.work.seq_len
    return StepReport(
        step_time_s=seconds,
        low_s=low_us * 1e-6,
        high_s=high_us * 1e-6,
        model=step.graph.name,
        device=step.device.id,
        devices=devices,
        parallel=degrees(step.plan),
        precision=step.plan.quantization or step.plan.precision,
        workload="train",
        coverage=COVERAGE,
        memory=step.memory,
        fits=step.memory.peak_gib <= step.device.memory_gib,
        p_oom=trust.probability_oom(step.memory.peak_gib, step.device.memory_gib),
        breakdown=parts,
        provenance=provenance(timed, total_us, parts.host_s),
        trust=trust.shares((t.engine, t.inside, t.us) for t in timed),
        measure_next=trust.missing((t.node.op, t.engine, t.inside, t.us) for t in timed),
        quantiles=distribution.quantiles(seconds, low_us * 1e-6, high_us * 1e-6, COVERAGE),
        power_w=spent.power_w,
        energy_j=spent.energy_j,
        cost=price,
        cost_per_million_tokens=None if price is None else price / tokens * 1e6,
        unmapped=unmapped(timed),
        notes=tuple(step.graph.notes),
        wall_time_s=wall_time_s,
        stages=tuple(stage_shares(step)),
        placed=step,
        shared=step.shared,
        **rates(step, seconds),
    )


def degrees(plan: Plan) -> dict[str, Any]:
    """The layout as a user writes it, with the data-parallel degree that it comes to."""
    return {**dataclasses.asdict(plan.parallel), "dp": plan.dp, "micro_batches": plan.micro_batches}


def step_us(step: ClusterStep) -> float:
    """Microseconds of the whole step."""
    optimizer_us = max(optimizer_time(step, each) for each in range(step.orders.stages))
    return step.pipeline.makespan_us + optimizer_us + overhead_us(step)


def optimizer_time(step: ClusterStep, stage: int) -> float:
    """Microseconds of a stage's optimizer phase."""
    return sum(e.time.total_us for e in executions(step, stage) if e.phase == "optimizer")


def overhead_us(step: ClusterStep) -> float:
    """Microseconds a step in which no device works: what the framework does between steps, and waiting for data."""
    return step.plan.stack.step_overhead_us + step.work.data_loading_ms * 1e3


def busy_seconds(timed: Sequence[Run]) -> tuple[float, float]:
    """Seconds in matrix products and attention, and in all other kernels of the device."""
    products = others = 0.0
    for each in timed:
        unit = each.node.op.cost.unit if each.node.op else ""
        if unit == "tensor":
            products += each.us
        elif unit != "network":
            others += each.us
    return products * 1e-6, others * 1e-6


def held_by(step: ClusterStep, stage: int) -> list[Chunk]:
    """The chunks on a stage, by position."""
    return [step.chunks[part] for part in parts_of(step.orders, stage)]


def executions(step: ClusterStep, stage: int) -> Iterator[Executed]:
    """What a stage ran: every phase of its chunks with the number of times, first and last micro-batches apart."""
    row = slice(step.orders.offsets[stage], step.orders.offsets[stage + 1])
    kinds, chunks = step.orders.kind[row], step.orders.chunk[row]
    for position, chunk in enumerate(held_by(step, stage)):
        times = step.times[id(chunk.graph)]
        here = chunks == position
        forwards = int(np.sum(here & (kinds == FORWARD)))
        backwards = int(np.sum(here & ((kinds == BACKWARD) | (kinds == INPUT))))
        if ONLY in times.phases:
            counts = {ONLY: {"forward": forwards, "backward": backwards, "optimizer": 1}}
        else:
            counts = {
                FIRST: {"forward": 1},
                MIDDLE: {"forward": forwards - 1, "backward": backwards - 1},
                LAST: {"backward": 1, "optimizer": 1},
            }
        for variant, by_phase in counts.items():
            for phase, count in by_phase.items():
                yield Executed(phase, times.phases[variant][phase], times.costs[variant], count)


class Run(NamedTuple):
    """A stored node with what it takes over the whole step (``us``) and how often it runs."""

    node: Node
    us: float
    times: int
    engine: str
    inside: bool


def by_node(executed: Sequence[Executed]) -> Iterator[Run]:
    """Every stored node of a stage, once per phase and variant of the micro-batch."""
    for each in executed:
        costs = each.costs
        for index in selected(costs, each.phase).tolist():
            times = each.times * int(costs.repeats[index])
            us = float(costs.kernel_us[index]) * times
            yield Run(costs.nodes[index], us, times, str(costs.engine[index]), bool(costs.in_envelope[index]))


def breakdown(step: ClusterStep, executed: Sequence[Executed], stage: int, total_us: float) -> Breakdown:
    """Where the busiest stage's time goes. Kernels that run beside others appear in ``by_op`` with their own time."""
    by_kind: dict[str, tuple[int, float, set[str]]] = {}
    by_phase: dict[str, float] = {}
    for node, us, times, engine, _ in by_node(executed):
        name = node.op.kind if node.op else node.source
        count, total, engines = by_kind.get(name, (0, 0.0, set()))
        by_kind[name] = (count + times, total + us * 1e-6, engines | {engine})
        by_phase[node.phase] = by_phase.get(node.phase, 0.0) + us * 1e-6
    exposed: dict[str, float] = {}
    optimizer = host = 0.0
    for each in executed:
        host += each.time.host_us * each.times
        if each.phase == "optimizer":
            optimizer += each.time.compute_us * each.times
        for group, us in each.time.exposed_us.items():
            exposed[group] = exposed.get(group, 0.0) + us * each.times
    saved = hidden_by_schedule(step, executed, stage)
    waiting = sum(exposed.values())
    kept = 1.0 - min(saved, waiting) / waiting if waiting else 1.0
    exposed = {group: us * kept for group, us in exposed.items()}
    exposed["pp"] = exposed.get("pp", 0.0) + float(step.pipeline.sending_us[stage])
    bubble = float(step.pipeline.bubble_us[stage])
    compute = sum(e.time.compute_us * e.times for e in executed if e.phase != "optimizer") - max(saved - waiting, 0.0)
    spoken_for = compute + optimizer + host + bubble + sum(exposed.values())
    bubble += max(total_us - spoken_for - overhead_us(step), 0.0)  # waiting for a slower optimizer
    shares = [
        OpShare(kind, count, seconds, seconds / (total_us * 1e-6), tuple(sorted(engines)))
        for kind, (count, seconds, engines) in by_kind.items()
    ]
    return Breakdown(
        compute_s=compute * 1e-6,
        exposed_comm_s=sum(exposed.values()) * 1e-6,
        bubble_s=bubble * 1e-6,
        optimizer_s=optimizer * 1e-6,
        host_s=(host + overhead_us(step)) * 1e-6,
        by_op=tuple(sorted(shares, key=lambda share: -share.time_s)),
        by_phase=by_phase,
        by_parallelism={group: us * 1e-6 for group, us in sorted(exposed.items()) if us > 0},
    )


def hidden_by_schedule(step: ClusterStep, executed: Sequence[Executed], stage: int) -> float:
    """Microseconds that a stage saves by running one task beside another: pairs of DualPipe, gradients reduced late."""
    apart = sum(e.time.total_us * e.times for e in executed if e.phase in ("forward", "backward"))
    return max(apart - float(step.pipeline.busy_us[stage]), 0.0)


def provenance(timed: Sequence[Run], total_us: float, host_s: float) -> dict[str, float]:
    """Share of the busiest stage's time by who answered; ``host`` is waiting for the host."""
    shares: dict[str, float] = {}
    for each in timed:
        shares[each.engine] = shares.get(each.engine, 0.0) + each.us
    kernels, host = sum(shares.values()), host_s * 1e6 / total_us
    found = {name: us / kernels * (1.0 - host) for name, us in shares.items()} | {"host": host}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def interval(executed: Sequence[Executed], total_us: float) -> tuple[float, float]:
    """Bounds of the step: errors of one kind of op go together, those of different kinds do not."""
    nodes: list[Any] = []
    parts: list[np.ndarray] = []
    for each in executed:
        costs, chosen = each.costs, selected(each.costs, each.phase)
        nodes += [costs.nodes[i] for i in chosen.tolist()]
        us = costs.kernel_us[chosen] * costs.repeats[chosen] * each.times
        parts.append(np.stack([us, costs.low[chosen], costs.high[chosen]]))
    us, low, high = np.concatenate(parts, axis=1)
    down, up = step_interval(nodes, us, low, high, float(us.sum()))
    return total_us * down / float(us.sum()), total_us * up / float(us.sum())


def rates(step: ClusterStep, seconds: float) -> dict[str, Any]:
    """Throughput and utilisation per device. HFU divides what devices execute, MFU what the model defines."""
    plan, devices = step.plan, step.plan.cluster.devices
    copies = plan.micro_batches * plan.dp
    peak = step.device.tensor_rate(step.plan.quantization or step.plan.precision)
    model = step.graph.model_flops * copies / devices / seconds / 1e12
    flops = sum(tensor_flops(chunk.graph) for chunk in step.chunks)
    executed = flops * plan.micro_batches / plan.parallel.pp / seconds / 1e12
    tokens = step.work.global_batch * step.work.seq_len
    return {
        "tokens_per_s_per_gpu": tokens / seconds / devices,
        "tflops_per_gpu": model,
        "mfu": model / peak,
        "hfu": executed / peak,
    }


def tensor_flops(graph: Graph) -> float:
    """Arithmetic of matrix products and attention that a rank executes for one micro-batch."""
    found = ((node.op.cost, repeat) for node, repeat in graph.weighted() if node.op is not None)
    return sum(float(cost.flops) * repeat for cost, repeat in found if cost.unit == "tensor")


def unmapped(timed: Sequence[Run]) -> tuple[str, ...]:
    """Operators that no kind covers, with how often they run."""
    counts: Counter[str] = Counter()
    for each in timed:
        if each.node.op is None:
            counts[each.node.source] += each.times
    return tuple(f"{name} x{count}" for name, count in counts.most_common())


def stage_shares(step: ClusterStep) -> Iterator[StageShare]:
    """What every stage does with the step."""
    for stage in range(step.orders.stages):
        chunks = held_by(step, stage)
        yield StageShare(
            stage=stage,
            layers=sum(chunk.layers for chunk in chunks),
            busy_s=float(step.pipeline.busy_us[stage]) * 1e-6,
            bubble_s=float(step.pipeline.bubble_us[stage]) * 1e-6,
            parameters=sum(chunk.graph.parameters for chunk in chunks),
        )
