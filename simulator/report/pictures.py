"""A step on a cluster as pictures and as a timeline for other tools: what a report shows beside its figures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from ..engines import Engine
from ..formats.tracks import Flow, RankTrack, TrackSpan, memory_over_time, pipeline_tracks
from ..html.cluster import ClusterView
from ..network.together import Shared
from ..timing.costs import Costs
from ..timing.phases import FIRST, LAST, MIDDLE, ONLY, place_phase, selected
from ..timing.schedule.orders import FORWARD, WEIGHT
from .answer import InferenceReport, StepReport
from .training import ClusterStep, executions, held_by


def cluster_view(step: ClusterStep, report: StepReport, engine: Engine | None = None) -> ClusterView:
    """What the page of a step shows of its pipeline, communication, stages, memory, and of the links of ``engine``."""
    hidden: dict[str, float] = {}
    for each in executions(step, step.busiest):
        for group, us in each.time.hidden_us.items():
            hidden[group] = hidden.get(group, 0.0) + us * each.times * 1e-6
    return ClusterView(
        pipeline=step.pipeline,
        exposed_s=report.breakdown.by_parallelism,
        hidden_s=hidden,
        stages=report.stages,
        memory_gib=[memory.by_class for memory in step.memories],
        limit_gib=step.device.memory_gib,
        links=report.network,
        links_svg=links_picture(step.shared, engine),
    )


def links_view(report: StepReport | InferenceReport, engine: Engine) -> ClusterView:
    """What the page of any step shows of links, where they were simulated."""
    return ClusterView(links=report.network, links_svg=links_picture(report.shared, engine))


def links_picture(shared: Shared | None, engine: Engine | None) -> str:
    """The fabric coloured by load as SVG; nothing where no links were simulated."""
    from ..engines.flow import flow_engine
    from ..network.picture import svg

    flows = flow_engine(engine) if engine is not None else None
    if flows is None or shared is None:
        return ""
    return svg(flows.topology, shared.load(), "share of each link that the step uses")


def cluster_tracks(step: ClusterStep) -> tuple[list[RankTrack], list[Flow]]:
    """A track for each stage with its tasks, the nodes inside the first of them, its optimizer and its memory."""

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
    tracks, flows = pipeline_tracks(step.pipeline, nodes, folded, ends=ends)
    held = memory_over_time(step.pipeline, *memory_parts(step))
    end = step.pipeline.makespan_us
    return [
        replace(track, spans=[*track.spans, *optimizer_spans(step, stage, end)], memory=held[stage])
        for stage, track in enumerate(tracks)
    ], flows


def memory_parts(step: ClusterStep) -> tuple[list[float], list[list[float]]]:
    """GiB that each stage always holds, and GiB that a micro-batch keeps in each of its chunks."""
    static = [m.weights_gib + m.gradients_gib + m.optimizer_gib + m.other_gib for m in step.memories]
    saved = [[step.saved_gib[id(chunk.graph)] for chunk in held_by(step, s)] for s in range(step.orders.stages)]
    return static, saved


def optimizer_spans(step: ClusterStep, stage: int, start_us: float) -> list[TrackSpan]:
    """The optimizer's nodes of a stage, after the pipeline."""
    spans: list[TrackSpan] = []
    for position in range(len(held_by(step, stage))):
        found = phase_spans(step, stage, position, "optimizer", LAST)
        spans += [replace(span, start_us=span.start_us + start_us) for span in found]
        start_us += max((span.start_us + span.duration_us for span in found), default=0.0)
    return spans


def phase_spans(
    step: ClusterStep, stage: int, position: int, phase: str, variant: tuple[bool, bool]
) -> tuple[TrackSpan, ...]:
    """The nodes of one phase of a chunk, from its start, in a variant of the micro-batch."""
    chunk = held_by(step, stage)[position]
    times = step.times[id(chunk.graph)]
    costs = times.costs[ONLY if ONLY in times.costs else variant]
    placed = place_phase(costs, phase, step.plan, step.device)
    chosen = selected(costs, phase).tolist()
    executed = zip(placed.node.tolist(), placed.start_us.tolist(), placed.end_us.tolist(), strict=True)
    return tuple(_span(costs, chosen[at], start, end) for at, start, end in executed)


def _span(costs: Costs, index: int, start: float, end: float) -> TrackSpan:
    node = costs.nodes[index]
    args: dict[str, Any] = {"path": node.path, "phase": node.phase, "engine": str(costs.engine[index])}
    if node.op is not None:
        args |= {key: value for key, value in node.op.to_dict().items() if key != "kind"}
    name = node.op.kind if node.op else node.source
    return TrackSpan(name, start, end - start, node.stream, node.group or node.phase, args)
