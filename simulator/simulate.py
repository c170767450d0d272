"""Simulate a workload on one device: trace, time, add up, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..datasets.clusters import Cluster
from ..datasets.devices import Device, DeviceError
from ..datasets.ops import KINDS, Op
from .engines import Engine
from .graph import Graph
from .memory.stage import peak_memory
from .question.plan import STACK_DIRECTORY, Parallel, Plan, PlanError, Stack, load_stack
from .question.work import COVERAGE, Work, tokens_of
from .report import distribution, trust
from .report.answer import Breakdown, InferenceReport, Memory, OpShare, Span, StepReport
from .timing.latencies import Timed, time_graph
from .trace import Model, Workload, trace


@dataclass(frozen=True)
class Part:
    """A timed graph and how many times it runs in the workload (a mean over contexts may give a fraction)."""

    graph: Graph
    timed: Timed
    times: float


def simulate(
    model: Model,
    work: Work,
    device: Device,
    engine: Engine,
    precision: str = "bf16",
    cache_dir: Path | None = None,
    plan: Plan | None = None,
) -> StepReport | InferenceReport:
    """The report of ``work`` for a model on one device, or on the cluster of a ``plan``.

    ``model``: a name in ``conf/model``, a folder or config.json, a hub id, or a factory of an ``nn.Module``.
    Raises WorkloadError, PlanError, DeviceError (a dtype the device lacks) and the errors of :func:`.trace.trace`.
    """
    if plan is None and work.kind != "train" and not device.synchronous and stored_format(model):
        plan = alone(device, precision)
    if plan is not None:
        return simulate_plan(model, work, plan, device, engine, cache_dir)
    started = time.perf_counter()
    if not device.supports(precision):
        raise DeviceError(f"{device.name} has no {precision} matrix units; it has {', '.join(device.tensor_tflops)}")
    parts = plan_parts(model, work, device, engine, precision, cache_dir)
    common = common_fields(parts, work, device, precision)
    seconds = sum(part.timed.total_us * part.times for part in parts) * 1e-6
    low = sum(part.timed.low_us * part.times for part in parts) * 1e-6
    high = sum(part.timed.high_us * part.times for part in parts) * 1e-6
    model_flops = sum(part.graph.model_flops * part.times for part in parts)
    rates = rate_fields(parts, model_flops, seconds, device.tensor_rate(precision), tokens_of(work))
    if work.kind == "train":
        return StepReport(
            step_time_s=seconds,
            low_s=low,
            high_s=high,
            quantiles=distribution.quantiles(seconds, low, high, COVERAGE),
            wall_time_s=time.perf_counter() - started,
            **rates,
            **common,
        )
    prefill = parts[0].timed.total_us * 1e-3 if work.kind in ("prefill", "generate") else None
    steps = sum(part.times for part in parts if part.graph is not parts[0].graph or work.kind == "decode")
    decode = (seconds * 1e3 - (prefill or 0.0)) / steps if steps else None
    return InferenceReport(
        ttft_ms=prefill,
        tpot_ms=decode,
        e2e_ms=seconds * 1e3,
        low_ms=low * 1e3,
        high_ms=high * 1e3,
        quantiles=distribution.quantiles(seconds * 1e3, low * 1e3, high * 1e3, COVERAGE),
        wall_time_s=time.perf_counter() - started,
        **rates,
        **common,
    )


def stored_format(model: Model) -> str:
    """The format that a model's checkpoint stores its weights in; empty where they are as they compute."""
    from .trace.checkpoints import weight_format
    from .trace.models import resolve

    source = resolve(model)
    return weight_format(source.quantization, source.name)


def alone(device: Device, precision: str) -> Plan:
    """The plan of a single device, with PyTorch's own kernels."""
    single = Cluster(device.id, device.name, device.id, devices_per_node=1, nics_per_node=1, link="pcie")
    return Plan(Parallel(), single, load_stack("torch"), precision=precision)


