"""From timed steps of inference to their report: times, rates, memory, breakdown, provenance, interval."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ..graph import Graph, Node
from ..memory.stage import COMMUNICATOR_GIB, CONTEXT_GIB, peak_memory
from ..network.together import Shared
from ..passes.pipeline import Chunk
from ..question.plan import Plan
from ..question.work import COVERAGE, Work, tokens_of
from ..timing.costs import Costs
from ..timing.latencies import step_interval
from ..timing.phases import PhaseTime
from .answer import GIB, Breakdown, InferenceReport, Memory, OpShare, Span
from .distribution import quantiles
from .energy import cost, energy
from .trust import missing, probability_oom, shares


@dataclass(frozen=True)
class Step:
    """A kind of step: its graph before any pass, what each stage runs, and how often it runs in the workload.

    ``total_us`` is the time until the last stage has the whole batch; ``stages`` has one entry a stage, ``sends_us``
    what each takes to send its result on; ``shared`` is what links saw of the step, where they were simulated.
    """

    kind: str
    times: float
    graph: Graph
    chunks: tuple[Chunk, ...]
    costs: tuple[Costs, ...]
    stages: tuple[PhaseTime, ...]
    sends_us: np.ndarray
    total_us: float
    shared: Shared | None = None


@dataclass(frozen=True)
class Ran:
    """A stored node, its microseconds over the whole workload, how often it ran, its interval and who answered."""

    node: Node
    us: float
    count: float
    low: float
    high: float
    engine: str
    inside: bool


def inference_report(steps: Sequence[Step], work: Work, plan: Plan, device: Device, started: float) -> InferenceReport:
    """The report of steps that make up a workload; ``started`` is when the question came (``perf_counter``)."""
    total_us = sum(step.total_us * step.times for step in steps)
    decodes = [step for step in steps if step.kind == "decode"]
    count = sum(step.times for step in decodes)
    ran = list(executed(steps, plan))
    low_us, high_us = interval(ran, total_us)
    memory = peak(steps, work, plan, device)
    seconds, devices = total_us * 1e-6, plan.cluster.devices
    spent = energy(device, devices, *busy_seconds(ran), seconds)
    price = cost(plan.cluster.price_per_device_hour, devices, seconds)
    return InferenceReport(
        ttft_ms=steps[0].total_us * 1e-3 if steps[0].kind == "prefill" else None,
        tpot_ms=sum(step.total_us * step.times for step in decodes) / count * 1e-3 if count else None,
        e2e_ms=total_us * 1e-3,
        low_ms=low_us * 1e-3,
        high_ms=high_us * 1e-3,
        model=steps[0].graph.name,
        device=device.id,
        precision=plan.quantization or plan.precision,
        workload=work.kind,
        coverage=COVERAGE,
        memory=memory,
        fits=memory.peak_gib <= device.memory_gib,
        breakdown=breakdown(steps, ran, plan, total_us),
        provenance=provenance(ran, total_us),
        unmapped=unmapped(ran),
        notes=notes(steps),
        timeline=timeline(steps[0].costs[0]),
        devices=devices,
        parallel={**asdict(plan.parallel), "dp": plan.dp, "micro_batches": plan.micro_batches},
        power_w=spent.power_w,
        energy_j=spent.energy_j,
        cost=price,
        cost_per_million_tokens=None if price is None else price / (tokens_of(work) * plan.dp) * 1e6,
        trust=shares((r.engine, r.inside, r.us) for r in ran),
        measure_next=missing((r.node.op, r.engine, r.inside, r.us) for r in ran),
        quantiles=quantiles(total_us * 1e-3, low_us * 1e-3, high_us * 1e-3, COVERAGE),
        p_oom=probability_oom(memory.peak_gib, device.memory_gib),
        shared=max(steps, key=lambda step: step.total_us * step.times).shared,
        wall_time_s=time.perf_counter() - started,
        **rates(steps, work, plan, device, seconds),
    )


def executed(steps: Sequence[Step], plan: Plan) -> Iterator[Ran]:
    """Every stored node of every stage of every step."""
    for step in steps:
        for costs in step.costs:
            each = costs.repeats * step.times * plan.micro_batches
            rows = zip(
                costs.nodes,
                (costs.kernel_us * each).tolist(),
                each.tolist(),
                costs.low.tolist(),
                costs.high.tolist(),
                costs.engine.tolist(),
                costs.in_envelope.tolist(),
                strict=True,
            )
            for row in rows:
                yield Ran(*row)


def busy_seconds(ran: Sequence[Ran]) -> tuple[float, float]:
    """Seconds in matrix products and attention, and in all other kernels of the device."""
    units = [(each.node.op.cost.unit if each.node.op else "", each.us) for each in ran]
    products = sum(us for unit, us in units if unit == "tensor")
    return products * 1e-6, sum(us for unit, us in units if unit not in ("tensor", "network")) * 1e-6


def interval(ran: Sequence[Ran], total_us: float) -> tuple[float, float]:
    """Bounds of the total: errors of one kind of op go together, those of different kinds do not."""
    us = np.array([r.us for r in ran])
    work = float(us.sum())
    if not work:
        return total_us, total_us
    low, high = step_interval(
        [r.node for r in ran], us, np.array([r.low for r in ran]), np.array([r.high for r in ran]), work
    )
    return total_us * low / work, total_us * high / work


def rates(steps: Sequence[Step], work: Work, plan: Plan, device: Device, seconds: float) -> dict[str, Any]:
    """Throughput and utilisation per device. HFU divides what devices execute, MFU what the model defines.

    Where kernels need less arithmetic than the model's own code (absorbed latent attention), theirs is what counts.
    """
    devices, batches = plan.cluster.devices, plan.micro_batches * plan.dp
    model = sum(step.graph.model_flops * step.times for step in steps) * batches / devices
    stage = sum(tensor_flops(chunk.graph) * step.times for step in steps for chunk in step.chunks)
    hardware = stage * plan.micro_batches / plan.parallel.pp
    model = min(model, hardware)
    peak_tflops = device.tensor_rate(plan.quantization or plan.precision)
    return {
        "tokens_per_s_per_gpu": tokens_of(work) * plan.dp / seconds / devices,
        "tflops_per_gpu": model / seconds / 1e12,
        "mfu": model / seconds / 1e12 / peak_tflops,
        "hfu": hardware / seconds / 1e12 / peak_tflops,
    }


def tensor_flops(graph: Graph) -> float:
    """Arithmetic of matrix products and attention of a graph."""
    costs = ((node.op.cost, repeat) for node, repeat in graph.weighted() if node.op is not None)
    return sum(float(cost.flops) * repeat for cost, repeat in costs if cost.unit == "tensor")


# --- memory ----------------------------------------------------------------------------------------------


def peak(steps: Sequence[Step], work: Work, plan: Plan, device: Device) -> Memory:
    """The largest memory that a stage needs in any step, with what would fit where it does not.

    Micro-batches that are under way keep their caches; allocator, context and communicators are the framework's.
    """
    graphs = {id(chunk.graph): chunk.graph for step in steps for chunk in step.chunks}
    found = ((peak_memory(graph), cache_gib(graph)) for graph in graphs.values())
    memory, kv = max(found, key=lambda pair: pair[0].peak_gib + pair[1] * (plan.micro_batches - 1))
    caches, groups = kv * plan.micro_batches, sum(plan.group(name).ranks > 1 for name in ("tp", "ep", "pp"))
    allocated = memory.peak_gib + caches - kv
    reserved = allocated * (1.0 + plan.stack.fragmentation)
    context = (plan.stack.context_gib or CONTEXT_GIB) + groups * COMMUNICATOR_GIB
    context = 0.0 if device.synchronous else context
    total = reserved + context
    return replace(
        memory,
        peak_gib=total,
        activations_gib=memory.activations_gib + caches - kv,
        other_gib=memory.other_gib + total - allocated,
        allocated_gib=allocated,
        reserved_gib=reserved,
        by_class={
            "weights": memory.weights_gib,
            "KV cache": caches,
            "activations of the moment": memory.activations_gib - kv,
            "buffers": memory.other_gib,
            "allocator": reserved - allocated,
            "context and communicators": context,
        },
        advice=advice(total, caches, work, plan, device),
    )


def cache_gib(graph: Graph) -> float:
    """Keys and values that are kept between steps, GiB."""
    return sum(t.size_bytes * t.count for t in graph.tensors if t.role == "cache") / GIB


def advice(total_gib: float, kv_gib: float, work: Work, plan: Plan, device: Device) -> str:
    """What would fit where the plan does not: fewer sequences, or the model over more devices; empty where it fits."""
    over = total_gib - device.memory_gib
    if over <= 0:
        return ""
    batch = int(work.batch * (kv_gib - over) / kv_gib) if kv_gib > over else 0
    said = f"{over:.1f} GiB too much for {device.memory_gib:g} GiB"
    if batch >= 1:
        return f"{said}; shrink the KV cache {kv_gib:.1f} GiB: workload.batch={batch}"
    shards = plan.parallel.tp * plan.parallel.pp
    least = next(2**i for i in range(24) if 2**i * device.memory_gib > shards * total_gib)
    return f"{said}; shrink weights and KV cache: tp x pp = {max(least, 2 * shards)} instead of {shards}"


# --- where the time goes -----------------------------------------------------------------------------------


def breakdown(steps: Sequence[Step], ran: Sequence[Ran], plan: Plan, total_us: float) -> Breakdown:
    """Time by kind and by phase of generation; the five parts add up to the whole."""
    micro = plan.micro_batches
    by_kind: dict[str, tuple[float, float, set[str]]] = {}
    for each in ran:
        name = each.node.op.kind if each.node.op else each.node.source
        count, us, engines = by_kind.get(name, (0.0, 0.0, set()))
        by_kind[name] = (count + each.count, us + each.us, engines | {each.engine})
    by_group: dict[str, float] = {}
    compute = host = 0.0
    for step in steps:
        times = step.times * micro
        host += plan.stack.step_overhead_us * step.times
        for stage in step.stages:
            compute += stage.compute_us * times
            host += stage.host_us * times
            for group, us in stage.exposed_us.items():
                by_group[group] = by_group.get(group, 0.0) + us * times
        by_group["pp"] = by_group.get("pp", 0.0) + float(step.sends_us.sum()) * times
    communication = sum(by_group.values())
    factor = min(total_us / max(compute + communication + host, 1e-9), 1.0)  # below 1 where stages work together
    rows = [
        OpShare(kind, round(count), us * 1e-6, us / total_us, tuple(sorted(engines)))
        for kind, (count, us, engines) in by_kind.items()
    ]
    return Breakdown(
        compute_s=compute * factor * 1e-6,
        exposed_comm_s=communication * factor * 1e-6,
        bubble_s=max(total_us - (compute + communication + host) * factor, 0.0) * 1e-6,
        optimizer_s=0.0,
        host_s=host * factor * 1e-6,
        by_op=tuple(sorted(rows, key=lambda share: -share.time_s)),
        by_phase={
            kind: sum(s.total_us * s.times for s in steps if s.kind == kind) * 1e-6
            for kind in dict.fromkeys(s.kind for s in steps)
        },
        by_parallelism={group: us * factor * 1e-6 for group, us in sorted(by_group.items()) if us},
    )


def provenance(ran: Sequence[Ran], total_us: float) -> dict[str, float]:
    """Share of the time by who answered; ``host`` is what no kernel covers."""
    found: dict[str, float] = {}
    for each in ran:
        found[each.engine] = found.get(each.engine, 0.0) + each.us
    whole = max(total_us, sum(found.values()))
    found["host"] = whole - sum(found.values())
    return {name: us / whole for name, us in sorted(found.items(), key=lambda item: -item[1])}


def unmapped(ran: Sequence[Ran]) -> tuple[str, ...]:
    """Operators that no kind covers, with how often they run."""
    counts: dict[str, float] = {}
    for each in ran:
        if each.node.op is None:
            counts[each.node.source] = counts.get(each.node.source, 0.0) + each.count
    return tuple(f"{name} x{round(count)}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def notes(steps: Sequence[Step]) -> tuple[str, ...]:
    """What the traces have to say."""
    return tuple(dict.fromkeys(note for step in steps for note in step.graph.notes))


def timeline(costs: Costs) -> tuple[Span, ...]:
    """The nodes of one stage's first step as spans, one after the other."""
    spans, now, position = [], 0.0, 0
    for block in costs.graph.blocks:
        rows = slice(position, position + len(block.nodes))
        times, engines = costs.kernel_us[rows].tolist(), costs.engine[rows].tolist()
        for repetition in range(block.repeat):
            for node, us, engine in zip(block.repetition(repetition), times, engines, strict=True):
                kind = node.op.kind if node.op else node.source
                spans.append(Span(node.source, kind, node.path, node.phase, now, us, str(engine)))
                now += us
        position += len(block.nodes)
    return tuple(spans)
