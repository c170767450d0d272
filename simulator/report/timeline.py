"""A step as a timeline: its nodes in time, and its tracks for other tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ..formats.tracks import RankTrack, TrackFlow, TrackSpan
from ..graph import Node
from ..question.orders import FORWARD, WEIGHT
from ..step.state import State, Step
from ..timing.costs import Costs
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, PHASES, place_phase, select_nodes
from .step import Span
from .tracks import memory_over_time, pipeline_tracks


def timeline(state: State) -> tuple[Span, ...]:
    """The nodes of the first stage in time, one step of each phase after the other; without a pipeline's waiting."""
    step = state.steps[0]
    times = step.times_of[0]
    spans: list[Span] = []
    now = 0.0
    for phase in PHASES:
        costs = times.costs[ONLY if ONLY in times.costs else FIRST if phase == "forward" else LAST]
        for node, index, start, end in node_executions(costs, phase, step):
            kind = node.op.kind if node.op else node.source
            engine = str(costs.engine[index])
            spans.append(Span(node.source, kind, node.path, node.phase, now + start, end - start, engine))
        now = max((span.start_us + span.duration_us for span in spans), default=now)
    return tuple(spans)


def program_order(state: State) -> Iterator[tuple[Node, Costs, int]]:
    """Every executed node of the first stage in the order of the program, with its costs and its place among them."""
    times = state.steps[0].times_of[0]
    costs = times.costs[ONLY if ONLY in times.costs else FIRST]
    first = 0
    for block in costs.graph.blocks:
        for repetition in range(block.repeat):
            for position, node in enumerate(block.repetition(repetition)):
                yield node, costs, first + position
        first += len(block.nodes)


def node_executions(costs: Costs, phase: str, step: Step) -> Iterator[tuple[Node, int, float, float]]:
    """Every execution of a phase's nodes: (node with its own path, its place among stored nodes, start, end in us)."""
    chosen = select_nodes(costs, phase)
    if not len(chosen):
        return
    placed = place_phase(costs, phase, step.plan, step.device)
    host = costs.host_us if step.device.synchronous else np.zeros(len(costs.nodes))
    run = _repetitions(costs, chosen)
    for at, start, end in zip(placed.node.tolist(), placed.start_us.tolist(), placed.end_us.tolist(), strict=True):
        index = int(chosen[at])
        yield next(run[at]), index, start + float(host[index]), end


def _repetitions(costs: Costs, stored: np.ndarray) -> list[Iterator[Node]]:
    """The nodes that each chosen stored node stands for, repetition by repetition."""
    first = np.concatenate([[0], np.cumsum([len(block.nodes) for block in costs.graph.blocks])])

    def repetitions(index: int) -> Iterator[Node]:
        block = costs.graph.blocks[int(costs.block[index])]
        position = index - int(first[int(costs.block[index])])
        alone = replace(block, nodes=(block.nodes[position],), uneven={})
        for repetition in range(block.repeat):
            yield from alone.repetition(repetition)

    return [repetitions(index) for index in stored.tolist()]


def tracks(state: State) -> tuple[list[RankTrack], list[TrackFlow]]:
    """A track for each stage with its tasks, the nodes inside the first of them, its optimizer and its memory.

    Of a workload of several kinds of step the first is shown.
    """
    step = state.steps[0]

    @cache
    def nodes(stage: int, chunk: int, kind: int) -> tuple[TrackSpan, ...]:
        phase = "forward" if kind == FORWARD else "backward"
        return () if kind == WEIGHT else phase_spans(step, stage, chunk, phase, MIDDLE)

    @cache
    def ends(stage: int, chunk: int, kind: int) -> tuple[TrackSpan, ...]:
        phase, variant = ("forward", FIRST) if kind == FORWARD else ("backward", LAST)
        return () if kind == WEIGHT else phase_spans(step, stage, chunk, phase, variant)

    p = step.plan.parallel
    folded = {name: n for name, n in (("data", step.plan.dp), ("context", p.cp), ("tensor", p.tp)) if n > 1}
    stage_tracks, flows = pipeline_tracks(step.pipeline, nodes, folded, ends=ends)
    held = memory_over_time(step.pipeline, *memory_parts(state))
    end = step.pipeline.makespan_us
    return [
        replace(track, spans=[*track.spans, *optimizer_spans(step, stage, end)], memory=held[stage])
        for stage, track in enumerate(stage_tracks)
    ], flows


def memory_parts(state: State) -> tuple[list[float], list[list[float]]]:
    """GiB that each stage always holds, and GiB that a micro-batch keeps in each of its chunks."""
    step = state.steps[0]
    static = [m.weights_gib + m.gradients_gib + m.optimizer_gib + m.other_gib for m in state.memories]
    return static, [[step.saved_gib[chunk] for chunk in step.parts(s)] for s in range(step.orders.stages)]


def optimizer_spans(step: Step, stage: int, start_us: float) -> list[TrackSpan]:
    """The optimizer's nodes of a stage, after the pipeline."""
    spans: list[TrackSpan] = []
    for position in range(len(step.parts(stage))):
        chunk_spans = phase_spans(step, stage, position, "optimizer", LAST)
        spans += [replace(span, start_us=span.start_us + start_us) for span in chunk_spans]
        start_us += max((span.start_us + span.duration_us for span in chunk_spans), default=0.0)
    return spans


def phase_spans(step: Step, stage: int, position: int, phase: str, variant: tuple[bool, bool]) -> tuple[TrackSpan, ...]:
    """The nodes of one phase of a chunk, from its start, in a variant of the micro-batch."""
    times = step.times_of[step.parts(stage)[position]]
    costs = times.costs[ONLY if ONLY in times.costs else variant]
    return tuple(
        _span(costs, index, node, start, end) for node, index, start, end in node_executions(costs, phase, step)
    )


def _span(costs: Costs, index: int, node: Node, start: float, end: float) -> TrackSpan:
    args: dict[str, Any] = {"path": node.path, "phase": node.phase, "engine": str(costs.engine[index])}
    if node.op is not None:
        args |= {key: value for key, value in node.op.to_dict().items() if key != "kind"}
    name = node.op.kind if node.op else node.source
    return TrackSpan(name, start, end - start, node.stream, node.group or node.phase, args)
