"""Prefill, decode or a whole generation on a cluster: trace, passes, stages, costs, report.

A request's step runs through the pipeline's stages in turn; ``plan.micro_batches`` parts of a batch follow each other
through them. Data ranks serve batches of their own (``work.batch`` sequences each); where experts are shared out over
them they meet in the exchanges of expert parallelism. A generation is one prefill and ``output_len - 1`` decode steps
whose context grows by one each: their mean is taken by Simpson's rule over first, middle and last context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...datasets.devices import Device, DeviceError
from ..contention.inference import share_stages
from ..engines import Engine, FusedEngine, ask
from ..engines.flow import FlowEngine, flow_engine
from ..engines.learned import LearnedEngine
from ..graph import Graph
from ..passes.order import INFERENCE, apply_passes
from ..passes.pipeline import Chunk, split_pipeline
from ..question.plan import Plan, PlanError, Stack, check_plan
from ..question.work import Work, WorkloadError
from ..report.answer import InferenceReport
from ..report.inference import Step, inference_report
from ..timing.costs import Costs, cost_graphs
from ..timing.phases import PhaseTime, phase_time, place_phase
from ..timing.placement import send_ops
from ..trace import Model, Workload
from ..trace.redimension import step_graph


def simulate_inference(
    model: Model,
    work: Work,
    plan: Plan,
    device: Device,
    engine: Engine,
    cache_dir: Path | None = None,
) -> InferenceReport:
    """The report of a prefill, a decode step or a generation of a model under a plan.

    ``work.batch`` counts the sequences of one data rank. Raises PlanError for degrees that do not go together,
    WorkloadError for work that is no inference, DeviceError for a dtype the device lacks, and the errors of
    :func:`..trace.trace`.
    """
    started = time.perf_counter()
    if work.kind == "train":
        raise WorkloadError("workload=train is no inference; choose prefill, decode or generate")
    for dtype in (plan.precision, plan.quantization):
        if dtype and not device.supports(dtype):
            raise DeviceError(f"{device.name} has no {dtype} matrix units; it has {', '.join(device.tensor_tflops)}")
    plan = checked(plan, work)
    steps = time_steps(model, work, plan, device, engine_of(plan.stack, engine), cache_dir)
    return inference_report(steps, work, plan, device, started)


def checked(plan: Plan, work: Work) -> Plan:
    """The plan with the cache format that its engine takes; PlanError where it cannot serve."""
    check_plan(plan)
    kept = plan.stack.kv_dtype.get(plan.quantization)
    if kept and "kv_dtype" not in plan.options:
        plan = replace(plan, options={**plan.options, "kv_dtype": kept})
    if plan.parallel.vpp > 1:
        raise PlanError("inference has no virtual stages; take parallel.vpp=1")
    if work.batch % plan.micro_batches:
        nearest = next(m for m in range(plan.micro_batches, 0, -1) if work.batch % m == 0)
        raise PlanError(
            f"workload.batch={work.batch} does not divide into {plan.micro_batches} micro-batches; take {nearest}"
        )
    return plan


def parts(work: Work) -> Iterator[tuple[str, int, float]]:
    """(kind, context, how often) of the steps that stand for a workload; a mean over contexts may give a fraction."""
    if work.kind != "decode":
        yield "prefill", work.input_len, 1.0
    if work.kind == "decode":
        yield "decode", work.input_len, 1.0
    steps = work.output_len - 1 if work.kind == "generate" else 0
    if steps > 0:
        first, last = work.input_len, work.input_len + steps - 1
        weights = {first: 1.0} if first == last else {first: 1 / 6, (first + last) // 2: 4 / 6}
        weights[last] = weights.get(last, 0.0) + (1 / 6 if first != last else 0.0)
        for context, weight in weights.items():
            yield "decode", context, steps * weight


def time_steps(
    model: Model, work: Work, plan: Plan, device: Device, engine: Engine, cache_dir: Path | None
) -> list[Step]:
    """Every kind of step of the workload, timed; ops of all of them are asked together."""
    planned = list(parts(work))
    graphs = [traced(model, work, plan, kind, context, device, cache_dir) for kind, context, _ in planned]
    split = [split_pipeline(apply_passes(graph, plan, INFERENCE), plan) for graph in graphs]
    distinct = {id(chunk.graph): chunk.graph for chunks in split for chunk in chunks}
    scale = plan.scale(device.id)
    costs = dict(zip(distinct, cost_graphs(list(distinct.values()), device, engine, scale), strict=True))
    flows = flow_engine(engine) if plan.cluster.devices > 1 else None
    made = []
    for (kind, _, times), graph, chunks in zip(planned, graphs, split, strict=True):
        own = tuple(costs[id(chunk.graph)] for chunk in chunks)
        send = sends(chunks, plan, engine)
        step = timed(Step(kind, times, graph, chunks, own, (), send, 0.0), own, send, plan, device)
        made.append(step if flows is None else share_stages(step, plan, device, flows, timed))
    return made


def timed(step: Step, costs: Sequence[Costs], sends_us: np.ndarray, plan: Plan, device: Device) -> Step:
    """The step with the times of its stages when they have these costs, and sends take so long [stages]."""
    stages = tuple(time_stage(each, plan, device) for each in costs)
    total = flow([stage.total_us for stage in stages], sends_us.tolist(), plan.micro_batches, step.kind)
    total += plan.stack.step_overhead_us
    return replace(step, costs=tuple(costs), stages=stages, sends_us=sends_us, total_us=total)


def time_stage(costs: Costs, plan: Plan, device: Device) -> PhaseTime:
    """One stage's kernels placed on its streams, with what passes between them where they are launched one by one."""
    placed = phase_time(place_phase(costs, "forward", plan, device))
    gaps = plan.stack.gap_us * int(costs.repeats.sum())
    return replace(placed, total_us=placed.total_us + gaps, host_us=placed.host_us + gaps)