def simulate_plan(
    model: Model, work: Work, plan: Plan, device: Device, engine: Engine, cache_dir: Path | None
) -> StepReport | InferenceReport:
    """The report of ``work`` on a cluster. PlanError for what only training, or only inference, can do."""
    p, train = plan.parallel, work.kind == "train"
    amiss = [f"offload={each}" for each in plan.offload if (each == "kv") == train]
    amiss += [] if train or not p.zero_stage else [f"parallel.zero_stage={p.zero_stage}"]
    amiss += [] if train or p.schedule == Parallel.schedule else [f"parallel.schedule={p.schedule}"]
    if amiss:
        raise PlanError(
            f"{', '.join(amiss)} is for {'inference' if train else 'training'}: leave it out of workload={work.kind}"
        )
    if not train and not plan.quantization:
        plan = replace(plan, quantization=stored_format(model))
    if train:
        check_trains(plan.stack)
        from .step.training import simulate_training

        return simulate_training(model, work, plan, device, engine, cache_dir)
    from .step.inference import simulate_inference

    return simulate_inference(model, work, plan, device, engine, cache_dir)


def check_trains(stack: Stack) -> None:
    """PlanError for a framework that serves: its kernels have no backward pass."""
    from .passes.serving import OTHERS, STEPS

    if not {*STEPS, *OTHERS}.isdisjoint(stack.fusion):
        known = {path.stem: load_stack(path.stem) for path in sorted(STACK_DIRECTORY.glob("*.yaml"))}
        train = [name for name, each in known.items() if {*STEPS, *OTHERS}.isdisjoint(each.fusion)]
        raise PlanError(
            f"stack={stack.id} serves, it does not train: take one of {', '.join(train)}, or workload=prefill, decode "
            "or generate"
        )


