"""What faults of links do to a step: its communication timed anew, everything else as it was found.

RAPID-LLM (arXiv 2512.19606, fig. 10) draws the same: faults at random positions, the distribution of the slowdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..datasets.ops import KINDS, Op, iterate_groups
from .cluster_report import ClusterStep, by_node, executions, step_us
from .costs import Costs
from .engines import Engine, FusedEngine
from .engines.flow import FAMILIES, FlowEngine
from .network.faults import Fault, draw, drawing
from .network.picture import hot_links
from .network.study import Study
from .network.topology import TopologyError
from .placement import Sends, place_tasks, retime, send_times
from .report import InferenceReport, StepReport

HOT = 10  # links that a report names
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass
class Degraded:
    """A step that was simulated with an engine of flows, ready to be timed with other faults."""

    step: ClusterStep
    engine: FusedEngine

    @cached_property
    def flows(self) -> FlowEngine:
        """The engine of flows behind the step. TopologyError without one."""
        found = flow_engine(self.engine)
        if found is None:
            raise TopologyError("faults of links need network=flow or packet")
        return found

    @cached_property
    def ops(self) -> list[Op]:
        """Every distinct op that communicates."""
        costs = [each for times in self.step.times.values() for each in times.costs.values()]
        asked = (node.op for each in costs for node in each.nodes if node.op is not None)
        return list(dict.fromkeys(op for op in asked if _communicates(op)))

    @cached_property
    def _usual(self) -> tuple[np.ndarray, Sends]:
        return stretches(self.flows, self.ops), self._sends(self.engine)

    @cached_property
    def _memo(self) -> dict[bytes, float]:
        return {}

    def step_us(self, faults: Sequence[Fault]) -> float:
        """The step with these faults beside those of the engine, us; infinite when ranks are cut off."""
        stretch, usual = self._usual
        try:
            flows = self.flows.with_faults((*self.flows.faults, *faults))
            factors = stretches(flows, self.ops) / stretch
            sends = self._sends(FusedEngine([flows if each is self.flows else each for each in self.engine.engines]))
        except TopologyError as error:
            if "partition" not in str(error):
                raise
            return np.inf
        key = factors.tobytes() + sends.onward_us.tobytes()
        if key not in self._memo:
            self._memo[key] = self._timed(
                dict(zip(self.ops, factors.tolist(), strict=True)), self.step.sends.scaled(usual, sends)
            )
        return self._memo[key]

    def _sends(self, engine: Engine) -> Sends:
        return send_times(self.step.orders, tuple(self.step.chunks), self.step.plan, engine)

    def _timed(self, factors: Mapping[Op, float], sends: Sends) -> float:
        step = self.step
        times = {}
        for which, each in step.times.items():
            made = {id(costs): stretched(costs, factors) for costs in each.costs.values()}
            costs = {variant: made[id(costs)] for variant, costs in each.costs.items()}
            times[which] = retime(each, costs, step.plan, step.device)
        pipeline = place_tasks(step.orders, tuple(step.chunks), times, step.plan, sends)
        return step_us(replace(step, times=times, pipeline=pipeline, sends=sends))


def network_report(
    report: StepReport | InferenceReport, engine: FusedEngine, faults_study: Mapping[str, Any]
) -> dict[str, Any]:
    """What a report says of links: how they were simulated, faults, the fullest ones of a training step, the study."""
    flows = flow_engine(engine)
    if flows is None:
        return {}
    found: dict[str, Any] = {"fidelity": flows.fidelity, "topology": flows.topology.name, "links": flows.topology.links}
    if flows.faults:
        found["faults"] = [asdict(fault) for fault in flows.faults]
    placed = getattr(report, "placed", None)
    if isinstance(placed, ClusterStep):
        load = link_loads(placed, flows)
        fullest = hot_links(flows.topology, load, HOT)
        found["hot_links"] = [{"link": name, "busy": share} for name, share in fullest if share > 0]
        kinds = np.array(flows.topology.kind)
        found["busy"] = {
            kind: {"mean": load[kinds == kind].mean(), "max": load[kinds == kind].max()} for kind in set(kinds.tolist())
        }
        if faults_study:
            found["faults_study"] = to_dict(study(placed, engine, faults_study))
    return found


def flow_engine(engine: Engine) -> FlowEngine | None:
    """The engine of flows among others."""
    engines = engine.engines if isinstance(engine, FusedEngine) else [engine]
    return next((each for each in engines if isinstance(each, FlowEngine)), None)


def stretches(flows: FlowEngine, ops: Sequence[Op]) -> np.ndarray:
    """How many times longer each op takes than on a fabric that never blocks [ops]."""
    found = np.ones(len(ops))
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        found[positions] = flows.stretch(kind, columns, out_dtype if kind == "ep_combine" else dtype)
    return found


def stretched(costs: Costs, factors: Mapping[Op, float]) -> Costs:
    """The costs with communication so many times longer; the very same where nothing changes."""
    factor = np.array([1.0 if node.op is None else factors.get(node.op, 1.0) for node in costs.nodes])
    return costs if (factor == 1.0).all() else replace(costs, kernel_us=costs.kernel_us * factor)


def study(step: ClusterStep, engine: FusedEngine, settings: Mapping[str, Any]) -> Study:
    """Step times over random places of faults: ``{samples, count, seed, kinds}`` and the figures of a fault.

    Without figures each fault halves its link's bandwidth. TopologyError for a setting that is not there.
    """
    samples, count, seed, like, kinds = drawing(settings, "faults_study")
    degraded = Degraded(step, engine)
    seeds = np.random.SeedSequence(seed).generate_state(samples)
    topology = degraded.flows.topology
    drawn = [draw(topology, count, like, int(each), kinds) for each in seeds]
    times = np.array([degraded.step_us(faults) for faults in drawn], dtype=np.float64)
    return Study(step_us(step), tuple(tuple(fault.where for fault in faults) for faults in drawn), times)


def to_dict(found: Study) -> dict[str, Any]:
    """A study as plain values: quantiles of the slowdown, the most critical links, how many samples fell apart."""
    slowdown = {f"p{round(100 * q):02d}": value for q, value in found.quantiles(QUANTILES).items()}
    slowdown["max"] = slowdown.pop("p100")
    return {**found.to_dict(), "slowdown": slowdown}


def link_loads(step: ClusterStep, flows: FlowEngine) -> np.ndarray:
    """Share of each link's capacity that the step's collectives and sends use [links]."""
    carried = np.zeros(flows.topology.links)
    for stage in range(step.orders.stages):
        devices = step.plan.stage_devices(stage)
        counts: dict[Op, int] = {}
        for each in by_node(list(executions(step, stage))):
            if each.node.op is not None and _communicates(each.node.op):
                counts[each.node.op] = counts.get(each.node.op, 0) + each.times
        for op, times in counts.items():
            carried += times * flows.load(op, devices)
    carried += _sent(step, flows)
    return carried / (flows.topology.bandwidth_gbps * 1e3 * step_us(step))


def _sent(step: ClusterStep, flows: FlowEngine) -> np.ndarray:
    """Bytes on each link of what stages send to each other, there and back [links]."""
    carried = np.zeros(flows.topology.links)
    batches = step.orders.micro_batches / len(step.orders.routes)
    for route in step.orders.routes[:, :, 0].tolist():
        for chunk, stage, other in zip(step.chunks, route, route[1:], strict=False):
            if chunk.send_bytes and stage != other:
                here, there = step.plan.stage_devices(stage), step.plan.stage_devices(other)
                carried += chunk.send_bytes * batches * flows.sends(here, there)
    return carried


def _communicates(op: Op) -> bool:
    return KINDS[op.kind].family in FAMILIES
