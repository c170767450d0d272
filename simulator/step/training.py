"""One training step on a cluster: trace, passes, chunks, costs, streams, pipeline, report.

Ranks that do the same work are simulated once: one data rank and one tensor rank stand for all, and of pipeline
chunks each distinct one is timed. The step is the pipeline's makespan plus the slowest stage's optimizer.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...datasets.devices import Device, DeviceError
from ..contention.fixed_point import share_links
from ..engines import Engine
from ..engines.flow import flow_engine
from ..graph import Graph
from ..memory.stage import ChunkWalk, stage_memory
from ..passes.order import apply_passes
from ..passes.pipeline import Chunk, split_pipeline
from ..question.plan import Plan, PlanError, check_plan
from ..question.stragglers import slow_chunks
from ..question.work import Work
from ..report.answer import GIB, Memory, StepReport
from ..report.training import ClusterStep, training_report
from ..timing.placement import place_tasks, send_times, time_chunks
from ..timing.schedule.orders import Orders, make_orders, parts_of
from ..timing.schedule.pipeline import in_flight
from ..trace import Model, Workload, trace


def simulate_training(
    model: Model,
    work: Work,
    plan: Plan,
    device: Device,
    engine: Engine,
    cache_dir: Path | None = None,
) -> StepReport:
    """The report of one training step of a model under a plan.

    Raises PlanError, DeviceError (a dtype the device lacks) and the errors of :func:`..trace.trace`.
    """
    started = time.perf_counter()
    for dtype in (plan.precision, plan.quantization):
        if dtype and not device.supports(dtype):
            raise DeviceError(f"{device.name} has no {dtype} matrix units; it has {', '.join(device.tensor_tflops)}")
    plan = plan_batches(check_plan(plan), work)
    p = plan.parallel
    orders = make_orders(p.schedule, p.pp, plan.micro_batches, p.vpp)
    graph = traced(model, work, plan, cache_dir)
    chunks, slow = slow_chunks(split_pipeline(apply_passes(graph, plan), plan), plan, orders)
    times = time_chunks(chunks, plan, device, engine, slow)
    sends = send_times(orders, chunks, plan, engine)
    pipeline = place_tasks(orders, chunks, times, plan, sends)
    walks: dict[int, ChunkWalk] = {}
    memories = stage_memories(orders, chunks, plan, device, walks)
    saved_gib = {which: walk.saved / GIB for which, walk in walks.items()}
    step = ClusterStep(graph, plan, device, work, chunks, times, orders, pipeline, memories, saved_gib, sends)
    if plan.cluster.devices > 1 and (flows := flow_engine(engine)) is not None:
        step = share_links(step, flows)
    return training_report(step, time.perf_counter() - started)


def stage_memories(
    orders: Orders, chunks: tuple[Chunk, ...], plan: Plan, device: Device, walks: dict[int, ChunkWalk]
) -> list[Memory]:
    """Peak memory of every stage; stages with the same chunks and as many micro-batches in flight are one.

    ``walks`` is filled with what was found about each distinct chunk graph.
    """
    flying = in_flight(orders).tolist()
    made: dict[Any, Memory] = {}
    found = []
    for stage, counts in enumerate(flying):
        graphs = [chunks[part].graph for part in parts_of(orders, stage)]
        key = tuple(map(id, graphs)), tuple(counts)
        if key not in made:
            made[key] = stage_memory(graphs, counts, plan, device, walks)
        found.append(made[key])
    return found


def plan_batches(plan: Plan, work: Work) -> Plan:
    """The plan with its number of micro-batches and its experts' load; PlanError when the batch does not divide."""
    together = work.micro_batch * plan.dp
    if work.global_batch % together:
        nearest = max(round(work.global_batch / together), 1) * together
        raise PlanError(
            f"workload.global_batch={work.global_batch} is no multiple of micro_batch x dp = {work.micro_batch} x "
            f"{plan.dp}; take workload.global_batch={nearest}"
        )
    options = {"expert_load": work.expert_load, **plan.options}
    return replace(plan, micro_batches=work.global_batch // together, options=options)


def traced(model: Model, work: Work, plan: Plan, cache_dir: Path | None) -> Graph:
    """The graph of one micro-batch on one device, before any pass."""
    workload = Workload(
        kind="train",
        batch=work.micro_batch,
        seq_len=work.seq_len,
        attention="fused",
        expert_load=work.expert_load,
    )
    return trace(model, workload, plan.precision, cache_dir)