def plan_parts(
    model: Model,
    work: Work,
    device: Device,
    engine: Engine,
    precision: str,
    cache_dir: Path | None,
) -> list[Part]:
    """The graphs a workload runs and how often.

    A generation is one prefill and ``output_len - 1`` decode steps whose context grows by one each: their mean is
    taken by Simpson's rule over first, middle and last context.
    """
    attention = "sdpa" if device.synchronous else "fused"

    def part(kind: str, batch: int, length: int, times: float, first: bool = True) -> Part:
        workload = Workload(
            kind=kind,
            batch=batch,
            seq_len=length,
            cache=work.cache,
            optimizer="adamw" if first else "none",
            accumulate=not first,
            attention=attention,
            expert_load=work.expert_load,
        )
        graph = trace(model, workload, precision, cache_dir)
        return Part(graph, time_graph(graph, device, engine), times)

    if work.kind == "train":
        micro_batches = work.global_batch // work.micro_batch
        parts = [part("train", work.micro_batch, work.seq_len, 1.0)]
        if micro_batches > 1:
            parts.append(part("train", work.micro_batch, work.seq_len, micro_batches - 1.0, first=False))
        return parts
    if work.kind == "prefill":
        return [part("prefill", work.batch, work.input_len, 1.0)]
    if work.kind == "decode":
        return [part("decode", work.batch, work.input_len, 1.0)]
    parts = [part("prefill", work.batch, work.input_len, 1.0)]
    steps = work.output_len - 1
    if steps > 0:
        first, last = work.input_len, work.input_len + steps - 1
        for context, weight in ((first, 1), ((first + last) // 2, 4), (last, 1)):
            parts.append(part("decode", work.batch, context, steps * weight / 6))
    return parts


def rate_fields(
    parts: Sequence[Part], model_flops: float, seconds: float, peak_tflops: float, tokens: int
) -> dict[str, Any]:
    """Throughput and utilisation. HFU divides what the device executes, MFU what the model defines."""
    executed = sum(
        part.times * repeat * float(node.op.cost.flops)
        for part in parts
        for node, repeat in part.graph.weighted()
        if node.op is not None and node.op.cost.unit == "tensor"
    )
    return {
        "tokens_per_s_per_gpu": tokens / seconds,
        "tflops_per_gpu": model_flops / seconds / 1e12,
        "mfu": model_flops / seconds / 1e12 / peak_tflops,
        "hfu": executed / seconds / 1e12 / peak_tflops,
    }


def common_fields(parts: Sequence[Part], work: Work, device: Device, precision: str) -> dict[str, Any]:
    """The fields that training and inference reports share."""
    memory = max((peak_memory(part.graph) for part in parts), key=lambda m: m.peak_gib)
    unmapped = Counter(
        node.source for part in parts for node, repeat in part.graph.weighted() for _ in range(repeat) if not node.op
    )
    timed = [each for part in parts for each in part_times(part)]
    return {
        "model": parts[0].graph.name,
        "device": device.id,
        "precision": precision,
        "workload": work.kind,
        "coverage": COVERAGE,
        "memory": memory,
        "fits": fits(memory, device),
        "breakdown": breakdown(parts),
        "provenance": provenance(parts),
        "unmapped": tuple(f"{name} x{count}" for name, count in unmapped.most_common()),
        "notes": tuple(dict.fromkeys(note for part in parts for note in part.graph.notes)),
        "trust": trust.shares((engine, inside, us) for _, engine, inside, us in timed),
        "measure_next": trust.missing(timed),
        "p_oom": trust.probability_oom(memory.peak_gib, device.memory_gib),
        "timeline": timeline(parts[0].timed),
    }


def part_times(part: Part) -> Iterator[tuple[Op | None, str, bool, float]]:
    """(op, engine, inside its envelope, microseconds) of every node of a part."""
    timed = part.timed
    inside = timed.in_envelope.tolist()
    for node, engine, within, us in zip(timed.nodes, timed.engine, inside, timed.kernel_us.tolist(), strict=True):
        yield node.op, str(engine), bool(within), us * part.times


def fits(memory: Memory, device: Device) -> bool:
    """Whether the peak stays below the device's memory."""
    return memory.peak_gib <= device.memory_gib


def breakdown(parts: Sequence[Part]) -> Breakdown:
    """Time by op kind and by phase; what no kernel covers is host time."""
    by_kind: dict[str, tuple[float, float, set[str]]] = {}
    by_phase: dict[str, float] = {}
    for part in parts:
        for node, us, engine in zip(part.timed.nodes, part.timed.kernel_us.tolist(), part.timed.engine, strict=True):
            name = node.op.kind if node.op else node.source
            count, total, engines = by_kind.get(name, (0.0, 0.0, set()))
            by_kind[name] = (count + part.times, total + us * part.times * 1e-6, engines | {str(engine)})
            by_phase[node.phase] = by_phase.get(node.phase, 0.0) + us * part.times * 1e-6
    step = sum(part.timed.total_us * part.times for part in parts) * 1e-6
    kernels = sum(total for _, total, _ in by_kind.values())
    shares = sorted(
        (
            OpShare(kind, round(count), total, total / step, tuple(sorted(names)))
            for kind, (count, total, names) in by_kind.items()
        ),
        key=lambda share: -share.time_s,
    )
    communication = sum(s.time_s for s in shares if s.kind in KINDS and KINDS[s.kind].collective)
    optimizer = by_phase.get("optimizer", 0.0)
    return Breakdown(
        compute_s=kernels - optimizer - communication,
        exposed_comm_s=communication,
        bubble_s=0.0,
        optimizer_s=optimizer,
        host_s=max(step - kernels, 0.0),
        by_op=tuple(shares),
        by_phase=by_phase,
    )


def provenance(parts: Sequence[Part]) -> dict[str, float]:
    """Share of the step's time by who answered; ``host`` is what no kernel covers."""
    total = sum(part.timed.total_us * part.times for part in parts)
    shares: dict[str, float] = {}
    for part in parts:
        for us, engine in zip(part.timed.kernel_us.tolist(), part.timed.engine, strict=True):
            shares[str(engine)] = shares.get(str(engine), 0.0) + us * part.times / total
    shares["host"] = max(1.0 - sum(shares.values()), 0.0)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def timeline(timed: Timed) -> tuple[Span, ...]:
    """The nodes of one step as spans."""
    return tuple(
        Span(
            name=node.source,
            kind=node.op.kind if node.op else node.source,
            path=node.path,
            phase=node.phase,
            start_us=start,
            duration_us=duration,
            engine=str(engine),
        )
        for node, start, duration, engine in zip(
            timed.nodes, timed.start_us.tolist(), timed.kernel_us.tolist(), timed.engine, strict=True
        )
    )