def engine_of(stack: Stack, engine: Engine) -> Engine:
    """The engine with the stack's own predictors in the place of whoever's, unless a backend was asked for."""
    if not isinstance(engine, FusedEngine) or not (stack.backend or stack.collectives):
        return engine
    engines: list[Engine] = []
    for each in engine.engines:
        if isinstance(each, LearnedEngine) and each.backend is None:
            names = [name for name in (stack.collectives, stack.backend) if name]
            engines += [replace(each, backend=name) for name in names]
        if isinstance(each, FlowEngine):
            each = replace(each, beneath=engine_of(stack, each.beneath))
        engines.append(each)
    return FusedEngine(engines)


def traced(
    model: Model, work: Work, plan: Plan, kind: str, context: int, device: Device, cache_dir: Path | None
) -> Graph:
    """The graph of one step of one micro-batch on one device, before any pass.

    Engines keep a preallocated cache; plain PyTorch keeps the cache that the workload names.
    """
    served = "paged_attention" in plan.stack.fusion
    workload = Workload(
        kind=kind,
        batch=work.batch // plan.micro_batches,
        seq_len=context,
        cache="static" if served else work.cache,
        optimizer="none",
        attention="sdpa" if device.synchronous else "fused",
        expert_load=work.expert_load,
        logits="all" if plan.stack.all_logits else "last",
    )
    return step_graph(model, workload, plan.precision, cache_dir)


def sends(chunks: tuple[Chunk, ...], plan: Plan, engine: Engine) -> np.ndarray:
    """Microseconds that the result of each stage takes to the stage after it [stages]."""
    ops = send_ops(chunks, plan)
    sent = np.array([chunk.send_bytes > 0 for chunk in chunks])
    return np.where(sent, ask(engine, ops).latency_us, 0.0) if ops else np.zeros(len(chunks))


def flow(stages_us: Sequence[float], sends_us: Sequence[float], micro_batches: int, kind: str) -> float:
    """Time of one step of all micro-batches through the stages and the sends between them.

    The last one leaves a prefill when the slowest stage, or send, has had all of them. Decode steps follow each other:
    a micro-batch begins its next token when it has left the last stage, so that a step takes its own way through all
    stages or, with more micro-batches than that, the slowest stage's time for each.
    """
    slowest, way = max(*stages_us, *sends_us), sum(stages_us) + sum(sends_us)
    if kind == "decode":
        return max(way, micro_batches * slowest)
    return way + (micro_batches - 1) * slowest
