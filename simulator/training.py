"""One training step on a cluster: trace, passes, chunks, costs, streams, pipeline, report.

Ranks that do the same work are simulated once: one data rank and one tensor rank stand for all, and of pipeline
chunks each distinct one is timed. The step is the pipeline's makespan plus the slowest stage's optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.devices import Device, DeviceError
from ..datasets.ops import make_op
from .cluster_report import ClusterStep, training_report
from .costs import cost_graphs, slowed
from .engines import Engine, ask
from .graph import Graph
from .memory import ChunkWalk, stage_memory
from .passes.data import micro_batch_variant
from .passes.order import apply_passes
from .passes.pipeline import Chunk, split_pipeline
from .plan import Plan, PlanError, check_plan
from .programs import FIRST, LAST, MIDDLE, ONLY, ChunkTimes, time_phases
from .report import GIB, Memory, StepReport
from .schedule.orders import Orders, make_orders, parts_of
from .schedule.pipeline import PipelineTimes, in_flight, run_pipeline
from .stragglers import slow_chunks
from .trace import Model, Workload, trace
from .work import Work

NONE_SLOW: Mapping[int, float] = {}


def simulate_training(
    model: Model,
    work: Work,
    plan: Plan,
    device: Device,
    engine: Engine,
    cache_dir: Path | None = None,
) -> StepReport:
    """The report of one training step of a model under a plan.

    Raises PlanError, DeviceError (a dtype the device lacks) and the errors of :func:`.trace.trace`.
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
    pipeline = run(orders, chunks, times, plan, engine)
    walks: dict[int, ChunkWalk] = {}
    memories = stage_memories(orders, chunks, plan, device, walks)
    saved_gib = {which: walk.saved / GIB for which, walk in walks.items()}
    step = ClusterStep(graph, plan, device, work, chunks, times, orders, pipeline, memories, saved_gib)
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


def time_chunks(
    chunks: tuple[Chunk, ...], plan: Plan, device: Device, engine: Engine, slow: Mapping[int, float] = NONE_SLOW
) -> dict[int, ChunkTimes]:
    """Times of every distinct chunk graph, by its identity; compute of ``slow`` ones takes so many times longer."""
    wanted = (ONLY,) if plan.micro_batches == 1 else (FIRST, MIDDLE, LAST)
    distinct = {id(chunk.graph): chunk.graph for chunk in chunks}
    keys = list(product(distinct, wanted))
    graphs = [micro_batch_variant(distinct[which], first, last) for which, (first, last) in keys]
    slowdown = {id(graph): slow[which] for (which, _), graph in zip(keys, graphs, strict=True) if which in slow}
    shared = {id(graph): graph for graph in graphs}
    stack = plan.stack
    found = cost_graphs(list(shared.values()), device, engine, plan.scale(device.id), stack.issue_us)
    costs = {which: slowed(each, slowdown.get(which, 1.0)) for which, each in zip(shared, found, strict=True)}
    phases = {which: time_phases(each, plan, device) for which, each in costs.items()}
    made: dict[int, ChunkTimes] = {which: ChunkTimes({}, {}) for which in distinct}
    for (which, variant), graph in zip(keys, graphs, strict=True):
        made[which].costs[variant] = costs[id(graph)]
        made[which].phases[variant] = phases[id(graph)]
    return made


def run(
    orders: Orders, chunks: tuple[Chunk, ...], times: dict[int, ChunkTimes], plan: Plan, engine: Engine
) -> PipelineTimes:
    """The pipeline's tasks placed in time. Chunk *c* stands where the schedule's routes put part *c* of the model."""
    names = ("forward", "backward", "weight", "first", "last", "send", "paired")
    table = {name: np.zeros((orders.stages, orders.chunks)) for name in names}
    sends = send_times(chunks, plan, engine)
    single = plan.micro_batches == 1
    for route in orders.routes.tolist():
        for chunk, send, (stage, position) in zip(chunks, sends, route, strict=True):
            phases = times[id(chunk.graph)].phases
            usual = phases[ONLY if single else MIDDLE]
            at = stage, position
            table["forward"][at] = usual["forward"].total_us
            table["backward"][at] = usual["backward"].total_us
            table["weight"][at] = usual["weight"].total_us
            table["first"][at] = phases[ONLY if single else FIRST]["forward"].total_us
            table["last"][at] = phases[ONLY if single else LAST]["backward"].total_us
            table["paired"][at] = usual["paired"].total_us
            table["send"][at] = send
    returned = np.roll(sends, 1)
    back = np.zeros_like(table["send"])
    for route in orders.routes.tolist():
        for send, (stage, position) in zip(returned.tolist(), route, strict=True):
            back[stage, position] = send
    return run_pipeline(
        orders,
        table["forward"],
        table["backward"],
        table["weight"],
        send_us=table["send"],
        return_us=back,
        paired_us=table["paired"],
        first_forward_us=table["first"],
        last_backward_us=table["last"],
        blocking="pp" not in plan.stack.overlap,
        behind="dp" in plan.stack.overlap,
    )


def send_times(chunks: tuple[Chunk, ...], plan: Plan, engine: Engine) -> np.ndarray:
    """Microseconds that each chunk's result takes to the next chunk; zero after the last."""
    if len(chunks) == 1:
        return np.zeros(1)
    group = plan.group("pp")
    ops = [
        make_op(
            "send_recv",
            size_bytes=round(chunk.send_bytes),
            ranks=2,
            ranks_per_node=min(group.ranks_per_node, 2),
            link=group.link,
        )
        for chunk in chunks
    ]
    sent = np.array([chunk.send_bytes > 0 for chunk in chunks])
    return np.where(sent, ask(engine, ops).latency_us, 0.0)
