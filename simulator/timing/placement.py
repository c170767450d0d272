"""When the chunks of a model run on the stages of a cluster: their phases timed, their tasks and sends placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op, make_op
from ..engines import Engine, ask
from ..graph import Graph
from ..passes.micro_batches import REFRESH, micro_batch_variant
from ..passes.pipeline import Chunk
from ..question.orders import FORWARD, WEIGHT, Orders
from ..question.plan import Plan
from .costs import Costs, cost_graphs, slow_compute
from .modifiers import Run, modify
from .phases import FIRST, LAST, MIDDLE, ONLY, ChunkTimes, PhaseTimes, Variant
from .schedule.pipeline import PipelineTimes, run_pipeline


class Sends(NamedTuple):
    """Microseconds of transfers between stages by [stage, chunk] of who sends, or by [stage, chunk, micro-batch]."""

    onward_us: np.ndarray
    back_us: np.ndarray

    def of(self, back: np.ndarray, stage: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Those of senders [n], where they are by [stage, chunk]."""
        return np.where(back, self.back_us[stage, chunk], self.onward_us[stage, chunk])

    def scaled(self, usual: Sends, now: Sends) -> Sends:
        """These, each as many times longer as ``now`` is than ``usual``, both by [stage, chunk]."""

        def one(base: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
            ratio = np.divide(after, before, out=np.ones_like(after), where=before > 0)
            return base * ratio.reshape(ratio.shape + (1,) * (base.ndim - 2))

        return Sends(one(self.onward_us, usual.onward_us, now.onward_us), one(self.back_us, usual.back_us, now.back_us))


def time_chunks(
    pipelines: Sequence[tuple[Chunk, ...]],
    regimes: Sequence[str],
    prompts: Sequence[bool],
    runs: Sequence[float],
    slowdowns: Sequence[Sequence[float]],
    plan: Plan,
    device: Device,
    engine: Engine,
) -> list[tuple[ChunkTimes, ...]]:
    """Times of every chunk of every pipeline; ops of all of them are asked together, and equal chunks share theirs.

    ``regimes`` are the kinds of step that they belong to, in the order in which they run: a prompt before what decodes
    behind it; ``prompts`` says which read prompts. ``runs`` says how many of those follow each other; ``slowdowns`` say
    how many times longer each chunk's compute takes. Steps with an optimizer have variants for the first, the middle
    and the last micro-batch (:mod:`..passes.micro_batches`), others need none. What changes the time of an op that is
    asked alone is in :mod:`.modifiers`.
    """
    graphs = {id(chunk.graph): chunk.graph for chunks in pipelines for chunk in chunks}
    variants = {which: _variants(graph, plan) for which, graph in graphs.items()}
    distinct = {id(graph): graph for by_variant in variants.values() for graph in by_variant.values()}
    scales = {
        id(graph): plan.scales(device.id, regime)
        for chunks, regime in zip(pipelines, regimes, strict=True)
        for chunk in chunks
        for graph in variants[id(chunk.graph)].values()
    }

    prompt_graphs = {
        id(graph)
        for chunks, prompt in zip(pipelines, prompts, strict=True)
        for chunk in chunks
        for graph in variants[id(chunk.graph)].values()
        if prompt
    }

    def busy_us(now: Sequence[Costs]) -> list[float]:
        by_graph = dict(zip(distinct, now, strict=True))
        usual = {which: by_graph[id(next(iter(by_variant.values())))] for which, by_variant in variants.items()}
        busy_of: dict[int, float] = {}
        for chunks, regime in zip(pipelines, regimes, strict=True):
            last = len(regimes) - list(reversed(regimes)).index(regime)  # a kind's steps wait for none of a later kind
            until_us = plan.micro_batches * _busiest_us(pipelines[:last], runs[:last], usual)
            busy_of |= {id(graph): until_us for chunk in chunks for graph in variants[id(chunk.graph)].values()}
        return [busy_of[which] for which in distinct]

    stack, without = plan.stack, plan.settings.without
    graph_costs = cost_graphs(list(distinct.values()), device, engine, stack.issue_us, stack.eager, without)
    run = Run(plan, device, busy_us, [scales[key] for key in distinct], [key in prompt_graphs for key in distinct])
    costs = dict(zip(distinct, modify(graph_costs, run), strict=True))
    times_of: dict[tuple[int, float], ChunkTimes] = {}
    for chunks, factors in zip(pipelines, slowdowns, strict=True):
        for chunk, factor in zip(chunks, factors, strict=True):
            key = id(chunk.graph), factor
            if key not in times_of:
                slowed = {id(graph): slow_compute(costs[id(graph)], factor) for graph in variants[key[0]].values()}
                times_of[key] = time_chunk(
                    {v: slowed[id(graph)] for v, graph in variants[key[0]].items()}, plan, device
                )
    return [
        tuple(times_of[id(chunk.graph), factor] for chunk, factor in zip(chunks, factors, strict=True))
        for chunks, factors in zip(pipelines, slowdowns, strict=True)
    ]


def _busiest_us(pipelines: Sequence[tuple[Chunk, ...]], runs: Sequence[float], costs: Mapping[int, Costs]) -> float:
    """Microseconds of kernels that a micro-batch of all runs brings the stage with most of them."""
    busy: dict[int, float] = {}
    for chunks, times in zip(pipelines, runs, strict=True):
        for chunk in chunks:
            chunk_costs = costs[id(chunk.graph)]
            busy[chunk.stage] = busy.get(chunk.stage, 0.0) + times * float(chunk_costs.kernel_us @ chunk_costs.repeats)
    return max(busy.values(), default=0.0)


def _variants(graph: Graph, plan: Plan) -> dict[Variant, Graph]:
    """The graphs of the first, the middle and the last micro-batch; of steps without an optimizer, and of one, its own.

    Forward passes of the first and the middle one differ where weights are gathered for the first alone, and only
    forward passes of the first count (:meth:`..step.state.Step.executions`).
    """
    nodes = [node for block in graph.blocks for node in block.nodes]
    if plan.micro_batches == 1 or all(node.phase == "forward" for node in nodes):
        return {ONLY: graph}
    middle = micro_batch_variant(graph, *MIDDLE)
    gathers = any(node.source.startswith(REFRESH) for node in nodes)
    first = micro_batch_variant(graph, *FIRST) if gathers else middle
    return {FIRST: first, MIDDLE: middle, LAST: micro_batch_variant(graph, *LAST)}


def time_chunk(costs: Mapping[Variant, Costs], plan: Plan, device: Device) -> ChunkTimes:
    """The chunk whose variants cost so much; those that share their costs are placed once."""
    phases = {id(phase_costs): phase_costs for phase_costs in costs.values()}
    placed = {which: PhaseTimes(phase_costs, plan, device) for which, phase_costs in phases.items()}
    return ChunkTimes(dict(costs), {variant: placed[id(phase_costs)] for variant, phase_costs in costs.items()})


def retime(times: ChunkTimes, costs: Mapping[Variant, Costs], plan: Plan, device: Device) -> ChunkTimes:
    """The chunk with other costs; phases of those that are the very same are kept."""
    pairs = [(times.costs[variant], times.phases[variant], costs[variant]) for variant in costs]
    phases = {id(new): usual for old, usual, new in pairs if new is old}
    phases |= {id(new): PhaseTimes(new, plan, device) for new in {id(n): n for o, _, n in pairs if n is not o}.values()}
    return ChunkTimes(dict(costs), {variant: phases[id(new)] for variant, new in costs.items()})


def place_tasks(orders: Orders, times: Sequence[ChunkTimes], plan: Plan, sends: Sends) -> PipelineTimes:
    """The pipeline's tasks placed in time. Part *c* of the model stands where the schedule's routes put it."""
    names = ("forward", "backward", "weight", "first", "last", "paired")
    table = {name: np.zeros((orders.stages, orders.chunks)) for name in names}
    together, put_off = orders.paired.any(), (orders.kind == WEIGHT).any()
    for route in orders.routes.tolist():
        for chunk_time, (stage, position) in zip(times, route, strict=True):
            first, usual, last = (
                chunk_time.phases[ONLY if ONLY in chunk_time.phases else v] for v in (FIRST, MIDDLE, LAST)
            )
            at = stage, position
            table["forward"][at] = usual["forward"].total_us
            table["backward"][at] = usual["backward"].total_us
            table["weight"][at] = usual["weight"].total_us if put_off else 0.0
            table["first"][at] = first["forward"].total_us
            table["last"][at] = last["backward"].total_us
            table["paired"][at] = usual["paired"].total_us if together else 0.0
    return run_pipeline(
        orders,
        table["forward"],
        table["backward"],
        table["weight"],
        send_us=sends.onward_us,
        return_us=sends.back_us,
        paired_us=table["paired"],
        first_forward_us=table["first"],
        last_backward_us=table["last"],
        blocking="pp" not in plan.stack.overlap and bool((orders.kind != FORWARD).any()),
        behind="dp" in plan.stack.overlap,
    )


def send_times(orders: Orders, chunks: tuple[Chunk, ...], plan: Plan, engine: Engine) -> Sends:
    """How long what each chunk makes takes to the next one's stage, and what its backward makes to the one before."""
    sends = Sends(np.zeros((orders.stages, orders.chunks)), np.zeros((orders.stages, orders.chunks)))
    ops = send_ops(chunks, plan)
    if not ops:
        return sends
    latency_us = ask(engine, ops).latency_us + plan.stack.send_us
    onward = np.where([chunk.send_bytes > 0 for chunk in chunks], latency_us, 0.0)
    for route in orders.routes:
        sends.onward_us[route[:, 0], route[:, 1]] = onward
        sends.back_us[route[:, 0], route[:, 1]] = np.roll(onward, 1)
    return sends


def by_micro_batch(sends: Sends, count: int) -> Sends:
    """The same sends by [stage, chunk, micro-batch]."""
    return Sends(*(np.repeat(times[:, :, None], count, axis=2) for times in sends))


def send_ops(chunks: tuple[Chunk, ...], plan: Plan) -> list[Op]:
    """The transfer of each chunk's result to the stage of the next; none where there is but one chunk."""
    if len(chunks) == 1:
        return []
    ops = []
    for chunk, after in zip(chunks, (*chunks[1:], chunks[0]), strict=True):
        near = plan.neighbours(chunk.stage, after.stage)
        link = plan.cluster.link if near else plan.cluster.fabric
        size = round(chunk.send_bytes)
        ops.append(make_op("send_recv", size_bytes=size, ranks=2, ranks_per_node=2 if near else 1, link=link))
    return ops
