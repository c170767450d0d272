"""What the page of a step on a cluster shows, taken from the step's state."""

from __future__ import annotations

from ..engines import Engine
from ..engines.flow import flow_engine
from ..network.timeline_sharing import SharedTimeline
from ..report.answer import InferenceReport, StepReport
from ..step.state import Step
from ..timing.phases import select_nodes
from .cluster import ClusterView
from .layers import layered_timeline


def view(report: StepReport | InferenceReport, engine: Engine | None = None) -> ClusterView | None:
    """What the page of a step shows of its pipeline, communication, stages, memory, and of the links of ``engine``.

    None for one device.
    """
    state = report.state
    if state is None or state.plan.cluster.devices == 1:
        return None
    svg = links_picture(state.main.shared, engine)
    if not isinstance(report, StepReport):
        return ClusterView(links=report.network, links_svg=svg)
    step = state.steps[0]
    hidden: dict[str, float] = {}
    for execution in step.executions(step.busiest):
        for group, time_us in execution.time.hidden_us.items():
            hidden[group] = hidden.get(group, 0.0) + time_us * execution.times * 1e-6
    return ClusterView(
        pipeline=step.pipeline,
        exchanges=exchanges(step),
        layers=layered_timeline(step) if step.orders.stages > 1 else None,
        exposed_s=report.breakdown.by_parallelism,
        hidden_s=hidden,
        stages=report.stages,
        memory_gib=[memory.by_class for memory in state.memories],
        limit_gib=step.device.memory_gib,
        links=report.network,
        links_svg=svg,
    )


def exchanges(step: Step) -> list[tuple[str, str, float, float]]:
    """What the busiest stage's device exchanges: (process group, slowest kind of link, operations, seconds)."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for execution in step.executions(step.busiest):
        costs = execution.costs
        for at in select_nodes(costs, execution.phase).tolist():
            op = costs.nodes[at].op
            if op is None or not costs.nodes[at].group or "link" not in (fields := op.to_dict()):
                continue
            key = costs.nodes[at].group, str(fields["link"])
            times = float(costs.repeats[at]) * execution.times
            count, seconds = sums.get(key, (0.0, 0.0))
            sums[key] = count + times, seconds + times * float(costs.kernel_us[at]) * 1e-6
    return sorted(((*key, *value) for key, value in sums.items()), key=lambda row: -row[3])


def links_picture(shared: SharedTimeline | None, engine: Engine | None) -> str:
    """The fabric coloured by load as SVG; nothing where no links were simulated."""
    from ..network.picture import draw_svg

    flows = flow_engine(engine) if engine is not None else None
    if flows is None or shared is None:
        return ""
    return draw_svg(flows.topology, shared.load(), "share of each link that the step uses")
